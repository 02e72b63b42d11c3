"""A module's graph, or the reasons why there is none that a pipeline could run.

``torch.export`` before dispatch: autograd works on the graph, and linear maps, convolutions, norms
and attention are one node each.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from megatron_pulse.backbone.derived.reading import (
    TORCH,
    Reading,
    converts,
    inner_graphs,
    operation,
    place_of,
    value_of,
)
from megatron_pulse.faults import raised, told


class DerivationError(ValueError):
    """A module of which no chain can be made; ``faults`` lists why, with lines of the model."""

    def __init__(self, module: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(told(f"{module} cannot be run in a pipeline as it is", faults))


@dataclass(frozen=True)
class Exported:
    """The graph of one call of a module.

    ``inputs`` are the nodes of the tensors it was called with, ``weights`` those of parameters;
    ``names`` gives the qualified name of every parameter, buffer and constant, ``state`` the
    tensors by these names, the module's own. ``blocks`` are the qualified names of its blocks.
    """

    reading: Reading
    inputs: tuple[fx.Node, ...]
    weights: frozenset[fx.Node]
    names: Mapping[fx.Node, str]
    state: Mapping[str, Any]
    output: fx.Node
    blocks: frozenset[str]


def export(
    module: nn.Module, given: Mapping[str, Any], fixed: frozenset[str], output: int | None
) -> Exported:
    """The graph of ``module(**given)``; the inputs ``fixed`` become constants.

    ``output`` says which of several tensors that the module returns is the prediction.
    Raises DerivationError with the operation and the line where that is not possible.
    """
    name = type(module).__name__
    try:
        program = torch.export.export(module, (), dict(given), strict=False)
    except Exception as error:
        raise DerivationError(name, [_reason(error, module)]) from error
    graph = program.graph
    _drop_identities(graph)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    result = _result(graph, output, name)
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    users = [n for n in placeholders if kinds[n.name].kind is InputKind.USER_INPUT]
    leaves = dict(zip(users, pytree.tree_leaves(((), dict(given))), strict=True))
    state = {**program.constants, **program.state_dict, **dict(module.named_parameters())}
    # a weight of two modules has one name, whichever of them the export says
    first = {id(parameter): n for n, parameter in module.named_parameters()}
    names = {n: kinds[n.name].target for n in placeholders if n not in leaves}
    for node in names:
        if _is_weight(kinds[node.name]):
            names[node] = first[id(module.get_parameter(names[node]))]
    for node in (n for n in nodes if n.op == "get_attr"):
        names[node] = node.target
        state.setdefault(node.target, getattr(program.graph_module, node.target))
    for node in (n for n in users if n.name in fixed):
        names[node] = f"input {node.name}"
        state[names[node]] = leaves[node]
    reading = Reading(nodes)
    if faults := [*_writes(reading, names), *_random(reading.calls), *_running(reading.calls)]:
        raise DerivationError(name, list(dict.fromkeys(faults)))
    return Exported(
        reading,
        tuple(n for n in users if isinstance(value_of(n), Tensor) and n.name not in fixed),
        frozenset(n for n in names if n.name in kinds and _is_weight(kinds[n.name])),
        names,
        state,
        result,
        _blocks(module),
    )


def _is_weight(spec: Any) -> bool:
    return spec.kind is InputKind.PARAMETER


def _blocks(module: nn.Module) -> frozenset[str]:
    """Members of lists whose members all have children: blocks, not the parts of an MLP."""
    return frozenset(
        f"{name}.{key}".lstrip(".")
        for name, parent in module.named_modules()
        if isinstance(parent, nn.ModuleList | nn.Sequential)
        and all(child._modules for child in parent.children())
        for key in parent._modules
    )


def _reason(error: Exception, module: nn.Module) -> str:
    """What export said, and the last line of the model's own files on the way there."""
    sources = {inspect.getsourcefile(type(m)) for m in module.modules()}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in sources and not frame.filename.startswith(TORCH)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"torch.export cannot follow it{where}: {raised(error)}"


def _result(graph: fx.Graph, output: int | None, name: str) -> fx.Node:
    """The node of the prediction; the graph then returns it alone."""
    last = list(graph.nodes)[-1]
    results = [n for n in pytree.tree_leaves(last.args) if isinstance(n, fx.Node)]
    if output is None and len(results) != 1:
        found = ", ".join(f"{i}: {list(value_of(n).shape)}" for i, n in enumerate(results))
        raise DerivationError(
            name,
            [
                f"it returns {len(results)} tensors ({found}), and a chain ends with one: say "
                "which is the prediction, as output=0"
            ],
        )
    if output is not None and not 0 <= output < len(results):
        raise DerivationError(name, [f"output={output}: it returns {len(results)} tensors"])
    result = results[output or 0]
    last.args = (result,)
    return result


def _drop_identities(graph: fx.Graph) -> None:
    """Casts to what a tensor is, and dropout of nothing, would hide that two values are one."""
    for node in list(graph.nodes):
        name = operation(node)
        if name.startswith("dropout."):
            same = not (node.args[1] and node.args[2])
        elif name.startswith(("to.", "type_as.")):
            copies = node.kwargs.get("copy") or (
                name != "to.device" and True in node.args[3:4] or True in node.args[4:5]
            )
            same = not copies and not converts(node, node.args[0])
        else:
            same = False
        if same:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _writes(reading: Reading, names: Mapping[fx.Node, str]) -> Iterator[str]:
    """Writes to what is not the call's own memory."""
    for memory, writers in reading.writers.items():
        if memory.op != "call_function":
            what = names.get(memory, memory.name)
            for writer in writers:
                yield (
                    f"{operation(writer)} writes to {what}, at {place_of(writer)}: a step must not "
                    "change what the module or its caller holds"
                )
    for node in reading.calls:
        for inner in inner_graphs(node):
            inside = Reading(list(inner.nodes))
            if any(memory.op == "placeholder" for memory in inside.writers):
                yield (
                    f"{operation(node)} writes to what it is given, at {place_of(node)}: not "
                    "possible in a region of autocast or no_grad"
                )


def _random(nodes: list[fx.Node]) -> Iterator[str]:
    for node in nodes:
        for inner in inner_graphs(node):
            yield from _random([n for n in inner.nodes if n.op == "call_function"])
        tags = getattr(node.target, "tags", ())
        name = operation(node)
        if name.startswith("scaled_dot_product"):
            chance = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0)
            is_random = bool(chance)
        elif name.startswith("dropout."):
            is_random = True
        else:
            is_random = torch.Tag.nondeterministic_seeded in tags
        if is_random:
            yield (
                f"{name} is random, at {place_of(node)}: results would depend on the layout; set "
                "dropout to 0, or call eval()"
            )


def _running(nodes: list[fx.Node]) -> Iterator[str]:
    """Norms that update running statistics, which their schemas do not say."""
    for node in nodes:
        name = operation(node)
        if name.startswith(("batch_norm", "instance_norm")) and node.args[3] and node.args[5]:
            yield (
                f"{name} changes its running statistics, at {place_of(node)}: call eval() on it, "
                "or track none"
            )


def own_memory_faults(reading: Reading, home: Mapping[fx.Node, set[int]]) -> Iterator[str]:
    """Writes that would reach, or miss, what another unit holds; ``home`` says who has a node."""
    for memory, writers in reading.writers.items():
        for writer in writers:
            if not home.get(writer, set()) <= home.get(memory, set()):
                yield _parted(writer)
        last = max(reading.order[w] for w in writers)
        units = set().union(*(home.get(w, set()) for w in writers))
        for alias in (n for n, m in reading.memory.items() if m is memory):
            for user in reading.users.get(alias, ()):
                if reading.order[user] < last and not home.get(user, units) <= units:
                    yield _parted(user)


def _parted(node: fx.Node) -> str:
    return (
        f"{operation(node)}, at {place_of(node)}, shares memory with a value that another part of "
        "the chain writes in place"
    )
