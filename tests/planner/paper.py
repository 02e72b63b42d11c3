"""The schedule synthesis of the PULSE paper as it is written there, for tiny cases.

``x[c, m, d, t]`` = 1 where operation c of the chain (stage 0 forward to stage 0 backward, 2S in
all) runs microbatch m on device d in slot t. Every slot is one operation; devices are chosen:

    sum over d, t of x[c, m, d, t] = 1                        each operation once
    sum over c, m of x[c, m, d, t] <= 1                       one per device and slot
    sum over t of x[c, m, d, t] = y[stage pair of c, d]       a stage has one device, for forward
                                                              and backward, and stages s and
                                                              S-1-s share it (their skips)
    time[c+1, m] >= time[c, m] + 1;  time[c, m+1] >= time[c, m]
    minimise S_max * (last finish) + number of boundaries between devices

with time = sum of t x, and the second term, locality, never worth a slot. There is no memory, no
link time and no unequal slot; ``time_indexed`` is the model for use. Source: PULSE
(arXiv 2606.19163), section V; P = M = 4 is its figure 9, of 22 slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_pulse.planner.schedule.ilp.solvers import Solver, Status, minimize


@dataclass(frozen=True)
class PaperSchedule:
    """Slots, boundaries between devices on the forward way, ``device_of_stage``, the slot of every
    (operation of the chain, microbatch), and whether no schedule is shorter."""

    num_slots: int
    num_crossings: int
    device_of_stage: tuple[int, ...]
    slot: dict[tuple[int, int], int]
    proved: bool


def paper_schedule(
    num_devices: int,
    num_microbatches: int,
    solver: Solver,
    seconds: float,
    horizon: int | None = None,
) -> PaperSchedule | None:
    """The paper's schedule of 2P stages; None where none of ``horizon`` slots was found in time.

    ``horizon`` defaults to the paper's, one operation after the other; with a smaller one fewer
    variables are left.
    """
    model = paper_model(num_devices, num_microbatches, horizon)
    answer = minimize(model, solver, seconds)
    if answer.status not in (Status.OPTIMAL, Status.FEASIBLE):
        return None
    stages = 2 * num_devices
    pair = {
        s: next(d for d in range(num_devices) if model.y[min(s, stages - 1 - s), d].value)
        for s in range(stages)
    }
    crossings = sum(pair[s] != pair[s + 1] for s in range(stages - 1))
    slot = {(c, m): t for (c, m, _, t), x in model.x.items() if x.value}
    return PaperSchedule(
        max(slot.values()) + 1,
        crossings,
        tuple(pair[s] for s in range(stages)),
        slot,
        answer.status is Status.OPTIMAL,
    )


def paper_model(num_devices: int, num_microbatches: int, horizon: int | None = None) -> Any:
    """The model above. An operation has only the slots that its chain leaves it in the horizon;
    devices being alike, pair i is on one of the first i + 1."""
    import pyomo.environ as pyo  # type: ignore[import-untyped]

    stages, count = 2 * num_devices, num_microbatches
    length = 2 * stages
    horizon = length * count if horizon is None else horizon
    devices, microbatches = range(num_devices), range(count)
    model = pyo.ConcreteModel()
    index = [
        (c, m, d, t)
        for c in range(length)
        for m in microbatches
        for d in devices
        if d <= _pair(c, stages)
        for t in range(c + m, horizon - (length - 1 - c) - (count - 1 - m))
    ]
    model.x = pyo.Var(index, domain=pyo.Binary)
    model.y = pyo.Var([(i, d) for i in devices for d in devices], domain=pyo.Binary)
    model.cross = pyo.Var(range(num_devices - 1), bounds=(0, 1))
    model.last = pyo.Var(bounds=(0, horizon))
    at: dict[tuple[int, int, int], list[int]] = {}
    busy: dict[tuple[int, int], list[Any]] = {}
    for c, m, d, t in index:
        at.setdefault((c, m, d), []).append(t)
        busy.setdefault((d, t), []).append(model.x[c, m, d, t])
    model.rows = pyo.ConstraintList()
    when: dict[tuple[int, int], Any] = {}
    for c in range(length):
        i = _pair(c, stages)
        for m in microbatches:
            terms = [(t, model.x[c, m, d, t]) for d in devices for t in at.get((c, m, d), [])]
            when[c, m] = sum(t * x for t, x in terms)
            model.rows.add(sum(x for _, x in terms) == 1)
            for d in devices:
                mine = [model.x[c, m, d, t] for t in at.get((c, m, d), [])]
                model.rows.add(sum(mine) == model.y[i, d])
    for variables in busy.values():
        model.rows.add(sum(variables) <= 1)
    for c in range(length):
        for m in microbatches:
            if c + 1 < length:
                model.rows.add(when[c + 1, m] >= when[c, m] + 1)
            if m + 1 < count:
                model.rows.add(when[c, m + 1] >= when[c, m])
    for m in microbatches:
        model.rows.add(model.last >= when[length - 1, m] + 1)
    for i in range(num_devices - 1):
        for d in devices:
            model.rows.add(model.cross[i] >= model.y[i, d] - model.y[i + 1, d])
    # Boundary i and its mirror image are crossed together; the turn never is.
    model.goal = pyo.Objective(expr=stages * model.last + 2 * sum(model.cross.values()))
    return model


def _pair(c: int, stages: int) -> int:
    """The pair of stages (i, S-1-i) that operation c of the chain belongs to."""
    stage = c if c < stages else 2 * stages - 1 - c
    return min(stage, stages - 1 - stage)
