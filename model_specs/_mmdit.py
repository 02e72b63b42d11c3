"""How diffusers stores what SD3 and Flux share. Imports neither torch nor Megatron."""

from __future__ import annotations

from megatron_pulse.backbone.published import PerHead, Rule


def joint_rules(num_heads: int) -> tuple[Rule, ...]:
    """Rules of the blocks with two streams, of the text's embedding and of the head."""
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
        Rule("*.linear_fc1.*", "*.net.0.proj.*"),
        Rule("*.linear_fc2.*", "*.net.2.*"),
    )
