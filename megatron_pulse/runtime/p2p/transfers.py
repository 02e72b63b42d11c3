"""Point-to-point transfers between pipeline devices, in the plan's order and with bounded waits.

Messages have no tags and no shapes, because the plan fixes their order. On gloo a wait blocks the
host and is bounded there. On NCCL a wait orders streams, and the host waits once, for the end of a
step's transfers. The host gives up when no transfer completes within the limit.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.program.communication import CommunicationPlan
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.runtime.failure_board import FailureBoard, PulseError
from megatron_pulse.runtime.p2p.channels import (
    OPENERS,
    Channel,
    PendingTransfer,
    on_device,
)
from megatron_pulse.runtime.p2p.comm_buffers import BufferPool
from megatron_pulse.runtime.watchdog.progress import PROGRESS, of_message

CPU = torch.device("cpu")

_LOOK_S = 1.0
"""Seconds between checks of the job's store for a failure of another rank."""

_PATIENCE = 10.0
"""Timeout before the first step, as a multiple of the usual one, since loading times may differ."""

_CLOSED = (
    "onnection closed",
    "onnection reset",
    "roken pipe",
    "remote process exited",
    "closed by",
)
"""Fragments of the errors that gloo and NCCL raise for a closed connection."""


@dataclass
class _Transfer:
    """A message in flight, or a collective ``what``; on a stream, ``tensor`` is a communication
    buffer.
    """

    work: PendingTransfer
    what: Message | str
    tensor: torch.Tensor


@dataclass
class TrafficBytes:
    """Traffic of a device in bytes.

    Sent messages are counted by kind: of forwards, of gradients and of frozen components. Skips are
    also counted apart. ``replica_bytes`` are sent for replicated embedders and for encoding before
    steps.
    """

    forward_bytes: int = 0
    gradient_bytes: int = 0
    encoded_bytes: int = 0
    skip_bytes: int = 0
    replica_bytes: int = 0
    num_messages: int = 0
    received_bytes: int = 0


class Links:
    """All transfers of one pipeline device.

    ``group`` is the pipeline's process group, whose rank i is pipeline device i. Tensors live on
    ``device``; a CPU's travel over gloo, a GPU's over NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        board: FailureBoard,
        timeout_s: float,
        device: torch.device = CPU,
    ) -> None:
        self._group = group
        self._board = board
        self._timeout_s = timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._blocking = device.type == "cpu"
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._place = device
        self._broken = False
        self._channels: dict[tuple[int, int], Channel] = {}
        self._slots = BufferPool()
        self._sends: dict[Message, _Transfer] = {}
        self._receives: dict[Message, _Transfer] = {}
        self._ending: list[tuple[PendingTransfer, Message | str]] = []
        self.traffic = TrafficBytes()

    def connect(self, plan: CommunicationPlan) -> None:
        """Open the channels of ``plan`` that are not open yet. Collective.

        All devices open channels in the same order, so both ends meet at the first closed one and
        no deadlock occurs. Raises PulseError if devices compiled different plans, since messages
        would be mismatched.
        """
        opener = OPENERS["gloo" if self._place.type == "cpu" else "nccl"]
        device = self._group.rank()
        PROGRESS.device, PROGRESS.ranks = device, tuple(dist.get_process_group_ranks(self._group))
        self._require_same("\n".join(map(str, plan.messages)))
        for pair in plan.channels:
            if device in pair and pair not in self._channels:
                try:
                    with on_device(self._place):
                        self._channels[pair] = opener(self._group, *pair, self._timeout_s)
                except RuntimeError as error:
                    self._fail("connecting", pair, error)

    def _require_same(self, messages: str) -> None:
        own = bytearray(hashlib.sha256(messages.encode()).digest())
        digest = torch.frombuffer(own, dtype=torch.uint8).to(self._place)
        found = [torch.empty_like(digest) for _ in range(self._group.size())]
        limit_s = _PATIENCE * self._timeout_s
        try:
            work = dist.all_gather(found, digest, self._group, async_op=True)
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            self._fail("", "comparing the programs of all pipeline devices", error, limit_s)
        if others := [d for d, theirs in enumerate(found) if not torch.equal(theirs, found[0])]:
            raise PulseError(
                f"pipeline devices {', '.join(map(str, others))} have another order of messages "
                "than device 0. Give all ranks the same plan, profile and version"
            )

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` (on a stream, a copy); the tensor is kept until released."""
        channel = self._channel(message)
        if channel.on_stream:
            tensor = self._slots.take(tensor, tensor.device).copy_(tensor.detach())
        else:
            tensor = tensor.contiguous()
        self._count(message, tensor)
        self._sends[message] = self._started(message, tensor, channel.send)

    def receive(self, message: Message, like: torch.Tensor) -> None:
        """Start receiving ``message`` with shape and dtype of ``like``, which may be a
        meta tensor.
        """
        channel = self._channel(message)
        if channel.on_stream:
            buffer = self._slots.take(like, self._place)
        else:
            buffer = torch.empty_like(like, device=self._place)
        self.traffic.received_bytes += buffer.nbytes
        self._receives[message] = self._started(message, buffer, channel.receive)

    def wait(self, message: Message) -> torch.Tensor:
        """Wait for ``message`` and return its tensor."""
        transfer = self._receives.pop(message)
        self._wait(transfer)
        if not self._channel(message).on_stream:
            return transfer.tensor
        tensor = transfer.tensor.clone()
        self._slots.give(transfer.tensor)
        return tensor

    def complete_sends(self, messages: Iterable[Message]) -> None:
        """Release sends that the plan proves complete, so their wait returns at once."""
        for message in messages:
            if (transfer := self._sends.pop(message, None)) is not None:
                self._wait(transfer)
                if self._channel(message).on_stream:
                    self._slots.give(transfer.tensor)

    def release(self, messages: Iterable[Message]) -> None:
        """Release sends that are complete by the plan's times, on streams only.

        Without streams the host continues, and ``complete_sends`` releases them once
        the plan proves completion.
        """
        self.complete_sends(message for message in messages if self._channel(message).on_stream)

    def drain(self) -> None:
        """Wait within the time limit for all transfers in flight."""
        self.complete_sends(list(self._sends))
        for message in list(self._receives):
            self.wait(message)
        self._finish()
        self._slots.clear()  # other streams and other work may now use the memory

    def abandon(self) -> None:
        """Drop all transfers in flight after an error.

        Streams still execute them, and later messages would be mismatched. Further messages are
        refused.
        """
        under_way = bool(self._sends or self._receives or self._ending)
        self._broken |= under_way and any(c.on_stream for c in self._channels.values())
        self._sends.clear()
        self._receives.clear()
        self._ending.clear()
        self._slots.clear()

    def broadcast(self, tensor: torch.Tensor, device: int, what: str) -> None:
        """Broadcast ``tensor`` from ``device`` to all devices, in place."""
        source = dist.get_global_rank(self._group, device)
        self._together(
            lambda: dist.broadcast(tensor, source, self._group, async_op=True),
            tensor,
            f"broadcasting {what} from pipeline device {device} (rank {source})",
        )
        if self._group.rank() == device:
            self.traffic.replica_bytes += tensor.nbytes * (self._group.size() - 1)

    def broadcast_object[T](self, value: T, device: int, what: str) -> T:
        """Broadcast a small picklable ``value`` from ``device``; the host waits."""
        content = pickle.dumps(value) if self._group.rank() == device else b""
        where = self._place
        size = torch.tensor([len(content)], device=where)
        self.broadcast(size, device, what)
        self._finish()
        if self._group.rank() == device:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
        else:
            buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=where)
        self.broadcast(buffer, device, what)
        self._finish()
        found: T = pickle.loads(buffer.cpu().numpy().tobytes())
        return found

    def reduce(self, tensor: torch.Tensor, device: int, what: str) -> None:
        """Sum ``tensor`` over all devices into that of ``device``; undefined on the others."""
        target = dist.get_global_rank(self._group, device)
        self._together(
            lambda: dist.reduce(tensor, target, group=self._group, async_op=True),
            tensor,
            f"summing {what} on pipeline device {device} (rank {target})",
        )
        if self._group.rank() != device:
            self.traffic.replica_bytes += tensor.nbytes

    def total(self, tensor: torch.Tensor, what: str) -> None:
        """All-reduce ``tensor`` by sum, in place; the host waits."""
        self._together(
            lambda: dist.all_reduce(tensor, group=self._group, async_op=True),
            tensor,
            f"summing {what}",
        )
        self._finish()

    def _channel(self, message: Message) -> Channel:
        return self._channels[message.source, message.destination]

    def _started(
        self,
        message: Message,
        tensor: torch.Tensor,
        start: Callable[[torch.Tensor], PendingTransfer],
    ) -> _Transfer:
        if self._broken:
            raise PulseError("an earlier step failed with messages in flight: start a new process")
        try:
            work = start(tensor)
        except RuntimeError as error:
            self._fail("starting", message, error)
        return _Transfer(work, message, tensor)

    def _together(
        self, start: Callable[[], PendingTransfer], tensor: torch.Tensor, what: str
    ) -> None:
        try:
            work = start()
        except RuntimeError as error:
            self._fail("", what, error)
        self._wait(_Transfer(work, what, tensor))

    def _count(self, message: Message, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if message.payload is Payload.ENCODED:
            self.traffic.encoded_bytes += size
        elif message.producer.kind is OpType.FORWARD:
            self.traffic.forward_bytes += size
        else:
            self.traffic.gradient_bytes += size
        if message.payload.value == "skip":
            self.traffic.skip_bytes += size
        self.traffic.num_messages += 1

    def _wait(self, transfer: _Transfer) -> None:
        """Wait on the host (gloo), or on the stream (NCCL) with a host wait at the end
        of the step.
        """
        try:
            if self._blocking:
                transfer.work.wait(self._limit)
            else:
                transfer.work.wait()
                self._ending.append((transfer.work, transfer.what))
        except RuntimeError as error:
            self._fail("", transfer.what, error)

    def _finish(self) -> None:
        """Block the host until all stream transfers end, as long as some complete within the limit.

        A failed transfer also counts as ended; only its wait raises.
        """
        began = looked = time.monotonic()
        for work, what in self._ending:
            while not work.is_completed():
                now = time.monotonic()
                if now > began + self._timeout_s:
                    self._fail("", what, RuntimeError("Timed out"))
                if now > looked + _LOOK_S:
                    looked = now
                    if failure := self._board.first_failure():
                        raise PulseError(f"stopped, because another rank failed: {failure}")
                time.sleep(0.001)
            began = time.monotonic()
            PROGRESS.moves += 1
            try:
                work.wait()
            except RuntimeError as error:
                self._fail("", what, error)
        self._ending.clear()

    def _fail(
        self,
        doing: str,
        what: Message | tuple[int, int] | str,
        error: RuntimeError,
        limit_s: float | None = None,
    ) -> NoReturn:
        where, peer = (what, "a device") if isinstance(what, str) else self._ends(doing, what)
        text = str(error)
        if "imed out" in text or "imeout" in text:
            of_all = " from every device" if isinstance(what, str) else ""
            reason = f"no response{of_all} within {limit_s or self._timeout_s:g} s"
        elif any(words in text for words in _CLOSED):
            reason = f"{peer} closed the connection (process exited or failed): {text[:200]}"
        else:
            reason = f"{type(error).__name__}: {text[:200]}"
        # A failing peer reports before it exits, so its own text comes first.
        cause = self._board.first_failure(wait_s=0.5) or self._board.report(f"{where}: {reason}")
        raise PulseError(f"{where}: {reason}\nfirst failure in this job: {cause}") from error

    def _ends(self, doing: str, what: Message | tuple[int, int]) -> tuple[str, str]:
        """Description of a transfer or channel, and its peer."""
        device, ranks = self._group.rank(), dist.get_process_group_ranks(self._group)
        source, destination = (what.source, what.destination) if isinstance(what, Message) else what
        peer = destination if source == device else source
        if isinstance(what, Message):
            return of_message(doing, what, device, ranks), f"rank {ranks[peer]}"
        ends = [f"pipeline device {end} (rank {ranks[end]})" for end in what]
        return f"{doing} {' to '.join(ends)}", f"rank {ranks[peer]}"
