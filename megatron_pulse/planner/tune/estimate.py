"""Lower bounds and estimates of a config's step time, without a schedule; they order the search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from megatron_pulse.backbone.costs import running_sum
from megatron_pulse.planner.cluster.cluster import HOST_ADAM_BYTES, Cluster, ClusterError
from megatron_pulse.planner.cluster.device_kinds import DeviceKind
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.program.simulate import StageMessage, edges_of, link_bound
from megatron_pulse.planner.schedule.bound.bounds import device_bound, last_gradients, memory_bound
from megatron_pulse.planner.schedule.bound.microbatch_path import MicrobatchPath
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.memory.config_policy import ActivationPlanner, round_trips
from megatron_pulse.planner.tune.stages import Stages, busiest_link_s
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import known_device

PARAMETER_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per parameter in the all-gather of the distributed optimizer."""

OPTIMIZER_BYTES = 30
"""Bytes that Adam reads and writes per parameter: gradient, copy and both moments in fp32. Used if
the profile has no measurement."""

HOST_AVERAGE_BYTES = 12
"""Bytes of host memory traffic per parameter for an EMA in fp32."""

HOST_ROUNDING_BYTES = 6
"""Bytes of host memory traffic per parameter for rounding to half precision."""

HOST_BYTES_PER_S = 20e9
"""Approximate host memory bandwidth of one device's Adam, if the cluster does not say."""

CPU_BYTES_PER_S = 10e9
"""Approximate memory bandwidth of a CPU, if the cluster does not say."""


def memory_bytes_per_s(profile: Profile, cluster: Cluster, kind: DeviceKind) -> float:
    """Peak memory bandwidth of the cluster's devices of a kind, in bytes per second.

    If the cluster names a measured profile as its device, the bandwidth is that of the GPU or CPU
    in ``profile``. Raises ClusterError for a GPU of unknown peak.
    """
    known = kind.peaks or known_device(profile.device)
    if known is not None:
        return known.bytes_per_s
    if is_cpu(profile):
        return CPU_BYTES_PER_S
    raise ClusterError(
        f"cluster {cluster.name!r}: the memory bandwidth of its devices ({profile.device}) is "
        "unknown, and the optimizer's time depends on it. Write the device's peaks into the "
        "cluster file: 'device: {tflops: X, bandwidth_gbs: Y}'"
    )


def host_adam_s(profile: Profile, cluster: Cluster, state: ParameterState) -> float:
    """Seconds of Adam on the host per parameter, with all devices of a node at work.

    The fp32 gradient is copied to the host, the step runs, and the parameter is copied back, one
    after another. Raises ClusterError for a cluster of GPUs without a link to the host.
    """
    link = cluster.to_host
    if link is None and not is_cpu(profile):
        raise no_way_to_host(cluster)
    copied = CPU_BYTES_PER_S if link is None else link.bytes_per_s
    reached = HOST_BYTES_PER_S
    if cluster.host_memory_gbs is not None:
        reached = cluster.host_memory_gbs * 1e9 / cluster.devices_per_node
    moved = HOST_ADAM_BYTES + HOST_AVERAGE_BYTES * state.ema
    moved += HOST_ROUNDING_BYTES * (profile.dtype != "float32")
    return (4 + PARAMETER_BYTES[profile.dtype]) / copied + moved / reached


def no_way_to_host(cluster: Cluster) -> ClusterError:
    """Error for optimizer offload on a cluster without a known link to the host."""
    return ClusterError(
        f"cluster {cluster.name!r} has no link to the host, which optimizer offload requires. "
        "Write links.host into its file ('pulse probe' measures it), or leave out "
        "--optimizer-cpu-offload"
    )


def is_cpu(profile: Profile) -> bool:
    """True if the profile is of a CPU."""
    return bool(profile.threads) or profile.device.startswith("CPU")


class Estimator:
    """Lower bounds and estimates of step times, before and after partitioning.

    ``first_pass`` is the share of steps that run all forwards once before; times are the
    mean of steps with and without. Raises ClusterError if the optimizer's time is not known.
    """

    def __init__(self, planner: ActivationPlanner, first_pass: float = 0.0) -> None:
        self.planner, self.first_pass = planner, first_pass
        self.stages, self.costs = planner.stages, planner.costs
        profile, cluster, state = self.costs.profile, self.costs.cluster, self.costs.state
        self._spreads: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._reductions: dict[tuple[object, ...], float] = {}
        adam_s: dict[str, float] = {}
        for kind in cluster.kinds:
            own = profile.of_kind(kind.name) if kind.name in profile.kinds else profile
            measured_s = sum(layer.optimizer_s for layer in own.layers)
            adam_s[kind.name] = measured_s / max(
                1, sum(layer.trained_parameters for layer in own.layers)
            ) or OPTIMIZER_BYTES / memory_bytes_per_s(own, cluster, kind)
        self.adam_s = max(adam_s.values())
        """Seconds of Adam per parameter on the slowest kind of device."""
        if state.optimizer_cpu_offload:
            adam_s = dict.fromkeys(adam_s, host_adam_s(profile, cluster, state))
        self._adam_s_of, self._own_adam_s = adam_s, max(adam_s.values())

    def quick_bound(self, config: Config) -> float:
        """Lower bound on the step time of a config for any partition.

        It spreads all work as evenly as the largest layer allows, and adds the optimizer. Two
        further bounds hold: the latency of one microbatch, and the gradient reduction on the mean
        device. With one stage per device gradients are reduced after all but the last microbatch.

        Device d also idles while a microbatch is on the d devices before it, for at least a share r
        of their loads. r is 1 for whole backwards without recomputation, as the other part follows.
        Otherwise r is the forward's share of a layer, since recomputation delays no other device.
        The step T then fits M loads of its own and r of each earlier load. The loads can add up to
        all work W only if r W <= T (1 - (1 - r/M)^P).
        """
        totals, num = self.costs.totals(config), config.pipeline
        work = totals.forward_s + totals.backward_s
        later = totals.weight_grad_s if config.split else 0.0
        count = self.costs.num_microbatches(config)
        again = totals.forward_s if config.recompute is Recompute.ALWAYS else 0.0
        speeds = self.costs.speeds(config)  # the number of devices if they are alike
        least = max(count * max(work / speeds, totals.largest_s), work - later - again)
        reduced = self._least_reduction(config) / num
        if config.layout.num_chunks == 1:
            last = later if config.split else totals.backward_s
            reduced += (count * work - last) / num
            parts = config.split or config.recompute is not Recompute.NEVER
            if (share := totals.forward_share if parts else 1.0) > 0:
                fit = (1 - (1 - share / count) ** num) / share
                least = max(least, work / fit)
        least = max(least, reduced) + self._least_optimizer_s(config, totals.trained)
        return least + self._forwards_s(config)

    def _forwards_s(self, config: Config) -> float:
        """Mean seconds per step of the forwards before a step, spread evenly."""
        if not self.first_pass:
            return 0.0
        count, forward_s = self.costs.num_microbatches(config), self.costs.totals(config).forward_s
        return self.first_pass * count * forward_s / config.pipeline

    def _least_reduction(self, config: Config) -> float:
        """Lower bound on the device-seconds of gradient reduction and parameter gathering, over all
        devices."""
        if config.replicas == 1:
            return 0.0
        key = (
            config.pipeline,
            config.data,
            config.tensor,
            config.context,
            config.distributed_optimizer,
            config.pp_before_dp,
        )
        if key not in self._reductions:
            count = self.costs.totals(config).trained
            self._reductions[key] = min(
                self._reduction(config, d, count) for d in range(config.pipeline)
            )
        return self._reductions[key]

    def _reduction(self, config: Config, device: int, parameters: float) -> float:
        """Seconds to reduce the gradients of ``parameters`` over a device's replicas, and to gather
        the parameters with the distributed optimizer."""
        ranks, dtype = self.costs.ranks(config), self.costs.profile.dtype
        scatter = config.distributed_optimizer
        seconds = ranks.reduce_s(device, parameters * self.costs.gradient_bytes, scatter)
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
        """Lower bound on the time at which all gradients are reduced.

        The reduction of a stage begins with its last gradients, ``later`` seconds after their lower
        bound.
        """
        if config.replicas == 1:
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

    def bound(self, config: Config, stages: Stages) -> float:
        """Lower bound on the step time with these stages. Raises UnfitError."""
        problem = self.stages.problem(config, self.costs.num_microbatches(config), stages)
        path = MicrobatchPath(problem.without_recomputation)
        least = _pipeline_bound(problem, path, stages)
        least = max(least, self._reduced(config, stages, problem, path))
        return least + self._afterwards_s(config, stages)

    def estimate(self, config: Config) -> float:
        """Estimated step time before partitioning, from cuts that spread the work evenly."""
        loads, delay, link_s = self._spread(config)
        if not config.max_in_flight:
            loads += delay / config.pipeline
        held = self.costs.totals(config).trained / config.pipeline
        return self._about(config, max(loads, link_s), delay, held)

    def cut_estimate(self, config: Config, stages: Stages, held: float | None = None) -> float:
        """Estimated step time with these stages, whether or not they fit.

        ``held`` replaces the parameter count of the heaviest device.
        """
        heaviest = max(stages.per_device(stages.trained)) if held is None else held
        work = max(stages.busy_s(config.split), self.planner.memory_bound_s(config, stages))
        return self._about(config, work, _delay(stages.edges), heaviest)

    def timed_estimate(self, config: Config, stages: Stages) -> float:
        """Estimated step time that follows the last gradients of each stage.

        Several times slower than ``cut_estimate``, and more accurate among partitions whose
        parameters differ.
        """
        count = self.costs.num_microbatches(config)
        problem = self.stages.problem(config, count, stages, anyhow=True)
        work = max(stages.busy_s(config.split), self.planner.memory_bound_s(config, stages))
        about = self._pipeline_s(config, work, _delay(stages.edges))
        path = MicrobatchPath(problem.without_recomputation)
        least = _pipeline_bound(problem, path, stages)
        later = max(0.0, about - least)
        longest = max(about, least, self._reduced(config, stages, problem, path, later))
        return longest + self._afterwards_s(config, stages)

    def _afterwards_s(self, config: Config, stages: Stages) -> float:
        """Seconds of the optimizer, and of the forwards before a step."""
        held = stages.per_device(stages.trained)
        return self.optimizer_of_devices(config, held) + self._forwards_s(config)

    def optimizer_of_devices(self, config: Config, held: Sequence[float]) -> float:
        """Seconds of Adam over the parameters that each pipeline device has, on the last to end."""
        each = zip(held, self._adam_s(config), strict=True)
        return max(self.optimizer_s(config, *of) for of in each)

    def _least_optimizer_s(self, config: Config, trained: float) -> float:
        """Lower bound on the seconds of Adam over all ``trained`` parameters of a pipeline."""
        if not self.costs.cluster.mixed:
            return self.optimizer_s(config, trained / config.pipeline)
        speeds = sum(1 / adam_s for adam_s in self._adam_s(config))
        return self.optimizer_s(config, trained, 1 / speeds)

    def _adam_s(self, config: Config) -> list[float]:
        """Seconds of Adam per parameter on each pipeline device."""
        known, slowest = self._adam_s_of, self._own_adam_s
        return [
            max((known[name] for name in place.kinds), default=slowest)
            for place in self.costs.places(config)
        ]

    def optimizer_s(self, config: Config, parameters: float, adam_s: float | None = None) -> float:
        """Seconds of Adam over the ``parameters`` of a rank, with ``adam_s`` for each (default: on
        the slowest device)."""
        parts = config.replicas if config.distributed_optimizer else 1
        return parameters * (self._own_adam_s if adam_s is None else adam_s) / parts

    def _about(self, config: Config, work: float, delay: float, held: float) -> float:
        ranks, size = self.costs.ranks(config), self.costs.gradient_bytes
        last = work * (2 / 3) / config.layout.num_chunks
        reduce_s = max(0.0, ranks.reduce_s(0, held * size, config.distributed_optimizer) - last)
        if config.distributed_optimizer:
            reduce_s += ranks.gather_s(0, held * PARAMETER_BYTES[self.costs.profile.dtype])
        updated_s = reduce_s + self.optimizer_s(config, held)
        return self._pipeline_s(config, work, delay) + updated_s + self._forwards_s(config)

    def _pipeline_s(self, config: Config, work: float, delay: float) -> float:
        """Estimated seconds of all microbatches if the busiest device needs ``work`` seconds for
        each."""
        # Idle time per further device, in microbatches, for equal stages with whole backwards.
        share = 1 / config.layout.num_chunks * (1 / 3 if config.split else 1)
        share *= 1 if config.max_in_flight or config.layout.num_chunks == 1 else 4 / 3
        steps = self.costs.num_microbatches(config) + share * (config.pipeline - 1)
        return steps * work + delay

    def _spread(self, config: Config) -> tuple[float, float, float]:
        """Per microbatch: a device's work, the delay of links, and the seconds that a device sends.

        Cuts are at equal shares of the time. In a fold all skips count as collocated.
        """
        key = (
            config.pipeline,
            *config.work_of_rank,
            config.layout.kind.name,
            config.layout.num_chunks,
            Recompute.NEVER if config.recompute.as_needed else config.recompute,
            config.pp_before_dp,
            config.split,
            config.device_order,
        )
        if key not in self._spreads:
            chains, placement = self.costs.chains(config), config.placement
            costs, speeds = chains[0].of_schedule(config.split), [1.0] * config.pipeline
            if any(chain is not chains[0] for chain in chains):
                works = [sum(chain.of_schedule(config.split).work_s) for chain in chains]
                speeds = [works[0] / max(work, 1e-12) for work in works]
            work = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
            edges: tuple[StageMessage, ...] = ()
            if placement.num_stages > 1:
                cuts = even_cuts(
                    work,
                    placement.num_stages,
                    [speeds[device] for device in placement.device_of_stage],
                )
                link = self.costs.ranks(config).link
                edges = edges_of(costs, Partition(placement, cuts), link)
            if placement.kind.mirrored:
                edges = tuple(e for e in edges if e.destination == e.source + 1)
            each = max(sum(work) / sum(speeds), max(work) / max(speeds))
            self._spreads[key] = (each, _delay(edges), busiest_link_s(placement, edges))
        return self._spreads[key]


def even_cuts(
    work: Sequence[float], num_stages: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Cuts of ``work`` at shares in proportion to the stages' ``speeds`` (default: equal ones),
    with at least one layer per stage."""
    total, reached = running_sum(work), list(accumulate(speeds or [1.0] * num_stages))
    cuts = [0]
    for k in range(1, num_stages):
        near = int(np.searchsorted(total, total[-1] * reached[k - 1] / reached[-1]))
        cuts.append(max(cuts[-1] + 1, min(near, len(work) - num_stages + k)))
    return (*cuts, len(work))


def _pipeline_bound(problem: ScheduleProblem, path: MicrobatchPath, stages: Stages) -> float:
    """Lower bound on the time of all microbatches, from devices, memory and links."""
    least = max(device_bound(problem, path), memory_bound(problem, path))
    return max(least, link_bound(problem, stages.edges))


def _delay(edges: Iterable[StageMessage]) -> float:
    """Seconds that a microbatch travels, there and back."""
    return sum(seconds for _, seconds in round_trips(edges))
