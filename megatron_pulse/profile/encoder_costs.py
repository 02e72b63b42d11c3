"""Costs of every layer of a frozen encoder on one sample, measured or estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.profile.measurement.clock import RepetitionLimits, mean_and_spread, repeat
from megatron_pulse.profile.measurement.memory import LiveBytes
from megatron_pulse.profile.measurement.record_kernels import Kernels
from megatron_pulse.profile.roofline import Roofline


@dataclass(frozen=True)
class EncoderLayer:
    """Forward of a layer on one sample.

    ``parameter_bytes`` are its weights. ``activation_bytes`` are the peak, including input and
    output. ``output_bytes`` are passed to the next layer, beyond the encoder's own inputs.
    """

    name: str
    seconds: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int


def measured(
    pieces: Sequence[EncoderPiece], given: States, device: torch.device, patience: RepetitionLimits
) -> list[EncoderLayer]:
    """Measure each of ``pieces`` alone, without gradients, on the results of those before."""

    def time_of(piece: EncoderPiece, states: States) -> float:
        def work(mark: Callable[[], None]) -> None:
            mark()
            run_pieces((piece,), states)
            mark()

        times = [row[0] for row in repeat(work, device, patience)]
        return mean_and_spread(times)[0]

    return list(_layers(pieces, given, time_of))


def worked_out(
    pieces: Sequence[EncoderPiece], given: States, roofline: Roofline
) -> list[EncoderLayer]:
    """Estimate each of ``pieces`` from its kernels; weights and inputs may be meta tensors."""

    def time_of(piece: EncoderPiece, states: States) -> float:
        with Kernels() as mode, mode.record() as kernels:
            run_pieces((piece,), states)
        return roofline.seconds(kernels)

    return list(_layers(pieces, given, time_of))


def result_bytes(pieces: Sequence[EncoderPiece], given: States, results: Sequence[str]) -> int:
    """Bytes of one sample's ``results``, the names of states after the last layer."""
    states = run_pieces(pieces, given)
    return sum(states[name].nbytes for name in results)


def _layers(
    pieces: Sequence[EncoderPiece], given: States, time_of: Callable[[EncoderPiece, States], float]
) -> Iterator[EncoderLayer]:
    states = given
    for piece in pieces:
        with LiveBytes() as live:
            after = run_pieces((piece,), states)
        left = sum(
            value.nbytes
            for name, value in after.items()
            if not name.startswith("_") and not _among(value, given)
        )
        yield EncoderLayer(
            piece.name,
            max(time_of(piece, states), 1e-9),
            piece.parameter_bytes,
            live.peak + sum(value.nbytes for value in states.values()),
            left,
        )
        states = after


def _among(value: Tensor, given: States) -> bool:
    return any(value is other for other in given.values())
