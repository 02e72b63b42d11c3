"""The plan as a file: what a tuner decided, what it expects, and where that comes from.

One JSON object: ``pulse tune`` writes it, ``pulse check`` and ``pulse show`` read it, a run with
``--pulse-plan`` obeys it. It holds everything that bears on what runs (backbone, degrees, batch,
cuts, every device's order), so that a run needs neither the profile nor a solver.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.faults import UserError, told
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, replacing
from megatron_pulse.planner.layout.placement import (
    PLACEMENTS,
    Partition,
    Placement,
    make_placement,
)
from megatron_pulse.planner.plan_file.schema import FORMAT, plan_faults
from megatron_pulse.planner.schedule.check.validate import faults_for, validate
from megatron_pulse.planner.schedule.files import from_json, to_json
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.replay import Edge, Replay, lags, replay


class PlanFileError(UserError):
    """A plan file that cannot be read or would not run; the message lists every fault."""


@dataclass(frozen=True)
class PlanFile:
    """Everything that a run is told, and what was predicted of it.

    ``rank_order`` is Megatron's: tp-dp-pp or tp-pp-dp. ``stages`` are the layers' names.
    ``schedule`` answers ``problem``, in seconds and bytes; ``edges`` are the messages between
    devices. ``predicted`` and ``provenance`` are for people; nothing that runs reads them.
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
    recompute: bool
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    stages: tuple[tuple[str, ...], ...]
    schedule: Schedule
    problem: ScheduleProblem
    edges: tuple[Edge, ...]
    predicted: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def heading(self) -> str:
        """What runs where, in a line."""
        return (
            f"{self.backbone['name']} on {self.world_size} rank(s): pipeline {self.pipeline} x "
            f"data {self.data} x tensor {self.tensor}, {self.placement.kind} of {len(self.stages)} "
            "stage(s)"
        )

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.pipeline * self.data * self.tensor

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step on one pipeline."""
        return self.global_batch_size // (self.data * self.micro_batch_size)

    @property
    def placement(self) -> Placement:
        """Where the stages are."""
        return self.problem.placement

    @property
    def partition(self) -> Partition:
        """Where the chain is cut."""
        return Partition(self.placement, (0, *accumulate(map(len, self.stages))))

    def replay(self) -> Replay:
        """The step of one pipeline as predicted."""
        return replay(self.problem, self.schedule, self.edges)


def save_plan(plan: PlanFile, path: str | Path) -> None:
    """Write ``plan``; what was there before is only replaced by a complete file."""
    with replacing(path) as beside:
        beside.write_text(json.dumps(_to_record(plan), indent=1) + "\n", encoding="utf-8")


def load_plan(path: str | Path) -> PlanFile:
    """Read a plan; raises PlanFileError that lists every fault of form and of legality."""
    _, plan, faults = read_plan(path)
    if plan is None or faults:
        raise PlanFileError(told(f"{path} is not a plan that can run", faults))
    return plan


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
    if faults := plan_faults(record):
        return None, None, faults
    return record, *_from_record(record)


def _to_record(plan: PlanFile) -> dict[str, Any]:
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
                    "edges": [astuple(edge) for edge in plan.edges],
                    "saved_bytes": problem.activation,
                    "cap_bytes": problem.cap,
                }
            case "edges":
                pass
            case "stages":
                record["placement"] = str(plan.placement.kind)
                record["num_chunks"] = plan.placement.num_chunks
                record["stages"] = plan.stages
            case name:
                record[name] = getattr(plan, name)
    return record


def _from_record(record: dict[str, Any]) -> tuple[PlanFile | None, list[str]]:
    """The plan of a record without faults of form, if its numbers make one, and all faults."""
    faults = list(_sum_faults(record))
    try:
        schedule = from_json(record["schedule"])
    except (ValueError, OverflowError) as error:
        return None, [*faults, f"schedule: {error}"]
    if shape := list(_shape_faults(record)):
        return None, faults + shape
    times = record["times"]
    edges = tuple(Edge(int(a), int(b), float(seconds)) for a, b, seconds in times["edges"])
    placement = make_placement(record["placement"], record["pipeline"], record["num_chunks"])
    faults += _edge_faults(placement, edges)
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
        )
    except (ValueError, OverflowError) as error:
        faults += [f"times: {error}", *(f"schedule: {fault}" for fault in validate(schedule))]
        return None, faults
    given = {field.name: record[field.name] for field in fields(PlanFile) if field.name in record}
    given["stages"] = tuple(map(tuple, record["stages"]))
    given["schedule"] = schedule
    plan = PlanFile(**given, problem=problem, edges=edges)
    return plan, faults + [f"schedule: {fault}" for fault in faults_for(problem, schedule)]


_ROUNDING = 1e-6
_COLUMNS = ("forward", "backward", "weight_grad", "saved_bytes")


def _sum_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Values that are each well-formed and do not fit together."""
    batch, data, size = (record[name] for name in ("global_batch_size", "data", "micro_batch_size"))
    if batch % (data * size):
        yield (
            f"global_batch_size {batch} is not a multiple of data {data} x micro_batch_size {size}"
        )
    predicted = record["predicted"]
    rate, step_s = predicted["samples_per_s"], predicted["step_s"]
    if not math.isclose(rate * step_s, batch, rel_tol=_ROUNDING):
        yield (
            f"predicted: {rate:g} samples/s in steps of {step_s:g} s are {rate * step_s:g} a step, "
            f"but global_batch_size is {batch}"
        )
    part_s = predicted["pipeline_s"]
    if part_s > step_s * (1 + _ROUNDING):
        yield f"predicted: pipeline_s {part_s:g} is more than step_s {step_s:g}"
    if predicted["bubble"] > 1 + _ROUNDING:
        yield f"predicted.bubble is {predicted['bubble']:g}; it is a share, at most 1"
    known = record["provenance"]["schedule"]
    if known["lower_bound"] > known["makespan"] * (1 + _ROUNDING):
        yield (
            f"provenance.schedule: lower_bound {known['lower_bound']:g} is above makespan "
            f"{known['makespan']:g}"
        )
    if record["sequence_parallel"] and record["tensor"] == 1:
        yield "sequence_parallel: it needs tensor parallelism, and tensor is 1"
    names = Counter(name for stage in record["stages"] for name in stage)
    for name, count in names.items():
        if count > 1:
            yield f"stages: layer {name!r} is there {count} times"


def _edge_faults(placement: Placement, edges: tuple[Edge, ...]) -> Iterator[str]:
    num, home = placement.num_stages, placement.device_of_stage
    for edge in edges:
        if not 0 <= edge.source < edge.destination < num:
            yield f"times.edges: from stage {edge.source} to {edge.destination}; there are {num}"
        elif home[edge.source] == home[edge.destination]:
            yield (f"times.edges: stages {edge.source} and {edge.destination} are on one device")


def _shape_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Columns that are not as long as there are stages, or devices."""
    kind, chunks = PLACEMENTS[record["placement"]], record["num_chunks"]
    devices, num = record["pipeline"], len(record["stages"])
    if devices == 1 and chunks != 1:
        yield f"num_chunks: {chunks}; a pipeline of one device has one stage"
    elif devices > 1 and not kind.allows(chunks):
        yield f"num_chunks: {chunks}; a device of {kind} hosts {kind.chunks} stage(s)"
    if num != devices * chunks:
        yield f"stages: {num}, but {devices} device(s) with {chunks} each have {devices * chunks}"
    for name in _COLUMNS:
        column = record["times"][name]
        if column is not None and len(column) != num:
            yield f"times.{name}: {len(column)} values for {num} stages"
    for name, values in (
        ("times.cap_bytes", record["times"]["cap_bytes"]),
        ("predicted.memory_bytes", record["predicted"]["memory_bytes"]),
    ):
        if len(values) != devices:
            yield f"{name}: {len(values)} values for {devices} device(s)"
