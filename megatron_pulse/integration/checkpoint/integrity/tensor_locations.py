"""Index of a checkpoint: the file and the offset of each object and tensor part.

The index is trusted no further than its folder. Its entries are compared with the existing files,
so that no other file of the machine is read as weights, and no read can block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_pulse.errors import Faults, first_of
from megatron_pulse.files import open_regular
from megatron_pulse.integration.checkpoint.integrity.hashes import INDEX, FileHash
from megatron_pulse.integration.checkpoint.safe_unpickling import load_index
from megatron_pulse.paths import is_file_name

Places = Mapping[MetadataIndex, _StorageInfo]
"""File, first byte and number of bytes of each object and each part of a tensor."""


def read_places(folder: Path, hashes: Mapping[str, FileHash] | None) -> Places:
    """Read the index.

    Raises Faults if the index cannot be read, or names places outside the checkpoint. Its files are
    those in ``folder``, restricted to those with ``hashes`` if there are any.
    """
    try:
        with open_regular(folder / INDEX) as file:
            index = load_index(file)
    except (OSError, UnpicklingError) as error:
        raise Faults([f"{INDEX}: {error}"]) from error
    places = index.storage_data if isinstance(index, Metadata) else None
    if not isinstance(places, dict):
        raise Faults([f"{INDEX}: has no entries of tensor locations"])
    if faults := first_of(_faults(folder, hashes, places)):
        raise Faults(faults)
    return places


def _faults(
    folder: Path, hashes: Mapping[str, FileHash] | None, places: Mapping[Any, Any]
) -> Iterator[str]:
    sizes: dict[str, int | None] = {}
    for of, place in places.items():
        if not isinstance(of, MetadataIndex) or not isinstance(place, _StorageInfo):
            yield f"{INDEX}: has an entry that is no tensor location"
            continue
        what, name = f"{INDEX}: {str(of.fqn)[:100]!r}", place.relative_path
        if not is_file_name(name):
            yield f"{what} is in {str(name)[:100]!r}, which is no file name in the folder"
            continue
        if name not in sizes:
            sizes[name] = _size(folder / name, name, hashes)
        size = sizes[name]
        if size is None:
            known = "regular file" if hashes is None else "file that was saved"
            yield f"{what} is in {name[:100]}, which is no {known}"
        elif not _is_part(place.offset, place.length, size):
            yield (
                f"{what} has {str(place.length)[:40]} bytes from {str(place.offset)[:40]} on, "
                f"outside of {name} with {size:,} bytes"
            )
        elif place.transform_descriptors:
            yield f"{what} is stored in another form than Megatron's"


def _size(path: Path, name: str, hashes: Mapping[str, FileHash] | None) -> int | None:
    """Size of a checkpoint's file in bytes; None for any other path."""
    if hashes is not None and name not in hashes:
        return None
    return path.stat().st_size if path.is_file() else None


def _is_part(first: Any, num_bytes: Any, size: int) -> bool:
    whole = type(first) is int and type(num_bytes) is int
    return whole and 0 <= first and 0 <= num_bytes <= size - first
