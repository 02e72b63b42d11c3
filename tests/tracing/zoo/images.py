"""diffusers' transformers of pictures, and its autoencoder."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed

from tests.tracing.zoo.draw import SIZE, Made, mask, rand, whole


def hunyuan() -> Made:
    module = diffusers.HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, patch_size=2, sample_size=16,
        hidden_size=32, num_layers=6, cross_attention_dim=24, cross_attention_dim_t5=32,
        pooled_projection_dim=16, text_len=5, text_len_t5=6, learn_sigma=False,
        use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    rotary = get_2d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), output_type="pt")
    return module, lambda b: {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "timestep": rand(b).abs(),
        "encoder_hidden_states": rand(b, 5, 24),
        "text_embedding_mask": whole(b, 5, below=2),
        "encoder_hidden_states_t5": rand(b, 6, 32),
        "text_embedding_mask_t5": whole(b, 6, below=2),
        "image_rotary_emb": rotary,
    }


def flux(heads: int = 2) -> Made:
    side = SIZE // 4
    places = torch.zeros(side, side, 3)
    places[..., 1] += torch.arange(side)[:, None]
    places[..., 2] += torch.arange(side)[None]
    module = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=16, pooled_projection_dim=8,
        guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return module, lambda b: {
        "hidden_states": rand(b, side**2, 16),
        "encoder_hidden_states": rand(b, 6, 16),
        "pooled_projections": rand(b, 8),
        "timestep": rand(b).abs(),
        "img_ids": places.flatten(0, 1),
        "txt_ids": torch.zeros(6, 3),
        "guidance": rand(b).abs(),
    }


def sd3() -> Made:
    module = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=4,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=8, pos_embed_max_size=24,
        qk_norm="rms_norm", dual_attention_layers=(0, 1),
    )  # fmt: skip
    return module, lambda b: {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "encoder_hidden_states": rand(b, 6, 16),
        "pooled_projections": rand(b, 8),
        "timestep": rand(b).abs(),
    }


PIXART: dict[str, Any] = {
    "num_attention_heads": 2, "in_channels": 4, "out_channels": 8, "num_layers": 3,
    "sample_size": 16, "caption_channels": 16, "norm_num_groups": 8,
}  # fmt: skip


def pixart_alpha() -> Made:
    """With the sizes of the picture."""
    module = diffusers.PixArtTransformer2DModel(
        **PIXART, attention_head_dim=24, cross_attention_dim=48, use_additional_conditions=True
    )
    return module, lambda b: {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "added_cond_kwargs": {"resolution": rand(b, 2), "aspect_ratio": rand(b, 1)},
        "encoder_attention_mask": mask(b, 6),
    }


def pixart_sigma() -> Made:
    module = diffusers.PixArtTransformer2DModel(
        **PIXART, attention_head_dim=16, cross_attention_dim=32, use_additional_conditions=False
    )
    return module, lambda b: {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": mask(b, 6),
    }


def autoencoder() -> Made:
    module = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip
    return module, lambda b: {"sample": rand(b, 3, SIZE, SIZE)}
