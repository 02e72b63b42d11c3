"""The study's classes in sizes that are exported in seconds: (module, what it is called with)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

type Made = tuple[nn.Module, dict[str, Any]]

UNET = {"sample_size": 16, "block_out_channels": (16, 32, 32, 32), "layers_per_block": 2,
        "norm_num_groups": 8, "cross_attention_dim": 16}  # fmt: skip
TEXT, SIZE = 5, 16


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def whole(*shape: int, below: int = 1000) -> Tensor:
    return torch.randint(0, below, shape)


def mask(*shape: int) -> Tensor:
    kept = torch.ones(*shape, dtype=torch.long)
    kept[0, -2:] = 0
    return kept


def sd(b: int) -> Made:
    return diffusers.UNet2DConditionModel(**UNET, attention_head_dim=8), {
        "sample": rand(b, 4, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, TEXT, 16),
    }


def sdxl(b: int) -> Made:
    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {**UNET, "block_out_channels": (16, 32, 32)}
    module = diffusers.UNet2DConditionModel(
        **sizes, attention_head_dim=(4, 8, 8), down_block_types=down, up_block_types=up,
        transformer_layers_per_block=(1, 1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )  # fmt: skip
    added = {"text_embeds": rand(b, 16), "time_ids": rand(b, 6)}
    given = {"sample": rand(b, 4, 8, 8), "timestep": whole(b)}
    return module, {
        **given, "encoder_hidden_states": rand(b, TEXT, 16), "added_cond_kwargs": added
    }  # fmt: skip


def small_unet(b: int) -> Made:
    module = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=6, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return module, {
        "sample": rand(b, 4, 8, 8),
        "timestep": rand(b).abs() * 1000,
        "encoder_hidden_states": rand(b, TEXT, 6),
    }


def svd(b: int) -> Made:
    module = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, in_channels=8, block_out_channels=(32, 32), layers_per_block=1,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=16, num_attention_heads=(2, 2), num_frames=3,
        projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
    )  # fmt: skip
    return module, {
        "sample": rand(b, 3, 8, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 1, 16),
        "added_time_ids": rand(b, 3),
    }


def hunyuan(b: int) -> Made:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    module = diffusers.HunyuanDiT2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, patch_size=2, sample_size=16,
        hidden_size=32, num_layers=6, cross_attention_dim=24, cross_attention_dim_t5=32,
        pooled_projection_dim=16, text_len=5, text_len_t5=6, learn_sigma=False,
        use_style_cond_and_image_meta_size=False,
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "timestep": rand(b).abs(),
        "encoder_hidden_states": rand(b, 5, 24),
        "text_embedding_mask": whole(b, 5, below=2),
        "encoder_hidden_states_t5": rand(b, 6, 32),
        "text_embedding_mask_t5": whole(b, 6, below=2),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), output_type="pt"),
    }


def hunyuan_video(b: int) -> Made:
    module = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, patch_size=2, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 6, 16),
        "encoder_attention_mask": mask(b, 6),
        "pooled_projections": rand(b, 8),
        "guidance": rand(b).abs() * 1000,
    }


def wan(b: int) -> Made:
    module = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=48, num_layers=3, rope_max_seq_len=32,
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 7, 16),
    }


def cogvideox(b: int) -> Made:
    module = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=8, text_embed_dim=16, num_layers=3, sample_width=8, sample_height=8,
        sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=6,
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 3, 4, 8, 8),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
    }


def ltx(b: int) -> Made:
    module = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=3, caption_channels=16,
    )  # fmt: skip
    sizes = {"num_frames": 3, "height": 2, "width": 2, "rope_interpolation_scale": (1.0, 1.0, 1.0)}
    return module, {
        "hidden_states": rand(b, 3 * 4, 8),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "encoder_attention_mask": mask(b, 6),
        **sizes,
    }


def mochi(b: int) -> Made:
    module = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=3,
        pooled_projection_dim=16, in_channels=4, text_embed_dim=16, time_embed_dim=8,
        max_sequence_length=6,
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, 2, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 6, 16),
        "encoder_attention_mask": mask(b, 6).bool(),
    }


def flux(b: int) -> Made:
    side = SIZE // 4
    places = torch.zeros(side, side, 3)
    places[..., 1] += torch.arange(side)[:, None]
    places[..., 2] += torch.arange(side)[None]
    module = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8,
        guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, side**2, 16),
        "encoder_hidden_states": rand(b, 6, 16),
        "pooled_projections": rand(b, 8),
        "timestep": rand(b).abs(),
        "img_ids": places.flatten(0, 1),
        "txt_ids": torch.zeros(6, 3),
        "guidance": rand(b).abs(),
    }


def sd3(b: int) -> Made:
    module = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=4,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=8, pos_embed_max_size=24,
        qk_norm="rms_norm", dual_attention_layers=(0, 1),
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "encoder_hidden_states": rand(b, 6, 16),
        "pooled_projections": rand(b, 8),
        "timestep": rand(b).abs(),
    }


def pixart(b: int) -> Made:
    module = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3,
        cross_attention_dim=32, sample_size=16, caption_channels=16,
        use_additional_conditions=False, norm_num_groups=8,
    )  # fmt: skip
    return module, {
        "hidden_states": rand(b, 4, SIZE, SIZE),
        "encoder_hidden_states": rand(b, 6, 16),
        "timestep": whole(b),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": mask(b, 6),
    }


def autoencoder(b: int) -> Made:
    module = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip
    return module, {"sample": rand(b, 3, SIZE, SIZE)}


def clip(b: int) -> Made:
    config = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=16, projection_dim=32, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config), {"input_ids": whole(b, 16, below=99)}


def t5(b: int) -> Made:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    given = {"input_ids": whole(b, 12, below=99), "attention_mask": mask(b, 12)}
    return transformers.T5EncoderModel(config), given


ZOO: dict[str, Callable[[int], Made]] = {
    made.__name__: made
    for made in (
        small_unet,
        sd,
        sdxl,
        svd,
        hunyuan,
        hunyuan_video,
        wan,
        cogvideox,
        ltx,
        mochi,
        flux,
        sd3,
        pixart,
        autoencoder,
        clip,
        t5,
    )  # fmt: skip
}
SKIPS = {"sd": 12, "sdxl": 9, "svd": 4, "hunyuan": 2}
"""Published: of a UNet one a level, block and resampling, of Hunyuan-DiT n / 2 - 1 of n blocks."""


def make(name: str, b: int = 2) -> Made:
    """A class in training mode, no parameter all equal: zeros would hide what is behind them."""
    torch.manual_seed(3)
    module, given = ZOO[name](b)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.train(), given
