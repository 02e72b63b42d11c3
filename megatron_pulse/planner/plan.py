"""A plan: what runs where and when, compiled and proven before the first step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.planner.communication import (
    CommunicationPlan,
    compile_communication,
)
from megatron_pulse.planner.costs import ChainCosts, Link
from megatron_pulse.planner.embedders import EmbedderChoice
from megatron_pulse.planner.nccl_check import check_events
from megatron_pulse.planner.partition import Goal, find_partition
from megatron_pulse.planner.placement import Placement, PlacementKind
from megatron_pulse.planner.program import Event, compile_program
from megatron_pulse.planner.routes import Routes, trace_routes
from megatron_pulse.planner.schedule.files import from_csv
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.validate import validate
from megatron_pulse.planner.stages import Partition


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
    """Seconds of every stage on one microbatch; ``link[s]`` is of the boundary after stage s."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    link: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """A partitioned backbone and the schedule that runs it, for any number of microbatches.

    ``cap`` bounds the live stage activations of a device (None: the schedule's own default).
    ``embedders`` says of each embedder whether it is replicated. The schedule is made for
    ``times``; without them every backward takes twice a forward.
    """

    backbone: Backbone
    partition: Partition
    schedule_name: str = "auto"
    cap: int | None = None
    embedders: tuple[EmbedderChoice, ...] = ()
    times: StageTimes | None = None

    def __post_init__(self) -> None:
        if self.placement.kind is PlacementKind.BIDIRECTIONAL:
            raise PlanError(
                "a bidirectional placement (Chimera) holds every stage's weights on two devices, "
                "which the runtime cannot: it is there for comparisons. Use a fold"
            )

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

    def summary(self) -> dict[str, Any]:
        """What defines the plan, as JSON-able values; equal on all ranks of a job."""
        return {
            "backbone": dict(self.backbone.record),
            "placement": self.placement.kind.value,
            "device_of_stage": list(self.placement.device_of_stage),
            "stages": [
                [self.backbone.layers[i].name for i in self.partition.layers_of_stage(s)]
                for s in range(self.placement.num_stages)
            ],
            "schedule": self.schedule_name,
            "cap": self.cap,
            "embedders": [asdict(choice) for choice in self.embedders],
        }

    def digest(self, num_microbatches: int) -> str:
        """The same for plans that run alike: stages, embedders, and every device's order."""
        orders = [[str(op) for op in ops] for ops in self.step(num_microbatches).schedule.order]
        text = json.dumps([self.summary(), orders], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """The plan in a few lines for people."""
        backbone, placement = self.backbone, self.placement
        lines = [
            f"plan: {backbone.name}, {len(backbone.layers)} layers, {len(backbone.skips)} skips; "
            f"{placement.kind.value} on {placement.num_devices} device(s), schedule "
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

    Without a ``goal`` a fold keeps every skip on one device, and the largest load is minimised.
    """
    require_valid(backbone)
    if goal is None:
        goal = Goal(collocate=placement.kind is PlacementKind.FOLD)
    partition = find_partition(costs, placement, goal)
    times = stage_times(costs, partition, goal.link)
    return Plan(backbone, partition, schedule_name, cap, times=times)


def stage_times(costs: ChainCosts, partition: Partition, link: Link) -> StageTimes | None:
    """What each stage takes; None where a stage takes no time: no schedule is made for that."""
    stages = [partition.layers_of_stage(s) for s in range(partition.placement.num_stages)]
    forward = tuple(sum(costs.forward_s[i] for i in layers) for layers in stages)
    backward = tuple(sum(costs.backward_s[i] for i in layers) for layers in stages)
    if min(*forward, *backward) <= 0:
        return None
    sent = tuple(link.time_s(costs.boundary_bytes[layers[0]]) for layers in stages[1:])
    return StageTimes(forward, backward, sent)


@lru_cache(maxsize=64)
def _schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    cap: int | None,
    times: StageTimes | None,
) -> Schedule:
    if name.endswith(".csv"):
        return _read_schedule(Path(name), placement, num_microbatches)
    if times is None:
        return make_schedule(name, placement, num_microbatches, cap=cap)
    return make_schedule(
        name,
        placement,
        num_microbatches,
        cap=cap,
        forward=times.forward,
        backward=times.backward,
        link=times.link,
    )


def _read_schedule(path: Path, placement: Placement, num_microbatches: int) -> Schedule:
    try:
        schedule = from_csv(path.read_text(), placement, path.stem)
    except (OSError, ValueError) as error:
        raise PlanError(f"schedule {path}: {error}") from error
    if schedule.num_microbatches != num_microbatches:
        raise PlanError(
            f"schedule {path} is for {schedule.num_microbatches} microbatches, but a step has "
            f"{num_microbatches}: change --global-batch-size (or --eval-global-batch-size)"
        )
    return schedule


@lru_cache(maxsize=64)
def _compile_step(plan: Plan, num_microbatches: int, forward_only: bool) -> StepPlan:
    schedule = _schedule(plan.schedule_name, plan.placement, num_microbatches, plan.cap, plan.times)
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
        raise PlanError("this plan would not run:\n" + "\n".join(f"- {f}" for f in faults))
    return StepPlan(schedule, communication, programs)
