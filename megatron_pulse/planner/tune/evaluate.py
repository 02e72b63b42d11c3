"""What a config takes, by simulating the schedule that would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.step.replay import Edge, link_bound, replay
from megatron_pulse.planner.tune.collectives import buckets
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.cuts.lower_caps import Caps, WithRoom
from megatron_pulse.planner.tune.estimate import PARAMETER_BYTES
from megatron_pulse.planner.tune.queueing import schedules
from megatron_pulse.planner.tune.sharded.opponent import Opponent, opponent
from megatron_pulse.planner.tune.stages import Stages

CORE = 4
"""Microbatches for each pipeline device that are simulated, at the most; what the last half of them
adds, one more does. Steps are 4 % off then (mean of thirty configs, U-ViT and SD v2)."""

LARGE = 5000
"""Operations beyond which an evaluation takes the first schedule: others take seconds to find."""

MOST = 500_000
"""Operations of a step beyond which it is not planned: to find any order of them takes long."""


@dataclass(frozen=True)
class Outcome:
    """A config that can run, and what it would take; bytes are of one sample, sent by all ranks.

    ``step_s`` is the makespan of the pipeline, the part of the reduction of gradients that nothing
    hides, the optimizer, and what ``self_conditioning`` (the share of the steps that run all
    forwards once before) adds in the mean, ``self_conditioning_s``. ``timeline`` is of ``problem``,
    which has fewer microbatches than the step where ``extrapolated``.
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
    self_conditioning: float = 0.0
    self_conditioning_s: float = 0.0

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.global_batch_size / self.step_s

    def figures(self) -> dict[str, float | list[float]]:
        """What is predicted, as plans and reports keep it."""
        own = {"self_conditioning_s": self.self_conditioning_s} if self.self_conditioning else {}
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


class Evaluator(WithRoom):
    """A chain whose configs are simulated.

    ``effort`` bounds the search for a schedule (see ``synthesize``), so that an evaluation always
    comes to the same. ``overlap`` hides the reduction of gradients where it can be.
    """

    effort = 6
    overlap = True

    @cached_property
    def _simulated(
        self,
    ) -> Callable[..., list[tuple[Synthesis, Timeline]]]:
        return lru_cache(maxsize=128)(self._simulate)

    def on(self, cluster: Cluster, state: ParameterState | None = None) -> Evaluator:
        """The same backbone and batch on another cluster, or with another state of parameters."""
        of = self.profile, cluster, self.global_batch_size, self.sequence_parallel, self.num_heads
        return Evaluator(*of, self.self_conditioning, state or self.state)

    @property
    def not_sharded(self) -> str:
        """Why FSDP2 and HSDP are not predicted; empty where they are."""
        devices, batch = self.cluster.num_devices, self.global_batch_size
        if self.self_conditioning:
            return "is not predicted with --self-conditioning"
        if batch % devices:
            return f"is not predicted: {devices} devices do not divide a batch of {batch}"
        return ""

    def fully_sharded(self) -> Opponent | None:
        """FSDP2 or HSDP at its best for the same batch on the same devices; None where none fits,
        where it is ``not_sharded``, or once it is to be ``stopped``."""
        if self.not_sharded:
            return None
        of = self.profile, self.cluster, self.global_batch_size
        return opponent(*of, self.adam_s, self.state.averages, self.stopped)

    def candidates(self, choices: Choices) -> list[Config]:
        """Every config of ``choices`` that uses all devices and divides the batch; on the host the
        optimizer is the distributed one, whatever they say."""
        cluster, has_skips = self.cluster, bool(self.profile.skips)
        devices, inside = cluster.num_devices, cluster.devices_per_node
        if self.state.host_optimizer:
            choices = replace(choices, distributed_optimizer=(True,))
        if not self.profile.selects:
            known = tuple(r for r in choices.recompute if r is not Recompute.SELECTIVE)
            choices = replace(choices, recompute=known)
        return list(configs(devices, inside, self.global_batch_size, has_skips, choices))

    def refuse(self, config: Config) -> None:
        """Raises UnfitError for what no partition can mend, and for steps that are too long."""
        super().refuse(config)
        if (size := self.size(config, whole=True)) > MOST:
            said = f"{config}: {size:,} operations of a step, {MOST:,} can be planned"
            raise UnfitError(Unfit.LONG, said)

    def simulated_microbatches(self, config: Config) -> int:
        """Microbatches of which ``evaluate`` simulates a step."""
        return min(config.num_microbatches(self.global_batch_size), CORE * config.pipeline)

    def size(self, config: Config, whole: bool = False) -> int:
        """Operations of which ``evaluate`` finds and simulates a schedule, or of a whole step."""
        count = config.num_microbatches(self.global_batch_size)
        kinds, stages = 3 if config.split else 2, config.pipeline * config.layout.num_chunks
        return (count if whole else self.simulated_microbatches(config)) * stages * kinds

    def evaluate(
        self,
        config: Config,
        synthesis: Synthesis | None = None,
        quick: bool = False,
        stages: Stages | None = None,
    ) -> Outcome:
        """The config's step; raises UnfitError.

        Of a long step only ``CORE`` microbatches for each device are simulated, and the rate at the
        end goes on. A ``synthesis`` for all microbatches is simulated as it is. A ``quick``
        schedule is some percent longer where there is room for activations, more where there is
        not, and several times as soon found.
        """
        stages = stages or self.stages(config)
        count = config.num_microbatches(self.global_batch_size)
        core = count if synthesis is not None else self.simulated_microbatches(config)
        problem = self.problem(config, core, stages)
        if synthesis is None:
            effort = 0 if quick or self.size(config) > LARGE else self.effort
            make = partial(self._simulated, edges=stages.edges, effort=effort)
            found, timeline, memory, caps = self.with_room(config, stages, problem, make)
        else:
            timeline = replay(problem, synthesis.schedule, stages.edges).timeline
            found, caps = synthesis, problem.cap
            memory = self.held(config, stages, synthesis.schedule)
        makespan = timeline.makespan
        pipeline_s = makespan + stages.copying_s
        if count > core:
            pipeline_s += (count - core) * self._pace(config, stages, timeline, effort, caps)
        last = {
            stage: (timeline.start[op], timeline.end[op])
            for stage, op in completing(timeline.schedule).items()
        }
        reduce_s = self.exposed_reduction(config, stages, last, makespan)
        own_s = 0.0
        if self.self_conditioning:
            forwards = replay(problem, found.schedule.forward_only(), stages.edges).timeline
            more_s = (count - core) * max(forwards.busy) / core
            own_s = self.self_conditioning * (forwards.makespan + more_s)
        held = stages.per_device(stages.trained)
        optimizer_s = self.optimizer_s(config, max(held))
        busy = sum(timeline.busy) / core * count / config.pipeline
        moved = volume(stages.costs, stages.partition).total * config.tensor
        gradient = self.gradient_bytes
        back = PARAMETER_BYTES[self.profile.dtype] if config.distributed_optimizer else gradient
        reduced = (config.data - 1) * (gradient + back) * sum(held) * config.tensor
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
            self_conditioning=self.self_conditioning,
            self_conditioning_s=own_s,
        )

    def has_room(self, outcome: Outcome) -> bool:
        """Whether devices have the memory that the outcome's schedule takes; caps count what works
        apart from what it works on, and skips between stages of a device not at all."""
        return self.fit_in(outcome.memory_bytes)

    def _simulate(
        self,
        problem: ScheduleProblem,
        edges: tuple[Edge, ...],
        effort: int,
        bounded: bool = True,
    ) -> list[tuple[Synthesis, Timeline]]:
        """Schedules of that effort or none, the soonest first, and when everything happens."""
        made = schedules(problem, edges, effort, bounded)
        if effort:
            made = [*made, *self._simulated(problem, edges, 0)]
        return sorted(made, key=lambda each: each[1].makespan)

    def _pace(
        self, config: Config, stages: Stages, timeline: Timeline, effort: int, caps: Caps
    ) -> float:
        """Seconds of one more microbatch: what the last half of those simulated adds."""
        count = timeline.schedule.num_microbatches
        fewer = self.problem(config, max(1, count // 2), stages)
        if fewer.cap is not None and caps is not None:
            fewer = replace(fewer, cap=tuple(map(min, fewer.cap, caps)))
        shorter = self._simulated(fewer, stages.edges, effort, effort > 0)[0][1].makespan
        measured = (timeline.makespan - shorter) / (count - fewer.num_microbatches)
        link = link_bound(replace(fewer, num_microbatches=1), stages.edges)
        return max(measured, max(timeline.busy) / count, link)

    def buckets(self, config: Config, stages: Stages, stage: int) -> tuple[int, ...]:
        """Elements of the buckets in which Megatron sums a stage's gradients, as they fill.

        A layer's parameters are taken to be one tensor.
        """
        counts = [
            stages.costs.trained_parameters[i] for i in stages.partition.layers_of_stage(stage)
        ]
        return buckets(counts, config.data, config.distributed_optimizer, first=stage == 0)

    def exposed_reduction(
        self,
        config: Config,
        stages: Stages,
        last: Mapping[int, tuple[float, float]],
        makespan: float,
    ) -> float:
        """How much later than the pipeline gradients are summed and parameters gathered.

        A device sums its stages' buckets one after another, each when what completes the stage's
        gradients, from begin to end as ``last`` says, has filled it; parameters are gathered in the
        same buckets.
        """
        if config.data == 1:
            return 0.0
        ranks, placement = self.ranks(config), stages.partition.placement
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
                    summed_s = ranks.reduce_s(device, size * self.gradient_bytes, scatter)
                    free = max(free, full) + summed_s
                    if scatter:
                        gather_s += ranks.gather_s(device, size * PARAMETER_BYTES[dtype])
            latest = max(latest, free + gather_s)
        return latest - makespan


def completing(schedule: Schedule) -> dict[int, Operation]:
    """What completes each stage's gradients: that of the last microbatch."""
    final = Kind.WEIGHT_GRAD if Kind.WEIGHT_GRAD in schedule.kinds else Kind.BACKWARD
    last = schedule.num_microbatches - 1
    return {s: Operation(final, s, last) for s in range(schedule.placement.num_stages)}
