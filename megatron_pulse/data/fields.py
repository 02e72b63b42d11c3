"""Conditioning fields by name: what a backbone asks for, defaults, and null values.

A backbone names the fields it reads. Text (``context``, ``pooled``, ...) must come from the data.
Some others have a default where the data lacks them:

==================  =========================================================================
``*_mask``          ones, where the data has the masked field itself: every token is seen
``guidance``        3.5, the scale that FLUX.1-dev was distilled for by default
``time_ids``        SDXL's (height, width, crop top, crop left, height, width): no crop
``image_meta_size`` Hunyuan-DiT's (height, width, height, width, crop top, crop left): no crop
``resolution``      PixArt's (height, width)
``aspect_ratio``    PixArt's (height / width,)
==================  =========================================================================

When a sample's conditioning is dropped for classifier-free guidance, states become zeros (unless
the data says what the empty prompt's are) and their masks ones; what describes the picture
rather than what it shows (all fields above but the masks) stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_pulse.data.dataset import DiffusionDataset, FieldSpec

GUIDANCE = 3.5
KEPT = frozenset({"guidance", "time_ids", "image_meta_size", "resolution", "aspect_ratio"})
"""Fields that a dropped sample keeps."""


@dataclass(frozen=True)
class Wanted:
    """What a backbone takes of every sample.

    ``shape`` is its ``(c, h, w)``, ``fields`` what it reads beside timesteps and labels,
    ``num_classes`` how many classes it knows (None where it reads no labels).
    """

    shape: tuple[int, ...]
    fields: Mapping[str, FieldSpec] = field(default_factory=dict)
    num_classes: int | None = None


def default_null(name: str, spec: FieldSpec) -> Tensor | None:
    """The value of a dropped field; None if it stays."""
    if name in KEPT:
        return None
    fill = torch.ones if name.endswith("_mask") else torch.zeros
    return fill(spec.shape, dtype=spec.torch_dtype)


def default_value(name: str, spec: FieldSpec, pixel_size: tuple[int, int]) -> Tensor | None:
    """The value of a field that the data lacks; None if it has no default of that shape."""
    height, width = map(float, pixel_size)
    known: dict[str, list[float] | float] = {
        "guidance": GUIDANCE,
        "time_ids": [height, width, 0, 0, height, width],
        "image_meta_size": [height, width, height, width, 0, 0],
        "resolution": [height, width],
        "aspect_ratio": [height / width],
    }
    if name.endswith("_mask"):
        return torch.ones(spec.shape, dtype=spec.torch_dtype)
    if name not in known:
        return None
    value = torch.tensor(known[name], dtype=spec.torch_dtype)
    return value if tuple(value.shape) == spec.shape else None


def constants(
    wanted: Mapping[str, FieldSpec],
    given: Mapping[str, FieldSpec],
    pixel_size: tuple[int, int],
) -> dict[str, Tensor]:
    """Defaults of those ``wanted`` fields that are not ``given`` and have one."""
    found = {}
    for name, spec in wanted.items():
        masked = name.removesuffix("_mask")
        if name in given or (masked != name and masked not in given):
            continue
        if (value := default_value(name, spec, pixel_size)) is not None:
            found[name] = value
    return found


class Fitted(DiffusionDataset):
    """``source`` with exactly the ``wanted`` fields: defaults filled in, the others left out.

    ``faults`` lists what it cannot give.
    """

    def __init__(self, source: DiffusionDataset, wanted: Mapping[str, FieldSpec]) -> None:
        self.source = source
        self.image_shape = source.image_shape
        self.num_classes = source.num_classes
        self.fields = dict(wanted)
        self._constants = constants(wanted, source.fields, source.pixel_size)
        self._taken = [name for name in wanted if name in source.fields]
        self.faults = []
        for name, spec in wanted.items():
            if name in source.fields and not source.fields[name].fits(spec):
                self.faults.append(
                    f"the backbone reads {name} ({spec}), the data has {source.fields[name]}"
                )
            elif name not in source.fields and name not in self._constants:
                self.faults.append(f"the backbone reads {name} ({spec}), the data has none")

    def __len__(self) -> int:
        return len(self.source)

    def image(self, index: int, draw: int = 0) -> Tensor:
        return self.source.image(index, draw)

    def label(self, index: int) -> int:
        return self.source.label(index)

    def conditioning(self, index: int) -> dict[str, Tensor]:
        given = self.source.conditioning(index) if self._taken else {}
        return {**self._constants, **{name: given[name] for name in self._taken}}

    def null_conditioning(self) -> dict[str, Tensor]:
        null = self.source.null_conditioning()
        return {name: null[name] for name in self._taken if name in null}

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self.source.pixel_size
