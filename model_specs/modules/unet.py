"""The UNet's layers: images are [b, c, h, w], convolutions and norms replicated over TP ranks.

Same arithmetic as diffusers' ``UNet2DConditionModel`` with its defaults (SiLU, no dropout).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.context import LayerContext
from model_specs.modules.common import LayerModule, timestep_embedding
from model_specs.modules.unet_transformer import ImageTransformer
from model_specs.unet import UNetConfig

Tensors = tuple[torch.Tensor, ...]
Named = Mapping[str, torch.Tensor]

_RESNET_EPS = 1e-5


class _UNetLayer(LayerModule):
    """Base of all layers; ``finish`` casts what was drawn in fp32 to the run's dtype."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context.config, context.pg_collection)

    def finish(self) -> None:
        self.to(dtype=self.config.params_dtype)


class TimeEmbedding(_UNetLayer):
    """Passes the image through and provides temb [b, 4 * first width] = MLP(sinusoids) (+ class).

    Of SD's three steps linear, SiLU, linear; the SiLU that follows is done by every resnet.
    """

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context)
        self.width = sizes.block_out_channels[0]
        self.linear_1 = torch.nn.Linear(self.width, sizes.temb_dim)
        self.linear_2 = torch.nn.Linear(sizes.temb_dim, sizes.temb_dim)
        if sizes.num_classes:
            self.class_embedding = torch.nn.Embedding(sizes.num_classes + 1, sizes.temb_dim)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in fp32 and, if there are classes, labels [b]."""
        sinusoids = timestep_embedding(conditioning["timesteps"], self.width)
        temb = self.linear_2(F.silu(self.linear_1(sinusoids.to(self.linear_1.weight.dtype))))
        if "labels" in conditioning:
            temb = temb + self.class_embedding(conditioning["labels"])
        return (inputs[0], temb)


class ConvIn(_UNetLayer):
    """The first 3x3 convolution."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context)
        self.conv = torch.nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """[b, in, h, w] to [b, out, h, w]."""
        return (self.conv(inputs[0]),)


class ConvOut(_UNetLayer):
    """GroupNorm, SiLU and the last 3x3 convolution."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context)
        self.norm = torch.nn.GroupNorm(sizes.norm_num_groups, in_channels, eps=_RESNET_EPS)
        self.conv = torch.nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """[b, in, h, w] to [b, out, h, w]."""
        return (self.conv(F.silu(self.norm(inputs[0]))),)


class Downsample(_UNetLayer):
    """3x3 convolution of stride 2: [b, c, h, w] to [b, c, h/2, w/2]."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context)
        self.conv = torch.nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Halves the resolution."""
        return (self.conv(inputs[0]),)


class Upsample(_UNetLayer):
    """Nearest-neighbour doubling and a 3x3 convolution: [b, c, h, w] to [b, c, 2h, 2w]."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context)
        self.conv = torch.nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Doubles the resolution."""
        return (self.conv(F.interpolate(inputs[0], scale_factor=2.0, mode="nearest")),)


class Resnet(torch.nn.Module):
    """Residual block: norm, SiLU, conv, + Linear(SiLU(temb)), norm, SiLU, conv; 1x1 shortcut."""

    def __init__(self, in_channels: int, out_channels: int, temb_dim: int, num_groups: int) -> None:
        super().__init__()
        self.norm1 = torch.nn.GroupNorm(num_groups, in_channels, eps=_RESNET_EPS)
        self.conv1 = torch.nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = torch.nn.Linear(temb_dim, out_channels)
        self.norm2 = torch.nn.GroupNorm(num_groups, out_channels, eps=_RESNET_EPS)
        self.conv2 = torch.nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut: torch.nn.Conv2d | None = None
        if in_channels != out_channels:
            self.conv_shortcut = torch.nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, image: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """[b, in, h, w] and [b, temb_dim] to [b, out, h, w]."""
        hidden = self.conv1(F.silu(self.norm1(image)))
        hidden = hidden + self.time_emb_proj(F.silu(temb))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return (image if self.conv_shortcut is None else self.conv_shortcut(image)) + hidden


class ResnetLayer(_UNetLayer):
    """A resnet and the transformer behind it, on [x, skip] along channels where one is popped.

    ``in_channels`` counts the popped skip's channels too.
    """

    def __init__(
        self,
        sizes: UNetConfig,
        context: LayerContext,
        in_channels: int,
        out_channels: int,
        level: int,
        depth: int,
        pop: str | None = None,
    ) -> None:
        super().__init__(context)
        self.pop = pop
        self.resnet = Resnet(in_channels, out_channels, sizes.temb_dim, sizes.norm_num_groups)
        self.attention: ImageTransformer | None = None
        if depth:
            self.attention = ImageTransformer(sizes, context, out_channels, level, depth)
        self.finish()

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb [b, d] and, with cross-attention, context [b, length, dim]."""
        image = inputs[0]
        if self.pop is not None:
            image = torch.cat([image, skips[self.pop]], dim=1)
        image = self.resnet(image, conditioning["temb"])
        if self.attention is not None:
            image = self.attention(image, conditioning.get("context"))
        return (image,)
