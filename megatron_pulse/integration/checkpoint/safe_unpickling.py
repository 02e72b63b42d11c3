"""Safe reading of a checkpoint's pickles: no foreign code runs, and memory is bounded by file size.

The ``.metadata`` is a pickle, and so are objects in the ``.distcp`` files (flags, random states).
Torch alone reads both with any class or function that they name, and with any memory that they ask
for.
"""

from __future__ import annotations

import functools
import io
import mmap
import pickle
import re
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_pulse.backbone.torch_archive_checks import FilePart, is_archive, require_stored

_KNOWN = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
}
"""Names in the ``.metadata`` of a checkpoint, beside torch's dtypes."""


_OPERATIONS = re.compile(
    rb"(?s:(?:[()NRabestu}\]\x81\x85-\x89\x93\x94]|[hK].|M..|[Jj]....|G.{8})*+)"
)
"""Pickle operations of an index that have no argument, or an argument of fixed length.

Operations that store into the memo at a named place are excluded, because a large place allocates
memory up to there. Since protocol 4 (Python 3.8) the next place is used.
"""
_LENGTHS = {0x8A: 1, 0x8C: 1, ord("X"): 4}
"""Number of bytes that hold the length of a whole number or a text, by operation."""
_PROTOCOL, _FRAME, _STOP = 0x80, 0x95, ord(".")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not allowed in a checkpoint"
        )


def load_index(file: IO[bytes]) -> Any:
    """Content of an opened ``.metadata``; raises UnpicklingError if it is not valid."""
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _require_operations(content)
        return _IndexUnpickler(file).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # of many kinds, for operations that do not fit each other
        raise pickle.UnpicklingError(
            f"it is not a checkpoint index: {error or type(error).__name__}"
        ) from error


def _require_operations(content: mmap.mmap) -> None:
    """Raise UnpicklingError for an operation that an index does not need."""
    at, size = 0, len(content)
    while at < size:
        operation = content[at]
        if operation == _STOP and at + 1 == size:
            return
        if operation == _PROTOCOL:
            at += 2
        elif operation == _FRAME:
            at += 9
            if int.from_bytes(content[at - 8 : at], "little") > size - at:
                break
        elif operation in _LENGTHS:
            first = at + 1 + _LENGTHS[operation]
            at = first + int.from_bytes(content[at + 1 : first], "little")
        elif (found := _OPERATIONS.match(content, at)) and found.end() > at:
            at = found.end()
        else:
            raise pickle.UnpicklingError(
                "it has a pickle operation that is not allowed in a checkpoint: "
                f"{operation:#04x}, at byte {at:,}"
            )
    raise pickle.UnpicklingError("it is truncated, or has data after its end")


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Put a loaded object in its place; Megatron registers the classes of a run's objects."""
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


def _stored_part(self: Any, file: IO[bytes], place: Any) -> IO[bytes]:
    """Part of a ``.distcp`` file that holds an object or a tensor."""
    part = FilePart(file, place.offset, place.length)
    if not is_archive(part):
        raise ValueError("its contents were not written by torch.save")
    require_stored(part)
    stored: IO[bytes] = _slice_file(self, file, place)
    return stored


_slice_file = filesystem.FileSystemReader._slice_file


@functools.cache
def patch_reading() -> None:
    """Replace torch's readers of checkpoints by those of this module, once per process."""
    filesystem.pickle = SimpleNamespace(load=load_index, dump=pickle.dump)
    filesystem.FileSystemReader._slice_file = _stored_part
    DefaultLoadPlanner.load_bytes = _load_bytes
