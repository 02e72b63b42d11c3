"""The classic schedules: golden makespans and peaks, closed forms, and every size there is."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.layout.placement import (
    PLACEMENTS,
    Placement,
    fold,
    interleaved,
    make_placement,
    sequential,
)
from megatron_pulse.planner.schedule.check.simulate import Timeline, grid, simulate
from megatron_pulse.planner.schedule.check.validate import peak_activations, validate
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.compare import chimera
from megatron_pulse.planner.schedule.classic.forward_pass import forward_pass
from megatron_pulse.planner.schedule.classic.hanayo import hanayo
from megatron_pulse.planner.schedule.classic.zero_bubble import dualpipe_v
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from tests.planner.schedules import run_schedule

HOMES = {
    "gpipe": [sequential, interleaved, fold],
    "1f1b": [sequential],
    "zb-h1": [sequential],
    "interleaved": [interleaved, lambda p: interleaved(p, 3)],
    "zb-v": [fold],
    "dualpipe-v": [fold],
    "hanayo": [fold, lambda p: fold(p, 2), lambda p: fold(p, 3)],
}
"""The placements of every classic schedule."""


FULL_RATE = {
    "zb-h1": (lambda p: p, lambda p: p, lambda p, k, m: 6 * m + 2 * (p - 1)),
    "zb-v": (lambda p: 2 * p - 2, lambda p: 2 * p, lambda p, k, m: 6 * m + p - 1),
    "dualpipe-v": (lambda p: 2 * p, lambda p: 2 * p + 1, lambda p, k, m: 6 * m + p - 1),
    "interleaved": (lambda p: p, lambda p: None, lambda p, k, m: 3 * k * m + 3 * (p - 1)),
}
"""Microbatches from which a device waits no longer than it must, the cap that is kept throughout,
and the makespan then, in half stages."""


@given(st.integers(0, 10**9))
def test_what_can_run_is_what_validates(seed: int) -> None:
    """Classic schedules on all placements, with operations swapped, missing, doubled or moved."""
    chance = random.Random(seed)
    placement = chance.choice([sequential, interleaved, fold])(chance.randint(1, 4))
    count, name = chance.randint(1, 6), chance.choice(list(CLASSICS))
    try:
        schedule = CLASSICS[name](placement, count)
    except ValueError:
        return
    order = [list(line) for line in schedule.order]
    line, other = chance.choice(order), chance.choice(order)
    i, j = (chance.randrange(len(line)) for _ in range(2))
    match chance.randrange(5):
        case 0:
            line[i], line[j] = line[j], line[i]
        case 1:
            other.insert(chance.randint(0, len(other)), line.pop(i))
        case 2:
            line.insert(j, line[i])
        case 3:
            line.pop(i)
    changed = Schedule(name, placement, count, tuple(map(tuple, order)))
    each = (1.0,) * placement.num_stages
    split = each if name in SPLIT else None
    shop = job_shop(ScheduleProblem(placement, count, each, each, weight_grad=split))
    valid = validate(changed) == [] and changed.kinds == schedule.kinds  # forwards alone are too
    assert shop.can_run(changed) == valid


def timed(schedule: Schedule, stage: float = 1, link: float = 0.0) -> Timeline:
    """Equal stages of forward ``stage`` and backward twice that, in halves where it is split."""
    num = schedule.placement.num_stages
    if schedule.name in SPLIT:
        return run_schedule(schedule, [stage] * num, [stage] * num, link, [stage] * num)
    return run_schedule(schedule, [stage] * num, [2 * stage] * num, link)


def runs_on(name: str, num_devices: int) -> list[Placement]:
    """The placements of a schedule on so many devices."""
    return [make(num_devices) for make in HOMES[name]]


def test_there_is_a_home_for_every_classic() -> None:
    assert HOMES.keys() == CLASSICS.keys()


@pytest.mark.parametrize(
    ("name", "stage", "small", "large", "links"),
    [  # makespan and peak on P = 4, M = 8; on P = 8, M = 16; on P = 4, M = 8 with links of 0.5
        ("gpipe", 2, (66, 16), (138, 32), 69),
        ("1f1b", 2, (66, 8), (138, 16), 74),
        ("interleaved", 1, (57, 11), (117, 23), 64),
        ("zb-h1", 2, (54, 8), (110, 16), 60),
        ("zb-v", 1, (51, 8), (103, 16), 57.5),
        ("dualpipe-v", 1, (51, 9), (103, 17), 56),
        ("hanayo", 1, (66, 8), (138, 16), 79),
    ],
)
def test_golden(
    name: str, stage: int, small: tuple[int, int], large: tuple[int, int], links: float
) -> None:
    """Time and memory in half stages: a device's share of the chain is two of them."""
    for (p, m), golden in (((4, 8), small), ((8, 16), large)):
        schedule = CLASSICS[name](HOMES[name][0](p), m)
        assert validate(schedule) == []
        peak = stage * max(peak_activations(schedule))
        assert (timed(schedule, stage).makespan, peak) == golden
    assert timed(CLASSICS[name](HOMES[name][0](4), 8), stage, 0.5).makespan == links


def test_golden_of_chimera() -> None:
    for (p, m), golden in (((4, 8), (60, 8)), ((8, 16), (132, 16))):
        schedule = chimera(p, m)
        assert (timed(schedule, 2).makespan, 2 * max(peak_activations(schedule))) == golden
    assert timed(chimera(4, 8), 2, 0.5).makespan == 65.5


@pytest.mark.parametrize("name", CLASSICS)
def test_every_size_is_valid(name: str) -> None:
    """All of them, each run with uneven times and links, too."""
    rng = random.Random(name)
    for num_devices in range(2, 7):
        for placement in runs_on(name, num_devices):
            for m in range(1, 2 * num_devices + 4):
                schedule = CLASSICS[name](placement, m)
                assert validate(schedule) == []
                num = placement.num_stages
                forward, backward, weight = (
                    [rng.uniform(0.2, 3) for _ in range(num)] for _ in range(3)
                )
                timeline = run_schedule(
                    schedule, forward, backward, rng.random(), weight if name in SPLIT else None
                )
                assert len(timeline.end) == len(schedule.kinds) * num * m
                if name in FULL_RATE:
                    at_full_rate(schedule)


def at_full_rate(schedule: Schedule) -> None:
    least, cap, makespan = FULL_RATE[schedule.name]
    p, k, m = (
        schedule.placement.num_devices, schedule.placement.num_chunks, schedule.num_microbatches
    )  # fmt: skip
    assert validate(schedule, cap=cap(p)) == []
    if m >= least(p):
        assert timed(schedule, 2 if k == 1 else 1).makespan == makespan(p, k, m)
        if schedule.name == "dualpipe-v":
            assert peak_activations(schedule) == (2 * p + 1,) * p


@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_large_and_uneven(data: st.DataObject) -> None:
    """Any size and any times: an operation waits for its input's arrival and for its device."""
    name = data.draw(st.sampled_from(sorted(CLASSICS)))
    num_devices = data.draw(st.integers(1, 5)) * 2
    placement = data.draw(st.sampled_from(runs_on(name, num_devices)))
    schedule = CLASSICS[name](placement, data.draw(st.integers(1, 24)))
    assert validate(schedule) == []
    num = placement.num_stages
    rng = random.Random(data.draw(st.integers(0, 99)))
    times = [tuple(rng.uniform(0.1, 9) for _ in range(num)) for _ in range(3)]
    problem = ScheduleProblem(
        placement, schedule.num_microbatches, *times[:2], times[2] if name in SPLIT else None, 0.3
    )
    timeline = simulate(problem, schedule)
    for kind, other in zip(schedule.kinds, schedule.kinds[1:], strict=False):
        for s, m in product(range(num), range(schedule.num_microbatches)):
            assert timeline.end[Operation(kind, s, m)] <= timeline.start[Operation(other, s, m)]
    for order in schedule.order:
        for a, b in zip(order, order[1:], strict=False):
            assert timeline.end[a] <= timeline.start[b]


@pytest.mark.parametrize(("p", "k", "b"), product((2, 3, 4, 8), (1, 2, 3), (0.5, 1.0, 2.0)))
def test_clock_schedules_idle_as_their_formula_says(p: int, k: int, b: float) -> None:
    """Chimera idles for P/2-1 pairs of forward and backward, waves for P-1 small pairs.
    Unequal pairs add their difference at every group's end."""
    idle = 1 + b + (2 * k - 1) * abs(b - 1)
    for w in (1, 2):
        num = 2 * p * w
        timeline = run_schedule(hanayo(fold(p, w), k * p), [1] * num, [b] * num)
        assert timeline.bubble == pytest.approx([(p - 1) * idle] * p)
    if p % 2 == 0:
        timeline = run_schedule(chimera(p, k * p), [1] * p, [b] * p)
        assert timeline.bubble == pytest.approx([(p / 2 - 1) * idle] * p)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_hanayo_is_the_papers_figure_9_of_equal_slots(p: int) -> None:
    """P microbatches down and up a fold and back take 6P-2 slots: 22 where P = 4."""
    num = 2 * p
    assert run_schedule(hanayo(fold(p), p), [1] * num, [1] * num).makespan == 6 * p - 2


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera_keeps_its_memory(p: int) -> None:
    """Between P/2 + 1 and P, most in the middle."""
    expected = tuple(p / 2 + 1 + min(d, p - 1 - d) for d in range(p))
    for k in (1, 2, 4):
        assert peak_activations(chimera(p, k * p)) == expected


def test_hanayo_keeps_its_memory() -> None:
    for p, w, m in product((2, 4), (1, 2), (1, 2, 3, 4, 9)):
        assert max(peak_activations(hanayo(fold(p, w), m))) == 2 * w * min(m, p)


def test_dualpipe_v_pairs_forwards_with_backwards_of_the_other_direction() -> None:
    steady = " ".join(map(str, dualpipe_v(fold(2), 7).order[0]))
    assert "F0:3 I3:1 W3:1 F3:2 I0:0 W0:0 F0:4 I3:2 W3:2 F3:3 I0:1 W0:1" in steady


def test_chimera_runs_down_and_up() -> None:
    schedule = chimera(4, 4)
    assert grid(run_schedule(schedule, [1] * 4, [1] * 4)).splitlines() == [
        "device  0 | F0:0 F0:2 .    F3:1 B3:1 F3:3 B3:3 B0:0 .    B0:2",
        "device  1 | .    F1:0 F2:1 F1:2 F2:3 B2:1 B1:0 B2:3 B1:2 .",
        "device  2 | .    F1:1 F2:0 F1:3 F2:2 B2:0 B1:1 B2:2 B1:3 .",
        "device  3 | F0:1 F0:3 .    F3:0 B3:0 F3:2 B3:2 B0:1 .    B0:3",
    ]


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_each_direction_of_chimera_is_a_schedule(p: int) -> None:
    """Up is down with the devices counted from the other end."""
    for m in range(2, 2 * p + 4):
        order = chimera(p, m).order
        for odd, rows in enumerate((order, order[::-1])):
            half = [[op for op in row if op.microbatch % 2 == odd] for row in rows]
            counted = [[op._replace(microbatch=op.microbatch // 2) for op in row] for row in half]
            count = (m + 1 - odd) // 2
            assert (
                validate(Schedule("half", sequential(p), count, tuple(map(tuple, counted)))) == []
            )
        problem = ScheduleProblem(sequential(p), m, (1.0,) * p, (2.0,) * p, link=0.3)
        assert len(simulate(problem, chimera(p, m)).end) == 2 * p * m
    with pytest.raises(ValueError, match="an even number of devices; got 3"):
        chimera(3, 4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("1f1b", "needs placement sequential; this is {}"),
        ("zb-h1", "needs placement sequential; this is {}"),
        ("interleaved", "needs placement interleaved; this is {}"),
        ("zb-v", "needs placement fold with 2 stages per device; this is {}"),
        ("dualpipe-v", "needs placement fold with 2 stages per device; this is {}"),
        ("hanayo", "needs placement fold; this is {}"),
    ],
)
def test_other_placements_are_refused(name: str, reason: str) -> None:
    own = {home.kind for home in runs_on(name, 4)}
    assert len(own) == 1
    for kind in set(PLACEMENTS.values()) - own:
        with pytest.raises(ValueError, match=f"{name} needs.*") as error:
            make_schedule(name, make_placement(kind.name, 4), 4)
        assert reason.format(kind) in str(error.value)
    if "2 stages per device" in reason:
        with pytest.raises(ValueError, match=f"{name} needs placement fold with 2 stages per dev"):
            make_schedule(name, fold(2, 2), 4)
    with pytest.raises(ValueError, match="at least one microbatch"):
        CLASSICS[name](runs_on(name, 4)[0], 0)


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_forward_pass_runs_on_every_placement(kind: str, num_devices: int) -> None:
    chunks = 4 if kind == "opposite" else 2 if PLACEMENTS[kind].allows(2) else 1
    placement = make_placement(kind, num_devices, chunks)
    for count in (1, 3, 8):
        schedule = forward_pass(placement, count)
        run = {op for line in schedule.order for op in line}
        stages = range(placement.num_stages)
        assert run == {Operation(OpType.FORWARD, s, m) for s in stages for m in range(count)}
        assert validate(schedule) == []
