"""PixArt's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_specs.common.config_faults import below, unfit_for_patches
from model_specs.common.options import RESPACED, run_choice, settled_by
from model_specs.common.sample_sizes import PATCHES_ARE, SAMPLES_ARE, SampleSizes


@dataclass(frozen=True)
class PixArtConfig(SampleSizes):
    """Sizes of a PixArt; ``sample_size`` is the side of the latent.

    Positions span ``base_sample_size`` / ``patch_size`` / ``interpolation_scale`` at any size, so
    that a published model can run at another size. None stands for ``sample_size``, and for a scale
    of one per 64 of the base. ``use_additional_conditions`` (alpha) adds the picture's resolution
    and aspect ratio. With learned variances ``out_channels`` is twice ``in_channels``.
    """

    num_layers: int = 28
    num_attention_heads: int = 16
    attention_head_dim: int = 72
    sample_size: int = run_choice(128, RESPACED)
    buckets: str = run_choice("", SAMPLES_ARE)
    patchwise: str = run_choice("", PATCHES_ARE)
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    interpolation_scale: float | None = settled_by("position_scale")
    caption_channels: int = 4096
    caption_length: int = run_choice(300, "cross-attention takes captions of any length")
    use_additional_conditions: bool = False
    base_sample_size: int | None = settled_by("base_size")

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        found = below(self, 1)
        if self.interpolation_scale is not None and self.interpolation_scale <= 0:
            found.append(f"interpolation_scale: must be positive, is {self.interpolation_scale}")
        return found or unfit_for_patches(self, 12 if self.use_additional_conditions else 4)

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def base_size(self) -> int:
        """Sample size that positions are spaced for."""
        return self.base_sample_size or self.sample_size

    @property
    def position_scale(self) -> float:
        """Divisor of the positions."""
        return self.interpolation_scale or self.usual_scale

    @property
    def usual_scale(self) -> int:
        """Divisor of the positions in diffusers if ``interpolation_scale`` is null."""
        return max(self.base_size // 64, 1)


# PixArt-alpha's PixArt-Sigma-XL-2-1024-MS and PixArt-XL-2-1024-MS.
CONFIGS: dict[str, PixArtConfig] = {
    "pixart-sigma": PixArtConfig(),
    "pixart-alpha": PixArtConfig(caption_length=120, use_additional_conditions=True),
    "pixart-tiny": PixArtConfig(
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=12,
        sample_size=8,
        caption_channels=24,
        caption_length=10,
    ),
}
