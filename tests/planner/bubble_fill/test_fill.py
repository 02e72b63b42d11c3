"""Frozen components in idle time: what is found is whole, fits, is near the bound, and lasts."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.errors import Faults
from megatron_pulse.planner.bubble_fill import search
from megatron_pulse.planner.bubble_fill.bound import lower_bound
from megatron_pulse.planner.bubble_fill.check import faults_of, peak_bytes, sent_bytes
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer, Slice
from megatron_pulse.planner.bubble_fill.diffusionpipe import greedy
from megatron_pulse.planner.bubble_fill.knapsack import prefixes
from megatron_pulse.planner.bubble_fill.problem import FilledOrder, FillProblem
from megatron_pulse.planner.bubble_fill.search import FillError, fill
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import fold, sequential
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule
from tests.planner.bubble_fill.cases import draw_case
from tests.planner.bubble_fill.reference import shortest


def layers(count: int, seconds: float, **sizes: float) -> tuple[FrozenLayer, ...]:
    return tuple(FrozenLayer(f"{i}", {1: seconds}, **sizes) for i in range(count))


def one_f_one_b(components: tuple[Component, ...], samples: int = 16, **others) -> FillProblem:
    """1F1B on four devices, 8 microbatches: 33 s, of which 9 idle."""
    step = ScheduleProblem(sequential(4), 8, (1.0,) * 4, (2.0,) * 4)
    schedule = make_schedule("1f1b", sequential(4), 8)
    return FillProblem(step, schedule, components, samples, **others)


TEXT = Component("text", layers(12, 0.04, parameter_bytes=10, output_bytes=1), (), 1, (0, 1, 2, 3))
IMAGE = Component(
    "image",
    (
        *layers(3, 0.4, parameter_bytes=5, activation_bytes=9, output_bytes=6),
        *layers(8, 0.05, parameter_bytes=5, activation_bytes=3, output_bytes=1),
    ),
    (),
    1,
    (0,),
)


def test_times_between_known_counts() -> None:
    layer = FrozenLayer("x", {2: 1.0, 4: 1.5, 8: 4.0})
    assert [layer.time_s(n) for n in (1, 2, 3, 4, 6, 8, 16)] == [1, 1, 1.25, 1.5, 2.75, 4, 8]
    assert layer.least_s(8) == pytest.approx(8 * 1.5 / 4)


def test_a_knapsack_takes_what_fills_best_and_the_first_first() -> None:
    assert prefixes(10.0, [[4, 3], [5, 2]]) == [1, 1]  # 4 + 5 = 9
    assert prefixes(9.0, [[4, 3, 2], [5, 2]]) == [3, 0]
    assert prefixes(12.0, [[7, 7], [5, 5]]) == [1, 1]
    assert prefixes(1.0, [[2]]) == [0] and prefixes(0.0, [[2]]) == [0]


def test_text_costs_nothing_and_images_are_within_a_per_cent_of_the_bound() -> None:
    text = one_f_one_b((TEXT,), link=Link(1e-3, 100.0))
    found = fill(text, 0.05)
    assert found.certificate.makespan == pytest.approx(33) == text.timeline.makespan
    assert found.certificate.spill_share == 0 and faults_of(text, found.filled) == []
    both = one_f_one_b((IMAGE, TEXT), 32, link=Link(1e-3, 1000.0))
    found = fill(both, 0.2)
    bound = (4 * 24 + 32 * (12 * 0.04 + 1.2 + 0.4)) / 4  # 40.6 s: work of all devices
    assert found.certificate.lower_bound == pytest.approx(bound)
    assert found.certificate.makespan <= 1.01 * bound
    assert faults_of(both, found.filled) == []
    theirs = FilledSimulation(both, greedy(both)).run()
    assert found.certificate.makespan < theirs.makespan


def test_slower_and_faster_components_cost_little() -> None:
    problem = one_f_one_b((IMAGE, TEXT), 24, link=Link(1e-3, 1000.0))
    found = fill(problem, 0.15)
    step = FilledSimulation(problem, found.filled)
    for factor in (0.85, 1.15):
        over = step.run(factor).makespan / lower_bound(problem, factor)
        assert over == pytest.approx(found.certificate.spread[factor])
        components = tuple(
            replace(
                c,
                layers=tuple(replace(x, seconds={1: factor * x.seconds[1]}) for x in c.layers),
            )
            for c in problem.components
        )
        known = fill(replace(problem, components=components), 0.15, factors=())
        lost = step.run(factor).makespan / known.certificate.makespan - 1
        assert lost <= 0.03
    # Not all fits, so idle time is overfull: faster components then leave less of it idle.
    assert faults_of(problem, found.filled) == []
    start, planned = step.run().start, problem.timeline.start
    assert any(start[op] > planned[op] + 0.01 for op in planned)


def test_a_clock_ends_what_a_busy_machine_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = one_f_one_b((IMAGE, TEXT), 24, link=Link(1e-3, 1000.0))
    for costs in ("LOOKED_S", "SIMULATED_S", "DRAFT_S"):
        monkeypatch.setattr(search, costs, 0.0)  # a machine on which work is never done
    monkeypatch.setattr(search, "LATE_S", 0.05)
    found = fill(problem, 0.01)
    assert faults_of(problem, found.filled) == []
    assert found.certificate.solver.endswith("drafts, stopped at the time limit")


def test_memory_decides_where_parameters_live() -> None:
    free = (0.0, 200.0, 0.0, 100.0)
    unread = tuple(replace(c, result_bytes=0) for c in (IMAGE, TEXT))
    problem = one_f_one_b(unread, free_bytes=free)
    found = fill(problem, 0.07)
    assert faults_of(problem, found.filled) == []
    assert {d for home in found.filled.homes.values() for d in home} <= {1, 3}
    assert found.filled.homes[1] == (1,)  # 120 bytes
    with pytest.raises(FillError, match="component 'text' needs 121 bytes.*at.* is 100"):
        fill(replace(problem, free_bytes=(100.0,) * 4), 0.0)
    read = one_f_one_b((IMAGE, TEXT), free_bytes=free)
    with pytest.raises(FillError, match="device 0 lacks 32 bytes for the results"):
        fill(read, 0.0)


def test_what_memory_and_links_count() -> None:
    """One sample: two layers on device 0, the third on device 1, the result to device 0."""
    component = Component(
        "x",
        layers(3, 1.0, parameter_bytes=100, activation_bytes=10, output_bytes=4),
        (),
        7,
        (0,),
    )
    problem = one_f_one_b((component,), 1, link=Link(0.5, 4.0))
    first, second = Slice(0, (0, 2), (0, 1)), Slice(0, (2, 3), (0, 1))
    orders = [list(order) for order in problem.schedule.order]
    orders[0].append(first)
    orders[1].append(second)
    filled = FilledOrder(tuple(map(tuple, orders)))
    step = FilledSimulation(problem, filled)
    timeline = step.run()
    assert timeline.end[first] == 35 and timeline.start[second] == 36.5
    assert timeline.makespan == timeline.results == 37.5 + 0.5 + 7 / 4
    assert peak_bytes(step, timeline) == (200 + 7 + 10, 100 + 10, 0, 0)
    assert sent_bytes(step) == (4, 7, 0, 0)
    assert step.run(2.0).end[second] == 37 + 1.5 + 2


def test_every_fault_is_told() -> None:
    problem = one_f_one_b((TEXT, replace(IMAGE, devices=(0, 1), counts=(1, 2))), 4)
    found = fill(problem, 0.0).filled
    assert faults_of(problem, found) == []
    device, slice_ = next((d, p) for d, p in found.slices if p.component == 1)

    def changed(*slices: Slice, at: int = device) -> list[str]:
        orders = [[i for i in order if i != slice_] for order in found.order]
        orders[at].extend(slices)
        return faults_of(problem, FilledOrder(tuple(map(tuple, orders))))

    count = slice_.layers[1] - slice_.layers[0]
    assert f"'image': {count * slice_.num_samples} of (layer, sample) are missing" in changed()[0]
    assert "run more than once" in changed(slice_, slice_)[0]
    assert "device 3 may not host 'image'" in changed(slice_, at=3)[0]
    assert "there are layers 0 to 10" in changed(slice_._replace(layers=(0, 12)))[0]
    assert "there is no such component" in changed(slice_._replace(component=2))[0]
    first = found.order[0][0]
    others = (found.order[0][::-1], *found.order[1:])
    assert "operations differ from the schedule" in faults_of(problem, FilledOrder(others))[0], (
        first
    )
    late = [list(order) for order in problem.schedule.order]
    late[3].insert(2, Slice(0, (0, 12), (0, 4)))
    late[0].append(Slice(1, (0, 11), (0, 2)))
    late[0].append(Slice(1, (0, 11), (2, 4)))
    faults = faults_of(problem, FilledOrder(tuple(map(tuple, late))))
    assert any("device 3: slices delay F3:1" in fault for fault in faults), faults


def test_components_wait_for_each_other() -> None:
    later = replace(IMAGE, after=("text",))
    problem = one_f_one_b((later, TEXT), 8, link=Link(1e-3, 1000.0))
    found = fill(problem, 0.05)
    assert faults_of(problem, found.filled) == []
    timeline = FilledSimulation(problem, found.filled).run()
    for _, slice_ in found.filled.slices:
        if slice_.component == 0 and slice_.layers[0] == 0:
            ends = [
                timeline.end[p]
                for _, p in found.filled.slices
                if p.component == 1 and p.layers[1] == 12 and p.samples[0] <= slice_.samples[0]
                if p.samples[1] > slice_.samples[0]
            ]
            assert ends and timeline.start[slice_] >= max(ends)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.data())
def test_random_timelines(data: st.DataObject) -> None:
    """Whatever the schedule, its times and the components: all runs once, in order, and fits."""
    devices = data.draw(st.integers(1, 4))
    placement = data.draw(st.sampled_from([sequential(devices), fold(devices)]))
    times = st.tuples(*[st.floats(0.3, 3)] * placement.num_stages)
    link = data.draw(st.sampled_from([0.0, 0.2]))
    microbatches = data.draw(st.integers(1, 6))
    step = ScheduleProblem(placement, microbatches, data.draw(times), data.draw(times), None, link)
    schedule = make_schedule("gpipe", placement, microbatches)
    size = st.floats(0, 4)
    layer = st.builds(
        FrozenLayer,
        st.just("x"),
        st.dictionaries(st.integers(1, 5), st.floats(0.01, 2), min_size=1, max_size=3),
        size,
        size,
        size,
    )
    components = [
        Component(
            f"c{i}",
            tuple(data.draw(st.lists(layer, min_size=1, max_size=6))),
            ("c0",) if i and data.draw(st.booleans()) else (),
            data.draw(size),
            (data.draw(st.integers(0, devices - 1)),),
        )
        for i in range(data.draw(st.integers(1, 3)))
    ]
    samples = data.draw(st.integers(1, 6))
    enough = sum(
        c.parameter_bytes
        + samples
        * (c.result_bytes + 2 * max(x.output_bytes + x.activation_bytes for x in c.layers))
        for c in components
    )
    free = data.draw(st.sampled_from([None, (enough + 1e-6,) * devices]))
    problem = FillProblem(step, schedule, tuple(components), samples, free, Link(1e-3, 50.0))
    found = fill(problem, 0.003)
    assert faults_of(problem, found.filled) == []
    made = found.certificate
    assert made.lower_bound * (1 - 1e-9) <= made.makespan < math.inf
    theirs = replace(problem, free_bytes=None, link=Link())
    paper = greedy(theirs)
    wrong = [f for f in faults_of(theirs, paper) if "put off" not in f]
    assert wrong == []


@pytest.mark.parametrize("number", range(4))
def test_within_two_per_cent_of_the_exact_model(number: int) -> None:
    """The first of ``python -m tests.benchmarks.fill --random 200``."""
    problem = draw_case(random.Random(f"0/{number}"))
    found = fill(problem, 0.06, factors=())
    assert faults_of(problem, found.filled) == []
    optimum, proved = shortest(problem, 5.0)
    assert lower_bound(problem) <= optimum + 1e-9
    assert found.certificate.makespan <= 1.02 * optimum
    if proved:
        assert found.certificate.makespan >= optimum - 1e-9


def test_components_that_cannot_be() -> None:
    with pytest.raises(Faults, match="it has no layers"):
        Component("x", ())
    with pytest.raises(Faults, match="times must be finite and positive"):
        Component("x", (FrozenLayer("a", {1: math.nan}),))
    with pytest.raises(Faults, match="depend on each other in a cycle: a, b"):
        one_f_one_b((replace(TEXT, name="a", after=("b",)), replace(TEXT, name="b", after=("a",))))
    with pytest.raises(Faults) as caught:
        one_f_one_b((replace(TEXT, consumers=(7,)), replace(TEXT, after=("image",))), 0)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "0 samples",
        "component 'text' is defined twice",
        "component 'text'",
        "component 'text' names device 7 of 4",
    ]


def test_states_do_not_travel_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among steps of similar time the search prefers the one that sends less."""
    problem = one_f_one_b((TEXT, IMAGE), link=Link(0.0, 6.0))

    def found(weight: float) -> tuple[float, float]:
        monkeypatch.setattr(search, "MOVED", weight)
        steps = [FilledSimulation(problem, fill(problem, 0.15, seed).filled) for seed in range(3)]
        lags = sum(lag for step in steps for deps in step.deps.values() for _, lag in deps)
        return sum(step.run().makespan for step in steps), lags

    weight = search.MOVED
    (least, travels), (takes, less) = found(0.0), found(weight)
    assert takes <= 1.01 * least and less < 0.8 * travels
