"""Dataset of precomputed latents and conditioning in a folder, read through memory maps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError, DiffusionDataset, Framing, Variation
from megatron_pulse.data.fields import FRAMING, FRAMING_SPEC, default_null
from megatron_pulse.data.latents.layout import MIRRORED, Meta, Shard, ShardFile, mapped, sha256_of
from megatron_pulse.data.latents.row_hashes import HASH_TYPE, header_hash, row_hash
from megatron_pulse.paths import no_file
from megatron_pulse.progress import track

_INFINITE = "holds NaN or infinite values"
_REMEDY = "Run the writer again to finish the folder, or delete it and start over."


class LatentFolder(DiffusionDataset):
    """Latents and conditioning read through memory maps, which worker processes can share.

    Opening checks meta.json, sizes and headers of all files, and the SHA-256 of null conditioning
    (of all files with ``verify``). All faults are listed in one DataError. Each row is compared
    with its hash when it is read. A damaged row, a label outside the classes or a number that is
    not finite is a DataError that names the file. ``verify`` reads all rows at once.
    """

    def __init__(self, root: str | Path, verify: bool = False) -> None:
        self.root = Path(root)
        meta = Meta.load(self.root)
        read = tuple(meta.nulls.values())  # read whole: small, and part of every batch
        faults = [
            fault
            for file, shape, dtype in _files(meta)
            for fault in self._faults(file, shape, dtype, verify or file in read)
        ]
        if not meta.complete:
            faults.append(f"the folder is incomplete: {meta.count} samples so far")
        if meta.layout.pairs and meta.count % 2:
            faults.append(f"it has pairs, but {meta.count} samples")
        if not meta.count:
            faults.append("the folder has no samples")
        if not faults:
            faults = [fault for shard in meta.shards for fault in self._hash_faults(shard, verify)]
        if faults:
            raise DataError(f"latents {root}", faults, _REMEDY)
        self.layout = meta.layout
        self.image_shape = meta.layout.shape
        self.fields = meta.layout.fields
        self.num_classes = meta.layout.num_classes
        self.class_names = meta.layout.classes
        self.made_by = meta.layout.made_by
        self.has_pairs = meta.layout.pairs
        self.text_parts = meta.text_parts
        self.frames = FRAMING in self.fields and self.fields[FRAMING].fits(FRAMING_SPEC)
        self._null = {
            name: self._decoded(name, mapped(self.root / file.name))
            for name, file in meta.nulls.items()
        }
        self._shards = meta.shards
        self._ends: np.ndarray = np.cumsum([shard.count for shard in meta.shards])
        self._maps: dict[tuple[str, int], np.ndarray] = {}
        self._hashes: dict[tuple[str, int], np.ndarray] = {}
        faults = [
            f"{meta.nulls[name].name} {_INFINITE}"
            for name, null in self._null.items()
            if not null.isfinite().all()
        ]
        if faults := [*faults, *(self._row_faults() if verify else ())]:
            raise DataError(f"latents {root}", faults, _REMEDY)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        return self._finite(_column("latent", variation), index)

    def deviation(self, index: int, variation: Variation | None = None) -> Tensor | None:
        if not self.layout.deviates:
            return None
        return self._finite(_column("deviation", variation), index)

    def label(self, index: int) -> int:
        label = int(self._row("label", index))
        if not 0 <= label < self.num_classes:
            known = f"those of {self.num_classes} classes are 0 to {self.num_classes - 1}"
            raise self._unfit("label", index, f"has the label {label}, and {known}")
        return label

    def describe(self, index: int) -> str:
        shard, place = self._place(index)
        return f"sample {place} of {self.root / self._shards[shard].files['latent'].name}"

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        return {name: self._finite(name, index) for name in self.fields}

    def ties(self) -> Sequence[Sequence[Hashable]]:
        names = [name for name in self.layout.numbers if name != "label"]
        kept = [
            tuple((name, number) for name in names if (number := int(self._row(name, index))))
            for index in range(len(self))
        ]
        if self.has_pairs:
            kept = [(*tie, ("pair", i // 2)) for i, tie in enumerate(kept)]
        if self.layout.pictures:
            return kept
        # Folders of earlier versions hold no picture hashes; one picture then has one latent.
        latents = [
            tie for number in range(len(self._shards)) for tie in self._latent_hashes(number)
        ]
        return [(*own, latent) for own, latent in zip(kept, latents, strict=True)]

    def _latent_hashes(self, number: int) -> list[int]:
        """Hashes of a shard's latents, as written."""
        shard = self._shards[number]
        if shard.hashes is None:
            return [row_hash(row) for row in mapped(self.root / shard.files["latent"].name)]
        hashes: list[int] = self._hash_table(shard)[sorted(shard.files).index("latent")].tolist()
        return hashes[1:]

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        numbers = range(len(self._shards))
        every = [each for number in numbers for each in self._sample_hashes(number)]
        return [every[index] for index in indices]

    def _sample_hashes(self, number: int) -> list[int]:
        """Hashes of everything that a shard holds of each sample; of latents only if the shard has
        no hashes.
        """
        shard = self._shards[number]
        if shard.hashes is None:
            return self._latent_hashes(number)
        return [row_hash(row) for row in self._hash_table(shard)[:, 1:].T]

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        if not self.frames:
            return super().framing(index)
        sizes = self._row(FRAMING, index).tolist()
        return Framing((sizes[0], sizes[1]), (sizes[2], sizes[3]), (sizes[4], sizes[5]))

    def null_conditioning(self) -> dict[str, Tensor]:
        fields = self.fields
        defaults = {name: default_null(name, spec, fields) for name, spec in fields.items()}
        return {name: null for name, null in defaults.items() if null is not None} | self._null

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self.layout.pixel_size or super().pixel_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}, "_hashes": {}}

    def _finite(self, name: str, index: int) -> Tensor:
        values = self._decoded(name, self._row(name, index))
        # A finite sum implies finite values and is faster. It may overflow: check all then.
        if not values.sum().isfinite() and not values.isfinite().all():
            raise self._unfit(name, index, _INFINITE)
        return values

    def _unfit(self, name: str, index: int, why: str) -> DataError:
        """Error for a row that matches its hash but cannot be trained on."""
        shard, place = self._place(index)
        fault = f"{self._shards[shard].files[name].name}: its sample {place} {why}"
        return DataError(f"latents {self.root}", [fault], _REMEDY)

    def _row_faults(self) -> Iterator[str]:
        """Faults of each row of each file."""
        for index in track(range(len(self)), "verifying", "samples"):
            for name in self.layout.columns():
                try:
                    if name == "label":
                        self.label(index)
                    elif name in self.layout.numbers:
                        self._row(name, index)
                    else:
                        self._finite(name, index)
                except DataError as error:
                    yield from error.faults

    def _place(self, index: int) -> tuple[int, int]:
        """Number of a sample's shard, and the sample's index there."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._ends[shard] - self._shards[shard].count)

    def _row(self, name: str, index: int) -> np.ndarray:
        shard, place = self._place(index)
        told = self._shards[shard]
        if (name, shard) not in self._maps:
            self._maps[name, shard] = mapped(self.root / told.files[name].name)
            if told.hashes is not None:
                self._hashes[name, shard] = self._hash_table(told)[sorted(told.files).index(name)]
        row: np.ndarray = self._maps[name, shard][place]
        if told.hashes is not None and row_hash(row) != self._hashes[name, shard][1 + place]:
            damage = f"its sample {place} does not match its hash in {told.hashes.name}"
            raise DataError(
                f"latents {self.root}", [f"{told.files[name].name} is damaged: {damage}"], _REMEDY
            )
        return row

    def _hash_table(self, shard: Shard) -> np.ndarray:
        """Hash table of a shard: a row per file in order of field names, the header's hash
        first."""
        assert shard.hashes is not None
        path, shape = self.root / shard.hashes.name, (len(shard.files), 1 + shard.count)
        found: np.ndarray = np.memmap(path, HASH_TYPE, "r", shape=shape)
        return found

    def _hash_faults(self, shard: Shard, verify: bool) -> Iterator[str]:
        """Faults of a shard's hashes, and of its files' headers by these hashes."""
        if (told := shard.hashes) is None:
            return
        path = self.root / told.name
        size = HASH_TYPE.itemsize * len(shard.files) * (1 + shard.count)
        if fault := no_file(path):
            yield fault
        elif (found := path.stat().st_size) != size or told.num_bytes != size:
            yield f"{told.name} has {found} bytes, not {size}"
        elif verify and sha256_of(path) != told.sha256:
            yield f"{told.name} differs from what was written (SHA-256)"
        else:
            for name, hashes in zip(sorted(shard.files), self._hash_table(shard), strict=True):
                file = shard.files[name].name
                if header_hash(self.root / file) != hashes[0]:
                    yield f"{file} is damaged: its header does not match its hash in {told.name}"

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
        if fault := no_file(path):
            return [fault]
        if (size := path.stat().st_size) != file.num_bytes:
            return [f"{file.name} has {size} bytes, not {file.num_bytes}"]
        if unlike := _header_fault(path, shape, dtype):
            return [unlike]
        if verify and sha256_of(path) != file.sha256:
            return [f"{file.name} differs from what was written (SHA-256)"]
        return []


def _column(name: str, variation: Variation | None) -> str:
    """Column of a latent or deviation, or of that of the mirrored picture."""
    return name if variation is None or not variation.flip else f"{MIRRORED}{name}"


def _files(meta: Meta) -> Iterator[tuple[ShardFile, tuple[int, ...], np.dtype]]:
    """Every file named in ``meta``, with the required shape and dtype."""
    columns = meta.layout.columns()
    for name, file in meta.nulls.items():
        yield file, *columns[name]
    for shard in meta.shards:
        for name, (shape, dtype) in columns.items():
            yield shard.files[name], (shard.count, *shape), dtype


def _header_fault(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> str | None:
    try:
        found = mapped(path)
    except ValueError as error:
        return str(error)
    if found.shape != shape or found.dtype != dtype:
        return f"{path.name} holds {found.dtype} {found.shape}, not {dtype} {shape}"
    return None
