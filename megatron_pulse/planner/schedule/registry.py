"""Schedules by name."""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches, trivial
from megatron_pulse.planner.schedule.operations import Schedule

WAVES = ("wave", "wave-split")
"""Synthesized schedules; the second splits every backward."""

SCHEDULES = ("auto", *CLASSICS, *WAVES)


def pick(name: str, placement: Placement) -> str:
    """Resolve ``name`` (one of SCHEDULES) for ``placement``; raises ValueError for another name.

    ``auto`` is the placement's classic schedule if it has one of its own, else the wave.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule is called {name!r}; there are: {', '.join(SCHEDULES)}")
    return placement.kind.auto if name == "auto" else name


def splits(name: str) -> bool:
    """True if the schedule called ``name`` has split backwards."""
    return name in (*SPLIT, "wave-split")


def make_schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """Make the classic schedule called ``name``; on one device all names give the same order.

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
