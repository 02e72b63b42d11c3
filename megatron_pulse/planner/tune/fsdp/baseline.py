"""Fastest FSDP2 or HSDP configuration on a cluster: the baseline that a plan has to beat.

Seconds are those of ideal collectives at the cluster's bandwidths, and of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_pulse.format import format_number, with_plural
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.config import divisors
from megatron_pulse.planner.tune.fsdp.configs import FittedFsdpConfig, FsdpConfig, FsdpConfigs
from megatron_pulse.planner.tune.fsdp.step import (
    REDUCING,
    Gathering,
    Sharding,
    Transfers,
    gradient_bytes,
    least_s,
    step_s,
)
from megatron_pulse.profile.profile import Profile

IN_TORCH = {
    Gathering.PASS: "reshard_after_forward=True",
    Gathering.MICROBATCH: "reshard_after_forward=False",
    Gathering.STEP: (
        "reshard_after_forward=False, set_reshard_after_backward(False) before all backwards but "
        "the last"
    ),
}
"""Arguments of ``fully_shard`` for each ``Gathering``."""

ALIKE = 0.005
"""Relative difference below which two predictions count as equal."""


@dataclass(frozen=True)
class FsdpBaseline:
    """Fastest configuration that fits, for ``samples`` per step and layers with these ``names``.

    ``step_s`` includes the optimizer.
    """

    fitted: FittedFsdpConfig
    samples: int
    step_s: float
    names: tuple[str, ...]

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.samples / self.step_s

    @property
    def name(self) -> str:
        """Display name."""
        way = self.fitted.sharding
        if way.replicas == 1:
            return "FSDP2 (torch's fully_shard)"
        return f"HSDP (torch's fully_shard, {way.replicas} groups of {way.group})"

    @property
    def facts(self) -> str:
        """Settings and memory, in one line."""
        size, again, way = self.fitted.way.micro_batch_size, self.fitted.again, self.fitted.sharding
        told = [
            f"b = {size}",
            *[f"{with_plural(len(again.recompute), 'layer')} recomputed"] * bool(again.recompute),
        ]
        told += [
            f"what is cheap of {with_plural(len(again.selective), 'layer')} recomputed"
        ] * bool(again.selective)
        way_ahead = self.fitted.way.prefetch
        told += [f"{way_ahead} units gathered ahead"] * (way_ahead > 1)
        return ", ".join([*told, str(way), f"{self.fitted.needs_bytes / 1e9:.3g} GB"])

    def beside(self, throughput: float) -> str:
        """Sentence that compares the baseline with a plan of ``throughput`` samples/s."""
        gain = self.throughput / throughput - 1
        if abs(gain) < ALIKE:
            said = "as much as this plan"
        elif gain > 0:
            said = f"{_percent(gain)} more than this plan: use it here"
        else:
            said = f"{_percent(-gain)} less than this plan"
        return f"{self.name} is predicted at {self.throughput:.4g} samples/s, {said}"

    @property
    def layers(self) -> dict[str, Any]:
        """Units by their first and last layer, and the layers under full and selective
        recomputation."""
        names, again = self.names, self.fitted.again
        ends = [dict.fromkeys((names[own[0]], names[own[-1]])) for own in self.fitted.layers]
        return {
            "units": [" to ".join(each) for each in ends],
            "activations": again.by_name(names),
        }

    @property
    def in_torch(self) -> str:
        """Calls that set the configuration up in torch."""
        way, sharding = self.fitted.way, self.fitted.sharding
        told = [
            "fully_shard([its layers' modules]) for each unit, from the first on, then the whole",
            IN_TORCH[way.gathering],
            f"set_reduce_scatter_max_input_buffers({REDUCING})",
        ]
        if sharding.reduce_once and sharding.count > 1:
            told.append("set_requires_gradient_sync(False) before all backwards but the last")
        if sharding.replicas > 1 and sharding.count > 1:
            told.append("set_requires_all_reduce(False) before all backwards but the last")
        if way.prefetch > 1:
            told.append(f"set_modules_to_forward_prefetch (and backward) with {way.prefetch} units")
        told += ["checkpoint for each recomputed layer"] * bool(self.fitted.again.recompute)
        if self.fitted.again.selective:
            told.append("checkpoint that saves products of matrices for each selective layer")
        return "; ".join(told)

    def record(self) -> dict[str, Any]:
        """JSON-able record."""
        way, sharding = self.fitted.way, self.fitted.sharding
        return {
            "samples_per_s": self.throughput,
            "step_s": self.step_s,
            "micro_batch_size": way.micro_batch_size,
            "num_microbatches": sharding.count,
            "group": way.group,
            "gathered": str(way.gathering),
            "reduce_once": sharding.reduce_once or sharding.count == 1,
            "prefetch": way.prefetch,
            "memory_bytes": self.fitted.needs_bytes,
            **self.layers,
        }


def fsdp_baseline(
    profile: Profile,
    cluster: Cluster,
    samples: int,
    adam_s: float = 0.0,
    ema: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> FsdpBaseline | None:
    """Fastest FSDP2 or HSDP configuration, by branch and bound over all of them.

    ``adam_s`` are the optimizer's seconds per parameter. ``ema`` adds an EMA of the
    parameters. Returns None for one device, a batch that the devices do not divide, or if nothing
    fits. Also returns None once ``stopped``. No configuration that was skipped is faster
    (``least_s``).
    """
    each, left = divmod(samples, cluster.num_devices)
    if cluster.num_devices == 1 or left:
        return None
    sizes = [2**k for k in range(each.bit_length()) if each % 2**k == 0]
    of = profile, cluster.num_devices, samples, cluster.usable_bytes, sizes
    ways = FsdpConfigs(*of, ema=ema)
    trained = sum(layer.trained_parameters for layer in profile.layers)
    names = tuple(layer.name for layer in profile.layers)

    @cache
    def carried(group: int, about: int) -> Transfers:
        way = FsdpConfig(group, sizes[0], about, *next(ways.ways(group))[3:])
        return collective_seconds(cluster, ways.bare_sharding(way))

    def least(way: FsdpConfig) -> float:
        transfers = carried(way.group, way.about)
        computed_s = ways.computed_s(way)
        return (
            least_s(ways.bare_sharding(way), transfers, computed_s) + adam_s * trained / way.group
        )

    entered: list[tuple[float, FsdpConfig]] = []
    for way in (way for group in groups(cluster) for way in ways.ways(group)):
        if stopped():
            return None
        if not ways.hopeless(way):
            entered.append((least(way), way))
    best: FsdpBaseline | None = None
    for bound, way in sorted(entered):
        if best is not None and bound >= best.step_s:
            break
        if stopped():
            return None
        fitted = ways.fit(way)
        if fitted.needs_bytes > cluster.usable_bytes:
            continue
        seconds = step_s(fitted.sharding, carried(way.group, way.about))
        seconds += adam_s * trained / way.group
        if best is None or seconds < best.step_s:
            best = FsdpBaseline(fitted, samples, seconds, names)
    return best


def groups(cluster: Cluster) -> Iterator[int]:
    """Possible sizes of a sharding group: all devices, neighbours within a node, or whole nodes."""
    inside = cluster.devices_per_node
    for size in divisors(cluster.num_devices):
        if size > 1 and (inside % size == 0 or size % inside == 0):
            yield size


def collective_seconds(cluster: Cluster, way: Sharding) -> Transfers:
    """Seconds of the collectives, with all groups active at once. Neighbours in a group are
    neighbours in a node."""
    inside, num = cluster.devices_per_node, cluster.num_devices
    group, across = range(way.group), range(0, num, way.group)
    own, sums = max(1, inside // way.group), min(way.group, inside)
    apart = way.group <= inside < num  # sums cross the network, all else stays in a node
    gather, reduce, total = [], [], []
    for unit in way.units:
        gradients = gradient_bytes(unit)
        gather.append(cluster.all_gather_s(unit.moved_bytes, group, own) if unit.moved_bytes else 0)
        reduce.append(cluster.reduce_scatter_s(gradients, group, own) if gradients else 0.0)
        shard = gradients / way.group * (way.replicas > 1)
        total.append(cluster.allreduce_s(shard, across, sums) if shard else 0.0)
    return Transfers(tuple(gather), tuple(reduce), tuple(total), apart)


def _percent(share: float) -> str:
    return f"{format_number(100 * share, 2)} %"
