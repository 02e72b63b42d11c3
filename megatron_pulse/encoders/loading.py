"""Weights that come from a folder as a whole, or not at all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from megatron_pulse.backbone.published import PublishedError
from megatron_pulse.backbone.torch_files import is_plain_archive
from megatron_pulse.diffusion.published import StoredTensors, read_folder, read_index
from megatron_pulse.faults import UserError
from megatron_pulse.named_files import no_file

STEMS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
"""Of the names of files with weights, by library."""
_NAMED = 3
_NUMBER = re.compile(r"\.\d+(?=\.)")


def files_amiss(folder: Path) -> list[str]:
    """A fault for each file of a component's folder that no library is to be given: pipes and
    devices, which would keep it waiting for ever, links to nothing, indexes of weights that name
    files elsewhere, and weights that would take any amount of memory."""
    faults: list[str] = []
    for path in sorted(path for path in folder.glob("*") if not path.is_dir()):
        if fault := no_file(path):
            faults.append(fault)
            continue
        try:
            if ".index" in path.suffixes:
                read_index(path)
            elif path.suffix == ".safetensors":
                StoredTensors([path])
            elif path.suffix == ".bin":
                is_plain_archive(path)
        except PublishedError as error:
            of = "" if path.suffix == ".safetensors" else f"{path.name}: "
            faults += [f"{of}{fault}" for fault in error.faults]
        except (OSError, ValueError) as error:
            faults.append(f"{path.name}: {error}")
    return faults


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
