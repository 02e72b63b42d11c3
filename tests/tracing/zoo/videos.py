"""diffusers' transformers of videos."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from tests.tracing.zoo.draw import Made, mask, rand, whole


def hunyuan_video(heads: int = 2) -> Made:
    module = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=heads, attention_head_dim=16,
        num_layers=2, num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return module, lambda b: {
        "hidden_states": rand(b, 4, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 6, 16),
        "encoder_attention_mask": mask(b, 6),
        "pooled_projections": rand(b, 8),
        "guidance": rand(b).abs() * 1000,
    }


WAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 12, "out_channels": 4, "text_dim": 16,
    "freq_dim": 32, "ffn_dim": 48, "num_layers": 3, "rope_max_seq_len": 32,
}  # fmt: skip


def wan(heads: int = 2) -> Made:
    module = diffusers.WanTransformer3DModel(**{**WAN, "num_attention_heads": heads}, in_channels=4)
    return module, lambda b: {
        "hidden_states": rand(b, 4, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 7, 16),
    }


def wan_i2v() -> Made:
    """Its text has 512 tokens, as the class says; the picture's come before them."""
    module = diffusers.WanTransformer3DModel(
        **WAN, in_channels=8, image_dim=8, added_kv_proj_dim=24
    )
    return module, lambda b: {
        "hidden_states": rand(b, 8, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 512, 16),
        "encoder_hidden_states_image": rand(b, 9, 8),
    }


COGVIDEOX: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 3, "sample_width": 8,
    "sample_height": 8, "sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4,
    "max_text_seq_length": 6,
}  # fmt: skip


def cogvideox_2b(heads: int = 2) -> Made:
    module = diffusers.CogVideoXTransformer3DModel(**{**COGVIDEOX, "num_attention_heads": heads})
    return module, lambda b: {
        "hidden_states": rand(b, 3, 4, 8, 8),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
    }


def cogvideox_5b() -> Made:
    """With rotary positions."""
    module = diffusers.CogVideoXTransformer3DModel(
        **COGVIDEOX, use_rotary_positional_embeddings=True
    )
    return module, lambda b: {
        "hidden_states": rand(b, 3, 4, 8, 8),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (4, 4)), (4, 4), 3),
    }


def ltx(heads: int = 2) -> Made:
    module = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=heads, attention_head_dim=16,
        cross_attention_dim=16 * heads, num_layers=3, caption_channels=16,
    )  # fmt: skip
    sizes = {"num_frames": 3, "height": 2, "width": 2, "rope_interpolation_scale": (1.0, 1.0, 1.0)}
    return module, lambda b: {
        "hidden_states": rand(b, 3 * 4, 8),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "encoder_attention_mask": mask(b, 6),
        **sizes,
    }


def mochi() -> Made:
    module = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=3,
        pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8,
        max_sequence_length=6,
    )  # fmt: skip
    return module, lambda b: {
        "hidden_states": rand(b, 4, 2, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 6, 16),
        "encoder_attention_mask": mask(b, 6).bool(),
    }
