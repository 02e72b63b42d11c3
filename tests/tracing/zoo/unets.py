"""diffusers' UNets, of pictures and of videos."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.tracing.zoo.draw import TEXT, Made, rand, whole

UNET = {"sample_size": 16, "block_out_channels": (8, 16, 16, 16), "layers_per_block": 2,
        "norm_num_groups": 4, "cross_attention_dim": 16}  # fmt: skip


def small_unet() -> Made:
    module = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=6, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return module, lambda b: {
        "sample": rand(b, 4, 8, 8),
        "timestep": rand(b).abs() * 1000,
        "encoder_hidden_states": rand(b, TEXT, 6),
    }


def sd() -> Made:
    return diffusers.UNet2DConditionModel(**UNET, attention_head_dim=8), lambda b: {
        "sample": rand(b, 4, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, TEXT, 16),
    }


def sdxl() -> Made:
    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {**UNET, "block_out_channels": (8, 16, 16)}
    module = diffusers.UNet2DConditionModel(
        **sizes, attention_head_dim=(4, 8, 8), down_block_types=down, up_block_types=up,
        transformer_layers_per_block=(1, 1, 2), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16 + 6 * 8,
    )  # fmt: skip
    return module, lambda b: {
        "sample": rand(b, 4, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, TEXT, 16),
        "added_cond_kwargs": {"text_embeds": rand(b, 16), "time_ids": rand(b, 6)},
    }


def _svd(levels: int, layers: int) -> Made:
    cross, plain = 1, levels - 1  # published: all but one; here one, for time
    module = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, in_channels=8, block_out_channels=(32,) * levels, layers_per_block=layers,
        down_block_types=("CrossAttnDownBlockSpatioTemporal",) * cross
        + ("DownBlockSpatioTemporal",) * plain,
        up_block_types=("UpBlockSpatioTemporal",) * plain
        + ("CrossAttnUpBlockSpatioTemporal",) * cross,
        cross_attention_dim=16, num_attention_heads=(2,) * levels, num_frames=2,
        projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
    )  # fmt: skip
    return module, lambda b: {
        "sample": rand(b, 2, 8, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(b, 1, 16),
        "added_time_ids": rand(b, 3),
    }


def svd() -> Made:
    return _svd(4, 2)


def small_svd() -> Made:
    return _svd(2, 1)


def _motion(**sizes: Any) -> Made:
    module = diffusers.UNetMotionModel(
        **{**UNET, **sizes}, num_attention_heads=4, motion_num_attention_heads=4,
        motion_max_seq_length=8,
    )  # fmt: skip
    return module, lambda b: {
        "sample": rand(b, 4, 3, 8, 8),
        "timestep": whole(b),
        "encoder_hidden_states": rand(3 * b, TEXT, 16),
    }


def motion() -> Made:
    return _motion()


def small_motion() -> Made:
    return _motion(
        block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        up_block_types=("CrossAttnUpBlockMotion", "UpBlockMotion"),
    )  # fmt: skip
