"""The product algorithm: constructive first, then integer programs where they can still gain.

=====================  ==========================================================================
constructive           ``synthesize``; ends here when its bound proves it, or without a solver
templates              periodic schedules from a solver (``ilp.modulo``), unrolled and improved
exact                  the time-indexed program (``ilp.time_indexed``) where times are whole slots,
                       or CP-SAT, from the best so far, up to ``EXACT_SIZE`` devices times
                       microbatches; a shorter schedule, a better bound, or the proof that there
                       is none. Elsewhere ``synthesize`` again, from the templates
=====================  ==========================================================================

Theory: README.md beside this. The times are shares that were measured.
"""

from __future__ import annotations

import logging
import math
import time

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import run
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.grid import Grid, on_grid
from megatron_pulse.planner.schedule.ilp.solvers import Solver, choose
from megatron_pulse.planner.schedule.ilp.time_indexed import Found
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search.improve import improve
from megatron_pulse.planner.schedule.search.jobshop import TICKS, job_shop
from megatron_pulse.planner.schedule.search.synthesize import get_ready, synthesize
from megatron_pulse.planner.schedule.search.template import Template

EXACT_SIZE = {Solver.HIGHS: 128, Solver.GLPK: 64, Solver.CP_SAT: 256, Solver.NONE: 0}
"""Devices times microbatches up to which the exact program is tried."""

SMALL = 32
"""Devices times microbatches up to which the exact program needs no help by templates."""

CONSTRUCTIVE_SHARE = {"small": 0.1, "exact": 0.2, "none": 0.1}
TEMPLATE_SHARE = {"small": 0.0, "exact": 0.2, "none": 0.2}
"""Of the time, what the first two ways may take. The exact program has the rest, or, where there
is none for the problem, another constructive search that begins with the templates."""

RESERVE_S = 0.3
"""Seconds kept for reading and checking an answer."""

LEAST_S = 0.5
"""Seconds that the exact program is worth."""

EXACT_SLOTS = 60
"""Slots of the longest operation up to which times are taken as they are. Rounded to fewer, HiGHS
and GLPK gain less than annealing does in that time."""

log = logging.getLogger(__name__)


def solve(problem: ScheduleProblem, seconds: float = 10.0, solver: str = "auto") -> Synthesis:
    """The shortest schedule found within ``seconds``; never longer than the constructive one.

    ``solver``: ``auto``, ``highs``, ``glpk``, ``cp-sat`` or ``none``; the certificate's ``solver``
    names the path that produced the answer. Raises ValueError for a solver that is not there.
    """
    search = _Solving(problem, choose(solver), seconds)
    if search.solver is Solver.NONE:
        search.notes.append("no solver: constructive alone")
    elif not search.proved:
        search.templates()
        search.exact()
    return search.result()


class _Solving:
    """The best schedule so far, what was proved, and how each way fared."""

    def __init__(self, problem: ScheduleProblem, solver: Solver, seconds: float) -> None:
        self.problem, self.solver, self.seconds = problem, solver, seconds
        get_ready()
        self.began = time.monotonic()
        size = problem.placement.num_devices * problem.num_microbatches
        exactly = solver is Solver.CP_SAT
        self.grid = on_grid(problem, TICKS if exactly else EXACT_SLOTS)
        self.no_exact = ""
        if size > EXACT_SIZE[solver]:
            self.no_exact = f"devices x microbatches > {EXACT_SIZE[solver]}"
        elif not (exactly or self.grid.exact):
            self.no_exact = f"times are not multiples of 1/{EXACT_SLOTS} of the longest"
        self.size = "none" if self.no_exact else "small" if size <= SMALL else "exact"
        self.shop = job_shop(problem)
        self.notes: list[str] = []
        self.proof = ""
        self.found: list[Template] = []
        alone = solver is Solver.NONE
        found = synthesize(problem, seconds * (1 if alone else CONSTRUCTIVE_SHARE[self.size]))
        self.schedule, self.length = found.schedule, found.certificate.makespan
        self.bound, self.path = found.certificate.lower_bound, found.certificate.solver

    @property
    def proved(self) -> bool:
        """Whether no schedule is shorter than the best so far."""
        return self.length <= self.bound * (1 + 1e-9)

    def left(self) -> float:
        """Seconds that remain."""
        return self.seconds - (time.monotonic() - self.began)

    def offer(self, path: str, schedule: Schedule) -> bool:
        """Take ``schedule`` if it is valid and shorter; whether it was taken."""
        if faults := faults_for(self.problem, schedule):
            self.notes.append(f"{path}: its answer is not valid: {faults[0]}")
            return False
        length = run(self.problem, schedule).makespan
        if length >= self.length * (1 - 1e-9):
            return False
        self.schedule, self.length, self.path = schedule, length, path
        return True

    def templates(self) -> None:
        """Templates from the modulo program, unrolled and improved."""
        if self.solver is Solver.CP_SAT or self.size == "small":
            return
        from megatron_pulse.planner.schedule.ilp.modulo import fitting

        limit = min(self.seconds * TEMPLATE_SHARE[self.size], self.left())
        self.found = fitting(self.shop, self.solver, limit)
        before = self.length
        for template in self.found:
            if self.left() > 0 and not self.proved:
                start = improve(self.shop, template.unrolled(self.problem.num_microbatches))
                self.offer(self.template_path, self.shop.schedule("wave", start))
        gained = f"{before:g} to {self.length:g}" if self.length < before else "nothing shorter"
        self.notes.append(f"{self.solver} templates: {len(self.found)} found, {gained}")

    @property
    def template_path(self) -> str:
        """How schedules are called that begin with a solver's template."""
        return f"constructive + {self.solver} template"

    def exact(self) -> None:
        """The exact program of a small problem, else a longer constructive search."""
        if self.proved:
            return
        if self.no_exact:
            again = synthesize(self.problem, max(0.0, self.left()), templates=self.found)
            self.offer(self.template_path if self.found else "constructive", again.schedule)
            self.notes.append(f"{self.solver}: exact program not tried, {self.no_exact}")
            return
        if self.left() < LEAST_S:
            self.notes.append(f"{self.solver}: exact program not tried, no time left")
            return
        grid = self.grid
        found = self.shortest(grid)
        gained = False
        if found.start is not None:
            orders = job_shop(grid.problem).schedule("wave", found.start)
            gained = self.offer(str(self.solver), orders)
            better = improve(self.shop, self.shop.earliest(orders))
            gained |= self.offer(str(self.solver), self.shop.schedule("wave", better))
        if found.bound is not None and found.bound * grid.width > self.bound:
            self.bound = min(found.bound * grid.width, self.length)
            self.proof = f", proved by {self.solver}" if self.proved else ""
        shorter = f"{self.length:g}" if gained else "nothing shorter"
        ended = f"{found.answer.status} {found.answer.detail}".strip()
        self.notes.append(f"{self.solver} exact program: {ended}, {shorter}")

    def shortest(self, grid: Grid) -> Found:
        """The exact program on ``grid``, from the best so far where the solver takes a start."""
        shop = job_shop(grid.problem)
        start = shop.earliest(self.schedule)
        horizon = shop.makespan(start)
        bound = self.bound / grid.width if grid.exact else lower_bound(grid.problem)
        bound = math.ceil(bound * (1 - 1e-9))
        limit = self.left() - RESERVE_S
        if self.solver is Solver.CP_SAT:
            from megatron_pulse.planner.schedule.ilp.cpsat import shortest_by_cp_sat

            return shortest_by_cp_sat(shop, limit, horizon, bound, start)
        from megatron_pulse.planner.schedule.ilp.time_indexed import shortest

        if self.solver is Solver.HIGHS:
            return shortest(shop, self.solver, limit, horizon, bound, start)
        # GLPK takes no start; that one slot less is infeasible is all it can add.
        return shortest(shop, self.solver, limit, horizon - 1, bound)

    def result(self) -> Synthesis:
        """The best so far and its certificate."""
        certificate = Certificate(
            self.length,
            min(self.bound, self.length),
            self.proved,
            self.path + self.proof,
            time.monotonic() - self.began,
        )
        log.info(
            "schedule of %g (bound %g%s) by %s in %.1f s; %s",
            self.length,
            certificate.lower_bound,
            ", proved" if self.proved else "",
            certificate.solver,
            certificate.seconds,
            "; ".join(self.notes) or "no other way was needed",
        )
        return Synthesis(self.schedule, certificate)
