"""Helpers for reading published ``config.json`` files, shared by the families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pulse.backbone.published_weights import PerHead, Rule
from megatron_pulse.errors import format_faults
from model_specs.common.options import FamilyConfig
from model_specs.common.sample_sizes import BUCKETS, PATCHWISE


def require_settings(
    config: Mapping[str, Any], required: Mapping[str, Any], more: Sequence[str] = ()
) -> None:
    """Raise a ValueError that lists every setting of ``config`` that differs from ``required``.

    ``required`` holds the library's defaults, so an absent setting is fine. ``more`` are faults
    found by the caller.
    """
    faults = [
        f"{key} is {config[key]!r}; only {value!r} is implemented"
        for key, value in required.items()
        if key in config
        and (config[key] != value or isinstance(config[key], bool) != isinstance(value, bool))
    ]
    faults += more
    if faults:
        what = config.get("_class_name", "the published configuration")
        raise ValueError(format_faults(f"{what} has settings that no family implements", faults))


def same_settings(config: FamilyConfig, *without: str) -> dict[str, Any]:
    """Fields with the same name in the library: all but sizes of samples and ``without``."""
    own = {BUCKETS, PATCHWISE, *without}
    return {key: value for key, value in vars(config).items() if key not in own}


def attention_rules(ours: str, theirs: str, num_heads: int) -> tuple[Rule, ...]:
    """Rules from Megatron's attention ``ours`` to diffusers' ``theirs``: projections, head
    norms."""
    kv = (f"{theirs}.to_k.*", f"{theirs}.to_v.*")
    layout = PerHead(num_heads)
    return (
        Rule(f"{ours}.linear_qkv.*", (f"{theirs}.to_q.*", *kv), layout),
        Rule(f"{ours}.linear_q.*", f"{theirs}.to_q.*"),
        Rule(f"{ours}.linear_kv.*", kv, layout),
        Rule(f"{ours}.linear_proj.*", f"{theirs}.to_out.0.*"),
        Rule(f"{ours}.core_attention.q_layernorm.*", f"{theirs}.norm_q.*"),
        Rule(f"{ours}.core_attention.k_layernorm.*", f"{theirs}.norm_k.*"),
    )


def mlp_rules(ours: str, theirs: str) -> tuple[Rule, Rule]:
    """Rules from Megatron's MLP ``ours`` to diffusers' feed-forward ``theirs``."""
    return (
        Rule(f"{ours}.linear_fc1.*", f"{theirs}.net.0.proj.*"),
        Rule(f"{ours}.linear_fc2.*", f"{theirs}.net.2.*"),
    )


def joint_rules(num_heads: int) -> tuple[Rule, ...]:
    """Rules of two-stream blocks, the text embedding and the head."""
    image = tuple(f"*.to_{name}.*" for name in "qkv")
    text = tuple(f"*.add_{name}_proj.*" for name in "qkv")
    return (
        Rule("head.*", "*"),
        Rule("context_embedder.linear.*", "context_embedder.*"),
        Rule("*.image.linear_qkv.*", image, PerHead(num_heads)),
        Rule("*.text.linear_qkv.*", text, PerHead(num_heads)),
        Rule("*.image.linear_proj.*", "*.to_out.0.*"),
        Rule("*.text.linear_proj.*", "*.to_add_out.*"),
        Rule("*.image.q_layernorm.*", "*.norm_q.*"),
        Rule("*.image.k_layernorm.*", "*.norm_k.*"),
        Rule("*.text.q_layernorm.*", "*.norm_added_q.*"),
        Rule("*.text.k_layernorm.*", "*.norm_added_k.*"),
        *mlp_rules("*", "*"),
    )
