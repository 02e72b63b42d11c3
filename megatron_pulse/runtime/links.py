"""Point-to-point transfers between pipeline devices, in the plan's order and with bounded waits.

The order of messages is the plan's, so nothing is tagged and no shape travels. On gloo a wait
blocks the host and is bounded there; on NCCL it orders streams, so the host polls the end of the
step's transfers against the same limit.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.schedule.message import Message
from megatron_pulse.planner.schedule.operations import Kind
from megatron_pulse.runtime.failures import FailureBoard, PulseError


@dataclass
class _Transfer:
    message: Message
    tensor: torch.Tensor
    work: dist.Work


@dataclass
class LinkCounts:
    """What a device has sent: bytes of messages (those of forwards, of gradients and of frozen
    components apart), and beside them those of replicated embedders and of encoding in front of
    steps; and the bytes of the messages that it was sent."""

    forward_bytes: int = 0
    gradient_bytes: int = 0
    encoded_bytes: int = 0
    skip_bytes: int = 0
    replica_bytes: int = 0
    num_messages: int = 0
    received_bytes: int = 0


class Links:
    """All transfers of one pipeline device.

    ``group`` is the pipeline's process group, whose rank i is pipeline device i.
    """

    def __init__(self, group: dist.ProcessGroup, board: FailureBoard, timeout_s: float) -> None:
        self._group = group
        self._board = board
        self._timeout_s = timeout_s
        self._blocking = dist.get_backend(group) == "gloo"
        self._sends: list[_Transfer] = []
        self._receives: dict[Message, _Transfer] = {}
        self.traffic = LinkCounts()

    def issue(
        self,
        ops: Sequence[tuple[bool, Message]],
        outgoing: dict[Message, torch.Tensor],
        make_buffer: Callable[[Message], torch.Tensor],
    ) -> None:
        """Start one round: every send of ``outgoing`` and every receive, as one group.

        ``make_buffer`` returns an empty tensor of a message's shape and dtype.
        """
        p2p, transfers = [], []
        for is_send, message in ops:
            tensor = outgoing.pop(message).contiguous() if is_send else make_buffer(message)
            if is_send:
                self._count(message, tensor)
            else:
                self.traffic.received_bytes += tensor.nbytes
            peer = dist.get_global_rank(
                self._group, message.destination if is_send else message.source
            )
            p2p.append(dist.P2POp(dist.isend if is_send else dist.irecv, tensor, peer, self._group))
            transfers.append((is_send, message, tensor))
        # To gloo a group is nothing, and one by one it says which of them failed.
        works = []
        for part in [[i] for i in range(len(p2p))] if self._blocking else [range(len(p2p))]:
            try:
                works += dist.batch_isend_irecv([p2p[i] for i in part])
            except RuntimeError as error:
                others = len(part) - 1
                doing = f"starting {others} others and" if others else "starting"
                self._fail(doing, ops[part[0]][1], error)
        # NCCL answers a group with one handle, gloo with one per transfer.
        if len(works) != len(transfers):
            works = works * len(transfers)
        for (is_send, message, tensor), work in zip(transfers, works, strict=True):
            transfer = _Transfer(message, tensor, work)
            if is_send:
                self._sends.append(transfer)
            else:
                self._receives[message] = transfer

    def wait(self, message: Message) -> torch.Tensor:
        """The received tensor of ``message``, which must have been issued."""
        transfer = self._receives.pop(message)
        self._wait(transfer, "receiving")
        return transfer.tensor

    def release(self, is_complete: Callable[[Message], bool]) -> None:
        """Let go of sends that the plan proves complete (their wait returns at once)."""
        kept = []
        for transfer in self._sends:
            if is_complete(transfer.message):
                self._wait(transfer, "sending")
            else:
                kept.append(transfer)
        self._sends = kept

    def drain(self) -> None:
        """Wait, within the time limit, for everything that is still under way."""
        pending = [*self._sends, *self._receives.values()]
        for transfer in pending:
            self._wait(transfer, "sending" if transfer in self._sends else "receiving")
        if not self._blocking:
            self._poll(pending)
        self._sends.clear()
        self._receives.clear()

    def abandon(self) -> None:
        """Forget everything under way (after an error)."""
        self._sends.clear()
        self._receives.clear()

    def broadcast(self, tensor: torch.Tensor, device: int, what: str) -> None:
        """Make ``tensor`` on all devices what it is on ``device``, in place."""
        source = dist.get_global_rank(self._group, device)
        self._together(
            lambda: dist.broadcast(tensor, source, self._group, async_op=True),
            f"broadcasting {what} from pipeline device {device} (rank {source})",
        )
        if self._group.rank() == device:
            self.traffic.replica_bytes += tensor.nbytes * (self._group.size() - 1)

    def tell[T](self, value: T, device: int, what: str) -> T:
        """What ``value`` is on ``device``, on all devices; a small one that can be pickled."""
        content = pickle.dumps(value) if self._group.rank() == device else b""
        where = torch.device("cpu" if self._blocking else "cuda")
        size = torch.tensor([len(content)], device=where)
        self.broadcast(size, device, what)
        if self._group.rank() == device:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(where)
        else:
            buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=where)
        self.broadcast(buffer, device, what)
        found: T = pickle.loads(buffer.cpu().numpy().tobytes())
        return found

    def reduce(self, tensor: torch.Tensor, device: int, what: str) -> None:
        """Sum ``tensor`` over all devices into that of ``device`` (others: undefined)."""
        target = dist.get_global_rank(self._group, device)
        self._together(
            lambda: dist.reduce(tensor, target, group=self._group, async_op=True),
            f"adding up {what} on pipeline device {device} (rank {target})",
        )
        if self._group.rank() != device:
            self.traffic.replica_bytes += tensor.nbytes

    def _together(self, start: Callable[[], dist.Work], what: str) -> None:
        try:
            work = start()
            if self._blocking:
                work.wait(timedelta(seconds=self._timeout_s))
                return
            deadline = time.monotonic() + self._timeout_s
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError("Timed out")
                if failure := self._board.first_failure():
                    raise PulseError(f"stopped, because another rank failed: {failure}")
                time.sleep(0.001)
            work.wait()
        except PulseError:
            raise
        except RuntimeError as error:
            timed_out = "imed out" in str(error) or "imeout" in str(error)
            reason = (
                f"no answer from every device within {self._timeout_s:g} s"
                if timed_out
                else f"a device closed the connection (it died or failed): {str(error)[:200]}"
            )
            cause = self._board.first_failure(wait_s=0.5) or self._board.report(f"{what}: {reason}")
            raise PulseError(f"{what}: {reason}\nfirst failure in this job: {cause}") from error

    def _count(self, message: Message, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if message.payload is Payload.ENCODED:
            self.traffic.encoded_bytes += size
        elif message.producer.kind is Kind.FORWARD:
            self.traffic.forward_bytes += size
        else:
            self.traffic.gradient_bytes += size
        if message.payload.value == "skip":
            self.traffic.skip_bytes += size
        self.traffic.num_messages += 1

    def _wait(self, transfer: _Transfer, doing: str) -> None:
        try:
            if self._blocking:
                transfer.work.wait(timedelta(seconds=self._timeout_s))
            else:
                transfer.work.wait()
        except RuntimeError as error:
            self._fail(doing, transfer.message, error)

    def _poll(self, pending: Sequence[_Transfer]) -> None:
        deadline = time.monotonic() + self._timeout_s
        for transfer in pending:
            while not transfer.work.is_completed():
                if time.monotonic() > deadline:
                    error = RuntimeError(f"Timed out after {self._timeout_s:g} s")
                    self._fail("completing", transfer.message, error)
                if failure := self._board.first_failure():
                    raise PulseError(f"stopped, because another rank failed: {failure}")
                time.sleep(0.001)

    def _fail(self, doing: str, message: Message, error: RuntimeError) -> None:
        own = self._group.rank()
        sending = message.source == own
        peer = message.destination if sending else message.source
        peer_rank = dist.get_global_rank(self._group, peer)
        ends = f"{'to' if sending else 'from'} pipeline device {peer} (rank {peer_rank})"
        op = message.producer if sending else message.consumer
        if message.payload is Payload.ENCODED:
            where = f"{doing} {message} {ends}"
        else:
            where = (
                f"{doing} {message.payload.value} {message.name} "
                f"({message.producer} to {message.consumer}; operation {op}, stage {op.stage}, "
                f"microbatch {op.microbatch}) {ends}"
            )
        text = str(error)
        if "imed out" in text or "imeout" in text:
            reason = f"no answer within {self._timeout_s:g} s"
        else:
            reason = f"rank {peer_rank} closed the connection (it died or failed): {text[:200]}"
        # A peer that failed reports before it exits, so its own words come first.
        cause = self._board.first_failure(wait_s=0.5) or self._board.report(f"{where}: {reason}")
        raise PulseError(f"{where}: {reason}\nfirst failure in this job: {cause}") from error
