"""A small module called as it is and as its chain: what a trace missed shows in the results."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatron_pulse.backbone.derived.chains import Chains
from megatron_pulse.backbone.derived.exported import dataclasses_as_dictionaries
from megatron_pulse.backbone.derived.layer import run
from megatron_pulse.backbone.derived.leaves import leaves_of
from megatron_pulse.backbone.derived.units import UnitChain
from megatron_pulse.backbone.derived.weights.hollow import is_hollow
from megatron_pulse.faults import raised

_PARAMETERS, _SECONDS = 1 << 22, 1.0


def is_small(module: nn.Module) -> bool:
    """Whether a module has few enough parameters to be tried."""
    count: int = sum(p.numel() for p in module.parameters())
    return count <= _PARAMETERS


def trial(module: nn.Module, chains: Chains) -> list[str]:
    """What differs between two calls of ``module`` (on a CPU, in a bit), or beyond rounding between
    that and its chain, on the example that the chain was made of.

    Nothing is tried of a module that is not small or has no values, nor again where a call takes
    longer than a second.
    """
    tensors = (*module.parameters(), *module.buffers())
    if not is_small(module) or any(is_hollow(tensor) for tensor in tensors):
        return []
    return chains.alone(lambda: _tried(module, chains))


def _tried(module: nn.Module, chains: Chains) -> list[str]:
    given, start = chains.example(), time.perf_counter()
    try:
        first = _called(module, given, chains.output)
        if time.perf_counter() - start > _SECONDS:
            return []
        second = _called(module, given, chains.output)
    except Exception as error:  # a module may raise anything
        return [f"it cannot be called with its example: {raised(error)}"]
    exact = first.device.type == "cpu"
    if (apart := _apart(first, second)) > (0.0 if exact else _tolerance(first)):
        return [
            f"two calls of it with the same inputs differ (by {apart:.0e} of the result): what "
            "changes between calls (a count, a clock, random numbers, what was kept) would be a "
            "constant of the chain"
        ]
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    try:
        apart = _apart(second, _run(chains.first, own, given))
    except Exception as error:
        return [f"its chain fails where it does not: {raised(error)}"]
    if apart > _tolerance(second):
        return [
            f"its chain's result is another than its own (by {apart:.0e}) with the same inputs and "
            "parameters: forward does what a trace of tensors does not hold"
        ]
    return []


def _called(module: nn.Module, given: Mapping[str, Any], output: int | None) -> Tensor:
    with dataclasses_as_dictionaries(module):
        returned = module(**given)
    results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    return results[output or 0].detach().clone()


def _run(chain: UnitChain, own: Mapping[str, Tensor], given: Mapping[str, Any]) -> Tensor:
    tensors = {name: leaf for name, leaf in leaves_of(given).items() if isinstance(leaf, Tensor)}
    state = {name: own.get(name, value) for name, value in chain.state.items()}
    with torch.no_grad():
        return run(replace(chain, state=state), tensors)


def _apart(a: Tensor, b: Tensor) -> float:
    """The norm of the difference of two results by that of the first; 0 where they are equal in
    every bit, or have no norm."""
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return 0.0
    a, b = a.double(), b.double()
    return float(((a - b).norm() / a.norm()).nan_to_num())


def _tolerance(result: Tensor) -> float:
    """Half of the digits."""
    return math.sqrt(torch.finfo(result.dtype).eps)
