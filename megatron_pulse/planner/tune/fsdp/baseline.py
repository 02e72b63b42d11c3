"""Fastest FSDP2 or HSDP configuration on a cluster: the baseline that a plan has to beat.

Seconds are those of ideal collectives at the cluster's bandwidths, and of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_pulse.format import format_number, with_plural
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.partition.memory import ADAM_BYTES
from megatron_pulse.planner.tune.config import divisors
from megatron_pulse.planner.tune.context_rank import exchanges_of, of_context_rank
from megatron_pulse.planner.tune.estimate import OPTIMIZER_BYTES, is_cpu
from megatron_pulse.planner.tune.fsdp.configs import FittedFsdpConfig, FsdpConfig, FsdpConfigs
from megatron_pulse.planner.tune.fsdp.step import (
    Sharding,
    Transfers,
    gradient_bytes,
    least_s,
    step_s,
)
from megatron_pulse.profile.profile import Profile

GATHER_TOUCHES, REDUCE_TOUCHES = 4, 6
"""Reads and writes of a gathered byte, and of a reduced one, by torch's ``fully_shard`` beside the
collective: new buffers are cleared and filled, then copied, and gradients divided."""

ALIKE = 0.005
"""Relative difference below which two predictions count as equal."""


@dataclass(frozen=True)
class FsdpBaseline:
    """Fastest configuration that fits, for ``samples`` per step and layers with these ``names``.

    ``step_s`` includes ``optimizer_s``, the optimizer. ``context`` ranks share the tokens of a
    sample.
    """

    fitted: FittedFsdpConfig
    samples: int
    step_s: float
    optimizer_s: float
    names: tuple[str, ...]
    context: int = 1

    @property
    def throughput(self) -> float:
        """Samples per second of the whole cluster."""
        return self.samples / self.step_s

    @property
    def name(self) -> str:
        """Display name."""
        sharding = self.fitted.sharding
        if sharding.replicas == 1:
            return "FSDP2"
        return f"HSDP ({sharding.replicas} groups of {sharding.group})"

    @property
    def facts(self) -> str:
        """Settings and memory, in one line."""
        config, activations = self.fitted.config, self.fitted.activations
        settings = [f"K = {self.context}"] * (self.context > 1)
        settings.append(f"b = {config.micro_batch_size}")
        if activations.recompute:
            settings.append(f"{with_plural(len(activations.recompute), 'layer')} recomputed")
        if activations.selective:
            layers = with_plural(len(activations.selective), "layer")
            settings.append(f"{layers} selectively recomputed")
        if config.layout.prefetch > 1:
            settings.append(f"{config.layout.prefetch} units prefetched")
        memory = f"{self.fitted.needs_bytes / 1e9:.3g} GB"
        return ", ".join([*settings, str(self.fitted.sharding), memory])

    def beside(self, throughput: float) -> str:
        """Sentence that compares the baseline with a plan of ``throughput`` samples/s."""
        gain = self.throughput / throughput - 1
        if abs(gain) < ALIKE:
            said = "as fast as this plan"
        elif gain > 0:
            said = f"{_percent(gain)} faster than this plan, but flags (or CPUs) exclude it"
        else:
            said = f"{_percent(-gain)} slower than this plan"
        return f"{self.name} is predicted at {self.throughput:.4g} samples/s, {said}"

    @property
    def layers(self) -> dict[str, Any]:
        """Units by their first and last layer, and the layers under full and selective
        recomputation."""
        names, activations = self.names, self.fitted.activations
        ends = [dict.fromkeys((names[own[0]], names[own[-1]])) for own in self.fitted.layers]
        return {
            "units": [" to ".join(each) for each in ends],
            "activations": activations.by_name(names),
        }

    def record(self) -> dict[str, Any]:
        """JSON-able record."""
        config, sharding = self.fitted.config, self.fitted.sharding
        return {
            "samples_per_s": self.throughput,
            "step_s": self.step_s,
            **({"context": self.context} if self.context > 1 else {}),
            "micro_batch_size": config.micro_batch_size,
            "num_microbatches": sharding.count,
            "group": config.layout.group,
            "gathered": str(config.layout.gathering),
            "reduce_once": sharding.reduce_once or sharding.count == 1,
            "prefetch": config.layout.prefetch,
            "memory_bytes": self.fitted.needs_bytes,
            **self.layers,
        }


def fsdp_baseline(
    profile: Profile,
    cluster: Cluster,
    samples: int,
    adam_s: float = 0.0,
    ema: bool = False,
    reduces_fp32: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    allowed: Collection[int] | None = None,
    context: int = 1,
    below_s: float = math.inf,
    optimizer_bytes: float = ADAM_BYTES,
) -> FsdpBaseline | None:
    """Fastest FSDP2 or HSDP configuration, by branch and bound over all of them.

    ``adam_s`` are the optimizer's seconds per parameter. ``ema`` adds an EMA of the parameters;
    ``reduces_fp32`` reduces gradients in fp32; ``allowed`` are the microbatch sizes. ``context``
    ranks share the tokens of a sample, by the costs of ``profile``, and the parameters with all.
    Returns None for one device, a batch that the replicas do not divide, if nothing fits, or if no
    step takes less than ``below_s``. ``optimizer_bytes`` per parameter are those of its state. Also
    returns None once ``stopped``. No configuration that was skipped is faster (``least_s``).
    """
    each, left = divmod(samples * context, cluster.num_devices)
    if cluster.num_devices == 1 or left:
        return None
    sizes = [2**k for k in range(each.bit_length()) if each % 2**k == 0]
    if allowed is not None:
        sizes = [size for size in sorted(allowed) if each % size == 0]
    if not sizes:
        return None
    of = profile, cluster, samples, sizes
    configs = fsdp_configs(*of, ema, reduces_fp32, context, optimizer_bytes)
    trained = sum(layer.trained_parameters for layer in profile.layers)

    @cache
    def carried(group: int, starts: tuple[int, ...]) -> Transfers:
        config = FsdpConfig(sizes[0], FsdpLayout(starts, group))
        sharding = configs.bare_sharding(config)
        return collective_seconds(cluster, sharding, copying_s(profile, adam_s))

    def least(config: FsdpConfig) -> float:
        transfers = carried(config.layout.group, config.layout.starts)
        computed_s = configs.computed_s(config)
        return (
            least_s(configs.bare_sharding(config), transfers, computed_s)
            + adam_s * trained / config.layout.group
        )

    entered: list[tuple[float, FsdpConfig]] = []
    for config in (config for group in groups(cluster) for config in configs.configs(group)):
        if stopped():
            return None
        if not configs.cannot_fit(config):
            entered.append((least(config), config))
    best: FsdpBaseline | None = None
    for bound, config in sorted(entered, key=lambda each: (each[0], each[1].rank)):
        if bound >= below_s:
            break
        if stopped():
            return None
        fitted = configs.fit(config)
        if fitted.needs_bytes > cluster.usable_bytes:
            continue
        transfers = carried(config.layout.group, config.layout.starts)
        one = predict(configs, fitted, transfers, adam_s)
        if one.step_s < below_s:
            best, below_s = one, one.step_s
    return best


def fsdp_configs(
    profile: Profile,
    cluster: Cluster,
    samples: int,
    sizes: Sequence[int],
    ema: bool,
    reduces_fp32: bool,
    context: int,
    optimizer_bytes: float,
) -> FsdpConfigs:
    """FSDP configurations on all devices of ``cluster``, of which ``context`` share tokens."""
    exchanging = None
    if context > 1:
        exchanging = exchanges_of(profile, cluster, context)
        # Exchanges take as long as at these sizes: those of other sizes do not tell them.
        profile = of_context_rank(profile.only(*sizes), cluster, context)
    of = profile, cluster.num_devices, samples, cluster.usable_bytes, sizes
    return FsdpConfigs(
        *of,
        ema=ema,
        reduces_fp32=reduces_fp32,
        context=context,
        optimizer_bytes=optimizer_bytes,
        exchanging=exchanging,
    )


def predict(
    configs: FsdpConfigs, fitted: FittedFsdpConfig, transfers: Transfers, adam_s: float
) -> FsdpBaseline:
    """Step of a configuration, with the seconds of its collectives and of Adam per parameter."""
    layers = configs.profile.layers
    trained = sum(layer.trained_parameters for layer in layers)
    optimizer_s = adam_s * trained / fitted.sharding.group
    names = tuple(layer.name for layer in layers)
    seconds = step_s(fitted.sharding, transfers) + optimizer_s
    return FsdpBaseline(fitted, configs.samples, seconds, optimizer_s, names, configs.context)


def groups(cluster: Cluster) -> Iterator[int]:
    """Possible sizes of a sharding group: all devices, neighbours within a node, or whole nodes."""
    inside = cluster.devices_per_node
    for size in divisors(cluster.num_devices):
        if size > 1 and (inside % size == 0 or size % inside == 0):
            yield size


def copying_s(profile: Profile, adam_s: float) -> float | None:
    """Seconds in which a CPU reads or writes a byte, where Adam takes ``adam_s`` a parameter; None
    on other devices, whose copies are hidden."""
    return adam_s / OPTIMIZER_BYTES if is_cpu(profile) else None


def collective_seconds(
    cluster: Cluster, sharding: Sharding, byte_s: float | None = None
) -> Transfers:
    """Seconds of the collectives, with all groups active at once. Neighbours in a group are
    neighbours in a node.

    With ``byte_s``, the seconds in which a CPU reads or writes a byte of memory, nothing overlaps,
    and parameters and gradients are copied into and out of buffers. Groups within a node share its
    links with exchanges of tokens; others wait for the network, which is slower.
    """
    copied_s = byte_s or 0.0
    inside, num = cluster.devices_per_node, cluster.num_devices
    group, across = range(sharding.group), range(0, num, sharding.group)
    own, sums = max(1, inside // sharding.group), min(sharding.group, inside)
    apart = sharding.group <= inside < num  # sums cross the network, all else stays in a node
    gather, reduce, total = [], [], []
    for number, unit in enumerate(sharding.units):
        gradients = gradient_bytes(sharding, number)
        moved = unit.moved_bytes
        gather.append(
            cluster.all_gather_s(moved, group, own) + GATHER_TOUCHES * copied_s * moved
            if moved
            else 0.0
        )
        reduce.append(
            cluster.reduce_scatter_s(gradients, group, own) + REDUCE_TOUCHES * copied_s * gradients
            if gradients
            else 0.0
        )
        shard = gradients / sharding.group * (sharding.replicas > 1)
        total.append(cluster.allreduce_s(shard, across, sums) if shard else 0.0)
    beside_exchanges = sharding.group <= inside
    seconds = tuple(gather), tuple(reduce), tuple(total)
    return Transfers(*seconds, apart, byte_s is None, beside_exchanges)


def _percent(share: float) -> str:
    return f"{format_number(100 * share, 2)} %"
