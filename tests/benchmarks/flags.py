"""Tries every flag of Megatron's that works, in real runs: about 6 minutes on two cores.

.venv/bin/python -m tests.benchmarks.flags
.venv/bin/python -m tests.benchmarks.flags --save --load     # the trials that give one of these
"""

from __future__ import annotations

import sys
import time

from tests.integration.flag_trials import TRIALS, try_all


def main(names: list[str]) -> int:
    """Run the trials that give any of ``names`` (all without names); 1 if one fails."""
    trials = tuple(trial for trial in TRIALS if not names or trial.names() & set(names))
    failed = 0
    start = time.monotonic()
    for trial, faults in try_all(trials):
        failed += bool(faults)
        first = f" after {trial.first}" if trial.first else ""
        print(f"{'FAILED' if faults else 'ok':7s}{trial.ranks} ranks: {trial.flags}{first}")
        for fault in faults:
            print(f"       {fault}", flush=True)
    seconds = time.monotonic() - start
    print(f"{len(trials)} trials, {failed} failed, in {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
