"""DiT's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_specs.common.config_faults import below, unfit_for_patches
from model_specs.common.options import RESPACED, run_choice, settled_by
from model_specs.common.sample_sizes import PATCHES_ARE, SAMPLES_ARE, SampleSizes


@dataclass(frozen=True)
class DiTConfig(SampleSizes):
    """Sizes of a DiT; ``sample_size`` is the side of its input (usually latents).

    Positions are spaced for ``base_sample_size`` (None: ``sample_size``), so that a published model
    can run at another size. Class ``num_classes`` is the null class of classifier-free guidance.
    With learned variances ``out_channels`` is twice ``in_channels``: noise first, then variance.
    """

    num_layers: int = 28
    num_attention_heads: int = 16
    attention_head_dim: int = 72
    sample_size: int = run_choice(32, RESPACED)
    buckets: str = run_choice("", SAMPLES_ARE)
    patchwise: str = run_choice("", PATCHES_ARE)
    patch_size: int = 2
    in_channels: int = 4
    out_channels: int = 8
    num_classes: int = 1000
    base_sample_size: int | None = settled_by("base_size")

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        return below(self, 1) or unfit_for_patches(self)

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def base_size(self) -> int:
        """Sample size that positions are spaced for."""
        return self.base_sample_size or self.sample_size


# dit-xl-2: facebook/DiT-XL-2-256; at 512 px sample_size is 64.
CONFIGS: dict[str, DiTConfig] = {
    "dit-xl-2": DiTConfig(),
    "dit-tiny": DiTConfig(
        num_layers=2, num_attention_heads=4, attention_head_dim=8, sample_size=8, num_classes=10
    ),
}
