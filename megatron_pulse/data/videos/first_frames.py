"""Noise on the first frames of clips, as SVD is trained."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import FRAME_NOISE, TIME_IDS
from megatron_pulse.data.dataset import Derived, DiffusionDataset, FieldSpec, Variation
from megatron_pulse.data.fields import default_value
from megatron_pulse.diffusion.noise import first_frame_noise

_MEDIAN_DEVIATION = math.exp(-3.0), 0.5
"""Median of the noise's strength and deviation of its logarithm, in training SVD (Blattmann et al.
2023, appendix D)."""


def drawn_frame_noise(
    choice: tuple[float, float] | None, index: int, shape: tuple[int, ...]
) -> tuple[Tensor, float]:
    """Noise on the first frame of sample ``index``, and its strength.

    ``choice`` is the median and deviation of the strength; None is SVD's. Every visit of a sample
    has the same noise.
    """
    number, noise = first_frame_noise(0, index, 0, shape)
    median, deviation = _MEDIAN_DEVIATION if choice is None else choice
    strength = median * math.exp(deviation * number)
    return strength * noise, strength


class FrameNoised(Derived):
    """``source`` of clips with the fields ``frame_noise`` [c, h, w] and ``added_time_ids``.

    The second has the strength of the first. Latents written ahead have the same.
    """

    def __init__(
        self, source: DiffusionDataset, ids: FieldSpec, choice: tuple[float, float] | None
    ) -> None:
        super().__init__(source)
        self._choice = choice
        noise = FieldSpec((source.image_shape[0], *source.pixel_size))
        self.fields = {**source.fields, FRAME_NOISE: noise, TIME_IDS: ids}

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        shape = (self.image_shape[0], *self.pixels_of(self.shape_index(index)))
        noise, strength = drawn_frame_noise(self._choice, index, shape)
        framing = self.source.framing(index, variation)
        ids = default_value(TIME_IDS, self.fields[TIME_IDS], framing)
        assert ids is not None
        ids = torch.cat([ids[:-1], ids.new_tensor([strength])])
        given = super().conditioning(index, variation)
        return {**given, FRAME_NOISE: noise, TIME_IDS: ids}
