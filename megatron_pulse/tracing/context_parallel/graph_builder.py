"""Graph of one rank under construction, beside the whole graph of a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from megatron_pulse.backbone.token_shares import share_of
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.graph_analysis import GraphAnalysis, operation, place_of

aten = torch.ops.aten

type Divided = Division | tuple[Division, ...] | None
"""Division of a tensor, of each tensor of a list, or None for what is whole."""


OF_DATA_REASON = "the size of an operand or result depends on data"


def is_attention(operation_name: str) -> bool:
    """True for scaled dot product attention."""
    return operation_name.startswith("scaled_dot_product_attention")


class NoRule(Exception):
    """Operation through which tokens do not stay divided; the text says why."""


@dataclass(frozen=True)
class Collective:
    """Communication of a divided graph, or an attention that needs none.

    - ``kind``: "all-to-all" or "ring" of an attention, "gather", or "attention" for one without
      communication.
    - ``num_bytes``: bytes of the tensors that it exchanges, over all ranks.
    - ``operation``, ``place``: for what, with its source line; ``reason``: why it is gathered.
    - ``refused``: nothing can be gathered there (the operation writes in place).
    - ``heads``: numbers of heads of an attention over divided keys.
    """

    kind: str
    num_bytes: int
    operation: str
    place: str
    reason: str = ""
    refused: bool = False
    heads: tuple[int, ...] = ()


class GraphBuilder:
    """Adds operations to the graph of rank ``rank`` of ``size``.

    - ``reading``: reads and writes of the whole graph.
    - ``values``: value of every node of the whole graph (see ``FakeValues``).
    - ``env``: node of the new graph for each node so far; ``divisions``: those that are divided.
    - ``group``: node of the process group.
    - ``collectives``: what the new graph communicates, in order.
    """

    def __init__(
        self, reading: GraphAnalysis, values: Mapping[fx.Node, Any], rank: int, size: int
    ) -> None:
        self.values, self.rank, self.size = values, rank, size
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.divisions: dict[fx.Node, Divided] = {}
        self.collectives: list[Collective] = []
        self.group = fx.Node(self.new, "group", "placeholder", "group", (), {})
        self._reading = reading

    def divided_inputs(self, node: fx.Node) -> list[fx.Node]:
        """Inputs of a node that are divided."""
        return [each for each in node.all_input_nodes if each in self.divisions]

    def division_of(self, node: fx.Node) -> Division:
        """Division of a divided tensor."""
        division = self.divisions[node]
        assert isinstance(division, Division)
        return division

    def is_written(self, node: fx.Node, after: fx.Node | None = None) -> bool:
        """True if an operation, or one ``after`` another, writes to the memory of a value."""
        reading = self._reading
        writers = reading.writers.get(reading.memory[node], ())
        return any(after is None or reading.order[w] > reading.order[after] for w in writers)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Add an operation."""
        return self.new.call_function(target, args)

    def copy(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        """Add the same operation, on ``instead`` of some inputs."""
        replaced = instead or {}
        made = self.new.node_copy(node, lambda each: replaced.get(each) or self.env[each])
        made.meta.pop("val", None)  # it is of whole tokens
        return made

    def copy_narrowed(self, node: fx.Node, rank: int) -> tuple[fx.Node, Division]:
        """Add the same operation on inputs that are broadcast to ``rank`` dimensions.

        Whole inputs as long as the tokens are narrowed. Raises NoRule for other lengths, and if
        inputs are divided in two ways.
        """
        found = {
            division.at(division.dim + rank - self.values[each].dim())
            for each in self.divided_inputs(node)
            if isinstance(division := self.divisions[each], Division)
        }
        if len(found) != 1:
            raise NoRule("its operands are divided in two ways")
        (common,) = found
        narrowed = {}
        for each in node.all_input_nodes:
            if each in self.divisions:
                continue
            value = self.values[each]
            dim = common.dim - rank + value.dim()
            if dim < 0 or value.shape[dim] == 1:
                continue
            if value.shape[dim] != common.length:
                raise NoRule(f"an operand has {value.shape[dim]} of {common.length} tokens")
            narrowed[each] = self.narrow(self.env[each], common.at(dim))
        return self.copy(node, narrowed), common

    def narrow(self, whole: fx.Node, division: Division) -> fx.Node:
        """Add the narrowing of a whole value to the rank's share."""
        parts, start = [], 0
        for length in division.segments:
            first, count = share_of(length, self.rank, self.size)
            parts.append(self.call(aten.narrow.default, whole, division.dim, start + first, count))
            start += length
        return parts[0] if len(parts) == 1 else self.call(aten.cat.default, parts, division.dim)

    def own_segments(self, division: Division) -> tuple[int, ...]:
        """Numbers of the rank's tokens, by segment."""
        return division.own_segments(self.rank, self.size)

    def own_shape(self, node: fx.Node, division: Division) -> tuple[int, ...]:
        """Shape of the rank's share of a node's value."""
        return division.own_shape(self.values[node].shape, self.rank, self.size)

    def note(
        self,
        kind: str,
        num_bytes: int,
        node: fx.Node,
        reason: str = "",
        refused: bool = False,
        heads: tuple[int, ...] = (),
    ) -> None:
        """Note a collective for a node; see ``Collective``."""
        of = operation(node), place_of(node), reason, refused, heads
        self.collectives.append(Collective(kind, num_bytes, *of))

    def bytes_of(self, node: fx.Node) -> int:
        """Bytes of a whole tensor."""
        value = self.values[node]
        return value.numel() * value.element_size() if isinstance(value, Tensor) else 0

    def exchanged(self, node: fx.Node) -> None:
        """Note the all-to-alls of an attention: of queries, keys, values and its result."""
        self._attended("all-to-all", [*node.args[:3], node], node)

    def visited(self, node: fx.Node) -> None:
        """Note the ring of an attention, in which keys and values visit every rank."""
        self._attended("ring", node.args[1:3], node)

    def _attended(self, kind: str, sent: Sequence[Any], node: fx.Node) -> None:
        heads = tuple(self.values[each].shape[1] for each in node.args[:2])
        self.note(kind, sum(map(self.bytes_of, sent)), node, heads=heads)
