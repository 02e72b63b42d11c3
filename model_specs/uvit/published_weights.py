"""Format of a U-ViT in the authors' code. Imports no torch."""

from __future__ import annotations

from megatron_pulse.backbone.published_weights import FusedPerHead, Published, Rule
from model_specs.uvit.config import UViTConfig


def published(config: UViTConfig) -> Published:
    """Parameter names of github.com/baofff/U-ViT; the authors publish no ``config.json``."""
    rules = (
        Rule("embed.patch_embed.*", "patch_embed.proj.*"),
        Rule("embed.*", "*"),
        Rule("head.*", "*"),
        Rule(
            "*.attn.attention.linear_qkv.weight",
            "*.attn.qkv.weight",
            FusedPerHead(config.num_heads),
        ),
        Rule("*.attn.attention.linear_proj.*", "*.attn.proj.*"),
        Rule("*.attn.*", "*.*"),
        Rule("*.mlp.mlp.linear_fc*", "*.mlp.fc*"),
        Rule("*.mlp.*", "*.*"),
    )
    return Published("U-ViT", "UViT", {}, rules)
