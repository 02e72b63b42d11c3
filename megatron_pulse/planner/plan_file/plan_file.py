"""The plan as a file: what a tuner decided, what it expects, and where that comes from.

One JSON object: ``pulse tune`` writes it, ``pulse check`` and ``pulse show`` read it, a run with
``--pulse-plan`` obeys it. It holds everything that bears on what runs (backbone, degrees, batch,
cuts, every device's order), so that a run needs no solver, and what each layer costs at its
microbatch size, so that all that is predicted can be worked out again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.named import name_of
from megatron_pulse.faults import UserError
from megatron_pulse.file_kinds import FileKind, kind_of
from megatron_pulse.files import FileError, read_json, write_sealed
from megatron_pulse.flag_fields import flag_value
from megatron_pulse.planner.layout.layouts import layout_name
from megatron_pulse.planner.layout.placement import Partition, Placement, make_placement
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.agreement import (
    edge_faults,
    relief_faults,
    shape_faults,
    sum_faults,
)
from megatron_pulse.planner.plan_file.schema import FORMAT, MOVED, REDONE, WAITING, plan_faults
from megatron_pulse.planner.schedule.check.validate import faults_for, validate
from megatron_pulse.planner.schedule.files import from_json, to_json
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.replay import Edge, Replay, lags, replay
from megatron_pulse.profile import files as profile_files
from megatron_pulse.profile.profile import Profile, ProfileError


class PlanFileError(UserError):
    """A plan file that cannot be read or would not run; the message lists every fault."""


@dataclass(frozen=True)
class PlanFile:
    """Everything that a run is told, and what was predicted of it.

    ``rank_order`` is Megatron's: tp-dp-pp or tp-pp-dp. ``stages`` are the layers' names.
    ``schedule`` answers ``problem``, in seconds and bytes; ``edges`` are the messages between
    devices. ``predicted`` and ``provenance`` are for people; they and the times are what
    ``profile``, of this microbatch size alone, makes of the rest (see ``tune.plans.recompute``).
    ``encoders`` are the frozen components (as ``fill.table`` has them) whose pieces the schedule's
    fillers are, ``in_front`` those that run before the step, ``policies`` what was decided of each
    and why (see ``tune.plans.policies``). ``self_conditioning`` is the share of steps that run all
    forwards once before. The layers in ``recompute`` compute their activations again, those of
    ``offload`` may wait on the host, those of ``selective`` compute again what is cheap.
    ``averages``, ``half_gradients`` and ``host_optimizer`` say what is kept of a parameter, and
    where (see ``ParameterState``).
    """

    backbone: Mapping[str, Any]
    dtype: str
    pipeline: int
    data: int
    tensor: int
    sequence_parallel: bool
    rank_order: str
    global_batch_size: int
    micro_batch_size: int
    recompute: tuple[str, ...]
    distributed_optimizer: bool
    averages: bool
    half_gradients: bool
    overlap_grad_reduce: bool
    stages: tuple[tuple[str, ...], ...]
    schedule: Schedule
    problem: ScheduleProblem
    edges: tuple[Edge, ...]
    predicted: Mapping[str, Any]
    provenance: Mapping[str, Any]
    profile: Profile
    encoders: tuple[Mapping[str, Any], ...] | None = None
    in_front: tuple[Mapping[str, Any], ...] | None = None
    policies: tuple[Mapping[str, Any], ...] | None = None
    self_conditioning: float = 0.0
    offload: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    host_optimizer: bool = False

    @property
    def heading(self) -> str:
        """What runs where, in a line."""
        return (
            f"{name_of(self.backbone)} on {self.world_size} rank(s): pipeline {self.pipeline} x "
            f"data {self.data} x tensor {self.tensor}, {self.layout} ({len(self.stages)} stage(s))"
        )

    @property
    def layout(self) -> str:
        """The name of its layout, as ``pulse tune --layouts`` takes it."""
        return layout_name(self.partition, self.profile.skips)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.pipeline * self.data * self.tensor

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on one pipeline."""
        return self.global_batch_size // (self.data * self.micro_batch_size)

    @property
    def num_samples(self) -> int:
        """Samples of a step of one pipeline."""
        return self.num_microbatches * self.micro_batch_size

    @property
    def placement(self) -> Placement:
        """Where the stages are."""
        return self.problem.placement

    @property
    def partition(self) -> Partition:
        """Where the chain is cut."""
        return Partition(self.placement, (0, *accumulate(map(len, self.stages))))

    @property
    def state(self) -> ParameterState:
        """What is kept of a trained parameter."""
        return ParameterState(self.averages, self.half_gradients, self.host_optimizer)

    @property
    def recomputed(self) -> frozenset[int]:
        """The layers whose activations are computed again, by their place in the chain."""
        return self._places(self.recompute)

    @property
    def offloaded(self) -> frozenset[int]:
        """The layers whose activations may wait on the host, by their place in the chain."""
        return self._places(self.offload)

    @property
    def selected(self) -> frozenset[int]:
        """The layers that compute what is cheap again, by their place in the chain."""
        return self._places(self.selective)

    def _places(self, layers: Collection[str]) -> frozenset[int]:
        names = [name for stage in self.stages for name in stage]
        return frozenset(i for i, name in enumerate(names) if name in layers)

    def replay(self) -> Replay:
        """The step of one pipeline as predicted."""
        return replay(self.problem, self.schedule, self.edges)


def save_plan(plan: PlanFile, path: str | Path) -> None:
    """Write ``plan``; what was there before is only replaced by a complete file."""
    write_sealed(path, json.dumps(to_record(plan), indent=1) + "\n")


def read_plan(path: str | Path) -> tuple[dict[str, Any] | None, PlanFile | None, list[str]]:
    """What a file says, as a plan, and every fault of form and of legality.

    None instead of what it says where its form has faults, and instead of a plan where numbers do
    not make one. Raises PlanFileError for a file that cannot be read at all (see
    ``files.read_json``).
    """
    try:
        record = read_json(path, FileKind.PLAN)
    except FileError as error:
        raise PlanFileError(str(error)) from error
    if older := _other_version(path, record):
        raise PlanFileError(older)
    if faults := plan_faults(record):
        return None, None, faults
    return record, *_from_record(record)


def _other_version(path: str | Path, record: Mapping[str, Any]) -> str:
    """That a plan is of another version; empty where it is not, or is no plan at all."""
    form = record.get("format")
    if form is None or form == FORMAT or kind_of(record) is not FileKind.PLAN:
        return ""
    backbone = record.get("backbone")
    named = backbone if isinstance(backbone, dict) else {}
    options = named.get("options")
    model = f"--backbone {named.get('name', 'NAME')}"
    for key, value in (options if isinstance(options, dict) else {}).items():
        model += f" --option {key}={flag_value(value)}"
    return (
        f"{path} is {str(form)[:40]!r}, and only {FORMAT!r} can be checked and run: make it anew "
        f"with 'pulse tune {model} --cluster CLUSTER --global-batch-size "
        f"{record.get('global_batch_size', 'N')} -o {path}' (or --profile for --backbone)"
    )


def to_record(plan: PlanFile) -> dict[str, Any]:
    """What its file holds."""
    problem = plan.problem
    record: dict[str, Any] = {"format": FORMAT}
    for field in fields(plan):
        match field.name:
            case "schedule":
                record["schedule"] = to_json(plan.schedule)
            case "problem":
                record["times"] = {
                    "forward": problem.forward,
                    "backward": problem.backward,
                    "weight_grad": problem.weight_grad,
                    "edges": [astuple(edge)[: 3 if edge.wants else 4] for edge in plan.edges],
                    "saved_bytes": problem.activation,
                    "cap_bytes": problem.cap,
                }
                if problem.recompute is not None:
                    again = problem.recomputed or (0.0,) * problem.placement.num_stages
                    record["times"] |= dict(zip(REDONE, (problem.recompute, again), strict=True))
                if problem.waiting is not None:
                    record["times"][WAITING] = problem.waiting
                if problem.offloaded is not None:
                    moved = problem.offloaded, problem.copying
                    record["times"] |= dict(zip(MOVED, moved, strict=True))
            case "edges":
                pass
            case "encoders" | "in_front" | "policies" as name:
                if (given := getattr(plan, name)) is not None:
                    record[name] = list(given)
            case "self_conditioning" | "offload" | "selective" | "host_optimizer" as name:
                if given := getattr(plan, name):
                    record[name] = given
            case "stages":
                record["placement"] = str(plan.placement.kind)
                record["num_chunks"] = plan.placement.num_chunks
                record["stages"] = plan.stages
            case "profile":
                record["profile"] = profile_files.to_record(plan.profile)
            case name:
                record[name] = getattr(plan, name)
    return record


def _from_record(record: dict[str, Any]) -> tuple[PlanFile | None, list[str]]:
    """The plan of a record without faults of form, if its numbers make one, and all faults."""
    faults = list(sum_faults(record))
    try:
        profile = profile_files.from_record(record["profile"], "profile")
    except ProfileError as error:
        return None, [*faults, str(error)]
    try:
        schedule = from_json(record["schedule"])
    except (ValueError, OverflowError) as error:
        return None, [*faults, f"schedule: {error}"]
    if shape := list(shape_faults(record)):
        return None, faults + shape
    times = record["times"]
    if relief := list(relief_faults(record)):  # nothing can be worked out from it
        return None, [*faults, *relief, *(f"schedule: {fault}" for fault in validate(schedule))]
    edges = tuple(Edge(int(a), int(b), float(s), *wants) for a, b, s, *wants in times["edges"])
    placement = make_placement(record["placement"], record["pipeline"], record["num_chunks"])
    faults += edge_faults(placement, edges)
    count, rest = divmod(record["global_batch_size"], record["data"] * record["micro_batch_size"])
    if rest:
        return None, faults + [f"schedule: {fault}" for fault in validate(schedule)]
    split = times["weight_grad"]
    try:
        problem = ScheduleProblem(
            placement,
            count,
            tuple(times["forward"]),
            tuple(times["backward"]),
            None if split is None else tuple(split),
            lags(edges, placement.num_stages),
            tuple(times["saved_bytes"]),
            tuple(times["cap_bytes"]),
            *(tuple(times[name]) if name in times else None for name in (*REDONE, WAITING, *MOVED)),
        )
    except (ValueError, OverflowError) as error:
        faults += [f"times: {error}", *(f"schedule: {fault}" for fault in validate(schedule))]
        return None, faults
    given = {field.name: record[field.name] for field in fields(PlanFile) if field.name in record}
    given["stages"] = tuple(map(tuple, record["stages"]))
    given["recompute"] = tuple(record["recompute"])
    given["schedule"], given["profile"] = schedule, profile
    for name in ("encoders", "in_front", "policies", "offload", "selective"):
        if name in given:
            given[name] = tuple(given[name])
    plan = PlanFile(**given, problem=problem, edges=edges)
    return plan, faults + [f"schedule: {fault}" for fault in faults_for(problem, schedule)]
