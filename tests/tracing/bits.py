"""A derived chain beside the module that it was derived of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatron_pulse.tracing.executable import run
from megatron_pulse.tracing.input_leaves import leaves_of
from megatron_pulse.tracing.input_roles import Make, read_inputs
from megatron_pulse.tracing.torch_export import export
from megatron_pulse.tracing.units import UnitChain, derive
from tests.tracing.unlike import Answer
from tests.tracing.zoo.declared import Roles


def chain_equal_to(
    module: nn.Module,
    given: Mapping[str, Any] | Make,
    sample: str | None = None,
    output: int | None = None,
    pieces: bool = True,
    roles: Roles | None = None,
    rounding: float = 0.0,
) -> UnitChain:
    """The chain of ``module``, whose output and gradients are the module's bit for bit.

    Gradients of conditioning that several layers use may be added in another order, and differ by
    ``rounding`` of the largest.
    """
    name = type(module).__name__
    read = read_inputs(name, given, **vars(roles or Roles(sample)))
    example = read.make(read.size)
    exported = export(module, example, read.constants, output)
    chain = derive(exported, name, read.sample, pieces)
    returned = module(**example)
    returned = vars(returned) if isinstance(returned, Answer) else returned
    results = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    tensors = {
        n: leaf
        for n, leaf in leaves_of(example).items()
        if isinstance(leaf, Tensor) and n not in read.constants
    }
    wanted, found = results[output or 0], run(chain, tensors)
    assert torch.equal(wanted, found)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradient = torch.randn_like(wanted)
    pairs = [*zip(*(torch.autograd.grad(y, parameters, gradient, allow_unused=True)
                    for y in (wanted, found)), strict=True)]  # fmt: skip
    held = [weight for unit in chain.units for weight in unit.weights]
    assert len(held) == len(set(held)) and set(held) == set(names)
    top = max(float(a.abs().max()) for a, _ in pairs if a is not None)
    for parameter, (a, b) in zip(names, pairs, strict=True):
        assert (a is None) == (b is None) == (parameter not in chain.trained), parameter
        if a is not None and not torch.equal(a, b):
            assert float((a - b).abs().max()) < rounding * top, parameter
    return chain


def skips_of(chain: UnitChain) -> int:
    """Number of skips of a chain."""
    return sum(len(unit.pops) for unit in chain.units)
