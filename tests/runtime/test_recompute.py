"""Layers whose activations cannot be computed again say so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.runtime.failure_board import PulseError

WIDTH = 16


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x)
        return found


class _Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


class _Averages(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        found: Tensor = self.linear(x)
        return found - self.mean


class _Normalizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(F.normalize(self.linear.weight))
        found: Tensor = self.linear(x)
        return found


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        found: Tensor = self.linear(x)
        return found


CASES = [
    (_Norms, "layer layers.1 modifies its buffer norm.num_batches_tracked in place in forward"),
    (_Spectral, "modifies its buffer linear.parametrizations.weight.0._u"),
    (_Averages, "layer layers.1 modifies its buffer mean in place in forward"),
    (_Normalizes, "layer layers.1 modifies its parameter linear.weight in place in forward"),
    (_Adds, "layer layers.1 modifies its input 0 in place in forward"),
]


def train(kind: type[nn.Module], recompute: tuple[int, ...]) -> None:
    """Run one step of three layers, the second of this kind."""
    chain = pulse.chain([_Plain, kind, _Plain], pulse.TensorSpec((WIDTH,)))
    costs = pulse.weighted_costs(chain, [1.0] * 3)
    plan = pulse.make_plan(
        chain, costs, pulse.sequential(1), activations=pulse.ActivationPolicies(recompute)
    )
    torch.manual_seed(0)
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 4)
    pipeline.step([{"noisy": torch.randn(4, WIDTH)}] * 2)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.linear(x))


@pytest.mark.parametrize(("kind", "reason"), CASES)
def test_what_would_not_come_to_the_same_is_refused(kind: type[nn.Module], reason: str) -> None:
    train(kind, (0, 2))
    with pytest.raises(PulseError) as error:
        train(kind, (1,))
    assert reason in str(error.value)
    assert "--no-recompute" in str(error.value)


class _Remembers(_Plain):
    """Changes attributes by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.factor, self.counts = how, 1.0, {"calls": 0}
        self.size: tuple[int, ...] | None = None
        self.tables: dict[int, Tensor] = {}
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "number":
                self.factor += 1
            case "dictionary":
                self.counts["calls"] += 1
            case "list":
                self.seen.append(1)
            case "cache":
                self.size = tuple(x.shape)
                self.tables.setdefault(len(x), torch.ones(()))
        return super().forward(x) * (self.factor + self.counts["calls"] + len(self.seen))


@pytest.mark.parametrize(
    ("how", "where"),
    [("number", "factor"), ("dictionary", "counts['calls']"), ("list", "seen["), ("cache", "")],
)
def test_layers_that_change_python_state_are_not_recomputed(how: str, where: str) -> None:
    """Caches, filled by a first call, are no such state."""

    class Kind(_Remembers):
        def __init__(self) -> None:
            super().__init__(how)

    train(Kind, (0, 2))
    if not where:
        train(Kind, (1,))
        return
    with pytest.raises(BackboneError) as error:
        train(Kind, (1,))
    assert f"layers.1 changes {where}" in str(error.value)
    assert "--no-recompute" in str(error.value)
