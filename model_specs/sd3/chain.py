"""SD3's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

import functools

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.sd3.config import SD3Config


def build_backbone(name: str, config: SD3Config) -> Backbone:
    """Chain: ``time_text_embed``, ``pos_embed``, ``context_embedder``, blocks, head."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: SD3Config, height: int, width: int) -> Backbone:
    sample = TensorSpec((config.in_channels, height, width))
    prediction = TensorSpec((config.out_channels, height, width))
    num_tokens = (height // config.patch_size) * (width // config.patch_size)
    image = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.context_length, config.dim), batch_dim=1, sequence=True)
    fields = {
        "timesteps": TensorSpec((), dtype="float32"),
        "context": TensorSpec((config.context_length, config.joint_attention_dim)),
        "pooled": TensorSpec((config.pooled_projection_dim,)),
        **config.patch_fields,
    }
    build = builder("model_specs.sd3.modules", config)
    time = build("TimeTextEmbed")
    temb = {"temb": TensorSpec((config.dim,))}
    both = (image, text)

    last = config.num_layers - 1
    layers = (
        embedder("time_text_embed", time, sample, temb, ("timesteps", "pooled")),
        Layer(
            "pos_embed",
            build("PositionedPatches"),
            (sample,),
            (image,),
            uses=(*config.patch_fields,),
        ),
        Layer("context_embedder", build("ContextEmbedder"), (image,), both, uses=("context",)),
        *(
            Layer(
                f"transformer_blocks.{i}",
                build("block", index=i),
                both,
                both if i < last else (image,),
                uses=("temb",),
                attends=((0, 1), (0,)) if i in config.dual_attention_layers else ((0, 1),),
            )
            for i in range(config.num_layers)
        ),
        Layer("head", build("head"), (image,), (prediction,), uses=("temb",)),
    )
    heads = (config.num_attention_heads,)
    return Backbone(name, layers, fields, num_heads=heads, patch_size=config.patch_size)
