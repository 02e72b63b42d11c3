"""The UNet's chain of layers, in diffusers' order and with diffusers' names.

Imports no torch until a layer builds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron_pulse.backbone.appended_fields import INPAINT_MASK, INPAINTING, MASKED_IMAGE
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder, embedder
from model_specs.unet.config import UNetConfig


def build_backbone(name: str, config: UNetConfig) -> Backbone:
    """Chain of SD's units; skips are named after the layer that pushes them."""
    return config.chain_of_sizes(functools.partial(chain_at, name, config))


def chain_at(name: str, config: UNetConfig, height: int, width: int) -> Backbone:
    """Chain for samples of one size."""
    fields: dict[str, TensorSpec] = {"timesteps": TensorSpec((), dtype="float32")}
    if config.num_classes:
        fields["labels"] = TensorSpec((), dtype="int64")
    if config.pooled_dim:
        fields["pooled"] = TensorSpec((config.pooled_dim,))
        fields["time_ids"] = TensorSpec((config.num_time_ids,), dtype="float32")
    embedded = tuple(fields)
    if config.reads_context:
        assert config.cross_attention_dim is not None
        fields["context"] = TensorSpec((config.context_length, config.cross_attention_dim))
    fields |= config.patch_fields
    if config.inpaints:
        fields[INPAINT_MASK] = TensorSpec((1, height, width))
        fields[MASKED_IMAGE] = TensorSpec((config.out_channels, height, width))
    return Backbone(
        name,
        _Chain(config, height, width).layers(embedded),
        fields,
        num_classes=config.num_classes or None,
        null_label=config.num_classes if config.num_classes and config.null_class else None,
        num_heads=config.num_heads,
    )


class _Chain:
    """Builder that appends layers, tracking the current tensors and the stack of skips."""

    def __init__(self, config: UNetConfig, height: int, width: int) -> None:
        self.config = config
        self.on_images = builder("model_specs.unet.modules", config)
        self.on_tokens = builder("model_specs.unet.transformer", config)
        channels = config.out_channels if config.inpaints else config.in_channels
        self.image = TensorSpec((channels, height, width))
        self.current: tuple[TensorSpec, ...] = (self.image,)
        self.stack: list[tuple[str, TensorSpec]] = []
        self.done: list[Layer] = []

    def layers(self, embedded: tuple[str, ...]) -> tuple[Layer, ...]:
        """Build the whole chain; temb is made from the ``embedded`` fields of the batch."""
        config = self.config
        channels, last = config.block_out_channels, config.num_levels - 1
        time = self.on_images("TimeEmbedding")
        temb = {"temb": TensorSpec((config.temb_dim,))}
        self.done.append(embedder("time_embedding", time, self.image, temb, embedded))
        first, uses, more = "Conv", tuple(config.patch_fields), dict[str, int]()
        if config.patchwise:
            first = "PositionedConv"
        elif config.inpaints:
            first, uses, more = "InpaintingConv", INPAINTING, {"in_channels": config.in_channels}
        self._convolve("conv_in", first, channels[0], push=True, uses=uses, **more)
        for level, depth in enumerate(config.transformer_depth):
            block = f"down_blocks.{level}"
            for j in range(config.layers_per_block):
                self._resnet(f"{block}.resnets.{j}", level, push=depth == 0)
                self._attention(f"{block}.attentions.{j}", level, depth, push=True)
            if level < last:
                name = f"{block}.downsamplers.0"
                self._convolve(name, "Conv", channels[level], 0.5, push=True, stride=2)
        self._resnet("mid_block.resnets.0", last)
        self._attention("mid_block.attentions.0", last, config.mid_transformer_depth)
        self._resnet("mid_block.resnets.1", last)
        for i, level in enumerate(reversed(range(config.num_levels))):
            block = f"up_blocks.{i}"
            for j in range(config.layers_per_block + 1):
                self._resnet(f"{block}.resnets.{j}", level, pop=True)
                depth = config.transformer_depth[level]
                self._attention(f"{block}.attentions.{j}", level, depth)
            if level > 0:
                self._convolve(f"{block}.upsamplers.0", "Upsample", channels[level], 2)
        self._convolve("conv_out", "ConvOut", config.out_channels)
        return tuple(self.done)

    def _convolve(
        self,
        name: str,
        kind: str,
        channels: int,
        factor: float = 1,
        push: bool = False,
        uses: tuple[str, ...] = (),
        **more: int,
    ) -> None:
        inputs, height, width = self.image.shape
        self.image = TensorSpec((channels, int(height * factor), int(width * factor)))
        sizes = {"in_channels": inputs, "out_channels": channels, **more}
        self._add(name, self.on_images(kind, **sizes), (self.image,), push, uses=uses)

    def _resnet(self, name: str, level: int, push: bool = False, pop: bool = False) -> None:
        pops = dict([self.stack.pop()]) if pop else {}
        inputs, height, width = self.image.shape
        channels = self.config.block_out_channels[level]
        self.image = TensorSpec((channels, height, width))
        sizes: dict[str, Any] = {"in_channels": inputs, "out_channels": channels}
        for skip, spec in pops.items():
            sizes |= {"pop": skip, "in_channels": inputs + spec.shape[0]}
        build = self.on_images("Resnet", **sizes)
        self._add(name, build, (self.image,), push, pops, ("temb",))

    def _attention(self, name: str, level: int, depth: int, push: bool = False) -> None:
        """Append the layers of one attention; none if ``depth`` is 0."""
        if not depth:
            return
        channels, height, width = self.image.shape
        sizes = {"channels": channels}
        pair = (TensorSpec((height * width, channels), batch_dim=1), self.image)
        uses = ("context",) if self.config.reads_context else ()
        self._add(f"{name}.proj_in", self.on_tokens("ProjectIn", **sizes), pair)
        for i in range(depth):
            block = self.on_tokens("TransformerBlock", num_heads=self.config.heads(level), **sizes)
            self._add(f"{name}.transformer_blocks.{i}", block, pair, uses=uses)
        self._add(f"{name}.proj_out", self.on_tokens("ProjectOut", **sizes), (self.image,), push)

    def _add(
        self,
        name: str,
        build: Callable[[LayerContext], Any],
        outputs: tuple[TensorSpec, ...],
        push: bool = False,
        pops: Mapping[str, TensorSpec] | None = None,
        uses: tuple[str, ...] = (),
    ) -> None:
        pushes = {name: 0} if push else {}
        self.done.append(Layer(name, build, self.current, outputs, pushes, pops or {}, {}, uses))
        if push:
            self.stack.append((name, self.image))
        self.current = outputs
