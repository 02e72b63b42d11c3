"""A plan: what runs where and when, compiled and proven before the first step."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.backbone.named import tell_layers
from megatron_pulse.faults import told, wrong_count
from megatron_pulse.figures import counted, in_mb
from megatron_pulse.planner.layout.embedders import EmbedderChoice
from megatron_pulse.planner.layout.layouts import layout_name
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.layout.routes import Routes, trace_routes
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.offload import all_leave
from megatron_pulse.planner.schedule.operations import BACKWARDS, Schedule
from megatron_pulse.planner.schedule.problem import (
    ScheduleProblem,
    equal_stages,
)
from megatron_pulse.planner.schedule.registry import WAVES, make_schedule, pick, splits
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.step.communication import CommunicationPlan, compile_communication
from megatron_pulse.planner.step.nccl_check import check_events
from megatron_pulse.planner.step.program import Event, compile_program


class PlanError(ValueError):
    """A plan that would not run correctly; the message lists every fault."""


@dataclass(frozen=True)
class StepPlan:
    """Everything about one step: the schedule, its messages, and each device's events."""

    schedule: Schedule
    communication: CommunicationPlan
    programs: tuple[tuple[Event, ...], ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """A partitioned backbone and the schedule that runs it, for any number of microbatches.

    ``embedders`` says of each embedder whether it is replicated. ``problem`` is what schedules are
    made for, but for the number of microbatches (None: stages are equal). ``schedules`` are used
    for as many microbatches as they have, whatever ``schedule_name`` says. The layers in
    ``recompute`` compute their activations again in the backward pass, those of ``offload`` wait on
    the host for it: where the schedule says, or wherever they can. Those of ``selective`` compute
    again what is cheap of them, and keep the rest.
    """

    backbone: Backbone
    partition: Partition
    schedule_name: str = "auto"
    embedders: tuple[EmbedderChoice, ...] = ()
    problem: ScheduleProblem | None = None
    schedules: tuple[Schedule, ...] = ()
    recompute: frozenset[int] = frozenset()
    offload: frozenset[int] = frozenset()
    selective: frozenset[int] = frozenset()

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
        if faults := list(self._layer_faults()):
            raise PlanError(told("the plan is not sound", faults))
        starts = tuple(cuts[stage] for stage in self.placement.starts)
        if starts != self.backbone.starts:
            raise PlanError(
                f"cuts {cuts}: chains begin at the layers {starts}, those of "
                f"{self.backbone.name} at {self.backbone.starts}"
            )

    def _layer_faults(self) -> Iterator[str]:
        """Layers that there are not, or that two ways are said of."""
        count = len(self.backbone.layers)
        how = {"recompute": self.recompute, "offload": self.offload, "selective": self.selective}
        for name, layers in how.items():
            for layer in sorted(layers, key=str):
                if type(layer) is not int or not 0 <= layer < count:
                    yield f"{name} has {layer!r}; it takes numbers of layers, from 0 to {count - 1}"
        for (one, some), (other, others) in combinations(how.items(), 2):
            if both := some & others:
                yield f"layer {min(both, key=str)} is in {one} and in {other}; it is in one of them"

    @cached_property
    def routes(self) -> Routes:
        """How skips and conditioning travel."""
        replicated = frozenset(choice.layer for choice in self.embedders if choice.replicated)
        return trace_routes(self.backbone, self.partition, replicated)

    @property
    def placement(self) -> Placement:
        """The placement of the stages."""
        return self.partition.placement

    def step(
        self, num_microbatches: int, *, forward_only: bool = False, predicts: bool = False
    ) -> StepPlan:
        """The compiled and proven step for that many microbatches.

        One that ``predicts`` is the pass before a step of training that conditions itself: forwards
        alone, whose predictions go to the first stage's device. Raises PlanError where there is no
        such step.
        """
        if faults := wrong_count("num_microbatches", num_microbatches):
            raise PlanError(told("a step", faults))
        return _compile_step(self, num_microbatches, forward_only or predicts, predicts)

    @property
    def is_synthesized(self) -> bool:
        """Whether schedules are searched for."""
        return is_searched(self.schedule_name, self.placement)

    def stages_of(self, layers: Collection[int]) -> set[int]:
        """The stages that have any of these layers."""
        return set(map(self.partition.stage_of_layer, layers))

    def problem_of(self, num_microbatches: int) -> ScheduleProblem:
        """What a schedule of that many microbatches is made for."""
        if self.problem is None:
            return equal_stages(self.placement, num_microbatches, splits(self.schedule_name))
        return replace(self.problem, num_microbatches=num_microbatches)

    def idle_share(self, num_microbatches: int) -> float:
        """The part of all devices' time that the step's schedule leaves idle, by ``problem``."""
        schedule = self.step(num_microbatches).schedule
        return run(self.problem_of(num_microbatches), schedule).idle_share

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
            "frozen": [layer.name for layer in self.backbone.layers if not layer.trained],
            "schedule": self.schedule_name,
            "embedders": [asdict(choice) for choice in self.embedders],
            "recompute": sorted(self.recompute),
            "offload": sorted(self.offload),
            "selective": sorted(self.selective),
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
                    f"  device {device}, stage {stage}: {shown} ({counted(len(names), 'layer')})"
                )
        if without := wanted_gradients(backbone).layers.count(False):
            lines.append(f"  {without} layers have no backward pass: nothing up to them is trained")
        if self.recompute:
            told = tell_layers(self.recompute, len(backbone.layers))
            lines.append(f"  activations computed again: {told}")
        if self.offload:
            told = tell_layers(self.offload, len(backbone.layers))
            lines.append(f"  activations on the host until their backward: {told}")
        if self.selective:
            told = tell_layers(self.selective, len(backbone.layers))
            lines.append(f"  of activations what is cheap is computed again: {told}")
        for choice in self.embedders:
            if choice.sent_bytes:
                lines.append(
                    f"  {choice.layer}: {'replicated' if choice.replicated else 'sent'} (per "
                    f"step: {in_mb(choice.sent_bytes)} if sent, "
                    f"{in_mb(choice.replicated_bytes)} if replicated)"
                )
        return "\n".join(lines)


def is_file(schedule_name: str) -> bool:
    """Whether a schedule's name is that of a file."""
    return schedule_name.endswith(".csv")


def is_searched(schedule_name: str, placement: Placement) -> bool:
    """Whether schedules of that name are searched for, and not known."""
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
    """The schedule of a search without a limit of time: whoever makes it comes to the same.

    After two seconds the first process says on a terminal what it is at.
    """
    from tqdm import tqdm

    silent = True if os.environ.get("RANK", "0") != "0" else None
    what = f"looking for a schedule of {problem.num_microbatches} microbatches: {{elapsed}}"
    with tqdm(bar_format=what, delay=2, leave=False, disable=silent) as bar:

        def progress(best: Schedule, bound: float) -> bool:
            bar.update()
            return False

        return synthesize(problem, seconds=math.inf, beside=progress).schedule


def _counts_on(plan: Plan) -> bool:
    """Whether the plan's schedules are made for activations that can wait on the host."""
    return plan.problem is not None and plan.problem.offloaded is not None


@lru_cache(maxsize=64)
def _compile_step(
    plan: Plan, num_microbatches: int, forward_only: bool, predicts: bool
) -> StepPlan:
    schedule, offloading = _schedule(plan, num_microbatches), plan.stages_of(plan.offload)
    if kept := sorted({s for s, _ in schedule.offloaded} - offloading):
        raise PlanError(
            f"{schedule.name} has activations of stage {', '.join(map(str, kept))} wait on the "
            "host (O), of which no layer's do: give layers of it as offloaded, or leave O and L out"
        )
    if offloading and not forward_only and not schedule.offloaded and not _counts_on(plan):
        schedule = all_leave(schedule, offloading)
    if kept := sorted({s for s, _ in schedule.recomputed_apart} - plan.stages_of(plan.recompute)):
        raise PlanError(
            f"{schedule.name} computes activations of stage {', '.join(map(str, kept))} again (R), "
            "which keeps them: give layers of it as recomputed, or leave R out"
        )
    if forward_only:
        schedule = schedule.forward_only()
    elif not any(op.kind in BACKWARDS for order in schedule.order for op in order):
        raise PlanError(f"{schedule.name} has no backward: it is for an evaluation, not for a step")
    if faults := validate(schedule, plan.partition):
        raise PlanError(told("this plan would not run", faults))
    problem = plan.problem_of(num_microbatches)
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
        raise PlanError(told("this plan would not run", faults))
    return StepPlan(schedule, communication, programs)
