"""Division of a derived chain: where its tokens are divided, and what is sent for it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from megatron_pulse.tracing.context_parallel.divided_graph import DividedGraph, GraphDivider
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.fake_values import FakeValues
from megatron_pulse.tracing.context_parallel.graph_builder import Collective
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
        super().__init__("; ".join(faults))

    @property
    def has_lines(self) -> bool:
        """True if every fault names its source line."""
        return UNKNOWN not in str(self)


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
    "no attention has queries [batch, heads, tokens, width] that follow from the noisy sample, "
    "with {} tokens or more"
)


class _ChainDivider:
    def __init__(self, chain: UnitChain, rank: int, size: int) -> None:
        self._chain, self._rank, self._size = chain, rank, size
        self._works = [work_of(unit, chain) for unit in chain.units]
        self._known: dict[Any, DividedGraph] = {}
        self._fake = FakeValues(chain)
        self._values: dict[str, list[Any]] = {}
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
        divisions: dict[str, Division] = {}
        dependent = set[str]()
        for index, unit in enumerate(self._chain.units):
            wholes = [i for i, name in enumerate(unit.gives) if name == self._chain.output]
            of_unit = seed[1] if index == seed[0] else None
            graph = self._divide(index, divisions, dependent, of_unit, wholes)
            of_results = zip(unit.gives, graph.divisions, graph.dependent, strict=True)
            for name, division, depends in of_results:
                if division is not None:
                    divisions[name] = division
                if depends:
                    dependent.add(name)
            yield graph, divisions

    def _divide(
        self,
        index: int,
        divisions: Mapping[str, Division],
        dependent: Collection[str],
        seed: tuple[int, Division] | None,
        wholes: Sequence[int],
    ) -> DividedGraph:
        unit = self._chain.units[index]
        taken = tuple(divisions.get(name) for name in unit.takes)
        depends = tuple(name in dependent for name in unit.takes)
        at = self._works[index], taken, depends, seed, tuple(wholes)
        if at not in self._known:
            nodes = list(unit.graph.nodes)
            divided = {n: d for n, d in zip(nodes, taken, strict=False) if d is not None}
            of_tokens = [n for n, known in zip(nodes, depends, strict=False) if known]
            values = dict(zip(nodes, self._values_of(index), strict=True))
            of = divided, of_tokens, self._rank, self._size, seed, wholes
            self._known[at] = GraphDivider(unit.graph, values, *of).run()
        return self._known[at]

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
            nodes, values = list(unit.graph.nodes), self._values_of(index)
            reading = GraphAnalysis(nodes)
            begin = {n for n, name in zip(nodes, unit.takes, strict=False) if name in dependent}
            found = {node for node in reading.order if node in begin} | reading.after(begin)
            for number, node in enumerate(nodes[:-1]):
                if node in found and is_attention(node):
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
        """True if an all-to-all is the first communication of tokens divided at ``seed``.

        Keeps the reason why an attention is none.
        """
        for unit, (graph, _) in zip(self._chain.units, self._divided(seed), strict=True):
            if graph.collectives:
                first = graph.collectives[0]
                if first.operation.startswith("scaled_dot_product"):
                    self._refused = self._refused or [_fault(unit.name, first)]
                return first.kind == "all-to-all"
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


def is_attention(node: fx.Node) -> bool:
    """True for scaled dot product attention."""
    return node.target is torch.ops.aten.scaled_dot_product_attention.default
