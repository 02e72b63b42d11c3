"""Schedules by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.schedule.classic.names import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches, trivial
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize

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


def make_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    *,
    cap: int | None = None,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    weight_grad: Sequence[float] | None = None,
    link: float | tuple[float, ...] = 0.0,
    effort: int | None = None,
) -> Schedule:
    """The schedule called ``name`` (one of SCHEDULES); the keyword arguments are for waves.

    A wave is synthesized for durations per stage (by default 1 and 2) and ``link`` times in the
    same unit; with ``weight_grad`` its backwards are split, and ``backward`` is the input gradient
    (by default 1). ``cap`` bounds the live stage activations on a device, by default one per stage
    of the whole chain (2P on the fold: 1F1B's peak); ``num_chunks * num_microbatches`` is no bound.
    Raises ValueError, with the alternatives, for an unknown name, a schedule that the placement
    cannot run, fewer than one microbatch, times or a cap that cannot be, or a cap given to a
    schedule whose memory is fixed.
    """
    check_microbatches(num_microbatches)
    picked = pick(name, placement)
    num = placement.num_stages
    if num == 1:
        split = picked in (*SPLIT, "wave-split") or (picked == "wave" and weight_grad is not None)
        return trivial(placement, num_microbatches, picked, split)
    if picked in CLASSICS:
        if cap is not None:
            raise ValueError(f"{picked} has a fixed peak of activations; a cap needs schedule wave")
        return CLASSICS[picked](placement, num_microbatches)
    if picked == "wave-split" and weight_grad is None:
        weight_grad = (1.0,) * num
    problem = ScheduleProblem(
        placement,
        num_microbatches,
        tuple(forward or (1.0,) * num),
        tuple(backward or (2.0 if weight_grad is None else 1.0,) * num),
        None if weight_grad is None else tuple(weight_grad),
        link,
        cap=(float(num if cap is None else cap),) * placement.num_devices,
    )
    # Without a limit of time: every rank makes its schedule and must come to the same.
    found = synthesize(problem, seconds=math.inf, effort=effort)
    return replace(found.schedule, name=picked)
