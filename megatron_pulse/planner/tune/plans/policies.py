"""When each frozen component runs: in idle time or in front of the step, whichever is sooner.

Every set of components is put into idle time, the others in front; a component that takes another's
results is in idle time only where that is. What storing results would save is said, not chosen: it
costs bytes that nothing here knows a price of.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from megatron_pulse.faults import Faults
from megatron_pulse.planner.fill.components import Component
from megatron_pulse.planner.fill.fillers import FilledSchedule, front_s
from megatron_pulse.planner.fill.problem import FillProblem
from megatron_pulse.planner.fill.search import FillError, Filling, fill
from megatron_pulse.planner.fill.table import components_of
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.plans.filling import (
    fill_problem,
    filled_plan,
    free_bytes,
    slowest_link,
)

MOST = 4
"""Components that are decided apart; of more, those with the least work are decided as one."""
SOONER = 0.999
"""Of a step's time, from which idle time is not sooner than in front."""
SCAN_SHARE = 0.5
"""Of the time, for all sets; the rest is for the best of them."""
LEAST_S = 0.2
"""For a set, so that one with little time does not look worse than it is."""


class Policy(StrEnum):
    """When a component runs."""

    FILL = "fill"
    FRONT = "front"


@dataclass(frozen=True)
class Choice:
    """What was decided of a component.

    ``fill_s`` and ``front_s`` are the shortest steps of a pipeline that were found with it in idle
    time and in front (None: memory does not hold that), ``stored_s`` the step where its results are
    stored and nothing else changes (None: not known), which takes ``stored_bytes`` for each sample.
    """

    name: str
    policy: str
    fill_s: float | None
    front_s: float | None
    stored_s: float | None
    stored_bytes: float

    def __str__(self) -> str:
        steps = (("filled", self.fill_s), ("in front", self.front_s), ("stored", self.stored_s))
        shown = ", ".join(f"{s:.4g} s {how}" for how, s in steps if s is not None)
        when = "in idle time" if self.policy == Policy.FILL else "in front of the step"
        return f"{self.name}: {when} (a step: {shown} with {self.stored_bytes:.4g} bytes a sample)"


@dataclass(frozen=True)
class EncodedPlan:
    """A plan with a policy for every encoder; ``schedule`` is what is known of its filling (None:
    all are in front), ``pipeline_s`` a pipeline's step with what is in front of it."""

    plan: PlanFile
    schedule: FilledSchedule | None
    choices: tuple[Choice, ...]
    pipeline_s: float
    in_front_s: float

    @property
    def samples_per_s(self) -> float:
        """Of the whole cluster."""
        step_s: float = self.plan.predicted["step_s"]
        return self.plan.global_batch_size / (step_s + self.in_front_s)

    def figures(self) -> dict[str, Any]:
        """As JSON-able values."""
        found: dict[str, Any] = {
            "pipeline_s": self.pipeline_s,
            "in_front_s": self.in_front_s,
            "samples_per_s": self.samples_per_s,
            "choices": [asdict(choice) for choice in self.choices],
        }
        if self.schedule is not None:
            made = self.schedule.certificate
            found |= {
                "filled_s": made.makespan,
                "without_s": made.without,
                "lower_bound_s": made.lower_bound,
                "after_flush": made.spill_share,
                "spread": {str(factor): over for factor, over in made.spread.items()},
                "homes": {f.name: list(f.devices or ()) for f in self.plan.schedule.fillers},
            }
        return found


@dataclass(frozen=True)
class _Tried:
    """One set in idle time: seconds of a pipeline's step, and its filling."""

    wanted: PlanFile
    step_s: float
    problem: FillProblem | None
    filling: Filling | None


def encode_plan(
    plan: PlanFile,
    encoders: Sequence[Mapping[str, Any]],
    seconds: float,
    fixed: Mapping[str, str] | None = None,
) -> EncodedPlan:
    """``plan`` with components of such records (``fill.table``) where each is soonest.

    ``fixed`` policies (fill, front) are obeyed. The plan's figures are yet to be worked out again.
    Raises Faults, and FillError where no way has the memory.
    """
    components = components_of(encoders, plan.placement)
    sets = list(_sets(components))
    each = max(LEAST_S, SCAN_SHARE * seconds / len(sets))
    tried: dict[frozenset[str], _Tried] = {}
    faults: list[str] = []
    for names in sets:
        try:
            tried[names] = _try(plan, encoders, names, each)
        except (FillError, Faults) as error:
            faults.append(str(error))
    fixed = fixed or {}
    allowed = [
        names
        for names in tried
        if all((name in names) == (policy == Policy.FILL) for name, policy in fixed.items())
    ]
    if not allowed:
        raise FillError(faults[0] if faults else "components wait for others that are in front")
    least = min(tried[names].step_s for names in allowed)
    names = min((n for n in allowed if SOONER * tried[n].step_s <= least), key=len)
    best = tried[names]
    if best.problem is not None and best.filling is not None:
        again = fill(best.problem, (1 - SCAN_SHARE) * seconds, seed=1)
        saved = best.filling.certificate.makespan - again.certificate.makespan
        if saved > 0:
            best = replace(best, step_s=best.step_s - saved, filling=again)
            tried[names] = best
    made, schedule = best.wanted, None
    if best.problem is not None and best.filling is not None:
        found = filled_plan(best.wanted, best.problem, best.filling)
        made, schedule = found.plan, found.schedule
    choices = tuple(_choice(c, plan, names, tried) for c in components)
    made = replace(made, policies=tuple(asdict(choice) for choice in choices))
    in_front = _front_s([c for c in components if c.name not in names], plan)
    return EncodedPlan(made, schedule, choices, best.step_s, in_front)


def _sets(components: Sequence[Component]) -> Iterator[frozenset[str]]:
    """What may be in idle time together, from nothing on."""
    work = sorted(components, key=lambda c: -c.least_s(1))
    groups = [[c.name] for c in work[: MOST - 1]]
    if rest := [c.name for c in work[MOST - 1 :]]:
        groups.append(rest)
    after = {c.name: {*c.after} for c in components}
    for count in range(len(groups) + 1):
        for chosen in itertools.combinations(groups, count):
            names = frozenset(itertools.chain(*chosen))
            if all(after[name] <= names for name in names):
                yield names


def _try(
    plan: PlanFile, encoders: Sequence[Mapping[str, Any]], names: Collection[str], seconds: float
) -> _Tried:
    """The step with ``names`` in idle time."""
    filled = tuple(one for one in encoders if one["name"] in names)
    others = tuple(one for one in encoders if one["name"] not in names)
    wanted = replace(plan, encoders=filled or None, in_front=others or None)
    front = _front_s(components_of(others, plan.placement), plan)
    if not filled:
        if (short := min(free_bytes(wanted))) < 0:
            raise FillError(f"encoders in front of the step lack {-short:.3g} bytes on a device")
        return _Tried(wanted, plan.replay().timeline.makespan + front, None, None)
    problem = fill_problem(wanted)
    found = fill(problem, seconds)
    return _Tried(wanted, found.certificate.makespan + front, problem, found)


def _choice(
    component: Component,
    plan: PlanFile,
    names: frozenset[str],
    tried: Mapping[frozenset[str], _Tried],
) -> Choice:
    name = component.name
    filled = [one.step_s for chosen, one in tried.items() if name in chosen]
    front = [one.step_s for chosen, one in tried.items() if name not in chosen]
    alone = _front_s([component], plan)
    # Without it the others are as they are: those in front take what they took.
    without = tried.get(names - {name})
    stored = None if without is None else min(without.step_s - alone, tried[names].step_s)
    return Choice(
        name,
        str(Policy.FILL if name in names else Policy.FRONT),
        min(filled, default=None),
        min(front, default=None),
        stored,
        component.result_bytes,
    )


def _front_s(components: Collection[Component], plan: PlanFile) -> float:
    return front_s(components, plan.num_samples, plan.pipeline, slowest_link(plan))
