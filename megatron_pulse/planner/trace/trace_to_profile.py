"""Conversion of a trace into the planner's forms: a timeline and a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_pulse.errors import format_faults
from megatron_pulse.format import in_ms
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.trace.trace import StepTrace, Trace
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.profile import Profile, ProfileError


def typical_step(trace: Trace) -> StepTrace:
    """The traced step of median makespan."""
    ordered = sorted(trace.steps, key=lambda step: step.makespan_s)
    return ordered[(len(ordered) - 1) // 2]


def timeline_of(schedule: Schedule, step: StepTrace) -> Timeline:
    """Convert a traced step of ``schedule`` into a timeline, in seconds."""
    start = {timed.operation: timed.start_s for timed in step.operations}
    end = {timed.operation: timed.end_s for timed in step.operations}
    busy = tuple(sum(end[op] - start[op] for op in order) for order in schedule.order)
    bubble = tuple(step.makespan_s - b for b in busy)
    return Timeline(schedule, start, end, step.makespan_s, busy, bubble)


def rescale(profile: Profile, plan: PlanFile, measured: ScheduleProblem) -> Profile:
    """Scale the layer times of ``profile`` to the stage times of a run of ``plan``.

    For each stage the forwards, input gradients and weight gradients, whole and split, are scaled
    separately, at all profiled sizes. The scale is the measured time over the profile's at the
    plan's microbatch size. Input and weight gradient share one scale if the backward is not split,
    or if the layer is recomputed. A recomputed forward counts as its share of the measured forward.
    Raises ProfileError for a profile of another chain, under tensor parallelism, for unlike
    devices, and if recomputation leaves no time for a backward.
    """
    faults = []
    names = [name for stage in plan.stages for name in stage]
    if names != [layer.name for layer in profile.layers]:
        faults.append(f"the profile has other layers than {plan.backbone['name']} in the plan")
    for name in ("tensor", "context"):
        if (size := getattr(plan, name)) > 1:
            faults.append(
                f"the run divided layers over {size} ranks, but a profile has whole layers: trace "
                f"a run with {name} 1"
            )
    if plan.mixed:
        faults.append(
            "the run was on devices of several kinds, each of which ran only some stages. Run "
            "'pulse profile' on each kind instead"
        )
    if faults:
        raise ProfileError(format_faults("the profile cannot be rescaled", faults))
    profiled = profile.times_at(plan.micro_batch_size)
    recomputed = plan.activations.recompute
    scales: list[tuple[float, float, float]] = []
    for stage in range(len(plan.stages)):
        layers = [profiled[i] for i in plan.partition.layers_of_stage(stage)]
        parts_s = [layer.parts_s(measured.weight_grad is not None) for layer in layers]
        cheap_s = sum(
            profiled[i].selective_s
            for i in plan.partition.layers_of_stage(stage)
            if i in plan.activations.selective
        )
        twice = [i in recomputed for i in plan.partition.layers_of_stage(stage)]
        ahead, inputs, weights = map(sum, zip(*parts_s, (0.0, cheap_s, 0.0), strict=True))
        forward = _ratio(measured.forward[stage], ahead)
        doubled = [part for part, again in zip(parts_s, twice, strict=True) if again]
        again_s = forward * sum(part[0] for part in doubled)
        backward = measured.backward[stage] - again_s
        if backward <= 0:
            raise ProfileError(
                f"stage {stage}: its backward took {in_ms(measured.backward[stage], 3)}, no "
                f"longer than the forward that it recomputes ({in_ms(again_s, 3)})"
            )
        if measured.weight_grad is None:
            first = later = _ratio(backward, inputs + weights)
        else:
            waiting = sum(p[2] for p, again in zip(parts_s, twice, strict=True) if not again)
            first = _ratio(backward, inputs + sum(part[2] for part in doubled))
            later = _ratio(measured.weight_grad[stage], waiting)
        scales += [(forward, first, first if again else later) for again in twice]
    method = f"{profile.method}; each stage's layers scaled to what a run measured of it"

    def scaled(times: Mapping[int, Sequence[LayerTimes]]) -> dict[int, tuple[LayerTimes, ...]]:
        return {
            size: tuple(_scaled(layer, *scale) for layer, scale in zip(column, scales, strict=True))
            for size, column in times.items()
        }

    shapes = tuple(replace(shape, times=scaled(shape.times)) for shape in profile.shapes)
    return replace(profile, times=scaled(profile.times), method=method, shapes=shapes)


def _ratio(measured: float, profiled: float) -> float:
    return measured / profiled if profiled > 0 else 1.0


def _scaled(layer: LayerTimes, forward: float, inputs: float, weights: float) -> LayerTimes:
    return replace(
        layer,
        forward_s=layer.forward_s * forward,
        input_grad_s=layer.input_grad_s * inputs,
        weight_grad_s=layer.weight_grad_s * weights,
        forward_spread_s=layer.forward_spread_s * forward,
        input_grad_spread_s=layer.input_grad_spread_s * inputs,
        weight_grad_spread_s=layer.weight_grad_spread_s * weights,
        split_forward_s=layer.split_forward_s * forward,
        split_input_grad_s=layer.split_input_grad_s * inputs,
        split_weight_grad_s=layer.split_weight_grad_s * weights,
        selective_s=layer.selective_s * inputs,
    )
