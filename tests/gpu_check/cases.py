"""A rank that trains cases of ``tests.runtime.equality`` on its device, one after the other.

    pulse run --nproc-per-node 2 -m tests.gpu_check.cases FOLDER cuda

Reads ``FOLDER/cases``, (family, case) pairs; outcomes go to ``FOLDER/rankN``.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.processes import end_with_parent
from tests.gpu_check.recorded import on_cpu, take_gpu

if TYPE_CHECKING:
    from megatron_pulse.runtime.p2p.channels import Channel, Opener


def kept_open(opener: Opener) -> Opener:
    """Channels that the next case has as well: NCCL takes half a second to make one. Each case ends
    when all that it sent has arrived."""
    found: dict[tuple[int, int], Channel] = {}

    def opened(group: Any, source: int, destination: int, timeout_s: float) -> Channel:
        if (source, destination) not in found:
            found[source, destination] = opener(group, source, destination, timeout_s)
        return found[source, destination]

    return opened


def main() -> None:
    """Train and write."""
    end_with_parent(signal.SIGTERM)
    folder, device = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    warnings.filterwarnings("ignore")
    from megatron_pulse.integration.megatron import compat

    compat.install()
    if device == "cuda":
        device = take_gpu()
    from megatron_pulse.runtime.p2p.channels import OPENERS
    from tests.runtime.tiny import run_cases

    for backend, opener in OPENERS.items():
        OPENERS[backend] = kept_open(opener)
    cases = [
        (f, replace(c, device=device)) for f, c in pickle.loads((folder / "cases").read_bytes())
    ]
    outcomes = run_cases(cases)
    for outcome in outcomes:
        outcome.parameters, outcome.gradients = on_cpu((outcome.parameters, outcome.gradients))
    (folder / f"rank{rank}").write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    main()
