"""Schedules by name."""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.names import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches, trivial
from megatron_pulse.planner.schedule.operations import Schedule

WAVES = ("wave", "wave-split")
"""Schedules that are synthesized; the second splits every backward."""

SCHEDULES = ("auto", *CLASSICS, *WAVES)


def pick(name: str, placement: Placement) -> str:
    """The schedule that ``name`` (one of SCHEDULES) means there; ValueError for another.

    ``auto`` is the placement's classic schedule where it has one of its own, else the wave.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are: {', '.join(SCHEDULES)}")
    return placement.kind.auto if name == "auto" else name


def splits(name: str) -> bool:
    """Whether the schedule of that name has input and weight gradients apart."""
    return name in (*SPLIT, "wave-split")


def make_schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """The classic schedule called ``name``; one device runs whatever it is called in one way.

    Raises ValueError, with the alternatives, for an unknown name, a schedule that the placement
    cannot run or that is synthesized, and fewer than one microbatch.
    """
    check_microbatches(num_microbatches)
    picked = pick(name, placement)
    if placement.num_stages == 1:
        return trivial(placement, num_microbatches, picked, splits(picked))
    if picked in WAVES:
        raise ValueError(f"{picked} is synthesized for the times of its stages, see 'synthesize'")
    return CLASSICS[picked](placement, num_microbatches)
