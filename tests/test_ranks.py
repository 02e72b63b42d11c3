"""Ranks of tests end with the process that started them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.launch.sessions import session

SLEEPING = """
import os, sys, time
from pathlib import Path
from tests import ranks

def sleep(folder):
    Path(folder, f"rank{os.environ['RANK']}").touch()
    time.sleep(600)

if __name__ == "__main__":
    ranks._PRELOAD.clear()
    os.environ.pop(ranks.SHARED, None)
    ranks.run_ranks(2, sleep, sys.argv[1])
"""


def test_ranks_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING)
    with session([sys.executable, script, tmp_path], PYTHONPATH=".") as run:
        run.wait_until(lambda: len(list(tmp_path.glob("rank*"))) == 2, "two ranks", 60)
        assert len(run.processes()) >= 4  # the caller, the server, two ranks
        run.process.kill()
        assert run.ended() == -signal.SIGKILL
