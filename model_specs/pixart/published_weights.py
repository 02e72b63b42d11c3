"""Format of a PixArt in diffusers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Concatenated, Published, Rule
from model_specs.common.published_weights import (
    attention_rules,
    mlp_rules,
    require_settings,
    same_settings,
)
from model_specs.pixart.config import PixArtConfig

PUBLISHED_AS = "PixArtTransformer2DModel"

_REQUIRED = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "upcast_attention": False,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_type": "default",
}


def published(config: PixArtConfig) -> Published:
    """Format in diffusers; the published sample_size is the size that positions are spaced for.

    The caption length is not stored.
    """
    settings = {
        **same_settings(config, "caption_length", "base_sample_size"),
        "sample_size": config.base_size,
        "interpolation_scale": (
            None if config.position_scale == config.usual_scale else config.position_scale
        ),
        "cross_attention_dim": config.dim,
        **_REQUIRED,
    }
    rules = (
        Rule("head.*", "*"),
        Rule(
            ("*.attn1.scale_shift_table", "*.ff.scale_shift_table"),
            "*.scale_shift_table",
            Concatenated((3, 3)),
        ),
        *attention_rules("*.attention", "*", config.num_attention_heads),
        *mlp_rules("*.mlp", "*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> PixArtConfig:
    """Read the sizes in a ``config.json``; ValueError lists unsupported settings.

    The file has no ``caption_length``: 120 with additional conditions (alpha), else 300 (sigma).
    """
    sizes = {key: config.get(key, value) for key, value in vars(PixArtConfig()).items()}
    if sizes["out_channels"] is None:
        sizes["out_channels"] = sizes["in_channels"]
    if config.get("use_additional_conditions") is None:
        sizes["use_additional_conditions"] = sizes["sample_size"] == 128
    sizes["caption_length"] = 120 if sizes["use_additional_conditions"] else 300
    ours = PixArtConfig(**sizes)
    unprojected = "caption_channels is None; only projected captions are implemented"
    require_settings(
        {"cross_attention_dim": 1152, **config},
        {**_REQUIRED, "cross_attention_dim": ours.dim},
        [unprojected] if config.get("caption_channels") is None else [],
    )
    return ours
