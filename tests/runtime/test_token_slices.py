"""Slices of tokens in pipelines: whole layers' numbers, and one process's bits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pulse.backbone.chain import Backbone
from model_specs.common.attach_adapter import with_adapter
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, merge, references, train_split
from tests.runtime.test_adapters import OF_TRANSFORMER
from tests.runtime.tiny import backbone
from tests.tracing.subject import Subject

SLICED = Case("sequential", 2, dtype="float32", steps=2, token_slices=3)
FOLD = replace(SLICED, placement="fold")
CASES: list[tuple[Case, int | None]] = [
    (SLICED, None),
    (FOLD, 1),
    (replace(FOLD, recompute=2, selective=3), None),
    (replace(SLICED, recompute=1), 1),
    (replace(SLICED, offload=1), None),
    (replace(FOLD, selective=1), 1),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""


def derived() -> Backbone:
    return Subject("sd3", "float32").chain


def adapted() -> Backbone:
    return with_adapter(derived(), OF_TRANSFORMER)


def of_family(name: str) -> Backbone:
    if name == "derived":
        return derived()
    return adapted() if name == "adapted" else backbone(name)


def run_cases(given: list[tuple[str, Case, int | None]]) -> list[Outcome]:
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    defer_wgrad()
    name = given[0][0]
    return train_split(lambda: of_family(name), [(case, delay) for _, case, delay in given], 2)


@pytest.mark.parametrize("name", ["derived", "adapted", "flux", "pixart"])
def test_slices_train_as_whole_layers_and_alike_in_every_layout(name: str) -> None:
    alone = [(name, replace(SLICED, token_slices=n), None) for n in (1, 3)]
    whole, sliced = references(run_cases, alone)
    assert whole.losses == pytest.approx(sliced.losses, rel=1e-5)
    worst = differences(sliced.gradients, whole.gradients)
    assert max(worst.values(), default=0.0) < 1e-4, worst  # of a second step: Adam's first is sharp
    cases = CASES[1:4] if name == "adapted" else CASES  # the rest as the base alone, "derived"
    ranks = run_ranks(2, run_cases, [(name, case, delay) for case, delay in cases])
    for i, (case, _) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == sliced.losses, case
        assert not differences(got.gradients, sliced.gradients), case
        assert not differences(got.parameters, sliced.parameters), case
