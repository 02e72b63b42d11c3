"""Plan figures computed anew, from the costs and the cluster in the plan file.

The plan's decisions (degrees, batch, cuts, every device's order) stay. Everything that follows from
them is computed as the tuner does, and the schedule is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import format_faults
from megatron_pulse.planner.cluster.cluster import ClusterError, from_record
from megatron_pulse.planner.layout.layouts import layout_of
from megatron_pulse.planner.partition.memory import activation_bytes_of_layers
from megatron_pulse.planner.plan_file.compatibility import machine_faults, rank_faults
from megatron_pulse.planner.plan_file.plan_file import (
    PlanFile,
    PlanFileError,
    read_plan,
    shape_records,
    to_record,
)
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.problem import Certificate, Synthesis
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.plans.bubble_fill import filling_faults
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.fsdp_outcome import fsdp_outcome
from megatron_pulse.planner.tune.stages import Stages

ROUNDING = 1e-6
"""Relative difference of figures that count as equal: summation order, a solver's units."""


def load_checked(path: str | Path) -> PlanFile:
    """Read a plan file and verify its figures.

    Raises PlanFileError with every fault of form and legality, or else every difference in the
    figures. The schedule is not simulated for its bounds, so that the largest plans take tenths of
    a second.
    """
    record, plan, faults = read_plan(path)
    if record is not None and plan is not None and not faults:
        faults = machine_faults(record) + figure_faults(record, plan, bounds=False)
    if plan is None or faults:
        raise PlanFileError(format_faults(f"{path} is not a plan that can run", faults))
    return plan


def figure_faults(record: Mapping[str, Any], plan: PlanFile, bounds: bool = True) -> list[str]:
    """Differences between the ``record`` of a legal plan and the figures that its costs give.

    Empty if the cluster does not match the plan's ranks: ``machine_faults`` reports that. With
    ``bounds`` the schedule is also simulated without link contention, as its bounds assume.
    """
    records = shape_records(record)
    if faults := [*_other_costs(plan), *_shapes_apart(plan)]:
        return faults
    try:
        if rank_faults(record, from_record(record["provenance"]["cluster"])):
            return []
    except ClusterError:
        return []
    try:
        again = recomputed(plan, bounds)
    except ValueError as error:
        return [f"the plan's figures cannot be recomputed: {error}"]
    faults = _figure_faults(record, plan, again)
    for shape, own in zip(plan.shapes, again.shapes, strict=True):
        wrong = _figure_faults(records[shape.name], shape.plan, own.plan)
        faults += [f"shapes, {shape.name}: {fault}" for fault in wrong]
    return faults + filling_faults(plan)


def _figure_faults(record: Mapping[str, Any], plan: PlanFile, again: PlanFile) -> list[str]:
    """Differences between a plan's record and ``again``, apart from those of its shapes."""
    made = to_record(replace(again, shapes=()))
    return [*_differences(record, made, ""), *_certificate_faults(plan, again)]


def recomputed(plan: PlanFile, bounds: bool = True) -> PlanFile:
    """Plan that the tuner would write for the decisions of ``plan``, and of its shapes.

    Raises ValueError (UnfitError, ClusterError) for a plan that cannot run on its cluster.
    """
    outcome, evaluator = _outcome(plan, bounds)
    shapes = [
        ShapeOutcome(shape.name, shape.share, *_outcome(shape.plan, bounds))
        for shape in plan.shapes
    ]
    made = plan_of(outcome.with_shapes(tuple(shapes)) if shapes else outcome, evaluator)
    provenance = dict(made.provenance)
    if "search" in plan.provenance:
        provenance["search"] = plan.provenance["search"]
    return replace(
        made,
        provenance=provenance,
        encoders=plan.encoders,
        before_step=plan.before_step,
        policies=plan.policies,
    )


def _outcome(plan: PlanFile, bounds: bool) -> tuple[Outcome, Evaluator]:
    """Outcome of a plan's decisions, apart from its shapes, and what evaluated it."""
    evaluator, config, stages = _stages_of(plan)
    if plan.fsdp is not None:
        of = plan.fsdp, plan.micro_batch_size, plan.activations, plan.context
        return fsdp_outcome(evaluator, *of), evaluator
    count = plan.num_microbatches
    if not _close(plan.problem.cap or (), evaluator.problem(config, count, stages).cap or ()):
        config = replace(config, max_in_flight=True)
    problem, known = evaluator.problem(config, count, stages), plan.provenance["schedule"]
    certificate = Certificate(
        simulate(problem, plan.schedule).makespan if bounds else known["makespan"],
        known["lower_bound"],
        known["proved"],
        known["solver"],
        known.get("seconds", 0.0),
    )
    synthesis = Synthesis(plan.schedule, certificate)
    return evaluator.evaluate(config, synthesis, stages=stages), evaluator


def layer_costs(plan: PlanFile) -> ChainCosts:
    """Layer costs of a plan's stages, with replicated embedders and the plan's activation policy.

    ``saved_bytes`` are those kept from forward to backward.
    """
    _, _, stages = _stages_of(plan)
    costs = stages.costs.of_schedule(plan.problem.weight_grad is not None)
    return replace(
        costs, saved_bytes=tuple(map(round, activation_bytes_of_layers(costs, plan.partition)))
    )


def fullest_stepping(plan: PlanFile) -> set[int]:
    """Devices whose peak memory is that of the optimizer step, when no activation exists."""
    _, _, stages = _stages_of(plan)
    pairs = zip(stages.stepping, plan.predicted["memory_bytes"], strict=True)
    return {d for d, (stepping, most) in enumerate(pairs) if _close((stepping,), (most,))}


def _stages_of(plan: PlanFile) -> tuple[Evaluator, Config, Stages]:
    cluster = from_record(plan.provenance["cluster"], "provenance.cluster")
    of = plan.profile, cluster, plan.global_batch_size, plan.sequence_parallel
    share = plan.self_conditioning
    evaluator = Evaluator(*of, self_conditioning=share, state=plan.state, dpo=plan.dpo)
    config = _config(plan)
    if plan.fsdp is None:
        evaluator.refuse(config)
    return evaluator, config, evaluator.stages.build(config, plan.partition, plan.activations)


def _other_costs(plan: PlanFile) -> Iterator[str]:
    """Reasons why costs do not match the plan's layers or microbatch size."""
    size, sizes = plan.micro_batch_size, plan.profile.micro_batch_sizes
    if sizes != (size,):
        shown = ", ".join(map(str, sizes))
        yield f"micro_batch_size is {size}; profile has costs for microbatch size {shown}"
    names = [name for stage in plan.stages for name in stage]
    for i, (name, layer) in enumerate(zip_longest(names, plan.profile.layers)):
        known = None if layer is None else layer.name
        if name != known:
            yield f"stages: layer {i} is {name!r}; in profile it is {known!r}"
            return


def _shapes_apart(plan: PlanFile) -> Iterator[str]:
    """Reasons why costs do not match a shape's layers or microbatch size."""
    for shape in plan.shapes:
        yield from (f"shapes, {shape.name}: {fault}" for fault in _other_costs(shape.plan))


def _config(plan: PlanFile) -> Config:
    """Config of a plan, with 1F1B's number of in-flight microbatches."""
    placement = plan.placement
    return Config(
        plan.pipeline,
        plan.data,
        plan.tensor,
        plan.micro_batch_size,
        layout_of(str(placement.kind)).with_chunks(placement.num_chunks),
        split=plan.problem.weight_grad is not None,
        recompute=Recompute.HOST if plan.activations.offload else Recompute.NEEDED,
        distributed_optimizer=plan.distributed_optimizer,
        pp_before_dp=plan.rank_order == "tp-pp-dp",
        device_order=plan.device_order or (),
        context=plan.context,
    )


_AS_GIVEN = {
    *("schedule", "profile"),
    *(f"provenance.{name}" for name in ("profile_sha256", "unsteady", "versions", "cluster")),
}
_SHARES = ("gap", "bubble")


def _differences(said: Any, again: Any, where: str) -> Iterator[str]:
    if isinstance(again, Mapping) and isinstance(said, Mapping):
        if where.startswith("backbone"):
            for name in said.keys() - again.keys():
                yield f"{where}.{name}: not in profile's backbone"
        for name, value in again.items():
            at = f"{where}.{name}" if where else name
            if name not in said and where.startswith(("backbone", "times")):
                yield f"{at} is missing; recomputed from profile it is {_shown(value)}"
            elif name in said and at not in _AS_GIVEN:
                yield from _differences(said[name], value, at)
    elif isinstance(again, list | tuple) and isinstance(said, list | tuple):
        if len(said) != len(again):
            yield f"{where} has {len(said)} values; recomputed from profile it has {len(again)}"
            return
        for i, (one, other) in enumerate(zip(said, again, strict=True)):
            yield from _differences(one, other, f"{where}.{i}")
    elif not _same(said, again, ROUNDING if where.endswith(_SHARES) else 0.0):
        yield f"{where} is {_shown(said)}; recomputed from profile it is {_shown(again)}"


def _certificate_faults(plan: PlanFile, again: PlanFile) -> Iterator[str]:
    """Lower bounds above the makespan, and false proofs."""
    search, step_s = plan.provenance.get("search"), again.predicted["step_s"]
    if search is not None and search["lower_bound_s"] > step_s * (1 + ROUNDING):
        yield (
            f"provenance.search.lower_bound_s is {search['lower_bound_s']:.8g}, above the step "
            f"time {step_s:.8g}"
        )
    known = plan.provenance["schedule"]
    bound, makespan = known["lower_bound"], again.provenance["schedule"]["makespan"]
    if bound > makespan * (1 + ROUNDING):
        yield (
            f"provenance.schedule.lower_bound is {bound:.8g}, above the simulated makespan "
            f"{makespan:.8g}"
        )
    if known["proved"] and bound < makespan * (1 - ROUNDING):
        yield (
            f"provenance.schedule.proved is true, but lower_bound {bound:.8g} is below the "
            f"simulated makespan {makespan:.8g}"
        )


def _same(said: Any, again: Any, beside: float = 0.0) -> bool:
    if isinstance(again, float) and isinstance(said, int | float):
        return math.isclose(said, again, rel_tol=ROUNDING, abs_tol=max(beside, 1e-12))
    return bool(said == again)


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(map(_same, some, others))


def _shown(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, float) else repr(value)
