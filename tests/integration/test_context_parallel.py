"""Context parallelism of modules in whole runs: alike in every layout, resumed, refused."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.runs import Run, assert_same, pipeline, run

PROCESS = ["--pulse-objective", "v", "--pulse-noise-schedule", "scaled_linear"]
TWO = ["--global-batch-size", "8", "--train-iters", "2", "--pulse-class-dropout", "0"]


OWN = """
    import torch
    import torch.nn.functional as F
    from torch import nn


    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm = nn.LayerNorm(width)
            self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.rows = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

        def forward(self, x, scale):
            parts = self.into(self.norm(x) * scale).chunk(3, -1)
            q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.rows(x)


    class Tiny(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.enter = nn.Conv2d(1, width, 2, stride=2)
            self.places = nn.Parameter(torch.randn(1, 16, width))
            self.time = nn.Linear(1, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(6))
            self.leave = nn.Linear(width, 4)

        def forward(self, sample, timestep):
            x = self.enter(sample).flatten(2).mT + self.places
            scale = 1 + self.time(timestep[:, None] / 1000)[:, None]
            for block in self.blocks:
                x = block(x, scale)
            x = self.leave(x).unflatten(1, (4, 4)).unflatten(3, (2, 2))
            return x.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)[:, None]


    def build(width=16, heads=4):
        torch.manual_seed(0)
        module = Tiny(width, heads)
        return module, {"sample": torch.randn(2, 1, 8, 8), "timestep": torch.rand(2)}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a transformer of 16 tokens on digits."""
    code = tmp_path_factory.mktemp("own") / "mine.py"
    code.write_text(textwrap.dedent(OWN))
    return ["--pulse-module", f"{code}:build", *PROCESS, *TWO]


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


def test_ranks_with_a_share_of_the_tokens_train_as_one(module: list[str], tmp_path: Path) -> None:
    one = run(1, *module, backbone="none")
    saved = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    two = run(2, *module, *_context(2), *saved, backbone="none")
    _assert_close(two, one)
    four = run(4, *module, *_context(2, *pipeline(2)), backbone="none")
    assert_same(four, two)
    again = ["--load", saved[1], "--ckpt-step", "1", *module]
    end = replace(two, losses=two.losses[1:], grad_norms=two.grad_norms[1:])
    _assert_close(run(4, *again, *_context(4), backbone="none"), end)
    assert_same(run(2, *again, *_context(2), backbone="none"), end)
