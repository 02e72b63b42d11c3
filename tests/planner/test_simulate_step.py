"""Steps whose messages share links."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import (
    Partition,
    Placement,
    fold,
    interleaved,
    sequential,
)
from megatron_pulse.planner.program.simulate import (
    StageMessage,
    Transfer,
    edges_of,
    lags,
    link_bound,
    simulate_step,
)
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.classic.one_f_one_b import gpipe
from megatron_pulse.planner.schedule.operations import BubbleTask, Operation, OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.planner.slices import fill


def problem_of(
    placement: Placement, count: int, link: float = 0.0, split: bool = False
) -> ScheduleProblem:
    num = placement.num_stages
    backward = (1.0 if split else 2.0,) * num
    weight = (1.0,) * num if split else None
    return ScheduleProblem(placement, count, (1.0,) * num, backward, weight, link)


def chain_edges(placement: Placement, seconds: float) -> tuple[StageMessage, ...]:
    home = placement.device_of_stage
    stages = range(placement.num_stages - 1)
    return tuple(StageMessage(s, s + 1, seconds) for s in stages if home[s] != home[s + 1])


@settings(max_examples=40)
@given(
    st.sampled_from([fold(2), fold(3), sequential(3), interleaved(2), fold(2, 2)]),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0.0, 0.25, 1.0, 4.0]),
)
def test_sharing_links_never_shortens_a_step(
    placement: Placement, count: int, split: bool, seconds: float
) -> None:
    problem = problem_of(placement, count, seconds, split)
    schedule = synthesize(problem, effort=4).schedule
    alone = simulate(problem, schedule).makespan
    edges = chain_edges(placement, seconds)
    shared = simulate_step(problem, schedule, edges)
    assert shared.timeline.makespan >= alone - 1e-9
    assert shared.timeline.makespan >= link_bound(problem, edges) - 1e-9
    if seconds == 0:
        assert shared.timeline.makespan == pytest.approx(alone)
    assert set(shared.timeline.end) == {op for order in schedule.order for op in order}
    assert sum(shared.sending_s) == pytest.approx(2 * count * sum(e.seconds for e in edges))


@pytest.mark.parametrize("kind", [fold(2), sequential(2)])
def test_simulate_step_takes_bubble_tasks_own_times(kind: Placement) -> None:
    """Two bubble tasks, numbered as stages are, of slices that no stage's operation lasts."""
    problem = problem_of(kind, 3)
    bubble_tasks = (BubbleTask("a", (0.25, 7.0), (1,)), BubbleTask("b", (0.5,), (0,)))
    schedule = fill(problem, gpipe(kind, 3), bubble_tasks)
    alone, shared = (
        simulate(problem, schedule),
        simulate_step(problem, schedule, chain_edges(kind, 0.0)),
    )
    assert shared.timeline.start == alone.start and shared.timeline.end == alone.end
    assert shared.timeline.busy == alone.busy
    assert sum(alone.busy) == pytest.approx(3 * 3 * kind.num_stages + 7.75)


def test_a_slow_link_decides() -> None:
    """Two stages, one boundary of 10: four forwards leave one after another, then gradients."""
    problem = problem_of(sequential(2), 4)
    schedule = gpipe(problem.placement, 4)
    edges = chain_edges(problem.placement, 10.0)
    makespan = simulate_step(problem, schedule, edges).timeline.makespan
    assert makespan == pytest.approx(1 + 4 * 10 + 1 + 2 + 4 * 10 + 2)
    assert link_bound(problem, edges) == 40


def test_a_skip_delays_its_consumer_and_the_boundary_behind_it() -> None:
    placement = sequential(3)
    problem = problem_of(placement, 1)
    schedule = synthesize(problem).schedule
    edges = (StageMessage(0, 1, 1.0), StageMessage(1, 2, 1.0), StageMessage(0, 2, 7.0))
    timeline = simulate_step(problem, schedule, edges).timeline
    # F0 ends at 1, its boundary at 2, its skip at 9; F1 ends at 3, but stage 2 receives until 9.
    assert timeline.start[Operation(OpType.FORWARD, 2, 0)] == 10


@pytest.mark.parametrize("split", [False, True])
def test_who_was_ready_first_is_received_first(split: bool) -> None:
    """Slow messages of device 0 do not hold up those that device 2 had ready before them."""
    problem = problem_of(fold(3), 16, 2.0, split)
    schedule = synthesize(problem, effort=4).schedule
    edges = (
        StageMessage(0, 1, 2.0),
        StageMessage(1, 2, 0.1),
        StageMessage(3, 4, 0.1),
        StageMessage(4, 5, 2.0),
    )
    found = simulate_step(problem, schedule, edges)

    def ready(message: Transfer) -> float:
        op, step = message.consumer, -1 if message.consumer.kind is OpType.FORWARD else 1
        return found.timeline.end[Operation(op.kind, op.stage + step, op.microbatch)]

    for late, soon in itertools.permutations(found.transfers, 2):
        if late.destination != soon.destination or not ready(late) < ready(soon) <= late.start:
            continue
        if soon.start < late.start:  # then the sender of the one that waits was sending another
            assert any(
                other.source == late.source and other.start <= soon.start < other.end
                for other in found.transfers
            )
    assert len({message.destination for message in found.transfers}) == 3


def test_no_step_is_shorter_than_the_bound_where_a_gradient_is_not_sent_back() -> None:
    edges = (StageMessage(0, 1, 1.0), StageMessage(0, 1, 5.0, needs_grad=False))
    plain = problem_of(sequential(2), 1, split=True)
    problem = replace(plain, link=lags(edges, 2))
    schedule = synthesize(problem, effort=1).schedule
    took = simulate_step(problem, schedule, edges).timeline.makespan
    assert lower_bound(problem) == 5 + 2 * 1
    assert took == 5 + 6 + 1
    assert simulate_step(problem, schedule, edges[:1]).timeline.makespan == 7


def test_backwards_follow_each_other_where_a_gradient_comes_from_elsewhere() -> None:
    """Stage 1 sends none back, stage 2 does: the first's backward is still behind both, as bounds
    count it."""
    edges = (
        StageMessage(0, 1, 1.0, needs_grad=False),
        StageMessage(1, 2, 1.0),
        StageMessage(0, 2, 1.0),
    )
    problem = replace(problem_of(sequential(3), 2), link=lags(edges, 3))
    found = synthesize(problem, effort=1)
    timeline = simulate_step(problem, found.schedule, edges).timeline
    for microbatch in range(2):
        first, second = (Operation(OpType.BACKWARD, s, microbatch) for s in (0, 1))
        assert timeline.start[first] >= timeline.end[second]
    assert timeline.makespan >= lower_bound(problem)


def test_edges_of_a_partition() -> None:
    costs = ChainCosts(
        names=tuple("abcd"),
        forward_s=(1.0,) * 4,
        backward_s=(2.0,) * 4,
        parameters=(0,) * 4,
        saved_bytes=(0,) * 4,
        boundary_bytes=(0, 10, 20, 30),
        skips=(SkipCost(0, 3, 100), SkipCost(1, 2, 50)),
    )
    link = Link(1.0, 10.0)
    cut = Partition(sequential(2), (0, 2, 4))
    # The skip from b is the boundary tensor itself; the one from a travels.
    assert edges_of(costs, cut, lambda a, b: link) == (
        StageMessage(0, 1, 3.0),
        StageMessage(0, 1, 11.0),
    )
    folded = Partition(fold(2), (0, 1, 2, 3, 4))
    assert edges_of(costs, folded, lambda a, b: link) == (
        StageMessage(0, 1, 2.0),
        StageMessage(2, 3, 4.0),
    )
