"""Facts of a plan as names and values for printing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_pulse.cli.output import table
from megatron_pulse.format import in_mb, in_ms, with_plural
from megatron_pulse.planner.bubble_fill.filled_schedule import FilledSchedule
from megatron_pulse.planner.partition.memory import host_bytes_per_parameter
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.schedule.operations import BACKWARDS, OpType, Schedule
from megatron_pulse.planner.tune.context_rank import context_costs, sent_bytes
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from megatron_pulse.profile.weight_offload import offloaded_bytes


def predicted(plan: PlanFile) -> list[tuple[str, str]]:
    """Names and values of the tuner's predictions."""
    p = plan.predicted
    own: list[tuple[str, str]] = []
    if plan.dpo or plan.self_conditioning:
        which = f"in {100 * plan.self_conditioning:g} % of the steps, for self-conditioning"
        if plan.dpo:
            copied = ", a frozen copy of the trained weights" * plan.state.reference
            which = f"in every step, for the reference of dpo{copied}"
        first_s = p.get("first_pass_s", p.get("self_conditioning_s", 0.0))  # older plans' name
        mean = f"{in_ms(first_s)} in the mean"
        own = [("before", f"all forwards once more {which}: {mean}")]
    if plan.fsdp is not None:
        return [
            ("step", f"{in_ms(p['step_s'])}, {p['samples_per_s']:.4g} samples/s"),
            ("of that", f"optimizer {in_ms(p['optimizer_s'], 3)}"),
            ("sharded", str(plan.fsdp)),
            (
                "exposed",
                f"{100 * p['bubble']:.1f} % of the step waits for ideal collectives",
            ),
            ("memory", f"at most {max(p['memory_bytes']) / 1e9:.3g} GB on a device"),
            *([("weights", plan.profile.quantized)] if plan.profile.quantized else []),
            *_token_slices(plan),
            ("sent", f"{in_mb(p['data_bytes_per_sample'])} a sample, gathering and reducing"),
            *_exchanged(plan),
        ]
    return [
        ("step", f"{in_ms(p['step_s'])}, {p['samples_per_s']:.4g} samples/s"),
        (
            "of that",
            f"pipeline {in_ms(p['pipeline_s'])}, exposed gradient reduction "
            f"{in_ms(p['exposed_reduction_s'], 3)}, optimizer {in_ms(p['optimizer_s'], 3)}",
        ),
        *own,
        ("bubble", f"{100 * p['bubble']:.1f} % of the devices' time in the pipeline"),
        ("memory", f"at most {max(p['memory_bytes']) / 1e9:.3g} GB on a device"),
        *([("weights", plan.profile.quantized)] if plan.profile.quantized else []),
        *_token_slices(plan),
        *_offloaded_weights(plan),
        *_for_optimizer(plan),
        (
            "sent",
            f"{in_mb(p['pipeline_bytes_per_sample'])} a sample in the pipeline, "
            f"{in_mb(p['data_bytes_per_sample'])} for gradient reduction",
        ),
        *_exchanged(plan),
    ]


def _exchanged(plan: PlanFile) -> list[tuple[str, str]]:
    """Bytes and seconds of the exchanges of context-parallel ranks."""
    if plan.context == 1:
        return []
    first_pass = 1.0 if plan.dpo else plan.self_conditioning
    of = plan.profile, plan.context, plan.tensor, plan.activations, first_pass
    by_attention, by_gather = sent_bytes(*of)
    costs = context_costs(plan.profile)
    way = "rings of keys and values" if costs.is_ring(plan.context) else "all-to-alls"
    gathers = sum(layer.num_gathers for layer in costs.layers)
    step, seconds = plan.global_batch_size, plan.predicted["context_s"]
    return [
        (
            "exchanged",
            f"{in_mb(by_attention)} a sample by {way} of {plan.context} ranks, "
            f"{in_mb(by_gather)} by {with_plural(gathers, 'gather')} a forward; "
            f"{in_mb(step * (by_attention + by_gather))} a step, {in_ms(seconds, 3)} of it on the "
            "device with most",
        )
    ]


def _token_slices(plan: PlanFile) -> list[tuple[str, str]]:
    """Peak of a layer and time of all layers with slices of tokens, beside whole layers."""
    if plan.token_slices == 1:
        return []
    size, said = plan.micro_batch_size, f"MLPs, norms and projections in {plan.token_slices} slices"
    if 1 in plan.profile.sliced:
        parts, whole = (p.times_at(size) for p in (plan.profile, plan.profile.in_slices(1)))
        peaks = [max(layer.peak_bytes for layer in layers) for layers in (parts, whole)]
        longer = sum(la.whole_s for la in parts) / sum(la.whole_s for la in whole) - 1
        said += (
            f": a layer takes at most {in_mb(peaks[0])} instead of {in_mb(peaks[1])}, and all "
            f"layers {longer:.1%} longer"
        )
    return [("tokens", said)]


def _offloaded_weights(plan: PlanFile) -> list[tuple[str, str]]:
    """Node memory that the frozen weights of a device, and of a node's devices, take at most."""
    size = ELEMENT_BYTES[plan.dtype]
    moved = [offloaded_bytes(layer, size) / plan.tensor for layer in plan.profile.layers]
    if not any(moved):
        return []
    return [("on host", f"frozen weights, {_host_memory(plan, moved)}")]


def _for_optimizer(plan: PlanFile) -> list[tuple[str, str]]:
    """Node memory that the optimizers of a device, and of a node's devices, take at most."""
    if not plan.optimizer_cpu_offload:
        return []
    each = host_bytes_per_parameter(plan.dtype, plan.data * plan.context, plan.state)
    held = [each * layer.of_rank(plan.tensor)[1] for layer in plan.profile.layers]
    return [("optimizer", _host_memory(plan, held))]


def _host_memory(plan: PlanFile, of_layers: Sequence[float]) -> str:
    """Text of the host memory of the fullest device, whose layers take ``of_layers`` bytes."""
    stages = plan.partition
    num_bytes = max(
        sum(of_layers[i] for s in held for i in stages.layers_of_stage(s))
        for held in map(stages.placement.stages_of_device, range(plan.pipeline))
    )
    per_node = int(plan.provenance["cluster"].get("devices_per_node", 1))
    return (
        f"at most {num_bytes / 1e9:.3g} GB of host memory per device, "
        f"{per_node * num_bytes / 1e9:.3g} GB for the {per_node} of a node"
    )


def filling_facts(found: FilledSchedule) -> list[tuple[str, str]]:
    """Makespan with bubble filling, compared with encoding before the step, and its sensitivity."""
    made, front = found.certificate, found.before_step_s
    spread = (
        f"{over - 1:.1%} above the bound at {factor:g} of the encoders' times"
        for factor, over in made.spread.items()
    )
    return [
        ("filled", str(made)),
        (
            "unfilled",
            f"{front:.4g} s with all before the step: filling is {front / made.makespan:.3f} times "
            "as fast",
        ),
        ("spread", ", ".join(spread)),
    ]


def encoder_schedule_table(plan: PlanFile) -> list[str]:
    """Table of the encoders' schedules, with the step time of each alternative."""
    if plan.policies is None:
        return []

    def in_ms_or_none(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.4g}"

    rows = [
        ("", "encoder", "runs", "ms filled", "ms before step", "ms stored", "stored MB a sample")
    ]
    for one in plan.policies:
        when = "in bubbles" if one["policy"] == "fill" else "before step"
        steps = (in_ms_or_none(one[name]) for name in ("fill_s", "before_step_s", "stored_s"))
        rows.append(("", one["name"], when, *steps, f"{one['stored_bytes'] / 1e6:.4g}"))
    return [
        *table(rows, left=(1, 2)),
        "  (step of a pipeline, with the other encoders at their best)",
    ]


def bubble_task_lines(schedule: Schedule) -> list[tuple[str, str]]:
    """Names of the bubble tasks, with devices and number of slices of their components."""
    rows = []
    for number, task in enumerate(schedule.bubble_tasks):
        every = range(schedule.placement.num_devices)
        devices = every if task.devices is None else task.devices
        rows.append(
            (
                f"X{number}",
                f"{task.name}: {len(task.slice_seconds)} slices on device "
                f"{number_ranges(list(devices))}, {in_ms(sum(task.slice_seconds))}",
            )
        )
    return rows


def offload_lines(plan: PlanFile) -> list[tuple[str, str]]:
    """Per device: number and bytes of offloaded activations, and the largest sum at once.

    An activation counts from the end of its forward, when its copy begins, to its backward.
    """
    problem, rows = plan.problem, []
    for device, order in enumerate(plan.schedule.order):
        left = [op for op in order if op.kind is OpType.OFFLOAD]
        if not left or problem.offload_bytes is None:
            continue
        stages = problem.placement.stages_of_device(device)
        may = sum(problem.offload_bytes[s] > 0 for s in stages) * plan.num_microbatches
        num_bytes = sum(problem.offload_bytes[op.stage] for op in left)
        seconds = sum(problem.offload_s_of(op.stage) for op in left)
        leaving, held, most = {(op.stage, op.microbatch) for op in left}, 0.0, 0.0
        for op in order:
            if (op.stage, op.microbatch) in leaving:
                sign = (op.kind is OpType.FORWARD) - (op.kind in BACKWARDS)
                most = max(most, held := held + sign * problem.offload_bytes[op.stage])
        rows.append(
            (
                f"device {device}",
                f"{len(left)} of {may} activations: {num_bytes / 1e9:.3g} GB a step, at most "
                f"{most / 1e9:.3g} GB pinned, {in_ms(seconds, 3)} each way, beside computation",
            )
        )
    return rows


def provenance(plan: PlanFile) -> list[tuple[str, str]]:
    """Names and values on the plan's origin."""
    p = plan.provenance
    made, cluster = p["schedule"], p["cluster"]
    known = "optimal" if made["proved"] else f"gap {100 * made['gap']:.2f} %"
    size = [str(cluster[key]) for key in ("nodes", "devices_per_node") if key in cluster]
    if plan.cluster.mixed:
        size = [str(plan.cluster.nodes), str(plan.cluster.devices_per_node)]
    counts = Counter(kind.name for kind in plan.cluster.device_kinds)
    kinds = "".join(f", {count} {name}" for name, count in counts.items())
    return [
        ("profile", f"{p['profile']} (sha256 {p['profile_sha256'][:12]})"),
        ("cluster", f"{cluster.get('name', 'unknown')} ({' x '.join(size)} devices{kinds})"),
        (
            "schedule",
            f"{made['solver']}: {in_ms(made['makespan'])} without link contention, lower bound "
            f"{in_ms(made['lower_bound'])} ({known})",
        ),
        *_searched(plan),
        ("versions", ", ".join(f"{name} {value}" for name, value in p["versions"].items())),
    ]


def _searched(plan: PlanFile) -> list[tuple[str, str]]:
    """Certainty of the search, if the plan records it."""
    if (search := plan.provenance.get("search")) is None:
        return []
    bound_s, step_s = search["lower_bound_s"], plan.predicted["step_s"]
    found = f"{search['configs']:,} configs, {search['simulated']:,} simulated"
    if not search["left"]:
        return [("search", f"{found}, none untried; not all of their cuts")]
    if not bound_s:
        return [("search", f"{found}, {search['left']:,} untried; their lower bound is unknown")]
    least = f"{search['left']:,} untried, none below {in_ms(bound_s)}"
    return [("search", f"{found}, {least} ({max(0, 1 - bound_s / step_s):.1%} less)")]


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers with consecutive ones joined: 0-3, 8-11."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 4:
        return ", ".join(map(str, numbers[:4])) + f", ... {numbers[-1]}"
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
