"""Message times between ranks: ping-pong of a pair, concurrent streams, and the fit of a link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_pulse.planner.cluster.cluster import BandwidthScope, Link
from megatron_pulse.runtime.collectives import gather_objects

_SECONDS_OF_A_SIZE = 0.1
_FEWEST, _MOST = 5, 50
_WARM_UP = 2


@dataclass(frozen=True)
class PairTimes:
    """One-way message times between two ranks, and the link fitted to their medians."""

    ranks: tuple[int, int]
    num_bytes: tuple[int, ...]
    median_s: tuple[float, ...]
    spread_s: tuple[float, ...]
    latency_us: float
    bandwidth_gbs: float


@dataclass(frozen=True)
class StreamTimes:
    """One-way bandwidths of one pair alone, and of several pairs at once."""

    num_pairs: int
    alone_gbs: float
    at_once_gbs: float

    @property
    def shared(self) -> BandwidthScope:
        """Shared by the node if each pair's bandwidth drops closer to its share than to
        the whole.
        """
        slower = self.alone_gbs / self.at_once_gbs
        return BandwidthScope.NODE if slower > (1 + self.num_pairs) / 2 else BandwidthScope.DEVICE


def fit_link(num_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit a link to median message times, with sizes in ascending order.

    Latency is the shortest time of any size, which is least disturbed by other work. Bandwidth is
    the least-squares slope through the four largest sizes. Smaller messages may fit caches or a
    switch's burst allowance. Raises ValueError if time does not grow with size.
    """
    latency_s = min(seconds)
    sizes: np.ndarray = np.asarray(num_bytes[-4:], float)
    times = np.asarray(seconds[-4:], float) - latency_s
    per_byte = float(sizes @ times / (sizes @ sizes))
    if per_byte <= 0:
        raise ValueError(
            "the largest messages took no longer than small ones; give a larger --max-mb"
        )
    return Link(latency_s, 1 / per_byte)


class LinkMeter:
    """Measures between ranks of the default process group. All methods are collective."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device, self.max_bytes = device, max_bytes
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def meet(self) -> None:
        """Barrier over all ranks."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.finish()

    def finish(self) -> None:
        """Wait for outstanding work of this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.uint8, device=self.device)

    def pair(self, a: int, b: int) -> PairTimes:
        """Times of ping-pong between two ranks while others wait; returned on every rank."""
        found: list[Any] = [None]
        if self.rank == a:
            found = [self._ping(b)]
        elif self.rank == b:
            self._pong(a)
        self.meet()
        dist.broadcast_object_list(found, src=a)
        sizes, medians, spreads = found[0]
        link = fit_link(sizes, medians)
        return PairTimes(
            (a, b), sizes, medians, spreads, link.latency_s * 1e6, link.bytes_per_s / 1e9
        )

    def _ping(self, peer: int) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        rows: list[tuple[int, float, float]] = []
        size = 64
        while size <= self.max_bytes and (not rows or rows[-1][1] < _SECONDS_OF_A_SIZE):
            self._order(peer, _WARM_UP, size)
            estimate = statistics.median(self._round_trips(peer, _WARM_UP, size))
            rounds = int(min(max(_SECONDS_OF_A_SIZE / estimate, _FEWEST), _MOST))
            self._order(peer, rounds, size)
            halves = [trip / 2 for trip in self._round_trips(peer, rounds, size)]
            low, middle, high = map(float, np.percentile(halves, [25, 50, 75]))
            rows.append((size, middle, high - low))
            size *= 4
        self._order(peer, 0, 0)
        sizes, medians, spreads = zip(*rows, strict=True)
        return sizes, medians, spreads

    def _order(self, peer: int, rounds: int, size: int) -> None:
        dist.send(torch.tensor([rounds, size], device=self.device), peer)

    def _round_trips(self, peer: int, rounds: int, size: int) -> list[float]:
        message = self._bytes(size)
        seconds = []
        for _ in range(rounds):
            self.finish()
            begin = time.perf_counter()
            dist.send(message, peer)
            dist.recv(message, peer)
            self.finish()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def _pong(self, peer: int) -> None:
        order = torch.zeros(2, dtype=torch.int64, device=self.device)
        while True:
            dist.recv(order, peer)
            rounds, size = order.tolist()
            if not rounds:
                return
            message = self._bytes(size)
            for _ in range(rounds):
                dist.recv(message, peer)
                dist.send(message, peer)
                self.finish()

    def streams(self, pairs: list[tuple[int, int]]) -> StreamTimes:
        alone = self._stream(pairs[:1])
        return StreamTimes(len(pairs), alone, self._stream(pairs))

    def _stream(self, pairs: list[tuple[int, int]]) -> float:
        """One-way GB/s of the first pair while all pairs send; equal on every rank."""
        seconds, size, count = 0.0, min(self.max_bytes, 2**20), 0
        peers = dict(pairs) | {b: a for a, b in pairs}
        sends = self.rank in dict(pairs)
        for count in (2, 16):  # the first is warm-up
            self.meet()
            begin = time.perf_counter()
            if self.rank in peers:
                message, answer = self._bytes(size), self._bytes(1)
                peer = peers[self.rank]
                for _ in range(count):
                    dist.send(message, peer) if sends else dist.recv(message, peer)
                dist.recv(answer, peer) if sends else dist.send(answer, peer)
                self.finish()
            seconds = time.perf_counter() - begin
        return float(count * size / max(gather_objects(seconds if sends else 0.0)) / 1e9)

    def fastest(self, call: Callable[[], Any]) -> float:
        seconds = []
        self.meet()
        for _ in range(_FEWEST):
            begin = time.perf_counter()
            call()
            self.finish()
            seconds.append(time.perf_counter() - begin)
        return min(seconds)
