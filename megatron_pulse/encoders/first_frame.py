"""Fields of an image-to-video model: its first frame, as encoders give it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_pulse.backbone.appended_fields import (
    IMAGE_LATENT,
    KNOWN_MASK,
    KNOWN_VIDEO,
    SEEN_FRAME,
)

if TYPE_CHECKING:
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.image_encoder import ImageEncoder

FIRST_FRAME = frozenset({KNOWN_MASK, KNOWN_VIDEO, IMAGE_LATENT, *SEEN_FRAME})
"""Fields that are made here."""


def starts_from_frame(fields: Collection[str]) -> bool:
    """True if a backbone with these fields continues a first frame."""
    return bool({KNOWN_VIDEO, IMAGE_LATENT} & set(fields))


def seen_frame(fields: Collection[str]) -> str | None:
    """Field that a vision encoder makes of the first frame; None if there is none."""
    return next((name for name in SEEN_FRAME if name in fields), None)


def for_every_frame(latents: Tensor, count: int, autoencoder: Autoencoder) -> Tensor:
    """``image_latent`` of SVD ``[b, count, c, h, w]``, of latents ``[b, 1, c, h, w]``."""
    return autoencoder.unscaled(latents).repeat(1, count, 1, 1, 1)


def first_frame_fields(
    shapes: Mapping[str, tuple[int, ...]],
    clip: Tensor,
    autoencoder: Autoencoder,
    image_encoder: ImageEncoder | None = None,
    noise: Tensor | None = None,
) -> dict[str, Tensor]:
    """Those of ``FIRST_FRAME`` that are in ``shapes``, of a clip's pixels ``[c, F, h, w]``.

    As diffusers' pipelines of Wan, HunyuanVideo and CogVideoX: means of posteriors, unknown frames
    grey before encoding (``known_video``) or zero behind it (``image_latent``). SVD's
    ``image_latent`` is the mean before its scale, of the frame with ``noise`` ``[c, h, w]``, and
    repeated for all frames. The ``image_encoder`` sees the frame without noise.
    """
    found: dict[str, Tensor] = {}
    if KNOWN_VIDEO in shapes:
        condition = torch.zeros_like(clip)
        condition[:, 0] = clip[:, 0]
        (found[KNOWN_VIDEO],) = autoencoder.encode(condition[None])
    if image_encoder is not None:
        found[image_encoder.field] = image_encoder(clip[:, 0])
    if IMAGE_LATENT in shapes and autoencoder.has_temporal_decoder:
        frame = clip[:, 0] if noise is None else clip[:, 0] + noise
        latent = autoencoder.encode(frame[None])
        (found[IMAGE_LATENT],) = for_every_frame(latent, shapes[IMAGE_LATENT][0], autoencoder)
    elif IMAGE_LATENT in shapes:
        (first,) = autoencoder.first_frame(autoencoder.encode(clip[None, :, :1]))
        latent = found[IMAGE_LATENT] = torch.zeros(shapes[IMAGE_LATENT])
        latent.narrow(0 if autoencoder.frames_first else 1, 0, 1).copy_(first)
    if KNOWN_MASK in shapes:
        mask = found[KNOWN_MASK] = torch.zeros(shapes[KNOWN_MASK])
        mask[:, 0] = 1
    return found
