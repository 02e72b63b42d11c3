"""Writes and reads a folder of precomputed latents and conditioning, through memory maps."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError, DiffusionDataset
from megatron_pulse.data.latent_layout import (
    META,
    LatentLayout,
    LatentType,
    Meta,
    Shard,
    ShardFile,
)
from megatron_pulse.diffusion.files import replacing

__all__ = ["LatentFolder", "LatentLayout", "LatentType", "LatentWriter"]


class LatentWriter:
    """Appends samples to a folder, shard by shard; what is on disk is always whole shards.

    Opened again after an interruption it goes on after the last whole shard: ``num_written`` says
    how many samples to pass over. ``close`` writes the last, short shard and marks the folder
    complete; leaving a ``with`` block by an exception does not.
    """

    def __init__(self, root: str | Path, layout: LatentLayout) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._meta = Meta.load(self.root) if (self.root / META).exists() else Meta(layout)
        if self._meta.layout != layout:
            old, new = asdict(self._meta.layout), asdict(layout)
            faults = [f"{k}: there {old[k]!r}, now {new[k]!r}" for k in old if old[k] != new[k]]
            raise DataError(f"latents {root}", faults, "Resume with the same, or use a new folder.")
        self._pending: list[tuple[Tensor, int, Tensor | None]] = []

    @property
    def num_written(self) -> int:
        """Samples in whole shards on disk."""
        return self._meta.count

    @property
    def complete(self) -> bool:
        """Whether the folder was closed: there is nothing to add."""
        return self._meta.complete

    def add(self, latent: Tensor, label: int, context: Tensor | None = None) -> None:
        """Append a sample: ``latent`` of the layout's ``shape``, ``context`` if it has one."""
        layout, faults = self._meta.layout, []
        if self.complete:
            faults.append("the folder is complete")
        if tuple(latent.shape) != layout.shape:
            faults.append(f"latent has shape {tuple(latent.shape)}, not {layout.shape}")
        if (None if context is None else tuple(context.shape)) != layout.context_shape:
            found = None if context is None else tuple(context.shape)
            faults.append(f"context has shape {found}, not {layout.context_shape}")
        if not 0 <= label < layout.num_classes:
            faults.append(f"label {label} is not in 0..{layout.num_classes - 1}")
        if faults:
            sample = self.num_written + len(self._pending)
            raise DataError(f"latents {self.root}, sample {sample}", faults, "Nothing was added.")
        kept = None if context is None else context.detach().cpu().clone()
        self._pending.append((latent.detach().cpu().clone(), label, kept))
        if len(self._pending) == layout.shard_size:
            self._flush()

    def close(self) -> None:
        """Write what is left and mark the folder complete."""
        if self._pending:
            self._flush()
        self._meta.complete = True
        self._meta.save(self.root)

    def __enter__(self) -> LatentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _flush(self) -> None:
        latents, labels, contexts = zip(*self._pending, strict=True)
        columns = {"latent": latents, "label": [torch.tensor(label) for label in labels]}
        if self._meta.layout.context_shape is not None:
            columns["context"] = contexts
        files = {}
        for name, values in columns.items():
            path = self.root / f"{name}-{len(self._meta.shards):05d}.npy"
            with replacing(path) as beside:
                np.save(beside, self._encoded(name, torch.stack(list(values))))
                files[name] = ShardFile(path.name, beside.stat().st_size, _sha256(beside))
        self._meta.shards.append(Shard(len(self._pending), files))
        self._meta.save(self.root)
        self._pending = []

    def _encoded(self, name: str, values: Tensor) -> np.ndarray:
        if name == "label":
            return values.numpy()
        dtype = LatentType(self._meta.layout.dtype)
        values = values.to(getattr(torch, dtype))
        if dtype is LatentType.BFLOAT16:
            return values.view(torch.int16).numpy().view(np.uint16)
        return values.numpy()


class LatentFolder(DiffusionDataset):
    """Reads what a LatentWriter wrote.

    Every shard's files are compared with ``meta.json`` on opening, by size and header, and with
    ``verify`` by SHA-256 too; DataError lists all that is wrong. An unfinished folder is refused
    unless ``allow_incomplete``.
    """

    def __init__(
        self, root: str | Path, verify: bool = False, allow_incomplete: bool = False
    ) -> None:
        self.root = Path(root)
        meta = Meta.load(self.root)
        faults = [fault for shard in meta.shards for fault in self._faults(meta, shard, verify)]
        if not meta.complete and not allow_incomplete:
            faults.append(f"the folder is not finished: {meta.count} samples so far")
        if not meta.count:
            faults.append("the folder has no samples")
        if faults:
            raise DataError(
                f"latents {root}",
                faults,
                "Run the writer again to finish it, or delete the folder and write it anew.",
            )
        self.layout = meta.layout
        self.image_shape = meta.layout.shape
        self.context_shape = meta.layout.context_shape
        self.num_classes = meta.layout.num_classes
        self._shards = meta.shards
        self._ends = np.cumsum([shard.count for shard in meta.shards])
        self._maps: dict[tuple[str, int], np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def image(self, index: int, draw: int = 0) -> Tensor:
        return self._decoded("latent", index)

    def label(self, index: int) -> int:
        return int(self._row("label", index))

    def context(self, index: int) -> Tensor | None:
        return None if self.context_shape is None else self._decoded("context", index)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def _row(self, name: str, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        if (name, shard) not in self._maps:
            path = self.root / self._shards[shard].files[name].name
            self._maps[name, shard] = np.load(path, mmap_mode="r")
        return self._maps[name, shard][index - (self._ends[shard] - self._shards[shard].count)]

    def _decoded(self, name: str, index: int) -> Tensor:
        row = np.array(self._row(name, index))
        if LatentType(self.layout.dtype) is LatentType.BFLOAT16:
            return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16).float()
        return torch.from_numpy(row).float()

    def _faults(self, meta: Meta, shard: Shard, verify: bool) -> list[str]:
        faults = []
        for name, (shape, dtype) in meta.layout.fields().items():
            file = shard.files[name]
            path = self.root / file.name
            if not path.is_file():
                faults.append(f"{file.name} is missing")
            elif (size := path.stat().st_size) != file.num_bytes:
                faults.append(f"{file.name} has {size} bytes, not {file.num_bytes}")
            elif fault := _header_fault(path, (shard.count, *shape), dtype):
                faults.append(fault)
            elif verify and _sha256(path) != file.sha256:
                faults.append(f"{file.name} differs from what was written (SHA-256)")
        return faults


def _header_fault(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        return f"{path.name} is no .npy file: {error}"
    if found.shape != shape or found.dtype != dtype:
        return f"{path.name} holds {found.dtype} {found.shape}, not {dtype} {shape}"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
