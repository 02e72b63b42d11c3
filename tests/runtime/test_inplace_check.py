"""In-place writes to saved tensors are refused wherever torch refuses them, under every activation
policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.runtime.activations.inplace_check import InplaceWatch, SharedInputCheck
from megatron_pulse.runtime.activations.offload import LEAST_BYTES, ActivationOffload
from megatron_pulse.runtime.activations.recompute import RecomputedLayer
from megatron_pulse.runtime.activations.selective_recompute import SelectiveRecompute
from megatron_pulse.runtime.failure_board import PulseError

SIDE = 64  # squared, more than stays on a device
assert 4 * SIDE * SIDE >= LEAST_BYTES

Function = Callable[[Tensor, Tensor], Tensor]


def _result(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w).add_(1)


def _input(x: Tensor, w: Tensor) -> Tensor:
    made = x @ w
    sine = made.sin()
    made.mul_(2)
    return sine + made


def _view(x: Tensor, w: Tensor) -> Tensor:
    made = torch.exp(x @ w)
    made[0].zero_()
    return made


def _small(x: Tensor, w: Tensor) -> Tensor:
    made = torch.exp((x @ w)[0, :4])
    made.add_(1)
    return made.sum() * x


def _together(x: Tensor, w: Tensor) -> Tensor:
    """Writes of several at once, which modes of torch's do not see counted."""
    made = x @ w
    sine = made.sin()
    torch._foreach_mul_([made], 2.0)
    return sine + made


def _allowed(x: Tensor, w: Tensor) -> Tensor:
    """Function whose in-place write is allowed: the tensor was not saved, or was saved after the
    write.
    """
    made = (x @ w).add_(1)
    return F.relu(made, inplace=True) + x


def _wgrad_store(x: Tensor, w: Tensor) -> Tensor:
    """Written into by who comes after the layer: see ``after``."""
    return torch.tanh(x @ w)


FUNCTIONS = [_result, _input, _view, _small, _together, _allowed, _wgrad_store]


def gradient(function: Function, how: str) -> Tensor:
    """Gradient of ``x``; raises if a backward is refused."""
    torch.manual_seed(0)
    x, w = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE) / SIDE
    away = ActivationOffload(set())
    if how == "again":
        layer = RecomputedLayer("it", lambda: function(x, w), lambda: {"x": x})
        y = layer.forward()
        layer.compute()
    else:
        saving = SelectiveRecompute("it", [w]).saving() if how == "selective" else nullcontext()
        with away.saving("it") if how.startswith("away") else saving:
            y = function(x, w)
    if function is _wgrad_store:
        y.mul_(2)
    if how == "away":
        away.start_offload()
        away.finish_offload()
        away.start_load()
    (found,) = torch.autograd.grad(y.square().sum(), x)
    return found


@pytest.mark.parametrize("how", ["again", "away", "away, not left", "selective"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_is_refused_where_torch_refuses_it(function: Function, how: str) -> None:
    try:
        expected = gradient(function, "plain")
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        if function is _wgrad_store and how == "again":  # computed anew, and never written into
            expected = 4 * gradient(lambda x, w: torch.tanh(x @ w), "plain")
            assert torch.allclose(gradient(function, how), expected)
            return
        with pytest.raises(PulseError, match="^layer it: .* modified in place after forward"):
            gradient(function, how)
    else:
        assert torch.equal(gradient(function, how), expected)


def test_what_is_watched_is_not_held_and_settles() -> None:
    tensor = torch.zeros(1000)
    watched, storage = InplaceWatch(tensor), tensor.untyped_storage()
    assert watched._alias is not None and watched._alias.untyped_storage().nbytes() == 0
    assert not watched.is_written and storage.nbytes() == 4000
    tensor.detach()[3] = 1
    assert watched.is_written and tensor[3] == 1
    wgrad_store = InplaceWatch(tensor)
    wgrad_store.settle()
    tensor.add_(1)
    assert not wgrad_store.is_written


class _Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(self.linear(x)).add_(1))


@pytest.mark.parametrize("how", ["recompute", "selective"])
def test_a_run_names_the_layer(how: str) -> None:
    chain = pulse.chain([_Careless] * 2, pulse.TensorSpec((SIDE,)))
    costs = pulse.weighted_costs(chain, [1.0] * 2)
    activations = pulse.ActivationPolicies(**{how: [1]})
    plan = pulse.make_plan(chain, costs, pulse.sequential(1), activations=activations)
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SIDE)
    with pytest.raises(PulseError, match=r"layer layers\.1: a tensor saved for backward"):
        pipeline.step([{"noisy": torch.randn(SIDE, SIDE)}] * 2)


class _Tanh(nn.Module):
    """Saves not what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(torch.tanh(x))
        return found


class _AddsToSkip(_Tanh):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        skip += 1.0
        return super().forward(x + skip)


@pytest.mark.parametrize("split", [False, True])
def test_a_later_layer_that_writes_into_what_one_computed_again_was_given(split: bool) -> None:
    chain = pulse.chain([_Tanh, _Tanh, _AddsToSkip], pulse.TensorSpec((SIDE,)), skips=[(0, 2)])
    costs = pulse.weighted_costs(chain, [1.0] * 3)
    schedule = "zb-h1" if split else "auto"
    for recompute, refused in (([], False), ([0], False), ([1], True)):
        plan = pulse.make_plan(
            chain,
            costs,
            pulse.sequential(1),
            schedule,
            activations=pulse.ActivationPolicies(recompute),
        )
        pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SIDE)
        expected = pytest.raises(
            PulseError, match=r"layers\.1 ran forward, and then .* its input 0: its"
        )
        with expected if refused else nullcontext():
            pipeline.step([{"noisy": torch.randn(SIDE, SIDE)}] * 2)


class _WritesInput(_Tanh):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x += 1.0
        return super().forward(x)


@pytest.mark.parametrize(("skips", "refused"), [([(0, 2)], True), ([(1, 3)], False)])
def test_what_a_layer_is_given_and_a_later_one_takes_is_not_written_into(
    skips: list[tuple[int, int]], refused: bool
) -> None:
    """Beside a cut that one would have what was before, on one device what came after."""

    class Pops(_Tanh):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return super().forward(x + skip)

    kinds = [_Tanh, _WritesInput, Pops if refused else _Tanh, _Tanh if refused else Pops]
    chain = pulse.chain(kinds, pulse.TensorSpec((SIDE,)), skips=skips)
    costs = pulse.weighted_costs(chain, [1.0] * 4)
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), SIDE)
    fault = "layers.1 modifies its input 0, the skip 0 to 2 in place"
    with pytest.raises(BackboneError, match=fault) if refused else nullcontext():
        pipeline.step([{"noisy": torch.randn(SIDE, SIDE)}] * 2)


def test_conditioning_that_a_layer_writes_into_is_named() -> None:
    """Conditioning is one tensor for all layers of a device."""
    (layer,) = pulse.chain([_Tanh], pulse.TensorSpec((SIDE,))).layers
    conditioning = {"time": torch.zeros(3), "text": torch.zeros(3)}
    check = SharedInputCheck(layer, {}, (), {}, conditioning)
    assert check.fault() is None
    conditioning["text"].add_(1)
    fault = check.fault()
    assert fault is not None and fault.startswith("modifies the conditioning text in place")
