"""Contestants that train an adapter: what they hold, and how long they take."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from tests.benchmarks import emulation
from tests.benchmarks.adapters import KINDS, rows
from tests.benchmarks.contestant import Engine
from tests.benchmarks.contestants import balanced_cuts
from tests.benchmarks.emulation import NF4, NF4_BYTES, Setup, emulate, quantized, setup_of
from tests.benchmarks.headline import enter
from tests.benchmarks.setups import RTX_4090

NAME = "sd3-tiny-lora"


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> emulation.Emulation:
    setup = Setup({}, 1, 2, "sd3-tiny", (), RTX_4090)
    monkeypatch.setitem(emulation.ADAPTERS, NAME, setup)  # type: ignore[arg-type]
    return emulate(NAME, 0.1, (1, 2))


def test_cuts_are_balanced() -> None:
    assert balanced_cuts([0, 0, 3, 1, 4, 1, 5], 3) == (0, 4, 6, 7)
    assert balanced_cuts([1] * 8, 4) == (0, 2, 4, 6, 8)


def test_frozen_weights_are_neither_reduced_nor_optimised(adapter: emulation.Emulation) -> None:
    costs = adapter.costs
    trained, total = sum(costs.trained_parameters), sum(costs.parameters)
    assert 0 < trained < total
    assert sum(adapter.layer_state()) == 18 * trained + 2 * (total - trained)
    packed = quantized(adapter.profile, setup_of(f"{NAME}{NF4}").device)
    small = replace(adapter, name=f"{NAME}{NF4}", profile=packed, costs=packed.at(1))
    held = 18 * trained + NF4_BYTES * (total - trained)
    assert sum(small.layer_state()) == pytest.approx(held, rel=1e-3)
    assert sum(small.costs.forward_s) > sum(costs.forward_s)


def test_each_kind_enters_and_faster_links_are_no_slower(adapter: emulation.Emulation) -> None:
    args = argparse.Namespace(ranks=2, memory_gb=24.0, solver_seconds=0.0, decision_seconds=0.3)
    entered, _, _ = enter(adapter, 5.0, 8, args)
    streamed = [one for one in entered if one.engine is Engine.STREAMED]
    assert [one.name.split(", ")[-1] for one in streamed] == ["25 GB/s", "6.5 GB/s"]
    assert streamed[0].predicted_s <= streamed[1].predicted_s
    pipelines = [one for one in entered if one.engine in KINDS["relayed 1F1B"]]
    assert pipelines and all(min(one.working_bytes) > 0 for one in pipelines)
    (whole,) = [one for one in entered if one.engine is Engine.DATA_PARALLEL]
    assert whole.predicted_s <= streamed[0].predicted_s
    assert streamed[0].state_bytes[0] < whole.state_bytes[0]
    found = list(rows(adapter, [2.5, 0.5], 8, args))
    assert [row["GB/s"] for row in found] == [0.5, 2.5]
    assert found[0]["ours"] <= found[1]["ours"] and all(found[0][kind] for kind in KINDS)
