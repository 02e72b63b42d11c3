"""Parameters to which no gradient comes are frozen, as an optimizer leaves them in the module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.dataflow import required_gradients
from tests.tracing.own import WIDTH


class Detached(nn.Module):
    """Uses a weight ``how``, which has a gradient or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + self.used(x)
        return x

    def used(self, x: Tensor) -> Tensor:
        match self.how:
            case "detached":
                return self.weight.detach().sin()
            case "its shape":
                return torch.ones_like(self.weight)
            case "a mask":
                return (x > self.weight).float()
            case "a mask of itself":
                return torch.where(self.weight > 0, self.weight, 0.0)
            case "within":
                with torch.no_grad():
                    y = x * self.weight
                    with torch.enable_grad():
                        return y.detach() + self.weight
            case "written":
                y = torch.zeros_like(x)
                y[:, 1:] = self.weight[1:]
                return y
        with torch.no_grad():
            return x * self.weight


@pytest.mark.parametrize(
    "how, is_trained",
    [
        ("detached", False),
        ("its shape", False),
        ("a mask", False),
        ("without", False),
        ("a mask of itself", True),
        ("within", True),
        ("written", True),
    ],
)
def test_what_gets_no_gradient_is_frozen(how: str, is_trained: bool) -> None:
    torch.manual_seed(0)
    module, x = Detached(how), torch.randn(2, WIDTH)
    chain = pulse.from_module(module, {"x": x}, sample="x")
    costs = pulse.weighted_costs(chain, [1.0] * len(chain.layers))
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    pipeline = pulse.Pipeline(plan, lambda y, _: y.square().mean(), 2)
    pipeline.step([{"noisy": x}])
    module(x).square().mean().backward()
    assert (module.weight.grad is not None) == is_trained
    found = dict(pipeline.named_parameters())
    for name, parameter in found.items():
        expected = module.get_parameter(name).grad
        assert parameter.requires_grad == (expected is not None), name
        if expected is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected)


class Masked(nn.Module):
    """Attends to states that are projected once, with a mask of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.pool = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor, states: Tensor, kept: Tensor) -> Tensor:
        bias = (1 - kept[:, None]) * -1e4
        states = self.project(states)
        pooled = self.pool(bias.softmax(-1) @ states)
        for block in self.blocks:
            x = x + F.scaled_dot_product_attention(block(x) + pooled, states, states, bias)
        return x


def test_masks_of_an_embedder_need_no_gradient() -> None:
    """With one, attention would have another kernel on devices that receive the mask."""
    given = {"x": torch.randn(2, 4, WIDTH), "states": torch.randn(2, 6, WIDTH)}
    chain = pulse.from_module(Masked(), {**given, "kept": torch.ones(2, 6)}, sample="x")
    wanted = required_gradients(chain).conditioning
    (embedder,) = (layer for layer in chain.layers if layer.embedder)
    needs = {spec.shape: wanted[name] for name, spec in embedder.provides.items()}
    assert needs == {(1, 6): False, (1, WIDTH): True, (6, WIDTH): True}
