"""SD3's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from model_specs.common.config_faults import below, unfit_for_patches
from model_specs.common.options import run_choice
from model_specs.common.sample_sizes import PATCHES_ARE, SAMPLES_ARE, SampleSizes


@dataclass(frozen=True)
class SD3Config(SampleSizes):
    """Sizes of an SD3; ``sample_size`` is the side of its input latents.

    The position table has ``pos_embed_max_size`` squared entries, spaced for latents of the side
    ``base_sample_size`` (diffusers' "sample_size"). Smaller latents use its centre.
    ``context_length`` counts the text tokens: 77 of CLIP and those of T5. ``qk_norm`` is an RMSNorm
    of each head's queries and keys. Blocks in ``dual_attention_layers`` have a second attention
    within the image (SD3.5).
    """

    num_layers: int = 24
    num_attention_heads: int = 24
    attention_head_dim: int = 64
    sample_size: int = run_choice(
        128,
        "positions are the central ones of the table of {0.pos_embed_max_size} rows and columns",
    )
    buckets: str = run_choice("", SAMPLES_ARE)
    patchwise: str = run_choice("", PATCHES_ARE)
    patch_size: int = 2
    in_channels: int = 16
    out_channels: int = 16
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 2048
    pos_embed_max_size: int = 192
    base_sample_size: int = 128
    context_length: int = run_choice(154, "text has no positions")
    qk_norm: bool = False
    dual_attention_layers: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        if found := below(self, 1):
            return found
        found = unfit_for_patches(self)
        most = self.pos_embed_max_size
        found += self.faults_beyond(most, f"pos_embed_max_size={most}")
        if not set(self.dual_attention_layers) <= set(range(self.num_layers)):
            found.append(
                f"dual_attention_layers: must be among the {self.num_layers} blocks, "
                f"are {self.dual_attention_layers}"
            )
        return found


# Sizes as in the config.json files of stabilityai/stable-diffusion-3-medium-diffusers,
# stable-diffusion-3.5-medium and stable-diffusion-3.5-large.
CONFIGS: dict[str, SD3Config] = {
    "sd3-tiny": SD3Config(
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=8,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        pos_embed_max_size=6,
        base_sample_size=8,
        context_length=6,
    ),
    "sd3-medium": SD3Config(),
    "sd3.5-medium": SD3Config(
        pos_embed_max_size=384, qk_norm=True, dual_attention_layers=tuple(range(13))
    ),
    "sd3.5-large": SD3Config(num_layers=38, num_attention_heads=38, qk_norm=True),
}
