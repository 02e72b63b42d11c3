"""diffusers' declared transformers, tiny, called with random inputs as they are declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from model_specs.derived.classes import CLASSES
from model_specs.derived.inputs import Declared
from tests.tracing.zoo.draw import Made

FLUX: dict[str, Any] = {
    "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
COGVIEW: dict[str, Any] = {
    "in_channels": 4, "out_channels": 4, "num_layers": 3, "attention_head_dim": 16,
    "num_attention_heads": 2, "text_embed_dim": 16, "time_embed_dim": 16, "condition_dim": 8,
    "pos_embed_max_size": 16, "sample_size": 8,
}  # fmt: skip
WAN: dict[str, Any] = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 32, "ffn_dim": 48, "num_layers": 3, "rope_max_seq_len": 32,
}  # fmt: skip
HUNYUAN: dict[str, Any] = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
    "num_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 16, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
PICTURE = {"height": 8, "width": 8, "text_length": 6}
VIDEO = {"frames": 3, **PICTURE}


@dataclass(frozen=True)
class Tiny:
    """A class with a config and sizes; ``times`` is the largest time that the class itself gets."""

    kind: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=lambda: PICTURE)
    times: float = 1000.0


TINY: dict[str, Tiny] = {
    "chroma": Tiny(
        "ChromaTransformer2DModel",
        {**FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16,
         "approximator_layers": 1},
        times=1.0,
    ),
    "ovis": Tiny("OvisImageTransformer2DModel", {**FLUX, "out_channels": 16}, times=1.0),
    "longcat": Tiny("LongCatImageTransformer2DModel", FLUX, times=1.0),
    "bria": Tiny("BriaTransformer2DModel", FLUX),
    "hidream": Tiny(
        "HiDreamImageTransformer2DModel",
        {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "caption_channels": [16, 12], "text_emb_dim": 8, "axes_dims_rope": (4, 6, 6),
         "max_resolution": (8, 8), "llama_layers": [0, 1, 1, 2]},
    ),
    "cogview3": Tiny("CogView3PlusTransformer2DModel", COGVIEW),
    "cogview4": Tiny("CogView4Transformer2DModel", {**COGVIEW, "rope_axes_dim": (16, 16)}),
    "lumina2": Tiny(
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 3,
         "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (32, 16, 16), "cap_feat_dim": 16},
        times=1.0,
    ),
    "z_image": Tiny(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2,
         "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [80, 16, 16]},
        {"height": 8, "width": 12, "text_length": 40},
        times=1.0,
    ),
    "omnigen": Tiny(
        "OmniGenTransformer2DModel",
        {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "num_layers": 3, "pad_token_id": 0, "vocab_size": 40,
         "rope_scaling": {"short_factor": [1.0] * 4 + [1.5] * 4, "long_factor": [2.0] * 8},
         "pos_embed_max_size": 8, "time_step_dim": 16},
        times=1.0,
    ),
    "prx": Tiny(
        "PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 16, "hidden_size": 32, "num_heads": 2, "depth": 3,
         "axes_dim": [8, 8]},
        times=1.0,
    ),
    "krea2": Tiny(
        "Krea2Transformer2DModel",
        {"in_channels": 16, "num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 48, "timestep_embed_dim": 16,
         "text_hidden_dim": 16, "num_text_layers": 2, "text_num_attention_heads": 2,
         "text_num_key_value_heads": 2, "text_intermediate_size": 24,
         "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 6, 6)},
        times=1.0,
    ),
    "ernie": Tiny(
        "ErnieImageTransformer2DModel",
        {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 3, "ffn_hidden_size": 48,
         "in_channels": 4, "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (4, 6, 6)},
    ),
    "hunyuan_image": Tiny(
        "HunyuanImageTransformer2DModel",
        {**HUNYUAN, "in_channels": 4, "num_single_layers": 2, "text_embed_2_dim": 12,
         "rope_axes_dim": (8, 8), "guidance_embeds": True},
    ),
    "wan_5b": Tiny("WanTransformer3DModel", WAN, {**VIDEO, "known_frames": 1}),
    "vace": Tiny(
        "WanVACETransformer3DModel",
        {**WAN, "num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 6},
        VIDEO,
    ),
    "chrono_edit": Tiny("ChronoEditTransformer3DModel", {**WAN, "in_channels": 12}, VIDEO),
    "skyreels": Tiny("SkyReelsV2Transformer3DModel", {**WAN, "inject_sample_info": True}, VIDEO),
    "hunyuan_video15": Tiny(
        "HunyuanVideo15Transformer3DModel",
        {**HUNYUAN, "num_layers": 3, "patch_size": 2, "text_embed_2_dim": 12,
         "image_embed_dim": 12},
        VIDEO,
    ),
    "framepack": Tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        {**HUNYUAN, "in_channels": 4, "num_single_layers": 2, "pooled_projection_dim": 8,
         "has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True,
         "guidance_embeds": True},
        VIDEO,
    ),
    "kandinsky5": Tiny(
        "Kandinsky5Transformer3DModel",
        {"in_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16,
         "out_visual_dim": 4, "model_dim": 32, "ff_dim": 48, "num_text_blocks": 1,
         "num_visual_blocks": 3, "axes_dims": (4, 6, 6), "visual_cond": True},
        {**VIDEO, "known_frames": 1},
    ),
    "ltx_known": Tiny(
        "LTXVideoTransformer3DModel",
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
         "cross_attention_dim": 32, "num_layers": 3, "caption_channels": 16},
        {**VIDEO, "height": 2, "width": 2, "known_frames": 1},
    ),
    "ltx2": Tiny(
        "LTX2VideoTransformer3DModel",
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16,
         "cross_attention_dim": 32, "audio_in_channels": 8, "audio_out_channels": 8,
         "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
         "audio_cross_attention_dim": 16, "num_layers": 3, "caption_channels": 16},
        {**VIDEO, "height": 2, "width": 2},
    ),
    "sana_video": Tiny(
        "SanaVideoTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
         "num_layers": 3, "num_cross_attention_heads": 2, "cross_attention_head_dim": 12,
         "cross_attention_dim": 24, "caption_channels": 16, "sample_size": 8,
         "rope_max_seq_len": 32, "guidance_embeds": True},
        VIDEO,
    ),
    "allegro": Tiny(
        "AllegroTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 3,
         "cross_attention_dim": 48, "sample_height": 8, "sample_width": 8, "sample_frames": 3,
         "caption_channels": 16},
        VIDEO,
    ),
    "latte": Tiny(
        "LatteTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8,
         "num_layers": 2, "cross_attention_dim": 32, "attention_bias": True, "sample_size": 8,
         "patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000,
         "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "caption_channels": 16,
         "video_length": 3},
        VIDEO,
    ),
    "easy_animate": Tiny(
        "EasyAnimateTransformer3DModel",
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 9, "out_channels": 4,
         "patch_size": 2, "num_layers": 3, "mmdit_layers": 3, "time_embed_dim": 16,
         "text_embed_dim": 16},
        VIDEO,
    ),
    "cosmos": Tiny(
        "CosmosTransformer3DModel",
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 24,
         "num_layers": 3, "text_embed_dim": 16, "adaln_lora_dim": 8, "max_size": (4, 8, 8),
         "extra_pos_embed_type": None},
        VIDEO,
        times=1.0,
    ),
    "i2vgen": Tiny(
        "I2VGenXLUNet",
        {"in_channels": 4, "out_channels": 4, "down_block_types":
         ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types":
         ("UpBlock3D", "CrossAttnUpBlock3D"), "block_out_channels": (8, 16),
         "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8,
         "attention_head_dim": 4},
        VIDEO,
    ),
    "motif": Tiny(
        "MotifVideoTransformer3DModel",
        {**{k: v for k, v in HUNYUAN.items() if k != "num_refiner_layers"},
         "num_single_layers": 2},
        VIDEO,
    ),
}  # fmt: skip


def declaration(name: str) -> Declared:
    """Inputs of a tiny class."""
    tiny = TINY[name]
    return CLASSES[tiny.kind].declared(class_of(name)(**tiny.config).config, tiny.sizes)


def class_of(name: str) -> Any:
    return getattr(diffusers, TINY[name].kind)


@dataclass(frozen=True)
class Roles:
    """Keywords of ``from_module`` that say what a module's inputs are."""

    sample: str | None = None
    timestep: str | None = None
    constants: tuple[str, ...] = ()


def roles_of(name: str) -> Roles | None:
    """Roles of a tiny class's inputs; None for other names."""
    if name not in TINY:
        return None
    said = declaration(name)
    return Roles(said.sample, said.timestep, tuple(said.keywords()["constants"]))


def declared(name: str) -> Made:
    """A tiny class, and random inputs for a microbatch size."""
    tiny, said = TINY[name], declaration(name)
    module = class_of(name)(**tiny.config)
    make = said.make("float32")
    constants = said.keywords()["constants"]

    def given(size: int) -> Mapping[str, Any]:
        def draw(path: Any, leaf: Any) -> Any:
            key = path[0].key
            if not isinstance(leaf, Tensor) or key in constants:
                return leaf
            if key == said.timestep:
                return torch.rand(leaf.shape) * tiny.times
            if "mask" in key and not leaf.is_floating_point():
                leaf[0, -2:] = 0
                return leaf
            if leaf.is_floating_point():
                return torch.randn(leaf.shape)
            return torch.randint(0, 30, leaf.shape)

        return dict(pytree.tree_map_with_path(draw, make(size)))

    return said.wrap(module), given


def makers() -> dict[str, Callable[[], Made]]:
    """Builder of each tiny class."""
    return {name: lambda name=name: declared(name) for name in TINY}  # type: ignore[misc]
