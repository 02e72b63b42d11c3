"""Weights that come from a folder as a whole, or not at all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_pulse.backbone.published import PublishedError, names_on_load
from megatron_pulse.backbone.torch_files import is_plain_archive
from megatron_pulse.diffusion.originals import original_faults
from megatron_pulse.diffusion.published import StoredTensors, names_in, read_folder, read_index
from megatron_pulse.faults import UserError
from megatron_pulse.named_files import no_file

_NAMED = 3
_NUMBER = re.compile(r"\.\d+(?=\.)")


def files_amiss(folder: Path) -> list[str]:
    """A fault for each file of a component's folder that no library is to be given: pipes and
    devices, which would keep it waiting for ever, links to nothing, indexes of weights that name
    files elsewhere, and weights that would take any amount of memory. A file in the folder's place
    is a fault too."""
    if folder.is_file():
        told = original_faults(folder, names_in(folder))
        return told or [f"{folder.name} is a file: give the folder of the component"]
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


def stored(folder: Path, library: str, needed: bool) -> StoredTensors | None:
    """The tensors of a component; unless they are ``needed``, None where they cannot be read,
    which ``weight_faults`` tells."""
    try:
        return read_folder(folder, library=library)
    except PublishedError:
        if needed:
            raise
        return None


def load(model: nn.Module, tensors: StoredTensors, dtype: torch.dtype) -> None:
    """Give ``model``, which is one of diffusers' without memory, the stored ``tensors`` in
    ``dtype``. Raises UserError for what they lack."""
    names = names_on_load(model, tensors)
    wanted = model.state_dict()
    require_all(wanted.keys() - names.keys())
    model.load_state_dict({name: tensors[names[name]].to(dtype) for name in wanted}, assign=True)


def require_layers(tensors: StoredTensors | None, model: nn.Module) -> None:
    """Raise UserError where stored ``tensors`` have fewer or more layers than ``model``, which is
    made of its configuration, or others in size: the libraries leave out what is beyond.

    No weights are read, and nothing is compared where there are none. Names are compared from
    ``encoder.`` or ``decoder.`` on, as files of some versions have a word before; those of no layer
    are left to the library.
    """
    if tensors is None:
        return
    there = {
        _inner(name): tensors.kind_of(stored)[0]
        for name, stored in names_on_load(model, tensors).items()
    }
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
