"""Parameters in whose memory another tensor is: each would be one of its own in a chain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.tracing.initial_weights.meta_init import (
    build_without_memory,
    release_parameter_memory,
)
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing.own import WIDTH


class Sharing(nn.Module):
    def __init__(self, share: Callable[[Sharing], object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        tie = self.tie[0] if hasattr(self, "tie") else self.a.weight
        return F.linear(self.b(self.a(x)), tie)


OUTSIDE: list[Tensor] = []


class Closing(Sharing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OUTSIDE[0]


SHARED: list[tuple[Callable[[Sharing], object], str, str]] = [
    (lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data)), "a.weight", "b.weight"),
    (lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data.t())), "a.weight", "b.weight"),
    (lambda m: setattr(m.b, "bias", nn.Parameter(m.a.weight.data[3])), "a.weight", "b.bias"),
    (lambda m: m.register_buffer("tie", m.a.weight.data[None]), "a.weight", "tie"),
    (lambda m: m.register_buffer("tie", m.a.weight.detach()[None], False), "a.weight", "tie"),
    (lambda m: setattr(m, "tie", m.a.weight.detach()[None]), "a.weight", "tie"),
    (lambda m: setattr(m, "tie", [m.a.weight[:, :]]), "a.weight", "tie"),
]


@pytest.mark.parametrize("share, one, other", SHARED)
def test_shared_memory_is_refused_by_both_names(
    share: Callable[[Sharing], object], one: str, other: str
) -> None:
    with pytest.raises(DerivationError, match="share memory") as caught:
        pulse.from_module(Sharing(share), {"x": torch.randn(2, WIDTH)}, sample="x")
    (fault,) = caught.value.faults
    assert set(fault.split(" share ")[0].split(" and ")) == {one, other}


def test_it_is_seen_without_memory_and_outside_of_the_module() -> None:
    share = SHARED[0][0]
    with pytest.raises(DerivationError, match=r"a\.weight and b\.weight share memory"):
        release_parameter_memory(build_without_memory(lambda: Sharing(share)), torch.float32)
    module = Closing(lambda _: None)
    OUTSIDE[:] = [module.b.bias.detach()]
    with pytest.raises(DerivationError, match="share memory"):
        pulse.from_module(module, {"x": torch.randn(2, WIDTH)}, sample="x")


def test_what_is_beside_another_or_not_trained_is_derived() -> None:
    def side_by_side(module: Sharing) -> None:
        whole = torch.randn(2, WIDTH)
        module.a.bias, module.b.bias = nn.Parameter(whole[0]), nn.Parameter(whole[1])
        module.a.weight.requires_grad_(False)
        module.tie = [module.a.weight.detach()]

    pulse.from_module(Sharing(side_by_side), {"x": torch.randn(2, WIDTH)}, sample="x")
