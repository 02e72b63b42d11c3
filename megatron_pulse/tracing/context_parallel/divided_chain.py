"""Division of a derived chain: where its tokens are divided, and what is sent for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from megatron_pulse.tracing.context_parallel.divided_graph import DividedGraph, GraphDivider
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.fake_values import FakeValues
from megatron_pulse.tracing.context_parallel.graph_builder import (
    OF_DATA_REASON,
    Collective,
    is_attention,
)
from megatron_pulse.tracing.graph_analysis import UNKNOWN, GraphAnalysis, operation
from megatron_pulse.tracing.units import Unit, UnitChain, work_of

GROUP = "context-parallel group"
"""Name of a unit's process group among its state."""


@dataclass(frozen=True)
class DividedChain:
    """Units of a chain as one rank computes them.

    - ``graphs``: of each unit; ``divisions``: of the divided values that units exchange.
    - ``divided``: name and division of the value from which on tokens are divided.
    """

    graphs: tuple[DividedGraph, ...]
    divisions: Mapping[str, Division]
    divided: tuple[str, Division]

    def unit(self, unit: Unit, index: int) -> Unit:
        """``unit``, which has this ``index``, as one rank computes it."""
        divided = self.graphs[index]
        state = (*unit.state, GROUP) if divided.has_group else unit.state
        return replace(unit, graph=divided.graph, state=state)


class NotDivisible(ValueError):
    """Chain whose tokens cannot be divided; ``faults`` lists the reasons."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = list(faults)
        super().__init__(*faults)

    @property
    def has_lines(self) -> bool:
        """True if every fault names its source line."""
        return all(UNKNOWN not in fault for fault in self.faults)


def divide_chain(chain: UnitChain, rank: int, size: int) -> DividedChain:
    """Division of ``chain`` over ``size`` ranks, as ``rank`` computes it.

    Tokens are divided from the first value on from which an attention's queries follow without a
    gather. The result is gathered. Raises NotDivisible if no attention has divided queries, or if a
    gather precedes an attention.
    """
    return _ChainDivider(chain, rank, size).run()


type _Seed = tuple[int, tuple[int, Division]]
"""Unit, and number of its node with the division, from which on tokens are divided."""
_TRIES = 4
"""Values from which on a whole chain is divided, before it is refused."""
_NOTHING = (
    "no scaled_dot_product_attention has queries [batch, heads, tokens, width] that follow from "
    "the noisy sample, with {} tokens or more"
)


@dataclass
class _State:
    """Divisions of the values that units have given so far, and names of those that depend on
    divided tokens.
    """

    divisions: dict[str, Division] = field(default_factory=dict)
    dependent: set[str] = field(default_factory=set)


class _ChainDivider:
    def __init__(self, chain: UnitChain, rank: int, size: int) -> None:
        self._chain, self._rank, self._size = chain, rank, size
        self._works = [work_of(unit, chain) for unit in chain.units]
        self._known: dict[Any, DividedGraph] = {}
        self._fake = FakeValues(chain)
        self._values: dict[str, list[Any]] = {}
        self._readings: dict[int, GraphAnalysis] = {}
        self._refused: list[str] = []

    def run(self) -> DividedChain:
        """Division from the first value for which there are no faults."""
        faults: list[str] = []
        for seed in itertools.islice(self._seeds(), _TRIES):
            graphs, divisions = list[DividedGraph](), dict[str, Division]()
            for graph, found in self._divided(seed):
                graphs.append(graph)
                divisions = found
            if found_here := list(_faults(self._chain, graphs)):
                faults = faults or found_here
                continue
            index, (number, division) = seed
            name = list(self._chain.units[index].graph.nodes)[number].name
            return DividedChain(tuple(graphs), divisions, (name, division))
        raise NotDivisible(faults or self._refused or [_NOTHING.format(self._size)])

    def _divided(self, seed: _Seed) -> Iterator[tuple[DividedGraph, dict[str, Division]]]:
        """Divided graph of each unit in turn, with all divisions so far."""
        state = _State()
        for index in range(len(self._chain.units)):
            graph = self._divide(index, state, seed)
            self._add(index, state, graph)
            yield graph, state.divisions

    def _add(self, index: int, state: _State, graph: DividedGraph) -> None:
        of_results = zip(
            self._chain.units[index].gives, graph.divisions, graph.dependent, strict=True
        )
        for name, division, depends in of_results:
            if division is not None:
                state.divisions[name] = division
            if depends:
                state.dependent.add(name)

    def _divide(self, index: int, state: _State, seed: _Seed) -> DividedGraph:
        at = self._key(index, state, seed)
        if at not in self._known:
            self._known[at] = self._divider(index, state, seed).run()
        return self._known[at]

    def _first_collective(self, index: int, state: _State, seed: _Seed) -> Collective | None:
        at = self._key(index, state, seed)
        if at in self._known:
            return next(iter(self._known[at].collectives), None)
        return self._divider(index, state, seed).first_collective()

    def _key(self, index: int, state: _State, seed: _Seed) -> Any:
        """Key that is equal for units that are divided alike."""
        unit = self._chain.units[index]
        taken = tuple((state.divisions.get(n), n in state.dependent) for n in unit.takes)
        of_unit = seed[1] if index == seed[0] else None
        return self._works[index], taken, of_unit, self._wholes(unit)

    def _wholes(self, unit: Unit) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(unit.gives) if name == self._chain.output)

    def _divider(self, index: int, state: _State, seed: _Seed) -> GraphDivider:
        unit, nodes = self._chain.units[index], self._nodes(index)
        named = list(zip(nodes, unit.takes, strict=False))
        divided = {n: state.divisions[name] for n, name in named if name in state.divisions}
        return GraphDivider(
            unit.graph,
            self._reading(index),
            dict(zip(nodes, self._values_of(index), strict=True)),
            divided,
            [n for n, name in named if name in state.dependent],
            self._rank,
            self._size,
            seed[1] if index == seed[0] else None,
            self._wholes(unit),
        )

    def _nodes(self, index: int) -> list[fx.Node]:
        return list(self._chain.units[index].graph.nodes)

    def _reading(self, index: int) -> GraphAnalysis:
        """Reads and writes of a unit."""
        if index not in self._readings:
            self._readings[index] = GraphAnalysis(self._nodes(index))
        return self._readings[index]

    def _values_of(self, index: int) -> list[Any]:
        """Fake tensor of every node of a unit."""
        work = self._works[index]
        if work not in self._values:
            self._values[work] = self._fake.of_unit(self._chain.units[index])
        return self._values[work]

    def _seeds(self) -> Iterator[_Seed]:
        """Candidates from which an attention's queries follow, in order."""
        for each in self._candidates():
            if self._leads_to_attention(each):
                yield each

    def _candidates(self) -> Iterator[_Seed]:
        """Dimensions of values that depend on the noisy sample, up to the first attention."""
        chain, dependent = self._chain, {self._chain.sample}
        for index, unit in enumerate(chain.units):
            nodes, values = self._nodes(index), self._values_of(index)
            reading = self._reading(index)
            begin = {n for n, name in zip(nodes, unit.takes, strict=False) if name in dependent}
            found = {node for node in reading.order if node in begin} | reading.after(begin)
            for number, node in enumerate(nodes[:-1]):
                if node in found and is_attention(operation(node)):
                    return
                value = values[number]
                written = reading.memory[node] in reading.writers
                if node not in found or written or not isinstance(value, Tensor):
                    continue
                lengths = [(length, dim) for dim, length in enumerate(value.shape)]
                for length, dim in sorted(lengths, reverse=True):
                    if length >= self._size:
                        yield index, (number, Division(dim, (length,)))
            (results,) = nodes[-1].args
            assert isinstance(results, tuple)
            pairs = zip(unit.gives, results, strict=True)
            dependent.update(name for name, node in pairs if node in found)

    def _leads_to_attention(self, seed: _Seed) -> bool:
        """True if an attention's is the first communication of tokens divided at ``seed``.

        Keeps the reason why an attention is none.
        """
        state = _State()
        for index, unit in enumerate(self._chain.units):
            first = self._first_collective(index, state, seed)
            if first is not None:
                if is_attention(first.operation) or first.reason == OF_DATA_REASON:
                    self._refused = self._refused or [_fault(unit.name, first)]
                return first.kind in ("all-to-all", "ring")
            self._add(index, state, self._divide(index, state, seed))
        return False


def _faults(chain: UnitChain, graphs: Sequence[DividedGraph]) -> Iterator[str]:
    """Gathers before an attention, and those of values written in place."""
    every = [(index, each) for index, graph in enumerate(graphs) for each in graph.collectives]
    attentions = [i for i, (_, each) in enumerate(every) if each.kind != "gather"]
    found = [
        (index, each)
        for number, (index, each) in enumerate(every)
        if each.kind == "gather" and (each.refused or number < attentions[-1])
    ]
    yield from (_fault(chain.units[index].name, each) for index, each in found)
    between = chain.units[every[attentions[0]][0] : every[attentions[-1]][0]] if found else ()
    if any(operation(n).startswith(_IMAGE_OPERATIONS) for u in between for n in u.graph.nodes):
        yield (
            "UNets are not divided: convolutions need their neighbours' tokens (halos), and "
            "GroupNorm's statistics are over all tokens"
        )


_IMAGE_OPERATIONS = ("conv2d", "conv3d", "group_norm")


def _fault(unit: str, gathered: Collective) -> str:
    return f"{gathered.operation} of {unit}, at {gathered.place}: {gathered.reason}"
