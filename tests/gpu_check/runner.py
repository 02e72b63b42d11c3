"""Runs checks one after the other, each in a process of its own that has a time limit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.gpu_check.check import Check, Machine, Result, Verdict
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
    command = [sys.executable, "-m", "tests.gpu_check.one", check.function, folder]
    left: list[int] = []
    environment = {"PULSE_CHECK_MACHINE": machine_text(machine), "PYTHONWARNINGS": "ignore"}
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


def machine_text(machine: Machine) -> str:
    """For ``machine_of``."""
    return json.dumps([machine.gpus, machine.shares_gpu, dict(machine.versions)])


def machine_of(text: str) -> Machine:
    """What ``machine_text`` was given."""
    gpus, shares, versions = json.loads(text)
    return Machine(tuple(gpus), shares, versions)
