"""Cuts of several stages on a device: the best of all where all can be tried, within memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, Placement, fold, interleaved
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.multi_chunk import search
from megatron_pulse.planner.partition.multi_chunk.batched_cost import BatchedEvaluator, Measures
from tests.planner.blocks import fine_costs
from tests.planner.test_partition import all_partitions

SEVERAL = [interleaved(2), interleaved(3), interleaved(2, 3), fold(2, 2), fold(3, 2), fold(2, 3)]
CHECKS = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def chains(draw: st.DrawFn, num_layers: int) -> ChainCosts:
    """Whole numbers, so that sums are exact; nested skips, or any."""

    def column(least: int = 0) -> tuple[int, ...]:
        each = st.integers(least, 9)
        return tuple(draw(st.lists(each, min_size=num_layers, max_size=num_layers)))

    last = num_layers - 1
    nested = st.integers(0, num_layers // 2 - 1).map(lambda i: (i, last - i))
    any_ends = st.tuples(st.integers(0, last - 1), st.integers(1, last)).map(
        lambda ends: (ends[0], min(last, ends[0] + ends[1]))
    )
    edges = draw(st.lists(draw(st.sampled_from([nested, any_ends])), max_size=6, unique=True))
    times = [tuple(map(float, column())) for _ in range(2)]
    skips = tuple(SkipCost(i, j, draw(st.integers(1, 9))) for i, j in edges)
    names = tuple(f"u{i}" for i in range(num_layers))
    return ChainCosts(names, times[0], times[1], column(), column(), column(1), skips)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[ChainCosts, Placement, Goal]:
    """A chain, where it goes, and what is wanted; memory has no limit yet."""
    placement = draw(st.sampled_from(SEVERAL))
    more = {4: 7, 6: 5, 8: 4, 12: 2}[placement.num_stages]
    costs = draw(chains(placement.num_stages + draw(st.integers(0, more))))
    waiting = draw(st.lists(st.integers(0, 4), min_size=12, max_size=12))
    if draw(st.booleans()):
        waiting.sort(reverse=True)
    goal = Goal(
        draw(
            st.sampled_from(
                [("load", "stage", "bytes"), ("stage", "load", "bytes"), ("bytes", "load")]
            )
        ),
        placement.kind.mirrored and draw(st.booleans()),
        Link(draw(st.sampled_from([0, 0.5])), draw(st.sampled_from([float("inf"), 2.0]))),
        draw(st.sampled_from([0, 1, 2])),
        lambda p: MemoryRule(float("inf"), 1, tuple(waiting[: p.num_stages])),
    )
    return costs, placement, goal


def limited(goal: Goal, limit: float) -> Goal:
    rules = goal.memory
    assert rules is not None
    return dataclasses.replace(
        goal, memory=lambda p: dataclasses.replace(rules(p), limit_bytes=limit)
    )


def measured(
    costs: ChainCosts, goal: Goal, partitions: Sequence[Partition]
) -> tuple[np.ndarray, Measures]:
    """All cuts, and what they come to."""
    cuts = np.array([p.cuts for p in partitions])
    placement, rules = partitions[0].placement, goal.memory
    rule = rules(placement) if rules is not None else None
    return cuts, BatchedEvaluator(costs, placement, goal.link, goal.lam, rule).measure(cuts)


@settings(CHECKS, max_examples=100)
@given(tasks(), st.randoms(use_true_random=False))
def test_many_cuts_cost_what_each_does(task, random) -> None:
    costs, placement, goal = task
    partitions = random.choices(all_partitions(len(costs.names), placement), k=5)
    _, found = measured(costs, goal, partitions)
    for i, partition in enumerate(partitions):
        one = goal.evaluate(costs, partition)
        assert found.load[i] == pytest.approx(max(one.load_s))
        assert found.stage[i] == pytest.approx(max(one.stage_s))
        assert found.bytes[i] == one.boundary_bytes + one.skip_bytes
        assert found.memory[i] == pytest.approx(max(one.memory_bytes))
        home = partition.device_of_layer
        assert found.apart[i] == sum(home(s.source) != home(s.destination) for s in costs.skips)


@CHECKS
@given(tasks(), st.data())
def test_the_best_that_fits_is_found_and_refused_is_what_does_not(task, data) -> None:
    """Limits around the least memory that would do, and anywhere: brute force is the referee."""
    costs, placement, goal = task
    cuts, found = measured(costs, goal, all_partitions(len(costs.names), placement))
    legal = (found.apart == 0) | (not goal.collocate)
    held = np.unique(found.memory[legal]) if legal.any() else np.array([9.0])
    limits = st.sampled_from(
        [held[0] - 1, held[0], held[0] + 1, held[0] * 1.3, held[len(held) // 2]]
    )
    limit = float(data.draw(limits | st.sampled_from(held.tolist())))
    options = np.flatnonzero(legal & (found.memory <= limit))
    if not len(options):
        with pytest.raises(PartitionError, match="^no cut is legal and fits$"):
            find_partition(costs, placement, limited(goal, limit), explain=False)
        return
    best = find_partition(costs, placement, limited(goal, limit), explain=False).cuts
    at = int(np.flatnonzero((cuts == best).all(axis=1))[0])
    assert at in options
    values = getattr(found, goal.order[0])
    assert values[at] == pytest.approx(values[options].min())


@pytest.mark.parametrize("name", ["sd-v2.1", "uvit-h", "hunyuan-dit-v1.2"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast links", "slow links"])
def test_published_backbones_over_two_devices_are_cut_at_their_best(name: str, slow: bool) -> None:
    """Every cut of up to 45 layers into four stages, with and without a limit on memory."""
    costs = first_layers(fine_costs(name), 45)
    placement = interleaved(2)
    goal = Goal(
        link=Link(0, 1e8 if slow else 1e11),
        memory=lambda p: MemoryRule(float("inf"), 18, (8, 6, 4, 2)),
    )
    cuts, found = measured(costs, goal, all_partitions(len(costs.names), placement))
    for share in (1.0001, 1.02, 1.3, 2.0):
        limit = share * found.memory.min()
        fits = found.memory <= limit
        best = find_partition(costs, placement, limited(goal, limit), explain=False).cuts
        at = int(np.flatnonzero((cuts == best).all(axis=1))[0])
        assert fits[at] and found.load[at] == pytest.approx(found.load[fits].min())


def first_layers(costs: ChainCosts, most: int) -> ChainCosts:
    """The beginning of a chain, with the skips inside it."""
    columns = {
        field.name: getattr(costs, field.name)[:most]
        for field in dataclasses.fields(costs)
        if field.name != "skips"
    }
    inside = tuple(s for s in costs.skips if s.destination < most)
    return ChainCosts(**columns, skips=inside)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tasks(), st.sampled_from([1, 100, 2000]))
def test_little_work_still_finds_what_is_allowed(task, work: int) -> None:
    costs, placement, goal = task
    goal = dataclasses.replace(goal, collocate=False)
    found = find_partition(costs, placement, goal, work=work)
    assert len(found.cuts) == placement.num_stages + 1
    assert list(found.cuts) == sorted(set(found.cuts))
    assert found == find_partition(costs, placement, goal, work=work)


def test_with_little_work_cuts_that_need_little_memory_are_moved_until_they_fit() -> None:
    """A limit that walks of so little work do not reach; as good as twenty times the work."""
    costs, placement = first_layers(fine_costs("uvit-h"), 60), interleaved(4)
    rule = MemoryRule(1.01 * 2_692_686_464, 18, tuple(range(16, 0, -2)))
    goal = Goal(link=Link(0, 1e10), memory=lambda p: rule)
    loads = []
    for work in (1000, 20_000):
        found = goal.evaluate(costs, find_partition(costs, placement, goal, work=work))
        assert max(found.memory_bytes) <= rule.limit_bytes
        loads.append(max(found.load_s))
    assert loads[0] == pytest.approx(loads[1])


@pytest.mark.parametrize("num_places", [0, 20, 1000])
def test_two_waves_of_few_mirror_cuts_keep_skips_at_home(
    monkeypatch: pytest.MonkeyPatch, num_places: int
) -> None:
    """Mirror cuts are searched first if there are too many cuts; their best is near the optimum."""
    costs = first_layers(fine_costs("uvit-h"), 60)
    goal = Goal(collocate=True)
    best = max(goal.evaluate(costs, find_partition(costs, fold(4, 2), goal)).load_s)
    monkeypatch.setattr(search, "_PLACES", num_places)
    found = find_partition(costs, fold(4, 2), goal)
    home = found.device_of_layer
    assert all(home(s.source) == home(s.destination) for s in costs.skips)
    assert max(goal.evaluate(costs, found).load_s) <= 1.1 * best
