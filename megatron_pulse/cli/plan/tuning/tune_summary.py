"""Answer of ``pulse tune`` in at most six lines: plan, speed, memory, comparison, certainty."""

from __future__ import annotations

from pathlib import Path

from megatron_pulse.backbone.layer_selection import tell_layers
from megatron_pulse.cli.output import name_value_lines
from megatron_pulse.format import format_number, in_ms
from megatron_pulse.planner.plan_file.equivalent_flags import run_command
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.fsdp.baseline import ALIKE
from megatron_pulse.planner.tune.report.explain import unordered
from megatron_pulse.planner.tune.report.fewer_devices_advice import ScaleDown
from megatron_pulse.planner.tune.search.data_parallel import data_parallel
from megatron_pulse.planner.tune.search.result import Tuning

_WEIGHT_OFFLOAD = "data parallelism with --offload-weights '*'"

PREDICTION_ERROR = "3.6 % median of 177, 17 % 90th percentile"
"""Error of predicted steps against measured ones, from ``tests/benchmarks/README.md``."""


def summary(
    plan: PlanFile,
    samples_per_s: float,
    found: Tuning,
    evaluator: Evaluator,
    fewer: ScaleDown | None,
    path: Path | None,
) -> list[str]:
    """Lines that answer how to train, for the ``plan`` written to ``path``.

    ``samples_per_s`` includes encoders. Something faster than the plan comes first.
    """
    rate = f"{samples_per_s:.4g} samples/s, {in_ms(plan.global_batch_size / samples_per_s)} a step"
    held = zip(plan.predicted["memory_bytes"], plan.places, strict=True)
    full, place = max(held, key=lambda pair: pair[0] / pair[1].usable_bytes)
    usable, of = place.usable_bytes / 1e9, f" ({place.name})" * bool(place.kinds)
    memory = f"{full / 1e9:.3g} of {usable:.3g} usable GB on the fullest device{of}"
    return [
        *_faster(found, evaluator, fewer),
        *name_value_lines(
            [
                ("plan", _plan(plan)),
                ("predicted", f"{rate} ({evaluator.profile.source.value} profile); {memory}"),
                ("compared", _compared(found, evaluator)),
                ("certainty", _certainty(found) + unordered(evaluator.cluster)),
                ("train", _train(plan, path)),
            ],
            width=11,
            indent=0,
        ),
    ]


def _faster(found: Tuning, evaluator: Evaluator, fewer: ScaleDown | None) -> list[str]:
    """Line on what trains faster than the best plan: FSDP2, a part of the devices, or data
    parallelism with weight offload."""
    rate, other = found.outcomes[0].throughput, found.fsdp_baseline
    faster: list[tuple[float, str]] = []
    if other is not None and other.throughput > (1 + ALIKE) * rate:
        times = format_number(other.throughput / rate)
        said = (
            f"{other.name} is excluded by flags (or CPUs), and {times} times as fast as the best "
            f"plan ({other.facts})"
        )
        faster.append((other.throughput, said))
    on_host = found.weight_offload
    if on_host is not None and on_host.throughput > (1 + ALIKE) * rate:
        times = format_number(on_host.throughput / rate)
        said = (
            f"{_WEIGHT_OFFLOAD} is excluded by flags (or buckets), and {times} times as fast as "
            f"the best plan ({on_host.config})"
        )
        faster.append((on_host.throughput, said))
    if fewer is not None:
        part = fewer.part + " alone" * bool(fewer.kind)
        times, every = format_number(fewer.outcome.throughput / rate), evaluator.cluster.num_devices
        said = f"use {part}: {times} times as fast as all {every} together ({fewer.outcome.config})"
        faster.append((fewer.outcome.throughput, said))
    return [said for _, said in sorted(faster)[-1:]]


def _train(plan: PlanFile, path: Path | None) -> str:
    told = run_command(plan, path or Path("plan.json"))
    is_written = path is not None or "table" in plan.backbone
    return told if is_written else f"{told}  (after -o plan.json)"


def _plan(plan: PlanFile) -> str:
    is_data_parallel = plan.data > 1 == plan.pipeline == plan.tensor == plan.context
    of_context = f" K={plan.context}" * (plan.context > 1)
    parts = [
        f"P={plan.pipeline} D={plan.data} T={plan.tensor}{of_context}",
        "data parallelism" if is_data_parallel and plan.fsdp is None else plan.layout,
        f"microbatches {'by bucket: ' * bool(plan.shapes)}{plan.microbatches}",
    ]
    if plan.pipeline > 1:
        backward = "split" if plan.problem.weight_grad is not None else "whole"
        parts.append(f"schedule {plan.schedule.name} with {backward} backward")
    if plan.cluster.mixed and plan.pipeline > 1:
        parts.append(f"devices {', '.join(place.name for place in plan.places)}")
    parts += [
        f"{policy} {tell_layers(layers, len(plan.profile.layers))}"
        for policy, layers in plan.activations.sets()
        if layers
    ]
    parts += ["distributed optimizer"] * plan.distributed_optimizer
    parts += [f"{plan.token_slices} slices of tokens"] * (plan.token_slices > 1)
    parts += ["weight offload"] * plan.profile.offloads_weights
    return ", ".join([*parts, *["optimizer offload"] * plan.optimizer_cpu_offload])


def _compared(found: Tuning, evaluator: Evaluator) -> str:
    """Speed of the best plan, without encoders, beside FSDP2 and data parallelism."""
    num_devices = evaluator.cluster.num_devices
    if num_devices == 1:
        return "with nothing: there is one device"
    best, other, on_host = found.outcomes[0], found.fsdp_baseline, found.weight_offload
    rest = found.outcomes[1:2]

    def beside(name: str, rate: float) -> str:
        return f"{format_number(best.throughput / rate)} x {name} ({rate:.4g} samples/s)"

    if best.config.fsdp is not None:
        told = [beside("the best without it", one.throughput) for one in rest]
    elif other is not None:
        told = [beside(other.name.split(" (")[0], other.throughput)]
    elif why := found.not_sharded or "was not predicted: interrupted" * found.stopped:
        told = [f"FSDP2 {why}"]
    else:
        told = ["FSDP2 does not fit"]
    degrees = best.config.pipeline, best.config.tensor, best.config.context
    if (*degrees, best.config.fsdp) == (1, 1, 1, None):
        told.append("this plan is data parallelism")
    elif evaluator.global_batch_size % num_devices:
        told.append(f"data parallelism needs a batch that {num_devices} devices divide")
    elif found.stopped:
        told.append("data parallelism was not predicted: interrupted")
    elif (alone := data_parallel(evaluator)) is None:
        told.append("data parallelism does not fit")
    else:
        told.append(beside("data parallelism", alone.throughput))
    if best.config.offloads_weights:
        told += [beside("the best without weight offload", one.throughput) for one in rest]
    elif on_host is not None:
        told.append(beside(_WEIGHT_OFFLOAD, on_host.throughput))
    return "; ".join(told)


def _certainty(found: Tuning) -> str:
    """Distance of schedule and config from their bounds, and the error of predictions so far."""
    best, certificate = found.outcomes[0], found.outcomes[0].synthesis.certificate
    if certificate.proved:
        schedule = "schedule optimal for its stages"
    else:
        schedule = f"schedule within {_percent(certificate.gap)} of its lower bound"
    if found.proved:
        rest = "no other config is faster"
    else:
        rest = f"{found.num_left:,} untried configs"
        less = _percent(1 - found.bound_s / best.step_s)
        rest += f" take at most {less} off" * (found.bound_s > 0)
    return f"{schedule}; {rest}; error of predictions so far {PREDICTION_ERROR}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
