"""DiT's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

import functools

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.dit.config import DiTConfig


def build_backbone(name: str, config: DiTConfig) -> Backbone:
    """The chain ``embedding``, ``pos_embed``, ``transformer_blocks.*.{attn1,ff}``, ``head``."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: DiTConfig, height: int, width: int) -> Backbone:
    image = TensorSpec((config.in_channels, height, width))
    prediction = TensorSpec((config.out_channels, height, width))
    num_tokens = (height // config.patch_size) * (width // config.patch_size)
    tokens = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    modulation = TensorSpec((3 * config.dim,))
    times = {"timesteps": TensorSpec((), dtype="float32"), "labels": TensorSpec((), dtype="int64")}
    fields = {**times, **config.patch_fields}
    build = builder("model_specs.dit.modules", config)

    layers = [
        embedder(
            "embedding", build("Embedding"), image, {"temb0": TensorSpec((config.dim,))}, (*times,)
        ),
        Layer("pos_embed", build("PatchLayer"), (image,), (tokens,), uses=(*config.patch_fields,)),
    ]
    for i in range(config.num_layers):
        block, first = f"transformer_blocks.{i}", i == 0
        attention = build("Attention", own_embedder=not first)
        uses = ("temb0",) if first else (*times,)
        layers += [
            Layer(
                f"{block}.attn1",
                attention,
                (tokens,),
                (tokens, modulation),
                uses=uses,
                attends=((0,),),
            ),
            Layer(f"{block}.ff", build("FeedForward"), (tokens, modulation), (tokens,)),
        ]
    layers.append(Layer("head", build("Head"), (tokens,), (prediction,), uses=("temb0",)))
    return Backbone(
        name,
        tuple(layers),
        fields,
        num_classes=config.num_classes,
        null_label=config.num_classes,
        num_heads=(config.num_attention_heads,),
        patch_size=config.patch_size,
    )
