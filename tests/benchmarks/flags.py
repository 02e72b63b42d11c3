"""Tries every flag of Megatron's that works, in real runs: about 6 minutes on two cores.

.venv/bin/python -m tests.benchmarks.flags
.venv/bin/python -m tests.benchmarks.flags --save --load     # the trials that give one of these
"""

from __future__ import annotations

import sys

from tests.benchmarks.report import Report
from tests.integration.flag_trials import TRIALS, try_all


def main(names: list[str]) -> int:
    """Run the trials that give any of ``names`` (all without names); 1 if one fails."""
    trials = tuple(trial for trial in TRIALS if not names or trial.names() & set(names))
    report = Report()
    for trial, faults in try_all(trials):
        row = {"ranks": trial.ranks, "flags": trial.flags, "after": trial.first or ""}
        report.add(row | {"faults": "; ".join(faults)})
    failed = sum(bool(row["faults"]) for row in report.rows)
    print(f"{len(report.rows)} trials, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
