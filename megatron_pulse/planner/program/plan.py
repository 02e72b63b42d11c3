"""Plan of a training run: a partitioned backbone with schedules, compiled and checked."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.backbone.layer_selection import tell_layers
from megatron_pulse.errors import format_faults, wrong_count
from megatron_pulse.format import in_mb, with_plural
from megatron_pulse.planner.layout.embedder_choice import EmbedderChoice
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.layout.layouts import layout_name
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.layout.routes import Routes, trace_routes
from megatron_pulse.planner.program.communication import CommunicationPlan, compile_communication
from megatron_pulse.planner.program.device_program import Event, compile_program
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.classic.forward_pass import forward_pass
from megatron_pulse.planner.schedule.operations import BACKWARDS, Schedule
from megatron_pulse.planner.schedule.passes.insert_offload import offload_all
from megatron_pulse.planner.schedule.problem import (
    ScheduleProblem,
    equal_stages,
)
from megatron_pulse.planner.schedule.registry import WAVES, make_schedule, pick, splits
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.progress import ProgressLine


class PlanError(ValueError):
    """A plan that would not run correctly; the message lists every fault."""


@dataclass(frozen=True)
class StepPlan:
    """Compiled step: the schedule, its messages, and each device's events."""

    schedule: Schedule
    communication: CommunicationPlan
    programs: tuple[tuple[Event, ...], ...]


@dataclass(frozen=True)
class ShapeSchedule:
    """Training steps whose samples have one shape, a bucket, with the ``share`` of such steps."""

    name: str
    share: float
    micro_batch_size: int
    problem: ScheduleProblem
    schedule: Schedule

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per step and pipeline."""
        return self.schedule.num_microbatches


@dataclass(frozen=True, eq=False)
class Plan:
    """A partitioned backbone and the schedule that runs it, for any number of microbatches.

    ``embedders`` says of each embedder whether it is replicated. ``problem`` is the scheduling
    problem, except for the number of microbatches (None: stages are equal). ``schedules`` take
    precedence over ``schedule_name`` for their numbers of microbatches. ``recompute``,
    ``selective`` and ``offload`` are layers under full recomputation, selective recomputation and
    activation offload. Offload and reload happen where the schedule has O and L, or wherever they
    can if it has none. Frozen weights of the layers ``offloaded_weights`` are in host memory.
    Token-wise parts of layers run in ``token_slices`` slices (1: whole). ``fsdp`` shards the
    parameters of a plan of one stage. With ``shapes``, one for each shape of
    the backbone, a training step has samples of one shape, and runs by ``at_shape``.
    """

    backbone: Backbone
    partition: Partition
    schedule_name: str = "auto"
    embedders: tuple[EmbedderChoice, ...] = ()
    problem: ScheduleProblem | None = None
    schedules: tuple[Schedule, ...] = ()
    activations: ActivationPolicies = ActivationPolicies()
    offloaded_weights: frozenset[int] = frozenset()
    token_slices: int = 1
    fsdp: FsdpLayout | None = None
    shapes: tuple[ShapeSchedule, ...] = ()

    def __post_init__(self) -> None:
        cuts, num_stages = self.partition.cuts, self.placement.num_stages
        num_layers = len(self.backbone.layers)
        rising = all(a < b for a, b in pairwise(cuts))
        if (cuts[:1], cuts[-1:]) != ((0,), (num_layers,)) or not rising:
            raise PlanError(
                f"cuts {cuts} do not divide the {num_layers} layers of {self.backbone.name}: they "
                f"rise from 0 to {num_layers}"
            )
        if len(cuts) != num_stages + 1:
            raise PlanError(f"cuts {cuts} make {len(cuts) - 1} stages, the placement {num_stages}")
        faults = list(self.activations.faults(num_layers))
        if self.shapes and len(self.shapes) != self.backbone.num_shapes:
            names = ", ".join(shape.name for shape in self.shapes)
            faults.append(
                f"there are schedules for {names}, but {self.backbone.name} has "
                f"{self.backbone.num_shapes} shape(s)"
            )
        both = self.offloaded_weights & (self.activations.offload | self.activations.selective)
        if both:
            faults.append(
                f"layers {tell_layers(both, num_layers)} offload their weights, and offload or "
                "selectively recompute activations. Exclude them from one (--pulse-offload-weights)"
            )
        if self.fsdp is not None and (num_stages > 1 or self.offloaded_weights):
            faults.append("FSDP shards the weights of one stage, none of them on the host")
        if faults:
            raise PlanError(format_faults("the plan is invalid", faults))
        starts = tuple(cuts[stage] for stage in self.placement.starts)
        if starts != self.backbone.starts:
            raise PlanError(
                f"cuts {cuts}: chains begin at the layers {starts}, those of "
                f"{self.backbone.name} at {self.backbone.starts}"
            )

    @cached_property
    def routes(self) -> Routes:
        """Routes of skips and conditioning."""
        replicated = frozenset(choice.layer for choice in self.embedders if choice.replicated)
        return trace_routes(self.backbone, self.partition, replicated)

    @property
    def placement(self) -> Placement:
        """Placement of the stages on devices."""
        return self.partition.placement

    def at_shape(self, shape_index: int) -> Plan:
        """Plan of the training steps whose samples have this shape."""
        return self._at_shapes[shape_index]

    @cached_property
    def _at_shapes(self) -> list[Plan]:
        return [
            replace(self, problem=shape.problem, schedules=(shape.schedule,), shapes=())
            for shape in self.shapes
        ]

    def step(
        self, num_microbatches: int, *, forward_only: bool = False, predicts: bool = False
    ) -> StepPlan:
        """Compile and check the step for ``num_microbatches``.

        A pass that ``predicts`` comes before a training step with self-conditioning: it has
        forwards alone, whose predictions go to the first stage's device. Raises PlanError with all
        faults, also if there is no such step.
        """
        if faults := wrong_count("num_microbatches", num_microbatches):
            raise PlanError(format_faults("a step", faults))
        return _compile_step(self, num_microbatches, forward_only or predicts, predicts)

    def predicting_step(self, num_microbatches: int) -> StepPlan:
        """Compile and check a pass of forwards alone, for sampling.

        Predictions go to the first stage's device. The schedule is that of ``forward_pass``, so any
        number of microbatches works without a search. Raises PlanError with all faults.
        """
        if faults := wrong_count("num_microbatches", num_microbatches):
            raise PlanError(format_faults("a step", faults))
        return _compile_predicting(self, num_microbatches)

    @property
    def is_synthesized(self) -> bool:
        """True if schedules are searched for."""
        return is_searched(self.schedule_name, self.placement)

    def stages_of(self, layers: Collection[int]) -> set[int]:
        """Stages that contain any of ``layers``."""
        return set(map(self.partition.stage_of_layer, layers))

    def problem_of(self, num_microbatches: int) -> ScheduleProblem:
        """Scheduling problem for ``num_microbatches``."""
        if self.problem is None:
            return equal_stages(self.placement, num_microbatches, splits(self.schedule_name))
        return replace(self.problem, num_microbatches=num_microbatches)

    def idle_share(self, num_microbatches: int) -> float:
        """Share of all devices' time that is idle in the step's schedule, by the durations of
        ``problem``; with ``shapes``, in the mean of their steps."""
        if self.shapes:
            lines = [
                (shape.share, simulate(shape.problem, shape.schedule)) for shape in self.shapes
            ]
            whole_s = sum(share * line.makespan for share, line in lines)
            return sum(share * line.makespan * line.idle_share for share, line in lines) / whole_s
        schedule = self.step(num_microbatches).schedule
        return simulate(self.problem_of(num_microbatches), schedule).idle_share

    def summary(self) -> dict[str, Any]:
        """Definition of the plan as JSON-able values; equal on all ranks of a job."""
        fsdp = {} if self.fsdp is None else {"fsdp": asdict(self.fsdp)}
        return {
            **fsdp,
            "backbone": dict(self.backbone.record),
            "placement": self.placement.kind.name,
            "device_of_stage": list(self.placement.device_of_stage),
            "stages": [
                [self.backbone.layers[i].name for i in self.partition.layers_of_stage(s)]
                for s in range(self.placement.num_stages)
            ],
            "frozen": [layer.name for layer in self.backbone.layers if not layer.trained],
            "schedule": self.schedule_name,
            "embedders": [asdict(choice) for choice in self.embedders],
            "activations": self.activations.by_name([x.name for x in self.backbone.layers]),
        }

    def digest(self, num_microbatches: int | None = None) -> str:
        """SHA-256 that is equal for plans that run alike: same stages, embedders, and operation
        orders.

        Without ``num_microbatches`` only the orders of ``shapes`` are included.
        """
        orders: list[list[str]] = [
            [
                f"{shape.micro_batch_size} {shape.name}",
                *(str(op) for ops in shape.schedule.order for op in ops),
            ]
            for shape in self.shapes
        ]
        if num_microbatches is not None:
            order = self.step(num_microbatches).schedule.order
            orders += [list(map(str, ops)) for ops in order]
        text = json.dumps([self.summary(), orders], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """Summary of the plan in a few lines."""
        backbone, placement = self.backbone, self.placement
        layout = layout_name(self.partition, backbone.skips)
        if placement.num_devices > 1:
            layout += f" on {placement.num_devices} devices"
        lines = [
            f"plan: {backbone.name}, {len(backbone.layers)} layers, {len(backbone.skips)} skips; "
            f"{layout}, schedule "
            f"{self.schedule_name}"
        ]
        for device in range(placement.num_devices):
            for stage in placement.stages_of_device(device):
                names = [backbone.layers[i].name for i in self.partition.layers_of_stage(stage)]
                shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
                lines.append(
                    f"  device {device}, stage {stage}: {shown} "
                    f"({with_plural(len(names), 'layer')})"
                )
        if self.fsdp is not None:
            lines.append(f"  {self.fsdp}")
        lines += [
            f"  bucket {shape.name}: {shape.num_microbatches} microbatch(es) of "
            f"{shape.micro_batch_size}"
            for shape in self.shapes
        ]
        if without := required_gradients(backbone).layers.count(False):
            lines.append(
                f"  {without} layers have no backward pass: no parameter up to them is trained"
            )
        for policy, layers in self.activations.sets():
            if layers:
                lines.append(f"  activations: {policy} {tell_layers(layers, len(backbone.layers))}")
        for choice in self.embedders:
            if choice.sent_bytes:
                lines.append(
                    f"  {choice.layer}: {'replicated' if choice.replicated else 'sent'} (per "
                    f"step: {in_mb(choice.sent_bytes)} if sent, "
                    f"{in_mb(choice.replicated_bytes)} if replicated)"
                )
        return "\n".join(lines)


def is_file(schedule_name: str) -> bool:
    """True if the schedule's name is the path of a CSV file."""
    return schedule_name.endswith(".csv")


def is_searched(schedule_name: str, placement: Placement) -> bool:
    """True if schedules of that name are searched for: not from a file, not classic, several
    stages."""
    known = is_file(schedule_name) or placement.num_stages == 1
    return not known and pick(schedule_name, placement) in WAVES


@lru_cache(maxsize=64)
def _schedule(plan: Plan, num_microbatches: int) -> Schedule:
    for schedule in plan.schedules:
        if schedule.num_microbatches == num_microbatches:
            return schedule
    name, placement = plan.schedule_name, plan.placement
    if is_file(name):
        counts = ", ".join(str(schedule.num_microbatches) for schedule in plan.schedules)
        raise PlanError(
            f"schedule {name} is for {counts} microbatches, but a step has {num_microbatches}: "
            "change --global-batch-size (or --eval-global-batch-size)"
        )
    if not plan.is_synthesized:
        return make_schedule(name, placement, num_microbatches)
    return replace(_searched(plan.problem_of(num_microbatches)), name=pick(name, placement))


def _searched(problem: ScheduleProblem) -> Schedule:
    """Schedule of a search without a time limit, so that all processes find the same one.

    On a terminal the first process reports its progress after two seconds.
    """
    what = f"searching a schedule of {problem.num_microbatches} microbatches"
    with ProgressLine(what, silent=os.environ.get("RANK", "0") != "0"):
        return synthesize(problem, seconds=math.inf).schedule


def _counts_on(plan: Plan) -> bool:
    """True if the plan's schedules were searched with activation offload in mind."""
    return plan.problem is not None and plan.problem.offload_bytes is not None


@lru_cache(maxsize=64)
def _compile_step(
    plan: Plan, num_microbatches: int, forward_only: bool, predicts: bool
) -> StepPlan:
    schedule, offloading = (
        _schedule(plan, num_microbatches),
        plan.stages_of(plan.activations.offload),
    )
    if kept := sorted({s for s, _ in schedule.offloaded} - offloading):
        raise PlanError(
            f"{schedule.name} offloads activations of stage {', '.join(map(str, kept))} (O), but "
            "no layer there is offloaded. Offload layers of the stage, or remove O and L"
        )
    if offloading and not forward_only and not schedule.offloaded and not _counts_on(plan):
        schedule = offload_all(schedule, offloading)
    if kept := sorted(
        {s for s, _ in schedule.recomputed_apart} - plan.stages_of(plan.activations.recompute)
    ):
        raise PlanError(
            f"{schedule.name} recomputes activations of stage {', '.join(map(str, kept))} (R), but "
            "no layer there is recomputed. Recompute layers of the stage, or remove R"
        )
    if forward_only:
        schedule = schedule.forward_only()
    elif not any(op.kind in BACKWARDS for order in schedule.order for op in order):
        raise PlanError(f"{schedule.name} has no backward: it can only evaluate, not train")
    return _compiled(plan, schedule, predicts)


@lru_cache(maxsize=64)
def _compile_predicting(plan: Plan, num_microbatches: int) -> StepPlan:
    return _compiled(plan, forward_pass(plan.placement, num_microbatches), predicts=True)


def _compiled(plan: Plan, schedule: Schedule, predicts: bool) -> StepPlan:
    """Programs of the devices for ``schedule``; raises PlanError with all faults."""
    if faults := validate(schedule, plan.partition):
        raise PlanError(format_faults("the plan cannot run", faults))
    problem = plan.problem_of(schedule.num_microbatches)
    communication = compile_communication(plan.routes, schedule, problem, predicts)
    replicated = bool(plan.routes.replicated)
    programs = tuple(
        compile_program(schedule, communication, d, replicated)
        for d in range(plan.placement.num_devices)
    )
    faults = [
        *validate(schedule, plan.partition, communication.messages),
        *check_events(programs),
    ]
    if faults:
        raise PlanError(format_faults("the plan cannot run", faults))
    return StepPlan(schedule, communication, programs)
