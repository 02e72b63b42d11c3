"""Transformer Engine's linears whose weight gradients wait, beside its whole backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TERowParallelLinear,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_pulse.backbone.build_context import TRANSFORMER_ENGINE
from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
from megatron_pulse.integration.megatron.te_wgrad import untrained_biases
from megatron_pulse.runtime.parameters.split_backward import deferring
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore
from tests.model_specs.chains import make_context
from tests.runtime.equality import Case, differences, plan_of, split, train
from tests.runtime.tiny import backbone

WIDTH = 48
FAMILIES = ("hunyuan", "flux")
"""With skips; with linears that two streams go through."""
Call = Callable[[Any, Tensor], Tensor]


def once(layer: Any, given: Tensor) -> Tensor:
    result, bias = layer(given)
    return result if bias is None else result + bias


class Way(NamedTuple):
    """A use of a linear, and whose gradients wait in it."""

    waiting: str = "weight bias"
    call: Call = once
    row: bool = False
    bias: bool = True
    returns_bias: bool = False
    frozen: str = ""


def twice(layer: Any, given: Tensor) -> Tensor:
    return once(layer, once(layer, given).tanh()) * once(layer, given)


def checkpointed(layer: Any, given: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda x: once(layer, x).tanh(), given, use_reentrant=False)
    return result


WAYS = {
    "column": Way(),
    "no bias": Way("weight", bias=False),
    "a bias that is returned": Way("weight", returns_bias=True),
    "row": Way("weight", row=True),
    "row, a bias that is returned": Way("weight", row=True, returns_bias=True),
    "frozen bias": Way("weight", frozen="bias"),
    "twice": Way(call=twice),
    "a part, transposed": Way(call=lambda layer, x: once(layer, x.transpose(0, 1))[:2].sin()),
    "of data": Way("", call=lambda layer, x: once(layer, x.detach()) * x),
    "checkpoint of its own": Way("", call=checkpointed),
}


def made(way: Way, dtype: torch.dtype) -> Any:
    """The layer of ``way``, with the same weights each time."""
    config = make_context(dtype).config
    common = {
        "config": config,
        "init_method": config.init_method,
        "bias": way.bias,
        "skip_bias_add": way.returns_bias,
        "is_expert": False,
    }
    layer = (
        TERowParallelLinear(WIDTH, WIDTH, input_is_parallel=True, **common)
        if way.row
        else TEColumnParallelLinear(WIDTH, WIDTH, gather_output=False, **common)
    )
    for name, parameter in layer.named_parameters():
        with torch.no_grad():
            parameter.copy_(drawn(*parameter.shape))
        parameter.requires_grad_(name not in way.frozen.split())
    return layer


def drawn(*shape: int) -> Tensor:
    """The same numbers for the same shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def trained(
    way: Way, dtype: torch.dtype, device: str, later: bool = False, recomputed: bool = False
) -> tuple[dict[str, Tensor], str]:
    """Gradients of three microbatches, and whose came ``later``."""
    layer = made(way, dtype)
    laters = [WeightGradStore() if later else None for _ in range(3)]
    found: dict[str, Tensor] = {}
    waited: set[str] = set()
    for m, place in enumerate(laters):

        def call(given: Tensor, place: WeightGradStore | None = place) -> Tensor:
            with deferring(place):
                return way.call(layer, given)

        leaf = (drawn(5, 2, WIDTH) + m).to(device, dtype).requires_grad_()
        given = leaf.cos()
        result = checkpoint(call, given, use_reentrant=False) if recomputed else call(given)
        before = {name: p.grad for name, p in layer.named_parameters()}
        result.backward(drawn(*result.shape).to(result))
        found |= {f"result {m}": result.detach(), f"input {m}": leaf.grad}
        if place is not None:
            waited |= {name for name, p in layer.named_parameters() if p in place.parameters}
        assert all(getattr(layer, name).grad is before[name] for name in waited), "did not wait"
    for place in laters:
        if place is not None:
            place.compute()
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found, " ".join(sorted(waited, reverse=True))


def layers(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """Differences in bits from a whole backward pass for each way, and the parameters with deferred
    gradients.
    """
    defer_wgrad()
    found: dict[str, dict[str, Any]] = {}
    for name, way in WAYS.items():
        for dtype in (torch.float32, torch.bfloat16):
            expected, _ = trained(way, dtype, device)
            for recomputed in (False, True):
                got, waited = trained(way, dtype, device, later=True, recomputed=recomputed)
                found[f"{name}, {dtype}{', recomputed' * recomputed}"] = {
                    "waited": waited,
                    "expected": way.waiting,
                    "differs": list(differences(expected, got)),
                }
    return found


def steps(device: str = "cpu") -> dict[str, list[str]]:
    """Differences in bits between steps with weight gradients up to three operations late and whole
    backward passes.
    """
    defer_wgrad()
    config = make_context(torch.bfloat16, transformer_impl=TRANSFORMER_ENGINE).config
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        chain = backbone(family)
        case = Case("sequential", 3, dtype="bfloat16", steps=2, device=device)
        whole = train(chain, case, config, None)
        schedule = plan_of(chain, case, 1).step(case.num_microbatches).schedule
        for late, recompute in ((0, False), (3, False), (3, True)):
            case = replace(case, schedule=split(schedule, late), recompute=recompute)
            got = train(chain, case, config, None)
            assert got.num_weight_gradients == case.steps * case.num_microbatches
            found[f"{family}, {late} late{', recomputed' * recompute}"] = [
                *["losses"] * (got.losses != whole.losses),
                *differences(whole.gradients, got.gradients),
                *differences(whole.parameters, got.parameters),
            ]
    return found


def untrained() -> list[str]:
    """Error for a bias that is trained without its weight, and would have no gradient."""
    way = Way(frozen="weight")
    found, _ = trained(way, torch.float32, "cpu")
    assert "bias" not in found, "Transformer Engine trains it now"
    returned = made(way._replace(returns_bias=True), torch.float32)
    assert not list(untrained_biases("proj", returned))
    return list(untrained_biases("block.fc1", made(way, torch.float32)))
