"""What a config takes, roughly and at once: bounds and estimates for the order of the search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_pulse.backbone.costs import running_sum
from megatron_pulse.planner.cluster.cluster import HOST_ADAM_BYTES, Cluster, ClusterError
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import DEFAULT_STATE, ParameterState
from megatron_pulse.planner.schedule.bound.bounds import device_bound, last_gradients, memory_bound
from megatron_pulse.planner.schedule.bound.path import MicrobatchPath
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.step.replay import Edge, edges_of, link_bound
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.cuts.roomy import ChainOnCluster
from megatron_pulse.planner.tune.memory.sparing import round_trips
from megatron_pulse.planner.tune.stages import Stages, busiest_link_s
from megatron_pulse.profile.devices import known_device
from megatron_pulse.profile.profile import Profile

PARAMETER_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter as the distributed optimizer gathers it."""

OPTIMIZER_BYTES = 30
"""Bytes that Adam reads and writes for a parameter: gradient, copy and both moments in fp32. Used
where the profile has not measured it."""

HOST_AVERAGE_BYTES = 12
"""Of a node's memory that are read and written for a parameter's average, in fp32."""

HOST_ROUNDING_BYTES = 6
"""Of a node's memory that are read and written to round a parameter to half precision."""

HOST_BYTES_PER_S = 20e9
"""What of its node's memory a device's Adam reaches, roughly, where the cluster does not say."""

CPU_BYTES_PER_S = 10e9
"""Of a CPU's memory, roughly, where the cluster does not say what its devices reach."""


def memory_bytes_per_s(profile: Profile, cluster: Cluster) -> float:
    """What the cluster's devices read and write in a second, by their peak.

    Of a cluster whose device is a measured profile it is that of the GPU, or the CPU, that
    ``profile`` is of. Raises ClusterError where that is a GPU whose peak is not known.
    """
    known = cluster.peaks or known_device(profile.device)
    if known is not None:
        return known.bytes_per_s
    if _is_cpu(profile):
        return CPU_BYTES_PER_S
    raise ClusterError(
        f"cluster {cluster.name!r}: what the memory of its devices ({profile.device}) reaches is "
        "not known, and the optimizer's time depends on it: give the cluster's file "
        "'device: {tflops: X, bandwidth_gbs: Y}', the peaks of that device and of its memory"
    )


def host_adam_s(profile: Profile, cluster: Cluster, state: ParameterState) -> float:
    """Seconds of Adam on the host for a parameter: its gradient there in fp32, the step, and the
    parameter back, one after another, on all devices of a node at once.

    Raises ClusterError for a cluster of GPUs without a link to the host.
    """
    link = cluster.to_host
    if link is None and not _is_cpu(profile):
        raise no_way_to_host(cluster)
    copied = CPU_BYTES_PER_S if link is None else link.bytes_per_s
    reached = HOST_BYTES_PER_S
    if cluster.host_memory_gbs is not None:
        reached = cluster.host_memory_gbs * 1e9 / cluster.devices_per_node
    moved = HOST_ADAM_BYTES + HOST_AVERAGE_BYTES * state.averages
    moved += HOST_ROUNDING_BYTES * (profile.dtype != "float32")
    return (4 + PARAMETER_BYTES[profile.dtype]) / copied + moved / reached


def no_way_to_host(cluster: Cluster) -> ClusterError:
    """The error of a cluster whose optimizer is to be where no link is known to lead."""
    return ClusterError(
        f"cluster {cluster.name!r}: how its devices reach their node's memory is not known, where "
        "the optimizer is to be: write links.host into its file ('pulse probe' measures it), or "
        "leave out --optimizer-cpu-offload"
    )


def _is_cpu(profile: Profile) -> bool:
    return bool(profile.threads) or profile.device.startswith("CPU")


class Estimator(ChainOnCluster):
    """A chain whose configs are bounded and estimated, without and with their partition.

    ``self_conditioning`` is the share of the steps that run all forwards once before: times are the
    mean of steps with and without. Raises ClusterError where the optimizer's time is not known.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        global_batch_size: int,
        sequence_parallel: bool = False,
        num_heads: tuple[int, ...] = (),
        self_conditioning: float = 0.0,
        state: ParameterState = DEFAULT_STATE,
    ) -> None:
        self.self_conditioning = self_conditioning
        of = profile, cluster, global_batch_size
        super().__init__(*of, sequence_parallel, num_heads, state)
        self._spreads: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._reductions: dict[tuple[object, ...], float] = {}
        measured_s = sum(layer.optimizer_s for layer in profile.layers)
        self.adam_s = measured_s / max(
            1, sum(layer.trained_parameters for layer in profile.layers)
        ) or OPTIMIZER_BYTES / memory_bytes_per_s(profile, cluster)
        self._own_adam_s = self.adam_s
        if state.host_optimizer:
            self._own_adam_s = host_adam_s(profile, cluster, state)

    def quick_bound(self, config: Config) -> float:
        """No step of the config is shorter, however it is cut: all work, spread evenly as far as
        the largest layer lets it, and the optimizer.

        Neither is the way of one microbatch, nor the summing of gradients on the mean device. With
        one stage on a device these are summed after all but the last microbatch's, and device d
        idles while a microbatch is on those before it, for at least a share r of their loads (1
        with whole backwards, whose other part follows; else of forwards, for what is computed again
        keeps nobody waiting): M loads of its own and r
        of each of those fit into the step T. The loads can then come to all work W only if
        r W <= T (1 - (1 - r/M)^P).
        """
        totals, num = self.totals(config), config.pipeline
        work = totals.forward_s + totals.backward_s
        later = totals.weight_grad_s if config.split else 0.0
        count = config.num_microbatches(self.global_batch_size)
        again = totals.forward_s if config.recompute is Recompute.ALWAYS else 0.0
        least = max(count * max(work / num, totals.largest_s), work - later - again)
        reduced = self._least_reduction(config) / num
        if config.layout.num_chunks == 1:
            last = later if config.split else totals.backward_s
            reduced += (count * work - last) / num
            parts = config.split or config.recompute is not Recompute.NEVER
            if (share := totals.forward_share if parts else 1.0) > 0:
                fit = (1 - (1 - share / count) ** num) / share
                least = max(least, work / fit)
        least = max(least, reduced) + self.optimizer_s(config, totals.trained / num)
        return least + self._forwards_s(config)

    def _forwards_s(self, config: Config) -> float:
        """Seconds of the forwards before a step, spread evenly, in the mean of all steps."""
        if not self.self_conditioning:
            return 0.0
        count = config.num_microbatches(self.global_batch_size)
        return self.self_conditioning * count * self.totals(config).forward_s / config.pipeline

    def _least_reduction(self, config: Config) -> float:
        """Seconds that all devices together sum gradients and gather parameters, at the least."""
        if config.data == 1:
            return 0.0
        key = (
            config.pipeline,
            config.data,
            config.tensor,
            config.distributed_optimizer,
            config.pipeline_inside,
        )
        if key not in self._reductions:
            count = self.totals(config).trained
            self._reductions[key] = min(
                self._reduction(config, d, count) for d in range(config.pipeline)
            )
        return self._reductions[key]

    def _reduction(self, config: Config, device: int, parameters: float) -> float:
        """Seconds of summing the gradients of ``parameters`` over a device's replicas, and of
        gathering the parameters where these are divided."""
        ranks, dtype = self.ranks(config), self.profile.dtype
        scatter = config.distributed_optimizer
        seconds = ranks.reduce_s(device, parameters * self.gradient_bytes, scatter)
        if scatter:
            seconds += ranks.gather_s(device, parameters * PARAMETER_BYTES[dtype])
        return seconds

    def _reduced(
        self,
        config: Config,
        stages: Stages,
        problem: ScheduleProblem,
        path: MicrobatchPath,
        later: float = 0.0,
    ) -> float:
        """When all gradients are summed, at the earliest: a stage's begin with its last, so much
        ``later`` than these can be there."""
        if config.data == 1:
            return 0.0
        ready = [begin + later for begin in last_gradients(problem, path)]
        latest = 0.0
        for device in range(config.pipeline):
            own = stages.partition.placement.stages_of_device(device)
            held = 0.0
            for stage in sorted(own, key=lambda s: -ready[s]):
                held += stages.trained[stage]
                latest = max(latest, ready[stage] + self._reduction(config, device, held))
        return latest

    def bound(self, config: Config, stages: Stages | None = None) -> float:
        """No step of the config is shorter with these stages; raises UnfitError."""
        stages = stages or self.stages(config)
        problem = self.problem(config, config.num_microbatches(self.global_batch_size), stages)
        path = MicrobatchPath(problem.without_recomputation)
        least = _pipeline_bound(problem, path, stages)
        least = max(least, self._reduced(config, stages, problem, path))
        return least + self._afterwards_s(config, stages)

    def estimate(self, config: Config) -> float:
        """About what a step takes, from cuts that spread the work evenly."""
        loads, delay, link_s = self._spread(config)
        if not config.ample:
            loads += delay / config.pipeline
        held = self.totals(config).trained / config.pipeline
        return self._about(config, max(loads, link_s), delay, held)

    def cut_estimate(self, config: Config, stages: Stages, held: float | None = None) -> float:
        """About what a step takes with these stages, whether or not they fit; with ``held``
        parameters on the heaviest device in place of their own."""
        heaviest = max(stages.per_device(stages.trained)) if held is None else held
        work = max(stages.busy_s(config.split), self.held_s(config, stages))
        return self._about(config, work, _delay(stages.edges), heaviest)

    def timed_estimate(self, config: Config, stages: Stages) -> float:
        """The same, by when the last gradients of each stage can be summed; dearer (0.7 ms for
        0.1), and a better guide among cuts whose parameters differ."""
        count = config.num_microbatches(self.global_batch_size)
        problem = self.problem_of(config, count, stages, anyhow=True)
        work = max(stages.busy_s(config.split), self.held_s(config, stages))
        about = self._pipeline_s(config, work, _delay(stages.edges))
        path = MicrobatchPath(problem.without_recomputation)
        least = _pipeline_bound(problem, path, stages)
        later = max(0.0, about - least)
        longest = max(about, least, self._reduced(config, stages, problem, path, later))
        return longest + self._afterwards_s(config, stages)

    def _afterwards_s(self, config: Config, stages: Stages) -> float:
        """Seconds of the optimizer, and of the forwards before a step."""
        most = max(stages.per_device(stages.trained))
        return self.optimizer_s(config, most) + self._forwards_s(config)

    def optimizer_s(self, config: Config, parameters: float) -> float:
        """Seconds of Adam over the ``parameters`` of a rank."""
        parts = config.data if config.distributed_optimizer else 1
        return parameters * self._own_adam_s / parts

    def _about(self, config: Config, work: float, delay: float, held: float) -> float:
        ranks, size = self.ranks(config), self.gradient_bytes
        last = work * (2 / 3) / config.layout.num_chunks
        reduce_s = max(0.0, ranks.reduce_s(0, held * size, config.distributed_optimizer) - last)
        if config.distributed_optimizer:
            reduce_s += ranks.gather_s(0, held * PARAMETER_BYTES[self.profile.dtype])
        updated_s = reduce_s + self.optimizer_s(config, held)
        return self._pipeline_s(config, work, delay) + updated_s + self._forwards_s(config)

    def _pipeline_s(self, config: Config, work: float, delay: float) -> float:
        """About what all microbatches take whose busiest device computes ``work`` of each."""
        # Microbatches' worth of idling per further device, of equal stages with fused backwards.
        share = 1 / config.layout.num_chunks * (1 / 3 if config.split else 1)
        share *= 1 if config.ample or config.layout.num_chunks == 1 else 4 / 3
        steps = config.num_microbatches(self.global_batch_size) + share * (config.pipeline - 1)
        return steps * work + delay

    def _spread(self, config: Config) -> tuple[float, float, float]:
        """The work of a device, the delay of links, and what a device sends, of a microbatch.

        All are of cuts at equal shares of the work; a fold's skips stay at home.
        """
        key = (
            config.pipeline,
            config.tensor,
            config.micro_batch_size,
            config.layout.kind.name,
            config.layout.num_chunks,
            Recompute.NEVER if config.recompute.as_needed else config.recompute,
            config.pipeline_inside,
            config.split,
        )
        if key not in self._spreads:
            costs, placement = self.costs(config).of_schedule(config.split), config.placement
            work = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
            edges: tuple[Edge, ...] = ()
            if placement.num_stages > 1:
                cuts = even_cuts(work, placement.num_stages)
                link = self.ranks(config).link
                edges = edges_of(costs, Partition(placement, cuts), link)
            if placement.kind.mirrored:
                edges = tuple(e for e in edges if e.destination == e.source + 1)
            each = max(sum(work) / config.pipeline, max(work))
            self._spreads[key] = (each, _delay(edges), busiest_link_s(placement, edges))
        return self._spreads[key]


def even_cuts(work: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cuts at equal shares of ``work``, every stage with a layer or more."""
    total = running_sum(work)
    cuts = [0]
    for k in range(1, num_stages):
        near = int(np.searchsorted(total, total[-1] * k / num_stages))
        cuts.append(max(cuts[-1] + 1, min(near, len(work) - num_stages + k)))
    return (*cuts, len(work))


def _pipeline_bound(problem: ScheduleProblem, path: MicrobatchPath, stages: Stages) -> float:
    """All microbatches take no less, on devices and links."""
    least = max(device_bound(problem, path), memory_bound(problem, path))
    return max(least, link_bound(problem, stages.edges))


def _delay(edges: Iterable[Edge]) -> float:
    """How long a microbatch travels, there and back."""
    return sum(seconds for _, seconds in round_trips(edges))
