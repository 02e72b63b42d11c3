"""Convolutions of the UNet, optionally channels-last, and the memory layout between layers.

Tensors that leave a layer, forward and backward, are contiguous, like tensors received from another
device. No order of summation thus depends on the partition of the chain.
"""

from __future__ import annotations

from typing import Any

import torch


class Convolution(torch.nn.Conv2d):
    """Convolution that keeps the size (stride 1) or divides it (stride 2): [b, c, h, w].

    With ``channels_last`` the convolution works on a channels-last copy of its input, the layout of
    the GPU's matrix units. Weights stay contiguous: Megatron's optimizer keeps parameters in flat
    buffers without strides. cuDNN reorders them. Inputs and outputs are contiguous, as torch's
    GroupNorm needs.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        *,
        channels_last: bool,
    ) -> None:
        padding = kernel_size // 2
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.channels_last = channels_last

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[b, in, h, w] to [b, out, h / stride, w / stride]."""
        if not self.channels_last:
            return super().forward(input)
        inside, outside = torch.channels_last, torch.contiguous_format
        output = super().forward(_Layout.apply(input, inside, outside))
        reordered: torch.Tensor = _Layout.apply(output, outside, inside)
        return reordered


class _Layout(torch.autograd.Function):
    """Tensor in the memory format ``here``, with its gradient in the memory format ``back``."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, here: torch.memory_format, back: torch.memory_format
    ) -> torch.Tensor:
        ctx.back = back
        return tensor.contiguous(memory_format=here)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.contiguous(memory_format=ctx.back), None, None


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor and its gradient in contiguous format."""
    result: torch.Tensor = _Layout.apply(tensor, torch.contiguous_format, torch.contiguous_format)
    return result
