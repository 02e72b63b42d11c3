"""Replicated and sent embedders in whole Megatron runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.runs import STEPS, alone, assert_equal_to_rounding, pipeline, run

REPLICATED = ["--pulse-conditioning", "replicate"]


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, pipeline(2)),
        (
            4,
            pipeline(
                2,
                "--use-distributed-optimizer",
                "--overlap-grad-reduce",
                "--overlap-param-gather",
            ),
        ),
        (4, pipeline(2, "--tensor-model-parallel-size", "2")),
    ],
    ids=["fold", "dp2-param-gather", "tp2"],
)
def test_replicated_embedders_change_nothing(num_ranks: int, flags: list[str]) -> None:
    """Losses, clipped gradient norms, validation and weights to rounding."""
    expected = alone(*STEPS, backbone="unet")  # nothing to send or replicate
    got = run(num_ranks, *STEPS, *flags, *REPLICATED, backbone="unet")
    assert got.executed.replicated == {"time_embedding"} != expected.executed.replicated
    if "--tensor-model-parallel-size" not in flags:
        assert_equal_to_rounding(got, expected)
    else:
        assert got.losses == pytest.approx(expected.losses, rel=1e-5)
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
        assert got.validation == pytest.approx(expected.validation, rel=1e-5)
        assert got.weights.keys() == expected.weights.keys()


def test_a_checkpoint_does_not_know_how_embedders_ran(tmp_path: Path) -> None:
    """Replicated at P=4, saved, continued with sending at P=2: the same curve."""
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    whole = run(4, *STEPS, *pipeline(4), *REPLICATED, *save, backbone="unet")
    send = pipeline(2, "--pulse-conditioning", "send")
    load = ["--load", str(tmp_path), "--ckpt-step", "1"]
    rest = run(2, *STEPS, *send, *load, backbone="unet")
    assert rest.executed.replicated != whole.executed.replicated
    end = replace(whole, losses=whole.losses[1:], grad_norms=whole.grad_norms[1:])
    assert_equal_to_rounding(rest, end)
