"""What the nodes of an exported graph do, read and write, and where in the model they come from."""

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
"""The place of what was exported without lines."""


def operation(node: fx.Node) -> str:
    """What a node calls, without its namespace: ``linear.default``."""
    return str(node.target).removeprefix("aten.") if node.op == "call_function" else ""


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is an operation that a piece of the chain is worth having for."""
    return operation(node).startswith(_HEAVY) or any(
        is_heavy(inner) for graph in inner_graphs(node) for inner in graph.nodes
    )


def inner_graphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs that a node runs, as those of autocast and no_grad do."""
    yield from (graph for _, graph in regions(node))


def regions(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Graph]]:
    """Those graphs, each with the argument that names it."""
    for given in node.all_input_nodes:
        module = None
        if given.op == "get_attr" and given.graph.owning_module is not None:
            module = getattr(given.graph.owning_module, str(given.target), None)
        if isinstance(module, fx.GraphModule):
            yield given, module.graph


def given_to(node: fx.Node, region: fx.Node, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """What the inputs of a region's ``graph`` are outside."""
    if region not in node.args:  # as of a branch, which is given a list
        return {}
    given = node.args[node.args.index(region) + 1 :]
    inputs = (inner for inner in graph.nodes if inner.op == "placeholder")
    pairs = zip(inputs, given, strict=False)
    return {inner: outer for inner, outer in pairs if isinstance(outer, fx.Node)}


def _views_of_region(node: fx.Node) -> list[fx.Node | None]:
    """Of each result of a region, the argument whose memory it is; empty for other nodes."""
    for region, graph in regions(node) if operation(node).startswith("wrap_with_") else ():
        outside = given_to(node, region, graph)
        inside = Reading(list(graph.nodes))
        results = inside.output.args[0]
        assert isinstance(results, tuple | list)
        memory = [inside.memory[r] if isinstance(r, fx.Node) else None for r in results]
        return [None if m is None else outside.get(m) for m in memory]
    return []


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or the structure of them) that a node gives."""
    return node.meta.get("val")


def can_travel(node: fx.Node) -> bool:
    """Whether what a node gives can be handed from unit to unit: one tensor of a dtype that a chain
    takes, whose size does not depend on data."""
    value = value_of(node)
    return (
        isinstance(value, Tensor)
        and str(value.dtype).removeprefix("torch.") in DTYPE_BYTES
        and _is_sized(value)
    )


def size_of(node: fx.Node) -> int:
    """Bytes of what a node gives, as far as sizes do not depend on data."""
    leaves = pytree.tree_leaves(value_of(node))
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and _is_sized(leaf))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors)


def _is_sized(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape)


def path_of(node: fx.Node) -> str:
    """The qualified name of the innermost module that called a node's operation."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def place_of(node: fx.Node) -> str:
    """The line of the model that a node comes from: ``file.py:12 (conv1)``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not file.startswith(TORCH)] or frames
    line = f"{own[-1][0]}:{own[-1][1]}" if own else UNKNOWN
    return f"{line} ({path})" if (path := path_of(node)) else line


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node writes."""
    return [
        value
        for argument, value in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _arguments(node: fx.Node) -> list[tuple[Any, fx.Node]]:
    """The arguments of an operation that are nodes, lists of them one by one."""
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


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a node's result is."""
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
    """Whether a cast, which may return what it is given, makes another tensor of it."""
    if not operation(node).startswith(("to.", "type_as.")):
        return False
    before, after = value_of(given), value_of(node)
    if before is None or after is None:  # within a region
        return False
    return bool((before.dtype, before.device) != (after.dtype, after.device))


def ends_gradient(node: fx.Node) -> bool:
    """Whether no gradient comes out of an operation to what it reads: a detached value, one that
    has another's shape only, a region without gradients, numbers that are not real."""
    name, value = operation(node), value_of(node)
    if name.startswith("wrap_with_set_grad_enabled"):
        inside = (inner for graph in inner_graphs(node) for inner in graph.nodes)
        return not node.args[0] and not any("set_grad_enabled" in operation(n) for n in inside)
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    return name.startswith(("detach", "new_")) or name.partition(".")[0].endswith("_like")


class Reading:
    """What the nodes that lead to the output read and write, in order; the last is the output.

    ``reads`` holds writes in place too: who reads memory depends on all that wrote it before.
    ``memory`` maps a node to the one whose memory its result is (itself for most).
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
        """All to which the gradient of the output comes."""
        found = {self.output}
        for node in (self.output, *reversed(self.calls)):
            if node in found and not ends_gradient(node):
                found.update(self.reads[node])
        return found

    def after(self, start: Iterable[fx.Node]) -> set[fx.Node]:
        """All that depends on ``start``; memory that is written with it does so as a whole."""
        found, size = set(start), -1
        while size != len(found):
            size = len(found)
            for node in self.calls:
                if node in found or not found.intersection(self.reads[node]):
                    continue
                found.add(node)
                found.update(self.memory[value] for value in written(node))
        return found
