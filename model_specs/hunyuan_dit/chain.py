"""Hunyuan-DiT's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

import functools

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.hunyuan_dit.config import HunyuanDiTConfig


def build_backbone(name: str, config: HunyuanDiTConfig) -> Backbone:
    """The chain: two embedders, ``pos_embed``, each block's ``attn1 attn2 ff``, ``head``."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: HunyuanDiTConfig, height: int, width: int) -> Backbone:
    image = TensorSpec((config.in_channels, height, width))
    num_tokens = (height // config.patch_size) * (width // config.patch_size)
    tokens = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.text_len + config.text_len_t5, config.cross_attention_dim), 1)
    prediction = TensorSpec((config.out_channels, *image.shape[1:]))
    fields = {
        "timesteps": TensorSpec((), dtype="float32"),
        "context": TensorSpec((config.text_len, config.cross_attention_dim)),
        "context_mask": TensorSpec((config.text_len,), dtype="int64"),
        "context_t5": TensorSpec((config.text_len_t5, config.cross_attention_dim_t5)),
        "context_t5_mask": TensorSpec((config.text_len_t5,), dtype="int64"),
    }
    if config.style_and_size:
        fields["image_meta_size"] = TensorSpec((6,), dtype="float32")
    build = builder("model_specs.hunyuan_dit.modules", config)

    def block(i: int) -> tuple[Layer, ...]:
        mirror = config.num_layers - 1 - i
        pop = f"blocks.{mirror}" if mirror < config.num_skips else None
        attn1 = Layer(
            f"blocks.{i}.attn1",
            build("SelfAttentionLayer", pop=pop),
            (tokens,),
            (tokens,),
            pops={pop: tokens} if pop else {},
            uses=("temb",),
            attends=((0,),),
        )
        attn2 = Layer(
            f"blocks.{i}.attn2", build("CrossAttentionLayer"), (tokens,), (tokens,), uses=("text",)
        )
        pushes = {f"blocks.{i}": 0} if i < config.num_skips else {}
        ff = Layer(f"blocks.{i}.ff", build("FeedForwardLayer"), (tokens,), (tokens,), pushes)
        return attn1, attn2, ff

    texts = ("context", "context_mask", "context_t5", "context_t5_mask")
    timed = ("timesteps", "context_t5", *(["image_meta_size"] if config.style_and_size else []))
    temb = TensorSpec((config.dim,))
    layers = (
        embedder("time_extra_emb", build("TimeEmbedding"), image, {"temb": temb}, timed),
        embedder("text", build("TextEmbedding"), image, {"text": text}, texts),
        Layer("pos_embed", build("Patches"), (image,), (tokens,)),
        *(layer for i in range(config.num_layers) for layer in block(i)),
        Layer("head", build("Head"), (tokens,), (prediction,), uses=("temb",)),
    )
    heads = (config.num_attention_heads,)
    return Backbone(name, layers, fields, num_heads=heads, patch_size=config.patch_size)
