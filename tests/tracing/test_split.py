"""Split backward passes of derived chains, where a weight has uses of which not all can wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from tests.runtime.equality import Case, differences, plan_of, split, train
from tests.tracing.own import WIDTH


class Mixed(nn.Module):
    """A block uses one of its weights in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if how == "one bias":
            self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        match self.how:
            case "region":
                with torch.autocast("cpu", torch.bfloat16):
                    y = y + self.one(x.sin()).to(y.dtype)
            case "product":
                y = y + x.sin() @ self.one.weight
            case "table":
                y = y + F.embedding((x > 0).long(), self.one.weight).mean(1)
            case "one bias":
                y = y + F.relu(self.two.bias)
            case "bias as weight":
                y = y + F.linear(x.sin(), self.two.weight) * self.one.bias
        return x + self.two(y)


class Stack(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed(how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    "how, kept",
    [
        ("region", {"one.weight", "one.bias"}),
        ("product", {"one.weight", "one.bias"}),
        ("table", {"one.weight", "one.bias"}),
        ("one bias", {"one.weight", "one.bias", "two.weight"}),
        ("bias as weight", {"one.weight", "one.bias"}),
    ],
)
def test_a_weight_of_several_uses_gets_the_bits_of_a_whole_backward(
    how: str, kept: set[str]
) -> None:
    torch.manual_seed(1)
    chain = pulse.from_module(
        Stack(how), {"x": torch.randn(3, WIDTH)}, sample="x", granularity="blocks"
    )
    layer = chain.layers[0].build(None)
    names = {id(p): n for n, p in layer.named_parameters()}
    assert {names[id(p)] for p in layer.undivided} == {f"blocks.0.{name}" for name in kept}
    case = Case("sequential", 3, dtype="float32", steps=1, micro_batch_size=3)
    whole = train(chain, case, None, None)
    apart = replace(case, schedule=split(plan_of(chain, case, 1).step(3).schedule, 1))
    found = train(chain, apart, None, None)
    assert found.num_weight_gradients == 3 and whole.num_weight_gradients == 0
    assert not differences(found.gradients, whole.gradients)
