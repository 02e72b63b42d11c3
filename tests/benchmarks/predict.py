"""What a step of another project's schedule should take.

Megatron's and torch's 1F1B wait for every transfer before they go on, and pair a send with the
receive of the other direction (``send_forward_recv_backward``): simulated here. The others overlap
transfers with computing, as our executor does, so ``planner.replay`` of the same order is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.program.simulate import StageMessage, simulate_step
from megatron_pulse.planner.schedule.registry import make_schedule
from tests.benchmarks.contestant import Contestant, Engine

CLASSIC = {
    Engine.MEGATRON_1F1B: "1f1b",
    Engine.TORCH_1F1B: "1f1b",
    Engine.DEEPSPEED_1F1B: "1f1b",
    Engine.MEGATRON_INTERLEAVED: "interleaved",
    Engine.TORCH_INTERLEAVED: "interleaved",
    Engine.TORCH_ZBV: "zb-v",
}
"""Our names of the others' schedules."""


def predict(contestant: Contestant, link: Link) -> float:
    """Seconds of a step over links like ``link``."""
    problem, packed = contestant.problem, contestant.packed
    assert problem is not None
    if CLASSIC[contestant.engine] == "1f1b":
        forward = tuple(
            link.time_s(4 * packed[s]) if 0 < s < len(packed) else 0.0
            for s in range(len(packed) + 1)
        )
        return blocking_1f1b(problem.forward, problem.backward, forward, problem.num_microbatches)
    sizes = packed
    if contestant.engine is Engine.MEGATRON_INTERLEAVED and not contestant.exchange:
        sizes = (max(packed),) * len(packed)
    home = problem.placement.device_of_stage
    extra = 2 * link.latency_s if contestant.exchange else 0.0
    edges = [
        StageMessage(s - 1, s, extra + link.time_s(4 * sizes[s]))
        for s in range(1, len(home))
        if home[s - 1] != home[s]
    ]
    name = CLASSIC[contestant.engine]
    schedule = make_schedule(name, problem.placement, problem.num_microbatches)
    return simulate_step(problem, schedule, edges).timeline.makespan


@dataclass(frozen=True)
class _Transfer:
    """One end of a message to or from ``peer``; ``key`` is the same at both ends."""

    is_send: bool
    peer: int
    key: tuple[str, int, int]
    seconds: float


type _Step = float | tuple[_Transfer, ...]


def blocking_1f1b(
    forward: tuple[float, ...], backward: tuple[float, ...], link: tuple[float, ...], count: int
) -> float:
    """The makespan of 1F1B whose ranks wait for all transfers they start together.

    ``link[s]`` is the seconds of the tensor that enters stage s. A message starts when both ends
    are there and sender and receiver are free of others of that direction.
    """
    ranks = range(len(forward))
    programs = [deque(_program(r, forward, backward, link, count)) for r in ranks]
    clock = [0.0 for _ in ranks]
    out_free, in_free = [0.0 for _ in ranks], [0.0 for _ in ranks]
    posted: dict[tuple[str, int, int], float] = {}
    ended: dict[tuple[str, int, int], float] = {}
    announced = [False for _ in ranks]
    left = sum(map(len, programs))
    while left:
        moved = False
        for r in sorted(ranks, key=lambda r: clock[r]):
            if not programs[r]:
                continue
            step = programs[r][0]
            if isinstance(step, float):
                clock[r] += step
            else:
                if not announced[r]:
                    announced[r] = moved = True
                    for t in step:
                        if t.key not in posted:
                            posted[t.key] = clock[r]
                            continue
                        a, b = (r, t.peer) if t.is_send else (t.peer, r)
                        start = max(clock[r], posted[t.key], out_free[a], in_free[b])
                        ended[t.key] = out_free[a] = in_free[b] = start + t.seconds
                if any(t.key not in ended for t in step):
                    continue
                clock[r] = max([clock[r], *(ended[t.key] for t in step)])
            programs[r].popleft()
            announced[r] = False
            left -= 1
            moved = True
            break
        if not moved:
            raise RuntimeError("1F1B deadlocks")
    return max(clock)


def _program(
    rank: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    link: tuple[float, ...],
    count: int,
) -> Iterator[_Step]:
    """Megatron's order of a rank."""
    last = len(forward) - 1
    warm_up = min(last - rank, count)

    def transfer(kind: str, stage: int, m: int) -> list[_Transfer]:
        """This rank's end of the tensor that enters ``stage``, or of its gradient."""
        if not 0 < stage <= last or not 0 <= m < count:
            return []
        is_send = (kind == "F") == (stage > rank)
        peer = rank - 1 if stage == rank else rank + 1
        return [_Transfer(is_send, peer, (kind, stage, m), link[stage])]

    for m in range(warm_up):
        yield tuple(transfer("F", rank, m))
        yield forward[rank]
        yield tuple(transfer("F", rank + 1, m))
    if warm_up < count:
        yield tuple(transfer("F", rank, warm_up))
    for m in range(count - warm_up):
        yield forward[rank]
        yield tuple(transfer("F", rank + 1, m + warm_up) + transfer("B", rank + 1, m))
        yield backward[rank]
        yield tuple(transfer("B", rank, m) + transfer("F", rank, m + warm_up + 1))
    for m in range(count - warm_up, count):
        yield tuple(transfer("B", rank + 1, m))
        yield backward[rank]
        yield tuple(transfer("B", rank, m))
