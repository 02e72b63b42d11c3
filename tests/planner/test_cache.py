"""Kept schedules: only good answers come back, whatever is in the folder, whoever shares it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_pulse.files import cache_folder
from megatron_pulse.planner.layout.placement import fold, interleaved
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.cache import cached, key
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.classic.one_f_one_b import gpipe
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.search import synthesize as synthesizing
from megatron_pulse.planner.schedule.search.dp import GrowingSweeps
from megatron_pulse.planner.schedule.search.synthesize import synthesize


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


def problem(scale: float = 1.0, count: int = 4, cap: float = 4.0) -> ScheduleProblem:
    """Two devices, uneven stages: the constructive answer does not meet its bound."""
    return ScheduleProblem(
        fold(2),
        count,
        tuple(scale * t for t in (1.0, 1.3, 0.8, 1.1)),
        tuple(scale * t for t in (2.1, 2.2, 1.7, 2.6)),
        link=0.2 * scale,
        cap=(cap,) * 2,
    )


class Finder:
    """Solves, and counts how often it is asked."""

    def __init__(self, classic: bool = False) -> None:
        self.asked = 0
        self.classic = classic

    def __call__(self, problem: ScheduleProblem, seconds: float, solver: str) -> Synthesis:
        self.asked += 1
        if not self.classic:
            return synthesize(problem, effort=4)
        schedule = gpipe(problem.placement, problem.num_microbatches)
        length = simulate(problem, schedule).makespan
        return Synthesis(schedule, Certificate(length, lower_bound(problem), False, "gpipe", 0.0))


def test_a_hit_is_timed_with_the_times_at_hand() -> None:
    find = Finder()
    first = cached(problem(), 5.0, "auto", find)
    scaled = problem(1e-3)
    hit = cached(scaled, 5.0, "auto", find)
    assert find.asked == 1
    assert hit.schedule == first.schedule and not faults_for(scaled, hit.schedule)
    assert hit.certificate.makespan == pytest.approx(1e-3 * first.certificate.makespan)
    assert hit.certificate.makespan == simulate(scaled, hit.schedule).makespan
    assert hit.certificate.lower_bound == lower_bound(scaled)
    assert hit.certificate.solver == "cache (constructive)"
    near = replace(scaled, forward=(1.001e-3, *scaled.forward[1:]))
    assert (
        cached(near, 5.0, "auto", find).certificate.makespan
        == simulate(near, hit.schedule).makespan
    )
    assert find.asked == 1


def test_more_time_searches_again_and_keeps_the_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowingSweeps, "starts", lambda *_: iter(()))  # each would prove it
    monkeypatch.setattr(synthesizing, "exhaustive_bound", lambda path, length: 0.0)
    open_ended = problem()
    assert not cached(open_ended, 1.0, "auto", Finder()).certificate.proved
    worse = Finder(classic=True)
    cached(open_ended, 1.0, "auto", worse)
    assert worse.asked == 0  # as much time as before
    kept = cached(open_ended, 2.0, "auto", worse)
    assert worse.asked == 1 and kept.certificate.solver == "cache (constructive)"
    assert kept.certificate.makespan < worse(open_ended, 0.0, "").certificate.makespan
    worse.asked = 0
    assert cached(open_ended, 2.0, "auto", worse).certificate.solver == "cache (constructive)"
    assert worse.asked == 0


def test_a_proof_needs_no_more_time_but_only_for_the_very_problem() -> None:
    def prove(problem: ScheduleProblem, seconds: float, solver: str) -> Synthesis:
        """Raise the lower bound of the problem to its makespan, like an exact solver."""
        found = synthesize(problem, effort=4)
        length = found.certificate.makespan
        return Synthesis(found.schedule, Certificate(length, length, True, "exact", 1.0))

    cached(problem(), 1.0, "auto", prove)
    find = Finder()
    again = cached(problem(), 100.0, "auto", find)
    assert find.asked == 0 and again.certificate.proved and again.certificate.gap == 0
    near = replace(problem(), link=0.2001)
    assert key(near, "auto") == key(problem(), "auto")
    hit = cached(near, 1.0, "auto", find)
    assert find.asked == 0 and not hit.certificate.proved
    assert hit.certificate.lower_bound == lower_bound(near)
    cached(near, 100.0, "auto", find)
    assert find.asked == 1


def test_what_makes_problems_alike() -> None:
    base = problem()
    same = key(base, "auto")
    assert key(problem(7.0), "auto") == same
    different = [
        problem(count=5),
        problem(cap=3.0),
        replace(base, cap=None),
        replace(base, link=0.5),
        replace(base, forward=(1.05, *base.forward[1:])),
        replace(base, weight_grad=base.forward),
        replace(base, activation=(1.0, 0.5, 1.0, 1.0)),
        replace(base, placement=interleaved(2)),
    ]
    keys = {same, key(base, "highs"), *(key(other, "auto") for other in different)}
    assert len(keys) == 2 + len(different)


def test_a_cap_that_an_entry_breaks_is_a_miss(folder: Path) -> None:
    """Even where the key is right: the order is checked, not believed."""
    roomy, tight = problem(cap=8.0), problem(cap=2.0)
    cached(roomy, 1.0, "auto", Finder(classic=True))
    os.replace(folder / f"{key(roomy, 'auto')}.json", folder / f"{key(tight, 'auto')}.json")
    find = Finder()
    found = cached(tight, 1.0, "auto", find)
    assert find.asked == 1 and not faults_for(tight, found.schedule)
    cached(tight, 1.0, "auto", find)
    assert find.asked == 1


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=2)), max_size=4),
)
def test_damaged_files_are_overwritten(
    folder: Path, length: float, changes: list[tuple[float, bytes]]
) -> None:
    """Cut short, or with bytes changed: no error, and a good answer."""
    shutil.rmtree(folder, ignore_errors=True)
    find = Finder()
    good = cached(problem(), 1.0, "auto", find)
    path = folder / f"{key(problem(), 'auto')}.json"
    text = bytearray(path.read_bytes())
    del text[round(length * len(text)) :]
    for where, new in changes:
        at = int(where * len(text))
        text[at : at + 1] = new
    path.write_bytes(text)
    found = cached(problem(), 1.0, "auto", find)
    assert not faults_for(problem(), found.schedule)
    assert found.certificate.makespan == simulate(problem(), found.schedule).makespan
    assert found.certificate.lower_bound <= good.certificate.makespan * (1 + 1e-9)
    assert cached(problem(), 1.0, "auto", find).schedule == found.schedule


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"format": 3}', "[" * 100_000, '"\ud800"', "nan"]
)
def test_foreign_files(folder: Path, text: str) -> None:
    folder.mkdir()
    path = folder / f"{key(problem(), 'auto')}.json"
    path.write_text(text, errors="surrogatepass")
    other = folder / "notes.json"
    other.write_text("mine")
    find = Finder()
    for _ in range(2):
        assert not faults_for(problem(), cached(problem(), 1.0, "auto", find).schedule)
    assert find.asked == 1 and other.read_text() == "mine"


def test_a_folder_that_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("a file where the folder should be")
    assert not faults_for(problem(), cached(problem(), 1.0, "auto", Finder()).schedule)
    assert folder.read_text() == "a file where the folder should be"
    monkeypatch.setenv("PULSE_CACHE_DIR", "/proc/nowhere")
    assert not faults_for(problem(), cached(problem(), 1.0, "auto", Finder()).schedule)


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "kept"
    monkeypatch.delenv("PULSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "megatron_pulse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "megatron_pulse"


WRITER = """
import sys, time
from tests.planner.test_cache import Finder, problem
from megatron_pulse.planner.schedule.cache import cached
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.check.simulate import simulate
shared = problem(cap=8.0)
begin, number = float(sys.argv[1]), int(sys.argv[2])
time.sleep(max(0.0, begin - time.time()))
for turn in range(25):
    found = cached(shared, float(number + 5 * turn), "auto", Finder(classic=number % 2 == 0))
    assert not faults_for(shared, found.schedule)
    assert found.certificate.makespan == simulate(shared, found.schedule).makespan
"""


def test_processes_write_the_same_entry_at_once(folder: Path) -> None:
    begin = time.time() + 1.5
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(begin), str(k)], stderr=subprocess.PIPE)
        for k in range(2)
    ]
    errors = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 2, errors
    assert [path.name for path in folder.iterdir()] == [f"{key(problem(cap=8.0), 'auto')}.json"]
    find = Finder()
    assert not faults_for(problem(cap=8.0), cached(problem(cap=8.0), 1.0, "auto", find).schedule)
    assert find.asked == 0
