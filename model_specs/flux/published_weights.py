"""Format of a Flux in diffusers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.backbone.published_weights import Concatenated, PerHead, Published, Rule
from model_specs.common.published_weights import joint_rules, require_settings
from model_specs.flux.config import PACKED, FluxConfig

PUBLISHED_AS = "FluxTransformer2DModel"

# Settings with our names; values apply to those missing from a config.json.
_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}


def published(config: FluxConfig) -> Published:
    """Format in diffusers; its channels are those of a packed token."""
    settings = {
        **{key: getattr(config, key) for key in _DEFAULTS},
        "in_channels": config.in_channels * PACKED**2,
        "out_channels": None,
        "patch_size": 1,
    }
    rules = (
        Rule("x_embedder.linear.*", "x_embedder.*"),
        Rule(
            "*.attn.linear_qkv.*",
            ("*.attn.to_q.*", "*.attn.to_k.*", "*.attn.to_v.*"),
            PerHead(config.num_attention_heads),
        ),
        Rule("*.attn.q_layernorm.*", "*.attn.norm_q.*"),
        Rule("*.attn.k_layernorm.*", "*.attn.norm_k.*"),
        Rule(
            ("*.proj_out_attn.weight", "*.proj_out_mlp.weight"),
            "*.proj_out.weight",
            Concatenated((config.dim, 4 * config.dim), dim=1),
        ),
        Rule("*.proj_out_attn.bias", "*.proj_out.bias"),
        *joint_rules(config.num_attention_heads),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def config_from_published(config: Mapping[str, Any]) -> FluxConfig:
    """Read the sizes in a ``config.json``; ValueError lists unsupported settings.

    The file holds neither the latents' size nor the text length; both are choices of the run. The
    default text length is FLUX.1-dev's, or FLUX.1-schnell's without guidance.
    """
    packed = config.get("in_channels", 64)
    required: dict[str, Any] = {"patch_size": 1}
    if config.get("out_channels") is not None:
        required["out_channels"] = packed
    if packed % PACKED**2:
        required["in_channels"] = f"a multiple of {PACKED**2}"
    require_settings(config, required)
    settings = {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    settings["axes_dims_rope"] = tuple(settings["axes_dims_rope"])
    length = 512 if settings["guidance_embeds"] else 256
    return FluxConfig(**settings, in_channels=packed // PACKED**2, context_length=length)
