"""The product algorithm: constructive search, then an integer program that polishes and proves.

The program (``ilp``) is for small problems whose times are whole slots. There the search has half
of the time; elsewhere it has all. Time is the processor's, so that the answer does not depend on
the machine's load, unless the wall clock ended the solver (reported). Theory: README.md beside
this.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megatron_pulse.planner.schedule.ilp.polish import obstacle, polish
from megatron_pulse.planner.schedule.ilp.solvers import choose
from megatron_pulse.planner.schedule.passes.insert_offload import with_offload
from megatron_pulse.planner.schedule.passes.insert_recompute import with_recomputation
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis, require_problem
from megatron_pulse.planner.schedule.search.synthesize import compile_search, synthesize

LEAST_S = 2.0
"""Least number of seconds for which the program is started: its imports take about one."""

log = logging.getLogger(__name__)


def solve(problem: ScheduleProblem, seconds: float = 10.0, solver: str = "auto") -> Synthesis:
    """The shortest schedule found within ``seconds`` of the processor; never longer than a classic
    one that fits.

    ``solver``: ``auto``, ``highs``, ``glpk`` or ``none``; the certificate's ``solver`` names the
    path that produced the answer. Raises ValueError for a solver that is not there and for
    arguments of other kinds.
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
    began, searching = time.monotonic(), time.process_time()
    note = obstacle(problem, chosen)
    found = synthesize(problem, seconds if note or seconds / 2 < LEAST_S else seconds / 2)
    left = seconds - (time.process_time() - searching)
    if not note and not found.certificate.proved and left >= LEAST_S:
        found, note = polish(problem, found, chosen, left)
    made = replace(found.certificate, seconds=time.monotonic() - began)
    log.info(
        "schedule of %g (bound %g%s) by %s in %.1f s; %s",
        made.makespan,
        made.lower_bound,
        ", proved" if made.proved else "",
        made.solver,
        made.seconds,
        note or "no solver was needed",
    )
    return replace(found, certificate=made)
