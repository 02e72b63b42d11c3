"""Chains as JSON: graphs of torch's operations, without the module's own tensors.

Reading runs no code: a name becomes an operation that torch knows, or a function of ``operator``.
"""

from __future__ import annotations

import base64
import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx

from megatron_pulse.tracing.unit_assignment import SizeDecisions
from megatron_pulse.tracing.units import Unit, UnitChain

_CONSTANT_BYTES = 1 << 19
"""Largest constant of a graph that is stored."""
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class NotStorable(ValueError):
    """Chain with something that has no form in JSON."""


def to_record(chain: UnitChain, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """``chain`` as JSON values; tensors of ``own`` are stored by name. Raises NotStorable."""
    return {
        "units": [{**unit.signature, "graph": _graph_out(unit.graph)} for unit in chain.units],
        "sample": chain.sample,
        "device": chain.device,
        "inputs": chain.inputs,
        "output": chain.output,
        "values": {name: _meta_of(value) for name, value in chain.values.items()},
        "state": {name: _state_out(name, chain.state[name], own) for name in _state_names(chain)},
        "trained": sorted(chain.trained),
        "constants": _graph_out(chain.constants),
        "constant_names": chain.constant_names,
        "constant_state": chain.constant_state,
        "begins": chain.decided.begins,
        "small": sorted(chain.decided.small),
    }


def from_record(record: Mapping[str, Any], own: Mapping[str, Tensor]) -> UnitChain:
    """Chain of ``to_record``; raises an exception of any kind if the record is damaged."""
    return UnitChain(
        tuple(_unit_in(each) for each in record["units"]),
        record["sample"],
        record["device"],
        dict(record["inputs"]),
        record["output"],
        {name: _empty(*meta) for name, meta in record["values"].items()},
        {name: _state_in(name, value, own) for name, value in record["state"].items()},
        frozenset(record["trained"]),
        _graph_in(record["constants"]),
        tuple(record["constant_names"]),
        tuple(record["constant_state"]),
        SizeDecisions(tuple(record["begins"]), frozenset(record["small"])),
    )


def _unit_in(record: Mapping[str, Any]) -> Unit:
    values: dict[str, Any] = {
        each.name: tuple(value) if isinstance(value := record[each.name], list) else value
        for each in fields(Unit)
        if each.name != "graph"
    }
    return Unit(graph=_graph_in(record["graph"]), **values)


def _state_names(chain: UnitChain) -> list[str]:
    """Names of the tensors and regions that units and constants take or only hold, in order."""
    graphs = [chain.constants, *(unit.graph for unit in chain.units)]
    held = (name for unit in chain.units for name in (*unit.state, *unit.weights))
    taken: Iterable[str] = [*chain.constant_state, *held]
    nodes = (node for graph in graphs for node in graph.nodes)
    regions = [str(node.target) for node in nodes if node.op == "get_attr"]
    return [n for n in dict.fromkeys([*taken, *regions]) if n not in chain.constant_names]


def _state_out(name: str, value: Any, own: Mapping[str, Tensor]) -> dict[str, Any]:
    if isinstance(value, fx.GraphModule):
        nodes = (node for node in value.graph.nodes if node.op == "get_attr")
        inner = {str(n.target): _state_out(n.target, getattr(value, n.target), {}) for n in nodes}
        return {"graph": _graph_out(value.graph), "regions": inner}
    if own.get(name) is value:
        return {"own": _meta_of(value)}
    if type(value) is not Tensor or value.device.type != "cpu" or value.nbytes > _CONSTANT_BYTES:
        raise NotStorable(f"{name} is a {type(value).__name__} that is not the module's own")
    content = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {"constant": _meta_of(value), "values": base64.b64encode(content).decode()}


def _state_in(name: str, record: Mapping[str, Any], own: Mapping[str, Tensor]) -> Any:
    if "graph" in record:
        inner = {target: _state_in(target, each, {}) for target, each in record["regions"].items()}
        return fx.GraphModule(inner, _graph_in(record["graph"]))
    if "own" in record:
        if _meta_of(own[name]) != record["own"]:
            raise ValueError(f"{name} has another shape or dtype")
        return own[name]
    kind, shape = record["constant"]
    content = bytearray(base64.b64decode(record["values"], validate=True))
    value = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0)
    return value.view(getattr(torch, kind)).reshape(shape)


def _meta_of(value: Tensor) -> list[Any]:
    return [str(value.dtype).removeprefix("torch."), list(value.shape)]


def _empty(kind: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")


def _graph_out(graph: fx.Graph) -> list[Any]:
    """Nodes as (operation, name, target, arguments, keywords)."""
    return [
        [node.op, node.name, _target_out(node), _out(node.args), _out(node.kwargs)]
        for node in graph.nodes
    ]


def _graph_in(record: list[Any]) -> fx.Graph:
    graph, known = fx.Graph(), dict[str, fx.Node]()
    for op, name, target, args, kwargs in record:
        if op not in ("placeholder", "get_attr", "call_function", "output"):
            raise ValueError(f"{op} is no operation of an exported graph")
        called = _target(target) if op == "call_function" else target
        node = graph.create_node(op, called, _in(args, known), _in(kwargs, known), name)
        if node.name != name:
            raise ValueError(f"{name} is called {node.name}")
        known[name] = node
    graph.lint()
    return graph


def _target_out(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = f"higher_order.{target.name()}"
    elif getattr(target, "__module__", "") == "_operator":
        name = f"operator.{target.__name__}"
    else:
        name = str(target)
    try:
        is_known = _target(name) is target
    except (AttributeError, ValueError):
        is_known = False
    if not is_known:
        raise NotStorable(f"{node.name} calls {name}")
    return name


@functools.cache
def _target(name: str) -> Any:
    place, *path = name.split(".")
    found = operator if place == "operator" else getattr(torch.ops, place)
    for part in path:
        found = getattr(found, part)
    return found


def _out(value: Any) -> Any:
    """Argument as JSON: constants as they are, all others as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return ["float", value.hex()]
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, _NAMED):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    if type(value) is torch.device:
        return ["device", str(value)]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *map(_out, value)]
    if isinstance(value, slice):
        return ["slice", *map(_out, (value.start, value.stop, value.step))]
    if isinstance(value, Mapping):
        return ["dict", *(part for key, each in value.items() for part in (key, _out(each)))]
    raise NotStorable(f"an operation takes {type(value).__name__} {value!r:.60}")


def _in(value: Any, known: Mapping[str, fx.Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind == "node":
        return known[parts[0]]
    if kind == "float":
        return float.fromhex(parts[0])
    if kind == "device":
        return torch.device(parts[0])
    if kind in ("dtype", "layout", "memory_format"):
        named = getattr(torch, parts[0])
        if not isinstance(named, _NAMED):
            raise ValueError(f"{parts[0]} is no {kind}")
        return named
    if kind == "dict":
        return {key: _in(each, known) for key, each in zip(parts[::2], parts[1::2], strict=True)}
    inner = [_in(part, known) for part in parts]
    if kind == "slice":
        return slice(*inner)
    if kind not in ("tuple", "list"):
        raise ValueError(f"{kind} is no kind of argument")
    return tuple(inner) if kind == "tuple" else inner
