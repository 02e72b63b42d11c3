"""Whole Megatron runs: the same numbers under every layout."""

from __future__ import annotations

import pytest

from tests.integration.runs import (
    STEPS,
    Run,
    alone,
    assert_equal_to_rounding,
    assert_same,
    pipeline,
    run,
)


def one_process(backbone: str, *more: str) -> Run:
    return alone(*STEPS, *more, backbone=backbone)


@pytest.mark.parametrize(
    ("backbone", "num_devices", "flags"),
    [
        ("uvit", 4, []),
        ("uvit", 2, ["--pulse-placement", "interleaved", "--recompute-granularity", "full"]),
        ("unet", 2, ["--pulse-placement", "sequential", "--pulse-schedule", "gpipe"]),
        (
            "unet",
            4,
            [
                *("--pulse-partition", "soft", "--pulse-profile", "A100-80GB"),
                *("--recompute-granularity", "full"),
            ],
        ),
    ],
)
def test_placements_are_bit_identical(backbone: str, num_devices: int, flags: list[str]) -> None:
    got = run(num_devices, *STEPS, *pipeline(num_devices, *flags), backbone=backbone)
    assert len(got.losses) == 2 and len(got.validation) >= 1
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert got.executed.placement == given.get("--pulse-placement", "fold")
    assert got.executed.recomputed == ("--recompute-granularity" in given)
    assert got.executed.operations == {"F", "B"}
    assert_same(got, one_process(backbone))


@pytest.mark.parametrize("flags", [["--bf16"], ["--fp16", "--initial-loss-scale", "1024"]])
def test_half_precision_is_bit_identical_too(flags: list[str]) -> None:
    assert_same(run(2, *STEPS, *pipeline(2, *flags)), one_process("uvit", *flags))


@pytest.mark.parametrize(
    ("backbone", "num_ranks", "flags", "tolerance"),
    [
        # data parallel 2: gradients are averaged in another order
        ("unet", 4, pipeline(2), 1e-6),
        (
            "uvit",
            4,
            pipeline(
                2,
                "--use-distributed-optimizer",
                "--overlap-grad-reduce",
                "--overlap-param-gather",
            ),
            1e-6,
        ),
        # partial sums of split matrices
        ("unet", 2, ["--tensor-model-parallel-size", "2"], 1e-5),
    ],
    ids=["dp2", "dp2-param-gather", "tp2"],
)
def test_data_and_tensor_parallelism(
    backbone: str, num_ranks: int, flags: list[str], tolerance: float
) -> None:
    got = run(num_ranks, *STEPS, *flags, backbone=backbone)
    expected = one_process(backbone)
    if "--tensor-model-parallel-size" not in flags:
        assert_equal_to_rounding(got, expected, tolerance)
        return
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)
    assert got.validation == pytest.approx(expected.validation, rel=tolerance)
    assert set(got.weights) == set(expected.weights)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [(["--bf16"], 2e-3), (["--fp16", "--initial-loss-scale", "1024"], 2e-4)],
    ids=["bf16", "fp16"],
)
def test_tensor_parallelism_in_half_precision(flags: list[str], tolerance: float) -> None:
    """Each partial sum of a split matrix is rounded before they are added."""
    got = run(2, *STEPS, "--tensor-model-parallel-size", "2", *flags)
    expected = one_process("uvit", *flags)
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.validation == pytest.approx(expected.validation, rel=tolerance)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)


def test_training_learns() -> None:
    batch = ["--micro-batch-size", "8", "--global-batch-size", "8"]
    result = run(1, *batch, "--train-iters", "60")
    assert sum(result.losses[-10:]) < 0.85 * sum(result.losses[:10])
