"""Split backward passes in whole Megatron runs: the same numbers as one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import STEPS, Run, alone, assert_same, pipeline, run

ZB_V = ["--pulse-schedule", "zb-v"]
ZB_H1 = ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"]


SPLIT = {"F", "I", "W"}
SOME = ["--pulse-recompute", "down_blocks.*.resnets.*", "--pulse-recompute", "up_blocks.0.att*"]


def one_process(backbone: str, *more: str) -> Run:
    return alone(*STEPS, *more, backbone=backbone)


@pytest.mark.parametrize(
    ("backbone", "num_devices", "flags"),
    [
        ("uvit", 4, ZB_V),
        ("unet", 2, [*ZB_H1, "--recompute-granularity", "full"]),
        ("unet", 2, [*ZB_V, *SOME]),
    ],
)
def test_bit_identical(backbone: str, num_devices: int, flags: list[str]) -> None:
    got = run(num_devices, *STEPS, *pipeline(num_devices, *flags), backbone=backbone)
    assert got.executed.operations == SPLIT
    assert got.executed.recomputed == ("--recompute-granularity" in flags)
    assert_same(got, one_process(backbone))


def test_bf16_is_bit_identical_too() -> None:
    got = run(2, *STEPS, *pipeline(2, *ZB_V, "--bf16"), backbone="unet")
    assert got.executed.operations == SPLIT
    assert_same(got, one_process("unet", "--bf16"))


@pytest.mark.parametrize(
    ("backbone", "flags", "tolerance"),
    [
        (
            "unet",
            [
                *("--use-distributed-optimizer", "--overlap-grad-reduce"),
                *("--pulse-conditioning", "replicate"),
            ],
            1e-6,
        ),
        ("unet", ["--tensor-model-parallel-size", "2"], 1e-5),
    ],
    ids=["dp2-overlap-replicated", "tp2"],
)
def test_with_other_parallelism(backbone: str, flags: list[str], tolerance: float) -> None:
    """Overlapped reductions must not begin before the last weight gradient is there."""
    got = run(4, *STEPS, *pipeline(2, *ZB_V, *flags), backbone=backbone)
    expected = one_process(backbone)
    assert got.executed.operations == SPLIT
    assert got.executed.replicated == ({"time_embedding"} if "replicate" in flags else set())
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)
    assert got.validation == pytest.approx(expected.validation, rel=tolerance)


def test_sequence_parallel() -> None:
    flags = [*ZB_V, "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    got = run(4, *STEPS, *pipeline(2, *flags))
    assert got.executed.operations == SPLIT
    assert got.losses == pytest.approx(one_process("uvit").losses, rel=1e-5)


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """Written by hand, say: GPipe's order with every weight gradient at the end."""
    rows = []
    for stages in ((0, 3), (1, 2)):
        forwards = [f"{s}F{m}" for s in stages for m in range(4)]
        backwards = [f"{s}I{m}" for s in reversed(stages) for m in range(4)]
        rows.append(",".join([*forwards, *backwards, *(b.replace("I", "W") for b in backwards)]))
    file = tmp_path / "mine.csv"
    file.write_text("\n".join(rows))
    got = run(2, *STEPS, *pipeline(2, "--pulse-schedule", str(file)))
    assert got.executed.operations == SPLIT
    assert_same(got, one_process("uvit"))
