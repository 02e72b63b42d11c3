"""Flux's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from model_specs.common.config_faults import below, unfit_sizes
from model_specs.common.options import run_choice
from model_specs.common.sample_sizes import PATCHWISE, ROTARY, SAMPLES_ARE, SampleSizes

PACKED = 2
"""Side in latent pixels of the square that forms one token."""


@dataclass(frozen=True)
class FluxConfig(SampleSizes):
    """Sizes of a Flux; latents have ``in_channels`` and the side ``sample_size``.

    ``num_layers`` two-stream blocks come first, then ``num_single_layers``. ``axes_dims_rope`` are
    the features per head rotated by each of a token's three coordinates. Coordinates are (0, row,
    column) for images and 0 for text. With ``guidance_embeds`` the batch holds a guidance scale
    (3.5, say). With ``reference`` the tokens of another picture of the sample's size follow, whose
    first coordinate is 1 (FLUX.1 Kontext).
    """

    num_layers: int = 19
    num_single_layers: int = 38
    num_attention_heads: int = 24
    attention_head_dim: int = 128
    sample_size: int = run_choice(128, "positions count rows and columns of any size")
    buckets: str = run_choice("", SAMPLES_ARE)
    in_channels: int = 16
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    context_length: int = run_choice(512, "text has no positions")
    reference: int = run_choice(0, "{0.reference} reference pictures follow the sample")
    guidance_embeds: bool = True
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    patch_size = PACKED
    UNSUPPORTED = MappingProxyType({PATCHWISE: ROTARY})

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Number of tokens of each shape of samples, with those of the reference."""
        return tuple(count * (1 + self.reference) for count in super().token_counts)

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        found = [*below(self, 1, reference=0), *unfit_sizes(self)]
        if self.reference > 1:
            found.append(f"reference: must be 0 or 1, is {self.reference}")
        axes = self.axes_dims_rope
        if len(axes) != 3 or any(axis < 2 or axis % 2 for axis in axes):
            found.append(f"axes_dims_rope: must be three even numbers from 2 on, is {axes}")
        elif sum(axes) != self.attention_head_dim:
            found.append(
                f"axes_dims_rope: must add up to attention_head_dim={self.attention_head_dim}, "
                f"is {axes}"
            )
        return found


# Sizes as in the config.json files of black-forest-labs/FLUX.1-dev and FLUX.1-schnell.
CONFIGS: dict[str, FluxConfig] = {
    "flux-tiny": FluxConfig(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        sample_size=8,
        in_channels=4,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        context_length=6,
        axes_dims_rope=(2, 2, 4),
    ),
    "flux-dev": FluxConfig(),
    "flux-schnell": FluxConfig(guidance_embeds=False, context_length=256),
}
