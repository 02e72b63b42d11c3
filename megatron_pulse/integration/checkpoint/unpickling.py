"""What torch reads of a checkpoint as pickles, read so that no code of theirs is run.

Its ``.metadata`` is a pickle, and so are objects in the ``.distcp`` files (flags, random states);
torch reads both with any class or function that they name.
"""

from __future__ import annotations

import functools
import io
import pickle
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed.checkpoint.filesystem as filesystem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

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
"""Of what the ``.metadata`` of a checkpoint is made, beside the types of tensors."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def load_index(file: IO[bytes]) -> Any:
    """The content of an opened ``.metadata``; raises UnpicklingError if it names anything else."""
    return _IndexUnpickler(file).load()


def _load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """Put an object in its place; Megatron registers the classes that those of a run may have."""
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded


@functools.cache
def patch_reading() -> None:
    """Make torch read checkpoints by these; once per process."""
    filesystem.pickle = SimpleNamespace(load=load_index, dump=pickle.dump)
    DefaultLoadPlanner.load_bytes = _load_bytes
