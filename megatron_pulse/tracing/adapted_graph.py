"""Graphs of units with low-rank adapters beside their linear maps and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from megatron_pulse.adapters.kronecker import Product, add_product
from megatron_pulse.adapters.low_rank import (
    add_conv2d,
    add_dora_conv2d,
    add_dora_linear,
    add_linear,
    drop,
    factor_names,
    magnitude_name,
)
from megatron_pulse.tracing.units import Unit

LINEAR = torch.ops.aten.linear.default
_CONVOLUTIONS = (torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)

_ADDING: Mapping[tuple[bool, bool], Callable[..., Any]] = {
    (True, False): add_linear,
    (False, False): add_conv2d,
    (True, True): add_dora_linear,
    (False, True): add_dora_conv2d,
}
"""Functions that add an adapter: of (linear map, with magnitudes)."""
DROPOUT = "dropout of the adapter"
"""Name of a unit's dropout among its state."""


@dataclass(frozen=True)
class UnitAdapter:
    """Adapter of a unit: the ``weights`` beside which it has factors, and their ``scale``.

    If it ``drops``, the unit takes the layer's dropout. With ``magnitudes`` it is DoRA, and with
    ``products`` beside the weights LoKr.
    """

    weights: tuple[str, ...]
    scale: float
    drops: bool = False
    magnitudes: bool = False
    products: Mapping[str, Product] = field(default_factory=dict)

    def names_beside(self, weight: str) -> tuple[str, ...]:
        """Names of the trained parameters beside ``weight``."""
        if weight in self.products:
            return self.products[weight].names
        more = (magnitude_name(weight),) if self.magnitudes else ()
        return (*factor_names(weight), *more)


def adaptable_weights(unit: Unit) -> list[str]:
    """Weights of a unit that only linear maps and ungrouped 2D convolutions use, and as weights."""
    return [name for name in weights_used_by(unit, _takes_adapter) if name.endswith(".weight")]


def weights_used_by(unit: Unit, fits: Callable[[fx.Node], bool]) -> list[str]:
    """Weights of a unit that only operations that fit use, and as their second operand."""
    used: dict[str, bool] = {}
    own = weight_nodes(unit)
    for node in unit.graph.nodes:
        for given in node.all_input_nodes:
            if given in own:
                is_weight = fits(node) and node.args[1] is given and node.args[0] is not given
                used[own[given]] = used.get(own[given], True) and is_weight
    return [name for name, all_fit in used.items() if all_fit]


def adapted(unit: Unit, adapter: UnitAdapter) -> Unit:
    """``unit`` with the factors of ``adapter`` as further weights."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(unit.graph, {}))
    of_graph = replace(unit, graph=graph)
    names = {node: name for node, name in weight_nodes(of_graph).items() if name in adapter.weights}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    factors: dict[str, list[fx.Node]] = {}
    added: list[str] = []
    for name in adapter.weights:
        factors[name] = []
        for factor in adapter.names_beside(name):
            with graph.inserting_after(last):
                last = graph.placeholder(f"adapter_{len(added)}")
            factors[name].append(last)
            added.append(factor)
    state = list(added)
    if adapter.drops:
        with graph.inserting_after(last):
            dropout = graph.placeholder("adapter_dropout")
        state.append(DROPOUT)
    for node in list(graph.nodes):
        if not _takes_adapter(node) or node.args[1] not in names:
            continue
        given, weight, *_ = node.args
        name, inputs, before = names[weight], given, node
        if adapter.drops:
            with graph.inserting_after(node):
                inputs = before = graph.call_function(drop, (given, dropout, name))
            inputs.meta.update(given.meta)
        settings = {} if node.target == LINEAR else dict(_settings(node))
        arguments: tuple[Any, ...]
        if (product := adapter.products.get(name)) is not None:
            function: Callable[..., Any] = add_product
            of_call = product.kernel, settings
            arguments = node, inputs, adapter.scale, *of_call, *factors[name]
        else:
            function = _ADDING[node.target == LINEAR, adapter.magnitudes]
            a, b, *magnitude = factors[name]
            arguments = node, inputs, a, b, adapter.scale
            if adapter.magnitudes:
                own = *magnitude, weight, _bias(node)
                arguments = node, given, inputs, a, b, adapter.scale, *own
            if node.target != LINEAR:
                arguments = *arguments, settings
        with graph.inserting_after(before):
            result = graph.call_function(function, arguments)
        result.meta.update(node.meta)
        node.replace_all_uses_with(result, delete_user_cb=lambda user, own=result: user is not own)
    graph.lint()
    return replace(of_graph, state=(*unit.state, *state), weights=(*unit.weights, *added))


def weight_nodes(unit: Unit) -> dict[fx.Node, str]:
    """Placeholders of the unit's weights, with their names."""
    placeholders = (node for node in unit.graph.nodes if node.op == "placeholder")
    names = zip(placeholders, (*unit.takes, *unit.state), strict=True)
    return {node: name for node, name in names if name in unit.weights}


def _takes_adapter(node: fx.Node) -> bool:
    if node.target == LINEAR:
        return True
    groups = dict(_arguments(node)).get("groups", 1) if node.target in _CONVOLUTIONS else 0
    return groups == 1


def _bias(node: fx.Node) -> Any:
    """Bias of a linear map or convolution; None without one."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _settings(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Stride, padding and dilation of a convolution."""
    return ((name, value) for name, value in _arguments(node) if name != "groups")


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    names = ("stride", "padding", "dilation", "groups")
    yield from zip(names, node.args[3:], strict=False)
    yield from ((name, node.kwargs[name]) for name in names if name in node.kwargs)
