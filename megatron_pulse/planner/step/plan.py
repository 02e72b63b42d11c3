"""A plan: what runs where and when, compiled and proven before the first step."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.faults import told
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_text
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.embedders import EmbedderChoice
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.layout.routes import Routes, trace_routes
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.files import from_csv
from megatron_pulse.planner.schedule.operations import Kind, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import WAVES, make_schedule, pick
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.step.communication import CommunicationPlan, compile_communication
from megatron_pulse.planner.step.nccl_check import check_events
from megatron_pulse.planner.step.program import Event, compile_program

_Times = tuple[float, ...]


class PlanError(ValueError):
    """A plan that would not run correctly; the message lists every fault."""


@dataclass(frozen=True)
class StepPlan:
    """Everything about one step: the schedule, its messages, and each device's events."""

    schedule: Schedule
    communication: CommunicationPlan
    programs: tuple[tuple[Event, ...], ...]


@dataclass(frozen=True)
class StageTimes:
    """What a schedule is synthesized for, of every stage on one microbatch.

    Seconds; ``link[s]`` is of the boundary after stage s, and ``weight_grad`` the part of
    ``backward`` that may be put off (None: unknown). ``saved_bytes`` is what a forward keeps, and
    ``room_bytes`` what each device has for that (both None: no limit is known).
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    link: tuple[float, ...]
    weight_grad: tuple[float, ...] | None = None
    saved_bytes: tuple[float, ...] | None = None
    room_bytes: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """A partitioned backbone and the schedule that runs it, for any number of microbatches.

    ``cap`` bounds the live stage activations of a device (None: the schedule's own default).
    ``embedders`` says of each embedder whether it is replicated. The schedule is made for
    ``times``; without them every backward takes twice a forward. ``schedules`` are used for as many
    microbatches as they have, whatever ``schedule_name`` says.
    """

    backbone: Backbone
    partition: Partition
    schedule_name: str = "auto"
    cap: int | None = None
    embedders: tuple[EmbedderChoice, ...] = ()
    times: StageTimes | None = None
    schedules: tuple[Schedule, ...] = ()

    @cached_property
    def routes(self) -> Routes:
        """How skips and conditioning travel."""
        replicated = frozenset(choice.layer for choice in self.embedders if choice.replicated)
        return trace_routes(self.backbone, self.partition, replicated)

    @property
    def placement(self) -> Placement:
        """The placement of the stages."""
        return self.partition.placement

    def step(self, num_microbatches: int, *, forward_only: bool = False) -> StepPlan:
        """The compiled and proven step for that many microbatches."""
        return _compile_step(self, num_microbatches, forward_only)

    def problem(self, num_microbatches: int) -> ScheduleProblem | None:
        """What a wave is synthesized for; None where the schedule is not synthesized.

        A device holds as many activations as 1F1B would, and no more than it has room for.
        """
        placement, times, num = self.placement, self.times, self.placement.num_stages
        if self.schedule_name.endswith(".csv") or num == 1:
            return None
        if (name := pick(self.schedule_name, placement)) not in WAVES:
            return None
        split = name == "wave-split"
        if split and times is not None and times.weight_grad is None:
            raise PlanError("wave-split needs a profile with weight gradients apart")
        forward, backward, weight = self._times(split)
        activation, cap = (
            None,
            (float(num if self.cap is None else self.cap),) * placement.num_devices,
        )
        if self.cap is None and times is not None and times.room_bytes is not None:
            activation = times.saved_bytes
            cap = tuple(map(min, times.room_bytes, self._as_1f1b(activation or ())))
        return ScheduleProblem(
            placement,
            num_microbatches,
            forward,
            backward,
            weight,
            0.0 if times is None else times.link,
            activation,
            cap,
        )

    def _times(self, split: bool) -> tuple[_Times, _Times, _Times | None]:
        """Of each stage's forward, backward, and weight gradient if that is apart.

        Where it is not known, it is half of a backward.
        """
        times, num = self.times, self.placement.num_stages
        forward, backward = (1.0,) * num, (2.0,) * num
        weight = None
        if times is not None:
            forward, backward, weight = times.forward, times.backward, times.weight_grad
        if not split:
            return forward, backward, None
        weight = weight or tuple(b / 2 for b in backward)
        return forward, tuple(b - w for b, w in zip(backward, weight, strict=True)), weight

    def idle_share(self, num_microbatches: int) -> float:
        """The part of all devices' time that the step's schedule leaves idle, by ``times``."""
        schedule = self.step(num_microbatches).schedule
        forward, backward, weight = self._times(Kind.WEIGHT_GRAD in schedule.kinds)
        link = 0.0 if self.times is None else self.times.link
        return simulate(schedule, forward, backward, link, weight).idle_share

    def _as_1f1b(self, saved_bytes: tuple[float, ...]) -> tuple[float, ...]:
        """What each device would hold under 1F1B: P microbatches."""
        devices, stages = self.placement.num_devices, self.placement.stages_of_device
        return tuple(devices * sum(saved_bytes[s] for s in stages(d)) for d in range(devices))

    def summary(self) -> dict[str, Any]:
        """What defines the plan, as JSON-able values; equal on all ranks of a job."""
        return {
            "backbone": dict(self.backbone.record),
            "placement": self.placement.kind.name,
            "device_of_stage": list(self.placement.device_of_stage),
            "stages": [
                [self.backbone.layers[i].name for i in self.partition.layers_of_stage(s)]
                for s in range(self.placement.num_stages)
            ],
            "schedule": self.schedule_name,
            "cap": self.cap,
            "embedders": [asdict(choice) for choice in self.embedders],
        }

    def digest(self, num_microbatches: int | None = None) -> str:
        """The same for plans that run alike: stages, embedders, and every device's order.

        Without ``num_microbatches`` the order is left out.
        """
        orders: list[list[str]] = []
        if num_microbatches is not None:
            orders = [list(map(str, ops)) for ops in self.step(num_microbatches).schedule.order]
        text = json.dumps([self.summary(), orders], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """The plan in a few lines for people."""
        backbone, placement = self.backbone, self.placement
        lines = [
            f"plan: {backbone.name}, {len(backbone.layers)} layers, {len(backbone.skips)} skips; "
            f"{placement.kind.name} on {placement.num_devices} device(s), schedule "
            f"{self.schedule_name}"
        ]
        for device in range(placement.num_devices):
            for stage in placement.stages_of_device(device):
                names = [backbone.layers[i].name for i in self.partition.layers_of_stage(stage)]
                shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
                lines.append(f"  device {device}, stage {stage}: {shown} ({len(names)} layers)")
        for choice in self.embedders:
            if choice.sent_bytes:
                lines.append(
                    f"  {choice.layer}: {'replicated' if choice.replicated else 'sent'} (per "
                    f"step: {choice.sent_bytes / 1e6:.3g} MB if sent, "
                    f"{choice.replicated_bytes / 1e6:.3g} MB if replicated)"
                )
        return "\n".join(lines)


def make_plan(
    backbone: Backbone,
    costs: ChainCosts,
    placement: Placement,
    schedule_name: str = "auto",
    cap: int | None = None,
    goal: Goal | None = None,
) -> Plan:
    """Partition ``backbone`` by its ``costs`` and choose its schedule.

    Without a ``goal`` a mirrored placement keeps every skip on one device, and the largest load is
    minimised.
    """
    require_valid(backbone)
    if goal is None:
        goal = Goal(collocate=placement.kind.mirrored)
    partition = find_partition(costs, placement, goal)
    rule = goal.memory(placement) if goal.memory is not None else None
    times = stage_times(costs, partition, goal.link, rule)
    return Plan(backbone, partition, schedule_name, cap, times=times)


def stage_times(
    costs: ChainCosts, partition: Partition, link: Link, rule: MemoryRule | None = None
) -> StageTimes | None:
    """What each stage takes; None where a stage takes no time: no schedule is made for that."""
    stages = [partition.layers_of_stage(s) for s in range(partition.placement.num_stages)]

    def total(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(values[i] for i in layers) for layers in stages)

    forward, backward = total(costs.forward_s), total(costs.backward_s)
    if min(*forward, *backward) <= 0:
        return None
    weight = total(costs.weight_grad_s) if costs.weight_grad_s else None
    if weight is not None and not all(0 < w < b for w, b in zip(weight, backward, strict=True)):
        weight = None
    sent = tuple(link.time_s(costs.boundary_bytes[layers[0]]) for layers in stages[1:])
    times = StageTimes(forward, backward, sent, weight)
    if rule is None or math.isinf(rule.limit_bytes):
        return times
    saved = tuple(float(sum(costs.saved_bytes[i] for i in layers)) for layers in stages)
    held = [0.0] * partition.placement.num_devices
    for layers, device in zip(stages, partition.placement.device_of_stage, strict=True):
        held[device] += rule.bytes_per_parameter * sum(costs.parameters[i] for i in layers)
    room = tuple(rule.limit_bytes - h for h in held)
    return replace(times, saved_bytes=saved, room_bytes=room)


@lru_cache(maxsize=64)
def _schedule(plan: Plan, num_microbatches: int) -> Schedule:
    for schedule in plan.schedules:
        if schedule.num_microbatches == num_microbatches:
            return schedule
    name, placement = plan.schedule_name, plan.placement
    if name.endswith(".csv"):
        return _read_schedule(Path(name), placement, num_microbatches)
    problem = plan.problem(num_microbatches)
    if problem is None:
        return make_schedule(name, placement, num_microbatches, cap=plan.cap)
    # Without a limit of time: whoever makes it comes to the same.
    return replace(synthesize(problem, seconds=math.inf).schedule, name=pick(name, placement))


def _read_schedule(path: Path, placement: Placement, num_microbatches: int) -> Schedule:
    try:
        schedule = from_csv(read_text(path, FileKind.SCHEDULE), placement, path.stem)
    except ValueError as error:
        raise PlanError(f"schedule {path}: {error}") from error
    if schedule.num_microbatches != num_microbatches:
        raise PlanError(
            f"schedule {path} is for {schedule.num_microbatches} microbatches, but a step has "
            f"{num_microbatches}: change --global-batch-size (or --eval-global-batch-size)"
        )
    return schedule


@lru_cache(maxsize=64)
def _compile_step(plan: Plan, num_microbatches: int, forward_only: bool) -> StepPlan:
    schedule = _schedule(plan, num_microbatches)
    if forward_only:
        schedule = schedule.forward_only()
    communication = compile_communication(plan.routes, schedule)
    programs = tuple(
        compile_program(schedule, communication, d) for d in range(plan.placement.num_devices)
    )
    faults = [
        *validate(schedule, plan.partition, communication.messages),
        *check_events(programs),
    ]
    if faults:
        raise PlanError(told("this plan would not run", faults))
    return StepPlan(schedule, communication, programs)
