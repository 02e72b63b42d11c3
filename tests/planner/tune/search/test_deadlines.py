"""A search keeps its seconds, however slow the machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit
from megatron_pulse.planner.tune.search.budget import LATE, Budget
from megatron_pulse.planner.tune.search.search import search
from megatron_pulse.planner.tune.tune import UntunableError, tune
from tests.planner.tune.problems import cluster, profile
from tests.planner.tune.search.clock import Clock


def test_out_of_time_says_what_is_left() -> None:
    evaluator = Evaluator(profile(random.Random(2), 14, 6), cluster(2, 4), 32)
    candidates = list(configs(8, 4, 32, True, Choices()))
    short = search(evaluator, candidates, keep=3, budget=Budget(1.0, Clock()))
    assert short.num_left > 0 and not short.proved
    assert 0 < short.bound_s < short.outcomes[0].step_s
    long = search(evaluator, candidates, keep=3, budget=Budget(1.8, Clock()))
    assert short.bound_s <= long.outcomes[0].step_s <= short.outcomes[0].step_s
    for found in (short, long):
        late = sum(counts[Unfit.LATE] for counts in found.degrees.values())
        assert late == found.num_left
        counted = sum(found.refused.values()) + found.num_left
        assert counted <= found.num_configs


def test_a_search_goes_on_when_it_is_late_and_nothing_fits_so_far() -> None:
    chain = profile(random.Random(0), 14, 6)
    small = Evaluator(chain, cluster(4, 2, memory_gb=1.0), 32)
    found = search(small, small.candidates(Choices()), 3, Budget(0.08, Clock()), finish_s=0.5)
    assert found.outcomes and found.seconds > 0.08


@pytest.mark.parametrize("seed", range(3))
def test_more_work_is_not_worse(seed: int) -> None:
    """More time may lose at most one percent: configs near the best are tried late."""
    chain = profile(random.Random(seed), 12, 5)
    steps = []
    for seconds in (0.03, 0.1, 0.3, 1.0):
        evaluator = Evaluator(chain, cluster(memory_gb=2.0), 16)
        budget = Budget(seconds, Clock())
        found = search(evaluator, evaluator.candidates(Choices(pipeline=(2, 4))), 3, budget)
        steps.append(found.outcomes[0].step_s)
    assert all(step_s <= 1.01 * min(steps[: i + 1]) for i, step_s in enumerate(steps))
    assert steps[0] > 1.05 * steps[-1]


def test_first_simulations_are_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One config of each promising degree and layout, fewest stages first."""
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 16)
    seen: list[tuple[int, str]] = []
    evaluate = Evaluator.evaluate

    def noted(self: Evaluator, config: Config, *args: Any, **more: Any) -> Outcome:
        kind = (config.pipeline * config.layout.num_chunks, config.layout.name)
        if kind not in seen[-1:]:  # one of several stages is tried with two kinds of cuts
            seen.append(kind)
        return evaluate(self, config, *args, **more)

    monkeypatch.setattr(Evaluator, "evaluate", noted)
    search(evaluator, evaluator.candidates(Choices()), 3, Budget(1.0, Clock()))
    first = next(i for i, kind in enumerate(seen) if kind in seen[:i])
    assert first >= 4
    assert [stages for stages, _ in seen[:first]] == sorted(stages for stages, _ in seen[:first])


def test_what_promises_much_may_take_much_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One simulation over eight devices takes more than a tenth of the time. Its step is ten times
    faster than without a pipeline."""
    chain, where = profile(random.Random(0), 34, 0), cluster(2, 4, memory_gb=64.0, inter_gbs=0.1)
    evaluator, clock = Evaluator(chain, where, 64), Clock()
    clock.works(monkeypatch, 22.0)
    choices = Choices(tensor=(1,), pipeline=(1, 8))
    found = search(evaluator, evaluator.candidates(choices), 3, Budget(2.0, clock), finish_s=1)
    assert found.outcomes[0].config.pipeline == 8
    assert found.seconds <= 1.1 * 2.0


@pytest.mark.parametrize(("seconds", "slowness"), [(2.0, 1.0), (4.0, 10.0), (2.0, 30.0)])
def test_deadline_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, slowness: float
) -> None:
    """However slow the machine: nothing is begun that would take too long."""
    evaluator = Evaluator(profile(random.Random(0), 34, 15), cluster(4, 4, memory_gb=4.0), 64)
    clock = Clock()
    clock.works(monkeypatch, slowness)
    budget = Budget(seconds, clock)
    found = search(evaluator, evaluator.candidates(Choices()), 3, budget, finish_s=1)
    assert found.num_left > 0 and found.bound_s < float("inf")
    assert found.outcomes
    assert found.seconds <= 1.1 * seconds
    assert slowness > 1 or found.num_simulated > 10


def test_time_is_left_for_a_whole_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole schedule of many microbatches takes longer than the refinement's time."""
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 512)
    clock = Clock()
    clock.works(monkeypatch, 1.0)
    choices = Choices(pipeline=(4,), tensor=(1,), micro_batch_size=(1,))
    budget = Budget(1.0, clock)
    found = search(evaluator, evaluator.candidates(choices), 3, budget, finish_s=0.1)
    whole = 30e-6 * evaluator.size(found.outcomes[0].config, whole=True)
    assert whole > 0.3 and found.num_left > 0
    assert found.seconds + whole <= 1.1 * (1.0 + 0.1)


def test_an_answer_does_not_depend_on_what_else_the_machine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wall's clock runs so many times as fast as this process's, which its work moves on."""

    def answer(pace: float) -> tuple[object, ...]:
        clock = Clock()
        with monkeypatch.context() as patched:
            clock.works(patched, 3.0)
            patched.setattr(time, "process_time", clock)
            patched.setattr(time, "monotonic", lambda: pace * clock.now)
            evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 16)
            choices = Choices(pipeline=(2, 4), tensor=(1,))
            found = tune(evaluator, choices, seconds=0.5, solver="none")
        best = found.outcomes[0]
        return best.config, best.stages.partition, best.timeline.schedule, found.num_simulated

    assert answer(3.0) == answer(1.0)


def test_an_answer_is_the_same_beside_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core, which two others keep busy; a search neither leaves nor takes schedules."""
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path))

    def answer() -> tuple[object, ...]:
        evaluator = Evaluator(profile(random.Random(0), 6, 2), cluster(1, 2), 8)
        choices = Choices(
            pipeline=(2,), tensor=(1,), micro_batch_size=(1,), recompute=(Recompute.NEVER,)
        )
        best = tune(evaluator, choices, 3.0, 2.5, "highs").outcomes[0]
        made = replace(best.synthesis.certificate, seconds=0.0)
        return best.config, best.stages.partition, best.synthesis.schedule, best.step_s, made

    cores = os.sched_getaffinity(0)
    alone = answer()
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {min(cores)})
        for _ in range(2):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        assert answer() == alone
    assert not list(tmp_path.iterdir())


def test_waiting_for_the_processor_is_not_time_spent() -> None:
    budget = Budget(100.0)
    time.sleep(0.2)
    assert budget.spent < 0.5 * 0.2
    time.sleep(0.2)
    assert budget.spent >= 0.4 / LATE  # but for what is far too long


def test_no_time_at_all_is_said() -> None:
    evaluator = Evaluator(profile(random.Random(0), 12, 5), cluster(memory_gb=2.0), 16)
    with pytest.raises(UntunableError, match="no config was simulated in .* are unexplored"):
        tune(evaluator, Choices(), seconds=1e-9)
