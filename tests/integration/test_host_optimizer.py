"""The optimizer on the host (``--optimizer-cpu-offload``): whole runs, as one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.runs import (
    STEPS,
    Run,
    alone,
    assert_equal_to_rounding,
    assert_same,
    pipeline,
    run,
)
from tests.integration.test_bad_input import refuse

HOST = ["--use-distributed-optimizer", "--optimizer-cpu-offload"]
OVERLAPS = ["--overlap-grad-reduce", "--overlap-param-gather", "--overlap-cpu-optimizer-d2h-h2d"]
BF16 = ["--bf16"]
FP16 = ["--fp16", "--initial-loss-scale", "1024"]
HALF = ["--bf16", "--grad-reduce-in-bf16"]
TENSOR = ["--tensor-model-parallel-size", "2"]
PARTLY = ["--pulse-freeze", "embed.*", "--pulse-freeze", "in_blocks.*"]


@pytest.mark.parametrize(
    ("backbone", "dtype", "flags"),
    [
        ("uvit", BF16, ["--pulse-schedule", "zb-v", "--no-pin-cpu-grads", "--no-pin-cpu-params"]),
        ("unet", [], ["--pulse-offload", "*"]),
        ("unet", FP16, ["--overlap-cpu-optimizer-d2h-h2d"]),
        ("uvit", HALF, []),
        ("uvit", [*BF16, *PARTLY], []),
    ],
    ids=["split", "fp32", "fp16", "half-gradients", "frozen-rank"],
)
def test_bit_identical(backbone: str, dtype: list[str], flags: list[str]) -> None:
    """Losses, weights, fp32 weights and averages of two pipeline ranks."""
    one = [*HOST, *dtype, *STEPS]
    expected = alone(*one, backbone=backbone)
    assert expected.main_params and expected.averages
    assert_same(run(2, *one, *pipeline(2, *flags), backbone=backbone), expected)


def test_bit_identical_however_replicas_share_the_state() -> None:
    """Two replicas of one stage or of two, whose shares end elsewhere, after a sum of two."""
    one = [*HOST, *BF16, *STEPS]
    replicas = run(2, *one, *OVERLAPS)
    assert_same(run(4, *one, *pipeline(2, *OVERLAPS)), replicas)
    assert_equal_to_rounding(replicas, alone(*one))


@pytest.mark.parametrize("dtype", [[], BF16])
def test_as_on_the_device_to_rounding(dtype: list[str]) -> None:
    """Adam on the host rounds differently, but computes the same."""
    assert_equal_to_rounding(alone(*HOST, *dtype, *STEPS), alone(*dtype, *STEPS))


def test_tensor_parallel() -> None:
    got = run(2, *HOST, *TENSOR, *STEPS)
    assert got.losses == pytest.approx(alone(*HOST, *STEPS).losses, rel=1e-5)


def _go_on(ranks: int, folder: Path, *flags: str) -> Run:
    return run(
        ranks, *flags, "--global-batch-size", "8", "--train-iters", "4", "--load", f"{folder}"
    )


def test_resumed_at_another_layout(tmp_path: Path) -> None:
    """From a checkpoint of four ranks to two, from theirs to four: as if nothing had stopped."""
    four = [*HOST, *BF16, "--global-batch-size", "8", "--train-iters", "4"]
    saving = ["--save", str(tmp_path), "--save-interval", "1", "--async-save"]
    whole = run(4, *four, *pipeline(2, *saving))
    second = _go_on(2, tmp_path, *HOST, *BF16, *OVERLAPS, *saving, "--ckpt-step", "2")
    assert_same(second, _without(whole, 2))
    third = _go_on(4, tmp_path, *HOST, *BF16, *pipeline(2), "--ckpt-step", "3")
    assert_same(third, _without(whole, 3))


def _without(run: Run, steps: int) -> Run:
    return replace(run, losses=run.losses[steps:], grad_norms=run.grad_norms[steps:])


def test_a_rank_of_frozen_layers_saves_and_loads(tmp_path: Path) -> None:
    frozen = [*HOST, *BF16, *PARTLY]
    steps = ["--global-batch-size", "8", "--train-iters", "3"]
    saving = ["--save", str(tmp_path), "--save-interval", "1"]
    whole = run(2, *frozen, *steps, *pipeline(2, *saving))
    resumed = run(1, *frozen, *steps, "--load", str(tmp_path), "--ckpt-step", "2")
    assert_same(resumed, _without(whole, 2))


@pytest.mark.parametrize("to_host", [True, False])
def test_checkpoints_go_from_the_device_to_the_host_and_back(tmp_path: Path, to_host: bool) -> None:
    here = [*BF16, "--use-distributed-optimizer"]
    first, then = (here, [*BF16, *HOST]) if to_host else ([*BF16, *HOST], here)
    steps = ["--global-batch-size", "8", "--train-iters"]
    saved = run(2, *first, *steps, "2", "--save", str(tmp_path))
    whole = run(1, *first, *steps, "4")
    got = _go_on(1, tmp_path, *then)
    assert got.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    for name, master in got.main_params.items():
        torch.testing.assert_close(master, whole.main_params[name], rtol=1e-4, atol=5e-5)
        assert not torch.equal(master, saved.main_params[name]), name


@pytest.mark.parametrize("host", [HOST, HOST[:1]], ids=["host", "device"])
def test_a_checkpoint_before_the_first_step_that_counts(tmp_path: Path, host: list[str]) -> None:
    """If all steps overflow at the loss scale, there is no optimizer state yet."""
    scale = ["--fp16", "--initial-loss-scale", str(2.0**60), "--hysteresis", "1"]
    steps = ["--global-batch-size", "8", "--train-iters"]
    saved = run(2, *host, *scale, *steps, "2", "--save", str(tmp_path))
    assert saved.grad_norms == [None, None]
    resumed = _go_on(1, tmp_path, *host, *FP16)
    assert len(resumed.losses) == 2
    for name, master in saved.main_params.items():
        assert (resumed.main_params[name] - master).abs().max() < 1e-2, name


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = refuse(monkeypatch, 1, ["--optimizer-cpu-offload"])
    assert "--optimizer-cpu-offload was given without --use-distributed-optimizer" in fault
    (fault,) = refuse(monkeypatch, 1, ["--no-pin-cpu-grads"])
    assert "--no-pin-cpu-grads was given without --optimizer-cpu-offload" in fault
    (fault,) = refuse(monkeypatch, 1, [*HOST, *BF16, "--log-params-norm"])
    assert "--log-params-norm cannot be used with --optimizer-cpu-offload" in fault
    (fault,) = refuse(monkeypatch, 1, [*HOST, "--optimizer-offload-fraction", "0.5"])
    assert "moves all of the optimizer state to the host" in fault
