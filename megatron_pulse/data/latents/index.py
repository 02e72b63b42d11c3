"""Index of latent stores of several shapes, each in a folder of its own below the index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from megatron_pulse.data.dataset import DataError, Size
from megatron_pulse.errors import Faults, faults_in
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.json_validation import Some, Text, validated
from megatron_pulse.paths import is_file_name

INDEX = "buckets.json"
FORMAT = 1
_REMEDY = "Give the 'pulse data write-latents' command again, which writes it, or another folder."


class Store(TypedDict):
    """Store of one shape: its folder below the index, and the pixels of its pictures."""

    folder: Text
    pixels: Annotated[tuple[Size, Size], "[height, width]"]


class _File(TypedDict):
    format: int
    stores: Some[Store]


def read_index(root: Path) -> list[Store]:
    """Stores of a folder with an index; raises DataError for a damaged one."""
    what = f"{INDEX} of latents {root}"
    try:
        found = validated(_File, read_json(root / INDEX, FileKind.STORES), complete=True)
    except (FileError, Faults) as error:
        raise DataError(what, faults_in(error), _REMEDY) from error
    stores = list(found["stores"])
    if faults := [
        f"{one['folder'][:60]!r} must be a folder below it"
        for one in stores
        if not is_file_name(one["folder"])
    ]:
        raise DataError(what, faults, _REMEDY)
    return stores


def stores_of(root: Path) -> list[Path]:
    """Folders of the stores of an index; empty without one."""
    if not (root / INDEX).is_file():
        return []
    return [root / store["folder"] for store in read_index(root)]


def write_index(root: Path, stores: Sequence[Store]) -> None:
    """Write the index, unless it is there; raises DataError if another one is."""
    if (root / INDEX).exists():
        if (there := read_index(root)) != list(stores):
            named = [", ".join(one["folder"] for one in each) for each in (there, stores)]
            fault = f"it has shapes {named[0]}, and now {named[1]} are to be written"
            raise DataError(f"latents {root}", [fault], "Give the same shapes, or a new folder.")
        return
    root.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "stores": list(stores)}
    write_with_checksum(root / INDEX, json.dumps(content, indent=1) + "\n")
