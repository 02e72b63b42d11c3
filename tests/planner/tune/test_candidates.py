"""What a tuner's search takes up next."""

from __future__ import annotations

from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.tune.config import Choices, Recompute, configs
from megatron_pulse.planner.tune.searching.candidates import Candidate, Queue, Reached


def test_estimates_count_with_what_others_of_a_placement_took() -> None:
    choices = Choices(pipeline=(2, 4), tensor=(1,), recompute=(Recompute.NEVER,))
    every = [c for c in configs(8, 4, 16, False, choices) if c.layout == ROW]
    two, four = ([c for c in every if c.pipeline == p and c.pipeline_inside] for p in (2, 4))
    same = [c for c in two if c.micro_batch_size == 1 and c.ample]
    queue = Queue(Candidate(1.0 + i / 1000, (), c, 0.0) for i, c in enumerate(same))
    for candidate in (Candidate(1.5 + i / 1000, (), c, 0.0) for i, c in enumerate(four)):
        queue.push(candidate)
    queue.push(Candidate(1.7, (), four[0], 0.0, Reached.QUICK))
    assert queue.pop().config == same[0]
    queue.took(same[0], 2.25)
    assert [queue.pop().config for _ in four] == four
    assert queue.pop().step is Reached.QUICK  # what is simulated needs no estimate
    other = next(c for c in two if c.micro_batch_size == 2)
    assert queue.expected_s(Candidate(1.0, (), other, 0.0)) == 1.5  # half is believed
    queue.took(same[1], 1.21)  # the least counts
    assert queue.expected_s(Candidate(1.0, (), same[2], 0.0)) == 1.21
    assert queue.expected_s(Candidate(1.0, (), other, 0.0)) == 1.1
    assert queue.expected_s(Candidate(1.0, (), four[0], 0.0)) == 1.0
    assert [queue.pop().config for _ in same[1:]] == same[1:]
    assert not queue
