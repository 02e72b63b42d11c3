"""Weights that come from a folder as a whole, or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from megatron_pulse.backbone.published import PublishedError
from megatron_pulse.diffusion.published import StoredTensors, read_folder, read_index
from megatron_pulse.faults import UserError, collecting, told
from megatron_pulse.files import open_regular
from megatron_pulse.torch_files import is_archive, require_stored

STEMS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
"""Of the names of files with weights, by library."""
_PICKLED = {"transformers": "pytorch_model", "diffusers": "diffusion_pytorch_model"}
"""Of the names of files that torch.save wrote, in folders without safetensors."""
_NAMED = 3
_NUMBER = re.compile(r"\.\d+(?=\.)")


@contextmanager
def silently(logs: Any) -> Iterator[None]:
    """Within, ``logs`` (transformers' or diffusers' ``utils.logging``) says errors only."""
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(before)


def require_all(missing: Collection[str]) -> None:
    """Raise UserError for tensors that the files lack: the libraries would draw them at random,
    other ones in every process."""
    if missing:
        raise UserError(f"its weights lack {_some(missing)}: fetch them anew")


def require_plain(folder: Path, library: str) -> None:
    """Raise UserError where ``library`` would wait for the weights of ``folder``, read them outside
    of it, or in any amount of memory."""
    faults: list[str] = []
    for name in (f"{STEMS[library]}.safetensors", f"{_PICKLED[library]}.bin"):
        paths = [folder / name]
        if os.path.lexists(index := folder / f"{name}.index.json"):
            with collecting(faults):
                paths += [folder / part for part in sorted(set(read_index(index).values()))]
        for path in filter(os.path.lexists, paths):
            try:
                if path.suffix == ".safetensors":
                    StoredTensors([path])
                    continue
                with open_regular(path) as file:
                    if is_archive(file):
                        require_stored(file)
            except PublishedError as error:
                faults += error.faults
            except (OSError, ValueError) as error:
                faults.append(f"{path.name}: {error}")
    if faults:
        raise UserError(told("its weights cannot be read", faults))


def require_layers(folder: Path, library: str, model: nn.Module) -> None:
    """Raise UserError where the weights of ``folder`` have fewer or more layers than ``model``,
    which is made of its configuration, or others in size: the libraries leave out what is beyond.

    Heads of files are read and no weights. Names are compared from ``encoder.`` or ``decoder.`` on,
    as files of some versions have a word before; those of no layer, and files in other formats than
    safetensors, are left to the library.
    """
    try:
        tensors = read_folder(folder, stem=STEMS[library])
    except PublishedError:
        return
    there = {_inner(name): tensors.kind_of(name)[0] for name in tensors}
    wanted = {_inner(name): tuple(value.shape) for name, value in model.state_dict().items()}
    lacking, beyond = _like(wanted, there), _like(there, wanted)
    if lacking or beyond:
        said = [f"lack {_some(lacking)} that its config.json asks for"] if lacking else []
        said += (
            [f"have {_some(beyond)} of layers that its config.json leaves out"] if beyond else []
        )
        raise UserError(f"its weights {' and '.join(said)}: they are of two models")
    for name in sorted(wanted.keys() & there.keys()):
        if wanted[name] != there[name]:
            has, says = ("x".join(map(str, each)) for each in (there[name], wanted[name]))
            raise UserError(
                f"{name} of its weights is {has}, its config.json says {says}: they are of two "
                "models"
            )


def _some(names: Collection[str]) -> str:
    named = ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} tensors ({named})"


def _inner(name: str) -> str:
    found = re.search(r"(?:^|\.)((?:en|de)coder\..*)", name)
    return found[1] if found else name


def _like(names: Collection[str], others: Collection[str]) -> list[str]:
    """Those of ``names`` that are not in ``others``, which has them of other layers."""
    known = {_NUMBER.sub(".", other) for other in others}
    return [name for name in names if name not in others and _NUMBER.sub(".", name) in known]
