"""Orders of messages under the rules of channels, beside a machine that plays them with times."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.program.communication import compile_communication, message_spec
from megatron_pulse.planner.program.device_program import Event, Receive, compile_program
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.planner.schedule.check.simulate import duration_of
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.problem import equal_stages
from tests.planner.channel_times import Rule, play, without_releases
from tests.planner.schedules import recomputed_anywhere
from tests.planner.strategies import schedules
from tests.planner.test_nccl import Programs, compiled, programs, routes_of


def shuffled(rng: random.Random, good: Programs) -> Programs:
    """The same with receives posted earlier by chance; channels keep their order."""
    return [_shuffled(rng, list(mine)) for mine in good]


def _shuffled(rng: random.Random, mine: list[Event]) -> list[Event]:
    for _ in range(rng.choice((1, 3, 10, 2 * len(mine)))):
        i = rng.randrange(1, len(mine))
        if isinstance(event := mine[i], Receive):
            before = mine[i - 1]
            if not (isinstance(before, Receive) and before.message.source == event.message.source):
                mine[i - 1], mine[i] = event, before
    return mine


def unit(_: Operation | Message) -> float:
    return 1.0


@settings(max_examples=60, derandomize=True)
@given(schedules(), st.integers(0, 10**6))
def test_what_the_check_refuses_hangs_and_nothing_else(schedule: Schedule, seed: int) -> None:
    """Devices move one message at a time. Accepted programs also end on separate channels."""
    good = programs(schedule, compiled(schedule, seed))
    for number in range(4):
        mixed = shuffled(random.Random(seed + number), good)
        faults = check_events(mixed)
        assert bool(faults) == (play(mixed, unit, unit, Rule.ONE).makespan is None), faults
        assert faults or play(mixed, unit, unit, Rule.APART).makespan is not None


@settings(max_examples=40, derandomize=True)
@given(schedules(), st.integers(0, 10**6), st.data())
def test_posted_receives_hold_up_nothing(
    schedule: Schedule, seed: int, data: st.DataObject
) -> None:
    """A step takes as long as where a link carries what is made, whether anybody waits for it yet
    or not: within 3 % where times are as planned, recomputation by itself or not."""
    placement = schedule.placement
    times = st.integers(2, 6).map(float)
    count = placement.num_stages
    if data.draw(st.booleans()):
        schedule = recomputed_anywhere(schedule, range(count), 0.7, random.Random(seed))
    routes = routes_of(schedule, seed)
    rate = data.draw(st.sampled_from((0.0, 0.05, 0.3)))

    def seconds(message: Message) -> float:
        return rate * message_spec(routes, message).bytes_per_sample(2)

    link = tuple(
        rate * sum(spec.bytes_per_sample(2) for spec in routes.boundaries[s + 1])
        for s in range(count - 1)
    )
    backward = tuple(data.draw(times) for _ in range(count))
    problem = replace(
        equal_stages(placement, schedule.num_microbatches, OpType.WEIGHT_GRAD in schedule.kinds),
        forward=tuple(data.draw(times) for _ in range(count)),
        backward=backward,
        recompute_s=tuple(seconds / 3 for seconds in backward),
        link=link,
    )
    plan = compile_communication(routes, schedule, problem)
    all_events = [list(compile_program(schedule, plan, d)) for d in range(placement.num_devices)]

    def makespan(programs: list[list[Event]], rule: Rule) -> float:
        step = play(programs, duration_of(problem, schedule), seconds, rule)
        assert step.makespan is not None
        return step.makespan

    ideal = makespan([without_releases(mine) for mine in all_events], Rule.LINK)
    assert makespan(all_events, Rule.APART) <= 1.03 * ideal
