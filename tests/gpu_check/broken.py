"""Checks that do not pass, for the test of what runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from megatron_pulse.processes import ending_with_us
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures, Skipped


def fails(bench: Bench) -> Figures:
    """Finds something, then fails."""
    bench.figures["found"] = 41.5
    bench.call(sys.executable, "-c", "print('as | said'); raise SystemExit(3)")
    return bench.figures


def dies(bench: Bench) -> Figures:
    """Ends without a word."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hangs(bench: Bench) -> Figures:
    """A command with a child in a session of its own, which would outlive it."""
    child = (
        "import subprocess; print('sleeps', flush=True); "
        f"subprocess.run({[*_SLEEP]}, start_new_session=True)"
    )
    bench.call(*ending_with_us([sys.executable, "-c", child]))
    return {}


def leaves(bench: Bench) -> Figures:
    """Ends well, but for what it has started."""
    subprocess.Popen(_SLEEP, start_new_session=True)
    return {"done": True}


def writes(bench: Bench) -> Figures:
    """A file, beside those that were there."""
    there = [path.name for path in bench.folder.iterdir() if path.name.startswith("made")]
    (bench.folder / "made").write_text("")
    return {"there": there}


def declines(bench: Bench) -> Figures:
    """Says why it cannot be run."""
    raise Skipped("needs a Tuesday")


_SLEEP = ("sleep", "1000.25")
