"""Context parallelism of modules in whole runs: alike in every layout, resumed, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.runs import Run, assert_same, pipeline, run

TWO = ["--global-batch-size", "8", "--train-iters", "2"]


def _context(size: int, *flags: str) -> list[str]:
    return ["--context-parallel-size", str(size), *flags]


def _assert_close(got: Run, expected: Run) -> None:
    """Equal up to rounding, and to Adam's first steps of gradients that are rounding alone."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert got.validation == pytest.approx(expected.validation, rel=1e-4)
    for name, weight in expected.weights.items():
        if not name.endswith("into.bias"):  # no attention depends on that of keys
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-3, atol=5e-5)


def test_ranks_with_a_share_of_the_tokens_train_as_one(tmp_path: Path) -> None:
    one = run(1, *TWO, backbone="tokens")
    saved = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    two = run(2, *TWO, *_context(2), *saved, backbone="tokens")
    _assert_close(two, one)
    four = run(4, *TWO, *_context(2, *pipeline(2)), backbone="tokens")
    assert_same(four, two)
    again = ["--load", saved[1], "--ckpt-step", "1", *TWO]
    end = replace(two, losses=two.losses[1:], grad_norms=two.grad_norms[1:])
    _assert_close(run(4, *again, *_context(4), backbone="tokens"), end)
    assert_same(run(2, *again, *_context(2), backbone="tokens"), end)
