"""Format of a Hunyuan-DiT in diffusers. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Published, Rule
from model_specs.common.published_weights import (
    attention_rules,
    mlp_rules,
    require_settings,
    same_settings,
)
from model_specs.hunyuan_dit.config import HunyuanDiTConfig

PUBLISHED_AS = "HunyuanDiT2DModel"


def published(config: HunyuanDiTConfig) -> Published:
    """As diffusers stores it."""
    settings = {
        **same_settings(config, "ffn_dim", "style_and_size"),
        "hidden_size": config.dim,
        "mlp_ratio": _ratio(config.ffn_dim, config.dim),
        "use_style_cond_and_image_meta_size": config.style_and_size,
        "activation_fn": "gelu-approximate",
        "norm_type": "layer_norm",
    }
    rules = (
        Rule("text.*", "*"),
        Rule("head.*", "*"),
        *attention_rules("*.attention", "*", config.num_attention_heads),
        *mlp_rules("*.ff.mlp", "*.ff"),
        Rule("*.attn1.*", "*.*"),
        Rule("*.attn2.*", "*.*"),
        Rule("*.ff.*", "*.*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def _ratio(ffn_dim: int, width: int) -> float:
    """``mlp_ratio`` with which diffusers' int(width * ratio) gives ``ffn_dim``.

    Rounded up to four digits, as v1.2's is, or to more digits if four give another width.
    """
    ratios = (math.ceil(ffn_dim / width * 10**digits) / 10**digits for digits in range(4, 16))
    exact = (ratio for ratio in ratios if int(width * ratio) == ffn_dim)
    return next(exact, math.nextafter(ffn_dim / width, math.inf))


# diffusers' defaults for settings missing from config.json.
_DEFAULTS: dict[str, Any] = {
    "sample_size": 32,
    "learn_sigma": True,
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "hidden_size": 1152,
    "mlp_ratio": 4.0,
    "cross_attention_dim": 1024,
    "cross_attention_dim_t5": 2048,
    "pooled_projection_dim": 1024,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": True,
}


def config_from_published(config: Mapping[str, Any]) -> HunyuanDiTConfig:
    """Read the sizes in a ``config.json``; raises ValueError for unsupported settings."""
    settings = {**_DEFAULTS, **config}
    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    require_settings(
        settings,
        {"activation_fn": "gelu-approximate", "norm_type": "layer_norm", "hidden_size": width},
    )
    same = {key: settings[key] for key in HunyuanDiTConfig.__dataclass_fields__ if key in settings}
    return HunyuanDiTConfig(
        **same,
        ffn_dim=int(width * settings["mlp_ratio"]),
        style_and_size=settings["use_style_cond_and_image_meta_size"],
    )
