"""FSDP layouts as outcomes of the tuner, from which plan files are made."""

from __future__ import annotations

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.layout.layouts import WHOLE
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.problem import Certificate, Synthesis
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.estimate import is_cpu
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.fsdp.baseline import ALIKE
from megatron_pulse.planner.tune.fsdp.step import step_bytes
from megatron_pulse.planner.tune.search.result import Tuning


def fsdp_outcome(
    evaluator: Evaluator,
    layout: FsdpLayout,
    micro_batch_size: int,
    activations: ActivationPolicies,
    context: int = 1,
) -> Outcome:
    """Predicted step of an FSDP layout, as of a pipeline of one device with one stage, whose
    ``context`` ranks share tokens.

    Schedule and timeline are those of the computation alone. ``pipeline_s`` has the exposed
    collectives too, and ``bubble`` is their share.
    """
    baseline = evaluator.fsdp_step(layout, micro_batch_size, activations, context)
    cluster, fitted = evaluator.cluster, baseline.fitted
    config = Config(
        1, cluster.num_devices // context, 1, micro_batch_size, WHOLE,
        recompute=Recompute.NEEDED, distributed_optimizer=True, fsdp=layout, context=context,
    )  # fmt: skip
    partition = Partition(config.placement, (0, len(evaluator.profile.layers)))
    stages = evaluator.stages.build(config, partition, activations)
    count = evaluator.costs.num_microbatches(config)
    problem = evaluator.stages.problem(config, count, stages, anyhow=True)
    schedule = make_schedule("auto", config.placement, count)
    timeline = simulate(problem, schedule)
    seconds = timeline.makespan
    certificate = Certificate(seconds, seconds, True, "one device", 0.0)
    pipeline_s = baseline.step_s - baseline.optimizer_s
    exchanged_bytes, exchanged_s = evaluator.exchanged(config, stages)
    computed_s = count * sum(unit.forward_s + unit.backward_s for unit in fitted.sharding.units)
    return Outcome(
        config=config,
        stages=stages,
        problem=problem,
        synthesis=Synthesis(schedule, certificate),
        timeline=timeline,
        global_batch_size=evaluator.global_batch_size,
        step_s=baseline.step_s,
        pipeline_s=pipeline_s,
        reduce_s=0.0,
        optimizer_s=baseline.optimizer_s,
        bubble=max(0.0, 1 - computed_s / pipeline_s),
        memory_bytes=(fitted.needs_bytes,),
        pipeline_bytes=0.0,
        data_bytes=step_bytes(fitted.sharding) * cluster.num_devices / evaluator.global_batch_size,
        extrapolated=False,
        context_bytes=exchanged_bytes,
        context_s=exchanged_s,
    )


def add_fsdp(found: Tuning, evaluator: Evaluator, choices: Choices, keep: int) -> None:
    """Make FSDP the best outcome of ``found`` if it is faster than the others and may be chosen.

    ``keep`` outcomes remain, and the best pipeline.
    """
    baseline = found.fsdp_baseline
    if baseline is None:
        return
    config, activations = baseline.fitted.config, baseline.fitted.activations
    best = found.outcomes[0].throughput if found.outcomes else 0.0
    if baseline.throughput <= (1 + ALIKE) * best:
        return
    if not _may_choose(evaluator, choices, config.micro_batch_size, bool(activations)):
        return
    of = config.layout, config.micro_batch_size, activations, baseline.context
    found.outcomes.insert(0, fsdp_outcome(evaluator, *of))
    del found.outcomes[max(keep, 2) :]


def _may_choose(
    evaluator: Evaluator, choices: Choices, micro_batch_size: int, recomputes: bool
) -> bool:
    """True if the choices and a run allow FSDP with this microbatch size."""
    profile = evaluator.profile
    return (
        choices.fsdp
        and not is_cpu(profile)  # predicted up to 14 % too fast there
        and (choices.pipeline is None or 1 in choices.pipeline)
        and 1 in choices.tensor
        and WHOLE in choices.layouts
        and True in choices.distributed_optimizer
        and (choices.micro_batch_size is None or micro_batch_size in choices.micro_batch_size)
        and (Recompute.NEEDED in choices.recompute or not recomputes)
        and not choices.pairs
        and not evaluator.state.optimizer_cpu_offload
        and not evaluator.state.grad_reduce_in_bf16  # a run reduces in fp32
        and not profile.offloads_weights
        and profile.dtype != "float16"
        and not any(layer.begins for layer in profile.layers)  # no cascade
    )
