"""Order of the tuner's candidates."""

from __future__ import annotations

from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.search.calibration import Calibration
from megatron_pulse.planner.tune.search.candidates import (
    Candidate,
    Fidelity,
    Queue,
    promising_first,
)
from megatron_pulse.planner.tune.search.grouping import layout_key


def test_estimates_count_with_what_others_of_a_placement_took() -> None:
    choices = Choices(pipeline=(2, 4), tensor=(1,), recompute=(Recompute.NEVER,))
    every = [c for c in configs(8, 4, 16, False, choices) if c.layout == ROW]
    two, four = ([c for c in every if c.pipeline == p and c.pp_before_dp] for p in (2, 4))
    same = [c for c in two if c.micro_batch_size == 1 and c.max_in_flight]
    cuts = Partition(two[0].placement, (0, 1, 2))
    corrections = Calibration()
    queue = Queue(corrections)
    for i, config in enumerate(same):
        queue.push(Candidate(1.0 + i / 1000, (), config, 0.0))
    for i, config in enumerate(four):
        queue.push(Candidate(1.5 + i / 1000, (), config, 0.0))
    queue.push(Candidate(1.7, (), four[0], 0.0, Fidelity.QUICK))
    assert queue.pop().config == same[0]
    corrections.took(same[0], cuts, 2.25)
    assert [queue.pop().config for _ in four] == four
    assert queue.pop().step is Fidelity.QUICK  # what is simulated needs no estimate
    other = next(c for c in two if c.micro_batch_size == 2)
    assert Candidate(1.0, (), other, 0.0).expected_s(corrections) == 1.5  # half is believed
    corrections.took(same[1], cuts, 1.21)  # the least counts
    assert Candidate(1.0, (), same[2], 0.0).expected_s(corrections) == 1.21
    assert Candidate(1.0, (), other, 0.0).expected_s(corrections) == 1.1
    assert Candidate(1.0, (), four[0], 0.0).expected_s(corrections) == 1.0
    assert [queue.pop().config for _ in same[1:]] == same[1:]
    assert not queue


def test_kinds_that_cannot_be_near_come_last() -> None:
    """Ordered by bounds: estimates without a partition may be far off."""

    def kind(degree: int, seconds: float, bound: float) -> list[Candidate]:
        return [Candidate(seconds, (), Config(degree, 1, 1, 1, ROW), bound)]

    kinds = [kind(2, 9.0, 8.0), [], kind(4, 7.0, 2.0), kind(8, 4.0, 1.0)]
    found = [alike[0].config.pipeline for alike in promising_first(kinds)]
    assert found == [4, 8, 2]


def test_of_cuts_the_latest_simulation_counts() -> None:
    config = next(c for c in configs(8, 4, 16, False, Choices(pipeline=(2,))) if c.layout == ROW)
    even, uneven = (Partition(config.placement, (0, i, 8)) for i in (4, 3))
    corrections = Calibration()
    assert not corrections.know(layout_key(config))
    corrections.took(config, even, 1.5)
    corrections.took(config, even, 1.3)
    assert corrections.know(layout_key(config))
    assert corrections.of_cuts(layout_key(config), even) == 1.3
    assert corrections.of_cuts(layout_key(config), uneven) == 1.0
