"""Trace of steps of a real run: the measured counterpart of a simulated timeline.

Times are seconds since the first operation of their step began. All devices share one clock, which
is right to within ``clock_accuracy_s``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypedDict

from annotated_types import Ge, Le

from megatron_pulse.errors import UserError, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.json_validation import Natural, OperationText, Some, Text, faults_of
from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType

SCHEMA = 1
"""Version of the file's form."""

BETWEEN_DEVICES = " and "
"""Text between the names of unlike devices in ``Trace.machine``."""

_Seconds = Annotated[float, Ge(-1e9), Le(1e9), "seconds"]


class TraceError(UserError):
    """A file that is not a complete trace; the message lists every fault."""


@dataclass(frozen=True)
class TimedOperation:
    """An operation on ``device`` with its start and end."""

    device: int
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimedWait:
    """An interval in which a device only waits for ``message``."""

    message: Message
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages of ``device`` in a step. Replicated embedders count in sent bytes."""

    device: Natural
    sent_bytes: Natural
    received_bytes: Natural
    num_messages: Natural


@dataclass(frozen=True)
class DeviceStep:
    """One device's part of a step, on the shared clock."""

    operations: tuple[TimedOperation, ...]
    waits: tuple[TimedWait, ...]
    traffic: Traffic


@dataclass(frozen=True)
class StepTrace:
    """Step ``step`` of a run on all pipeline devices; steps are counted from 1."""

    step: int
    operations: tuple[TimedOperation, ...]
    waits: tuple[TimedWait, ...]
    traffic: tuple[Traffic, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first operation to the end of the last."""
        return max(op.end_s for op in self.operations) - min(op.start_s for op in self.operations)


def merge_step(step: int, devices: tuple[DeviceStep, ...]) -> StepTrace:
    """Merge the devices' parts of a step; times count from the start of the first operation."""
    zero = min((op.start_s for d in devices for op in d.operations), default=0.0)
    return StepTrace(
        step,
        tuple(
            TimedOperation(op.device, op.operation, op.start_s - zero, op.end_s - zero)
            for d in devices
            for op in d.operations
        ),
        tuple(
            TimedWait(w.message, w.start_s - zero, w.end_s - zero) for d in devices for w in d.waits
        ),
        tuple(d.traffic for d in devices),
    )


@dataclass(frozen=True)
class Trace:
    """Some steps of one pipeline of a run.

    ``clock`` names the method that aligned the devices' clocks. ``world`` has the number of ranks
    (``size``) and the degrees (``data``, ``tensor``, ``pipeline``). ``stages`` are the names of
    each stage's layers. ``run`` holds settings that times depend on (``micro_batch_size``,
    ``dtype``, ``threads``, ``recompute``).
    """

    machine: Mapping[str, str]
    world: Mapping[str, int]
    plan_digest: str
    backbone: Mapping[str, Any]
    schedule: str
    placement: str
    device_of_stage: tuple[int, ...]
    num_microbatches: int
    clock: str
    clock_accuracy_s: float
    steps: tuple[StepTrace, ...]
    stages: tuple[tuple[str, ...], ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Reasons why the trace cannot be of a run; empty if it is valid."""
        if not self.steps:
            return ["no step was traced"]
        first = sorted(str(op.operation) for op in self.steps[0].operations)
        return [
            f"step {step.step}: {fault}" for step in self.steps for fault in self._step_faults(step)
        ] + [
            f"step {step.step} has other operations than step {self.steps[0].step}"
            for step in self.steps[1:]
            if sorted(str(op.operation) for op in step.operations) != first
        ]

    def _step_faults(self, step: StepTrace) -> list[str]:
        faults = []
        counts = Counter(op.operation for op in step.operations)
        faults += [f"{op} ran {count} times" for op, count in counts.items() if count > 1]
        kinds = {op.kind for op in counts if not op.kind.is_optional}
        stages = len(self.device_of_stage)
        there = sum(
            op.stage < stages and op.microbatch < self.num_microbatches
            for op in counts
            if not op.kind.is_optional
        )
        if num_missing := stages * self.num_microbatches * max(len(kinds), 1) - there:
            missing = (
                str(op)
                for stage in range(stages)
                for microbatch in range(self.num_microbatches)
                for kind in sorted(kinds)
                if (op := Operation(kind, stage, microbatch)) not in counts
            )
            shown = ", ".join(islice(missing, 5)) + (" ..." if num_missing > 5 else "")
            faults.append(f"{num_missing} operations are missing: {shown}")
        faults += [
            f"{op} is of microbatch {op.microbatch}; there are {self.num_microbatches}"
            for op in counts
            if op.kind is not OpType.BUBBLE_TASK and op.microbatch >= self.num_microbatches
        ]
        busy_until: dict[int, float] = {}
        for timed in sorted(step.operations, key=lambda t: (t.start_s, t.end_s)):
            op, device, start_s, end_s = timed.operation, timed.device, timed.start_s, timed.end_s
            if op.kind is not OpType.BUBBLE_TASK and (
                op.stage >= len(self.device_of_stage) or self.device_of_stage[op.stage] != device
            ):
                faults.append(f"{op} ran on device {device}, which does not hold it")
            if end_s < start_s:
                faults.append(f"{op} ends at {end_s:g} s, starts at {start_s:g} s")
            if start_s < busy_until.get(device, start_s) - 1e-9:
                faults.append(f"{op} starts while device {device} runs another operation")
            busy_until[device] = max(end_s, busy_until.get(device, end_s))
        return faults


class _OperationRecord(TypedDict):
    device: Natural
    op: OperationText
    start_s: _Seconds
    end_s: _Seconds


_WaitRecord = TypedDict(
    "_WaitRecord",
    {
        "device": Natural,
        "for": OperationText,
        "from": OperationText,
        "source": Natural,
        "payload": Payload,
        "name": str,
        "start_s": _Seconds,
        "end_s": _Seconds,
    },
)


class _StepRecord(TypedDict):
    step: Natural
    operations: Some[_OperationRecord]
    waits: tuple[_WaitRecord, ...]
    traffic: tuple[Traffic, ...]


class _File(TypedDict):
    """A trace as a run with --pulse-trace writes it."""

    schema: Annotated[int, Ge(SCHEMA), Le(SCHEMA)]
    machine: Mapping[str, str]
    world: Mapping[str, Natural]
    plan_digest: Text
    backbone: Mapping[str, Any]
    schedule: Text
    placement: Text
    device_of_stage: Annotated[Some[Natural], "the device of each stage"]
    num_microbatches: Annotated[int, Ge(0), Le(1_000_000)]
    clock: Text
    clock_accuracy_s: Annotated[float, Ge(0), Le(1e9), "seconds"]
    steps: tuple[_StepRecord, ...]
    stages: tuple[Annotated[Some[Text], "names of a stage's layers"], ...]
    run: Mapping[str, str]


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write ``trace`` as JSON atomically: only a complete file replaces an existing one."""
    record = {"schema": SCHEMA, **asdict(trace), "steps": [_to_json(s) for s in trace.steps]}
    write_with_checksum(path, json.dumps(record) + "\n")


def load_trace(path: str | Path) -> Trace:
    """Read a trace file; raises TraceError that lists every fault."""
    try:
        record = read_json(path, FileKind.TRACE)
    except FileError as error:
        raise TraceError(str(error)) from error
    faults = faults_of(_File, record)
    if not faults:
        trace = _from_json(record)
        faults = trace.faults()
        if not faults:
            return trace
    raise TraceError(format_faults(f"{path} is not a whole trace", faults))


def _to_json(step: StepTrace) -> dict[str, Any]:
    return {
        "step": step.step,
        "operations": [
            {"device": t.device, "op": str(t.operation), "start_s": t.start_s, "end_s": t.end_s}
            for t in step.operations
        ],
        "waits": [
            {
                "device": w.message.destination,
                "for": str(w.message.consumer),
                "from": str(w.message.producer),
                "source": w.message.source,
                "payload": w.message.payload.value,
                "name": w.message.name,
                "start_s": w.start_s,
                "end_s": w.end_s,
            }
            for w in step.waits
        ],
        "traffic": [asdict(t) for t in step.traffic],
    }


def _from_json(record: dict[str, Any]) -> Trace:
    fields = {name: value for name, value in record.items() if name != "schema"}
    fields["device_of_stage"] = tuple(record["device_of_stage"])
    fields["stages"] = tuple(map(tuple, record["stages"]))
    fields["steps"] = tuple(
        StepTrace(
            step["step"],
            tuple(
                TimedOperation(t["device"], Operation.parse(t["op"]), t["start_s"], t["end_s"])
                for t in step["operations"]
            ),
            tuple(
                TimedWait(
                    Message(
                        Operation.parse(w["from"]),
                        Operation.parse(w["for"]),
                        Payload(w["payload"]),
                        w["name"],
                        w["source"],
                        w["device"],
                    ),
                    w["start_s"],
                    w["end_s"],
                )
                for w in step["waits"]
            ),
            tuple(Traffic(**t) for t in step["traffic"]),
        )
        for step in record["steps"]
    )
    return Trace(**fields)
