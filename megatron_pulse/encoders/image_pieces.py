"""Encoder of a diffusers AutoencoderKL, split into layers.

Input is ``pixels`` [b, c, h, w]; output is ``moments`` [b, 2c', h', w']: mean and log-variance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron_pulse.encoders.encoder_piece import EncoderPiece

PIXELS, MOMENTS = "pixels", "moments"
_HIDDEN = "hidden"


def image_pieces(model: Any) -> tuple[EncoderPiece, ...]:
    """Layers of ``model.encode``: convolutions, resnets, attentions, downsamplers."""
    encoder = model.encoder
    tail = (encoder.conv_norm_out, encoder.conv_out)
    quant = () if model.quant_conv is None else (model.quant_conv,)

    def end(hidden: Tensor) -> Tensor:
        moments = encoder.conv_out(encoder.conv_act(encoder.conv_norm_out(hidden)))
        return moments if model.quant_conv is None else model.quant_conv(moments)

    return (
        _piece("conv_in", encoder.conv_in, encoder.conv_in, source=PIXELS),
        *(
            piece
            for i, block in enumerate(encoder.down_blocks)
            for piece in _block(f"down_blocks.{i}", block)
        ),
        *_middle(encoder.mid_block),
        _piece("end", end, *tail, *quant, result=MOMENTS),
    )


def _piece(
    name: str,
    run: Callable[[Tensor], Tensor],
    *modules: nn.Module,
    source: str = _HIDDEN,
    result: str = _HIDDEN,
) -> EncoderPiece:
    def through(states: dict[str, Tensor]) -> dict[str, Tensor]:
        return {result: run(states[source])}

    return EncoderPiece(name, through, modules)


def _resnet(name: str, module: Any) -> EncoderPiece:
    return _piece(name, functools.partial(module, temb=None), module)


def _block(name: str, block: Any) -> Iterator[EncoderPiece]:
    """Layers of a plain level; a level of another type is a single layer."""
    if type(block).__name__ != "DownEncoderBlock2D":
        yield _piece(name, block, block)
        return
    for i, resnet in enumerate(block.resnets):
        yield _resnet(f"{name}.resnets.{i}", resnet)
    for i, downsampler in enumerate(block.downsamplers or ()):
        yield _piece(f"{name}.downsamplers.{i}", downsampler, downsampler)


def _middle(block: Any) -> Iterator[EncoderPiece]:
    first, *others = block.resnets
    yield _resnet("mid_block.resnets.0", first)
    for i, (attention, resnet) in enumerate(zip(block.attentions, others, strict=True)):
        if attention is not None:
            name = f"mid_block.attentions.{i}"
            yield _piece(name, functools.partial(attention, temb=None), attention)
        yield _resnet(f"mid_block.resnets.{i + 1}", resnet)
