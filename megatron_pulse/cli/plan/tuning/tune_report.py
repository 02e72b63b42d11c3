"""Text and JSON output of ``pulse tune``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.cli.output import name_value_lines, table
from megatron_pulse.cli.plan.plan_facts import (
    bubble_task_lines,
    encoder_schedule_table,
    filling_facts,
)
from megatron_pulse.format import format_number
from megatron_pulse.planner.layout.layouts import layout_name
from megatron_pulse.planner.tune.evaluate import CORE, Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.fsdp.baseline import FsdpBaseline
from megatron_pulse.planner.tune.plans.encoder_policies import EncodedPlan
from megatron_pulse.planner.tune.report.explain import certainty, explain, unordered
from megatron_pulse.planner.tune.report.fewer_devices_advice import ScaleDown
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.profile.profile import Profile

_COLUMNS = (
    *("", "P", "D", "T", "b", "M", "layout", "schedule", "inside", "ms/sample", "samples/s"),
    *("bubble", "GB", "MB pipe", "MB data", "gap"),
)

_NOTABLE_S = 2.0

_STARRED = f"* extrapolated from {CORE} P microbatches"


def listing(found: Tuning, evaluator: Evaluator) -> list[str]:
    """Table of the best configs, with its notes."""
    rows = [_COLUMNS, *(_row(i, o) for i, o in enumerate(found.outcomes, start=1))]
    if any(outcome.config.context > 1 for outcome in found.outcomes):
        degrees = ("K", *(str(outcome.config.context) for outcome in found.outcomes))
        rows = [(*row, own) for row, own in zip(rows, degrees, strict=True)]
    if evaluator.cluster.mixed:
        kinds = [_kinds(outcome, evaluator) for outcome in found.outcomes]
        rows = [(*row, own) for row, own in zip(rows, ("devices", *kinds), strict=True)]
    return [
        *table(rows, left=[_COLUMNS.index(name) for name in ("layout", "schedule", "inside")]),
        *[_STARRED] * any(outcome.extrapolated for outcome in found.outcomes),
        *_beyond(found, evaluator.profile),
        *_conditioned(evaluator),
    ]


def _kinds(outcome: Outcome, evaluator: Evaluator) -> str:
    """Kinds of the outcome's pipeline devices, in their order."""
    return ", ".join(place.name for place in evaluator.costs.places(outcome.config))


def explanation(found: Tuning, evaluator: Evaluator, bound: Collection[str] = ()) -> list[str]:
    """Lines on what was searched, how certain the best is, FSDP2, other configs, and reasons.

    ``bound`` are the flags given that restrict plans but not the FSDP2 baseline.
    """
    profile, cluster = evaluator.profile, evaluator.cluster
    lines = [
        f"{name_of(profile.backbone)}, {profile.dtype}, {profile.source} on {profile.device}; "
        f"{cluster.num_devices} devices of {cluster.name}, {evaluator.global_batch_size} samples a "
        "step",
        f"{found.num_configs:,} configs, {found.num_simulated:,} simulated, in "
        f"{found.seconds:.1f} s{_ready(found)}; certainty of the best:",
        *(f"  {line}" for line in certainty(found)),
        *[f"  {unordered(cluster).removeprefix('; ')}"] * cluster.mixed,
        *_beside(found, evaluator, bound),
        f"outcome of the {found.num_configs:,} configs:",
    ]
    for reason, count in found.refused.most_common():
        if count:
            example = found.examples.get(reason)
            lines.append(f"  {count:7,d}  {reason}")
            lines += [f"           for example {example}"] * bool(example)
    if found.num_left:
        lines.append(f"  {found.num_left:7,d}  untried when the search ended")
    whole = found.num_configs - sum(found.refused.values()) - found.num_left
    lines.append(
        f"  {whole:7,d}  simulated with their own cuts and the best known ones (some of those "
        "above only with known cuts)"
    )
    return [*lines, "", *explain(found)]


def _beyond(found: Tuning, profile: Profile) -> list[str]:
    """Note on listed microbatch sizes outside the profiled range."""
    tried = {outcome.config.micro_batch_size: "" for outcome in found.outcomes}
    if found.fsdp_baseline is not None:
        tried.setdefault(found.fsdp_baseline.fitted.config.micro_batch_size, " (FSDP2's)")
    beyond = ", ".join(f"{b}{tried[b]}" for b in sorted(tried) if profile.extrapolates(b))
    sizes = ", ".join(map(str, profile.micro_batch_sizes))
    said = f"the profile is of microbatches of {sizes}; times at b = {beyond} are extrapolated"
    return [f"note: {said}"] * bool(beyond)


def _conditioned(evaluator: Evaluator) -> list[str]:
    """Note on extra forwards: a step time is the mean of steps with and without."""
    if evaluator.dpo:
        copied = ", of which each stage keeps a copy" * evaluator.state.reference
        return [f"dpo: every step runs all forwards twice, first for the reference{copied}"]
    share = 100 * evaluator.self_conditioning
    return [f"self-conditioning: {share:g} % of the steps run all forwards twice"] * (share > 0)


def _beside(found: Tuning, evaluator: Evaluator, bound: Collection[str]) -> list[str]:
    """Comparison with FSDP2, or the reason why there is none."""
    if (other := found.fsdp_baseline) is None:
        ended = "was not predicted: the search was interrupted" if found.stopped else ""
        why = found.not_sharded or ended or "does not fit"
        return [f"FSDP2 {why}"] * (evaluator.cluster.num_devices > 1)
    best, *rest = found.outcomes
    if best.config.fsdp is not None:
        lines = [f"{best.config} ({other.facts})"]
        for one in rest[:1]:
            lines.append(f"  the best without it: {one.config}, {one.throughput:.4g} samples/s")
        return lines + _of_fsdp(other)
    lines = [f"{other.beside(best.throughput)} ({other.facts})"]
    if bound:
        lines.append(f"  not restricted by {', '.join(bound)}, which is for plans")
    if found.num_left and found.bound_s < other.step_s < best.step_s:
        lines.append(
            f"  but {found.num_left:,} untried configs might be faster: give more --seconds first"
        )
    return lines + _of_fsdp(other)


def _of_fsdp(baseline: FsdpBaseline) -> list[str]:
    """Lines on the prediction, units and activation policies of FSDP2."""
    return [
        "  fastest of its configs that fit; ideal collectives at the links' bandwidth overlap with "
        "computation; buffers are counted only for what is gathered and reduced",
        *(f"  {what}: {', '.join(names)}" for what, names in baseline.layers.items() if names),
    ]


def encoding(encoded: EncodedPlan) -> list[str]:
    """Lines on each encoder's schedule, and on the effect of bubble filling."""
    plan = encoded.plan
    facts = [] if encoded.schedule is None else filling_facts(encoded.schedule)
    rate = f"{encoded.samples_per_s:.4g} samples/s"
    return [
        f"encoders, in {plan.heading}: {rate}",
        *encoder_schedule_table(plan),
        *name_value_lines([*facts, *bubble_task_lines(plan.schedule)]),
    ]


def as_json(
    found: Tuning,
    evaluator: Evaluator,
    encoders: dict[str, Any] | None = None,
    fewer: ScaleDown | None = None,
) -> dict[str, Any]:
    """Report as a JSON record."""
    return {
        **({} if encoders is None else {"encoders": encoders}),
        "backbone": dict(evaluator.profile.backbone),
        "cluster": evaluator.cluster.name,
        "global_batch_size": evaluator.global_batch_size,
        "self_conditioning": evaluator.self_conditioning,
        "dpo": evaluator.dpo,
        "outcomes": [_record(outcome, evaluator) for outcome in found.outcomes],
        "fsdp_baseline": found.fsdp_baseline and found.fsdp_baseline.record(),
        "scale_down": fewer
        and {
            "num_devices": fewer.num_devices,
            **({"kind": fewer.kind} if fewer.kind else {}),
            "config": str(fewer.outcome.config),
            "samples_per_s": fewer.outcome.throughput,
        },
        "num_configs": found.num_configs,
        "num_simulated": found.num_simulated,
        "certainty": _certainty(found),
        "seconds": found.seconds,
        "ready_s": found.ready_s,
        "refused": {reason.name.lower(): count for reason, count in found.refused.items()},
        "examples": {reason.name.lower(): text for reason, text in found.examples.items()},
    }


def _ready(found: Tuning) -> str:
    """Time spent before the search on compiled code, if notable."""
    took = f" (after {found.ready_s:.0f} s of compiling, longest at the first use)"
    return took if found.ready_s > _NOTABLE_S else ""


def _certainty(found: Tuning) -> dict[str, Any]:
    """Proved facts on the best config: of its schedule, and among all configs."""
    certificate = found.outcomes[0].synthesis.certificate
    return {
        "schedule": {
            "proved": certificate.proved,
            "gap": certificate.gap,
            "extrapolated": found.outcomes[0].extrapolated,
            "waiting_s": found.outcomes[0].timeline.makespan - certificate.makespan,
        },
        "among_simulated": {"soonest": True, "num_simulated": found.num_simulated},
        "among_all": {
            "proved": found.proved,
            "num_left": found.num_left,
            "bound_s": found.bound_s if found.num_left else None,
        },
    }


def _record(outcome: Outcome, evaluator: Evaluator) -> dict[str, Any]:
    config, profile = outcome.config, evaluator.profile
    devices = [list(place.kinds) for place in evaluator.costs.places(config)]
    return {
        "pipeline": config.pipeline,
        "data": config.data,
        "tensor": config.tensor,
        **({"context": config.context} if config.context > 1 else {}),
        "micro_batch_size": config.micro_batch_size,
        "num_microbatches": config.num_microbatches(outcome.global_batch_size),
        "layout": _layout(outcome),
        "split": config.split,
        "max_in_flight": config.max_in_flight,
        "activations": outcome.stages.activations.by_name(outcome.stages.costs.names),
        "distributed_optimizer": config.distributed_optimizer,
        "pp_before_dp": config.pp_before_dp,
        "cuts": list(outcome.stages.partition.cuts),
        **({"devices": devices} if evaluator.cluster.mixed else {}),
        **outcome.figures(),
        **({"buckets": list(map(_bucket, outcome.shapes))} if outcome.shapes else {}),
        "gap": outcome.synthesis.certificate.gap,
        "extrapolated": outcome.extrapolated,
        "costs_extrapolated": profile.extrapolates(config.micro_batch_size),
    }


def _bucket(shape: ShapeOutcome) -> dict[str, Any]:
    """Record of the steps of one bucket."""
    own = shape.outcome
    return {
        "name": shape.name,
        "share": shape.share,
        "micro_batch_size": own.config.micro_batch_size,
        "num_microbatches": own.config.num_microbatches(own.global_batch_size),
        **own.figures(),
        "gap": own.synthesis.certificate.gap,
    }


def _layout(outcome: Outcome) -> str:
    """Name of the layout that the cuts make; a search for a soft fold may find an exact one."""
    if outcome.config.fsdp is not None:
        return "FSDP2"
    return layout_name(outcome.stages.partition, outcome.stages.costs.skips)


def _some(layers: Collection[int], outcome: Outcome) -> str:
    every = outcome.stages.costs.names
    return "all" if len(layers) == len(every) else f"{len(layers)} of {len(every)}"


def _row(rank: int, outcome: Outcome) -> tuple[str, ...]:
    config = outcome.config
    schedule = ["split"] * config.split + ["max in-flight"] * config.max_in_flight
    policies = {str(policy): layers for policy, layers in outcome.stages.activations.sets()}
    for policy in ("recompute", "selective", "offload"):
        if layers := policies[policy]:
            schedule.append(f"{policy} {_some(layers, outcome)}")
    schedule += ["dist-opt"] * config.distributed_optimizer
    inside = ""
    if config.pipeline > 1 and config.data > 1:
        inside = "pipeline" if config.pp_before_dp else "replicas"
    gap = f"{max(0.0, outcome.synthesis.certificate.gap):.1%}"
    return (
        str(rank),
        str(config.pipeline),
        str(config.data),
        str(config.tensor),
        str(config.micro_batch_size),
        str(config.num_microbatches(outcome.global_batch_size)),
        _layout(outcome),
        ",".join(schedule) or "-",
        inside or "-",
        f"{1e3 * outcome.step_s / outcome.global_batch_size:.4g}",
        f"{outcome.throughput:.4g}",
        f"{outcome.bubble:.1%}",
        f"{max(outcome.memory_bytes) / 1e9:#.3g}".rstrip("."),
        format_number(outcome.pipeline_bytes / 1e6),
        format_number(outcome.data_bytes / 1e6),
        f"{gap}*" if outcome.extrapolated else gap,
    )
