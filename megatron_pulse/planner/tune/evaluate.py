"""What a config takes, by simulating the schedule that would run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_pulse.planner.replay import link_bound, replay
from megatron_pulse.planner.schedule.bounds import device_bound
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.simulate import Timeline
from megatron_pulse.planner.schedule.synthesize import synthesize
from megatron_pulse.planner.schedule.validate import peak_activations
from megatron_pulse.planner.tune.config import Config, Layout
from megatron_pulse.planner.tune.stages import Chain, Stages
from megatron_pulse.planner.volume import volume

GRADIENT_BYTES: Mapping[str, int] = {"bfloat16": 4, "float16": 2, "float32": 4}
"""Bytes of a gradient as Megatron sums it over replicas."""

PARAMETER_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter as the distributed optimizer gathers it."""

BUCKET_PARAMETERS = 40_000_000
"""Megatron's bucket: gradients that are summed over replicas together, at the least."""

OPTIMIZER_BYTES = 30
"""Bytes that Adam reads and writes for a parameter: gradient, copy and both moments in fp32."""

_BUBBLE: Mapping[Layout, float] = {
    Layout.WHOLE: 0.0,
    Layout.SEQUENTIAL: 1.0,
    Layout.INTERLEAVED: 0.5,
    Layout.FOLD_EXACT: 0.5,
    Layout.FOLD_SOFT: 0.5,
    Layout.TWO_WAVES: 0.25,
}
"""Microbatches' worth of idling per further device, of equal stages with fused backwards."""

CPU_BYTES_PER_S = 10e9
"""Of memory, roughly, where the cluster does not say what its devices reach."""


@dataclass(frozen=True)
class Outcome:
    """A config that can run, and what it would take; bytes are of one sample, sent by all ranks.

    ``step_s`` is the makespan of the pipeline, the part of the reduction of gradients that nothing
    hides, and the optimizer. ``timeline`` is of ``problem``, which has fewer microbatches than the
    step where ``extrapolated``.
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

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.global_batch_size / self.step_s


def _times(problem: ScheduleProblem) -> list[tuple[float, ...]]:
    return [problem.forward, problem.backward, problem.weight_grad or (0.0,) * len(problem.forward)]


class Evaluator(Chain):
    """A chain whose configs are simulated.

    ``effort`` bounds the search for a schedule (see ``synthesize``), so that an evaluation is quick
    and always comes to the same. ``overlap`` hides the reduction of gradients where it can be.
    """

    effort = 6
    overlap = True

    def quick_bound(self, config: Config) -> float:
        """No step of the config is shorter: all work, spread evenly, and the optimizer."""
        costs = self.costs(config)
        work = (sum(costs.forward_s) + sum(costs.backward_s)) / config.pipeline
        count = config.num_microbatches(self.global_batch_size)
        return count * work + self._optimizer_s(config, sum(costs.parameters) / config.pipeline)

    def estimate(self, config: Config, stages: Stages | None = None) -> float:
        """About what a step takes, for the order in which configs are looked at."""
        costs, count = self.costs(config), config.num_microbatches(self.global_batch_size)
        work = (sum(costs.forward_s) + sum(costs.backward_s)) / config.pipeline
        held = sum(costs.parameters) / config.pipeline
        if stages is not None:
            problem = self.problem(config, 1)
            loads = stages.per_device(tuple(map(sum, zip(*_times(problem), strict=True))))
            work = max(*loads, link_bound(problem, stages.edges))
            held = max(stages.per_device(stages.parameters))
        share = _BUBBLE[config.layout] * (1 / 3 if config.split else 1)
        share *= 1 if config.ample or config.layout.num_chunks == 1 else 4 / 3
        ranks, size = self.ranks(config), GRADIENT_BYTES[self.profile.dtype]
        last = work * (2 / 3) / config.layout.num_chunks
        reduce_s = max(0.0, ranks.reduce_s(0, held * size, config.distributed_optimizer) - last)
        if config.distributed_optimizer:
            reduce_s += ranks.gather_s(0, held * PARAMETER_BYTES[self.profile.dtype])
        steps = count + share * (config.pipeline - 1)
        return steps * work + reduce_s + self._optimizer_s(config, held)

    def bound(self, config: Config) -> float:
        """No step of the config is shorter, its partition known; raises UnfitError."""
        stages = self.stages(config)
        problem = self.problem(config, config.num_microbatches(self.global_batch_size))
        most = max(stages.per_device(stages.parameters))
        least = max(device_bound(problem), link_bound(problem, stages.edges))
        return least + self._optimizer_s(config, most)

    def evaluate(self, config: Config, synthesis: Synthesis | None = None) -> Outcome:
        """The config's step; raises UnfitError.

        Of a step of more than 3P microbatches only as many are simulated, and the rate at the end
        goes on. A ``synthesis`` for all microbatches is simulated as it is.
        """
        stages = self.stages(config)
        count = config.num_microbatches(self.global_batch_size)
        core = count if synthesis is not None else min(count, 3 * config.pipeline)
        problem = self.problem(config, core)
        found = synthesis or self._synthesize(problem)
        timeline = replay(problem, found.schedule, stages.edges).timeline
        pipeline_s = timeline.makespan
        if count > core:
            pipeline_s += (count - core) * self._pace(config, stages, timeline)
        reduce_s = self._exposed_reduction(config, stages, timeline)
        held = stages.per_device(stages.parameters)
        optimizer_s = self._optimizer_s(config, max(held))
        busy = sum(timeline.busy) / core * count / config.pipeline
        peaks = peak_activations(found.schedule, stages.saved_bytes)
        memory = zip(stages.state_bytes, stages.transient_bytes, peaks, strict=True)
        moved = volume(stages.costs, stages.partition).total * config.tensor
        gradient = GRADIENT_BYTES[self.profile.dtype]
        reduced = 2 * (config.data - 1) * gradient * sum(held) * config.tensor
        return Outcome(
            config=config,
            stages=stages,
            problem=problem,
            synthesis=found,
            timeline=timeline,
            global_batch_size=self.global_batch_size,
            step_s=max(pipeline_s + reduce_s + optimizer_s, self.bound(config)),
            pipeline_s=pipeline_s,
            reduce_s=reduce_s,
            optimizer_s=optimizer_s,
            bubble=1 - busy / pipeline_s,
            memory_bytes=tuple(map(sum, memory)),
            pipeline_bytes=moved / config.micro_batch_size,
            data_bytes=reduced / self.global_batch_size,
            extrapolated=count > core,
        )

    def _synthesize(self, problem: ScheduleProblem) -> Synthesis:
        return synthesize(problem, seconds=math.inf, effort=self.effort)

    def _pace(self, config: Config, stages: Stages, timeline: Timeline) -> float:
        """Seconds of one more microbatch: what the last P of those simulated add."""
        count = timeline.schedule.num_microbatches
        fewer = self.problem(config, max(1, count - config.pipeline))
        schedule = self._synthesize(fewer).schedule
        shorter = replay(fewer, schedule, stages.edges).timeline.makespan
        measured = (timeline.makespan - shorter) / (count - fewer.num_microbatches)
        link = link_bound(replace(fewer, num_microbatches=1), stages.edges)
        return max(measured, max(timeline.busy) / count, link)

    def _optimizer_s(self, config: Config, parameters: float) -> float:
        peaks = self.cluster.peaks
        rate = peaks.bytes_per_s if peaks is not None else CPU_BYTES_PER_S
        parts = config.data if config.distributed_optimizer else 1
        return parameters * OPTIMIZER_BYTES / parts / rate

    def _exposed_reduction(self, config: Config, stages: Stages, timeline: Timeline) -> float:
        """How much later than the pipeline gradients are summed and parameters gathered.

        A device sums its stages' gradients one stage after another. A stage's begin with the last
        microbatch's gradients, bucket by bucket; the last bucket waits for its end.
        """
        if config.data == 1:
            return 0.0
        ranks, placement = self.ranks(config), stages.partition.placement
        dtype, scatter = self.profile.dtype, config.distributed_optimizer
        final = Kind.WEIGHT_GRAD if config.split else Kind.BACKWARD
        last: dict[int, tuple[float, float]] = {}
        for op, end in timeline.end.items():
            if op.kind is final and op.microbatch + 1 == timeline.schedule.num_microbatches:
                last[op.stage] = (timeline.start[op], end)
        latest = timeline.makespan
        for device in range(config.pipeline):
            free, own = 0.0, placement.stages_of_device(device)
            for stage in sorted(own, key=lambda s: last[s][1]):
                if not (count := stages.parameters[stage]):
                    continue
                whole = ranks.reduce_s(device, count * GRADIENT_BYTES[dtype], scatter)
                begin, end = last[stage] if self.overlap else (timeline.makespan,) * 2
                tail = whole * min(1.0, BUCKET_PARAMETERS / count)
                free = max(max(begin, free) + whole - tail, end) + tail
            if scatter:
                held = sum(stages.parameters[s] for s in own)
                free += ranks.gather_s(device, held * PARAMETER_BYTES[dtype])
            latest = max(latest, free)
        return latest - timeline.makespan
