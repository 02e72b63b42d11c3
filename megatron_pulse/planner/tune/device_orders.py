"""Orders of a cluster's unlike devices, few of which are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from megatron_pulse.planner.cluster.cluster import Cluster

_MOST = ((4, 24), (8, 6))
"""Numbers of devices up to which so many orders are tried for each set of degrees."""

_OF_MANY = 2
"""Orders that are tried for more devices: each multiplies the configs to search."""

_LOOKS = 2000
"""Orders that are enumerated in search of different ones."""


def most_orders(cluster: Cluster) -> int:
    """Maximum number of orders of the cluster's devices that are tried."""
    return next((most for devices, most in _MOST if cluster.num_devices <= devices), _OF_MANY)


def device_orders(cluster: Cluster, speed: Callable[[str], float]) -> Iterator[tuple[int, ...]]:
    """Yield orders of a mixed cluster's devices, each a different sequence of kinds.

    Nodes stay together, so that all orders have the same links. The order of the file comes first
    (as an empty tuple). Orders by ``speed`` of the kinds follow, then all others of few devices.
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
        if most_orders(cluster) > _OF_MANY:
            yield from _node_orders(nodes, lambda device: kinds[device].name)

    seen = set()
    for number, order in enumerate(islice(some(), _LOOKS)):
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
