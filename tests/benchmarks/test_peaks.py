"""Peaks of real steps are those of their plans, on a few of the benchmark's configs."""

from __future__ import annotations

import pytest

from tests.benchmarks.peaks import BAR, CASES, run

HELD = ("uvit-fold-exact-2-split-some", "sd-fold-exact-2-some")


@pytest.mark.parametrize("name", HELD)
def test_a_device_holds_what_its_plan_says(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    for row in run(case):
        assert abs(row.off) <= BAR, row
