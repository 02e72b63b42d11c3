"""Analysis of an exported graph's nodes: operations, reads, writes, aliases, source lines."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from megatron_pulse.backbone.chain import DTYPE_BYTES

_HEAVY = ("linear", "conv", "scaled_dot", "matmul", "mm", "bmm", "baddbmm", "einsum", "embedding")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+')
TORCH = str(Path(torch.__file__).parent)
UNKNOWN = "an unknown line"
"""Place of nodes exported without lines."""


def operation(node: fx.Node) -> str:
    """Operation of a node without namespace: ``linear.default``."""
    return str(node.target).removeprefix("aten.") if node.op == "call_function" else ""


def is_heavy(node: fx.Node) -> bool:
    """True if a node's operation justifies a piece of the chain."""
    return operation(node).startswith(_HEAVY) or any(
        is_heavy(inner) for graph in inner_graphs(node) for inner in graph.nodes
    )


def inner_graphs(node: fx.Node) -> Iterator[fx.Graph]:
    """Graphs that a node runs, such as those of autocast and no_grad."""
    yield from (graph for _, graph in regions(node))


def regions(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Graph]]:
    """Inner graphs of a node, each with its naming argument."""
    for given in node.all_input_nodes:
        module = None
        if given.op == "get_attr" and given.graph.owning_module is not None:
            module = getattr(given.graph.owning_module, str(given.target), None)
        if isinstance(module, fx.GraphModule):
            yield given, module.graph


def given_to(node: fx.Node, region: fx.Node, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map the inputs of a region's ``graph`` to outer nodes."""
    if region not in node.args:  # a branch has its inputs in a list
        return {}
    given = node.args[node.args.index(region) + 1 :]
    inputs = (inner for inner in graph.nodes if inner.op == "placeholder")
    pairs = zip(inputs, given, strict=False)
    return {inner: outer for inner, outer in pairs if isinstance(outer, fx.Node)}


def _views_of_region(node: fx.Node) -> list[fx.Node | None]:
    """Argument whose memory each result of a region aliases; empty for other nodes."""
    for region, graph in regions(node) if operation(node).startswith("wrap_with_") else ():
        outside = given_to(node, region, graph)
        inside = GraphAnalysis(list(graph.nodes))
        results = inside.output.args[0]
        assert isinstance(results, tuple | list)
        memory = [inside.memory[r] if isinstance(r, fx.Node) else None for r in results]
        return [None if m is None else outside.get(m) for m in memory]
    return []


def value_of(node: fx.Node) -> Any:
    """Fake tensor of a node, or a structure of them."""
    return node.meta.get("val")


def can_travel(node: fx.Node) -> bool:
    """True if a node's value can be passed between units.

    It must be one tensor of a supported dtype, with a size independent of data.
    """
    value = value_of(node)
    return (
        isinstance(value, Tensor)
        and str(value.dtype).removeprefix("torch.") in DTYPE_BYTES
        and _is_sized(value)
    )


def size_of(node: fx.Node) -> int:
    """Bytes of a node's value, counting only sizes independent of data."""
    leaves = pytree.tree_leaves(value_of(node))
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_sized(leaf))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors)


def _is_sized(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def path_of(node: fx.Node) -> str:
    """Qualified name of the innermost module that called a node's operation."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def place_of(node: fx.Node) -> str:
    """Source line of a node: ``file.py:12 (conv1)``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not file.startswith(TORCH)] or frames
    line = f"{own[-1][0]}:{own[-1][1]}" if own else UNKNOWN
    return f"{line} ({path})" if (path := path_of(node)) else line


def written(node: fx.Node) -> list[fx.Node]:
    """Arguments that a node writes in place."""
    return [
        value
        for argument, value in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _arguments(node: fx.Node) -> list[tuple[Any, fx.Node]]:
    """Node arguments of an operation; lists are flattened."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
    given |= node.kwargs
    return [
        (argument, leaf)
        for argument in schema.arguments
        for leaf in pytree.tree_leaves(given.get(argument.name))
        if isinstance(leaf, fx.Node)
    ]


def argument(node: fx.Node, name: str) -> Any:
    """Argument ``name`` of an operation, or its default; None if it has none of this name."""
    for i, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            default = node.kwargs.get(name, each.default_value)
            return node.args[i] if i < len(node.args) else default
    return None


def _viewed(node: fx.Node) -> fx.Node | None:
    """Argument whose memory a node's result aliases."""
    if node.target is operator.getitem:
        several, which = node.args
        assert isinstance(several, fx.Node)
        views = _views_of_region(several)
        return (views[which] if views and isinstance(which, int) else None) or several
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    results = {s for r in schema.returns if r.alias_info for s in r.alias_info.before_set}
    for argument, value in _arguments(node):
        if argument.alias_info is not None and results & set(argument.alias_info.before_set):
            return None if converts(node, value) else value
    return None


def converts(node: fx.Node, given: fx.Node) -> bool:
    """True if a cast, which may return its input, creates a new tensor."""
    if not operation(node).startswith(("to.", "type_as.")):
        return False
    before, after = value_of(given), value_of(node)
    if before is None or after is None:  # within a region
        return False
    return bool((before.dtype, before.device) != (after.dtype, after.device))


def ends_gradient(node: fx.Node) -> bool:
    """True if no gradient passes from an operation's result to its inputs.

    Cases are detached values, values that take only another's shape, regions without gradients, and
    non-float dtypes.
    """
    name, value = operation(node), value_of(node)
    if name.startswith("wrap_with_set_grad_enabled"):
        inside = (inner for graph in inner_graphs(node) for inner in graph.nodes)
        return not node.args[0] and not any("set_grad_enabled" in operation(n) for n in inside)
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    return name.startswith(("detach", "new_")) or name.partition(".")[0].endswith("_like")


class GraphAnalysis:
    """Reads and writes of the nodes that lead to the output, in order; the last is the output.

    ``reads`` includes in-place writes: a reader of memory depends on all earlier writers.
    ``memory`` maps a node to the node whose memory its result aliases (itself for most).
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.output = nodes[-1]
        self.order = {node: i for i, node in enumerate(nodes)}
        self.memory: dict[fx.Node, fx.Node] = {}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        self.reads: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            given = node.all_input_nodes
            before = [w for a in given for w in self.writers.get(self.memory[a], ())]
            self.reads[node] = list(dict.fromkeys([*given, *before]))
            viewed = _viewed(node)
            self.memory[node] = node if viewed is None else self.memory[viewed]
            for value in written(node):
                self.writers.setdefault(self.memory[value], []).append(node)
        needed: set[fx.Node] = set()
        stack = [self.output]
        while stack:
            new = [a for a in self.reads[stack.pop()] if a not in needed]
            needed.update(new)
            stack += new
        self.calls = [n for n in nodes if n in needed and n.op == "call_function"]
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in [*self.calls, self.output]:
            for a in self.reads[node]:
                self.users[a].append(node)

    def with_gradient(self) -> set[fx.Node]:
        """All nodes that the output's gradient reaches."""
        found = {self.output}
        for node in (self.output, *reversed(self.calls)):
            if node in found and not ends_gradient(node):
                found.update(self.reads[node])
        return found

    def after(self, start: Iterable[fx.Node]) -> set[fx.Node]:
        """All nodes that depend on ``start``; a write makes all aliases of its memory dependent."""
        found, size = set(start), -1
        while size != len(found):
            size = len(found)
            for node in self.calls:
                if node in found or not found.intersection(self.reads[node]):
                    continue
                found.add(node)
                found.update(self.memory[value] for value in written(node))
        return found
