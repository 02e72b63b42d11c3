"""SUV's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.shape_buckets import join_shapes
from model_specs.common.deferred_build import builder, embedder
from model_specs.suv.config import SUVConfig


def build_backbone(name: str, config: SUVConfig) -> Backbone:
    """Chain: ``time_text_embed``, ``patch_embed``, ``caption_projection``, the blocks, ``head``.

    Block i of group g is ``transformer_blocks.g.i.attn1`` and ``.ff``. Before a group that takes a
    skip comes ``skip_norm_linear.k``.
    """
    return join_shapes([_chain(name, config, i) for i in range(len(config.sizes))])


def _chain(name: str, config: SUVConfig, shape_index: int) -> Backbone:
    latent = TensorSpec((config.in_channels, *config.sizes[shape_index]))
    num_tokens = config.token_counts[shape_index]
    video = TensorSpec((num_tokens, config.dim), batch_dim=1, sequence=True)
    text = TensorSpec((config.context_length, config.dim), batch_dim=1, sequence=True)
    both = (video, text)
    fields = {
        "timesteps": TensorSpec((), dtype="float32"),
        "context": TensorSpec((config.context_length, config.caption_channels)),
        "context_mask": TensorSpec((config.context_length,), dtype="int64"),
        "pooled": TensorSpec((config.pooled_projection_dim,)),
    }
    build = builder("model_specs.suv.modules", config)
    temb = {"temb": TensorSpec((config.timestep_embed_dim,))}
    groups, num_skips = len(config.num_layers), config.num_skips

    def block(group: int, i: int) -> tuple[Layer, Layer]:
        prefix = f"transformer_blocks.{group}.{i}"
        last_of_group = i == config.num_layers[group] - 1
        text_ends = last_of_group and group == groups - 1
        after = (video,) if text_ends else both
        sparsity = config.sparse_n[group]
        attention = build(
            "AttentionLayer", sparsity=sparsity, by_group=i % 2 == 1, text_ends=text_ends
        )
        pushes = {}
        if last_of_group and group < num_skips:
            pushes = {f"groups.{group}.video": 0, f"groups.{group}.text": 1}
        uses = ("temb", "context_mask")
        return (
            Layer(f"{prefix}.attn1", attention, both, after, uses=uses, attends=((0, 1),)),
            Layer(
                f"{prefix}.ff",
                build("FeedForwardLayer", text_ends=text_ends),
                after,
                after,
                pushes,
                uses=("temb",),
            ),
        )

    def group_of(group: int) -> list[Layer]:
        layers = [layer for i in range(config.num_layers[group]) for layer in block(group, i)]
        if group <= num_skips:
            return layers
        mirror = f"groups.{groups - 1 - group}"
        pops = {f"{mirror}.video": video, f"{mirror}.text": text}
        join = build("SkipLayer", skips_of=mirror)
        joined = Layer(f"skip_norm_linear.{group - num_skips - 1}", join, both, both, pops=pops)
        return [joined, *layers]

    layers = (
        embedder("time_text_embed", build("TimeTextEmbed"), latent, temb, ("timesteps", "pooled")),
        Layer("patch_embed", build("Patches"), (latent,), (video,)),
        Layer("caption_projection", build("CaptionProjection"), (video,), both, uses=("context",)),
        *(layer for group in range(groups) for layer in group_of(group)),
        Layer("head", build("Head"), (video,), (latent,), uses=("temb",)),
    )
    heads = (config.num_attention_heads,)
    return Backbone(
        name,
        layers,
        fields,
        num_heads=heads,
        ring_attention=False,
        patch_size=config.patch_size,
    )
