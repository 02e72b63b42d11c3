"""Routing of values from the computing unit to the consuming units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from megatron_pulse.tracing.unit_assignment import UnitAssignment


@dataclass
class Edges:
    """Boundary to the next unit, and pushes, pops and provided values of a unit, by name."""

    boundary: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()


def route(placing: UnitAssignment, takers: Mapping[fx.Node, Sequence[int]]) -> list[Edges]:
    """Edges of every unit; ``takers`` lists the units that take a value from elsewhere."""
    edges = [Edges() for _ in placing.names]
    inputs = set(placing.exported.inputs)
    touched, ends = {**placing.touched}, placing.ends
    home = dict(placing.home)
    if placing.source in takers:
        home[placing.source] = {0}
        touched[placing.source] = [-1, *(ends[k] for k in takers[placing.source])]
    for node, everyone in takers.items():
        if node in inputs and node is not placing.source:
            continue
        (start,) = home[node]
        users = [k for k in everyone if k != start]
        if not users:
            continue
        reach = start
        for user in users if node in touched else ():
            last = max(t for t in touched[node] if t < ends[reach + 1])
            first = min(t for t in touched[node] if t >= ends[user])
            if user > reach + 1 and placing.blocks.rests(last, first):
                break
            reach = user
        far = [k for k in users if k > reach] if node in touched else users
        is_skip = node in touched and len(far) == 1
        # a skip belongs to its unit's boundary outputs, even if the next unit does not use it
        for k in range(start, max(reach, start + 1) if is_skip else reach):
            edges[k].boundary += (node.name,)
        if is_skip:
            edges[start].pushes += (node.name,)
            edges[far[0]].pops += (node.name,)
        elif far:
            edges[start].provides += (node.name,)
    edges[placing.num_links - 1].boundary = (placing.exported.output.name,)
    return edges
