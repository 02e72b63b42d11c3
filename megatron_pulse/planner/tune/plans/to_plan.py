"""Conversion of the tuner's outcome to a plan file."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version

from megatron_pulse.planner.cluster.cluster import to_record
from megatron_pulse.planner.plan_file.plan_file import PlanFile, ShapePlan
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.profile.warnings import spread_caution


def plan_of(outcome: Outcome, evaluator: Evaluator, found: Tuning | None = None) -> PlanFile:
    """Plan file of an outcome of ``evaluator``, whose schedule must have all microbatches.

    The plan holds the profile's costs at its own microbatch size, and the certainty of the search
    ``found``. An outcome that offloads weights has them offloaded in that profile.
    """
    if outcome.extrapolated:
        raise ValueError("the outcome's schedule has fewer microbatches than a step")
    if outcome.config.offloads_weights:
        evaluator = evaluator.offloading_weights or evaluator
    profile, cluster = evaluator.profile, evaluator.cluster
    config, stages = outcome.config, outcome.stages
    apart = profile.shapes, profile.kinds, profile.context, profile.sliced_context
    known = repr(profile) + "".join(repr(own) for own in apart if own)
    partition, certificate = stages.partition, outcome.synthesis.certificate
    names, costs = stages.costs.names, profile.only(config.micro_batch_size)
    plan = PlanFile(
        backbone=dict(profile.backbone),
        dtype=profile.dtype,
        pipeline=config.pipeline,
        data=config.data,
        tensor=config.tensor,
        sequence_parallel=evaluator.costs.sequence_parallel and config.tensor > 1,
        rank_order="tp-pp-dp" if config.pp_before_dp else "tp-dp-pp",
        global_batch_size=outcome.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        activations=stages.activations,
        distributed_optimizer=config.distributed_optimizer,
        ema=evaluator.state.ema,
        grad_reduce_in_bf16=evaluator.state.grad_reduce_in_bf16,
        optimizer_cpu_offload=evaluator.state.optimizer_cpu_offload,
        optimizer_bytes=evaluator.state.optimizer_bytes,
        overlap_grad_reduce=config.replicas > 1 and config.fsdp is None,
        stages=tuple(
            tuple(names[i] for i in partition.layers_of_stage(s))
            for s in range(partition.placement.num_stages)
        ),
        schedule=outcome.synthesis.schedule,
        problem=outcome.problem,
        edges=stages.edges,
        predicted=outcome.figures(),
        provenance={
            "profile_sha256": hashlib.sha256(known.encode()).hexdigest(),
            "threads": profile.threads,
            "unsteady": spread_caution(profile),
            "profile": f"{profile.source.value}, {profile.device}: {profile.method}",
            "cluster": to_record(cluster),
            "schedule": {**asdict(certificate), "gap": certificate.gap},
            "versions": {name: _version(name) for name in ("megatron-pulse", "megatron-core")},
            **({} if found is None else {"search": _searched(found)}),
        },
        profile=costs,
        self_conditioning=evaluator.self_conditioning,
        dpo=evaluator.dpo,
        fsdp=config.fsdp,
        device_order=config.device_order or None,
        context=config.context,
    )
    return replace(plan, shapes=tuple(_shape_plan(plan, shape) for shape in outcome.shapes))


def _shape_plan(whole: PlanFile, shape: ShapeOutcome) -> ShapePlan:
    """Plan of the steps of one shape, whose origin is that of the ``whole`` plan."""
    own = plan_of(shape.outcome, shape.evaluator)
    provenance = {**whole.provenance, "schedule": own.provenance["schedule"]}
    provenance.pop("search", None)
    return ShapePlan(shape.name, shape.share, replace(own, provenance=provenance))


def _searched(found: Tuning) -> dict[str, float]:
    """Number of configs searched, and a lower bound on the step time of all of them."""
    return {
        "configs": found.num_configs,
        "simulated": found.num_simulated,
        "left": found.num_left,
        "lower_bound_s": min(found.bound_s, found.outcomes[0].step_s),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
