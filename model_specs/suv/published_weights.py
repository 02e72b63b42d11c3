"""Format of an SUV in the authors' code. Imports no torch."""

from __future__ import annotations

from megatron_pulse.backbone.published_weights import Published, Rule
from model_specs.common.published_weights import joint_rules, mlp_rules
from model_specs.suv.config import SUVConfig


def published(config: SUVConfig) -> Published:
    """Parameter names of github.com/PKU-YuanGroup/Open-Sora-Plan, which publishes one file.

    The class with an MLP for each stream is MindSpeed-MM's. Under tensor parallelism it also has
    maps of the last block's text, whose results are not used.
    """
    skips = (
        Rule(f"skip_norm_linear.*.{ours}.{part}.*", f"skip_norm_linear{theirs}.*.{place}.*")
        for ours, theirs in (("image", ""), ("text", "_enc"))
        for place, part in enumerate(("norm", "linear"))
    )
    rules = (
        *skips,
        Rule("caption_projection.linear.*", "caption_projection.*"),
        Rule("*.attn1.norm1.*", "*.norm1.*"),
        Rule("*.ff.norm2.*", "*.norm2.*"),
        *mlp_rules("*.ff.mlp", "*.ff"),
        *mlp_rules("*.ff.mlp_enc", "*.ff_enc"),
        *joint_rules(config.num_attention_heads),
    )
    last = f"transformer_blocks.{len(config.num_layers) - 1}.{config.num_layers[-1] - 1}"
    unused = ("attn1.to_add_out.*", "ff_enc.*", "norm2.norm_enc.*")
    return Published(
        "Open-Sora Plan",
        "SparseUMMDiT" if config.double_ff else "OpenSoraT2V_v1_5",
        {},
        rules,
        ignored=tuple(f"{last}.{each}" for each in unused),
    )
