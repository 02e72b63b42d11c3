"""The UNet's layers on images [b, c, h, w], replicated over tensor-parallel ranks.

Same arithmetic as diffusers' ``UNet2DConditionModel`` with its defaults (SiLU, no dropout).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_pulse.backbone.appended_fields import INPAINTING
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.shape_buckets import PATCH_CORNER
from model_specs.common.layers import LayerModule, Named, Tensors, VectorMlp, timestep_embedding
from model_specs.unet.config import UNetConfig
from model_specs.unet.convolution import Convolution, contiguous

_RESNET_EPS = 1e-5


class TimeEmbedding(LayerModule):
    """Provides temb [b, 4 * first width]: MLP(sinusoids of the timestep) plus optional embeddings.

    Optional are a class embedding and SDXL's MLP(pooled text, sinusoids of the time ids). SDXL's
    time ids (Podell et al. 2023, section 2.2) are original size, crop and target size. Every resnet
    applies the SiLU that follows in SD.
    """

    def __init__(self, sizes: UNetConfig, context: LayerContext) -> None:
        super().__init__(context.config, context.pg_collection)
        self.width, self.time_id_dim = sizes.block_out_channels[0], sizes.time_id_dim
        self.time = _mlp(self.width, sizes.temb_dim)
        if sizes.num_classes:
            rows = sizes.num_classes + sizes.null_class
            self.class_embedding = torch.nn.Embedding(rows, sizes.temb_dim)
        if sizes.pooled_dim:
            added = sizes.pooled_dim + sizes.num_time_ids * sizes.time_id_dim
            self.add_embedding = _mlp(added, sizes.temb_dim)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b]; labels [b]; pooled [b, pooled_dim], time_ids [b,
        num_time_ids].

        Timesteps and time_ids are fp32.
        """
        dtype = self.time.linear_1.weight.dtype
        temb = self.time(timestep_embedding(conditioning["timesteps"], self.width).to(dtype))
        if "labels" in conditioning:
            temb = temb + self.class_embedding(conditioning["labels"])
        if "pooled" in conditioning:
            pooled, time_ids = conditioning["pooled"], conditioning["time_ids"]
            ids = timestep_embedding(time_ids.flatten(), self.time_id_dim)
            ids = ids.view(pooled.shape[0], -1)
            temb = temb + self.add_embedding(torch.cat([pooled.to(dtype), ids.to(dtype)], dim=-1))
        return (*inputs, temb)


def _mlp(inputs: int, width: int) -> VectorMlp:
    return VectorMlp(torch.nn.Linear(inputs, width), torch.nn.Linear(width, width))


class Conv(LayerModule):
    """3x3 convolution: [b, in, h, w] to [b, out, h / stride, w / stride].

    The chain's first convolution has stride 1; a stride of 2 halves the resolution.
    """

    def __init__(
        self,
        sizes: UNetConfig,
        context: LayerContext,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        self.conv = Convolution(
            in_channels, out_channels, stride=stride, channels_last=sizes.channels_last
        )
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Convolves the one tensor of ``inputs``."""
        return (self.conv(inputs[0]),)


class PositionedConv(Conv):
    """First convolution of patch-wise training: of the sample and its coordinates.

    Row and column are two channels, from -1 to 1 over the whole sample (Patch Diffusion,
    2304.12526, section 3.1).
    """

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(sizes, context, in_channels + 2, out_channels)
        self.whole = sizes.sizes[0]

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: patch_corner [b, 2]."""
        (image,) = inputs
        sides = image.shape[-2:]
        rows, columns = (
            2 * (corner[:, None] + torch.arange(count, device=corner.device)) / (most - 1) - 1
            for corner, count, most in zip(
                conditioning[PATCH_CORNER].unbind(1), sides, self.whole, strict=True
            )
        )
        places = torch.stack(
            [rows[:, :, None].expand(-1, *sides), columns[:, None].expand(-1, *sides)], dim=1
        )
        positioned = torch.cat([image, places.to(image)], dim=1)
        return super().forward((positioned,), skips, conditioning)


class InpaintingConv(Conv):
    """First convolution of an inpainting model: of the sample, the mask and the masked picture."""

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: inpaint_mask [b, 1, h, w] and masked_image [b, c, h, w]."""
        (image,) = inputs
        parts = [image, *(conditioning[name].to(image.dtype) for name in INPAINTING)]
        return super().forward((torch.cat(parts, dim=1),), skips, conditioning)


class ConvOut(LayerModule):
    """GroupNorm, SiLU and the last 3x3 convolution."""

    def __init__(
        self, sizes: UNetConfig, context: LayerContext, in_channels: int, out_channels: int
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        self.norm = torch.nn.GroupNorm(sizes.norm_num_groups, in_channels, eps=_RESNET_EPS)
        self.conv = Convolution(in_channels, out_channels, channels_last=sizes.channels_last)
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """[b, in, h, w] to [b, out, h, w]."""
        return (self.conv(F.silu(self.norm(inputs[0]))),)


class Upsample(Conv):
    """Nearest-neighbour doubling and a 3x3 convolution: [b, c, h, w] to [b, c, 2h, 2w]."""

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Doubles the resolution."""
        doubled = F.interpolate(inputs[0], scale_factor=2.0, mode="nearest")
        return super().forward((doubled,), skips, conditioning)


class Resnet(LayerModule):
    """Residual block: norm, SiLU, conv, + Linear(SiLU(temb)), norm, SiLU, conv; 1x1 shortcut.

    With ``pop`` the block works on [x, skip] along channels; ``in_channels`` includes the skip's.
    """

    def __init__(
        self,
        sizes: UNetConfig,
        context: LayerContext,
        in_channels: int,
        out_channels: int,
        pop: str | None = None,
    ) -> None:
        super().__init__(context.config, context.pg_collection)
        self.pop = pop
        groups, channels_last = sizes.norm_num_groups, sizes.channels_last
        self.norm1 = torch.nn.GroupNorm(groups, in_channels, eps=_RESNET_EPS)
        self.conv1 = Convolution(in_channels, out_channels, channels_last=channels_last)
        self.time_emb_proj = torch.nn.Linear(sizes.temb_dim, out_channels)
        self.norm2 = torch.nn.GroupNorm(groups, out_channels, eps=_RESNET_EPS)
        self.conv2 = Convolution(out_channels, out_channels, channels_last=channels_last)
        self.conv_shortcut: Convolution | None = None
        if in_channels != out_channels:
            self.conv_shortcut = Convolution(
                in_channels, out_channels, kernel_size=1, channels_last=channels_last
            )
        self.to(dtype=self.config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map [b, in, h, w] (partly popped) and temb [b, d] to [b, out, h, w]."""
        image = inputs[0]
        if self.pop is not None:
            image = torch.cat([contiguous(image), contiguous(skips[self.pop])], dim=1)
        hidden = self.conv1(F.silu(self.norm1(image)))
        hidden = hidden + self.time_emb_proj(F.silu(conditioning["temb"]))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        shortcut = image if self.conv_shortcut is None else self.conv_shortcut(image)
        return (shortcut + hidden,)
