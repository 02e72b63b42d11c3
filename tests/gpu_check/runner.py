"""Runs checks one after the other, each in a process of its own that has a time limit:

    python -m tests.gpu_check.runner MODULE:FUNCTION FOLDER

PULSE_CHECK_MACHINE says what is there.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.report import write_json
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Check, Machine, Result, Skipped, Verdict
from tests.launch.sessions import session

MARKER = ".gpu_check"
"""A file in each folder of a check: what is in it was written here, and goes when it runs again."""
TAIL = 30
"""Lines of output that are kept of what did not pass."""
_LET_GO_S = 10.0
"""How long what a check has started may take to end when the check has."""


def run_checks(
    checks: Sequence[Check], machine: Machine, out: Path, scale: float = 1.0
) -> Iterator[Result]:
    """Each check's result when it is there; each has ``out/NAME`` for its files, and as many
    seconds as it says times ``scale``. What a check has started ends with it."""
    for check in checks:
        if reason := machine.lacks(check.need):
            yield Result(check.name, check.why, Verdict.SKIPPED, reason)
        else:
            yield _run(check, machine, out / check.name, scale * check.limit_s)


def foreign(checks: Sequence[Check], out: Path) -> list[str]:
    """Faults: folders of checks that hold what was not written here."""
    folders = [out / check.name for check in checks]
    return [
        f"{folder} holds other files: give --out another folder"
        for folder in folders
        if folder.exists()
        and not (folder / MARKER).exists()
        and (not folder.is_dir() or any(folder.iterdir()))
    ]


def _run(check: Check, machine: Machine, folder: Path, limit_s: float) -> Result:
    if (folder / MARKER).exists():  # checkpoints and profiles of an earlier run are not of this one
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    found, log = folder / "result.json", folder / "output.txt"
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu_check.runner", check.function, folder]
    left: list[int] = []
    environment = {"PULSE_CHECK_MACHINE": machine.to_text(), "PYTHONWARNINGS": "ignore"}
    with session(command, **environment) as run:
        try:
            run.process.wait(limit_s)
            status: int | None = run.process.returncode
            if not _gone(run.processes, _LET_GO_S):
                left = run.processes()
        except subprocess.TimeoutExpired:
            status = None
    seconds = round(time.monotonic() - began, 1)
    log.write_text(run.said())
    output = tuple(run.said().splitlines()[-TAIL:])
    said = json.loads(found.read_text()) if found.exists() else {}
    figures, reason = said.get("figures", {}), said.get("reason", "")
    if status is None:
        verdict, reason = Verdict.TIMED_OUT, f"was ended after its limit of {limit_s:g} s"
    elif left:
        verdict, reason = Verdict.FAILED, f"left {len(left)} processes running, which were ended"
    elif said.get("skipped"):
        verdict, output = Verdict.SKIPPED, ()
    elif status == 0 and said:
        verdict, output = Verdict.PASSED, ()
    else:
        verdict, reason = Verdict.FAILED, reason or f"its process ended with status {status}"
    return Result(check.name, check.why, verdict, reason, seconds, figures, output)


def _gone(processes: Callable[[], list[int]], limit_s: float) -> bool:
    """Whether a check has left no process, within a while."""
    deadline = time.monotonic() + limit_s
    while processes():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def run_one(function: str, folder: Path) -> int:
    """Run one check in this process and write what became of it; 0 if it passed or was skipped."""
    module, _, name = function.partition(":")
    bench = Bench(folder, Machine.parse(os.environ["PULSE_CHECK_MACHINE"]))
    found: dict[str, Any] = {}
    try:
        found["figures"] = getattr(importlib.import_module(module), name)(bench) or {}
    except Skipped as why:
        found |= {"skipped": True, "reason": str(why)}
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        found |= {"failed": True, "reason": f"{type(error).__name__}: {first}"[:500]}
    found.setdefault("figures", bench.figures)
    write_json(folder / "result.json", found)
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(run_one(sys.argv[1], Path(sys.argv[2])))
