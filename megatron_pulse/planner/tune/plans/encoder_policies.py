"""Encoder policies: run each frozen component in the bubbles or before the step, whichever is
faster.

Every set of components is tried in the bubbles, with the others before the step. With any in the
bubbles, all sample shapes share one schedule, since bubble tasks encode the next step's samples,
whose shape may be another. A component that
depends on another can only be in the bubbles if the other is. Savings from stored results are
reported but never chosen, since the price of storage is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from megatron_pulse.errors import Faults
from megatron_pulse.planner.bubble_fill.components import Component
from megatron_pulse.planner.bubble_fill.encoder_table import components_of
from megatron_pulse.planner.bubble_fill.filled_schedule import FilledSchedule, before_step_s
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.bubble_fill.search import FillError, Filling, fill
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.plans.bubble_fill import (
    fill_problem,
    filled_plan,
    free_bytes,
    slowest_link,
)

MOST = 4
"""Components that are decided separately. Of more, those with the least work are decided
together."""
SOONER = 0.999
"""Ratio of step times above which the bubbles count as no faster than before the step."""
SCAN_SHARE = 0.5
"""Share of the time for scanning all sets. The rest refines the best one."""
LEAST_S = 0.2
"""Minimum seconds per set, so that a short search does not make a set look worse than it is."""


class Policy(StrEnum):
    """Time at which a component runs."""

    FILL = "fill"
    BEFORE_STEP = "before-step"


@dataclass(frozen=True)
class Choice:
    """Decision for a component.

    ``fill_s`` and ``before_step_s`` are the shortest steps found with the component in bubbles
    and before the step (None: does not fit in memory). ``stored_s`` is the step with stored
    results and all else unchanged (None: not known). Storage takes ``stored_bytes`` per sample.
    """

    name: str
    policy: str
    fill_s: float | None
    before_step_s: float | None
    stored_s: float | None
    stored_bytes: float

    def __str__(self) -> str:
        steps = (
            ("filled", self.fill_s),
            ("before the step", self.before_step_s),
            ("stored", self.stored_s),
        )
        shown = ", ".join(f"{s:.4g} s {how}" for how, s in steps if s is not None)
        when = "in bubbles" if self.policy == Policy.FILL else "before the step"
        return (
            f"{self.name}: {when} (step: {shown}; {self.stored_bytes:.4g} bytes per stored sample)"
        )


@dataclass(frozen=True)
class EncodedPlan:
    """Plan with a policy for every encoder.

    ``schedule`` is the filled schedule (None: all encoders run before the step). ``pipeline_s`` is
    the step of a pipeline with the encoders before it.
    """

    plan: PlanFile
    schedule: FilledSchedule | None
    choices: tuple[Choice, ...]
    pipeline_s: float
    encoders_before_step_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the whole cluster."""
        step_s: float = self.plan.predicted["step_s"]
        return self.plan.global_batch_size / (step_s + self.encoders_before_step_s)

    def figures(self) -> dict[str, Any]:
        """JSON-able figures."""
        found: dict[str, Any] = {
            "pipeline_s": self.pipeline_s,
            "encoders_before_step_s": self.encoders_before_step_s,
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
                "homes": {f.name: list(f.devices or ()) for f in self.plan.schedule.bubble_tasks},
            }
        return found


@dataclass(frozen=True)
class _Tried:
    """One set in the bubbles: seconds of a pipeline's step, and the filling."""

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
    """Plan with components of these records (``bubble_fill.encoder_table``), each where the step
    is shortest.

    ``fixed`` policies (fill, before-step) are obeyed. The plan's figures are not updated yet.
    Raises Faults, and FillError if no combination fits in memory.
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
        raise FillError(
            faults[0] if faults else "components before the step depend on components in bubbles"
        )
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
    before_step = _front_s([c for c in components if c.name not in names], plan)
    return EncodedPlan(made, schedule, choices, best.step_s, before_step)


def _sets(components: Sequence[Component]) -> Iterator[frozenset[str]]:
    """Sets of components that may be in the bubbles together, from the empty set on."""
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
    filled = tuple(one for one in encoders if one["name"] in names)
    others = tuple(one for one in encoders if one["name"] not in names)
    wanted = replace(plan, encoders=filled or None, before_step=others or None)
    if filled:
        wanted = replace(wanted, shapes=())
    front = _front_s(components_of(others, plan.placement), plan)
    if not filled:
        if (short := min(free_bytes(wanted))) < 0:
            raise FillError(
                f"encoders before the step exceed a device's memory by {-short:.3g} bytes"
            )
        return _Tried(wanted, _pipeline_s(plan) + front, None, None)
    problem = fill_problem(wanted)
    found = fill(problem, seconds)
    return _Tried(wanted, found.certificate.makespan + front, problem, found)


def _pipeline_s(plan: PlanFile) -> float:
    """Step of a pipeline, in the mean of the plan's shapes."""
    if plan.shapes:
        return sum(shape.share * _pipeline_s(shape.plan) for shape in plan.shapes)
    return plan.simulate_step().timeline.makespan


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
    # The others stay unchanged: those before the step take the same time.
    without = tried.get(names - {name})
    stored = None if without is None else min(without.step_s - alone, tried[names].step_s)
    return Choice(
        name,
        str(Policy.FILL if name in names else Policy.BEFORE_STEP),
        min(filled, default=None),
        min(front, default=None),
        stored,
        component.result_bytes,
    )


def _front_s(components: Collection[Component], plan: PlanFile) -> float:
    return before_step_s(components, plan.num_samples, plan.pipeline, slowest_link(plan))
