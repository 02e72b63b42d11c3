"""U-ViT's chain of layers. Imports no torch until a layer builds."""

from __future__ import annotations

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder
from model_specs.uvit.config import UViTConfig


def build_backbone(name: str, config: UViTConfig) -> Backbone:
    """Chain: ``embed``, ``in_blocks.*``, ``mid_block.*``, ``out_blocks.*``, ``head``.

    Each block is ``<block>.attn`` (which also takes the skip) and ``<block>.mlp``.
    """
    image = TensorSpec((config.in_channels, config.image_size, config.image_size))
    tokens = TensorSpec((config.sequence_length, config.embed_dim), batch_dim=1, sequence=True)
    half = config.depth // 2
    build = builder("model_specs.uvit.modules", config)
    fields = {"timesteps": TensorSpec((), dtype="float32")}
    if config.num_classes:
        fields["labels"] = TensorSpec((), dtype="int64")
    if config.context_length:
        fields["context"] = TensorSpec((config.context_length, config.context_dim))

    def block(block_name: str, push: str | None = None, pop: str | None = None) -> list[Layer]:
        pops, pushes = {pop: tokens} if pop else {}, {push: 0} if push else {}
        attention = build("Attention", pop=pop)
        return [
            Layer(
                f"{block_name}.attn", attention, (tokens,), (tokens,), pops=pops, attends=((0,),)
            ),
            Layer(f"{block_name}.mlp", build("Mlp"), (tokens,), (tokens,), pushes),
        ]

    layers = [Layer("embed", build("Embed"), (image,), (tokens,), uses=(*fields,))]
    for i in range(half):
        layers += block(f"in_blocks.{i}", push=f"in_blocks.{i}")
    layers += block("mid_block")
    for i in range(half):
        layers += block(f"out_blocks.{i}", pop=f"in_blocks.{half - 1 - i}")
    layers.append(Layer("head", build("Head"), (tokens,), (image,)))
    return Backbone(
        name,
        tuple(layers),
        fields,
        num_classes=config.num_classes or None,
        null_label=config.num_classes or None,
        num_heads=(config.num_heads,),
        patch_size=config.patch_size,
    )
