"""Writes a folder of precomputed latents and conditioning, shard by shard."""

from __future__ import annotations

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
    LatentLayout,
    Meta,
    Shard,
    ShardFile,
    mapped,
    sha256_of,
)
from megatron_pulse.data.latents.row_hashes import hashes_of
from megatron_pulse.files import replacing

_NONE: Mapping[str, Tensor] = {}


class LatentWriter:
    """Appends samples to a folder, shard by shard; what is on disk is always whole shards.

    ``nulls`` are values that dropped samples get (the encoding of the empty prompt), for some of
    the fields or all; the others have those of ``megatron_pulse.data.fields``. Opened again after
    an interruption it goes on after the last whole shard: ``num_written`` says how many samples
    to pass over. ``close`` writes the last, short shard and marks the folder complete; leaving a
    ``with`` block by an exception does not.

    Several writers, on machines that share the folder, may each write a ``share`` of the shards if
    all are told ``num_samples``, of all of them; they ``begin`` every shard, and the folder is
    complete when the last has closed. What is there in the end is the same, byte for byte.
    """

    def __init__(
        self,
        root: str | Path,
        layout: LatentLayout,
        nulls: Mapping[str, Tensor] = _NONE,
        num_samples: int | None = None,
    ) -> None:
        self.root, self.layout, self.num_samples = Path(root), layout, num_samples
        unfit = [*_misfits(layout, nulls), *_overflows(layout, nulls)]
        if faults := [f"null value of {fault}" for fault in unfit]:
            raise DataError(f"latents {root}", faults, "Nothing was written.")
        self.root.mkdir(parents=True, exist_ok=True)
        self._nulls = {name: _encoded(value, layout.stored(name)) for name, value in nulls.items()}
        self._meta = Meta(layout)
        self._begun = False
        self._continue()
        self._number = len(self._meta.shards)
        self._pending: list[dict[str, Tensor]] = []

    @property
    def num_written(self) -> int:
        """Samples in whole shards on disk, before the first that is missing."""
        return sum(shard.count for shard in self._meta.shards)

    @property
    def complete(self) -> bool:
        """Whether the folder was closed: there is nothing to add."""
        return self._meta.complete

    def count(self) -> int:
        """Samples in all shards that now are on disk, whoever wrote them."""
        return Meta.load(self.root).count if self._begun else 0

    def changed(
        self, picture: Callable[[int], int], rank: int = 0, num_ranks: int = 1
    ) -> dict[int, list[int]]:
        """The samples whose ``picture`` has another hash by now than when they were written, by
        the number of their shard; of one of several writers' share."""
        found: dict[int, list[int]] = {}
        for number, shard in self._meta.numbered.items() if self.layout.pictures else ():
            if number % num_ranks != rank:
                continue
            first = number * self.layout.shard_size
            try:
                there = mapped(self.root / shard.files["picture"].name).tolist()
            except ValueError:  # it is damaged, or gone
                there = [-1] * shard.count
            others = [first + i for i, was in enumerate(there) if picture(first + i) != was]
            found |= {number: others} if others else {}
        return found

    def forget(self, numbers: Collection[int]) -> None:
        """Let these shards be written anew; of other writers none may be at work."""
        self._meta = self._meta.without(self.root, numbers)
        self._number = len(self._meta.shards)

    def share(self, rank: int = 0, num_ranks: int = 1) -> list[int]:
        """The numbers of the shards that one of several writers still has to write."""
        assert self.num_samples is not None
        every = range(rank, -(-self.num_samples // self.layout.shard_size), num_ranks)
        there = self._meta.later.keys() | set(range(len(self._meta.shards)))
        return [number for number in every if number not in there]

    def begin(self, number: int) -> range:
        """The samples of a shard, which are to be added next, in order."""
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
    ) -> None:
        """Append a sample: ``latent`` of the layout's ``shape``, a tensor of every field, the
        latent's ``deviation`` where the layout deviates, and the hashes that it keeps."""
        layout, faults = self.layout, []
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
        """Write what is left, and mark the folder complete if no other writer has shards to add."""
        if self._pending:
            self._flush()
        # A second look: the other writer that completes the folder removes records after that.
        for _ in range(2):
            self._continue()
            if self.complete:
                return
            if self.num_samples in (None, self.num_written):
                self._meta.complete = True
                self._meta.save(self.root)
                return

    def __enter__(self) -> LatentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def _continue(self) -> None:
        """Take what is in the folder for one's own; raises DataError where it is something else."""
        if not (self.root / META).exists():
            return
        there = Meta.load(self.root)
        if faults := self._differences(there):
            remedy = "Resume with the same, or use a new folder."
            raise DataError(f"latents {self.root}", faults, remedy)
        self._meta, self._begun = there, True

    def _begin(self) -> None:
        """Write all but shards, where nobody has."""
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
        """What the folder holds otherwise than this writer would."""
        old, new = asdict(there.layout), asdict(self.layout)
        if FILES not in there.layout.source:
            new["source"] = self.layout.source.partition(FILES)[0]
        if not old["classes"]:  # an earlier version wrote it, or they have no names
            new["classes"] = old["classes"]
        if new["pictures"] and not old["pictures"]:
            return ["an earlier version wrote it, without hashes of the pictures' contents"]
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
            f"null value of {name}: there another one"
            for name, value in self._nulls.items()
            if not _holds(self.root / stored[name].name, value)
        ]


def _holds(path: Path, values: np.ndarray) -> bool:
    try:
        return mapped(path).tobytes() == values.tobytes()
    except ValueError:
        return False


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
