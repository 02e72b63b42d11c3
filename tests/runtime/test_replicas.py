"""Embedders that run on every device: the same training, and only the bytes that were planned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, merge, references, train
from tests.toys import nested, toy_backbone

USERS = (1, 3, 4, 7, 8)
STEPS = 2
PLACEMENTS = {"fold": "float64", "sequential": "float32", "interleaved": "float32"}
"""With the dtype that each trains in: what fp64 shows of one is beyond rounding."""


def _backbone() -> Any:
    return toy_backbone(9, nested(9, 4), conditioned=USERS, embedder=True)


def run_cases(cases: list[Case]) -> list[Outcome]:
    import torch.distributed as dist
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo")
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    outcomes = [train(_backbone(), case, config, group) for case in cases]
    dist.barrier()
    return outcomes


@pytest.mark.parametrize("num_devices", [2, 4])
def test_replicated_embedders_train_as_one_process(num_devices: int) -> None:
    """Losses, gradients and weights to rounding, under every placement, M < P, = P, > P."""
    embedder = frozenset({"embed"})
    cases = [
        Case(placement, m, dtype=dtype, steps=STEPS, replicated=embedder)
        for placement, dtype in PLACEMENTS.items()
        for m in (num_devices - 1, num_devices, num_devices + 1)
    ]
    expected = references(run_cases, [case.alone for case in cases])
    ranks = run_ranks(num_devices, run_cases, cases)
    for i, case in enumerate(cases):
        tolerance = 1e-12 if case.dtype == "float64" else 1e-5
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == pytest.approx(expected[i].losses, rel=tolerance), case
        assert got.parameters.keys() == expected[i].parameters.keys()
        for what in ("gradients", "parameters"):
            found = differences(getattr(got, what), getattr(expected[i], what))
            assert max(found.values(), default=0) < tolerance, (case, what, found)
        assert expected[i].gradients["embed.linear.weight"].abs().max() > 0


def test_bytes_of_either_way_are_those_of_the_choice() -> None:
    from megatron_pulse.backbone.costs import weighted_costs
    from megatron_pulse.planner.layout.embedder_choice import choose_embedders, provided
    from megatron_pulse.planner.layout.placement import make_placement
    from megatron_pulse.planner.program.make_plan import make_plan

    num_devices, m = 4, 5
    cases = [
        Case("fold", m, dtype="float32", steps=STEPS, replicated=names)
        for names in (frozenset(), frozenset({"embed"}))
    ]
    ranks = run_ranks(num_devices, run_cases, cases)
    sent, replicated = (merge([outcomes[i] for outcomes in ranks]) for i in range(2))
    backbone = _backbone()
    plan = make_plan(
        backbone,
        weighted_costs(backbone, [1.0] * len(backbone.layers)),
        make_placement("fold", num_devices, 2),
    )
    counts = [4 if layer.embedder else 0 for layer in backbone.layers]
    (choice,) = choose_embedders(
        provided(backbone, 4), plan.partition, counts, m * cases[0].micro_batch_size, 4
    ).values()
    assert sent.replica_bytes == 0
    assert replicated.replica_bytes == STEPS * choice.replicated_bytes
    moved = [o.forward_bytes + o.gradient_bytes for o in (sent, replicated)]
    assert moved[0] - moved[1] == STEPS * choice.sent_bytes
