"""Selective recomputation: whole runs with the same numbers as one process."""

from __future__ import annotations

import pytest

from tests.integration.runs import STEPS, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

SPLIT = ["--pulse-schedule", "zb-v"]
PART = "--pulse-recompute-selective"


@pytest.mark.parametrize(
    ("backbone", "flags", "layers"),
    [
        ("uvit", [*SPLIT, "--recompute-granularity", "selective"], 12),
        ("unet", [PART, "down_blocks.*", PART, "up_blocks.*", "--bf16"], 0),
        ("unet", [*SPLIT, PART, "up_blocks.*", "--pulse-recompute", "down_blocks.*"], 0),
    ],
)
def test_bit_identical(backbone: str, flags: list[str], layers: int) -> None:
    more = ["--bf16"] * ("--bf16" in flags)
    got = run(2, *STEPS, *pipeline(2, *flags), backbone=backbone)
    assert got.executed.selective >= max(1, layers)
    assert_same(got, alone(*STEPS, *more, backbone=backbone))


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = refuse(monkeypatch, 1, [PART, "blok.*"])
    assert f"{PART}: no layer matches 'blok.*'" in fault
    (fault,) = refuse(monkeypatch, 1, [PART, "in_blocks.*", "--pulse-recompute", "in_blocks.*"])
    assert f"{PART} and --pulse-recompute both match in_blocks.0" in fault
    (fault,) = refuse(monkeypatch, 1, [PART, "in_blocks.*", "--pulse-offload", "*"])
    assert f"{PART} and --pulse-offload both match in_blocks.0" in fault
    both = [PART, "in_blocks.*", "--recompute-granularity", "selective"]
    (fault,) = refuse(monkeypatch, 1, both)
    assert "give one of them" in fault
