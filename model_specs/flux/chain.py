"""Flux's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

import functools

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.flux.config import FluxConfig


def build_backbone(name: str, config: FluxConfig) -> Backbone:
    """Chain: ``time_text_embed``, ``x_embedder``, ``context_embedder``, both kinds of
    blocks, head."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: FluxConfig, height: int, width: int) -> Backbone:
    latent = TensorSpec((config.in_channels, height, width))
    num_tokens = (height // config.patch_size) * (width // config.patch_size)
    num_tokens *= 1 + config.reference
    image = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.context_length, config.dim), batch_dim=1, sequence=True)
    scalars = ("timesteps", "guidance") if config.guidance_embeds else ("timesteps",)
    fields = {
        **{key: TensorSpec((), dtype="float32") for key in scalars},
        "context": TensorSpec((config.context_length, config.joint_attention_dim)),
        "pooled": TensorSpec((config.pooled_projection_dim,)),
    }
    reference = (REFERENCE_IMAGE,) if config.reference else ()
    fields |= dict.fromkeys(reference, latent)
    build = builder("model_specs.flux.modules", config)
    time = build("TimeTextGuidanceEmbed")
    temb = {"temb": TensorSpec((config.dim,))}
    both = (image, text)

    last = config.num_single_layers - 1
    layers = (
        embedder("time_text_embed", time, latent, temb, (*scalars, "pooled")),
        Layer("x_embedder", build("PackedEmbed"), (latent,), (image,), uses=reference),
        Layer("context_embedder", build("ContextEmbedder"), (image,), both, uses=("context",)),
        *(
            Layer(
                f"transformer_blocks.{i}",
                build("DoubleBlock"),
                both,
                both,
                uses=("temb",),
                attends=((0, 1),),
            )
            for i in range(config.num_layers)
        ),
        *(
            Layer(
                f"single_transformer_blocks.{i}",
                build("SingleBlock", text_ends=i == last),
                both,
                both if i < last else (image,),
                uses=("temb",),
                attends=((0, 1),),
            )
            for i in range(config.num_single_layers)
        ),
        Layer("head", build("head"), (image,), (latent,), uses=("temb",)),
    )
    heads = (config.num_attention_heads,)
    return Backbone(name, layers, fields, num_heads=heads, patch_size=config.patch_size)
