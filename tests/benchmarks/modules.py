"""Every class of the study as a derived chain: its module's numbers, and one device's everywhere.

    .venv/bin/python -m tests.benchmarks.modules
    .venv/bin/python -m tests.benchmarks.modules --shapes
    .venv/bin/python -m tests.benchmarks.modules --only svd --only flux --json modules.json

Of each class, tiny and with random weights: outputs and all gradients bit for bit those of the
eager module, skips as published; three training steps at P = 1, 2 and 4, folded where there are
skips and sequential, backwards whole and split, with and without recomputation, in fp32 and bf16,
bit for bit those of one device. The exit status is 1 if any differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.benchmarks.report import Flags, Report, record
from tests.ranks import RanksFailed
from tests.tracing.bits import chain_equal_to, skips_of
from tests.tracing.layouts import DTYPES, Trained, all_layouts, train_all
from tests.tracing.shapes import SHAPES
from tests.tracing.zoo import OUTPUT, SKIPS, STUDY, ZOO, kernels_of, make

RANKS = 4


@dataclass
class Found:
    """What was found of one class; ``apart`` is how far the losses of a loop of one's own on the
    module are from the chain's on one device, relative, by dtype."""

    name: str
    parameters: int = 0
    links: int = 0
    embedders: int = 0
    skips: int = 0
    layouts: int = 0
    apart: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def look_at(
    name: str, num_ranks: int = RANKS, dtypes: Sequence[str] = DTYPES, shapes: bool = False
) -> Found:
    """All of one class; with ``shapes`` its microbatches have several, in turn."""
    start = time.monotonic()
    report = Found(name)
    for dtype in dtypes:
        with kernels_of(name):
            _compare_once(report, dtype)
    layouts = all_layouts(dtypes, num_ranks, bool(report.skips))
    try:
        subject = f"{name}/shapes" if shapes else name
        trained, eager = train_all(subject, layouts, num_ranks, timeout_s=1200.0)
    except RanksFailed as failure:
        report.faults.append(str(failure))
        trained, eager = [], {}
    report.layouts = len(trained)
    for each in trained:
        report.faults += [f"{each.layout}: {fault}" for fault in each.faults]
    report.apart = {dtype: _apart(losses, dtype, trained) for dtype, losses in eager.items()}
    report.seconds = round(time.monotonic() - start, 1)
    return report


def _compare_once(report: Found, dtype: str) -> None:
    """The chain's outputs and gradients beside the module's."""
    module, given = make(report.name, getattr(torch, dtype))
    try:
        chain = chain_equal_to(module, given, output=OUTPUT.get(report.name))
    except (AssertionError, ValueError) as error:
        report.faults.append(f"{dtype}, eager: {type(error).__name__}: {error}")
        return
    report.parameters = sum(p.numel() for p in module.parameters())
    report.skips, report.embedders = skips_of(chain), sum(unit.embedder for unit in chain.units)
    report.links = len(chain.units) - report.embedders
    if report.skips != SKIPS.get(report.name, 0):
        report.faults.append(f"{report.skips} skips, published {SKIPS.get(report.name, 0)}")


def _apart(losses: Sequence[float], dtype: str, trained: Sequence[Trained]) -> float:
    expected = next(each.reference.losses for each in trained if each.layout.dtype == dtype)
    pairs = zip(losses, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    flags = Flags(__doc__)
    flags.add("--only", [], f"one of {', '.join(ZOO)}", action="append", choices=list(ZOO),
              metavar="CLASS")  # fmt: skip
    flags.add("--ranks", RANKS, choices=(1, 2, 4))
    flags.add("--shapes", False, "microbatches of several shapes in a step, of classes with such")
    args = flags.parse_args(argv)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    report = Report(args.json)
    for name in args.only or STUDY:
        if not args.shapes or name in SHAPES:
            found = look_at(name, args.ranks, shapes=args.shapes)
            report.add(found, record(found) | {"faults": "; ".join(found.faults) or "equal"})
    return int(any(found.faults for found in report.rows))


if __name__ == "__main__":
    sys.exit(main())
