"""Format of a DiT in diffusers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Published, Rule
from model_specs.common.published_weights import (
    attention_rules,
    mlp_rules,
    require_settings,
    same_settings,
)
from model_specs.dit.config import DiTConfig

PUBLISHED_AS = "DiTTransformer2DModel"

_REQUIRED = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "upcast_attention": False,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-5,
}


def published(config: DiTConfig) -> Published:
    """Format in diffusers; the published sample_size is the size that positions are spaced for."""
    settings = {
        **same_settings(config, "num_classes", "base_sample_size"),
        "sample_size": config.base_size,
        "num_embeds_ada_norm": config.num_classes,
        **_REQUIRED,
    }
    rules = (
        Rule("embedding.emb.*", "transformer_blocks.0.norm1.emb.*"),
        Rule("*.attn1.emb.*", "*.norm1.emb.*"),
        Rule("*.attn1.modulation.*", "*.norm1.linear.*"),
        *attention_rules("*.attn1.attention", "*.attn1", config.num_attention_heads),
        *mlp_rules("*.ff.mlp", "*.ff"),
        Rule("head.*", "*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> DiTConfig:
    """Read the sizes in a ``config.json``; ValueError lists unsupported settings."""
    require_settings(config, _REQUIRED)
    sizes = {
        key: config[key]
        for key in vars(DiTConfig())
        if key in config and key not in ("num_classes", "out_channels")
    }
    channels = config.get("out_channels")
    return DiTConfig(
        **sizes,
        num_classes=config.get("num_embeds_ada_norm", 1000),
        out_channels=config.get("in_channels", 4) if channels is None else channels,
    )
