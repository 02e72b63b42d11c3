"""Cuts over unlike devices: optimal against brute force, with times and memory of each device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import (
    Placement,
    fold,
    interleaved,
    make_placement,
    sequential,
)
from megatron_pulse.planner.partition import fold_dp
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition

ORDERS = (
    ("load", "stage", "bytes"),
    ("stage", "load", "bytes"),
    ("load", "bytes"),
    ("bytes", "load"),
    ("load",),
)


@dataclass(frozen=True)
class Problem:
    """A chain whose layers have other times on each device, and what is asked of its cuts."""

    costs: tuple[ChainCosts, ...]
    placement: Placement
    goal: Goal
    limits: tuple[float, ...]
    flying: tuple[int, ...]

    @property
    def skips(self) -> Sequence[SkipCost]:
        return self.costs[0].skips

    def every(self) -> Iterator[tuple[int, ...]]:
        num = len(self.costs[0].names)
        for inner in itertools.combinations(range(1, num), self.placement.num_stages - 1):
            yield (0, *inner, num)

    def score(self, cuts: Sequence[int]) -> tuple[float, ...] | None:
        """Measures of the cuts, layer by layer; None if they are not legal or do not fit."""
        home, goal = self.placement.device_of_stage, self.goal
        stage_of = [s for s, (a, b) in enumerate(itertools.pairwise(cuts)) for _ in range(a, b)]
        device_of = [home[stage] for stage in stage_of]
        load, held = [0.0] * len(self.limits), [0.0] * len(self.limits)
        stages, moved = [0.0] * len(home), 0.0
        for layer, (stage, device) in enumerate(zip(stage_of, device_of, strict=True)):
            own = self.costs[device]
            load[device] += own.forward_s[layer] + own.backward_s[layer]
            stages[stage] += own.forward_s[layer]
            held[device] += own.parameters[layer] + self.flying[stage] * own.saved_bytes[layer]
        for stage, cut in enumerate(cuts[1:-1]):
            if home[stage] != home[stage + 1]:
                size = self.costs[0].boundary_bytes[cut]
                seconds = goal.link.time_s(size)
                moved += size
                stages[stage] += goal.lam * seconds
                for end in (stage, stage + 1):
                    load[home[end]] += 2 * seconds
        for skip in self.skips:
            ends = device_of[skip.source], device_of[skip.destination]
            if ends[0] == ends[1]:
                continue
            if goal.collocate:
                return None
            for device in ends:
                load[device] += 2 * goal.link.time_s(skip.num_bytes)
            next_one = stage_of[skip.destination] == stage_of[skip.source] + 1
            if not (next_one and skip.source + 1 == cuts[stage_of[skip.destination]]):
                moved += skip.num_bytes
        if goal.memory is not None and any(map(lambda h, most: h > most, held, self.limits)):
            return None
        found = {"load": max(load), "stage": max(stages), "bytes": moved}
        return tuple(round(found[measure], 6) for measure in goal.order)


def problem(rng: random.Random, folded: bool) -> Problem:
    """Whole numbers, so that there are ties; ratios of layers differ from device to device."""
    devices = rng.randint(2, 4)
    placement = fold(devices) if folded else sequential(devices)
    num = rng.randint(placement.num_stages, 9 if placement.num_stages == 8 else 10)

    def column(least: int = 0) -> tuple[int, ...]:
        return tuple(rng.randint(least, 9) for _ in range(num))

    nested = sorted(rng.sample(range(num), 2 * rng.randint(0, num // 2)))
    half = len(nested) // 2
    edges = list(zip(nested[:half], reversed(nested[half:]), strict=True))
    if rng.random() < 0.4:
        edges = [
            (i, rng.randint(i + 1, num - 1))
            for i in rng.choices(range(num - 1), k=rng.randint(0, 3))
        ]
    skips = tuple(SkipCost(i, j, rng.randint(1, 9)) for i, j in edges)
    first = ChainCosts(
        tuple(f"u{i}" for i in range(num)),
        tuple(map(float, column())),
        tuple(map(float, column())),
        column(),
        column(),
        column(1),
        skips,
    )

    def slower(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(rng.choice((0.5, 1.0, 2.0, 3.0)) * each for each in times)

    kinds = [first]
    for _ in range(rng.randint(1, 3)):
        kinds.append(
            replace(first, forward_s=slower(first.forward_s), backward_s=slower(first.backward_s))
        )
    costs = (*kinds, *rng.choices(kinds, k=devices))[:devices]
    limits = tuple(float(rng.randint(12, 70)) for _ in range(devices))
    flying = tuple(rng.randint(1, 3) for _ in range(placement.num_stages))
    rules = None
    if rng.random() < 0.6:

        def rules(placement: Placement) -> MemoryRule:
            return MemoryRule(min(limits), 1, flying, limits=limits)

    goal = Goal(
        rng.choice(ORDERS),
        folded and rng.random() < 0.5,
        Link(rng.choice((0, 0.5)), rng.choice((float("inf"), 2.0))),
        rng.choice((0, 1, 2)),
        rules,
        rng.choice((0.0, 0.0, 0.2)),
    )
    return Problem(costs, placement, goal, limits, flying)


def is_best(of: Problem, cuts: tuple[int, ...] | None) -> bool:
    """True if no cuts are better by one measure after the other, within the slack."""
    options = [one for one in map(of.score, of.every()) if one is not None]
    if not options or cuts is None:
        return not options and cuts is None
    for at in range(len(of.goal.order)):
        most = min(option[at] for option in options)
        most *= 1 + of.goal.slack * (at + 1 < len(of.goal.order))
        options = [option for option in options if option[at] <= most + 1e-6]
    return of.score(cuts) in options


def found(of: Problem) -> tuple[int, ...] | None:
    try:
        return find_partition(of.costs, of.placement, of.goal, explain=False).cuts
    except PartitionError:
        return None


@pytest.mark.parametrize("folded", [True, False], ids=["fold", "sequential"])
def test_optimal_among_all_cuts(folded: bool) -> None:
    """250 chains each over two to four unlike devices, with skips, links, memory and slack."""
    none = 0
    for seed in range(250):
        of = problem(random.Random(seed), folded)
        cuts = found(of)
        none += cuts is None
        assert is_best(of, cuts), seed
    assert none > 25, "limits leave many chains without legal cuts"


@pytest.mark.parametrize("wrong", ["largest ratio", "one limit"])
def test_the_comparison_finds_mistakes(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = fold_dp._shortest

    def largest(times):
        least, _ = right(times)
        return least, [float((own[least > 0] / least[least > 0]).max(initial=1)) for own in times]

    if wrong == "largest ratio":
        monkeypatch.setattr(fold_dp, "_shortest", largest)
    else:
        monkeypatch.setattr(MemoryRule, "of_device", lambda self, device: self)
    assert not all(
        is_best(of, found(of)) for of in (problem(random.Random(seed), True) for seed in range(250))
    )


def test_equal_devices_are_cut_as_before() -> None:
    for seed in range(100):
        of = problem(random.Random(seed), seed % 2 == 0)
        plain = replace(of, goal=replace(of.goal, memory=None))
        alike = replace(plain, costs=tuple(replace(of.costs[0]) for _ in of.costs))
        as_one = replace(plain, costs=of.costs[:1] * len(of.costs))
        assert found(alike) == found(as_one), "equal, but other objects"


@pytest.mark.parametrize("placement", [interleaved(2, 2), make_placement("fold", 2, 4)])
def test_several_stages_of_a_device_fit_and_follow_its_speed(placement: Placement) -> None:
    num = 24
    times = tuple([1.0] * num)
    fast = ChainCosts(tuple(map(str, range(num))), times, times, (1,) * num, (0,) * num, (1,) * num)
    slow = replace(fast, forward_s=tuple([3.0] * num), backward_s=tuple([3.0] * num))
    cuts = find_partition((fast, slow), placement).cuts
    layers = [0, 0]
    for device, (a, b) in zip(placement.device_of_stage, itertools.pairwise(cuts), strict=True):
        layers[device] += b - a
    assert layers == [18, 6]
    rule = MemoryRule(8, 1, (0.0,) * placement.num_stages, limits=(16.0, 8.0))
    cuts = find_partition((fast, slow), placement, Goal(memory=lambda _: rule)).cuts
    layers = [0, 0]
    for device, (a, b) in zip(placement.device_of_stage, itertools.pairwise(cuts), strict=True):
        layers[device] += b - a
    assert layers == [16, 8]
