"""The UNet's chain of layers, in diffusers' order and with diffusers' names; needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext

if TYPE_CHECKING:
    from model_specs.unet import UNetConfig


class Chain:
    """Appends layers one after the other, keeping the current tensors and the stack of skips."""

    def __init__(self, config: UNetConfig) -> None:
        self.config = config
        self.image = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
        self.current: tuple[TensorSpec, ...] = (self.image,)
        self.stack: list[tuple[str, TensorSpec]] = []
        self.done: list[Layer] = []

    def layers(self, embedded: tuple[str, ...]) -> tuple[Layer, ...]:
        """The whole chain, in diffusers' order; ``embedded`` fields of the batch make temb."""
        config = self.config
        channels, last = config.block_out_channels, config.num_levels - 1
        self.done.append(
            Layer(
                "time_embedding",
                functools.partial(_build, "TimeEmbedding", config, {}),
                self.current,
                self.current,
                provides={"temb": TensorSpec((config.temb_dim,))},
                uses=embedded,
                embedder=True,
            )
        )
        self._convolve("conv_in", "ConvIn", channels[0], push=True)
        for level, depth in enumerate(config.transformer_depth):
            block = f"down_blocks.{level}"
            for j in range(config.layers_per_block):
                self._resnet(f"{block}.resnets.{j}", level, push=depth == 0)
                self._attention(f"{block}.attentions.{j}", level, depth, push=True)
            if level < last:
                self._convolve(f"{block}.downsamplers.0", "Downsample", channels[level], 0.5, True)
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
        self, name: str, kind: str, channels: int, factor: float = 1, push: bool = False
    ) -> None:
        inputs, height, width = self.image.shape
        self.image = TensorSpec((channels, int(height * factor), int(width * factor)))
        sizes = {"in_channels": inputs, "out_channels": channels}
        self._add(name, kind, sizes, (self.image,), push)

    def _resnet(self, name: str, level: int, push: bool = False, pop: bool = False) -> None:
        pops = dict([self.stack.pop()]) if pop else {}
        inputs, height, width = self.image.shape
        channels = self.config.block_out_channels[level]
        self.image = TensorSpec((channels, height, width))
        sizes: dict[str, Any] = {"in_channels": inputs, "out_channels": channels}
        for skip, spec in pops.items():
            sizes |= {"pop": skip, "in_channels": inputs + spec.shape[0]}
        self._add(name, "Resnet", sizes, (self.image,), push, pops, ("temb",))

    def _attention(self, name: str, level: int, depth: int, push: bool = False) -> None:
        """The layers of one attention; none if ``depth`` is 0."""
        if not depth:
            return
        channels, height, width = self.image.shape
        sizes = {"channels": channels}
        pair = (TensorSpec((height * width, channels), batch_dim=1), self.image)
        uses = ("context",) if self.config.reads_context else ()
        self._add(f"{name}.proj_in", "ProjectIn", sizes, pair)
        for i in range(depth):
            block = {**sizes, "num_heads": self.config.heads(level)}
            self._add(f"{name}.transformer_blocks.{i}", "TransformerBlock", block, pair, uses=uses)
        self._add(f"{name}.proj_out", "ProjectOut", sizes, (self.image,), push)

    def _add(
        self,
        name: str,
        kind: str,
        sizes: Mapping[str, Any],
        outputs: tuple[TensorSpec, ...],
        push: bool = False,
        pops: Mapping[str, TensorSpec] | None = None,
        uses: tuple[str, ...] = (),
    ) -> None:
        build = functools.partial(_build, kind, self.config, sizes)
        pushes = {name: 0} if push else {}
        self.done.append(Layer(name, build, self.current, outputs, pushes, pops or {}, {}, uses))
        if push:
            self.stack.append((name, self.image))
        self.current = outputs


def _build(kind: str, config: UNetConfig, sizes: Mapping[str, Any], context: LayerContext) -> Any:
    """The layer's module: class ``kind``, of the family's ``config`` and the layer's ``sizes``."""
    from model_specs.modules import unet, unet_transformer

    classes: dict[str, Callable[..., Any]] = {
        "TimeEmbedding": unet.TimeEmbedding,
        "ConvIn": unet.ConvIn,
        "ConvOut": unet.ConvOut,
        "Downsample": unet.Downsample,
        "Upsample": unet.Upsample,
        "Resnet": unet.Resnet,
        "ProjectIn": unet_transformer.ProjectIn,
        "TransformerBlock": unet_transformer.build_transformer_block,
        "ProjectOut": unet_transformer.ProjectOut,
    }
    return classes[kind](config, context, **sizes)
