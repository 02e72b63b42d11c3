"""Functions that run the graphs of a chain's units."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental import _config

from megatron_pulse.tracing.graph_analysis import operation
from megatron_pulse.tracing.units import UnitChain

PRODUCTS = {
    torch.ops.aten.linear.default: F.linear,
    torch.ops.aten.conv1d.default: F.conv1d,
    torch.ops.aten.conv2d.default: F.conv2d,
    torch.ops.aten.conv3d.default: F.conv3d,
    torch.ops.aten.conv1d.padding: F.conv1d,
    torch.ops.aten.conv2d.padding: F.conv2d,
    torch.ops.aten.conv3d.padding: F.conv3d,
}
"""Functions of input, weight and optional bias, with deferrable weight gradients."""

_RETARGETED = {
    **PRODUCTS,
    torch.ops.aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
}
"""Functions replaced by public names, for deferred weight gradients and the analysis of memory."""


def counting_every_position(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which masks select every position on the meta device, which has no values."""
    if device.type != "meta":
        return nullcontext()
    context: AbstractContextManager[Any] = _config.patch(meta_nonzero_assume_all_nonzero=True)
    return context


def executable(
    graph: fx.Graph,
    chain: UnitChain,
    device: torch.device,
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Compile a graph of ``chain`` into a function on ``device``, whatever the exporting device.

    The graph may call ``modules`` by name.
    """
    copy = _moved(graph, chain.device, device)
    for node in copy.nodes:
        if node.op == "call_function" and node.target in _RETARGETED:
            node.target = _RETARGETED[node.target]
    used = {n.target: chain.state[n.target] for n in copy.nodes if n.op == "get_attr"}
    regions = {name: _moved_region(each, chain.device, device) for name, each in used.items()}
    return fx.GraphModule({**regions, **(modules or {})}, copy)


def _moved_region(region: Any, exported: str, device: torch.device) -> Any:
    """Region, such as that of autocast, on ``device``; anything else unchanged."""
    if not isinstance(region, fx.GraphModule):
        return region
    copy = _moved(region.graph, exported, device)
    inner = {n.target: attrgetter(n.target)(region) for n in copy.nodes if n.op == "get_attr"}
    moved = {name: _moved_region(each, exported, device) for name, each in inner.items()}
    return fx.GraphModule(moved, copy)


def _moved(graph: fx.Graph, exported: str, device: torch.device) -> fx.Graph:
    """Copy of a graph, exported on that kind of device, whose new tensors are on ``device``."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    here = ("cpu", exported)  # other devices are named by the model

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in copy.nodes:
        if node.op != "call_function":
            continue
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
        if "autocast" in operation(node) and node.args[0] in here:
            by = "cpu" if device.type == "meta" else device.type  # meta has no autocast
            node.args = (by, *node.args[1:])
    return copy


def run(chain: UnitChain, given: Mapping[str, Tensor]) -> Tensor:
    """Run all units in sequence on the module's own parameters.

    ``given`` holds the module's inputs by the caller's names.
    """
    device = next(iter(given.values())).device
    constants_given = [chain.state[name] for name in chain.constant_state]
    with torch.no_grad():
        constants = executable(chain.constants, chain, device)(*constants_given)
    state = {**chain.state, **dict(zip(chain.constant_names, constants, strict=True))}
    values = {n: given[name] for n, name in chain.inputs.items()}
    for unit in chain.units:
        arguments = (*map(values.__getitem__, unit.takes), *map(state.__getitem__, unit.state))
        results = executable(unit.graph, chain, device)(*arguments)
        values.update(zip(unit.gives, results, strict=True))
    return values[chain.output]
