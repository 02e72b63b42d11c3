"""FSDP2's and HSDP's communication on units that sleep.

torch's ``fully_shard`` itself is not measured: on a CPU there are no streams. Its reductions, and
its gathers unless a private switch is set, wait there before it goes on; gloo's reduce-scatter
moves twice the bytes; and what its hooks take is not hidden behind a device (``fully_sharded``
shows all three). So its collectives are called here, in its order (tested against it): an
all-gather of each unit ahead of its use, an all-to-all and a sum as reduce-scatter, and for HSDP an
all-reduce of the shards behind it. Nothing but sleeping and waiting is between two operations, as
on a GPU whose host is ahead.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pulse.planner.tune.fsdp.step import (
    REDUCING,
    Sharding,
    gradient_bytes,
    passes,
    peak_bytes,
    step_bytes,
)
from tests.benchmarks.contestant import TIMEOUT_S, Contestant, Runner, counted
from tests.benchmarks.sharded_best import FP32_BYTES, elements
from tests.benchmarks.token_sharing import Calls, SharingGroups, TokenSharing, join
from tests.runtime.emulated import sleep_between, sleep_until


def sharded(contestant: Contestant) -> Runner:
    """A step of ``contestant`` on this rank. Collective."""
    assert contestant.sharding is not None
    way, sharing = contestant.sharding, contestant.sharing
    sent = step_bytes(way)
    if sharing is not None:
        sent += sharing.passes(way.count, range(len(way.units)))
    return counted(_Device(way, sharing).step, sent, lambda: peak_bytes(way))


class _Device:
    """This rank's shards and what is on its way."""

    def __init__(self, way: Sharding, sharing: TokenSharing | None = None) -> None:
        self.way, self.program = way, passes(way)
        world = dist.get_world_size()
        if world != way.num_devices:
            raise ValueError(f"a way for {way.num_devices} devices on {world} ranks")
        first = range(0, world, way.group)
        groups = [list(range(i, i + way.group)) for i in first]
        self.gathers, self.reduces = join(groups), join(groups)
        across = [list(range(i, world, way.group)) for i in range(way.group)]
        self.sums = join(across) if way.replicas > 1 else None
        self.shards = [torch.zeros(elements(unit) // way.group) for unit in way.units]
        units = range(len(way.units))
        self.reduced = [torch.zeros(gradient_elements(way, unit) // way.group) for unit in units]
        # A thread is what a stream is on a GPU: one collective after the other.
        self.reduce_stream, self.sum_stream = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.whole: dict[int, Tensor] = {}
        self.gathering: dict[int, Any] = {}
        self.gradients: dict[int, Tensor] = {}
        self.reducing: list[Future[None]] = []
        self.summing: list[Future[Any]] = []
        groups = None if sharing is None else SharingGroups(sharing)
        self.exchanges: dict[tuple[int, bool], Calls] = {}
        for unit in range(len(way.units) if groups is not None else 0):
            assert groups is not None and sharing is not None
            backward = (*sharing.recompute[unit], *sharing.backward[unit])
            self.exchanges[unit, True] = groups.calls(sharing.forward[unit])
            self.exchanges[unit, False] = groups.calls(backward)

    def step(self) -> None:
        asked, clock = 0, time.perf_counter()
        for shard in self.reduced:
            shard.zero_()
        for at, op in enumerate(self.program):
            for ahead in self.program[asked : at + 1 + self.way.prefetch]:
                if ahead.gathers:
                    self._gather(ahead.unit)
            asked = at + 1 + self.way.prefetch
            exchanges = self.exchanges.get((op.unit, op.forward), ())
            clock = sleep_between(self._ready(op.unit, clock), op.seconds(self.way), exchanges)
            if not op.forward:
                made = torch.zeros(gradient_elements(self.way, op.unit))
                if op.unit in self.gradients:
                    self.gradients[op.unit].add_(made)
                else:
                    self.gradients[op.unit] = made
            sleep_until(clock)
            if op.frees:
                del self.whole[op.unit]
            if op.reduces:
                clock = self._room(clock)
                self._reduce(op.unit, op.last)
        for futures in (self.reducing, self.summing):  # the latter are made by the former
            for future in futures:
                future.result(TIMEOUT_S)
            futures.clear()

    def _gather(self, unit: int) -> None:
        whole = torch.empty(elements(self.way.units[unit]))
        work = dist.all_gather_into_tensor(
            whole, self.shards[unit], group=self.gathers, async_op=True
        )
        self.gathering[unit], self.whole[unit] = work, whole

    def _ready(self, unit: int, clock: float) -> float:
        """When the unit's parameters are there and the operation before has ended."""
        work = self.gathering.pop(unit, None)
        if work is None or work.is_completed():
            return clock
        work.wait()
        return max(clock, time.perf_counter())

    def _room(self, clock: float) -> float:
        """When fewer than ``REDUCING`` reductions are on their way."""
        while len(self.reducing) >= REDUCING:
            oldest = self.reducing.pop(0)
            late = not oldest.done()
            oldest.result(TIMEOUT_S)
            clock = max(clock, time.perf_counter()) if late else clock
        return clock

    def _reduce(self, unit: int, last: bool) -> None:
        gradient = self.gradients.pop(unit)
        parts = torch.empty_like(gradient)
        work = dist.all_to_all_single(parts, gradient, group=self.reduces, async_op=True)

        def finish() -> None:
            work.wait()
            shard = self.reduced[unit]
            shard.add_(parts.view(self.way.group, -1).sum(0))
            if last and self.sums is not None:
                self.summing.append(self.sum_stream.submit(dist.all_reduce, shard, group=self.sums))

        self.reducing.append(self.reduce_stream.submit(finish))


def gradient_elements(way: Sharding, unit: int) -> int:
    """Emulated fp32 elements of a unit's gradients in transit, which the group divides."""
    count = gradient_bytes(way, unit) / FP32_BYTES
    return way.group * math.ceil(count / way.group)
