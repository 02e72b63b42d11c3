"""Graphs of units whose token-wise regions run in slices of tokens.

A region is all token-wise operations between two operations that mix tokens, such as attentions.
Operations are token-wise by the rules of context parallelism, and a slice is computed as a rank
computes its share.
"""

from __future__ import annotations

import functools
import heapq
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from megatron_pulse.adapters.low_rank import drop
from megatron_pulse.backbone.token_slices import TokenSlices, TokenWise, slice_counts
from megatron_pulse.tracing.context_parallel.collectives import attention
from megatron_pulse.tracing.context_parallel.divided_graph import GraphDivider
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.graph_builder import Divided, NoRule, is_attention
from megatron_pulse.tracing.context_parallel.ring import ring_attention
from megatron_pulse.tracing.context_parallel.rules import LINEAR_MAPS
from megatron_pulse.tracing.graph_analysis import GraphAnalysis, is_heavy, operation, written
from megatron_pulse.tracing.units import Unit

_TOKENS = "tokens"
"""Mark of a node: its value, and the division of its tokens."""


def with_tokens(unit: Unit, nodes: Sequence[tuple[Any, Divided]]) -> Unit:
    """``unit`` whose operations know their tokens, also once they are adapted or quantised.

    ``nodes`` are the values of its graph's nodes with their divisions (see ``DividedGraph``).
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(unit.graph, copies))
    for node, marked in zip(unit.graph.nodes, nodes, strict=True):
        if node in copies:
            copies[node].meta[_TOKENS] = marked
    return replace(unit, graph=graph)


@dataclass(frozen=True)
class Region:
    """Token-wise operations of a graph, with the values that they take and give.

    ``inputs`` and ``results`` are nodes of the graph, with the dimension of the tokens (None: the
    value is given whole). ``shares`` holds the graph of a slice of each number of tokens.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[tuple[fx.Node, int | None], ...]
    results: tuple[tuple[fx.Node, int], ...]
    counts: tuple[int, ...]
    shares: Mapping[int, fx.Graph]

    def module(self, compiled: Callable[[fx.Graph], TokenWise]) -> nn.Module:
        """Module that runs the region slice by slice; ``compiled`` makes functions of graphs."""
        functions = {count: compiled(graph) for count, graph in self.shares.items()}
        return _RegionModule(
            TokenSlices(
                tuple(functions[count] for count in self.counts),
                self.counts,
                tuple(dim for _, dim in self.inputs),
                tuple(dim for _, dim in self.results),
            )
        )


class _RegionModule(nn.Module):
    """Called with a region's inputs."""

    def __init__(self, slices: TokenSlices) -> None:
        super().__init__()
        self._slices = slices

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Results of the region."""
        return self._slices(*inputs)


def sliced(unit: Unit, slices: int) -> tuple[Unit, dict[str, Region]]:
    """``unit`` with calls of modules in place of its regions, which have the modules' names.

    ``unit`` must come from ``with_tokens``. Regions without a linear map stay as they are. So do
    those in which a rule does not hold for a slice, with a warning.
    """
    analysis = _Regions(unit.graph)
    found = list[Region]()
    for nodes in analysis.regions():
        if isinstance(region := _region(nodes, slices), Region):
            found.append(region)
        else:
            _warn_of_whole(region)
    names = {f"token_slices_{number}": region for number, region in enumerate(found)}
    return replace(unit, graph=_with_calls(unit.graph, analysis, names)), names


class _Regions:
    """Order of a graph's operations, and its regions."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        reading = self._reading = GraphAnalysis(self.nodes)
        self.before: dict[fx.Node, list[fx.Node]] = {}
        readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            writes = [reader for each in written(node) for reader in readers[reading.memory[each]]]
            self.before[node] = list(dict.fromkeys([*reading.reads[node], *writes]))
            for each in node.all_input_nodes:
                readers[reading.memory[each]].append(node)

    def regions(self) -> Iterator[list[fx.Node]]:
        """Operations of each region, in order; no path leaves a region and comes back.

        All writes to a tensor are in the region that makes the tensor, or it is in none.
        """
        shared: set[fx.Node] = set()
        while True:
            found = self._token_wise(shared)
            region_of = {node: number for number, nodes in enumerate(found) for node in nodes}
            apart = {
                memory
                for memory, writers in self._reading.writers.items()
                if {region_of.get(each) for each in writers} != {region_of.get(memory, -1)}
            }
            if apart <= shared:
                break
            shared |= apart
        for nodes in found:
            if any(is_heavy(node) or node.target in LINEAR_MAPS for node in nodes):
                yield self._without_last_views(nodes)

    def _token_wise(self, shared: Collection[fx.Node]) -> list[list[fx.Node]]:
        """Token-wise operations by region, which touch no ``shared`` memory."""
        depth: dict[fx.Node, int] = {}
        token_wise: set[fx.Node] = set()
        found: dict[tuple[int, tuple[int, ...]], list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            segments = _segments(node)
            if segments is not None and self._is_token_wise(node, segments, shared):
                depth[node] = max(depth[each] for each in self.before[node])
                token_wise.add(node)
                found[depth[node], segments].append(node)
            else:
                steps = [depth[each] + (each in token_wise) for each in self.before[node]]
                depth[node] = max(steps, default=0)
        return list(found.values())

    def _is_token_wise(
        self, node: fx.Node, segments: tuple[int, ...], shared: Collection[fx.Node]
    ) -> bool:
        reading, given = self._reading, node.all_input_nodes
        of_inputs = [of for each in given if (of := _segments(each)) is not None]
        return (
            node.op == "call_function"
            and bool(of_inputs)
            and all(of == segments for of in of_inputs)
            and not is_attention(operation(node))
            and node.target not in (attention, ring_attention)
            and node.target is not drop  # its masks are of whole sequences
            and not any(reading.memory[each] in shared for each in (node, *given))
        )

    def _without_last_views(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Without views that nothing else in the region reads: they cost nothing outside."""
        inside = set(nodes)
        for node in reversed(nodes):
            is_view = self._reading.memory[node] is not node and not written(node)
            if is_view and not inside.intersection(node.users):
                inside.remove(node)
        for node in nodes:  # a list of tensors cannot leave a region
            if node.target is operator.getitem and node.args[0] in inside:
                inside.add(node)
        return [node for node in nodes if node in inside]


def _segments(node: fx.Node) -> tuple[int, ...] | None:
    """Segments of a node's tokens, if its tensors have the same; None for whole values."""
    _, division = node.meta.get(_TOKENS, (None, None))
    several = division if isinstance(division, tuple) else (division,)
    found = {None if each is None else each.segments for each in several}
    return found.pop() if len(found) == 1 else None


@functools.cache
def _warn_of_whole(reason: str) -> None:
    """Say once that a region stays whole."""
    said = f"token slices: an operation and those beside it stay whole: {reason}"
    warnings.warn(said, stacklevel=2)


def _region(nodes: Sequence[fx.Node], slices: int) -> Region | str:
    """Region of ``nodes``, or the reason why it cannot run in slices."""
    inside = set(nodes)
    first = next(of for node in nodes if (of := _segments(node)) is not None)
    length = sum(first)
    given = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    results = [node for node in nodes if any(user not in inside for user in node.users)]
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for number, node in enumerate(given):
        env[node] = graph.placeholder(f"given_{number}")
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in results))
    values = {copy: node.meta.get(_TOKENS, (None, None))[0] for node, copy in env.items()}
    taken = {}
    for node in given:
        _, division = node.meta.get(_TOKENS, (None, None))
        if isinstance(division, Division):
            taken[env[node]] = Division(division.dim, (length,))
    counts = slice_counts(length, slices)
    shares: dict[int, fx.Graph] = {}
    for rank in (0, len(counts) - 1):
        divider = _SliceDivider(graph, values, taken, rank, len(counts))
        divided = divider.run()
        dims = [None if each is None else each.dim for each in divided.divisions]
        for each in divided.collectives:
            return f"{each.operation} at {each.place}: {each.reason}"
        if any(dim is None for dim in dims):
            return f"{operation(results[dims.index(None)])}: its result has no tokens"
        shares[counts[rank]] = divided.graph
    outer = {copy: node for node, copy in env.items()}
    return Region(
        tuple(nodes),
        tuple((outer[node], dim) for node, dim in divider.inputs()),
        tuple((node, dim) for node, dim in zip(results, dims, strict=True) if dim is not None),
        counts,
        shares,
    )


class _SliceDivider(GraphDivider):
    """Divides a region's graph; whole inputs of which a slice has a share become divided ones."""

    def __init__(
        self,
        graph: fx.Graph,
        values: Mapping[fx.Node, Any],
        taken: Mapping[fx.Node, Division],
        rank: int,
        size: int,
    ) -> None:
        super().__init__(graph, GraphAnalysis(list(graph.nodes)), values, taken, (), rank, size)
        self._taken, self._narrowed = taken, dict[fx.Node, tuple[fx.Node, int]]()

    def narrow(self, whole: fx.Node, division: Division) -> fx.Node:
        """Take the share as a further input."""
        old = next((old for old, new in self.env.items() if new is whole), None)
        if old is None or old.op != "placeholder":
            raise NoRule("it narrows a value of the region")
        for made, known in self._narrowed.items():
            if known == (old, division.dim):
                return made
        with self.new.inserting_before(next(iter(self.new.nodes))):
            made = self.new.placeholder(f"{old.name}_share")
        self._narrowed[made] = old, division.dim
        return made

    def inputs(self) -> Iterator[tuple[fx.Node, int | None]]:
        """Inputs of the new graph in order: placeholder of the old one, dimension of the tokens."""
        known = {new: old for old, new in self.env.items()}
        for node in self.new.nodes:
            if node in self._narrowed:
                yield self._narrowed[node]
            elif node.op == "placeholder":
                division = self._taken.get(known[node])
                yield known[node], None if division is None else division.dim


def _with_calls(graph: fx.Graph, analysis: _Regions, regions: Mapping[str, Region]) -> fx.Graph:
    """``graph`` with calls of ``regions`` by name, in an order that computes inputs first."""
    name_of = {node: name for name, region in regions.items() for node in region.nodes}
    order: dict[fx.Node | str, int] = {}
    before: dict[fx.Node | str, set[fx.Node | str]] = defaultdict(set)
    after: dict[fx.Node | str, set[fx.Node | str]] = defaultdict(set)
    for number, node in enumerate(analysis.nodes):
        item: fx.Node | str = name_of.get(node, node)
        order[item] = number
        before[item].update(name_of.get(each, each) for each in analysis.before[node])
        before[item].discard(item)
    for item, needed in before.items():
        for each in needed:
            after[each].add(item)
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    items = list(order)
    numbers = {item: number for number, item in enumerate(items)}
    ready = [(order[item], numbers[item]) for item in items if not before[item]]
    heapq.heapify(ready)
    while ready:
        item = items[heapq.heappop(ready)[1]]
        if isinstance(item, fx.Node):
            env[item] = new.node_copy(item, env.__getitem__)
        else:
            region = regions[item]
            call = new.call_module(item, tuple(env[node] for node, _ in region.inputs))
            for index, (node, _) in enumerate(region.results):
                env[node] = new.call_function(operator.getitem, (call, index))
        for each in after[item]:
            before[each].remove(item)
            if not before[each]:
                heapq.heappush(ready, (order[each], numbers[each]))
    new.lint()
    return new
