"""Whole Megatron runs with FSDP2 and HSDP: the same numbers as one process."""

from __future__ import annotations

import pytest

from tests.integration.runs import STEPS, alone, assert_equal_to_rounding, run

FSDP = "--use-torch-fsdp2"


@pytest.mark.parametrize(
    ("backbone", "num_ranks", "flags"),
    [
        ("uvit", 2, []),
    ],
)
def test_fsdp_equals_one_process(backbone: str, num_ranks: int, flags: list[str]) -> None:
    got = run(num_ranks, *STEPS, FSDP, *flags, backbone=backbone)
    assert_equal_to_rounding(got, alone(*STEPS, backbone=backbone))
