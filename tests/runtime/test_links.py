"""The end of a step where waits order streams: the host waits once, and says what did not end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Operation
from megatron_pulse.runtime.failure_board import PulseError, default_board
from megatron_pulse.runtime.p2p.transfers import Links

GRADIENT = Message(
    Operation.parse("B1:2"), Operation.parse("B0:2"), Payload.BOUNDARY, "0", source=0, destination=0
)


class StreamWork:
    """A transfer on a stream: ``wait`` returns at once, unless it has failed, and then only once it
    has ended."""

    def __init__(self, seconds: float, error: str = "") -> None:
        self.ended = threading.Event()
        self.error = error
        if seconds < 60:
            threading.Timer(seconds, self.ended.set).start()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self.ended.is_set() and self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


@pytest.fixture
def links() -> Iterator[Links]:
    """Links of one process that treats its group's waits as ordering streams."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    made = Links(dist.group.WORLD, default_board(), timeout_s=2.0)
    made._blocking = False
    yield made
    dist.destroy_process_group()


def under_way(links: Links, *works: StreamWork) -> None:
    links._ending += [(work, GRADIENT) for work in works]


def test_a_channel_whose_other_end_does_not_come_is_named(links: Links) -> None:
    """With the limit of links, not the group's."""
    links._timeout_s = 0.3
    plan = SimpleNamespace(messages=(), channels=((0, 0),))
    with pytest.raises(PulseError) as raised:
        links.connect(plan)  # type: ignore[arg-type]
    me = "pipeline device 0 (rank 0)"
    assert str(raised.value).startswith(f"connecting {me} to {me}: no response within 0.3 s")


def test_the_host_waits_as_long_as_something_ends(links: Links) -> None:
    """Longer than the limit in all, and not longer than until the last has ended."""
    under_way(links, *(StreamWork(0.8 * n) for n in range(1, 4)))
    began = time.monotonic()
    links.drain()
    assert 2.3 < time.monotonic() - began < 200
    links.drain()  # of the next step, which has sent nothing


def test_what_does_not_end_is_named(links: Links) -> None:
    under_way(links, StreamWork(0.1), StreamWork(1e9))
    with pytest.raises(PulseError) as raised:
        links.drain()
    assert str(raised.value).startswith(
        "sending boundary 0 (B1:2 to B0:2; operation B1:2, stage 1, microbatch 2) to pipeline "
        "device 0 (rank 0): no response within 2 s"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NCCL communicator was aborted on rank 0", "RuntimeError: NCCL communicator was aborted"),
        ("remote process exited or there was a network error", "closed the connection"),
    ],
)
def test_a_transfer_that_failed_has_ended_too(links: Links, error: str, said: str) -> None:
    """An error completes it; only its wait raises. Not everything is a closed connection."""
    under_way(links, StreamWork(0.1, error))
    with pytest.raises(PulseError, match=said) as raised:
        links.drain()
    assert ("closed the connection" in str(raised.value)) == ("exited" in error)


def test_another_ranks_failure_ends_the_wait(links: Links) -> None:
    """The failure board is read about once a second, not at every poll of the transfer."""
    links._timeout_s = 30.0
    asked: list[float] = []
    first_failure = links._board.first_failure

    def counted(wait_s: float = 0.0) -> str | None:
        asked.append(time.monotonic())
        return first_failure(wait_s)

    links._board.first_failure = counted  # type: ignore[method-assign]
    links._board.report("in F3:1: out of memory")
    under_way(links, StreamWork(1e9))
    with pytest.raises(PulseError, match="another rank failed: rank 0: in F3:1: out of memory"):
        links.drain()
    assert len(asked) == 1


def test_nothing_holds_what_was_waited_for(links: Links) -> None:
    """Tensors of a step are not kept until its end."""
    from megatron_pulse.runtime.p2p.transfers import _Transfer

    tensor = torch.zeros(3)
    links._channels[0, 0] = SimpleNamespace(on_stream=False)  # type: ignore[assignment]
    links._receives[GRADIENT] = _Transfer(StreamWork(0.0), GRADIENT, tensor)
    assert links.wait(GRADIENT) is tensor
    assert not any(part is tensor for entry in links._ending for part in entry)


class Passing:
    """A channel to oneself whose waits order streams: what was sent is there when it is waited
    for, and not before."""

    on_stream = True

    def __init__(self) -> None:
        self.used: list[int] = []
        self._sent: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> StreamWork:
        self.used.append(tensor.data_ptr())
        self._sent.append(tensor)
        return StreamWork(0.0)

    def receive(self, buffer: torch.Tensor) -> StreamWork:
        self.used.append(buffer.data_ptr())
        work, sent = StreamWork(0.0), self._sent

        def wait(timeout: timedelta = timedelta()) -> bool:
            if sent:  # once more at the end of the step, when there is nothing left
                buffer.copy_(sent.pop(0))
            return True

        work.wait = wait  # type: ignore[method-assign]
        return work


def test_messages_of_streams_go_through_memory_that_is_kept(links: Links) -> None:
    """The number of buffers is that of messages in flight, for any number of messages. A message
    has the tensor's values at the time of sending, and received memory is not shared.
    """
    channel = links._channels[0, 0] = Passing()  # type: ignore[assignment]
    arrived = []
    for i in range(5):
        message = GRADIENT._replace(name=f"{i}")
        tensor = torch.full((4, 3), float(i), requires_grad=True).t()
        links.receive(message, torch.empty(3, 4, device="meta"))
        links.send(message, tensor)
        with torch.no_grad():
            tensor.mul_(-1)
        arrived.append(links.wait(message))
        links.complete_sends([message])
    links.drain()
    assert [a.unique().tolist() for a in arrived] == [[float(i)] for i in range(5)]
    assert not any(a.requires_grad for a in arrived)
    assert len(channel.used) == 10 and len(set(channel.used)) == 2
    assert not {a.data_ptr() for a in arrived} & set(channel.used)
    assert not links._slots._free  # validation may take them in another mode, on another stream


def test_after_a_failed_step_no_message_takes_anothers_place(links: Links) -> None:
    """Messages in flight on a stream stay in flight."""
    links._channels[0, 0] = Passing()  # type: ignore[assignment]
    like = torch.empty(3, device="meta")
    links.abandon()
    links.receive(GRADIENT, like)
    links.abandon()
    with pytest.raises(PulseError, match="failed with messages in flight: start a new process"):
        links.receive(GRADIENT, like)
