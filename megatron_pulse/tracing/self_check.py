"""Comparison of a small module with its derived chain, to detect effects missed by the trace."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatron_pulse.errors import describe_exception
from megatron_pulse.tracing.chains import Chains
from megatron_pulse.tracing.checks.module_state import is_small
from megatron_pulse.tracing.executable import run
from megatron_pulse.tracing.initial_weights.meta_init import has_no_memory
from megatron_pulse.tracing.input_leaves import leaves_of
from megatron_pulse.tracing.torch_export import dataclasses_as_dictionaries
from megatron_pulse.tracing.units import UnitChain

_SECONDS = 1.0


def compare_with_module(module: nn.Module, chains: Chains) -> list[str]:
    """Differences between two calls of ``module``, and between module and chain, on the example.

    On a CPU, two calls must agree bitwise; chain and module must agree within rounding. Modules
    that are large or have no values are not tried. After a call of more than a second no further
    call is made.
    """
    tensors = (*module.parameters(), *module.buffers())
    if not is_small(module) or any(has_no_memory(tensor) for tensor in tensors):
        return []
    return chains.alone(lambda: _tried(module, chains))


def _tried(module: nn.Module, chains: Chains) -> list[str]:
    given, start = chains.example(), time.perf_counter()
    try:
        first = _called(module, given, chains.output)
        if time.perf_counter() - start > _SECONDS:
            return []
        second = _called(module, given, chains.output)
    except Exception as error:  # a module may raise any exception
        return [f"the call with its example fails: {describe_exception(error)}"]
    exact = first.device.type == "cpu"
    if (apart := _apart(first, second)) > (0.0 if exact else _tolerance(first)):
        return [
            f"two calls of it with the same inputs differ (by {apart:.0e} of the result): values "
            "that change between calls (a counter, a clock, random numbers, a cache) would be "
            "constants of the chain"
        ]
    own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    try:
        apart = _apart(second, _run(chains.first, own, given))
    except Exception as error:
        return [f"its chain fails, but the module does not: {describe_exception(error)}"]
    if apart > _tolerance(second):
        return [
            f"its chain's result differs from its own (by {apart:.0e}) with the same inputs and "
            "parameters: forward has effects that a trace does not record"
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
    """Relative norm of the difference; 0 if results are bitwise equal or have no norm."""
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return 0.0
    a, b = a.double(), b.double()
    return float(((a - b).norm() / a.norm()).nan_to_num())


def _tolerance(result: Tensor) -> float:
    """Relative tolerance of half the dtype's digits."""
    return math.sqrt(torch.finfo(result.dtype).eps)
