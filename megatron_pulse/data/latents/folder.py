"""Writes and reads a folder of precomputed latents and conditioning, through memory maps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError, DiffusionDataset, Framing
from megatron_pulse.data.fields import FRAMING, FRAMING_SPEC, default_null
from megatron_pulse.data.latents.layout import (
    META,
    LatentLayout,
    LatentType,
    Meta,
    Shard,
    ShardFile,
)
from megatron_pulse.files import replacing

__all__ = ["LatentFolder", "LatentLayout", "LatentType", "LatentWriter"]

_NONE: Mapping[str, Tensor] = {}


class LatentWriter:
    """Appends samples to a folder, shard by shard; what is on disk is always whole shards.

    ``nulls`` are values that dropped samples get (the encoding of the empty prompt), for some of
    the fields or all; the others have those of ``megatron_pulse.data.fields``. Opened again after
    an interruption it goes on after the last whole shard: ``num_written`` says how many samples
    to pass over. ``close`` writes the last, short shard and marks the folder complete; leaving a
    ``with`` block by an exception does not.
    """

    def __init__(
        self, root: str | Path, layout: LatentLayout, nulls: Mapping[str, Tensor] = _NONE
    ) -> None:
        self.root = Path(root)
        unfit = [*_misfits(layout, nulls), *_overflows(layout, nulls)]
        if faults := [f"null value of {fault}" for fault in unfit]:
            raise DataError(f"latents {root}", faults, "Nothing was written.")
        self.root.mkdir(parents=True, exist_ok=True)
        self._nulls = {name: _encoded(value, layout.stored(name)) for name, value in nulls.items()}
        self._meta = Meta(layout)
        if (self.root / META).exists():
            self._meta = Meta.load(self.root)
            if faults := self._differences(layout):
                remedy = "Resume with the same, or use a new folder."
                raise DataError(f"latents {root}", faults, remedy)
        self._pending: list[dict[str, Tensor]] = []

    @property
    def layout(self) -> LatentLayout:
        """What every shard holds."""
        return self._meta.layout

    @property
    def num_written(self) -> int:
        """Samples in whole shards on disk."""
        return self._meta.count

    @property
    def complete(self) -> bool:
        """Whether the folder was closed: there is nothing to add."""
        return self._meta.complete

    def add(
        self,
        latent: Tensor,
        label: int,
        conditioning: Mapping[str, Tensor] = _NONE,
        deviation: Tensor | None = None,
    ) -> None:
        """Append a sample: ``latent`` of the layout's ``shape``, a tensor of every field, and the
        latent's ``deviation`` where the layout deviates."""
        layout, faults = self._meta.layout, []
        if self.complete:
            faults.append("the folder is complete")
        given = {"latent": latent} | ({} if deviation is None else {"deviation": deviation})
        if layout.deviates != (deviation is not None):
            faults.append("deviation is missing" if layout.deviates else "deviation is not kept")
        for name, value in given.items():
            if tuple(value.shape) != layout.shape:
                faults.append(f"{name} has shape {tuple(value.shape)}, not {layout.shape}")
        faults += _misfits(layout, conditioning)
        faults += _overflows(layout, given | dict(conditioning))
        faults += [f"{name} is missing" for name in layout.fields if name not in conditioning]
        if not 0 <= label < layout.num_classes:
            faults.append(f"label {label} is not in 0..{layout.num_classes - 1}")
        if faults:
            sample = self.num_written + len(self._pending)
            raise DataError(f"latents {self.root}, sample {sample}", faults, "Nothing was added.")
        given |= conditioning
        kept = {name: value.detach().cpu().clone() for name, value in given.items()}
        self._pending.append(kept | {"label": torch.tensor(label)})
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
        meta = self._meta
        if not meta.shards:
            for name, value in self._nulls.items():
                meta.nulls[name] = self._save(f"null-{name}.npy", value)
        files = {}
        for name, (_, stored) in meta.layout.columns().items():
            file_name = f"{name}-{len(meta.shards):05d}.npy"
            column = torch.stack([row[name] for row in self._pending])
            files[name] = self._save(file_name, _encoded(column, stored))
        meta.shards.append(Shard(len(self._pending), files))
        meta.save(self.root)
        self._pending = []

    def _save(self, name: str, values: np.ndarray) -> ShardFile:
        with replacing(self.root / name) as beside:
            np.save(beside, values)
            return ShardFile(name, beside.stat().st_size, _sha256(beside))

    def _differences(self, layout: LatentLayout) -> list[str]:
        """What the folder holds otherwise than this writer would."""
        old, new = asdict(self._meta.layout), asdict(layout)
        faults = [f"{k}: there {old[k]!r}, now {new[k]!r}" for k in old if old[k] != new[k]]
        if faults or not self._meta.shards:
            return faults
        stored = self._meta.nulls
        if stored.keys() != self._nulls.keys():
            return [f"null values: there of {sorted(stored)}, now of {sorted(self._nulls)}"]
        return [
            f"null value of {name}: there another one"
            for name, value in self._nulls.items()
            if np.load(self.root / stored[name].name).tobytes() != value.tobytes()
        ]


class LatentFolder(DiffusionDataset):
    """Latents and conditioning read through memory maps, which worker processes can share.

    Opening checks meta, sizes and headers of all files, and with ``verify`` their SHA-256; all
    faults are listed in one DataError.
    """

    def __init__(self, root: str | Path, verify: bool = False) -> None:
        self.root = Path(root)
        meta = Meta.load(self.root)
        faults = [fault for file in _files(meta) for fault in self._faults(*file, verify)]
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
        if verify and _sha256(path) != file.sha256:
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


def _misfits(layout: LatentLayout, values: Mapping[str, Tensor]) -> list[str]:
    """Which of ``values`` are no fields of ``layout``, or of another shape or kind."""
    faults = []
    for name, value in values.items():
        spec = layout.fields.get(name)
        if spec is None:
            faults.append(f"{name} is no field of the layout")
        elif tuple(value.shape) != spec.shape:
            faults.append(f"{name} has shape {tuple(value.shape)}, not {spec.shape}")
        elif value.is_floating_point() != spec.torch_dtype.is_floating_point:
            faults.append(f"{name} is {value.dtype}, not {spec.torch_dtype}")
    return faults


def _overflows(layout: LatentLayout, values: Mapping[str, Tensor]) -> Iterator[str]:
    """What is not finite, or will not be as it is stored."""
    columns = layout.columns()
    for name, value in values.items():
        if name not in columns or not value.is_floating_point():
            continue
        if not value.isfinite().all():
            yield f"{name} holds NaN or infinite values"
        elif columns[name][1] == np.float16 and not value.half().isfinite().all():
            yield (
                f"{name} has the value {value.abs().max().item():g}, and float16 ends at 65504: "
                "store bfloat16 or float32 (--dtype bf16, --dtype fp32)"
            )


def _encoded(values: Tensor, stored: np.dtype) -> np.ndarray:
    """``values`` as they are on disk."""
    values = values.detach().cpu()
    if stored == np.uint16:
        values = values.to(torch.bfloat16).view(torch.int16)
    else:
        values = values.to(getattr(torch, stored.name))
    encoded: np.ndarray = values.numpy()
    return encoded.view(stored)


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
