"""A plan whose devices run frozen components for the next step where they would idle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_pulse.faults import Faults
from megatron_pulse.planner.cluster.cluster import from_record
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.fill.check import faults_of
from megatron_pulse.planner.fill.fillers import FilledSchedule, filled_of, filled_schedule, unfilled
from megatron_pulse.planner.fill.problem import FillProblem
from megatron_pulse.planner.fill.search import Filling, fill
from megatron_pulse.planner.fill.table import components_of
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.problem import Certificate
from megatron_pulse.planner.tune.ranks import Ranks


@dataclass(frozen=True)
class FilledPlan:
    """A plan with encoders, and what is known of its pipelines' schedule."""

    plan: PlanFile
    schedule: FilledSchedule


def fill_problem(plan: PlanFile) -> FillProblem:
    """What ``plan.encoders`` has to fill: the plan's schedule, memory and links.

    Every rank of a device of several (tensor parallelism) runs the same pieces. Raises Faults.
    """
    assert plan.encoders is not None
    schedule = unfilled(plan.schedule)
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
    """Per device what is left beside the step and what is encoded in front of it, whose weights
    and results are on all devices; below 0 where that does not fit. Raises Faults."""
    cluster = from_record(plan.provenance["cluster"], "provenance.cluster")
    in_front = components_of(plan.in_front or (), plan.placement)
    taken = sum(c.parameter_bytes + plan.num_samples * c.result_bytes for c in in_front)
    return [cluster.usable_bytes - size - taken for size in plan.predicted["memory_bytes"]]


def fill_plan(plan: PlanFile, encoders: Sequence[Mapping[str, Any]], seconds: float) -> FilledPlan:
    """``plan`` with components of such records (``fill.table``) in its idle time.

    The plan's figures are yet to be worked out again. Raises Faults, and FillError.
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
    """What is wrong with the fillers of a plan, by the costs of its encoders."""
    if faults := policy_faults(plan):
        return faults
    if plan.encoders is None:
        return [
            f"schedule: filler {filler.name!r} is of no component: encoders are missing"
            for filler in plan.schedule.fillers
            if filler.pieces
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
        itertools.zip_longest(plan.schedule.fillers, again.fillers)
    ):
        for name in ("name", "slice_seconds", "devices", "pieces", "needs", "readers"):
            if getattr(said, name, None) != getattr(made, name, None):
                faults.append(
                    f"schedule.fillers.{number}.{name} is not what the costs of encoders make it"
                )
    return faults


def policy_faults(plan: PlanFile) -> list[str]:
    """Where what a plan says was decided of encoders is not what it does."""
    try:
        components_of(plan.in_front or (), plan.placement)
    except Faults as error:
        return [f"in_front: {fault}" for fault in error.faults]
    done = {one["name"]: "fill" for one in plan.encoders or ()}
    if both := [one["name"] for one in plan.in_front or () if one["name"] in done]:
        return [f"in_front: {name} is in idle time too" for name in both]
    done |= {one["name"]: "front" for one in plan.in_front or ()}
    said = {one["name"]: one["policy"] for one in plan.policies or ()}
    if plan.policies is not None and said != done:
        return [f"policies are {said}, the plan does {done}"]
    return []


def slowest_link(plan: PlanFile) -> Link:
    """That between neighbours of the pipeline."""
    if plan.pipeline == 1:
        return Link()
    cluster = from_record(plan.provenance["cluster"], "provenance.cluster")
    ranks = Ranks(cluster, plan.pipeline, plan.data, plan.tensor, plan.rank_order == "tp-pp-dp")
    links = [ranks.link(d, (d + 1) % plan.pipeline) for d in range(plan.pipeline)]
    return Link(max(link.latency_s for link in links), min(link.bytes_per_s for link in links))


def _left_of_links(plan: PlanFile) -> Link:
    """Of the slowest link between neighbours, what the step's own messages leave."""
    slowest = slowest_link(plan)
    home = plan.placement.device_of_stage
    busy = [0.0] * plan.pipeline
    for edge in plan.edges:
        busy[home[edge.source]] += plan.num_microbatches * edge.seconds
        busy[home[edge.destination]] += plan.num_microbatches * edge.seconds * edge.wants
    takes = run(plan.problem, unfilled(plan.schedule)).makespan
    share = max(0.05, 1 - max(busy) / takes)
    return Link(slowest.latency_s, slowest.bytes_per_s * share)
