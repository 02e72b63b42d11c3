"""Derived chains on two devices: bit for bit those of one process.

A sample of what ``python -m tests.benchmarks.modules`` runs at length.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_pulse as pulse
from tests.benchmarks import modules
from tests.runtime.equality import Outcome
from tests.tracing.layouts import Layout, Trained, all_layouts, train_all
from tests.tracing.own import Masked
from tests.tracing.subject import Subject

ALONE = Layout("float32")


@pytest.mark.parametrize("name", ["small_unet", "dense"])
def test_a_derived_chain_equals_one_process_and_its_module(name: str) -> None:
    layouts = [ALONE, Layout("float32", 2, "fold", 1, True), Layout("float32", 2)]
    trained, eager = train_all(name, layouts, 2, steps=2)
    assert not [f"{each.layout}: {fault}" for each in trained for fault in each.faults]
    assert [each.outcome.num_weight_gradients > 0 for each in trained] == [False, True, False]
    assert eager["float32"] == pytest.approx(trained[0].reference.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["small_svd", "small_motion"])
def test_video_unets_fold_over_two_and_four_devices(name: str) -> None:
    """SVD's and AnimateDiff's: weights bit for bit; skips are sent by sequential stages alone."""
    row = Layout("float32", 2)
    folds = [replace(row, placement="fold"), Layout("float32", 4, "fold", 1, True)]
    trained, _ = train_all(name, [ALONE, row, *folds], 4, steps=2)
    assert not [f"{each.layout}: {fault}" for each in trained for fault in each.faults]
    assert [each.outcome.skip_bytes > 0 for each in trained] == [False, True, False, False]


def test_a_mask_and_a_tensor_without_samples_are_handed_on() -> None:
    """Sent, and made by copies on every device; one of the embedders has no parameters."""
    specs = {edge.spec for edge in Subject("masked", "float32").chain.conditioning}
    tokens = Masked.TOKENS
    assert pulse.TensorSpec((tokens, tokens), dtype="bool") in specs
    assert pulse.TensorSpec((tokens, 1), batch_dim=None) in specs
    two = Layout("float32", 2)
    trained, _ = train_all("masked", [ALONE, two, replace(two, copied=True)], 2, steps=2)
    sent, made = (each.outcome for each in trained[1:])
    assert not trained[1].faults
    assert made.losses == pytest.approx(trained[0].outcome.losses, rel=1e-6)
    assert made.forward_bytes < sent.forward_bytes - tokens**2


def test_all_layouts_of_a_class() -> None:
    layouts = all_layouts(("float32", "bfloat16"), 4, folds=True)
    assert len(set(layouts)) == len(layouts) == 2 * (4 + 8 + 8)
    assert all(layout.reference in layouts for layout in layouts)
    assert len(all_layouts(("float32",), 2, folds=False)) == 4 + 4


def test_a_difference_is_found_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {"w": torch.ones(2)}
    expected = Outcome([1.0], weight, weight)
    same = replace(expected, num_weight_gradients=2)
    split = Layout("float32", 2, "fold", delay=1)
    assert not Trained(split, same, expected).faults
    changed = {"w": torch.tensor([1.0, 1.0 + 2**-23])}
    for wrong, said in (
        (expected, "0 weight gradients were computed apart"),
        (replace(same, losses=[1.0 + 2**-52]), "losses"),
        (replace(same, parameters=changed), "1 of 1 parameters differ, w most, by 1.2e-07"),
        (replace(same, gradients={}), "gradients of ['w']"),
        (replace(same, skip_bytes=8), "8 bytes of skips were sent"),
    ):
        (fault,) = Trained(split, wrong, expected).faults
        assert said in fault
    wrong = Trained(split, expected, expected)
    monkeypatch.setattr(modules, "train_all", lambda *_, **__: ([wrong], {"float32": [1.5]}))
    monkeypatch.setattr(modules, "_compare_once", lambda report, dtype: None)
    report = tmp_path / "report.json"
    assert modules.main(["--only", "sd", "--json", str(report)]) == 1
    assert "fold P=2 float32 split: 0 weight" in capsys.readouterr().out
    assert '"float32": 0.5' in report.read_text()


def test_microbatches_of_several_shapes_equal_one_process_and_the_module() -> None:
    layouts = [ALONE, Layout("float32", 2, "fold", 1, True), Layout("float32", 2)]
    trained, eager = train_all("dense/shapes", layouts, 2, steps=2)
    assert not [f"{each.layout}: {fault}" for each in trained for fault in each.faults]
    assert eager["float32"] == pytest.approx(trained[0].reference.losses, rel=1e-6)
