"""Steps that just exceed memory get a schedule by lower caps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import Timeline
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.problem import ScheduleProblem, Synthesis
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import UnfitError
from megatron_pulse.planner.tune.link_contention import schedules
from megatron_pulse.planner.tune.memory import cap_retry
from megatron_pulse.planner.tune.memory.cap_retry import fit_in
from tests.planner.tune.problems import cluster, profile

BATCH = 16
WAYS = [
    Config(2, 1, 1, 1, LAYOUTS[name], split=split, max_in_flight=True)
    for name in ("two waves", "fold exact")
    for split in (False, True)
]


def evaluators() -> list[Evaluator]:
    """A chain with skips on devices of less and less memory."""
    rng = random.Random(0)
    chain = profile(rng, 14, 6, rng.uniform(20.0, 60.0), saved_mb=rng.uniform(60.0, 120.0))
    return [Evaluator(chain, cluster(1, 2, memory_gb=3.0 + 0.2 * i), BATCH) for i in range(15)]


def test_what_holds_a_little_too_much_is_made_with_lower_caps() -> None:
    """Collocated skips between stages are in no cap. Many steps that did not fit get a valid
    schedule with the problem's bound."""
    mended = without = 0
    for evaluator in evaluators():
        limit = evaluator.cluster.usable_bytes
        for config in WAYS:
            try:
                stages = evaluator.feasible.best(config)
                problem = evaluator.problem(config, BATCH, stages)
            except UnfitError:
                continue
            make = partial(schedules, edges=stages.edges, effort=0, bounded=False)
            found, timeline, memory, caps = evaluator.with_room(config, stages, problem, make)
            once = evaluator.with_room(config, stages, problem, make, has_time=lambda: False)
            assert faults_for(problem, found.schedule) == []
            assert memory == evaluator.peak_bytes(config, stages, found.schedule)
            if fit_in(once[2], (limit,) * 2):
                assert found.schedule.order == once[0].schedule.order and caps == problem.cap
                continue
            without += 1
            if not fit_in(memory, (limit,) * 2):
                assert found.schedule.order == once[0].schedule.order
                continue
            mended += 1
            assert problem.cap is not None and caps is not None and caps < problem.cap
            certificate = found.certificate
            assert certificate.lower_bound == pytest.approx(lower_bound(problem, work=0.0))
            assert certificate.lower_bound <= certificate.makespan * (1 + 1e-9)
            assert timeline.makespan >= certificate.makespan * (1 - 1e-9)
            outcome = evaluator.evaluate(config, quick=True, stages=stages)
            assert (
                outcome.problem.cap
                == evaluator.problem(config, outcome.problem.num_microbatches, stages).cap
            )
    assert mended > 10 and mended > 0.5 * without


def test_caps_are_lowered_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not below what one microbatch takes, nor without time."""
    evaluator, config = evaluators()[-1], WAYS[0]
    stages = evaluator.feasible.best(config)
    problem, tried = evaluator.problem(config, BATCH, stages), list[ScheduleProblem]()
    limit = evaluator.cluster.usable_bytes

    def make(of: ScheduleProblem) -> Sequence[tuple[Synthesis, Timeline]]:
        tried.append(of)
        return schedules(problem, stages.edges, 0)

    for over, times in ((1e-6 * limit, cap_retry.LOWERED + 1), (limit, 1)):
        monkeypatch.setattr(Evaluator, "peak_bytes", lambda *of, much=limit + over: (much, 0.0))
        tried.clear()
        *_, caps = evaluator.with_room(config, stages, problem, make)
        assert caps == problem.cap and len(tried) == times
        firsts = [each.cap[0] for each in tried if each.cap is not None]
        assert firsts == pytest.approx([firsts[0] - i * over for i in range(times)])
        assert len({each.cap[1] for each in tried if each.cap is not None}) == 1
    tried.clear()
    evaluator.with_room(config, stages, problem, make, has_time=lambda: False)
    assert len(tried) == 1
