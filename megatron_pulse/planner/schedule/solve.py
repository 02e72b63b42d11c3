"""The product algorithm: constructive search, and an integer program beside it.

=====================  ==========================================================================
constructive           ``synthesize``, for all the time that there is, as if there were no solver
beside it              what a solver can add (``ilp.attempt``), in a process of less priority, from
                       the best schedule that is known after ``LATER`` of the time
=====================  ==========================================================================

So a solver that finds nothing takes nothing where there is a second core, and little elsewhere.
Time is processor time of each process, and the faster process waits for the slower. The answer
therefore does not depend on the machine's load, unless the wall clock ended a solver (reported).
Theory: README.md beside this.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.background import BackgroundSolver
from megatron_pulse.planner.schedule.ilp.improve_by_solver import Attempt
from megatron_pulse.planner.schedule.ilp.solvers import Solver, choose
from megatron_pulse.planner.schedule.passes.insert_offload import with_offload
from megatron_pulse.planner.schedule.passes.insert_recompute import with_recomputation
from megatron_pulse.planner.schedule.problem import (
    Certificate,
    ScheduleProblem,
    Synthesis,
    require_problem,
)
from megatron_pulse.planner.schedule.search.synthesize import compile_search, synthesize

LATER = 0.1
"""Share of the time after which a solver begins; most small problems are proved by then."""

log = logging.getLogger(__name__)


def solve(problem: ScheduleProblem, seconds: float = 10.0, solver: str = "auto") -> Synthesis:
    """The shortest schedule found within ``seconds`` of the processor; never longer than the
    constructive one.

    ``solver``: ``auto``, ``highs``, ``glpk``, ``cp-sat`` or ``none``; the certificate's ``solver``
    names the path that produced the answer. Raises ValueError for a solver that is not there and
    for arguments of other kinds.
    """
    require_problem("solve", problem)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ValueError(f"solve: seconds must be a number from 0 on, is {seconds!r}")
    chosen = choose(solver)
    if problem.offload_bytes is not None:
        return with_offload(problem, lambda of, part: solve(of, part, solver), seconds)
    if problem.recompute_s is not None:
        return with_recomputation(problem, solve(problem.within_backwards, seconds, solver))
    compile_search()
    began = time.monotonic()
    if chosen is Solver.NONE:
        found, notes = synthesize(problem, seconds), ["no solver: constructive alone"]
    else:
        with BackgroundSolver(problem, chosen, LATER * seconds, (1 - LATER) * seconds) as beside:
            found = synthesize(problem, seconds, beside=beside.is_enough)
            added = beside.wait()
        found, notes = _with(problem, found, chosen, added)
        if beside.late or (added is not None and added.late):
            cut_off = f"{found.certificate.solver}, {chosen} stopped at the time limit"
            found = replace(found, certificate=replace(found.certificate, solver=cut_off))
    made = replace(found.certificate, seconds=time.monotonic() - began)
    log.info(
        "schedule of %g (bound %g%s) by %s in %.1f s; %s",
        made.makespan,
        made.lower_bound,
        ", proved" if made.proved else "",
        made.solver,
        made.seconds,
        "; ".join(notes) or "no solver was needed",
    )
    return replace(found, certificate=made)


def _with(
    problem: ScheduleProblem, found: Synthesis, solver: Solver, added: Attempt | None
) -> tuple[Synthesis, list[str]]:
    """The better of both schedules and bounds, and how the solver fared."""
    made = found.certificate
    if added is None:
        return found, [] if made.proved else [f"{solver}: no answer in time"]
    notes = list(added.notes)
    schedule, length, path = found.schedule, made.makespan, made.solver
    if faults := faults_for(problem, added.schedule):
        notes.append(f"{solver}: its answer is not valid: {faults[0]}")
    elif (reached := simulate(problem, added.schedule).makespan) < length * (1 - 1e-9) or (
        added.proved and reached <= length * (1 + 1e-9)  # the search may have ended sooner for it
    ):
        schedule, length, path = added.schedule, reached, added.path or path
    bound = min(max(made.lower_bound, added.bound), length)
    proved = length <= bound * (1 + 1e-9)
    if proved and added.bound > made.lower_bound:
        path += f", proved by {solver}"
    return Synthesis(schedule, Certificate(length, bound, proved, path, made.seconds)), notes
