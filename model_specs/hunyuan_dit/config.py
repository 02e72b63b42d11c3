"""Hunyuan-DiT's sizes and named configurations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from model_specs.common.config_faults import below, indivisible, unfit_sizes
from model_specs.common.options import fixed, run_choice
from model_specs.common.sample_sizes import PATCHWISE, ROTARY, SAMPLES_ARE, SampleSizes

_LEARNED = "the replacement of padding is learned for each token"


@dataclass(frozen=True)
class HunyuanDiTConfig(SampleSizes):
    """Sizes of a Hunyuan-DiT; ``sample_size`` is the side of the latent.

    Text is ``text_len`` CLIP states of width ``cross_attention_dim`` and ``text_len_t5`` mT5 states
    of width ``cross_attention_dim_t5``. With ``style_and_size`` (versions up to 1.1) the model
    takes the image size and has a style embedding.
    """

    sample_size: int = run_choice(
        128, "rotary positions are computed at {0.sizes_text}, with the spacing of 64"
    )
    buckets: str = run_choice("", SAMPLES_ARE)
    patch_size: int = 2
    in_channels: int = 4
    learn_sigma: bool = True
    num_layers: int = 40
    num_attention_heads: int = 16
    attention_head_dim: int = 88
    ffn_dim: int = 6144
    cross_attention_dim: int = 1024
    cross_attention_dim_t5: int = 2048
    pooled_projection_dim: int = 1024
    text_len: int = fixed(77, _LEARNED)
    text_len_t5: int = fixed(256, _LEARNED)
    style_and_size: bool = False
    UNSUPPORTED = MappingProxyType({PATCHWISE: ROTARY})

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        if found := below(self, 1, num_layers=2):
            return found
        return [
            *indivisible(self, num_layers=2, attention_head_dim=4),
            *unfit_sizes(self),
            *indivisible(self, cross_attention_dim_t5=self.pooling_heads),
        ]

    @property
    def dim(self) -> int:
        """Width of the tokens and of the timestep embedding."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def pooling_heads(self) -> int:
        """Number of heads of the attention that pools the mT5 states, at every size."""
        return 8

    @property
    def out_channels(self) -> int:
        """Channels of the prediction; with ``learn_sigma`` the variance follows the mean."""
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    @property
    def num_skips(self) -> int:
        """Number of skips; the first blocks push one each."""
        return self.num_layers // 2 - 1


# v1.2 and v1.1 are Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers and -v1.1-Diffusers. The others are
# v1.2 scaled by us: heads of 88 features, feed-forwards 48/11 of the width as in v1.2 (6144 of
# 1408). Their number of blocks gives the number of parameters.
CONFIGS: dict[str, HunyuanDiTConfig] = {
    "hunyuan-dit-v1.2": HunyuanDiTConfig(),
    "hunyuan-dit-v1.1": HunyuanDiTConfig(style_and_size=True),
    "hunyuan-dit-0.8b": HunyuanDiTConfig(num_layers=36, num_attention_heads=12, ffn_dim=4608),
    "hunyuan-dit-2.2b": HunyuanDiTConfig(num_layers=38, num_attention_heads=20, ffn_dim=7680),
    "hunyuan-dit-3b": HunyuanDiTConfig(num_layers=38, num_attention_heads=24, ffn_dim=9216),
    "hunyuan-dit-6.0b": HunyuanDiTConfig(num_layers=42, num_attention_heads=32, ffn_dim=12288),
    "hunyuan-tiny": HunyuanDiTConfig(
        sample_size=8,
        num_layers=6,
        num_attention_heads=4,
        attention_head_dim=8,
        ffn_dim=80,
        cross_attention_dim=24,
        cross_attention_dim_t5=16,
        pooled_projection_dim=20,
        text_len=5,
        text_len_t5=7,
    ),
}
