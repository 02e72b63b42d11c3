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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.faults import told
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
from megatron_pulse.planner.step.replay import Edge, Replay, replay


class PlanFileError(ValueError):
    """A plan file that cannot be read or would not run; the message lists every fault."""


@dataclass(frozen=True)
class Times:
    """The problem that the schedule answers: seconds per stage, bytes that a forward keeps.

    ``edges`` are messages between devices: (stage, stage, seconds). ``cap_bytes`` is what each
    device has for activations.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_grad: tuple[float, ...] | None
    edges: tuple[tuple[int, int, float], ...]
    saved_bytes: tuple[float, ...]
    cap_bytes: tuple[float, ...]


@dataclass(frozen=True)
class PlanFile:
    """Everything that a run is told, and what was predicted of it.

    ``rank_order`` is Megatron's: tp-dp-pp or tp-pp-dp. ``stages`` are the layers' names.
    ``predicted`` and ``provenance`` are for people; nothing that runs reads them.
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
    placement: str
    num_chunks: int
    stages: tuple[tuple[str, ...], ...]
    schedule: Schedule
    times: Times
    predicted: Mapping[str, Any]
    provenance: Mapping[str, Any]

    @property
    def heading(self) -> str:
        """What runs where, in a line."""
        return (
            f"{self.backbone['name']} on {self.world_size} rank(s): pipeline {self.pipeline} x "
            f"data {self.data} x tensor {self.tensor}, {self.placement} of {len(self.stages)} "
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
    def partition(self) -> Partition:
        """Where the chain is cut."""
        cuts = [0]
        for stage in self.stages:
            cuts.append(cuts[-1] + len(stage))
        return Partition(self._placement, tuple(cuts))

    @property
    def _placement(self) -> Placement:
        return make_placement(self.placement, self.pipeline, self.num_chunks)

    def problem(self) -> ScheduleProblem:
        """What the schedule answers."""
        times = self.times
        placement = self._placement
        lags = {(source, destination): seconds for source, destination, seconds in times.edges}
        return ScheduleProblem(
            placement,
            self.num_microbatches,
            times.forward,
            times.backward,
            times.weight_grad,
            tuple(lags.get((s, s + 1), 0.0) for s in range(placement.num_stages - 1)),
            times.saved_bytes,
            times.cap_bytes,
        )

    def replay(self) -> Replay:
        """The step of one pipeline as predicted."""
        edges = [Edge(*edge) for edge in self.times.edges]
        return replay(self.problem(), self.schedule, edges)


def save_plan(plan: PlanFile, path: str | Path) -> None:
    """Write ``plan``; what was there before is only replaced by a complete file."""
    record = {"format": FORMAT, **asdict(plan), "schedule": to_json(plan.schedule)}
    with replacing(path) as beside:
        beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load_plan(path: str | Path) -> PlanFile:
    """Read a plan; raises PlanFileError that lists every fault of form and of legality."""
    plan, faults = read_plan(path)
    if plan is None or faults:
        raise PlanFileError(told(f"{path} is not a plan that can run", faults))
    return plan


def read_plan(path: str | Path) -> tuple[PlanFile | None, list[str]]:
    """A plan and every fault of form and of legality; None where its form has faults.

    Raises PlanFileError for a file that cannot be read at all (see ``files.read_json``).
    """
    try:
        record = read_json(path, FileKind.PLAN)
    except FileError as error:
        raise PlanFileError(str(error)) from error
    if faults := plan_faults(record):
        return None, faults
    try:
        plan = _from_record(record)
    except (ValueError, OverflowError) as error:
        return None, [f"schedule: {error}"]
    return plan, list(_faults(plan))


def _from_record(record: dict[str, Any]) -> PlanFile:
    times = record["times"]
    fields = {name: value for name, value in record.items() if name != "format"}
    fields["stages"] = tuple(map(tuple, record["stages"]))
    fields["schedule"] = from_json(record["schedule"])
    split = times["weight_grad"]
    fields["times"] = Times(
        forward=tuple(times["forward"]),
        backward=tuple(times["backward"]),
        weight_grad=None if split is None else tuple(split),
        edges=tuple((int(a), int(b), float(seconds)) for a, b, seconds in times["edges"]),
        saved_bytes=tuple(times["saved_bytes"]),
        cap_bytes=tuple(times["cap_bytes"]),
    )
    return PlanFile(**fields)


_ROUNDING = 1e-6
_COLUMNS = ("forward", "backward", "weight_grad", "saved_bytes")


def _faults(plan: PlanFile) -> Iterator[str]:
    """Values that are each well-formed and do not fit together."""
    per_step = plan.data * plan.micro_batch_size
    whole = plan.global_batch_size % per_step == 0
    if not whole:
        yield (
            f"global_batch_size {plan.global_batch_size} is not a multiple of data {plan.data} x "
            f"micro_batch_size {plan.micro_batch_size}"
        )
    rate, step_s = plan.predicted["samples_per_s"], plan.predicted["step_s"]
    if not math.isclose(rate * step_s, plan.global_batch_size, rel_tol=_ROUNDING):
        yield (
            f"predicted: {rate:g} samples/s in steps of {step_s:g} s are {rate * step_s:g} a step, "
            f"but global_batch_size is {plan.global_batch_size}"
        )
    part_s = plan.predicted["pipeline_s"]
    if part_s > step_s * (1 + _ROUNDING):
        yield f"predicted: pipeline_s {part_s:g} is more than step_s {step_s:g}"
    if plan.predicted["bubble"] > 1 + _ROUNDING:
        yield f"predicted.bubble is {plan.predicted['bubble']:g}; it is a share, at most 1"
    known = plan.provenance["schedule"]
    if known["lower_bound"] > known["makespan"] * (1 + _ROUNDING):
        yield (
            f"provenance.schedule: lower_bound {known['lower_bound']:g} is above makespan "
            f"{known['makespan']:g}"
        )
    if plan.sequence_parallel and plan.tensor == 1:
        yield "sequence_parallel: it needs tensor parallelism, and tensor is 1"
    names = Counter(name for stage in plan.stages for name in stage)
    for name, count in names.items():
        if count > 1:
            yield f"stages: layer {name!r} is there {count} times"
    shape = list(_shape_faults(plan))
    yield from shape
    if shape:
        return
    placement = plan._placement
    num, home = placement.num_stages, placement.device_of_stage
    for source, destination, _ in plan.times.edges:
        if not 0 <= source < destination < num:
            yield f"times.edges: from stage {source} to {destination}; there are {num}"
        elif home[source] == home[destination]:
            yield f"times.edges: stages {source} and {destination} are on one device"
    try:
        problem = plan.problem()
    except (ValueError, OverflowError) as error:
        if whole:
            yield f"times: {error}"
        faults = validate(plan.schedule)
    else:
        faults = faults_for(problem, plan.schedule) if whole else validate(plan.schedule)
    yield from (f"schedule: {fault}" for fault in faults)


def _shape_faults(plan: PlanFile) -> Iterator[str]:
    """Columns that are not as long as there are stages, or devices."""
    kind, chunks = PLACEMENTS[plan.placement], plan.num_chunks
    if plan.pipeline == 1 and chunks != 1:
        yield f"num_chunks: {chunks}; a pipeline of one device has one stage"
    elif plan.pipeline > 1 and not kind.allows(chunks):
        yield f"num_chunks: {chunks}; a device of {kind} hosts {kind.chunks} stage(s)"
    num, devices = len(plan.stages), plan.pipeline
    if num != devices * chunks:
        yield f"stages: {num}, but {devices} device(s) with {chunks} each have {devices * chunks}"
    for name in _COLUMNS:
        column = getattr(plan.times, name)
        if column is not None and len(column) != num:
            yield f"times.{name}: {len(column)} values for {num} stages"
    for name, values in (
        ("times.cap_bytes", plan.times.cap_bytes),
        ("predicted.memory_bytes", plan.predicted["memory_bytes"]),
    ):
        if len(values) != devices:
            yield f"{name}: {len(values)} values for {devices} device(s)"
