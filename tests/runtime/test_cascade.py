"""Cascades: several backbones in one run, each bit for bit what it is in a run of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.planner.program.plan import PlanError
from megatron_pulse.planner.schedule.problem import equal_stages
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.ranks import run_ranks
from tests.runtime import tiny
from tests.runtime.equality import Case, Outcome, differences, join_pipeline, merge, split, train

PAIRS = (("uvit", "unet-text"), ("dit", "sdxl"), ("hunyuan", "sd3"), ("controlnet", "flux"))
WAVE = split(synthesize(equal_stages(pulse.opposite(2), 3), effort=5).schedule, 2)
CASES = [
    Case("opposite", 4, dtype="float32", num_chunks=4, steps=2),
    Case("opposite", 3, WAVE, dtype="float32", num_chunks=4, steps=2, recompute=2),
]


def joined(families: tuple[str, ...]) -> pulse.Backbone:
    """Cascade of several backbones; the second chain is "chain1"."""
    return pulse.cascade({f"chain{i}": tiny.backbone(f) for i, f in enumerate(families)})


def run_cascades(cases: list[tuple[tuple[str, ...], Case]]) -> list[Outcome]:
    """(families, case) after (families, case) on this rank; one family is trained alone."""
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    config, group = join_pipeline()
    defer_wgrad()
    outcomes = [
        train(joined(f) if len(f) > 1 else tiny.backbone(f[0]), case, config, group)
        for f, case in cases
    ]
    torch.distributed.barrier()
    return outcomes


def of_chain(tensors: dict[str, Tensor], chain: str) -> dict[str, Tensor]:
    """Entries of one chain, by their names in it."""
    return {n.removeprefix(f"{chain}."): t for n, t in tensors.items() if n.startswith(f"{chain}.")}


def require_each_alone(outcomes: list[Outcome], case: Case, alone: list[Outcome]) -> None:
    """Weights, gradients and losses of every chain are those of its own run."""
    whole = merge(outcomes)
    for i, expected in enumerate(alone):
        for what in ("parameters", "gradients"):
            got = of_chain(getattr(whole, what), f"chain{i}")
            assert not differences(got, getattr(expected, what)), (case, i, what)
    ends = [o.losses for o in outcomes if o.losses]
    count = case.num_microbatches
    if len(ends) == 1:  # all chains end on one device, one after another in every step
        steps = [ends[0][s : s + count] for s in range(0, len(ends[0]), count)]
        ends = [sum(steps[i :: len(alone)], []) for i in range(len(alone))]
    else:
        ends.sort(key=lambda losses: [o.losses for o in alone].index(losses))
    assert ends == [o.losses for o in alone], case


@pytest.mark.parametrize("ranks", [1, 2])
def test_chains_are_bit_for_bit_what_they_are_alone(ranks: int) -> None:
    cases = [(pair, CASES[i % 2]) for i, pair in enumerate(PAIRS)] if ranks == 2 else []
    cases = cases or [(PAIRS[0], CASES[0])]
    alone = [((f,), replace(c.alone, recompute=0)) for pair, c in cases for f in pair]
    (expected,) = run_ranks(1, run_cascades, alone)
    found = run_ranks(ranks, run_cascades, cases)
    for i, (_, case) in enumerate(cases):
        require_each_alone([rank[i] for rank in found], case, expected[2 * i : 2 * i + 2])


def test_what_cannot_be_a_cascade_is_said() -> None:
    one = tiny.backbone("dit")
    both = joined(("dit", "uvit"))
    with pytest.raises(BackboneError) as caught:
        pulse.cascade({"a b": replace(one, layers=one.layers[1:]), "c": both})
    found = "\n".join(caught.value.faults)
    assert "'a b' cannot begin names" in found and "c: is a cascade itself" in found
    assert "neither a batch field nor" in found
    with pytest.raises(BackboneError, match="two backbones or more"):
        pulse.cascade({"one": one})
    costs = pulse.weighted_costs(both, [1.0] * len(both.layers))
    with pytest.raises(ValueError, match=r"2 chain\(s\) over fold, which has 1: a cascade takes"):
        pulse.make_plan(both, costs, pulse.fold(2))
    with pytest.raises(PlanError, match="chains begin at the layers"):
        pulse.Plan(both, pulse.Partition(pulse.opposite(1), (0, 3, len(both.layers))))
