"""Writer of a folder of precomputed latents and conditioning, shard by shard."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.latents.layout import (
    FILES,
    META,
    MIRRORED,
    LatentLayout,
    Meta,
    Shard,
    ShardFile,
    mapped,
    sha256_of,
)
from megatron_pulse.data.latents.row_hashes import hashes_of
from megatron_pulse.encoders.text_recipe import TextParts
from megatron_pulse.files import replacing

_NONE: Mapping[str, Tensor] = {}
_LEFTOVER = re.compile(r"\.\w+-\d{5}\.\d+\.part\.(npy|bin)")
"""Name of a shard's file while it is written (see ``files.replacing``)."""


class LatentWriter:
    """Appends samples to a folder, shard by shard; the disk always holds whole shards.

    ``nulls`` are the values of dropped samples (the encoding of the empty prompt), for some of the
    fields or all. Other fields use the nulls of ``megatron_pulse.data.fields``. ``text_parts`` are
    recorded, also in a complete folder of an earlier version. Opened again after
    an interruption, the writer continues after the last whole shard; ``num_written`` is the number
    of samples to skip. ``close`` writes the last, short shard and marks the folder complete.
    Leaving a ``with`` block by an exception does neither.

    Several writers, on machines that share the folder, may each write a ``share`` of the shards.
    All need the same ``num_samples``, the total. They ``begin`` every shard, and the folder is
    complete when the last has closed. The result is the same, byte for byte.
    """

    def __init__(
        self,
        root: str | Path,
        layout: LatentLayout,
        nulls: Mapping[str, Tensor] = _NONE,
        num_samples: int | None = None,
        text_parts: TextParts | None = None,
    ) -> None:
        self.root, self.layout, self.num_samples = Path(root), layout, num_samples
        unfit = [*_misfits(layout, nulls), *_overflows(layout, nulls)]
        if faults := [f"null value of {fault}" for fault in unfit]:
            raise DataError(f"latents {root}", faults, "Nothing was written.")
        self.root.mkdir(parents=True, exist_ok=True)
        self._nulls = {name: _encoded(value, layout.stored(name)) for name, value in nulls.items()}
        self._text_parts = {
            encoder: {
                name: [[(a, b) for a, b in part] for part in parts] for name, parts in own.items()
            }
            for encoder, own in (text_parts or {}).items()
        }
        self._meta = Meta(layout, text_parts=self._text_parts)
        self._begun = False
        self._continue()
        self._number = len(self._meta.shards)
        self._pending: list[dict[str, Tensor]] = []

    @property
    def num_written(self) -> int:
        """Number of samples in whole shards on disk, before the first missing one."""
        return sum(shard.count for shard in self._meta.shards)

    @property
    def complete(self) -> bool:
        """True if the folder is closed and takes no more samples."""
        return self._meta.complete

    def count(self) -> int:
        """Number of samples in all shards on disk, from all writers."""
        return Meta.load(self.root).count if self._begun else 0

    def changed(
        self, picture: Callable[[int], int], rank: int = 0, num_ranks: int = 1
    ) -> dict[int, list[int]]:
        """Samples whose ``picture`` hash has changed since they were written, by shard number.

        Only shards of the share of ``rank`` are checked.
        """
        found: dict[int, list[int]] = {}
        for number, shard in self._meta.numbered.items() if self.layout.pictures else ():
            if number % num_ranks != rank:
                continue
            first = number * self.layout.shard_size
            try:
                there = mapped(self.root / shard.files["picture"].name).tolist()
            except ValueError:  # damaged or missing
                there = [-1] * shard.count
            others = [first + i for i, was in enumerate(there) if picture(first + i) != was]
            found |= {number: others} if others else {}
        return found

    def damaged(self, rank: int = 0, num_ranks: int = 1) -> list[int]:
        """Numbers of shards with a file that is missing or differs from what was written.

        Only shards of the share of ``rank`` are checked.
        """

        def intact(file: ShardFile) -> bool:
            path = self.root / file.name
            same = path.is_file() and path.stat().st_size == file.num_bytes
            return same and sha256_of(path) == file.sha256

        return [
            number
            for number, shard in self._meta.numbered.items()
            if number % num_ranks == rank
            and not all(map(intact, filter(None, (*shard.files.values(), shard.hashes))))
        ]

    def forget(self, numbers: Collection[int]) -> None:
        """Mark these shards for rewriting; no other writer may be active."""
        self._meta = self._meta.without(self.root, numbers)
        self._number = len(self._meta.shards)

    def share(self, rank: int = 0, num_ranks: int = 1) -> list[int]:
        """Shard numbers that one of several writers still has to write."""
        assert self.num_samples is not None
        every = range(rank, -(-self.num_samples // self.layout.shard_size), num_ranks)
        there = self._meta.later.keys() | set(range(len(self._meta.shards)))
        return [number for number in every if number not in there]

    def begin(self, number: int) -> range:
        """Begin a shard; returns its samples, to be added in order."""
        assert self.num_samples is not None and not self._pending
        self._number, size = number, self.layout.shard_size
        return range(number * size, min((number + 1) * size, self.num_samples))

    def add(
        self,
        latent: Tensor,
        label: int,
        conditioning: Mapping[str, Tensor] = _NONE,
        deviation: Tensor | None = None,
        picture: int = 0,
        group: int = 0,
        mirrored: Mapping[str, Tensor] = _NONE,
    ) -> None:
        """Append a sample with a tensor for every field.

        ``latent`` has the layout's ``shape``. ``deviation`` is given exactly if the layout
        deviates. ``picture`` and ``group`` are the hashes that the layout stores. ``mirrored`` has
        ``latent`` and ``deviation`` of the mirrored picture, exactly if the layout stores them.
        """
        layout, faults = self.layout, []
        if self.complete:
            faults.append("the folder is complete")
        given = {"latent": latent} | ({} if deviation is None else {"deviation": deviation})
        if layout.deviates != (deviation is not None):
            faults.append(
                "deviation is missing"
                if layout.deviates
                else ("deviation is not part of the layout")
            )
        other_way = {f"{MIRRORED}{name}": value for name, value in mirrored.items()}
        if other_way.keys() != {name for name in layout.columns() if name.startswith(MIRRORED)}:
            faults.append("latents of mirrored pictures are missing, or not part of the layout")
        given |= other_way
        for name, value in given.items():
            if tuple(value.shape) != layout.shape:
                faults.append(f"{name} has shape {tuple(value.shape)}, not {layout.shape}")
        faults += _misfits(layout, conditioning)
        faults += _overflows(layout, given | dict(conditioning))
        faults += [f"{name} is missing" for name in layout.fields if name not in conditioning]
        if not 0 <= label < layout.num_classes:
            faults.append(f"label {label} is not in 0..{layout.num_classes - 1}")
        sample = self._number * layout.shard_size + len(self._pending)
        if faults:
            raise DataError(f"latents {self.root}, sample {sample}", faults, "Nothing was added.")
        given |= conditioning
        kept = {name: value.detach().cpu().clone() for name, value in given.items()}
        numbers = {"label": label, "picture": picture, "group": group}
        kept |= {name: torch.tensor(numbers[name]) for name in layout.numbers}
        self._pending.append(kept)
        if len(self._pending) == layout.shard_size or sample + 1 == self.num_samples:
            self._flush()

    def close(self) -> None:
        """Write pending samples; mark the folder complete if no other writer has shards to add."""
        if self._pending:
            self._flush()
        # Look twice: another completing writer removes its records only after writing meta.json.
        for _ in range(2):
            self._continue()
            if not self.complete and self.num_samples in (None, self.num_written):
                self._meta.complete = True
                self._meta.save(self.root)
            if self.complete:
                self._remove_leftovers()
                return

    def _remove_leftovers(self) -> None:
        """Remove half-written shards of killed writers, once no shard is missing."""
        for path in self.root.glob(".*.part.*"):
            if _LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def __enter__(self) -> LatentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _continue(self) -> None:
        """Adopt the folder's existing content; raises DataError if its layout differs."""
        if not (self.root / META).exists():
            return
        there = Meta.load(self.root)
        if faults := self._differences(there):
            remedy = "Resume with the same settings, or use a new folder."
            raise DataError(f"latents {self.root}", faults, remedy)
        self._meta, self._begun = there, True
        if self._text_parts and there.text_parts != self._text_parts:
            there.text_parts = self._text_parts
            if there.complete:
                there.save(self.root)

    def _begin(self) -> None:
        """Write everything but shards, unless another writer already has."""
        self._continue()
        if not self._begun:
            for name, value in self._nulls.items():
                self._meta.nulls[name] = self._save(f"null-{name}.npy", value)
            self._meta.save(self.root)
            self._begun = True

    def _flush(self) -> None:
        if not self._begun:
            self._begin()
        files, hashes = {}, {}
        for name, (_, stored) in self.layout.columns().items():
            file_name = f"{name}-{self._number:05d}.npy"
            column = _encoded(torch.stack([row[name] for row in self._pending]), stored)
            files[name] = self._save(file_name, column)
            hashes[name] = hashes_of(self.root / file_name, column)
        table = np.stack([hashes[name] for name in sorted(hashes)])
        told = self._save(f"hashes-{self._number:05d}.bin", table)
        self._meta.record(self.root, self._number, Shard(len(self._pending), files, told))
        self._number += 1
        self._pending = []

    def _save(self, name: str, values: np.ndarray) -> ShardFile:
        with replacing(self.root / name) as beside:
            if beside.suffix == ".npy":
                np.save(beside, values)
            else:
                values.tofile(beside)
            return ShardFile(name, beside.stat().st_size, sha256_of(beside))

    def _differences(self, there: Meta) -> list[str]:
        """Differences between the folder's layout and this writer's."""
        old, new = (
            asdict(layout) | {"dtype": str(layout.dtype)} for layout in (there.layout, self.layout)
        )
        if FILES not in there.layout.source:
            new["source"] = self.layout.source.partition(FILES)[0]
        if not old["classes"]:  # an earlier version wrote it, or they have no names
            new["classes"] = old["classes"]
        if new["pictures"] and not old["pictures"]:
            return ["written by an earlier version, without hashes of the picture contents"]
        faults = []
        for key in (key for key in old if old[key] != new[key]):
            if key in ("fields", "made_by"):
                pairs = {k: (old[key].get(k), new[key].get(k)) for k in {**old[key], **new[key]}}
                faults += [
                    f"{key} {k}: there {a!r}, now {b!r}" for k, (a, b) in pairs.items() if a != b
                ]
            else:
                faults.append(f"{key}: there {old[key]!r}, now {new[key]!r}")
        if faults or not (there.count or there.nulls):
            return faults
        stored = there.nulls
        if stored.keys() != self._nulls.keys():
            return [f"null values: there of {sorted(stored)}, now of {sorted(self._nulls)}"]
        return [
            f"null value of {name}: another one there"
            for name, value in self._nulls.items()
            if not _holds(self.root / stored[name].name, value)
        ]


def _holds(path: Path, values: np.ndarray) -> bool:
    try:
        return mapped(path).tobytes() == values.tobytes()
    except ValueError:
        return False


def _misfits(layout: LatentLayout, values: Mapping[str, Tensor]) -> list[str]:
    """Faults of ``values`` against the fields of ``layout``: names, shapes, dtypes."""
    faults = []
    for name, value in values.items():
        spec = layout.fields.get(name)
        if spec is None:
            faults.append(f"{name} is not a field of the layout")
        elif tuple(value.shape) != spec.shape:
            faults.append(f"{name} has shape {tuple(value.shape)}, not {spec.shape}")
        elif value.is_floating_point() != spec.torch_dtype.is_floating_point:
            faults.append(f"{name} is {value.dtype}, not {spec.torch_dtype}")
    return faults


def _overflows(layout: LatentLayout, values: Mapping[str, Tensor]) -> Iterator[str]:
    """Faults of values that are not finite, now or in the storage dtype."""
    columns = layout.columns()
    for name, value in values.items():
        if name not in columns or not value.is_floating_point():
            continue
        if not value.isfinite().all():
            yield f"{name} holds NaN or infinite values"
        elif columns[name][1] == np.float16 and not value.half().isfinite().all():
            yield (
                f"{name} has the value {value.abs().max().item():g}, beyond the largest float16, "
                "65504. Store bfloat16 or float32 (--dtype bf16, --dtype fp32)"
            )


def _encoded(values: Tensor, stored: np.dtype) -> np.ndarray:
    """Convert ``values`` to their storage dtype."""
    values = values.detach().cpu()
    if stored == np.uint16:
        values = values.to(torch.bfloat16).view(torch.int16)
    else:
        values = values.to(getattr(torch, stored.name))
    encoded: np.ndarray = values.numpy()
    return encoded.view(stored)
