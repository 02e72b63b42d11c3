"""Simulated step of a config: schedule, step time, memory and traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import DEFAULT_STATE, ParameterState
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.planner.program.simulate import StageMessage, link_bound, simulate_step
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.tune.collectives import buckets
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.context_rank import (
    context_costs,
    exchanging_s,
    passes_of,
    sent_bytes,
)
from megatron_pulse.planner.tune.estimate import PARAMETER_BYTES, Estimator
from megatron_pulse.planner.tune.fsdp.baseline import (
    FsdpBaseline,
    collective_seconds,
    copying_s,
    fsdp_baseline,
    fsdp_configs,
    predict,
)
from megatron_pulse.planner.tune.fsdp.configs import FsdpConfig
from megatron_pulse.planner.tune.layer_costs import LayerCosts, Unfit, UnfitError
from megatron_pulse.planner.tune.link_contention import schedules
from megatron_pulse.planner.tune.memory.cap_retry import Caps, Make, fit_in, schedule_with_room
from megatron_pulse.planner.tune.memory.config_policy import ActivationPlanner
from megatron_pulse.planner.tune.memory.peak_memory import peak_bytes_in_schedule
from megatron_pulse.planner.tune.partitions.feasible import FeasiblePartitioner
from megatron_pulse.planner.tune.partitions.gradient_balance import GradientBalancer
from megatron_pulse.planner.tune.partitions.least_load import Partitioner
from megatron_pulse.planner.tune.stages import StageBuilder, Stages
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.weight_offload import offload_weights

CORE = 4
"""Maximum number of simulated microbatches per pipeline device. Each further microbatch adds the
mean increment of the last half."""

LARGE = 5000
"""Operations beyond which an evaluation takes the first schedule: searching for others takes
seconds."""

MOST = 500_000
"""Operations of a step beyond which no plan is made: finding any order of them takes long."""


@dataclass(frozen=True)
class Outcome:
    """Predicted step of a config that can run. Traffic is in bytes per sample, over all ranks.

    ``step_s`` sums the makespan of the pipeline, the exposed gradient reduction, the optimizer and
    ``first_pass_s``. The last is the mean cost of the forwards that a share of the steps runs once
    before. ``timeline`` belongs to ``problem``, which has fewer microbatches than the step if
    ``extrapolated``. With ``shapes`` times and traffic are the mean of their steps (see
    ``with_shapes``). Context-parallel ranks send ``context_bytes``, in which the device that sends
    longest spends ``context_s`` of a step; these seconds are part of its computation.
    """

    config: Config
    stages: Stages
    problem: ScheduleProblem
    synthesis: Synthesis
    timeline: Timeline
    global_batch_size: int
    step_s: float
    pipeline_s: float
    reduce_s: float
    optimizer_s: float
    bubble: float
    memory_bytes: tuple[float, ...]
    pipeline_bytes: float
    data_bytes: float
    extrapolated: bool
    first_pass_s: float = 0.0
    shapes: tuple[ShapeOutcome, ...] = ()
    context_bytes: float = 0.0
    context_s: float = 0.0

    def with_shapes(self, shapes: tuple[ShapeOutcome, ...]) -> Outcome:
        """Outcome of steps that each have samples of one of ``shapes``.

        Times and traffic are means weighted by shares, the bubble is that of the mean times. Memory
        is the largest of all shapes and of this outcome, whose microbatches may be of any shape.
        """
        assert not self.shapes, "the memory of this outcome alone is unknown"

        def mean(of: Callable[[Outcome], float]) -> float:
            return sum(shape.share * of(shape.outcome) for shape in shapes)

        pipeline_s = mean(lambda o: o.pipeline_s)
        every = (self.memory_bytes, *(shape.outcome.memory_bytes for shape in shapes))
        return replace(
            self,
            step_s=mean(lambda o: o.step_s),
            pipeline_s=pipeline_s,
            reduce_s=mean(lambda o: o.reduce_s),
            optimizer_s=mean(lambda o: o.optimizer_s),
            bubble=mean(lambda o: o.bubble * o.pipeline_s) / pipeline_s,
            memory_bytes=tuple(map(max, zip(*every, strict=True))),
            pipeline_bytes=mean(lambda o: o.pipeline_bytes),
            data_bytes=mean(lambda o: o.data_bytes),
            first_pass_s=mean(lambda o: o.first_pass_s),
            context_bytes=mean(lambda o: o.context_bytes),
            context_s=mean(lambda o: o.context_s),
            shapes=shapes,
        )

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.global_batch_size / self.step_s

    def figures(self) -> dict[str, float | list[float]]:
        """Predicted figures for plans and reports."""
        own = {"first_pass_s": self.first_pass_s} if self.first_pass_s else {}
        if self.config.context > 1:
            own |= {"context_bytes_per_sample": self.context_bytes, "context_s": self.context_s}
        return {
            **own,
            "step_s": self.step_s,
            "samples_per_s": self.throughput,
            "pipeline_s": self.pipeline_s,
            "exposed_reduction_s": self.reduce_s,
            "optimizer_s": self.optimizer_s,
            "bubble": self.bubble,
            "memory_bytes": list(self.memory_bytes),
            "pipeline_bytes_per_sample": self.pipeline_bytes,
            "data_bytes_per_sample": self.data_bytes,
        }


@dataclass(frozen=True)
class ShapeOutcome:
    """Predicted step of samples of one shape, a bucket, by the ``evaluator`` of its costs.

    ``name`` and ``share`` are those of ``ProfiledShape``.
    """

    name: str
    share: float
    outcome: Outcome
    evaluator: Evaluator


class Evaluator:
    """Simulation of configs of one backbone on one cluster, and the objects that lead to it.

    ::

        costs --> stages --> planner --> partitioner --> feasible --> balancer
                                |                                    ^
                                +--> estimator ----------------------+

    Arguments are those of ``LayerCosts``, the share ``self_conditioning`` of steps with
    self-conditioning, and ``dpo`` for a reference pass in every step. ``effort`` bounds the search
    for a schedule (see ``synthesize``), so that evaluations are reproducible. ``overlap`` hides
    gradient reduction behind computation where possible. Once ``stopped`` returns True, neither
    partitions nor FSDP2 are searched further.
    """

    effort = 6
    overlap = True
    stopped: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        global_batch_size: int,
        sequence_parallel: bool = False,
        num_heads: tuple[int, ...] = (),
        self_conditioning: float = 0.0,
        state: ParameterState = DEFAULT_STATE,
        transform: Callable[[ChainCosts], ChainCosts] | None = None,
        dpo: bool = False,
    ) -> None:
        self.profile, self.cluster, self.state = profile, cluster, state
        self.global_batch_size = global_batch_size
        self.self_conditioning, self.dpo = self_conditioning, dpo
        self.first_pass = 1.0 if dpo else self_conditioning
        """Share of steps that run all forwards once before."""
        self.costs = LayerCosts(
            profile,
            cluster,
            global_batch_size,
            sequence_parallel,
            num_heads,
            state,
            transform,
        )
        self.stages = StageBuilder(self.costs)
        self.planner = ActivationPlanner(self.stages)
        self.estimator = Estimator(self.planner, self.first_pass)
        self.partitioner = Partitioner(self.planner)
        self.feasible = FeasiblePartitioner(self.partitioner, lambda: self.stopped())
        self.balancer = GradientBalancer(self.feasible, self.estimator)
        self._simulated = lru_cache(maxsize=128)(self._simulate)

    def on(
        self,
        cluster: Cluster,
        state: ParameterState | None = None,
        profile: Profile | None = None,
    ) -> Evaluator:
        """Evaluator of the same batch on another cluster, or with another parameter state or
        profile."""
        costs = self.costs
        of = profile or self.profile, cluster, self.global_batch_size
        own = costs.sequence_parallel, costs.num_heads, self.self_conditioning
        return Evaluator(*of, *own, state or self.state, costs.transform, self.dpo)

    @property
    def offloading_weights(self) -> Evaluator | None:
        """Evaluator with all frozen weights in host memory.

        None if there are none, if some are there already, or without a link to the host.
        """
        frozen = any(layer.frozen_parameters for layer in self.profile.layers)
        if not frozen or self.cluster.host is None or self.profile.offloads_weights:
            return None
        return self.on(self.cluster, profile=offload_weights(self.profile, ["*"]))

    def not_sharded(self, context: Collection[int] | None = None) -> str:
        """Reason why FSDP2 and HSDP are not predicted with these context degrees (default: all that
        the profile knows); empty if they are."""
        devices, batch = self.cluster.num_devices, self.global_batch_size
        if self.first_pass:
            return f"not predicted with {'--dpo' if self.dpo else '--self-conditioning'}"
        if self._fsdp_context(context):
            return ""
        if list(context or self.costs.context_degrees()) == [1]:
            return f"not predicted: {devices} devices do not divide a global batch of {batch}"
        return (
            f"not predicted: {devices} devices, some of which share tokens, do not divide a global "
            f"batch of {batch}"
        )

    def _fsdp_context(self, asked: Collection[int] | None) -> list[int]:
        """Context degrees of FSDP that the devices, the heads and the batch allow."""
        devices, inside = self.cluster.num_devices, self.cluster.devices_per_node
        known = set(self.costs.context_degrees()) if asked is None else set(asked)
        if self.cluster.mixed or (costs := self.profile.context) is None:
            known &= {1}
        else:
            known = {size for size in known if not costs.refusal(size)}
        return [
            size
            for size in sorted(known)
            if devices % size == inside % size == 0 and self.global_batch_size * size % devices == 0
        ]

    def fsdp_baseline(
        self, sizes: Collection[int] | None = None, context: Collection[int] | None = None
    ) -> FsdpBaseline | None:
        """Best FSDP2 or HSDP configuration for the same batch and devices.

        Microbatches have one of ``sizes``. ``context`` are the degrees to try (default: all that
        the profile knows).

        Returns None if none fits, if ``not_sharded`` names a reason, or once ``stopped``.
        """
        if self.not_sharded(context):
            return None
        of = self.profile, self.cluster, self.global_batch_size
        own = self.estimator.adam_s, self.state.ema, not self.state.grad_reduce_in_bf16
        best: FsdpBaseline | None = None
        for size in self._fsdp_context(context):
            below_s = math.inf if best is None else best.step_s
            best = (
                fsdp_baseline(
                    *of, *own, self.stopped, sizes, size, below_s, self.state.optimizer_bytes
                )
                or best
            )
        return None if self.stopped() else best

    def fsdp_step(
        self,
        layout: FsdpLayout,
        micro_batch_size: int,
        activations: ActivationPolicies,
        context: int = 1,
    ) -> FsdpBaseline:
        """Predicted step of one FSDP layout with these activation policies, whether or not it
        fits."""
        of = self.profile, self.cluster, self.global_batch_size, [micro_batch_size]
        own = self.state.ema, not self.state.grad_reduce_in_bf16
        configs = fsdp_configs(*of, *own, context, self.state.optimizer_bytes)
        fitted = configs.costed(FsdpConfig(micro_batch_size, layout), activations)
        byte_s = copying_s(self.profile, self.estimator.adam_s)
        transfers = collective_seconds(self.cluster, fitted.sharding, byte_s)
        return predict(configs, fitted, transfers, self.estimator.adam_s)

    @property
    def offloads_activations(self) -> bool:
        """True if activations may be offloaded: not beside offloaded weights."""
        return self.cluster.host is not None and not self.profile.offloads_weights

    def candidates(self, choices: Choices) -> list[Config]:
        """Configs of ``choices`` that use every device and divide the batch.

        On unlike devices, each comes in several orders of the devices (``LayerCosts.orders``).
        Optimizer offload always implies the distributed optimizer.
        """
        cluster, has_skips = self.cluster, bool(self.profile.skips)
        devices, inside = cluster.num_devices, cluster.devices_per_node
        if self.state.optimizer_cpu_offload:
            choices = replace(choices, distributed_optimizer=(True,))
        if choices.context is None:
            choices = replace(choices, context=self.costs.context_degrees())
        if not self.costs.profile.selects:
            known = tuple(r for r in choices.recompute if r is not Recompute.SELECTIVE)
            choices = replace(choices, recompute=known)
        every = configs(devices, inside, self.global_batch_size, has_skips, choices)
        return [each for config in every for each in self.costs.orders(config)]

    def refuse(self, config: Config) -> None:
        """Raise UnfitError for a config that no partition can make fit, or whose step is too long
        to plan."""
        self.costs.refuse(config)
        if (size := self.size(config, whole=True)) > MOST:
            said = f"{config}: a step has {size:,} operations, the maximum is {MOST:,}"
            raise UnfitError(Unfit.LONG, said)

    def simulated_microbatches(self, config: Config) -> int:
        """Microbatches per step that ``evaluate`` simulates."""
        return min(self.costs.num_microbatches(config), CORE * config.pipeline)

    def size(self, config: Config, whole: bool = False) -> int:
        """Operations that ``evaluate`` schedules and simulates, or those of a whole step."""
        count = self.costs.num_microbatches(config)
        kinds, stages = 3 if config.split else 2, config.pipeline * config.layout.num_chunks
        return (count if whole else self.simulated_microbatches(config)) * stages * kinds

    def cut(self, config: Config, partition: Partition) -> Stages:
        """Stages of the config with these cuts, whether or not they fit."""
        return self.planner.cut(config, partition)

    def problem(
        self, config: Config, num_microbatches: int, stages: Stages | None = None
    ) -> ScheduleProblem:
        """Schedule problem of the stages (default: ``feasible.best``), with memory in bytes. Raises
        UnfitError."""
        return self.stages.problem(config, num_microbatches, stages or self.feasible.best(config))

    def bound(self, config: Config, stages: Stages | None = None) -> float:
        """Lower bound on the step time with these stages (default: ``feasible.best``). Raises
        UnfitError."""
        return self.estimator.bound(config, stages or self.feasible.best(config))

    def evaluate(
        self,
        config: Config,
        synthesis: Synthesis | None = None,
        quick: bool = False,
        stages: Stages | None = None,
    ) -> Outcome:
        """Simulate the config's step. Raises UnfitError.

        At most ``CORE`` microbatches per device are simulated; the rate at the end is extrapolated.
        A given ``synthesis`` for all microbatches is simulated as a whole. A ``quick`` schedule is
        found several times sooner. Its step is some percent longer, or more if memory is short.
        """
        stages = stages or self.feasible.best(config)
        count = self.costs.num_microbatches(config)
        core = count if synthesis is not None else self.simulated_microbatches(config)
        problem = self.problem(config, core, stages)
        if synthesis is None:
            effort = 0 if quick or self.size(config) > LARGE else self.effort
            make = partial(self._simulated, edges=stages.edges, effort=effort)
            found, timeline, memory, caps = self.with_room(config, stages, problem, make)
        else:
            timeline = simulate_step(problem, synthesis.schedule, stages.edges).timeline
            found, caps = synthesis, problem.cap
            memory = self.peak_bytes(config, stages, synthesis.schedule)
        makespan = timeline.makespan
        pipeline_s = makespan + stages.embedder_copy_s
        if count > core:
            pipeline_s += (count - core) * self._pace(config, stages, timeline, effort, caps)
        last = {
            stage: (timeline.start[op], timeline.end[op])
            for stage, op in completing(timeline.schedule).items()
        }
        reduce_s = self.exposed_reduction(config, stages, last, makespan)
        own_s = 0.0
        if self.first_pass:
            forwards = simulate_step(problem, found.schedule.forward_only(), stages.edges).timeline
            more_s = (count - core) * max(forwards.busy) / core
            own_s = self.first_pass * (forwards.makespan + more_s)
        held = stages.per_device(stages.trained)
        optimizer_s = self.estimator.optimizer_of_devices(config, held)
        busy = sum(timeline.busy) / core * count / config.pipeline
        shards = config.tensor * config.context
        moved = volume(stages.costs, stages.partition).total * shards
        gradient = self.costs.gradient_bytes
        back = PARAMETER_BYTES[self.profile.dtype] if config.distributed_optimizer else gradient
        exchanged_bytes, exchanged_s = self.exchanged(config, stages)
        reduced = (config.replicas - 1) * (gradient + back) * sum(held) * config.tensor
        return Outcome(
            config=config,
            stages=stages,
            problem=problem,
            synthesis=found,
            timeline=timeline,
            global_batch_size=self.global_batch_size,
            step_s=max(pipeline_s + reduce_s + optimizer_s + own_s, self.bound(config, stages)),
            pipeline_s=pipeline_s,
            reduce_s=reduce_s,
            optimizer_s=optimizer_s,
            bubble=max(0.0, 1 - busy / pipeline_s),
            memory_bytes=memory,
            pipeline_bytes=moved / config.micro_batch_size,
            data_bytes=reduced / self.global_batch_size,
            extrapolated=count > core,
            first_pass_s=own_s,
            context_bytes=exchanged_bytes,
            context_s=exchanged_s,
        )

    def exchanged(self, config: Config, stages: Stages) -> tuple[float, float]:
        """Bytes per sample that context-parallel ranks send, over all ranks; seconds of a step that
        the device that sends longest spends on it."""
        if config.context == 1:
            return 0.0, 0.0
        activations, costs = stages.activations, context_costs(self.profile)
        passes_of_layers = passes_of(self.profile, activations, self.first_pass)
        of = self.cluster, config.context, costs.is_ring(config.context)
        seconds = [0.0] * config.pipeline
        for i, (layer, passes) in enumerate(zip(costs.layers, passes_of_layers, strict=True)):
            of_heads = replace(layer, all_to_all_bytes=layer.all_to_all_bytes // config.tensor)
            each_s = exchanging_s(*of, of_heads, config.micro_batch_size)
            spent_s = sum(count * pass_s for count, pass_s in zip(passes, each_s, strict=True))
            seconds[stages.partition.device_of_layer(i)] += spent_s
        degrees = config.context, config.tensor
        sent = sum(sent_bytes(self.profile, *degrees, activations, self.first_pass))
        return sent, self.costs.num_microbatches(config) * max(seconds)

    def has_room(self, outcome: Outcome) -> bool:
        """True if the outcome's schedule fits the devices.

        The caps are not enough: they count working memory apart from what an operation works on,
        and omit skips between stages of one device.
        """
        return fit_in(outcome.memory_bytes, outcome.stages.usable_bytes)

    def with_room(
        self,
        config: Config,
        stages: Stages,
        problem: ScheduleProblem,
        make: Make,
        has_time: Callable[[], bool] = lambda: True,
    ) -> tuple[Synthesis, Timeline, tuple[float, ...], Caps]:
        """First schedule of ``make`` that fits every device (``schedule_with_room``)."""
        peaks, limits = partial(self.peak_bytes, config, stages), stages.usable_bytes
        least = stages.per_device(stages.kept_bytes(config.split))
        return schedule_with_room(problem, make, peaks, limits, least, has_time)

    def peak_bytes(self, config: Config, stages: Stages, schedule: Schedule) -> tuple[float, ...]:
        """Peak bytes of each device in the schedule."""
        times = self.costs.times_at(config)
        parts = self.costs.parts(config.tensor)
        return stages.memory_bytes(peak_bytes_in_schedule(stages, times, parts, schedule))

    def _simulate(
        self,
        problem: ScheduleProblem,
        edges: tuple[StageMessage, ...],
        effort: int,
        bounded: bool = True,
    ) -> list[tuple[Synthesis, Timeline]]:
        """Schedules of that effort and of effort 0 with their timelines, shortest first."""
        made = schedules(problem, edges, effort, bounded)
        if effort:
            made = [*made, *self._simulated(problem, edges, 0)]
        return sorted(made, key=lambda each: each[1].makespan)

    def _pace(
        self, config: Config, stages: Stages, timeline: Timeline, effort: int, caps: Caps
    ) -> float:
        """Seconds of one more microbatch: the mean increment of the last half of those
        simulated."""
        count = timeline.schedule.num_microbatches
        fewer = self.problem(config, max(1, count // 2), stages)
        if fewer.cap is not None and caps is not None:
            fewer = replace(fewer, cap=tuple(map(min, fewer.cap, caps)))
        shorter = self._simulated(fewer, stages.edges, effort, effort > 0)[0][1].makespan
        measured = (timeline.makespan - shorter) / (count - fewer.num_microbatches)
        link = link_bound(replace(fewer, num_microbatches=1), stages.edges)
        return max(measured, max(timeline.busy) / count, link)

    def buckets(self, config: Config, stages: Stages, stage: int) -> tuple[int, ...]:
        """Elements of a stage's gradient buckets in the order in which they fill.

        A layer's parameters count as one tensor.
        """
        counts = [
            stages.costs.trained_parameters[i] for i in stages.partition.layers_of_stage(stage)
        ]
        return buckets(counts, config.replicas, config.distributed_optimizer, first=stage == 0)

    def exposed_reduction(
        self,
        config: Config,
        stages: Stages,
        last: Mapping[int, tuple[float, float]],
        makespan: float,
    ) -> float:
        """Seconds from the end of the pipeline until gradients are reduced and parameters gathered.

        A device reduces its stages' buckets one after another. Buckets fill evenly between the
        start and end in ``last`` of the operation that completes the stage's gradients. Parameters
        are gathered in the same buckets.
        """
        if config.replicas == 1:
            return 0.0
        ranks, placement = self.costs.ranks(config), stages.partition.placement
        dtype, scatter = self.profile.dtype, config.distributed_optimizer
        latest = makespan
        for device in range(config.pipeline):
            free, gather_s = 0.0, 0.0
            for stage in sorted(placement.stages_of_device(device), key=lambda s: last[s][1]):
                begin, end = last[stage] if self.overlap else (makespan,) * 2
                sizes, filled = self.buckets(config, stages, stage), 0
                for size in sizes:
                    filled += size
                    full = begin + (end - begin) * filled / sum(sizes)
                    num_bytes = size * self.costs.gradient_bytes
                    summed_s = ranks.reduce_s(device, num_bytes, scatter)
                    free = max(free, full) + summed_s
                    if scatter:
                        gather_s += ranks.gather_s(device, size * PARAMETER_BYTES[dtype])
            latest = max(latest, free + gather_s)
        return latest - makespan


def completing(schedule: Schedule) -> dict[int, Operation]:
    """Operation that completes each stage's gradients: that of the last microbatch."""
    final = OpType.WEIGHT_GRAD if OpType.WEIGHT_GRAD in schedule.kinds else OpType.BACKWARD
    last = schedule.num_microbatches - 1
    return {s: Operation(final, s, last) for s in range(schedule.placement.num_stages)}
