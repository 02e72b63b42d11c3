"""Random plans and broken ones under the rules of channels, beside a machine that plays them.

    .venv/bin/python -m tests.benchmarks.orders --plans 10000 --mutated 1000     # some minutes
    .venv/bin/python -m tests.benchmarks.orders --plans 200 --seed 7

Plans: random chains with skips and conditioning, cut anywhere for sequential, interleaved, folded
and opposite placements of 2 to 5 devices, ten for each random schedule, whole and split, with
recomputation as operations at random places, collectives of embedders and random times. Each must
pass the check and come to its end where messages have channels of their own, and where a device
moves one at a time. Mutated: receives posted elsewhere, neighbours in the order swapped, an event
lost. What the check accepts must end, with every operation after what it takes has arrived; what it
refuses either hangs, or runs an operation too early, or is not matched. Exits with 1 if anything is
otherwise.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from functools import lru_cache

from megatron_pulse.planner.layout.placement import fold, interleaved, opposite, sequential
from megatron_pulse.planner.program.device_program import Receive, Run, Send, Wait
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.planner.schedule.message import STEP_END
from megatron_pulse.planner.schedule.operations import OpType, Schedule
from megatron_pulse.planner.schedule.problem import equal_stages
from megatron_pulse.planner.schedule.registry import make_schedule, pick
from tests.benchmarks.report import Flags
from tests.planner.channel_times import Rule, play
from tests.planner.schedules import recomputed_anywhere, wave
from tests.planner.test_channels import shuffled, unit
from tests.planner.test_nccl import Programs, compiled, programs

PLANS = 10
"""Plans of one schedule, which takes longer to find than they to compile and to check."""


@lru_cache(maxsize=1)
def found(seed: int) -> Schedule:
    """A random placement's schedule."""
    rng = random.Random(f"schedule {seed}")
    devices = rng.randint(2, 5)
    placements = (
        sequential(devices),
        interleaved(devices, rng.randint(2, 3)),
        fold(devices, rng.randint(1, 2)),
        opposite(devices),
    )
    placement = rng.choice(placements)
    count = rng.randint(1, 9)
    name = rng.choice(("auto", "gpipe", "wave", "wave"))
    if pick(name, placement) != "wave":
        return make_schedule(name, placement, count)
    stages = placement.num_stages
    forward, backward = times(rng, stages), times(rng, stages)
    weight = times(rng, stages) if rng.random() < 0.5 else None
    return wave(placement, count, forward=forward, backward=backward, weight_grad=weight, effort=1)


def times(rng: random.Random, stages: int) -> tuple[float, ...]:
    """Seconds of each stage."""
    return tuple(rng.uniform(0.1, 5.0) for _ in range(stages))


def drawn(seed: int) -> tuple[Schedule, Programs]:
    """A random plan's schedule and programs."""
    rng = random.Random(seed)
    schedule = found(seed // PLANS)
    placement, count = schedule.placement, schedule.num_microbatches
    stages = placement.num_stages
    splits = OpType.WEIGHT_GRAD in schedule.kinds
    forward_only = rng.random() < 0.2
    if forward_only:
        schedule = schedule.forward_only()
    elif rng.random() < 0.3:
        schedule = recomputed_anywhere(schedule, range(stages), rng.random(), rng)
    backward = times(rng, stages)
    problem = replace(
        equal_stages(placement, count, splits),
        forward=times(rng, stages),
        backward=backward,
        weight_grad=times(rng, stages) if splits else None,
        recompute_s=tuple(rng.uniform(0.0, 0.9) * seconds for seconds in backward),
        link=rng.choice((0.0, 0.5, 3.0)),
    )
    plan = compiled(schedule, seed, forward_only, None if rng.random() < 0.2 else problem)
    return schedule, programs(schedule, plan, replicated=rng.random() < 0.2)


def mutated(rng: random.Random, good: Programs) -> Programs:
    """``good`` with something else in its order, or lost."""
    kind = rng.choice(("posted", "swapped", "lost"))
    if kind == "posted":
        return shuffled(rng, good)
    broken = [list(mine) for mine in good]
    mine = rng.choice(broken)
    at = [i for i, event in enumerate(mine) if not isinstance(event, Run)]
    if not at:
        return shuffled(rng, good)
    i = rng.choice(at)
    if kind == "lost":
        del mine[i]
    elif i:
        mine[i - 1], mine[i] = mine[i], mine[i - 1]
    return broken


def is_sound(events: Programs) -> bool:
    """Whether all comes to its end, one message at a time and on channels, each matched, and no
    operation runs before what it takes is there."""
    for rule in (Rule.ONE, Rule.APART):
        step = play(events, unit, unit, rule)
        if step.makespan is None:
            return False
        for message, arrival in step.arrival.items():
            late = message.consumer != STEP_END and step.start[message.consumer] < arrival
            if late or step.sent[message] < step.start[message.producer] + 1:
                return False
    return _matched(events)


def _matched(events: Programs) -> bool:
    """Whether both ends of each channel name the same messages in the same order, and each that is
    received is waited for once."""
    lines: dict[tuple[int, int, bool], list[object]] = {}
    received: Counter[object] = Counter()
    for mine in events:
        for event in mine:
            if isinstance(event, Send | Receive):
                m = event.message
                sends = isinstance(event, Send)
                lines.setdefault((m.source, m.destination, sends), []).append(m)
                received[m] += not sends
            elif isinstance(event, Wait):
                received[event.message] -= 1
    same = all(lines.get((a, b, not sends)) == line for (a, b, sends), line in lines.items())
    return same and not any(received.values())


def main() -> int:
    """The command."""
    flags = Flags(__doc__)
    flags.add("--plans", 10_000)
    flags.add("--mutated", 1000)
    flags.add("--seed", 0, type=int)
    args = flags.parse_args()
    wrong, messages = [], 0
    for seed in range(args.seed, args.seed + args.plans):
        schedule, events = drawn(seed)
        messages += sum(isinstance(event, Send) for mine in events for event in mine)
        if check_events(events) or check_events(events, connected=False) or not is_sound(events):
            wrong.append(f"plan {seed} ({schedule.name}) is refused, or hangs")
    print(f"{args.plans} plans with {messages} messages: {len(wrong)} refused, or hang")
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(args.seed, args.seed + args.mutated):
        broken = mutated(random.Random(f"mutated {seed}"), drawn(seed)[1])
        accepted, sound = not check_events(broken), is_sound(broken)
        verdicts[accepted, sound] += 1
        if accepted != sound:
            wrong.append(f"mutated plan {seed}: accepted {accepted}, sound {sound}")
    print(
        f"{args.mutated} mutated: {verdicts[False, False]} refused that hang or are wrong, "
        f"{verdicts[True, True]} accepted that are sound, {verdicts[False, True]} refused that are "
        f"sound, {verdicts[True, False]} accepted that are not"
    )
    print("\n".join(wrong[:20]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
