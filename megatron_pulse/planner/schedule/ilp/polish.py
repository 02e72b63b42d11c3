"""Polish of a known schedule by the integer program, in a process that may crash or be killed.

``python -m megatron_pulse.planner.schedule.ilp.polish FOLDER`` reads the question from the folder,
and writes the answer there. Both are pickles of the same version of the code.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from megatron_pulse.files import replacing
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.solvers import Solver
from megatron_pulse.planner.schedule.ilp.time_indexed import shortest
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.time_grid import on_grid
from megatron_pulse.processes import ending_with_us

MOST_SIZE = {Solver.HIGHS: 128, Solver.GLPK: 64}
"""Devices times microbatches up to which the program is tried."""

MOST_SLOTS = 60
"""Slots of the longest operation up to which times are whole slots.

Rounded to fewer slots, the program gains less than annealing does in that time.
"""

LATE = 4.0
"""Multiple of its seconds after which a process is killed: a busy machine takes longer."""

QUESTION, ANSWER = "question.pickle", "answer.pickle"


def obstacle(problem: ScheduleProblem, solver: Solver) -> str:
    """Reason why the program is not tried; empty if it is."""
    size = problem.placement.num_devices * problem.num_microbatches
    if solver is Solver.NONE:
        return "no solver: constructive alone"
    if size > MOST_SIZE[solver]:
        return f"{solver} not tried, devices x microbatches > {MOST_SIZE[solver]}"
    if not on_grid(problem, MOST_SLOTS).exact:
        return f"{solver} not tried, times are not multiples of 1/{MOST_SLOTS} of the longest"
    return ""


def polish(
    problem: ScheduleProblem, known: Synthesis, solver: Solver, seconds: float
) -> tuple[Synthesis, str]:
    """The better of ``known`` and what ``solver`` finds from it, with the better of both bounds.

    Also returns how the solver fared. Whatever happens to it is no error.
    """
    made, length, schedule = known.certificate, known.certificate.makespan, known.schedule
    answer, fate = _ask((problem, solver, seconds, schedule, made.lower_bound), seconds)
    path, bound = made.solver, made.lower_bound
    if answer is None:
        note = f"{solver}: {fate}"
        return replace(known, certificate=replace(made, solver=f"{path}, {note}")), note
    found, proved = answer
    if found is not None:
        if faults := faults_for(problem, found):
            fate = f"its answer is not valid: {faults[0]}"
        elif (reached := simulate(problem, found).makespan) < length * (1 - 1e-9):
            fate += f", {length:g} to {reached:g}"
            schedule, length, path = found, reached, str(solver)
    if proved > bound:
        bound = min(proved, length)
        if length <= bound * (1 + 1e-9):
            path += f", proved by {solver}"
    certificate = Certificate(length, bound, length <= bound * (1 + 1e-9), path, made.seconds)
    return Synthesis(schedule, certificate), f"{solver}: {fate}"


type _Question = tuple[ScheduleProblem, Solver, float, Schedule, float]
type _Answer = tuple[Schedule | None, float]
"""Schedule found, and proved bound (0: none)."""


def _ask(question: _Question, seconds: float) -> tuple[_Answer | None, str]:
    """Answer of a process of its own, None if there is none, and how it ended."""
    root = str(Path(__file__).parents[4])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="pulse-polish-") as folder:
        (Path(folder) / QUESTION).write_bytes(pickle.dumps(question))
        process = subprocess.Popen(
            ending_with_us([sys.executable, "-P", "-m", __name__, folder]),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, said = process.communicate(timeout=LATE * seconds + 5)  # 5 s to start and write
        except subprocess.TimeoutExpired:
            return None, "stopped at the time limit"
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group: a solver may be a program
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode or not (Path(folder) / ANSWER).exists():
            last = (said.strip().splitlines() or ["killed"])[-1]
            return None, f"failed with exit code {process.returncode}: {last[-200:]}"
        answer, status = pickle.loads((Path(folder) / ANSWER).read_bytes())
        return answer, status


def _solve(
    problem: ScheduleProblem, solver: Solver, seconds: float, schedule: Schedule, bound: float
) -> tuple[_Answer, str]:
    grid = on_grid(problem, MOST_SLOTS)
    shop = job_shop(grid.problem)
    start, least = shop.earliest(schedule), math.ceil(bound / grid.width * (1 - 1e-9))
    horizon, left = shop.makespan(start), seconds - time.process_time()
    if solver is Solver.GLPK:  # takes no start, and can only prove that a slot less is infeasible
        found = shortest(shop, solver, left, horizon - 1, least)
    else:
        found = shortest(shop, solver, left, horizon, least, start)
    proved = 0.0 if found.bound is None else found.bound * grid.width
    if found.start is None:
        return (None, proved), str(found.status)
    return (shop.schedule("wave", improve(shop, found.start)), proved), str(found.status)


def main(folder: Path) -> None:
    """Answer the question in ``folder``."""
    answer = _solve(*pickle.loads((folder / QUESTION).read_bytes()))
    with replacing(folder / ANSWER) as new:
        new.write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    from megatron_pulse.planner.schedule.ilp import polish as module  # the name in pickles

    module.main(Path(sys.argv[1]))
