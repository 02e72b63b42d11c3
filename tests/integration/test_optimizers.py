"""Optimizers: Muon and Lion train alike in every layout; others are refused by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megatron_pulse.integration.flags.flag_constraints import check_constraints
from megatron_pulse.integration.flags.parse import parse
from tests.integration.runs import (
    BASE,
    STEPS,
    TINY,
    assert_same,
    pipeline,
    run,
)

INSTALLED = importlib.util.find_spec("emerging_optimizers") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="emerging-optimizers is not installed")


def faults_of(*argv: str) -> list[str]:
    line = parse([*TINY["uvit"], *BASE, *STEPS, *argv])
    return [*line.faults, *check_constraints(line)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prodigy", "estimated over all parameters.* Give adam with lr"),
        ("adafactor", "factored state.* Give lion"),
        ("came", "factored state.* Give lion"),
        ("adamw8bit", "8-bit state.* Give adam, sharded"),
        ("soap", "not planned for.* Give muon"),
        ("nadam", "unknown: give adam, sgd, muon or lion"),
    ],
)
def test_unsupported_optimizer_is_refused_with_the_nearest(name: str, said: str) -> None:
    (fault,) = faults_of("--optimizer", name)
    assert fault.startswith(f"--optimizer {name}: ")
    assert re.search(said, fault), fault


def test_emerging_optimizer_has_constraints() -> None:
    found = faults_of("--optimizer", "lion", "--fp16", "--use-distributed-optimizer")
    assert sum("shards Adam's state" in fault for fault in found) == 1
    assert sum("lion cannot be used with --fp16" in fault for fault in found) == 1
    assert sum("is not installed" in fault for fault in found) == (not INSTALLED)


def test_warmup_epochs_are_steps_of_the_data(tmp_path: Path) -> None:
    """digits8 has 1,617 training samples: of 8, 0.01 epochs are 3 steps (2.02, rounded up)."""
    flags = ["--global-batch-size", "8", "--train-iters", "4"]
    found = run(1, *flags, "--pulse-warmup-epochs", "0.01")
    rates = [step["lr"] for step in found.steps]
    expected = run(1, *flags, "--lr-warmup-iters", "3")
    assert rates == [step["lr"] for step in expected.steps] and rates[0] < rates[2] < rates[3]


@needs_package
@pytest.mark.parametrize("name", ["muon", "lion"])
def test_emerging_optimizer_continues_in_another_layout(name: str, tmp_path: Path) -> None:
    flags = ["--global-batch-size", "8", "--optimizer", name, "--bf16"]
    straight = run(1, *flags, "--train-iters", "4")
    saving = [*flags, "--save", str(tmp_path / "run")]
    run(2, *saving, *pipeline(2), "--train-iters", "2")
    continued = run(1, *saving, "--train-iters", "4")
    assert continued.losses == straight.losses[2:]
    for kind in ("losses", "grad_norms", "validation"):
        setattr(continued, kind, getattr(straight, kind))
    assert_same(continued, straight)


@needs_package
def test_muon_updates_whole_matrices_under_tensor_parallelism() -> None:
    flags = [*STEPS, "--optimizer", "muon"]
    divided, whole = run(2, *flags, "--tensor-model-parallel-size", "2"), run(1, *flags)
    assert divided.losses == pytest.approx(whole.losses, rel=2e-5)
    assert divided.validation == pytest.approx(whole.validation, rel=2e-5)
