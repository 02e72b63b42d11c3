"""Graphs of units whose linear maps take quantised weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from megatron_pulse.adapters.quantization import quantized_names
from megatron_pulse.adapters.quantized_linear import quantized_linear
from megatron_pulse.tracing.adapted_graph import LINEAR, weight_nodes, weights_used_by
from megatron_pulse.tracing.units import Unit


@dataclass(frozen=True)
class Quantization:
    """Quantisation of a derived chain's frozen weights.

    ``kind`` is one of ``QUANTIZATIONS``. ``weights`` are candidates; linear maps take them
    quantised. Values are rounded to ``dtype`` first.
    """

    kind: str
    weights: frozenset[str]
    dtype: torch.dtype

    def of_unit(self, unit: Unit) -> tuple[str, ...]:
        """Weights that are quantised in a unit: candidates that only linear maps use.

        Embedders may run as copies on every device, and are not quantised.
        """
        if unit.embedder:
            return ()
        found = weights_used_by(unit, lambda node: node.target == LINEAR)
        return tuple(name for name in found if name in self.weights)


def weights_of_blocks(module: nn.Module) -> frozenset[str]:
    """Weights in a module's blocks, which are the members of its lists."""
    lists = [n for n, part in module.named_modules() if isinstance(part, nn.ModuleList) and n]
    inside = tuple(f"{name}." for name in lists)
    names = (name for name, _ in module.named_parameters())
    return frozenset(n for n in names if n.startswith(inside) and n.endswith(".weight"))


def quantized(unit: Unit, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> Unit:
    """``unit`` with integers and scales in place of the weights that have ``shapes``."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(unit.graph, {}))
    of_graph = replace(unit, graph=graph)
    state = list(unit.state)
    for node, name in weight_nodes(of_graph).items():
        if name not in shapes:
            continue
        with graph.inserting_after(node):
            scales = graph.placeholder(f"{node.name}_scales")
        with graph.inserting_before(scales):
            integers = graph.placeholder(f"{node.name}_{kind}")
        for user in list(node.users):
            inputs, _, *bias = user.args
            operands = inputs, integers, scales, *(bias or [None]), kind, shapes[name]
            with graph.inserting_before(user):
                call = graph.call_function(quantized_linear, operands)
            call.meta.update(user.meta)
            user.replace_all_uses_with(call)
            graph.erase_node(user)
        graph.erase_node(node)
        at = state.index(name)
        state[at : at + 1] = quantized_names(name, kind)
    graph.lint()
    others = [name for name in unit.weights if name not in shapes]
    added = [held for name in shapes for held in quantized_names(name, kind)]
    return replace(of_graph, state=tuple(state), weights=(*others, *added))
