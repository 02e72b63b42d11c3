"""Division of a unit's graph: what one rank of a context-parallel group computes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megatron_pulse.tracing.context_parallel.collectives import gather
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.fake_values import OF_DATA
from megatron_pulse.tracing.context_parallel.graph_builder import (
    OF_DATA_REASON,
    Collective,
    Divided,
    GraphBuilder,
    NoRule,
    is_attention,
)
from megatron_pulse.tracing.context_parallel.rules import rule_of
from megatron_pulse.tracing.graph_analysis import GraphAnalysis, operation, written

aten = torch.ops.aten


@dataclass(frozen=True)
class DividedGraph:
    """Graph of one rank, with the divisions of its results.

    The process group is its last input if it ``has_group``. ``collectives`` are in order.
    ``dependent`` says of each result if it depends on divided tokens. ``nodes`` has the value of
    every node of the whole graph, in order, with its division. ``own_nodes`` has the same of the
    nodes of ``graph``: the rank's share, and the numbers of its own tokens. It is OF_DATA for
    parts of a communication.
    """

    graph: fx.Graph
    divisions: tuple[Division | None, ...]
    dependent: tuple[bool, ...]
    collectives: tuple[Collective, ...]
    has_group: bool
    nodes: tuple[tuple[Any, Divided], ...]
    own_nodes: tuple[tuple[Any, Divided], ...]


class GraphDivider(GraphBuilder):
    """Divides one graph for rank ``rank`` of ``size``.

    - ``reading``, ``values``: see ``GraphBuilder``.
    - ``taken``: divisions of placeholders; ``dependent``: placeholders that depend on tokens.
    - ``seed``: number of the node whose value is divided from there on, with its division.
    - ``wholes``: numbers of results that are gathered.
    """

    def __init__(
        self,
        graph: fx.Graph,
        reading: GraphAnalysis,
        values: Mapping[fx.Node, Any],
        taken: Mapping[fx.Node, Division],
        dependent: Collection[fx.Node],
        rank: int,
        size: int,
        seed: tuple[int, Division] | None = None,
        wholes: Collection[int] = (),
    ) -> None:
        super().__init__(reading, values, rank, size)
        self._old, self._seed, self._result_wholes = graph, seed, wholes
        self.divisions.update(taken)
        self._dependent = {*dependent, *taken}
        self._gathered: dict[fx.Node, fx.Node] = {}

    def run(self) -> DividedGraph:
        """Divide every operation, or gather its inputs."""
        *_, last = self._old.nodes
        for _ in self._each_divided():
            pass
        (results,) = last.args
        assert isinstance(results, tuple)
        given, divisions = [], list[Division | None]()
        for index, node in enumerate(results):
            whole = index in self._result_wholes
            given.append(self._whole(node, last) if whole else self.env[node])
            division = None if whole else self.divisions.get(node)
            assert not isinstance(division, tuple)
            divisions.append(division)
        self.new.output(tuple(given))
        has_group = bool(self.group.users)
        if not has_group:
            self.new.erase_node(self.group)
        self.new.lint()
        dependent = tuple(node in self._dependent for node in results)
        collectives = tuple(self.collectives)
        nodes = tuple((self.values.get(n), self.divisions.get(n)) for n in self._old.nodes)
        return DividedGraph(
            self.new,
            tuple(divisions),
            dependent,
            collectives,
            has_group,
            nodes,
            tuple(self._own_nodes()),
        )

    def _own_nodes(self) -> Iterator[tuple[Any, Divided]]:
        """Value and division of every node of the new graph; see ``DividedGraph``."""
        old_of = {self._gathered[old]: (old, False) for old in self._gathered}
        old_of |= {new: (old, True) for old, new in self.env.items()}
        values: dict[fx.Node, Any] = {}
        for node in self.new.nodes:
            division: Divided = None
            if node in old_of:
                old, is_share = old_of[node]
                division = self.divisions.get(old) if is_share else None
                values[node] = self._own_value(self.values.get(old), division)
            else:
                values[node] = _result(node, values)
            if isinstance(division, tuple):
                division = tuple(map(self._own, division))
            elif division is not None:
                division = self._own(division)
            yield values[node], division

    def _own(self, division: Division) -> Division:
        """Division whose segments are the rank's tokens."""
        return Division(division.dim, self.own_segments(division))

    def _own_value(self, value: Any, division: Divided) -> Any:
        """The rank's share of a whole value, on the meta device."""
        if isinstance(value, list | tuple):
            parts = division if isinstance(division, tuple) else (None,) * len(value)
            return [self._own_value(*of) for of in zip(value, parts, strict=True)]
        if not isinstance(value, torch.Tensor):
            return value
        shape = tuple(value.shape)
        if isinstance(division, Division):
            shape = division.own_shape(shape, self.rank, self.size)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    def first_collective(self) -> Collective | None:
        """The first communication before the results; None if there is none."""
        for _ in self._each_divided():
            if self.collectives:
                return self.collectives[0]
        return None

    def _each_divided(self) -> Iterator[None]:
        """Divide the operations, one at a time."""
        nodes = list(self._old.nodes)
        inputs = [index for index, node in enumerate(nodes) if node.op == "placeholder"]
        for index, node in enumerate(nodes[:-1]):
            self._divide(node, is_seed=self._seed is not None and self._seed[0] == index)
            if index == max(inputs, default=0):
                self.group = self.new.placeholder("context_group")
            yield

    def _divide(self, node: fx.Node, is_seed: bool) -> None:
        if self._dependent.intersection(node.all_input_nodes):
            self._dependent.add(node)
        if not self.divided_inputs(node):
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            self.env[node].meta.pop("val", None)
            if node in self._dependent and is_attention(operation(node)):
                self.note("attention", 0, node)
        else:
            before = len(self.new.nodes)
            try:
                if any(self.values[each] is OF_DATA for each in (node, *node.all_input_nodes)):
                    raise NoRule(OF_DATA_REASON)
                self.env[node], division = rule_of(node)(self, node)
            except NoRule as reason:
                self._drop_after(before)
                self._gather_inputs(node, str(reason))
            else:
                if division is not None:
                    self.divisions[node] = division
        if written(node):
            self._gathered.clear()
        if is_seed and self._seed is not None:
            self.divisions[node] = self._seed[1]
            self._dependent.add(node)
            self.env[node] = self.narrow(self.env[node], self._seed[1])

    def _drop_after(self, count: int) -> None:
        for node in reversed(list(self.new.nodes)[count:]):
            self.new.erase_node(node)

    def _gather_inputs(self, node: fx.Node, reason: str) -> None:
        divided = self.divided_inputs(node)
        num_bytes = sum(self.bytes_of(each) for each in divided if each not in self._gathered)
        refused = any(
            each in written(node)
            or self.is_written(each, after=node)
            or not isinstance(self.divisions[each], Division)
            for each in divided
        )
        self.note("gather", num_bytes, node, reason, refused)
        if is_attention(operation(node)):
            self.note("attention", 0, node)
        if refused:  # the graph is not run
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            return
        wholes = {each: self._whole(each) for each in divided}
        self.env[node] = self.copy(node, wholes)

    def _whole(self, node: fx.Node, reader: fx.Node | None = None) -> fx.Node:
        """Whole value of ``node``, gathered once; for the result ``reader`` it is noted."""
        division = self.divisions.get(node)
        if not isinstance(division, Division):
            return self.env[node]
        if node not in self._gathered:
            own, dim = self.own_segments(division), division.dim
            several = len(own) > 1
            split = self.call(aten.split_with_sizes.default, self.env[node], list(own), dim)
            parts = []
            for index, length in enumerate(division.segments):
                part = self.new.call_function(operator.getitem, (split, index))
                counts = Division(dim, (length,)).counts(self.size)
                parts.append(self.call(gather, part, dim, counts, self.group))
            self._gathered[node] = self.call(aten.cat.default, parts, dim) if several else parts[0]
            if reader is not None:
                self.note("gather", self.bytes_of(node), node, "it is the chain's result")
        return self._gathered[node]


def _result(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Value of an operation of torch on known ``values``; OF_DATA if they are not known."""
    given = [values[each] for each in node.all_input_nodes]
    known = all(isinstance(value, torch.Tensor) for value in given)
    if not known or not isinstance(node.target, torch._ops.OpOverload):
        return OF_DATA
    args = fx.map_arg(node.args, values.__getitem__)
    return node.target(*args, **fx.map_arg(node.kwargs, values.__getitem__))
