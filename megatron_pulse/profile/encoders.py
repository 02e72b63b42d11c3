"""What every layer of a frozen encoder costs on one sample: measured, or worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pulse.encoders.pieces import EncoderPiece, States, run_pieces
from megatron_pulse.profile.devices import Roofline
from megatron_pulse.profile.measuring.clock import Patience, median_and_spread, repeat
from megatron_pulse.profile.measuring.kernels import Kernels
from megatron_pulse.profile.measuring.memory import LiveBytes


@dataclass(frozen=True)
class EncoderLayer:
    """A layer's forward on one sample.

    ``parameter_bytes`` are those of its weights, ``activation_bytes`` what it has at once, its
    input and output among them, and ``output_bytes`` what it leaves to the next layer beside what
    the encoder was given.
    """

    name: str
    seconds: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int


def measured(
    pieces: Sequence[EncoderPiece], given: States, device: torch.device, patience: Patience
) -> list[EncoderLayer]:
    """Each of ``pieces`` run alone, without gradients, on what those before it leave."""

    def time_of(piece: EncoderPiece, states: States) -> float:
        def work(mark: Callable[[], None]) -> None:
            mark()
            run_pieces((piece,), states)
            mark()

        times = [row[0] for row in repeat(work, device, patience)]
        return median_and_spread(times)[0]

    return list(_layers(pieces, given, time_of))


def worked_out(
    pieces: Sequence[EncoderPiece], given: States, roofline: Roofline
) -> list[EncoderLayer]:
    """Each of ``pieces``, whose weights and inputs may be on the meta device, by its kernels."""

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
