"""Every family, built from Megatron's modules, under every placement: bit for bit.

Microbatches have two shapes in turn, where the family takes several.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from tests.ranks import run_ranks
from tests.runtime.equality import (
    Case,
    computed_apart,
    differences,
    merge,
    plan_of,
    references,
    split,
)
from tests.runtime.tiny import FAMILIES, UNUSED, backbone, run_cases, two_shapes

P, M, STEPS = 2, 3, 2
CASES: list[tuple[Case, int | None]] = [
    (Case("fold", M, dtype="bfloat16", recompute=2, offload=1), None),
    (Case("fold", M, dtype="bfloat16", offload=1), 3),
    (Case("sequential", M, dtype="bfloat16", selective=1), 0),
    (Case("fold", M, dtype="float32", recompute=3, selective=1), None),
    (Case("interleaved", M, dtype="float32", recompute=True), 1),
]
"""Of one M, so that two references do for all; with the number of backwards after which a weight
gradient follows; None: whole ones."""


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "sdxl"])  # in test_cascade
def test_whole_and_split_backwards_equal_one_process(family: str) -> None:
    options = two_shapes(family)
    run = functools.partial(run_cases, options=options)
    cases = []
    for case, delay in CASES:
        case = replace(case, steps=STEPS)
        plan = plan_of(backbone(family, options), case, P)
        schedule = plan.step(case.num_microbatches).schedule
        if delay is not None:
            schedule = split(schedule, delay)
        apart = computed_apart(schedule, plan.partition, case.recompute, random.Random(family))
        assert bool(apart.recomputed_apart) == bool(case.recompute)
        case = replace(case, schedule=apart)
        cases.append((family, case))
    expected = references(run, [(family, case.alone) for _, case in cases])
    ranks = run_ranks(P, run, cases)
    for i, (_, case) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        reference = expected[i]
        delay, num_stages = CASES[i][1], P if case.placement == "sequential" else 2 * P
        apart = 0 if delay is None else num_stages * case.num_microbatches * STEPS
        assert got.num_weight_gradients == apart, case
        assert any(o[i].offload_bytes > 0 for o in ranks) == bool(case.offload), case
        assert (got.num_left_out > 0) == bool(case.selective), case
        assert len(got.losses) == STEPS * case.num_microbatches
        assert got.losses == reference.losses, case
        unused = {name for name, gradient in reference.gradients.items() if not gradient.any()}
        assert unused == UNUSED.get(family, set())
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        if case.placement == "fold":
            assert got.skip_bytes == 0
