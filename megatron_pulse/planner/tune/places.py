"""Places of a pipeline on unlike devices: kinds of devices, usable memory, and layer costs.

A place is one pipeline device of all replicas. If replicas are on unlike devices, the place counts
with the slowest of them for each layer, and with the smallest memory: all replicas have the same
cuts and as many microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.rank_order import RankOrder

MOST_ORDERS = 24
"""Orders of devices that are tried for each set of degrees."""

LOOKS, MOST_NODES = 2000, 64
"""Orders that are enumerated in search of different ones, and nodes up to which all orders are."""

_SECONDS = (
    *("forward_s", "backward_s", "weight_grad_s", "split_forward_s", "split_backward_s"),
    "recompute_s",
)
"""Columns of a chain's costs that depend on the device."""


@dataclass(frozen=True)
class Place:
    """One place of a pipeline: names of its ``kinds`` (none if all devices are alike), and bytes
    that planning may use on each device."""

    kinds: tuple[str, ...]
    usable_bytes: float


def places_of(ranks: RankOrder) -> tuple[Place, ...]:
    """Places of a pipeline with these ranks."""
    cluster = ranks.cluster
    if not cluster.mixed:
        return (Place((), cluster.usable_bytes),) * ranks.pipeline
    found = []
    for device in range(ranks.pipeline):
        kinds = {cluster.kind_of(rank) for rank in ranks.of_place(device)}
        names = tuple(sorted(kind.name for kind in kinds))
        found.append(Place(names, min(kind.usable_bytes for kind in kinds)))
    return tuple(found)


def splits_a_kind(ranks: RankOrder) -> bool:
    """True if the ranks of a tensor-parallel group are on unlike devices."""
    kind = ranks.cluster.kind_of
    return ranks.cluster.mixed and any(
        len({kind(ranks.rank(device, replica, shard)) for shard in range(ranks.tensor)}) > 1
        for device in range(ranks.pipeline)
        for replica in range(ranks.data)
    )


def device_orders(cluster: Cluster, speed: Callable[[str], float]) -> Iterator[tuple[int, ...]]:
    """Yield orders of a mixed cluster's devices, each a different sequence of kinds.

    Nodes stay together, so that all orders have the same links. The order of the file comes first
    (as an empty tuple). Orders by ``speed`` of the kinds follow, then all others.
    """
    each, kinds = cluster.devices_per_node, cluster.device_kinds
    nodes = [tuple(range(first, first + each)) for first in range(0, len(kinds), each)]

    def fast_first(devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(devices, key=lambda d: (-speed(kinds[d].name), d)))

    def slow_first(devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(devices, key=lambda d: (speed(kinds[d].name), d)))

    def total(devices: Sequence[int]) -> float:
        return sum(speed(kinds[d].name) for d in devices)

    def some() -> Iterator[tuple[tuple[int, ...], ...]]:
        yield tuple(nodes)
        for inside in (fast_first, slow_first):
            own = list(map(inside, nodes))
            yield tuple(sorted(own, key=total, reverse=True))
            yield tuple(sorted(own, key=total))
            yield tuple(own)
        if len(nodes) <= MOST_NODES:
            yield from _node_orders(nodes, lambda device: kinds[device].name)

    seen = set()
    for number, order in enumerate(islice(some(), LOOKS)):
        flat = tuple(device for devices in order for device in devices)
        names = tuple(kinds[device].name for device in flat)
        if names not in seen:
            seen.add(names)
            yield flat if number else ()


def _node_orders(
    nodes: Sequence[Sequence[int]], kind: Callable[[int], str]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all orders of nodes and of the devices in each, without those of equal kinds."""
    if not nodes:
        yield ()
    seen = set()
    for i, node in enumerate(nodes):
        key = tuple(sorted(map(kind, node)))
        if key not in seen:
            seen.add(key)
            others = [*nodes[:i], *nodes[i + 1 :]]
            for first in _inside(node, kind):
                yield from ((first, *rest) for rest in _node_orders(others, kind))


def _inside(node: Sequence[int], kind: Callable[[int], str]) -> Iterator[tuple[int, ...]]:
    """Yield the orders of a node's devices that are different sequences of kinds."""
    if not node:
        yield ()
    seen = set()
    for i, device in enumerate(node):
        if kind(device) not in seen:
            seen.add(kind(device))
            rest = [*node[:i], *node[i + 1 :]]
            yield from ((device, *others) for others in _inside(rest, kind))


def composed(costs: Sequence[ChainCosts]) -> ChainCosts:
    """Costs of a cut chain: the seconds of layer i are those of ``costs[i]``."""
    first = costs[0]
    if all(each is first for each in costs):
        return first
    return _with_seconds(first, lambda name: [getattr(c, name)[i] for i, c in enumerate(costs)])


def of_any(costs: Sequence[ChainCosts], choose: Callable[..., float]) -> ChainCosts:
    """Costs whose seconds are ``choose`` (max, min) of those of several devices, per layer."""
    if len(costs) == 1:
        return costs[0]
    columns = {name: [getattr(each, name) for each in costs] for name in _SECONDS}
    return _with_seconds(
        costs[0], lambda name: [choose(own) for own in zip(*columns[name], strict=True)]
    )


def _with_seconds(costs: ChainCosts, of: Callable[[str], Sequence[float]]) -> ChainCosts:
    changed: dict[str, Any] = {n: tuple(of(n)) for n in _SECONDS if getattr(costs, n)}
    return replace(costs, **changed)
