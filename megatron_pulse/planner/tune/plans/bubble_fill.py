"""Bubble filling of a plan: devices run frozen components for the next step where they would
idle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_pulse.errors import Faults
from megatron_pulse.planner.bubble_fill.check import faults_of
from megatron_pulse.planner.bubble_fill.encoder_table import components_of
from megatron_pulse.planner.bubble_fill.filled_schedule import (
    FilledSchedule,
    filled_of,
    filled_schedule,
    without_bubble_tasks,
)
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.bubble_fill.search import Filling, fill
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.problem import Certificate


@dataclass(frozen=True)
class FilledPlan:
    """Plan with encoders in its bubbles, and the filled schedule of its pipelines."""

    plan: PlanFile
    schedule: FilledSchedule


def fill_problem(plan: PlanFile) -> FillProblem:
    """Bubble filling problem of ``plan.encoders``: the plan's schedule, free memory and links.

    With tensor parallelism every rank of a device runs the same slices. Raises Faults.
    """
    assert plan.encoders is not None
    schedule = without_bubble_tasks(plan.schedule)
    components = components_of(plan.encoders, plan.placement)
    return FillProblem(
        plan.problem,
        schedule,
        components,
        plan.num_samples,
        tuple(max(0.0, free) for free in free_bytes(plan)),
        _left_of_links(plan),
    )


def free_bytes(plan: PlanFile) -> list[float]:
    """Bytes per device left beside the step and the encoders before the step.

    The weights and results of those encoders are on all devices. Negative if they do not fit.
    Raises Faults.
    """
    before_step = components_of(plan.before_step or (), plan.placement)
    taken = sum(c.parameter_bytes + plan.num_samples * c.result_bytes for c in before_step)
    limits = [place.usable_bytes for place in plan.places]
    pairs = zip(limits, plan.predicted["memory_bytes"], strict=True)
    return [limit - size - taken for limit, size in pairs]


def fill_plan(plan: PlanFile, encoders: Sequence[Mapping[str, Any]], seconds: float) -> FilledPlan:
    """Plan with components of these records (``bubble_fill.encoder_table``) in its bubbles.

    The plan's figures are not updated yet. Raises Faults, and FillError.
    """
    wanted = replace(plan, encoders=tuple(encoders))
    problem = fill_problem(wanted)
    return filled_plan(wanted, problem, fill(problem, seconds))


def filled_plan(wanted: PlanFile, problem: FillProblem, filling: Filling) -> FilledPlan:
    """``wanted`` with the ``filling`` of its ``problem``."""
    said = wanted.provenance["schedule"]
    known = Certificate(
        said["makespan"],
        said["lower_bound"],
        said["proved"],
        said["solver"],
        said.get("seconds", 0.0),
    )
    found = FilledSchedule.of(problem, filling, known, slowest_link(wanted))
    made = found.synthesis.certificate
    provenance = {**wanted.provenance, "schedule": {**said, **asdict(made), "gap": made.gap}}
    filled = replace(wanted, schedule=found.synthesis.schedule, provenance=provenance)
    return FilledPlan(filled, found)


def filling_faults(plan: PlanFile) -> list[str]:
    """Faults of a plan's bubble tasks, by the costs of its encoders."""
    if faults := policy_faults(plan):
        return faults
    if plan.encoders is None:
        return [
            f"schedule: bubble task {task.name!r} belongs to no component. Add it to encoders"
            for task in plan.schedule.bubble_tasks
            if task.slices
        ]
    try:
        problem = fill_problem(plan)
        filled = filled_of(plan.schedule, problem.components)
        faults = [f"encoders: {fault}" for fault in faults_of(problem, filled)]
        if faults:
            return faults
        again = filled_schedule(problem, filled)
    except Faults as error:
        return [f"encoders: {fault}" for fault in error.faults]
    for number, (said, made) in enumerate(
        itertools.zip_longest(plan.schedule.bubble_tasks, again.bubble_tasks)
    ):
        for name in ("name", "slice_seconds", "devices", "slices", "deps", "consumers"):
            if getattr(said, name, None) != getattr(made, name, None):
                faults.append(
                    f"schedule.bubble_tasks.{number}.{name} does not follow from the costs in "
                    "encoders"
                )
    return faults


def policy_faults(plan: PlanFile) -> list[str]:
    """Differences between a plan's recorded encoder policies and what the plan does."""
    try:
        components_of(plan.before_step or (), plan.placement)
    except Faults as error:
        return [f"before_step: {fault}" for fault in error.faults]
    done = {one["name"]: "fill" for one in plan.encoders or ()}
    if both := [one["name"] for one in plan.before_step or () if one["name"] in done]:
        return [f"before_step: {name} is also in encoders (bubbles)" for name in both]
    done |= {one["name"]: "before-step" for one in plan.before_step or ()}
    said = {one["name"]: one["policy"] for one in plan.policies or ()}
    if plan.policies is not None and said != done:
        return [f"policies are {said}, but the plan has {done}"]
    return []


def slowest_link(plan: PlanFile) -> Link:
    """Slowest link between neighbours of the pipeline."""
    if plan.pipeline == 1:
        return Link()
    ranks = plan.ranks
    links = [ranks.link(d, (d + 1) % plan.pipeline) for d in range(plan.pipeline)]
    return Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))


def _left_of_links(plan: PlanFile) -> Link:
    """Bandwidth of the slowest link between neighbours that the step's own messages leave."""
    slowest = slowest_link(plan)
    home = plan.placement.device_of_stage
    busy = [0.0] * plan.pipeline
    for edge in plan.edges:
        busy[home[edge.source]] += plan.num_microbatches * edge.seconds
        busy[home[edge.destination]] += plan.num_microbatches * edge.seconds * edge.needs_grad
    takes = simulate(plan.problem, without_bubble_tasks(plan.schedule)).makespan
    share = max(0.05, 1 - max(busy) / takes)
    return Link(slowest.latency_s, slowest.bytes_per_s * share)
