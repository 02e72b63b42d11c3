"""Schedules by name."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pulse.planner.placement import Placement, PlacementKind
from megatron_pulse.planner.schedule.classic import (
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    trivial,
)
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.wave import wave

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "wave")

AUTO = {
    PlacementKind.SEQUENTIAL: "1f1b",
    PlacementKind.INTERLEAVED: "interleaved",
    PlacementKind.FOLD: "wave",
}
"""What ``auto`` picks: the classic schedule where there is one."""


def make_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    cap: int | None = None,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    link: float = 0.0,
    effort: int | None = None,
) -> Schedule:
    """The schedule called ``name`` (one of SCHEDULES); the keyword arguments are those of wave.

    Raises ValueError, with the alternatives, for an unknown name, a schedule that the placement
    cannot run, fewer than one microbatch, or a cap given to a schedule whose memory is fixed.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are: {', '.join(SCHEDULES)}")
    picked = AUTO[placement.kind] if name == "auto" else name
    if placement.num_stages == 1:
        return trivial(placement, num_microbatches, picked)
    if cap is not None and picked != "wave":
        raise ValueError(f"{picked} has a fixed peak of activations; a cap needs schedule wave")
    match picked:
        case "gpipe":
            return gpipe(placement, num_microbatches)
        case "1f1b":
            return one_f_one_b(placement, num_microbatches)
        case "interleaved":
            return interleaved_1f1b(placement, num_microbatches)
        case _:
            return wave(placement, num_microbatches, cap, forward, backward, link, effort)
