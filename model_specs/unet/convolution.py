"""The UNet's convolutions, optionally in channels-last memory format, and how tensors are laid out.

What leaves a layer, forward and backward, is contiguous, as everything that comes from another
device is: so no sum's order depends on where the chain is cut.
"""

from __future__ import annotations

from typing import Any

import torch


class Convolution(torch.nn.Conv2d):
    """A convolution that keeps the size (stride 1) or divides it (stride 2): [b, c, h, w].

    With ``channels_last`` it works on a channels-last copy of its input, which is what the GPU's
    matrix units take. Weights stay contiguous, because Megatron's optimizer keeps parameters in
    flat buffers without strides; cuDNN reorders them. Outside, everything is contiguous, which is
    also what torch's GroupNorm takes.
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
    """The tensor in the memory format ``here``; its gradient in the memory format ``back``."""

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
    """The tensor, contiguous, and so its gradient."""
    result: torch.Tensor = _Layout.apply(tensor, torch.contiguous_format, torch.contiguous_format)
    return result
