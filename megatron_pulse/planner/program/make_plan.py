"""Plans made from a backbone, its costs and a placement; schedules of a run within a time limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import format_faults, wrong_count, wrong_kinds
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_text
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.memory import kept_bytes
from megatron_pulse.planner.program.plan import Plan, PlanError, is_file, is_searched
from megatron_pulse.planner.schedule.cache import cached
from megatron_pulse.planner.schedule.operations import OpType, Schedule
from megatron_pulse.planner.schedule.problem import (
    Certificate,
    ScheduleProblem,
    boundary_s,
    equal_stages,
    stage_problem,
)
from megatron_pulse.planner.schedule.registry import pick, splits
from megatron_pulse.planner.schedule.serialize import from_csv
from megatron_pulse.planner.schedule.solve import solve

KEEP_ALL = ActivationPolicies()


def make_plan(
    backbone: Backbone,
    costs: ChainCosts,
    placement: Placement,
    schedule_name: str = "auto",
    cap: int | None = None,
    goal: Goal | None = None,
    activations: ActivationPolicies = KEEP_ALL,
) -> Plan:
    """Partition ``backbone`` by its ``costs`` and choose its schedule.

    Without a ``goal`` the largest load is minimised, and a fold keeps every skip on one device.
    ``recompute``, ``selective`` and ``offload`` are layers under full recomputation, selective
    recomputation and activation offload. ``costs`` include the recomputation. The schedule does not
    count on offload to save memory. Raises PlanError for arguments of wrong types and for costs of
    another chain.
    """
    _require_kinds(backbone, costs, placement, schedule_name, cap, goal)
    require_valid(backbone)
    _require_costs_of(backbone, costs)
    if goal is None:
        goal = Goal(collocate=placement.kind.keeps_skips)
    partition = find_partition(costs, placement, goal)
    schedules: tuple[Schedule, ...] = ()
    split = splits(schedule_name)
    if is_file(schedule_name):
        schedules = (_read_schedule(Path(schedule_name), placement),)
        split = OpType.WEIGHT_GRAD in schedules[0].kinds
    problem = _problem(
        costs, partition, schedule_name, split, cap, goal, bool(activations.recompute)
    )
    return Plan(
        backbone,
        partition,
        schedule_name,
        problem=problem,
        schedules=schedules,
        activations=activations,
    )


def _require_kinds(
    backbone: object, costs: object, placement: object, schedule: object, cap: object, goal: object
) -> None:
    given: tuple[tuple[str, object, type, str], ...] = (
        ("backbone", backbone, Backbone, ""),
        ("costs", costs, ChainCosts, ", as weighted_costs or measure(...).at(size) make them"),
        ("placement", placement, Placement, ", as fold, sequential or interleaved make them"),
        ("schedule_name", schedule, str, ""),
        ("goal", Goal() if goal is None else goal, Goal, ""),
    )
    faults = wrong_kinds(given)
    if cap is not None:
        faults += wrong_count("cap", cap)
    if faults:
        raise PlanError(format_faults("make_plan", faults))


def _require_costs_of(backbone: Backbone, costs: ChainCosts) -> None:
    names = tuple(layer.name for layer in backbone.layers)
    if costs.names == names:
        return
    if len(costs.names) != len(names):
        fault = f"{len(costs.names)} layers, it has {len(names)}"
    else:
        pairs = zip(costs.names, names, strict=True)
        i, (named, name) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        fault = f"layer {i} called {named!r}, its layer {i} is {name!r}"
    raise PlanError(f"costs do not match {backbone.name}: they have {fault}")


def _problem(
    costs: ChainCosts,
    partition: Partition,
    name: str,
    split: bool,
    cap: int | None,
    goal: Goal,
    recompute: bool,
) -> ScheduleProblem:
    """Problem that the plan's schedules are made for; equal stages if a stage takes no time.

    An unknown weight gradient counts as half of the backward. Weight gradients of recomputed layers
    are not deferred and take no time of their own.
    """
    costs, placement = costs.of_schedule(split), partition.placement
    synthesized = is_searched(name, placement)
    if cap is not None and not synthesized and placement.num_stages > 1 and not is_file(name):
        name = pick(name, placement)
        raise PlanError(f"{name} has a fixed peak of activations; a cap needs schedule wave")
    backward = partition.per_stage(costs.backward_s)
    if min(partition.per_stage(costs.forward_s)) <= 0 or max(backward) <= 0:
        return equal_stages(placement, 1, split, cap)
    if split:
        weight = partition.per_stage(costs.weight_grad_s) or (0.0,) * placement.num_stages
        unknown = max(weight) <= 0 and not recompute
        if unknown or any(w > b for w, b in zip(weight, backward, strict=True)):
            if synthesized:
                raise PlanError(
                    "wave-split needs a profile with weight gradients apart (weighted_costs takes "
                    "weight_grads=0.5)"
                )
            costs = replace(costs, weight_grad_s=tuple(b / 2 for b in costs.backward_s))
    activation = caps = again = None
    if is_file(name):  # a file places its R itself, whatever memory they take
        again = (0.0,) * placement.num_stages
    elif synthesized:
        activation, caps = _memory(costs, partition, cap, goal)
        if activation is not None and costs.recompute_bytes:
            again = partition.per_stage(costs.recompute_bytes)
    link = boundary_s(costs, partition, goal.link)
    given: dict[str, Any] = {"activation": activation, "cap": caps, "recompute_bytes": again}
    return stage_problem(costs, partition, 1, link, split=split, **given)


def _memory(
    costs: ChainCosts, partition: Partition, cap: int | None, goal: Goal
) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    """Activation size of each stage's forward, and activation memory of each device.

    The memory is ``cap`` activations. Without a ``cap`` each device has as much as 1F1B would hold:
    P microbatches, but no more bytes than are free beside the parameters.
    """
    placement = partition.placement
    rule = goal.memory(placement) if goal.memory is not None else None
    if cap is not None or rule is None or math.isinf(rule.limit_bytes):
        most = placement.num_stages if cap is None else cap
        return None, (float(most),) * placement.num_devices
    saved = kept_bytes(costs, partition)
    held = [0.0] * placement.num_devices
    count = partition.per_stage(rule.weighed(costs))
    for device, parameters in zip(placement.device_of_stage, count, strict=True):
        held[device] += rule.bytes_per_parameter * parameters
    return saved, tuple(
        min(
            rule.limit_bytes - held[device],
            placement.num_devices * sum(saved[s] for s in placement.stages_of_device(device)),
        )
        for device in range(placement.num_devices)
    )


def _read_schedule(path: Path, placement: Placement) -> Schedule:
    try:
        return from_csv(read_text(path, FileKind.SCHEDULE), placement, path.stem)
    except ValueError as error:
        raise PlanError(f"schedule {path}: {error}") from error


def find_schedules(
    plan: Plan, counts: Iterable[int], seconds: float = 10.0, solver: str = "auto"
) -> tuple[Plan, tuple[Certificate, ...]]:
    """Return ``plan`` with a schedule for each number of microbatches, and their certificates.

    Classic schedules and schedules from files are left as they are. ``seconds`` limits each search.
    Raises ValueError for an unavailable solver.
    """
    schedules, certificates = list(plan.schedules), []
    known = {schedule.num_microbatches for schedule in schedules}
    for count in sorted(set(counts) - known) if plan.is_synthesized else ():
        found = cached(plan.problem_of(count), seconds, solver, solve)
        name = pick(plan.schedule_name, plan.placement)
        schedules.append(replace(found.schedule, name=name))
        certificates.append(found.certificate)
    return replace(plan, schedules=tuple(schedules)), tuple(certificates)
