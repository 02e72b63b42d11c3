"""Chains of which a part is trained: bit for bit one process, and plain torch.

Random layouts of every family that train some of their layers, or biases, are among those of
``tests/benchmarks/layouts.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.chain import Backbone, Layer
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.runtime.stage import layer_seed
from tests.ranks import run_ranks
from tests.runtime import tiny
from tests.runtime.equality import (
    SEED,
    Case,
    Outcome,
    differences,
    make_batches,
    mean_squared_error,
    merge,
    references,
    train_split,
)

P, M = 4, 3
FOLD = Case("fold", M, dtype="float32", steps=2)
SEQUENTIAL = replace(FOLD, placement="sequential")
CASES: list[tuple[Case, int | None]] = [
    (FOLD, None),
    (SEQUENTIAL, 1),
    (replace(FOLD, freeze=("down.*",)), 2),
    (replace(SEQUENTIAL, freeze=("down.*",), recompute=2), None),
    (replace(SEQUENTIAL, train=("down.*",)), None),
    (replace(FOLD, train=("down.[02].*", "up.[02].*")), None),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones. Those
without patterns train maps of low rank."""


class LowRank(nn.Module):
    """A linear map that is frozen, beside one of low rank that is trained (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.map = LowRank(width)
        self.join = nn.Linear(2 * width, width) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.join is not None and skip is not None:
            x = self.join(torch.cat([x, skip], dim=-1))
        return x + torch.tanh(self.map(self.norm(x)))


class Adapted(nn.Module):
    """Eight blocks with three skips, of which by themselves only maps of low rank are trained."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(width, False) for _ in range(4)])
        self.up = nn.ModuleList([Block(width, i > 0) for i in range(4)])
        self.head = nn.Linear(width, width)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".map.down" in name or ".map.up" in name)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for i, block in enumerate(self.up):
            x = block(x, skips[3 - i] if i else None)
        result: Tensor = self.head(x)
        return result


def adapted() -> Adapted:
    torch.manual_seed(3)
    return Adapted()


def chain() -> Backbone:
    return pulse.from_module(adapted(), {"x": torch.randn(2, 5, 6)}, sample="x")


def run_cases(cases: list[tuple[Case, int | None]]) -> list[Outcome]:
    return train_split(chain, cases, P)


def by_plain_torch(case: Case) -> dict[str, Tensor]:
    """The parameters after the same training of the module itself."""
    module, backbone = adapted(), chain()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(layer_seed(SEED, name))
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            (mean_squared_error(module(batch["noisy"].float()), batch) / M).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_what_is_trained_equals_one_process_and_plain_torch() -> None:
    alone: list[tuple[Case, int | None]] = [(case.alone, None) for case, _ in CASES]
    expected = references(run_cases, alone)
    # Where a skip begins, plain torch adds gradients in another order.
    found = differences(expected[0].parameters, by_plain_torch(CASES[0][0]))
    assert max(found.values(), default=0.0) < 1e-6, found
    ranks = run_ranks(P, run_cases, CASES)
    for i, (case, delay) in enumerate(CASES):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses and len(got.losses) == 2 * M, case
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        assert all(g.abs().max() > 0 for g in got.gradients.values()), case
        assert (got.num_weight_gradients > 0) == (delay is not None)
    adapters = {name for name in got.parameters if ".map.down" in name or ".map.up" in name}
    assert merge([outcomes[0] for outcomes in ranks]).gradients.keys() == adapters
    # Behind frozen layers alone no gradient goes back: sequential, half of it is frozen.
    half, whole = (merge([outcomes[i] for outcomes in ranks]) for i in (3, 4))
    assert 0 < half.gradient_bytes <= half.forward_bytes / 2
    assert half.forward_bytes == whole.forward_bytes and whole.gradient_bytes > half.gradient_bytes


def test_copies_of_a_frozen_embedder_and_biases_behind_frozen_weights() -> None:
    """Megatron's linear layers lose such a bias's gradient."""
    name = "time_embedding"
    case = Case("fold", M, dtype="float32", steps=2, replicated=frozenset({name}))
    cases = [
        ("unet-text", replace(case, freeze=(f"{name}.*",))),
        ("uvit", replace(FOLD, train=("*bias",))),
    ]
    expected = references(tiny.run_cases, [(family, case.alone) for family, case in cases])
    ranks = run_ranks(2, tiny.run_cases, cases)
    for i, (_, case) in enumerate(cases):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses
        assert not differences(got.parameters, reference.parameters), case
        assert all(g.abs().max() > 0 for g in got.gradients.values()), case
    assert len(got.gradients) == sum(name.endswith("bias") for name in got.parameters)


def test_what_is_declared_frozen_must_be() -> None:
    spec = pulse.TensorSpec((4, 6))
    layers = (
        Layer("a", lambda _: nn.Linear(6, 6), (spec,), (spec,), trained=False),
        Layer("b", lambda _: nn.Linear(6, 6), (spec,), (spec,)),
    )
    backbone = Backbone("two", layers)
    costs = pulse.weighted_costs(backbone, [1.0, 1.0])
    plan = pulse.make_plan(backbone, costs, pulse.sequential(1))
    with pytest.raises(BackboneError, match=r"a: .*trained=False, but its parameter weight"):
        pulse.Pipeline(plan, mean_squared_error, 2)
