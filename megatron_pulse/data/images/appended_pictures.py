"""Appended fields of pictures (``backbone/appended_fields.py``), from pixels to latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_pulse.backbone.appended_fields import INPAINT_MASK, MASKED_IMAGE, REFERENCE_IMAGE
from megatron_pulse.data.images.inpainting import mask_of_latents

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.encoders.autoencoder import Autoencoder

ENCODED = (MASKED_IMAGE, REFERENCE_IMAGE)
"""Fields that an autoencoder encodes, to the means of their posteriors."""
APPENDED_PICTURES = (INPAINT_MASK, *ENCODED)
"""Fields that are made here."""


def appended_latents(
    pixels: Mapping[str, Tensor], specs: Mapping[str, FieldSpec], autoencoder: Autoencoder
) -> dict[str, Tensor]:
    """Those of ``APPENDED_PICTURES`` in ``pixels``, as the backbone's fields ``specs``."""
    found = {name: autoencoder.encode(pixels[name][None])[0] for name in ENCODED if name in pixels}
    if INPAINT_MASK in pixels:
        found[INPAINT_MASK] = mask_of_latents(pixels[INPAINT_MASK], specs[INPAINT_MASK])
    return found
