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
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.backbone.gradients import wanted_gradients
from megatron_pulse.backbone.named import tell_layers
from megatron_pulse.faults import told
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_text
from megatron_pulse.planner.layout.embedders import EmbedderChoice
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.layout.routes import Routes, trace_routes
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.memory import kept_bytes
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.check.validate import validate
from megatron_pulse.planner.schedule.files import from_csv
from megatron_pulse.planner.schedule.offload import all_leave
from megatron_pulse.planner.schedule.operations import BACKWARDS, Kind, Schedule
from megatron_pulse.planner.schedule.problem import (
    ScheduleProblem,
    boundary_s,
    equal_stages,
    stage_problem,
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
        alone, whose predictions go to the first stage's device.
        """
        return _compile_step(self, num_microbatches, forward_only or predicts, predicts)

    @property
    def is_synthesized(self) -> bool:
        """Whether schedules are searched for."""
        return _is_synthesized(self.schedule_name, self.placement)

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
    recompute: Collection[int] = (),
    offload: Collection[int] = (),
    selective: Collection[int] = (),
) -> Plan:
    """Partition ``backbone`` by its ``costs`` and choose its schedule.

    Without a ``goal`` a fold keeps every skip on one device, and the largest load is
    minimised. The layers in ``recompute`` compute their activations again, as ``costs`` know of;
    those of ``selective`` what is cheap of them; those of ``offload`` wait on the host, which
    nothing counts on.
    Raises PlanError for arguments of other kinds and for costs of another chain.
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
        split = Kind.WEIGHT_GRAD in schedules[0].kinds
    problem = _problem(costs, partition, schedule_name, split, cap, goal, bool(recompute))
    return Plan(
        backbone,
        partition,
        schedule_name,
        problem=problem,
        schedules=schedules,
        recompute=frozenset(recompute),
        offload=frozenset(offload),
        selective=frozenset(selective),
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
    faults = [
        f"{name} must be of type {kind.__name__}{remark}, is {value!r:.60}"
        for name, value, kind, remark in given
        if not isinstance(value, kind)
    ]
    if cap is not None and (type(cap) is not int or cap < 1):
        faults.append(f"cap must be a whole number from 1 on, is {cap!r}")
    if faults:
        raise PlanError(told("make_plan", faults))


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
    raise PlanError(f"the costs are not those of {backbone.name}: they are of {fault}")


def is_file(schedule_name: str) -> bool:
    """Whether a schedule's name is that of a file."""
    return schedule_name.endswith(".csv")


def _is_synthesized(schedule_name: str, placement: Placement) -> bool:
    known = is_file(schedule_name) or placement.num_stages == 1
    return not known and pick(schedule_name, placement) in WAVES


def _problem(
    costs: ChainCosts,
    partition: Partition,
    name: str,
    split: bool,
    cap: int | None,
    goal: Goal,
    recompute: bool,
) -> ScheduleProblem:
    """What the plan's schedules are made for; equal stages where one takes no time.

    A weight gradient that is not known is half of a backward; those of recomputed layers do not
    wait, and take none of their own.
    """
    costs, placement = costs.of_schedule(split), partition.placement
    synthesized = _is_synthesized(name, placement)
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
                raise PlanError("wave-split needs a profile with weight gradients apart")
            costs = replace(costs, weight_grad_s=tuple(b / 2 for b in costs.backward_s))
    activation = caps = again = None
    if is_file(name):  # its R, if any, are where it says, whatever memory they take
        again = (0.0,) * placement.num_stages
    elif synthesized:
        activation, caps = _memory(costs, partition, cap, goal)
        if activation is not None and costs.again_bytes:
            again = partition.per_stage(costs.again_bytes)
    link = boundary_s(costs, partition, goal.link)
    given: dict[str, Any] = {"activation": activation, "cap": caps, "recomputed": again}
    return stage_problem(costs, partition, 1, link, split=split, **given)


def _memory(
    costs: ChainCosts, partition: Partition, cap: int | None, goal: Goal
) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    """What a forward of each stage keeps, and what a device has for that.

    ``cap`` activations, or as many as 1F1B would hold: P microbatches, and of bytes no more than
    there is room for beside the parameters.
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


def _read_schedule(path: Path, placement: Placement) -> Schedule:
    try:
        return from_csv(read_text(path, FileKind.SCHEDULE), placement, path.stem)
    except ValueError as error:
        raise PlanError(f"schedule {path}: {error}") from error


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
