"""One cell: every contestant in turn, on one backbone over links of one rate."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron_pulse.backbone.chain import Backbone
from tests.benchmarks.contestant import TIMEOUT_S, Contestant, Groups, Runner
from tests.benchmarks.network import Node, namespaces, sent_bytes, unavailable
from tests.benchmarks.runners import make_runner
from tests.ranks import run_ranks

MOST_DELAY = 0.05
"""A repetition in which a rank waited longer than this share for a processor is done again."""

RT_PRIORITY = 1
"""Ranks sleep most of the time; when they wake up they should not queue behind others' work."""

TRIES = 4
"""How often at the most; then it counts all the same."""


class Repetition(NamedTuple):
    """A step of one contestant on a rank: when it began and ended, the bytes that its interface
    sent, the payload by the contestant's own count, and the share of the step in which the rank
    that was kept longest waited for a processor."""

    start_s: float
    end_s: float
    wire_bytes: int
    sent_bytes: int
    delay: float


@dataclass(frozen=True)
class Result:
    """A contestant in a cell. Seconds are emulated; bytes are of a step of all ranks, emulated.

    ``memory_bytes`` are what the fullest rank would hold of the real backbone: activations, and
    parameters, gradients and optimizer, which are ``state_bytes`` of it; ``delays`` are the shares
    of each repetition that a rank waited for a processor, which other processes had.
    """

    contestant: str
    engine: str
    seconds: list[float]
    wire_bytes: float
    sent_bytes: float
    expected_bytes: int
    memory_bytes: float
    state_bytes: float
    predicted_s: float
    compute_s: float
    bubble: float
    solver: str
    delays: list[float]
    way: str = ""
    micro_batch_size: int = 0

    @property
    def median_s(self) -> float:
        """Of the repetitions."""
        return median(self.seconds)


def require_network() -> None:
    """End the command where there can be no nodes; an end from outside leaves none behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if why := unavailable():
        sys.exit(f"the benchmark needs network namespaces: {why}")


def run_cell(
    backbone: Backbone,
    contestants: Sequence[Contestant],
    num_ranks: int,
    rate_mbit: float,
    repetitions: int,
    short_queues: bool = False,
) -> list[Result]:
    """Measure ``contestants`` on ``num_ranks`` processes, each on a node of its own.

    Raises RuntimeError where there can be no namespaces and RanksFailed if a rank fails.
    """
    with namespaces(num_ranks, rate_mbit, short_queues=short_queues) as nodes:
        given = nodes, backbone, list(contestants), repetitions
        try:
            measured = run_ranks(num_ranks, _measure, *given, timeout_s=1200.0)
        finally:
            for rank in multiprocessing.active_children():
                rank.kill()  # those of an interrupted run
    return [
        _result(contestant, *zip(*(rank[i] for rank in measured), strict=True))
        for i, contestant in enumerate(contestants)
    ]


def compute_s(contestant: Contestant) -> float:
    """Seconds of computing in a step, over all ranks."""
    count = contestant.num_microbatches
    encoding = 0.0 if contestant.encoders is None else contestant.encoders.compute_s
    if contestant.problem is None:
        return encoding + count * sum(f + b for f, b, _ in contestant.layers)
    p = contestant.problem
    return encoding + count * (sum(p.forward) + sum(p.backward) + sum(p.weight_grad or ()))


def _result(
    contestant: Contestant, ranks: tuple[list[Repetition], ...], held: tuple[float, ...]
) -> Result:
    steps = list(zip(*ranks, strict=True))
    seconds = [max(r.end_s for r in step) - min(r.start_s for r in step) for step in steps]
    computing = compute_s(contestant)
    memory, state = max(
        (activations + state, state)
        for activations, state in zip(held, contestant.state_bytes, strict=True)
    )
    return Result(
        contestant.name,
        contestant.engine.value,
        seconds,
        median(sum(r.wire_bytes for r in step) for step in steps),
        median(sum(r.sent_bytes for r in step) for step in steps),
        contestant.expected_bytes,
        memory,
        state,
        contestant.predicted_s,
        computing,
        1 - computing / (len(ranks) * median(seconds)),
        contestant.solver,
        [step[0].delay for step in steps],
        contestant.way,
        contestant.micro_batch_size,
    )


def _measure(
    nodes: list[Node], backbone: Backbone, contestants: list[Contestant], repetitions: int
) -> list[tuple[list[Repetition], float]]:
    """Repetitions of each contestant on a rank, and the bytes that it held, by one clock."""
    import torch.distributed as dist

    # Imports take long and are no part of a step: before the ranks become urgent.
    from tests.benchmarks import data_parallel, relays, sharded  # noqa: F401

    join_urgently(nodes)
    groups = Groups.join()
    runners = []
    for contestant in contestants:
        try:
            runners.append(make_runner(contestant, backbone, groups))
            runners[-1].step()
        except BaseException as error:
            error.add_note(f"contestant {contestant.name}")
            raise
    found: list[list[Repetition]] = [[] for _ in runners]
    gc.collect()
    gc.disable()
    for _ in range(repetitions):
        for runner, repeated in zip(runners, found, strict=True):
            repeated.append(_repeat(runner))
            gc.collect()
    dist.barrier()
    return [(own, runner.held_bytes()) for runner, own in zip(runners, found, strict=True)]


def join_urgently(nodes: list[Node]) -> None:
    """Have this rank on its node, ahead of other processes, in gloo's group."""
    from datetime import timedelta

    import torch.distributed as dist

    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(RT_PRIORITY))
    nodes[int(os.environ["RANK"])].enter()
    os.environ["MASTER_ADDR"] = nodes[0].address
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))


def _repeat(runner: Runner) -> Repetition:
    """One repetition that others' processes did not spoil, or the last try."""
    import torch
    import torch.distributed as dist

    for left in reversed(range(TRIES)):
        dist.barrier()
        sent, own = sent_bytes(), runner.sent_bytes()
        dist.barrier()
        waited, start = _waited_s(), time.perf_counter()
        runner.step()
        end = time.perf_counter()
        share = torch.tensor([(_waited_s() - waited) / (end - start)])
        dist.barrier()
        sent, own = sent_bytes() - sent, runner.sent_bytes() - own
        dist.all_reduce(share, dist.ReduceOp.MAX)
        if share.item() <= MOST_DELAY or not left:
            break
    return Repetition(start, end, sent, own, share.item())


def _waited_s() -> float:
    """How long this thread has been ready to run and did not, since it began (Linux)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
