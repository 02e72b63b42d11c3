"""Reads a folder of precomputed latents and conditioning, through memory maps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError, DiffusionDataset, Framing
from megatron_pulse.data.fields import FRAMING, FRAMING_SPEC, default_null
from megatron_pulse.data.latents.layout import Meta, ShardFile, sha256_of


class LatentFolder(DiffusionDataset):
    """Latents and conditioning read through memory maps, which worker processes can share.

    Opening checks meta, sizes and headers of all files, and the SHA-256 of null conditioning, with
    ``verify`` of all; all faults are listed in one DataError.
    """

    def __init__(self, root: str | Path, verify: bool = False) -> None:
        self.root = Path(root)
        meta = Meta.load(self.root)
        read = tuple(meta.nulls.values())  # whole, at once: small, and in every batch
        faults = [
            fault
            for file, shape, dtype in _files(meta)
            for fault in self._faults(file, shape, dtype, verify or file in read)
        ]
        if not meta.complete:
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
        self.fields = meta.layout.fields
        self.num_classes = meta.layout.num_classes
        self.made_by = meta.layout.made_by
        self.frames = FRAMING in self.fields and self.fields[FRAMING].fits(FRAMING_SPEC)
        self._null = {
            name: self._decoded(name, np.load(self.root / file.name))
            for name, file in meta.nulls.items()
        }
        self._shards = meta.shards
        self._ends: np.ndarray = np.cumsum([shard.count for shard in meta.shards])
        self._maps: dict[tuple[str, int], np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def image(self, index: int) -> Tensor:
        return self._decoded("latent", self._row("latent", index))

    def deviation(self, index: int) -> Tensor | None:
        if not self.layout.deviates:
            return None
        return self._decoded("deviation", self._row("deviation", index))

    def label(self, index: int) -> int:
        return int(self._row("label", index))

    def conditioning(self, index: int) -> dict[str, Tensor]:
        return {name: self._decoded(name, self._row(name, index)) for name in self.fields}

    def framing(self, index: int) -> Framing:
        if not self.frames:
            return super().framing(index)
        sizes = self._row(FRAMING, index).tolist()
        return Framing((sizes[0], sizes[1]), (sizes[2], sizes[3]), (sizes[4], sizes[5]))

    def null_conditioning(self) -> dict[str, Tensor]:
        defaults = {name: default_null(name, spec) for name, spec in self.fields.items()}
        return {name: null for name, null in defaults.items() if null is not None} | self._null

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self.layout.pixel_size or super().pixel_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def _row(self, name: str, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        if (name, shard) not in self._maps:
            path = self.root / self._shards[shard].files[name].name
            self._maps[name, shard] = np.load(path, mmap_mode="r")
        row: np.ndarray = self._maps[name, shard][
            index - (self._ends[shard] - self._shards[shard].count)
        ]
        return row

    def _decoded(self, name: str, row: np.ndarray) -> Tensor:
        values = np.array(row)
        if values.dtype == np.uint16:
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16).float()
        spec = self.fields.get(name)
        return torch.from_numpy(values).to(torch.float32 if spec is None else spec.torch_dtype)

    def _faults(
        self, file: ShardFile, shape: tuple[int, ...], dtype: np.dtype, verify: bool
    ) -> list[str]:
        path = self.root / file.name
        if not path.is_file():
            return [f"{file.name} is missing"]
        if (size := path.stat().st_size) != file.num_bytes:
            return [f"{file.name} has {size} bytes, not {file.num_bytes}"]
        if fault := _header_fault(path, shape, dtype):
            return [fault]
        if verify and sha256_of(path) != file.sha256:
            return [f"{file.name} differs from what was written (SHA-256)"]
        return []


def _files(meta: Meta) -> Iterator[tuple[ShardFile, tuple[int, ...], np.dtype]]:
    """Every file that ``meta`` names, with the shape and type that it must have."""
    columns = meta.layout.columns()
    for name, file in meta.nulls.items():
        yield file, *columns[name]
    for shard in meta.shards:
        for name, (shape, dtype) in columns.items():
            yield shard.files[name], (shard.count, *shape), dtype


def _header_fault(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        return f"{path.name} is no .npy file: {error}"
    if found.shape != shape or found.dtype != dtype:
        return f"{path.name} holds {found.dtype} {found.shape}, not {dtype} {shape}"
    return None
