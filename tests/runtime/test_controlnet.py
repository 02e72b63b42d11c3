"""A locked UNet with a control branch on several devices: bit for bit one process."""

from __future__ import annotations

from dataclasses import replace

from tests.ranks import run_ranks
from tests.runtime.equality import Case, differences, merge, references
from tests.runtime.tiny import run_cases

FOLD = Case("fold", 4, dtype="float32", steps=2)
CASES = [("controlnet", FOLD), ("controlnet", replace(FOLD, placement="sequential"))]


def test_four_devices_equal_one_process() -> None:
    expected = references(run_cases, [(family, case.alone) for family, case in CASES])
    ranks = run_ranks(4, run_cases, CASES)
    for i, (_, case) in enumerate(CASES):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == expected[i].losses and len(got.losses) == 8
        assert not differences(got.gradients, expected[i].gradients), case
        assert not differences(got.parameters, expected[i].parameters), case
        assert all(g.abs().max() > 0 for g in got.gradients.values()), case
        # The locked encoder sends no gradient: less travels back than forth.
        assert 0 < got.gradient_bytes < got.forward_bytes
        assert (got.skip_bytes == 0) == (case.placement == "fold")
