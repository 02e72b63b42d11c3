"""What a folder of precomputed latents holds: shards, their fields, and ``meta.json``.

Shard i is one ``.npy`` file per field::

    latents/meta.json   latent-00000.npy   label-00000.npy   context-00000.npy   latent-00001.npy

bfloat16 is stored as the uint16 of its bits, since NumPy has no such type.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from megatron_pulse.data.dataset import DataError
from megatron_pulse.diffusion.files import replacing

FORMAT = 1
META = "meta.json"


class LatentType(StrEnum):
    """How latents and context are stored."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def stored(self) -> np.dtype:
        """The NumPy type of the bits on disk."""
        return np.dtype("uint16" if self is LatentType.BFLOAT16 else str(self))


@dataclass(frozen=True)
class LatentLayout:
    """What every shard of a folder holds; the part of ``meta.json`` that never changes.

    ``shape`` is ``(c, h, w)``, ``context_shape`` ``(n, d)`` or None. ``source`` says what made
    the latents (encoder, scaling, image size) and is compared when a writer resumes.
    """

    shape: tuple[int, ...]
    num_classes: int
    dtype: LatentType = LatentType.FLOAT16
    context_shape: tuple[int, ...] | None = None
    shard_size: int = 1024
    source: str = ""

    def fields(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Each field's shape per sample and type on disk."""
        stored = LatentType(self.dtype).stored
        result = {"latent": (self.shape, stored), "label": ((), np.dtype("int64"))}
        if self.context_shape is not None:
            result["context"] = (self.context_shape, stored)
        return result


@dataclass
class ShardFile:
    """One file of a shard, as written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass
class Shard:
    """``count`` samples; a file for each field."""

    count: int
    files: dict[str, ShardFile]


@dataclass
class Meta:
    """The content of ``meta.json``; ``complete`` is set by ``LatentWriter.close``."""

    layout: LatentLayout
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False

    @property
    def count(self) -> int:
        """Samples in all shards."""
        return sum(shard.count for shard in self.shards)

    def save(self, root: Path) -> None:
        """Write ``meta.json``, whole."""
        with replacing(root / META) as beside:
            beside.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, root: Path) -> Meta:
        """Read ``meta.json``; raises DataError if it is missing or not one of ours."""
        try:
            record: dict[str, Any] = json.loads((root / META).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']}, this version reads {FORMAT}")
            layout = record["layout"]
            context = layout["context_shape"]
            return cls(
                LatentLayout(
                    **layout
                    | {
                        "shape": tuple(layout["shape"]),
                        "dtype": LatentType(layout["dtype"]),
                        "context_shape": None if context is None else tuple(context),
                    }
                ),
                [
                    Shard(s["count"], {k: ShardFile(**f) for k, f in s["files"].items()})
                    for s in record["shards"]
                ],
                record["complete"],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"latents {root}",
                [f"{META}: {type(error).__name__}: {error}"],
                "Write the folder with megatron_pulse.data.latents.LatentWriter.",
            ) from error
