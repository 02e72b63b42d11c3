"""Layers of a control branch, built from the UNet's (diffusers' ``ControlNetModel``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.layers import LayerModule, Named, Tensors
from model_specs.controlnet.config import ControlNetConfig
from model_specs.unet.convolution import Convolution, contiguous

Build = Callable[[LayerContext], Any]


def locked(sizes: ControlNetConfig, context: LayerContext, build: Build) -> Any:
    """UNet layer with frozen parameters."""
    return build(context).requires_grad_(False)


def in_lane(
    sizes: ControlNetConfig,
    context: LayerContext,
    build: Build,
    start: int,
    count: int,
    trained: bool = True,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """UNet layer on ``count`` boundary tensors from ``start`` on; other tensors pass through.

    ``renamed`` maps the layer's conditioning names to the names in this chain.
    """
    module = build(context) if trained else locked(sizes, context, build)
    kind: Any = type(module)
    module.__class__ = _in_lane(kind)
    module.lane, module.renamed = slice(start, start + count), dict(renamed or {})
    return module


@functools.cache
def _in_lane(kind: Any) -> Any:
    """Subclass of ``kind``, so that parameter names stay the UNet's."""

    class InLane(kind):
        lane: slice
        renamed: dict[str, str]

        def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
            known = dict(conditioning)
            for name, given in self.renamed.items():
                if given in known:
                    known[name] = known.pop(given)
            results = super().forward(inputs[self.lane], skips, known)
            return (*inputs[: self.lane.start], *results, *inputs[self.lane.stop :])

    return InLane


def _zero(channels: int, sizes: ControlNetConfig, context: LayerContext) -> Convolution:
    """1x1 convolution initialised to zero."""
    made = Convolution(channels, channels, kernel_size=1, channels_last=sizes.channels_last)
    if context.config.perform_initialization:
        for parameter in made.parameters():
            torch.nn.init.zeros_(parameter)
    made.to(dtype=context.config.params_dtype)
    return made


def controlled(
    sizes: ControlNetConfig, context: LayerContext, build: Build, skip: str, channels: int
) -> Any:
    """Locked decoder resnet whose skip adds the branch's skip through ``zero``."""
    module = locked(sizes, context, build)
    kind: Any = type(module)
    module.__class__ = _controlled(kind)
    module.skip, module.zero = skip, _zero(channels, sizes, context)
    return module


@functools.cache
def _controlled(kind: Any) -> Any:
    class Controlled(kind):
        skip: str
        zero: Convolution

        def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
            control = contiguous(skips[f"controlnet.{self.skip}"])
            joined = contiguous(skips[self.skip]) + self.zero(control)
            result: Tensors = super().forward(inputs, {self.skip: joined}, conditioning)
            return result

    return Controlled


class Enter(LayerModule):
    """First convolution of the branch, plus the encoded control image.

    The control image passes 3x3 convolutions with SiLUs between; every second one halves its side.
    The last convolution is zero-initialised.
    """

    def __init__(
        self, sizes: ControlNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        convolution = functools.partial(Convolution, channels_last=sizes.channels_last)
        first, *others = sizes.conditioning_widths
        self.conv = convolution(in_channels, out_channels)
        self.picture_in = convolution(sizes.conditioning_channels, first)
        self.blocks = torch.nn.ModuleList()
        for into, out in zip(sizes.conditioning_widths, others, strict=False):
            self.blocks.append(convolution(into, into))
            self.blocks.append(convolution(into, out, stride=2))
        self.picture_out = convolution(sizes.conditioning_widths[-1], out_channels)
        if self.config.perform_initialization:
            for parameter in self.picture_out.parameters():
                torch.nn.init.zeros_(parameter)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map the sample [b, in, h, w] to itself and to the branch's first hidden state."""
        (image,) = inputs
        hidden = self.picture_in(conditioning["conditioning"].to(self.conv.weight.dtype))
        for block in self.blocks:
            hidden = block(F.silu(hidden))
        return (image, self.conv(image) + self.picture_out(F.silu(hidden)))


class Join(LayerModule):
    """Add the branch's output through a zero-initialised convolution."""

    def __init__(self, sizes: ControlNetConfig, context: LayerContext, channels: int) -> None:
        super().__init__(context.config, context.pg_collection)
        self.zero = _zero(channels, sizes, context)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Takes both outputs [b, c, h, w]."""
        hidden, branch = inputs
        return (contiguous(hidden) + self.zero(contiguous(branch)),)
