"""Megatron runs that train a part of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.runs import (
    STEPS,
    alone,
    assert_equal_to_rounding,
    assert_same,
    pipeline,
    run,
)
from tests.integration.test_bad_input import refuse

HALF = ["--pulse-freeze", "embed.*", "--pulse-freeze", "in_blocks.*"]
"""Of a sequential pipeline of four, the first devices have nothing to train."""


def is_kept(name: str) -> bool:
    """True if ``HALF`` freezes the parameter."""
    return name.startswith(("embed.", "in_blocks."))


def test_what_is_trained_is_as_in_one_process() -> None:
    expected, whole = alone(*STEPS, *HALF), alone(*STEPS)
    got = run(4, *STEPS, *HALF, *pipeline(4, "--pulse-placement", "sequential"))
    assert_same(got, expected)
    assert expected.averages.keys() == {name for name in whole.weights if not is_kept(name)}
    assert expected.losses[0] == whole.losses[0] and expected.losses[1:] != whole.losses[1:]


def test_half_precision_split_backwards_and_what_is_saved(tmp_path: Path) -> None:
    """A frozen weight has no master: what is saved of it is what the others were trained with."""
    from megatron_pulse.integration.checkpoint.published_weights import load_whole
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    save = ["--save", str(tmp_path), "--save-interval", "2"]
    flags = [*pipeline(2, "--pulse-schedule", "wave-split"), *save]
    got = run(2, *STEPS, "--bf16", *HALF, *flags)
    assert_same(got, alone(*STEPS, "--bf16", *HALF))
    kept = [name for name in got.weights if is_kept(name)]
    assert all(torch.equal(got.main_params[name], got.weights[name]) for name in kept)
    longer = ["--global-batch-size", "8", "--train-iters", "3", "--load", str(tmp_path)]
    other = run(1, *longer, "--bf16", "--no-load-optim")
    assert not all(torch.equal(other.weights[name], got.weights[name]) for name in kept)
    _, stage = load_whole(read_saved_run(tmp_path), averaged=True)
    for name, value in stage.named_parameters():
        assert torch.equal(value, (got.weights if is_kept(name) else got.averages)[name]), name


def test_data_parallelism_and_other_parts_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is continued with what it trains; with other parts it begins a new optimizer."""
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    distributed = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    flags = pipeline(2, "--pulse-placement", "sequential", *distributed)
    saved = run(4, *STEPS, *HALF, *flags, *save)
    assert_equal_to_rounding(saved, alone(*STEPS, *HALF), 1e-6)
    longer = ["--global-batch-size", "8", "--train-iters", "3", "--load", str(tmp_path)]
    (fault,) = refuse(monkeypatch, 1, [*longer, *distributed[:1]])
    assert "its optimizer state is for training everything but embed.*, in_blocks.*" in fault
    assert "--no-load-optim" in fault
    kept, moved = (
        next(n for n in saved.weights if n.startswith(part))
        for part in ("in_blocks.", "out_blocks.")
    )
    same = run(2, *longer, *HALF, *distributed, *pipeline(2))
    assert torch.equal(same.weights[kept], saved.weights[kept])
    assert not torch.equal(same.weights[moved], saved.weights[moved])
    other = run(2, *longer, "--no-load-optim", "--pulse-train", "in_blocks.*", *pipeline(2))
    assert not torch.equal(other.weights[kept], saved.weights[kept])
    assert torch.equal(other.weights[moved], saved.weights[moved])
    assert other.averages.keys() == {n for n in saved.weights if n.startswith("in_blocks.")}
