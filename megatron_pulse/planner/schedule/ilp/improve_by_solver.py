"""Improvement of a known schedule by an integer program.

=====================  ==========================================================================
templates              periodic schedules from a solver (``modulo``), unrolled and improved
exact                  the time-indexed program (``time_indexed``) where times are whole slots, or
                       CP-SAT, from the best so far, up to ``EXACT_SIZE`` devices times
                       microbatches; a shorter schedule, a better bound, or the proof that there
                       is none. Elsewhere ``synthesize``, from the templates
=====================  ==========================================================================

The times are shares that were measured, of the processor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp.solvers import Answer, Solver, processor_s
from megatron_pulse.planner.schedule.ilp.time_indexed import ExactResult
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.jobshop import TICKS, job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.search.template import Template
from megatron_pulse.planner.schedule.search.time_grid import Grid, on_grid

EXACT_SIZE = {Solver.HIGHS: 128, Solver.GLPK: 64, Solver.CP_SAT: 256, Solver.NONE: 0}
"""Devices times microbatches up to which the exact program is tried."""

SMALL = 32
"""Devices times microbatches up to which the exact program runs without templates."""

TEMPLATE_SHARE = 0.2
"""Share of the time for templates.

The rest is for the exact program, or for another constructive search that begins with the
templates.
"""

RESERVE_S = 0.3
"""Seconds kept for reading and checking an answer."""

LEAST_S = 0.5
"""Least number of seconds for which the exact program is started."""

EXACT_SLOTS = 60
"""Slots of the longest operation up to which times are taken exactly.

Rounded to fewer slots, HiGHS and GLPK gain less than annealing does in that time.
"""


@dataclass(frozen=True)
class Attempt:
    """Result of the solvers: the shortest schedule known, its length and a lower bound.

    ``path`` led to the schedule ("" if nothing shorter was found). ``notes`` report on each path.
    ``late`` is true if the wall clock ended any.
    """

    schedule: Schedule
    length: float
    bound: float
    path: str
    notes: tuple[str, ...]
    late: bool = False

    @property
    def proved(self) -> bool:
        """True if no schedule is shorter."""
        return self.length <= self.bound * (1 + 1e-9)


def attempt(
    problem: ScheduleProblem, solver: Solver, seconds: float, schedule: Schedule, bound: float
) -> Attempt:
    """Result of ``solver`` for a valid ``schedule`` in ``seconds`` of the processor, its own and
    the solver's."""
    trying = _Attempt(problem, solver, seconds, schedule, bound)
    if not trying.proved:
        trying.templates()
        trying.exact()
    return Attempt(
        trying.schedule, trying.length, trying.bound, trying.path, tuple(trying.notes), trying.late
    )


class _Attempt:
    def __init__(
        self,
        problem: ScheduleProblem,
        solver: Solver,
        seconds: float,
        schedule: Schedule,
        bound: float,
    ) -> None:
        self.problem, self.solver = problem, solver
        self.seconds, self.began = seconds, processor_s()
        size = problem.placement.num_devices * problem.num_microbatches
        exactly = solver is Solver.CP_SAT
        self.grid = on_grid(problem, TICKS if exactly else EXACT_SLOTS)
        self.no_exact = ""
        if size > EXACT_SIZE[solver]:
            self.no_exact = f"devices x microbatches > {EXACT_SIZE[solver]}"
        elif not (exactly or self.grid.exact):
            self.no_exact = f"times are not multiples of 1/{EXACT_SLOTS} of the longest"
        self.needs_templates = not exactly and (bool(self.no_exact) or size > SMALL)
        self.shop = job_shop(problem)
        self.notes: list[str] = []
        self.found: list[Template] = []
        self.schedule, self.length = schedule, simulate(problem, schedule).makespan
        self.bound, self.path, self.late = bound, "", False

    @property
    def proved(self) -> bool:
        """True if no schedule is shorter than the best so far."""
        return self.length <= self.bound * (1 + 1e-9)

    def left(self) -> float:
        """Seconds of the processor that remain."""
        return self.seconds - (processor_s() - self.began)

    def ended(self, answer: Answer) -> None:
        """Note whether the wall clock ended a solver."""
        self.late |= answer.late

    def offer(self, path: str, schedule: Schedule) -> bool:
        """Take ``schedule`` if it is valid and shorter; true if taken."""
        if faults := faults_for(self.problem, schedule):
            self.notes.append(f"{path}: its answer is not valid: {faults[0]}")
            return False
        length = simulate(self.problem, schedule).makespan
        if length >= self.length * (1 - 1e-9):
            return False
        self.schedule, self.length, self.path = schedule, length, path
        return True

    def templates(self) -> None:
        """Templates from the modulo program, unrolled and improved."""
        if not self.needs_templates:
            return
        from megatron_pulse.planner.schedule.ilp.modulo import fitting

        self.found = fitting(self.shop, self.solver, TEMPLATE_SHARE * self.left(), self.ended)
        before = self.length
        for template in self.found:
            if self.left() > 0 and not self.proved:
                start = improve(self.shop, template.unrolled(self.problem.num_microbatches))
                self.offer(self.template_path, self.shop.schedule("wave", start))
        gained = f"{before:g} to {self.length:g}" if self.length < before else "nothing shorter"
        self.notes.append(f"{self.solver} templates: {len(self.found)} found, {gained}")

    @property
    def template_path(self) -> str:
        """Name of the path of schedules that begin with a solver's template."""
        return f"constructive + {self.solver} template"

    def exact(self) -> None:
        """Run the exact program of a small problem, else a longer constructive search."""
        if self.proved:
            return
        if self.no_exact:
            if self.found:
                left = max(0.0, self.left() - RESERVE_S)
                again = synthesize(self.problem, left, templates=self.found)
                self.offer(self.template_path, again.schedule)
            self.notes.append(f"{self.solver}: exact program not tried, {self.no_exact}")
            return
        if self.left() < LEAST_S:
            self.notes.append(f"{self.solver}: exact program not tried, no time left")
            return
        grid = self.grid
        found = self.shortest(grid)
        self.ended(found.answer)
        gained = False
        if found.start is not None:
            orders = job_shop(grid.problem).schedule("wave", found.start)
            gained = self.offer(str(self.solver), orders)
            better = improve(self.shop, self.shop.earliest(orders))
            gained |= self.offer(str(self.solver), self.shop.schedule("wave", better))
        if found.bound is not None and found.bound * grid.width > self.bound:
            self.bound = min(found.bound * grid.width, self.length)
        shorter = f"{self.length:g}" if gained else "nothing shorter"
        ended = f"{found.answer.status} {found.answer.detail}".strip()
        self.notes.append(f"{self.solver} exact program: {ended}, {shorter}")

    def shortest(self, grid: Grid) -> ExactResult:
        """Run the exact program on ``grid``, from the best so far if the solver takes a start."""
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
        # GLPK takes no start; it can only prove that one slot less is infeasible.
        return shortest(shop, self.solver, limit, horizon - 1, bound)
