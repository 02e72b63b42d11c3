"""Format of an SD3 in diffusers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Published
from model_specs.common.published_weights import attention_rules, joint_rules, require_settings
from model_specs.sd3.config import SD3Config

PUBLISHED_AS = "SD3Transformer2DModel"

# Settings with our names; values apply to those missing from a config.json.
_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 18,
    "num_attention_heads": 18,
    "attention_head_dim": 64,
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (),
}


def published(config: SD3Config) -> Published:
    """Format in diffusers. The positions are a buffer in its state dict and in ours."""
    settings = {
        **{key: getattr(config, key) for key in _DEFAULTS},
        "sample_size": config.base_sample_size,
        "caption_projection_dim": config.dim,
        "qk_norm": "rms_norm" if config.qk_norm else None,
    }
    rules = (
        *attention_rules("*.attn2", "*.attn2", config.num_attention_heads),
        *joint_rules(config.num_attention_heads),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> SD3Config:
    """Read the sizes in a ``config.json``; ValueError lists unsupported settings.

    Latents get the size that positions are spaced for, at most the table's. Texts get the default
    length. Both are choices of the run.
    """
    settings = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    if settings["out_channels"] is None:
        settings["out_channels"] = settings["in_channels"]
    qk_norm = config.get("qk_norm")
    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    required = {"caption_projection_dim": width}
    if qk_norm is not None:
        required["qk_norm"] = "rms_norm"
    require_settings({"caption_projection_dim": 1152, **config}, required)
    settings["dual_attention_layers"] = tuple(settings["dual_attention_layers"])
    base = settings.pop("sample_size")
    largest = settings["pos_embed_max_size"] * settings["patch_size"]
    return SD3Config(
        **settings,
        sample_size=min(base, largest),
        base_sample_size=base,
        qk_norm=qk_norm is not None,
    )
