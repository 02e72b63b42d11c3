"""How values get from the unit that computes them to those that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from megatron_pulse.backbone.derived.placing import Placing


@dataclass
class Edges:
    """What one unit hands to the next (``boundary``), pushes, pops and provides, by name."""

    boundary: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()


def route(placing: Placing, takers: Mapping[fx.Node, Sequence[int]]) -> list[Edges]:
    """The edges of every unit; ``takers`` says which take a value from elsewhere."""
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
        # a skip is among what its unit hands on, though the next one may not use it
        for k in range(start, max(reach, start + 1) if is_skip else reach):
            edges[k].boundary += (node.name,)
        if is_skip:
            edges[start].pushes += (node.name,)
            edges[far[0]].pops += (node.name,)
        elif far:
            edges[start].provides += (node.name,)
    edges[placing.num_links - 1].boundary = (placing.exported.output.name,)
    return edges
