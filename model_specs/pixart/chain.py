"""PixArt's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

import functools

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.pixart.config import PixArtConfig


def build_backbone(name: str, config: PixArtConfig) -> Backbone:
    """``adaln_single``, ``caption_projection``, ``pos_embed``, blocks of three layers, ``head``."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: PixArtConfig, height: int, width: int) -> Backbone:
    image = TensorSpec((config.in_channels, height, width))
    prediction = TensorSpec((config.out_channels, height, width))
    num_tokens = (height // config.patch_size) * (width // config.patch_size)
    tokens = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    times = {"timesteps": TensorSpec((), dtype="float32")}
    if config.use_additional_conditions:
        times["resolution"] = TensorSpec((2,), dtype="float32")
        times["aspect_ratio"] = TensorSpec((1,), dtype="float32")
    fields = {
        **times,
        "context": TensorSpec((config.caption_length, config.caption_channels)),
        "context_mask": TensorSpec((config.caption_length,), dtype="int64"),
        **config.patch_fields,
    }
    modulation = {
        "t6": TensorSpec((6 * config.dim,)),
        "embedded_timestep": TensorSpec((config.dim,)),
    }
    caption = {"caption": TensorSpec((config.caption_length, config.dim), batch_dim=1)}
    build = builder("model_specs.pixart.modules", config)

    layers = [
        embedder("adaln_single", build("AdalnSingle"), image, modulation, (*times,)),
        embedder("caption_projection", build("CaptionProjection"), image, caption, ("context",)),
        Layer("pos_embed", build("PatchLayer"), (image,), (tokens,), uses=(*config.patch_fields,)),
    ]
    for i in range(config.num_layers):
        for part, kind, uses in (
            ("attn1", "SelfAttention", ("t6",)),
            ("attn2", "CrossAttention", ("caption", "context_mask")),
            ("ff", "FeedForward", ("t6",)),
        ):
            block = f"transformer_blocks.{i}.{part}"
            attends = ((0,),) if part == "attn1" else ()
            layers.append(
                Layer(block, build(kind), (tokens,), (tokens,), uses=uses, attends=attends)
            )
    head = Layer("head", build("Head"), (tokens,), (prediction,), uses=("embedded_timestep",))
    heads = (config.num_attention_heads,)
    return Backbone(name, (*layers, head), fields, num_heads=heads, patch_size=config.patch_size)
