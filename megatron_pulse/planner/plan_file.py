"""The plan as a file: what a tuner decided, what it expects, and where that comes from.

One JSON object: ``pulse tune`` writes it, ``pulse check`` and ``pulse show`` read it, a run with
``--pulse-plan`` obeys it. It holds everything that bears on what runs (backbone, degrees, batch,
cuts, every device's order), so that a run needs neither the profile nor a solver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.diffusion.files import replacing
from megatron_pulse.planner.placement import Placement, PlacementKind, make_placement
from megatron_pulse.planner.plan_schema import FORMAT, plan_faults
from megatron_pulse.planner.replay import Edge, Replay, replay
from megatron_pulse.planner.schedule.files import from_json, to_json
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.validate import faults_for
from megatron_pulse.planner.stages import Partition


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
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanFileError(f"{path} cannot be read as a plan: {error}") from error
    faults = plan_faults(record)
    plan = None
    if not faults:
        try:
            plan = _from_record(record)
        except ValueError as error:
            faults.append(f"schedule: {error}")
    if plan is not None:
        faults = list(_faults(plan))
    if plan is None or faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise PlanFileError(f"{path} is not a plan that can run ({len(faults)} fault(s)):{lines}")
    return plan


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


_COLUMNS = ("forward", "backward", "weight_grad", "saved_bytes")


def _faults(plan: PlanFile) -> Iterator[str]:
    """Values that are each well-formed and do not fit together."""
    if plan.global_batch_size % (plan.data * plan.micro_batch_size):
        yield (
            f"global_batch_size {plan.global_batch_size} is not a multiple of data "
            f"{plan.data} x micro_batch_size {plan.micro_batch_size}"
        )
        return
    if plan.placement == PlacementKind.BIDIRECTIONAL:
        yield "placement: bidirectional cannot be run: its weights are on two devices"
        return
    placement = plan._placement
    num = placement.num_stages
    if len(plan.stages) != num:
        yield f"stages: {len(plan.stages)}, but {plan.placement} on {plan.pipeline} has {num}"
    for name in _COLUMNS:
        column = getattr(plan.times, name)
        if column is not None and len(column) != num:
            yield f"times.{name}: {len(column)} values for {num} stages"
    if len(plan.times.cap_bytes) != plan.pipeline:
        yield f"times.cap_bytes: {len(plan.times.cap_bytes)} values for {plan.pipeline} devices"
    home = placement.device_of_stage
    for source, destination, _ in plan.times.edges:
        if not 0 <= source < destination < num:
            yield f"times.edges: from stage {source} to {destination}; there are {num}"
        elif home[source] == home[destination]:
            yield f"times.edges: stages {source} and {destination} are on one device"
    if len(plan.stages) == num and len(plan.times.forward) == len(plan.times.backward) == num:
        try:
            problem = plan.problem()
        except ValueError as error:
            yield f"times: {error}"
            return
        yield from (f"schedule: {fault}" for fault in faults_for(problem, plan.schedule))
