"""Loading of weights from a folder, complete or with an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_pulse.backbone.published_weights import PublishedError, names_on_load
from megatron_pulse.backbone.torch_archive_checks import is_plain_archive
from megatron_pulse.diffusion.published import StoredTensors, names_in, read_folder, read_index
from megatron_pulse.diffusion.single_file_refusal import original_faults
from megatron_pulse.errors import UserError
from megatron_pulse.paths import no_file

_NAMED = 3
_NUMBER = re.compile(r"\.\d+(?=\.)")


def files_amiss(folder: Path) -> list[str]:
    """Faults for the files of a component's folder that are unsafe to hand to a library.

    Such are pipes and devices (which block), dangling links, indexes that name files elsewhere, and
    headers that would exhaust memory. A file in place of the folder is a fault too.
    """
    if folder.is_file():
        told = original_faults(folder, names_in(folder))
        return told or [f"{folder.name} is a file. Give the folder of the component"]
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
    """Restrict ``logs`` (transformers' or diffusers' ``utils.logging``) to errors within
    the block."""
    before = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(before)


def require_all(missing: Collection[str]) -> None:
    """Raise UserError for tensors missing from the files.

    The libraries would initialise them at random, differently in every process.
    """
    if missing:
        raise UserError(f"its weights lack {_some(missing)}. Download them again")


def stored(folder: Path, library: str, needed: bool) -> StoredTensors | None:
    """Tensors of a component.

    Unless ``needed``, unreadable tensors give None; ``weight_faults`` reports them.
    """
    try:
        return read_folder(folder, library=library)
    except PublishedError:
        if needed:
            raise
        return None


def load(model: nn.Module, tensors: StoredTensors, dtype: torch.dtype) -> None:
    """Load the stored ``tensors`` in ``dtype`` into ``model``, a diffusers model on the meta
    device.

    Raises UserError for missing tensors.
    """
    names = names_on_load(model, tensors)
    wanted = model.state_dict()
    require_all(wanted.keys() - names.keys())
    model.load_state_dict({name: tensors[names[name]].to(dtype) for name in wanted}, assign=True)


def require_layers(tensors: StoredTensors | None, model: nn.Module) -> None:
    """Raise UserError if stored ``tensors`` have missing, extra or differently sized layers.

    ``model`` is built from the configuration; the libraries would silently ignore extra layers. No
    weights are read, and nothing is compared without tensors. Names are compared from ``encoder.``
    or ``decoder.`` on, since files of some versions have a prefix. Names outside layers are left to
    the library.
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
        said = [f"lack {_some(lacking)} of its config.json"] if lacking else []
        said += [f"have {_some(beyond)} beyond the layers of its config.json"] if beyond else []
        raise UserError(
            f"its weights {' and '.join(said)}: config and weights are of different models"
        )
    for name in sorted(wanted.keys() & there.keys()):
        if wanted[name] != there[name]:
            has, says = ("x".join(map(str, each)) for each in (there[name], wanted[name]))
            raise UserError(
                f"{name} of its weights is {has}, but its config.json says {says}: config and "
                "weights are of different models"
            )


def _some(names: Collection[str]) -> str:
    named = ", ".join(sorted(names)[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} tensors ({named})"


def _inner(name: str) -> str:
    found = re.search(r"(?:^|\.)((?:en|de)coder\..*)", name)
    return found[1] if found else name


def _like(names: Collection[str], others: Collection[str]) -> list[str]:
    """Names missing from ``others`` although other layers there have the same name."""
    known = {_NUMBER.sub(".", other) for other in others}
    return [name for name in names if name not in others and _NUMBER.sub(".", name) in known]
