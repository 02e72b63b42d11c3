"""A sample of the random layouts that ``python -m tests.benchmarks.layouts`` runs at length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pulse.planner.schedule.operations import OpType
from tests.benchmarks import layouts
from tests.benchmarks.layouts import compare, draw_layout, run_layouts
from tests.runtime.equality import Outcome

SEED, SAMPLE = 32, 8


def test_a_sample_of_random_layouts_equals_one_process() -> None:
    sample = [draw_layout(SEED, n) for n in range(SAMPLE)]
    assert len({layout.family for layout in sample}) >= 5
    assert {layout.num_devices for layout in sample} == {1, 2, 3, 4}
    assert {layout.is_split for layout in sample} == {True, False}
    assert any(x.case.freeze for x in sample) and any(x.case.train for x in sample)
    verdicts = list(run_layouts(sample))
    assert len(verdicts) == SAMPLE
    assert not [verdict for verdict in verdicts if verdict.faults]


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    again, other = draw_layout(3, 5), draw_layout(4, 5)
    assert draw_layout(3, 5) == again != other
    kinds = {kind for n in range(30) for kind in draw_layout(3, n).schedule.kinds}
    assert kinds == {OpType.FORWARD, OpType.BACKWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD}


def test_a_difference_is_found_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = next(n for n in range(20) if draw_layout(SEED, n).is_split)
    layout = draw_layout(SEED, number)
    num = layout.schedule.placement.num_stages * layout.case.num_microbatches * layouts.STEPS
    weight = torch.ones(2)
    expected = Outcome([1.0], {"w": weight}, {"w": weight})
    same = replace(expected, num_weight_gradients=num)
    assert not compare(layout, same, expected).faults
    changed = torch.tensor([1.0, 1.0 + 2**-23])
    for wrong, said in (
        (expected, "0 weight gradients were computed apart"),
        (replace(same, losses=[1.0 + 2**-52]), "losses"),
        (replace(same, parameters={"w": changed}), "1 of 1 parameters differ, w most, by 1.2e-07"),
        (replace(same, gradients={"w": changed}), "1 of 1 gradients differ"),
        (replace(same, gradients={}), "gradients differ"),
    ):
        (fault,) = compare(layout, wrong, expected).faults
        assert said in fault
    monkeypatch.setattr(layouts, "run_batch", lambda some: [compare(some[0], expected, expected)])
    report = tmp_path / "report.json"
    flags = ["--seed", str(SEED), "--only", str(number), "--json", str(report)]
    assert layouts.main(flags) == 1
    said = capsys.readouterr().out
    assert f"| {number} | {layout.family} |" in said and "1 layouts in 0 s, 1 differ" in said
    assert '"is": "0 weight gradients were computed apart"' in report.read_text()
