"""Comparison of a plan's predicted timeline with the trace of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from megatron_pulse.backbone.layer_selection import tell_layers
from megatron_pulse.errors import format_faults
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import BACKWARDS, Operation, OpType
from megatron_pulse.planner.schedule.problem import LEAST_S, ScheduleProblem
from megatron_pulse.planner.trace.trace import BETWEEN_DEVICES, StepTrace, Trace, TraceError
from megatron_pulse.profile.warnings import plan_cautions


@dataclass(frozen=True)
class OperationTimes:
    """One operation type of one stage (or bubble task): medians in seconds over ``count`` runs."""

    kind: OpType
    stage: int
    count: int
    predicted_s: float
    measured_s: float

    @property
    def total_difference_s(self) -> float:
        """Seconds per step by which these operations took longer than predicted."""
        return self.count * (self.measured_s - self.predicted_s)


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds per step that a device computes, and that it waits for messages (measured only)."""

    device: int
    predicted_busy_s: float
    measured_busy_s: float
    measured_wait_s: float


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured times in seconds; measured values are medians over the traced steps.

    A bubble is the share of all devices' time in the makespan in which they do not compute.
    ``clock_accuracy_s`` is the largest error between the clocks of two devices.
    """

    rows: tuple[OperationTimes, ...]
    devices: tuple[DeviceTimes, ...]
    predicted_makespan_s: float
    measured_makespan_s: float
    predicted_bubble: float
    measured_bubble: float
    clock_accuracy_s: float

    def differing_most(self, count: int = 5) -> tuple[OperationTimes, ...]:
        """Rows with the largest total difference from the prediction, largest first."""
        ordered = sorted(self.rows, key=lambda row: -abs(row.total_difference_s))
        return tuple(ordered[:count])


def compare(timeline: Timeline, trace: Trace) -> Comparison:
    """Compare ``timeline``, in seconds, with ``trace``.

    Raises TraceError with every reason why the two are not of one schedule.
    """
    if faults := [*trace.faults(), *_mismatches(timeline, trace)]:
        raise TraceError(format_faults("the trace cannot be compared with this plan", faults))
    predicted = _by_kind_and_stage(
        {op: timeline.end[op] - timeline.start[op] for op in timeline.start}
    )
    measured = _measured(trace)
    rows = tuple(
        OperationTimes(kind, stage, len(times), median(times), median(measured[kind, stage]))
        for (kind, stage), times in sorted(predicted.items())
        if not kind.copies
    )
    num_devices = len(timeline.busy)
    devices = tuple(
        DeviceTimes(
            device,
            timeline.busy[device],
            median(_busy(step, device) for step in trace.steps),
            median(_waited(step, device) for step in trace.steps),
        )
        for device in range(num_devices)
    )

    def bubble(step: StepTrace) -> float:
        busy = sum(_busy(step, device) for device in range(num_devices))
        return 1 - busy / (num_devices * step.makespan_s)

    return Comparison(
        rows,
        devices,
        timeline.makespan,
        median(step.makespan_s for step in trace.steps),
        timeline.idle_share,
        median(bubble(step) for step in trace.steps),
        trace.clock_accuracy_s,
    )


def mismatches(plan: PlanFile, trace: Trace) -> list[str]:
    """Signs that ``trace`` belongs to a run of another plan than ``plan``."""
    said = {
        "pipeline": plan.pipeline,
        "data": plan.data,
        "tensor": plan.tensor,
        "context": plan.context,
        "micro_batch_size": plan.micro_batch_size,
        "dtype": plan.dtype,
        "recompute": tell_layers(plan.activations.recompute, len(plan.profile.layers)),
        "selective": tell_layers(plan.activations.selective, len(plan.profile.layers)),
    }
    ran = {**trace.world, **trace.run}
    faults = [
        f"the traced run has {name} {ran[name]}, the plan has {value}"
        for name, value in said.items()
        if str(ran.get(name, value)) != str(value)
    ]
    if trace.backbone != plan.backbone:
        faults.append(
            f"the traced backbone is {trace.backbone.get('name')} with options "
            f"{trace.backbone.get('options')}, the plan's {plan.backbone['name']} with "
            f"{plan.backbone['options']}"
        )
    elif trace.stages and trace.stages != plan.stages:
        sizes = [", ".join(str(len(names)) for names in cut) for cut in (trace.stages, plan.stages)]
        faults.append(
            f"the traced run had another plan: its stages have {sizes[0]} layers, the plan's "
            f"{sizes[1]}"
        )
    return faults


def cost_cautions(plan: PlanFile, trace: Trace) -> list[str]:
    """Reasons, in words, why the plan's times may be wrong for the machine of the trace."""
    threads = trace.run.get("threads", "")
    found = plan_cautions(plan.provenance, int(threads) if threads.isdecimal() else 0)
    source, device = str(plan.provenance["profile"]), trace.machine.get("device", "")
    is_planned = all(name in source for name in device.split(BETWEEN_DEVICES))
    if source.startswith("measured, ") and trace.run and not is_planned:
        found.append(f"the run was on {device}, but costs are {source.partition(':')[0]}")
    elif not source.startswith("measured, "):
        found.append(f"costs were not measured ({source.partition(':')[0]}): ratios may be right")
    return found


def measured_problem(problem: ScheduleProblem, trace: Trace) -> ScheduleProblem:
    """Replace the durations of ``problem`` by the median seconds that each stage took.

    Raises TraceError if the trace has faults, or no backwards.
    """
    if faults := trace.faults():
        raise TraceError(format_faults("the trace", faults))
    measured = _measured(trace)
    stages = range(len(trace.device_of_stage))

    def of(kind: OpType) -> tuple[float, ...]:
        return tuple(max(LEAST_S, median(measured[kind, stage])) for stage in stages)

    kinds = {kind for kind, _ in measured}
    split = OpType.WEIGHT_GRAD in kinds
    if not split and OpType.BACKWARD not in kinds:
        raise TraceError("the traced steps have no backward pass: trace training steps")
    backward, recompute = _whole_backwards(trace), problem.recompute_s
    if recompute is not None:
        apart = (
            measured.get((OpType.RECOMPUTE, stage), [seconds])
            for stage, seconds in enumerate(recompute)
        )
        pairs = zip(map(median, apart), backward, strict=True)
        recompute = tuple(max(0.0, min(again, whole - LEAST_S)) for again, whole in pairs)
    return replace(
        problem,
        forward=of(OpType.FORWARD),
        backward=backward,
        weight_grad=of(OpType.WEIGHT_GRAD) if split else None,
        recompute_s=recompute,
    )


def _whole_backwards(trace: Trace) -> tuple[float, ...]:
    """Median seconds of each stage's backward, or input gradient, including its recomputation."""
    found: list[list[float]] = [[] for _ in trace.device_of_stage]
    for step in trace.steps:
        times = {timed.operation: timed.end_s - timed.start_s for timed in step.operations}
        for op, seconds in times.items():
            if op.kind in BACKWARDS:
                again = times.get(op._replace(kind=OpType.RECOMPUTE), 0.0)
                found[op.stage].append(seconds + again)
    return tuple(max(LEAST_S, median(seconds)) for seconds in found)


def _mismatches(timeline: Timeline, trace: Trace) -> list[str]:
    schedule, faults = timeline.schedule, []
    if schedule.placement.device_of_stage != trace.device_of_stage:
        faults.append(
            f"stages are on devices {schedule.placement.device_of_stage} in the plan, on "
            f"{trace.device_of_stage} in the trace"
        )
    if schedule.num_microbatches != trace.num_microbatches:
        faults.append(
            f"a step has {schedule.num_microbatches} microbatches in the plan, "
            f"{trace.num_microbatches} in the trace"
        )
    if not faults and trace.steps:
        planned = {d: list(order) for d, order in enumerate(schedule.order)}
        ran: dict[int, list[Operation]] = {d: [] for d in planned}
        for timed in sorted(trace.steps[0].operations, key=lambda t: (t.start_s, t.end_s)):
            ran.setdefault(timed.device, []).append(timed.operation)
        faults += [
            f"device {d} ran its operations in another order than the plan's"
            for d in planned
            if planned[d] != ran[d]
        ]
    return faults


def _by_kind_and_stage(times: dict[Operation, float]) -> dict[tuple[OpType, int], list[float]]:
    found: dict[tuple[OpType, int], list[float]] = {}
    for op, seconds in times.items():
        found.setdefault((op.kind, op.stage), []).append(seconds)
    return found


def _measured(trace: Trace) -> dict[tuple[OpType, int], list[float]]:
    found: dict[tuple[OpType, int], list[float]] = {}
    for step in trace.steps:
        times = {timed.operation: timed.end_s - timed.start_s for timed in step.operations}
        for key, seconds in _by_kind_and_stage(times).items():
            found.setdefault(key, []).extend(seconds)
    return found


def _busy(step: StepTrace, device: int) -> float:
    return sum(t.end_s - t.start_s for t in step.operations if t.device == device)


def _waited(step: StepTrace, device: int) -> float:
    return sum(w.end_s - w.start_s for w in step.waits if w.message.destination == device)
