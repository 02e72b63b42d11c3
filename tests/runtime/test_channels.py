"""Orders of messages on the double of NCCL: what the check accepts ends, what it refuses hangs."""

from __future__ import annotations

import contextlib
import os
import random
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.program.device_program import Event, Receive, Run, Send, Wait
from megatron_pulse.planner.program.nccl_check import check_events
from megatron_pulse.runtime.p2p.channels import PendingTransfer
from tests.planner.schedules import wave
from tests.planner.test_channels import shuffled
from tests.planner.test_nccl import Programs, compiled, programs
from tests.ranks import run_ranks
from tests.runtime.nccl_double import ONE, VARIABLE, DoubleChannel, forget_workers

RANKS, CASES = 3, 4
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.4)


def _play(events: list[Event], limit: timedelta) -> bool:
    """True if this rank finished; received messages must equal the sent ones."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    forget_workers()
    messages = [e.message for e in events if isinstance(e, Send | Receive)]
    numbers = {m: sum(map(ord, str(m))) for m in messages}
    channels = {
        pair: DoubleChannel(group, *pair, 60.0)
        for pair in sorted({(m.source, m.destination) for m in messages})
    }
    works: dict[object, tuple[PendingTransfer, torch.Tensor]] = {}
    with contextlib.suppress(RuntimeError):
        for event in events:
            match event:
                case Send(message) | Receive(message):
                    channel = channels[message.source, message.destination]
                    sends = message.source == rank
                    tensor = torch.full((3,), float(numbers[message] if sends else -1))
                    start = channel.send if sends else channel.receive
                    works[message] = start(tensor), tensor
                case Wait(message):
                    work, tensor = works[message]
                    work.wait(limit)
                    assert tensor.tolist() == [float(numbers[message])] * 3
                case Run():
                    pass
        for work, _ in works.values():
            work.wait(limit)
        return True
    return False


def _play_all(cases: list[tuple[Programs, bool]]) -> list[bool]:
    os.environ[VARIABLE] = ONE
    dist.init_process_group("gloo")
    ended = []
    for events, accepted in cases:
        ended.append(_play(events[dist.get_rank()], LONG if accepted else SHORT))
        dist.barrier()
    return ended


def test_what_the_check_refuses_hangs_on_the_double() -> None:
    """Messages of a device share one worker."""
    schedule, rng = wave(fold(RANKS), 3), random.Random(5)
    good = programs(schedule, compiled(schedule, 1))
    cases: dict[bool, list[tuple[Programs, bool]]] = {True: [(good, True)], False: []}
    while min(map(len, cases.values())) < CASES:
        mixed = shuffled(rng, good)
        accepted = not check_events(mixed)
        cases[accepted].append((mixed, accepted))
    chosen = [case for found in cases.values() for case in found[:CASES]]
    ended = run_ranks(RANKS, _play_all, chosen)
    for number, (_, accepted) in enumerate(chosen):
        assert all(of_rank[number] for of_rank in ended) == accepted, number
