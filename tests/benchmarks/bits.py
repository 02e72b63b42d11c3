"""Whole runs compared with one process: each way's losses, norms and weights, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.report import Report
from tests.integration.runs import Run, assert_equal_to_rounding, assert_same


@dataclass(frozen=True)
class Way:
    """A run, and the process that it is compared with, which is made once for each ``reference``.

    Without a ``tolerance`` all must be the same to the bit.
    """

    name: str
    run: Callable[[], Run]
    reference: tuple[str, ...] = ()
    tolerance: float = 0.0


def compare(
    report: Report, case: str, ways: Iterator[Way], alone: Callable[..., Run]
) -> Iterator[bool]:
    """Report of each way whether it is as ``alone(*reference)``, in the order of ``ways``."""
    expected: dict[tuple[str, ...], Run] = {}
    for way in ways:
        if way.reference not in expected:
            expected[way.reference] = alone(*way.reference)
        began = time.monotonic()
        kinds, said = "", "equal to rounding" if way.tolerance else "the same bits"
        try:
            got, reference = way.run(), expected[way.reference]
            kinds = " ".join(sorted(got.executed.operations))
            if not got.weights:  # each rank has its part
                reference = replace(reference, weights={})
            if way.tolerance:
                assert_equal_to_rounding(got, reference, way.tolerance)
            else:
                assert_same(got, reference)
        except AssertionError as error:
            said = f"DIFFERS: {str(error)[-600:]}"
        seconds = time.monotonic() - began
        report.add({"of": case, "way": way.name, "s": seconds, "operations": kinds, "is": said})
        yield not said.startswith("DIFFERS")


def stopped(run: Callable[..., Run], folder: Path) -> Run:
    """Run that is stopped after two steps, saved in ``folder``, and goes on."""
    kept = ["--save", str(folder), "--save-interval", "2"]
    first, rest = run(*kept, "--exit-interval", "2"), run(*kept)
    norms = first.grad_norms + rest.grad_norms
    return replace(rest, losses=first.losses + rest.losses, grad_norms=norms)
