"""Activations on the host until their backward: whole runs, the same numbers as one process."""

from __future__ import annotations

import pytest

from tests.integration.runs import STEPS, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

SPLIT = ["--pulse-schedule", "zb-v"]
ALL = ["--pulse-offload", "*"]


@pytest.mark.parametrize(
    ("backbone", "flags"),
    [
        ("uvit", [*SPLIT, *ALL]),
        ("unet", [*ALL, "--bf16"]),
        ("unet", [*SPLIT, "--pulse-offload", "up_blocks.*", "--pulse-recompute", "down_blocks.*"]),
    ],
)
def test_bit_identical(backbone: str, flags: list[str]) -> None:
    more = ["--bf16"] * ("--bf16" in flags)
    got = run(2, *STEPS, *pipeline(2, *flags), backbone=backbone)
    assert got.executed.offload_bytes > 0
    assert_same(got, alone(*STEPS, *more, backbone=backbone))


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (fault,) = refuse(monkeypatch, 1, ["--pulse-offload", "blok.*"])
    assert "--pulse-offload: no layer matches 'blok.*'" in fault
    for flag in ("--pulse-offload", "--pulse-recompute"):
        frozen = ["--pulse-freeze", "embed.*", "--pulse-freeze", "in_blocks.*"]
        (fault,) = refuse(monkeypatch, 1, [*frozen, flag, "in_blocks.*"])
        assert f"{flag} in_blocks.*: the matching layers keep no activations" in fault
    (fault,) = refuse(monkeypatch, 1, [*ALL, "--recompute-granularity", "full"])
    assert "--pulse-offload and --recompute-granularity full both match embed and" in fault
    given = ["--pulse-offload", "nix", "--pulse-recompute", "blok.*"]
    several = refuse(monkeypatch, 1, [*given, "--pulse-offload-weights", "niks"])
    assert all(f"no layer matches {name!r}" in str(several) for name in ("nix", "blok.*", "niks"))
