"""Derived chains on two devices: bit for bit those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import megatron_pulse as pulse
from megatron_pulse.backbone.chain import Backbone
from tests.backbone.derived.own import WIDTH, Dense, Masked
from tests.backbone.derived.zoo import make
from tests.ranks import run_ranks
from tests.runtime.equality import (
    Case,
    Outcome,
    differences,
    join_pipeline,
    merge,
    plan_of,
    references,
    split,
    train,
)

P, M = 2, 3
CASES: list[tuple[Case, int | None]] = [
    (Case("fold", M, dtype="float32"), None),
    (Case("fold", M, dtype="float32", recompute=True), 2),
    (Case("sequential", M, dtype="float32"), 1),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""


def backbone(name: str) -> Backbone:
    torch.manual_seed(3)
    if name == "dense":
        given = {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
        return pulse.from_module(Dense(), given, sample="image", timestep="when")
    if name == "masked":
        given = {"x": torch.randn(2, Masked.TOKENS, WIDTH)}
        given["kept"] = torch.ones(2, Masked.TOKENS, dtype=torch.bool)
        return pulse.from_module(Masked(), given, sample="x")
    return pulse.from_module(*make(name))


def run_cases(cases: list[tuple[str, Case, int | None]]) -> list[Outcome]:
    """All of one chain, on this rank."""
    torch.set_num_threads(1)
    config, group = join_pipeline()
    chain = backbone(cases[0][0])
    outcomes = []
    embedders = frozenset(layer.name for layer in chain.layers if layer.embedder)
    for _, case, delay in cases:
        if delay is not None:
            schedule = plan_of(chain, case, P).step(case.num_microbatches).schedule
            case = replace(case, schedule=split(schedule, delay))
        if case.replicated:
            case = replace(case, replicated=embedders)
        outcomes.append(train(chain, case, config, group))
    torch.distributed.barrier()
    return outcomes


@pytest.mark.parametrize("name", ["small_unet", "hunyuan", "flux", "dense"])
def test_a_derived_chain_equals_one_process(name: str) -> None:
    cases = [(name, case, delay) for case, delay in CASES]
    alone: list[tuple[str, Case, int | None]] = [(name, case.alone, None) for case, _ in CASES]
    expected = references(run_cases, alone)
    ranks = run_ranks(P, run_cases, cases)
    for i, (_, case, delay) in enumerate(cases):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses and len(got.losses) == 3 * M, case
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        assert (got.num_weight_gradients > 0) == (delay is not None)
        if case.placement == "fold" and name in ("small_unet", "hunyuan"):
            assert got.skip_bytes == 0


def test_a_mask_and_a_tensor_without_samples_are_handed_on() -> None:
    """Sent, and made by copies on every device; one of the embedders has no parameters."""
    chain = backbone("masked")
    specs = {edge.spec for edge in chain.conditioning}
    tokens = Masked.TOKENS
    assert pulse.TensorSpec((tokens, tokens), dtype="bool") in specs
    assert pulse.TensorSpec((tokens, 1), batch_dim=None) in specs
    case = Case("sequential", M, dtype="float32")
    alone: tuple[str, Case, int | None] = ("masked", case.alone, None)
    (reference,) = references(run_cases, [alone])
    copied = replace(case, replicated=frozenset({"all"}))
    ranks = run_ranks(P, run_cases, [("masked", case, None), ("masked", copied, None)])
    sent, made = (merge([outcomes[i] for outcomes in ranks]) for i in range(2))
    assert sent.losses == reference.losses
    assert not differences(sent.parameters, reference.parameters)
    assert made.losses == pytest.approx(reference.losses, rel=1e-6)
    assert made.forward_bytes < sent.forward_bytes - tokens**2
