"""Emulation of NCCL's use of sent memory: links that release buffers too early are detected."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.runtime import pipeline
from megatron_pulse.runtime.p2p.transfers import Links
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, train
from tests.runtime.nccl_double import LATE, VARIABLE, DoubleChannel
from tests.toys import nested, toy_backbone

CASE = Case("fold", 3, "wave", steps=1)


class Hasty(Links):
    """Keeps nothing that it sends."""

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        super().send(message, tensor)
        del self._sends[message]


class Reusing(Links):
    """Has the next result where one is still to be sent."""

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        super().send(message, tensor)
        self._sends[message].tensor.data.mul_(1.5)


def _train(links: type[Links]) -> Outcome:
    pipeline.Links = links  # type: ignore[attr-defined]
    dist.init_process_group("gloo")
    outcome = train(toy_backbone(9, nested(9, 4)), CASE, None, dist.group.WORLD)
    dist.barrier()
    return outcome


def _losses(links: type[Links]) -> list[float]:
    return [loss for outcome in run_ranks(2, _train, links) for loss in outcome.losses]


def test_memory_that_is_let_go_before_it_was_sent_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NaN where an allocator has it, as other numbers where something has written to it."""
    monkeypatch.setenv(VARIABLE, LATE)
    right = _losses(Links)
    assert all(map(math.isfinite, right)) and len(right) == CASE.num_microbatches
    assert any(map(math.isnan, _losses(Hasty)))
    assert _losses(Reusing) != right


def _send_three() -> list[list[float]]:
    """Final memory of rank 0, and the messages that rank 1 received."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    channel = DoubleChannel(group, 0, 1, 60.0)
    if rank:
        buffers = [torch.empty(2) for _ in range(3)]
        for work in [channel.receive(buffer) for buffer in buffers]:
            work.wait()
        return [buffer.tolist() for buffer in buffers]
    memory = [bytearray(torch.full((2,), float(i)).numpy().tobytes()) for i in range(3)]
    tensors = [torch.frombuffer(one, dtype=torch.float32) for one in memory]
    graph = (torch.ones(2, requires_grad=True) * tensors[1]).sum()  # saves it for its backward
    works = [channel.send(tensor) for tensor in tensors]
    view = tensors[0][1:]
    for work in works:
        work.wait()
    tensors.clear()
    channel._look()
    held = [torch.frombuffer(one, dtype=torch.float32).tolist() for one in memory]
    graph.backward()
    return [*held, view.tolist()]


def test_only_what_nobody_holds_is_poisoned() -> None:
    """A view and a graph hold the first two; of the third nobody has anything after its send."""
    (zeros, ones, freed, view), received = run_ranks(2, _send_three)
    assert (zeros, ones, view) == ([0.0, 0.0], [1.0, 1.0], [0.0])
    assert all(map(math.isnan, freed))
    assert received == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
