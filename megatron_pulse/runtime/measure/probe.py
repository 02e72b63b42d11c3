"""Measurement of the links between the ranks of a job, for a cluster file.

``probe`` is collective; rank 0 gets the result. A link is latency + bytes / bandwidth, fitted to
median ping-pong times. Concurrent pairs show the scope in which bandwidth is shared. The efficiency
of collectives and the runtime's overhead per operation are measured as well.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_pulse.planner.cluster.all_to_alls import AllToAllTimes
from megatron_pulse.planner.cluster.cluster import (
    HOST_ADAM_BYTES,
    SMALL_BYTES,
    BandwidthScope,
    Cluster,
    ClusterLink,
)
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind
from megatron_pulse.planner.tune.config import divisors
from megatron_pulse.profile.measurement.machine import (
    device_memory,
    measured_device,
    num_threads,
)
from megatron_pulse.profile.roofline import USABLE, known_device
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.measure.host_copies import host_adam_s, host_copies
from megatron_pulse.runtime.measure.link_times import LinkMeter, PairTimes, StreamTimes
from megatron_pulse.runtime.measure.op_overhead import operation_s
from megatron_pulse.runtime.measure.probed_devices import (
    ProbedDevice,
    kinds_of_devices,
    rounded,
)

_ALL_REDUCE_S = 0.3
_WARM_UP, _ROUNDS = 2, 5
_SMALL_BYTES = 4096
_BLOCKS, _TURNS, _TURN = 9, 10, 384
"""Number of blocks, turns per block, and width of the matrix product of a turn.

A block takes some milliseconds on a CPU core.
"""
_EXCHANGE_BLOCKS, _EXCHANGE_TURNS = 5, 4
"""The same of all-to-alls; there are half as many turns beyond ``SMALL_BYTES``."""
_EXCHANGED, _MORE_ON_GPUS = (4096, 2**16, 2**20, 2**23, 2**25, 2**28), 8
"""Sizes of all-to-alls in bytes, and how much larger than other messages they may be on GPUs,
where layers of long sequences send hundreds of megabytes."""
_MOST_TIMES = 8.0
"""Limit on the ratio between speeds of small and large collectives."""
_COLLECTIVES = {
    "all_reduce": "allreduce_s",
    "reduce_scatter": "reduce_scatter_s",
    "all_gather": "all_gather_s",
}


@dataclass(frozen=True)
class ProbeSettings:
    """Maximum message size, this rank's device, and the time limit of every wait.

    Without ``all_to_alls``, which context parallelism alone uses, those are not measured.
    """

    name: str
    device: torch.device
    max_bytes: int = 32 * 2**20
    timeout_s: float = 60.0
    planned_device: str | None = None
    all_to_alls: bool = True


@dataclass(frozen=True)
class CollectiveTimes:
    """Time of a collective on the first ranks, and its time predicted from the links."""

    ranks: tuple[int, ...]
    num_bytes: int
    median_s: float
    by_links_s: float
    latency_s: float

    @property
    def efficiency(self) -> float:
        """Fraction of the links' bandwidth reached, excluding latency if below the
        measured time.
        """
        latency_s = self.latency_s if self.latency_s < self.median_s else 0.0
        return (self.by_links_s - latency_s) / (self.median_s - latency_s)


@dataclass(frozen=True)
class ProbeResult:
    """The measured cluster, with the measurements behind it."""

    cluster: Cluster
    pairs: tuple[PairTimes, ...]
    streams: dict[str, StreamTimes]
    all_reduces: tuple[CollectiveTimes, ...]
    backend: str


def probe(
    settings: ProbeSettings, progress: Callable[[str], None] = lambda _: None
) -> ProbeResult | None:
    """Measure links on all ranks of the default process group; None except on rank 0.

    Raises PulseError with one rank only, if nodes hold different numbers of ranks, or if ranks do
    not fill node after node. A wait beyond the process group's time limit raises PulseError too.
    """
    return _measured(settings, lambda prober: prober.run(progress))


def probe_device(settings: ProbeSettings) -> DeviceKind:
    """Kind of the device of a job of one rank."""
    return _measured(settings, lambda prober: prober.devices(ranks_on_node=1)[0])


def _measured[T](settings: ProbeSettings, measure: Callable[[_Prober], T]) -> T:
    prober = _Prober(settings)
    try:
        return measure(prober)
    except PulseError:
        raise
    except (RuntimeError, ValueError) as error:  # torch.distributed raises RuntimeError
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise PulseError(f"the probe failed on rank {prober.rank}: {text}") from error


class _Prober:
    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        self.meter = LinkMeter(settings.device, settings.max_bytes)
        self.rank, self.world = self.meter.rank, self.meter.world
        self.cuda = settings.device.type == "cuda"

    def run(self, progress: Callable[[str], None]) -> ProbeResult | None:
        if self.world < 2:
            raise PulseError("links need two ends: start 2 ranks or more")
        nodes, each = self.layout()
        progress("devices")
        devices = self.devices(each)
        progress("pairs inside a node")
        pairs = [self.meter.pair(0, b) for b in sorted({1, each - 1}) if 0 < b < each]
        progress("pairs between nodes")
        across = [self.meter.pair(0, b) for b in sorted({each, self.world - each}) if nodes > 1]
        progress("pairs at once")
        streams = {}
        if each >= 4:
            streams["intra_node"] = self.meter.streams([(i, i + 1) for i in range(0, each - 1, 2)])
        if nodes > 1 and each > 1:
            streams["inter_node"] = self.meter.streams([(i, each + i) for i in range(each)])
        links = {
            "intra_node": self._link("intra_node", pairs, streams),
            "inter_node": self._link("inter_node", across, streams),
        }
        inside = (
            links["intra_node"] or links["inter_node"]
        )  # nodes of one device have no link inside
        assert inside is not None
        first = devices[0]
        cluster = Cluster(
            self.settings.name, nodes, each, first.memory_gb, first.device,
            inside, links["inter_node"], first.usable_memory,
        ).of_kinds(devices)  # fmt: skip
        progress("collectives")
        cluster = replace(cluster, collective_latency=self._collective_latency(cluster))
        sizes = sorted({2**i for i in range(1, self.world.bit_length())} | {each, self.world})
        groups = {
            kind: tuple(self._collective(cluster, kind, n) for n in sizes if n > 1)
            for kind in _COLLECTIVES
        }
        reached = {
            kind: rounded(statistics.median(group.efficiency for group in found))
            for kind, found in groups.items()
        }
        cluster = replace(
            cluster,
            all_reduce_efficiency=reached["all_reduce"],
            reduce_scatter_efficiency=reached["reduce_scatter"],
            all_gather_efficiency=reached["all_gather"],
        )
        cluster = replace(cluster, small_collectives=self._small_collectives(cluster))
        progress("all-to-alls")
        cluster = replace(cluster, all_to_alls=self._all_to_alls(each))
        progress("operations")
        cluster = replace(
            cluster,
            operation_us=rounded(1e6 * self._operation_s()),
            host=(host := self._to_host()),
            host_memory_gbs=None if host is None else self._host_memory_gbs(each),
        )
        self.meter.meet()
        if self.rank:
            return None
        return ProbeResult(
            cluster, (*pairs, *across), streams, groups["all_reduce"], dist.get_backend()
        )

    def layout(self) -> tuple[int, int]:
        """Number of nodes and of ranks per node; a node is a host name and network namespace."""
        places = gather_objects((socket.gethostname(), _network_namespace()))
        order = list(dict.fromkeys(places))
        numbers = [order.index(place) for place in places]
        each = self.world // len(order)
        if numbers != [rank // each for rank in range(self.world)]:
            raise PulseError(
                "ranks must fill one node after another, with equal numbers on each; node of each "
                f"rank: {numbers}"
            )
        return len(order), each

    def _link(
        self, name: str, pairs: list[PairTimes], streams: dict[str, StreamTimes]
    ) -> ClusterLink | None:
        """Median pair's link; sharing follows ``streams``, by default per device."""
        if not pairs:
            return None
        bandwidth = rounded(statistics.median(pair.bandwidth_gbs for pair in pairs))
        latency = rounded(statistics.median(pair.latency_us for pair in pairs))
        shared = streams[name].shared if name in streams else BandwidthScope.DEVICE
        return ClusterLink(self._kind(name, bandwidth), bandwidth, latency, shared)

    def _kind(self, name: str, bandwidth_gbs: float) -> str:
        if name == "inter_node":
            return "infiniband" if self.cuda and _has_infiniband() else "ethernet"
        if not self.cuda:
            return "loopback"
        return "nvlink" if bandwidth_gbs > 64 else "pcie"  # PCIe 5 x16 has 64 GB/s one way

    def _collective(self, cluster: Cluster, kind: str, size: int) -> CollectiveTimes:
        """Time a collective, with a size that takes a fraction of a second by the
        links' figures.
        """
        ranks, seconds_by_links = tuple(range(size)), getattr(cluster, _COLLECTIVES[kind])
        num_bytes = self.settings.max_bytes
        while num_bytes > 2**16 and seconds_by_links(num_bytes, ranks) > _ALL_REDUCE_S:
            num_bytes //= 2
        measured = self._seconds_of(kind, ranks, num_bytes)
        by_links, latency = (seconds_by_links(count, ranks) for count in (num_bytes, 1e-9))
        return CollectiveTimes(ranks, num_bytes, measured, by_links, latency)

    def _seconds_of(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Median seconds of an fp32 collective on ``ranks``; the slowest rank counts."""
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.settings.timeout_s))
        seconds = []
        if self.rank in ranks:
            count = max(1, num_bytes // 4 // len(ranks)) * len(ranks)
            whole = torch.ones(count, device=self.settings.device)
            part = torch.ones(count // len(ranks), device=self.settings.device)
            for _ in range(_WARM_UP + _ROUNDS):
                dist.barrier(group)
                self.meter.finish()
                begin = time.perf_counter()
                if kind == "all_reduce":
                    dist.all_reduce(whole, group=group)
                elif kind == "all_gather":
                    dist.all_gather_into_tensor(whole, part, group=group)
                else:
                    dist.reduce_scatter_tensor(part, whole, group=group)
                self.meter.finish()
                seconds.append(time.perf_counter() - begin)
            dist.destroy_process_group(group)
        own = statistics.median(seconds[_WARM_UP:]) if seconds else 0.0
        return float(max(gather_objects(own)))

    def _collective_latency(self, cluster: Cluster) -> float:
        """Latency of a small all-reduce of two ranks between computations, relative to their link.

        Tensor-parallel ranks use such all-reduces. Ranks that compute in between must wait for each
        other and be woken. Back-to-back all-reduces are several times faster.
        """
        by_link = cluster.allreduce_s(_SMALL_BYTES, (0, 1))
        after_another_s = self._seconds_of("all_reduce", (0, 1), _SMALL_BYTES)
        return rounded(max(after_another_s, self._added_reduce_s(_SMALL_BYTES)) / by_link)

    def _small_collectives(self, cluster: Cluster) -> float:
        """Speed of all-reduces of ``SMALL_BYTES`` between computations, relative to large ones.

        Latency is excluded. Returns 1 if no larger ones were measured.
        """
        if self.settings.max_bytes <= 4 * SMALL_BYTES:
            return 1.0
        added_s = self._added_reduce_s(SMALL_BYTES) - self._added_reduce_s(_SMALL_BYTES)
        sizes = SMALL_BYTES, _SMALL_BYTES
        one_s, small_s = (cluster.allreduce_s(size, (0, 1)) for size in sizes)
        times = (one_s - small_s) / added_s if added_s > 0 else _MOST_TIMES
        return rounded(min(_MOST_TIMES, max(1 / _MOST_TIMES, times)))

    def _added_reduce_s(self, num_bytes: int) -> float:
        """Seconds that an all-reduce of two ranks adds to a turn of computation."""
        group = dist.new_group([0, 1], timeout=timedelta(seconds=self.settings.timeout_s))
        own = 0.0
        if self.rank in (0, 1):
            small = torch.ones(num_bytes // 4).to(self.settings.device)
            own = self._added_s(group, lambda: dist.all_reduce(small, group=group), _BLOCKS, _TURNS)
            dist.destroy_process_group(group)
        return float(max(gather_objects(own)))

    def _added_s(
        self, group: dist.ProcessGroup, call: Callable[[], object], blocks: int, turns: int
    ) -> float:
        """Seconds that ``call``, a collective of ``group``, adds to a turn of computation; median
        over ``blocks`` of ``turns``."""
        factor = torch.ones(_TURN, _TURN, device=self.settings.device)

        def turn_s(calls: bool) -> float:
            dist.barrier(group)
            self.meter.finish()
            begin = time.perf_counter()
            for _ in range(turns):
                factor @ factor
                if calls:
                    call()
            self.meter.finish()
            return (time.perf_counter() - begin) / turns

        added = []
        for _ in range(_WARM_UP + blocks):
            alone, both = turn_s(False), turn_s(True)
            added.append(max(0.0, both - alone))
        return statistics.median(added[_WARM_UP:])

    def _all_to_alls(self, each: int) -> tuple[AllToAllTimes, ...]:
        """Times of all-to-alls of the groups that context parallelism may form in a node of
        ``each`` ranks."""
        if not self.settings.all_to_alls:
            return ()
        return tuple(self._all_to_all(size) for size in divisors(each) if size > 1)

    def _all_to_all(self, size: int) -> AllToAllTimes:
        """Times of all-to-alls between computations, in all groups of ``size`` neighbours at once;
        the slowest rank counts."""
        groups = [
            dist.new_group(
                list(range(first, first + size)),
                timeout=timedelta(seconds=self.settings.timeout_s),
            )
            for first in range(0, self.world, size)
        ]
        own = groups[self.rank // size]
        most = self.settings.max_bytes * (_MORE_ON_GPUS if self.cuda else 1)
        most = max(most, _EXCHANGED[1])
        num_bytes = [count for count in _EXCHANGED if count <= most]
        seconds: list[float] = []
        for count in num_bytes:
            call = partial(_exchange, count // 4 // size, size, own, self.settings.device)
            turns = _EXCHANGE_TURNS // (1 if count <= SMALL_BYTES else 2)
            found_s = self._added_s(own, call, _EXCHANGE_BLOCKS, turns)
            slowest_s = float(max(gather_objects(found_s)))
            # A larger one that took less was less disturbed: the line rises at every size.
            seconds.append(rounded(max(slowest_s, 1e-9, *seconds[-1:])))
        dist.destroy_process_group(own)
        return AllToAllTimes(size, tuple(num_bytes), tuple(seconds))

    def _operation_s(self) -> float:
        """Overhead in seconds of an operation with an empty layer; the slowest rank counts.

        Every rank runs its own pipeline.
        """
        groups = [dist.new_group([rank]) for rank in range(self.world)]
        seconds = operation_s(groups[self.rank], self.settings.device)
        return float(max(gather_objects(seconds)))

    def _to_host(self) -> ClusterLink | None:
        """Link to the host of the slowest device while all copy.

        None for CPUs, whose copies would take time from computation.
        """
        self.meter.meet()
        measured = gather_objects(host_copies(self.settings.device) if self.cuda else None)
        found = [each for each in measured if each is not None]
        if len(found) < len(measured):
            return None
        gbs, latency_us = min(b for b, _ in found), max(latency for _, latency in found)
        return ClusterLink("pcie", rounded(gbs), rounded(latency_us), BandwidthScope.DEVICE)

    def _host_memory_gbs(self, each: int) -> float:
        """Memory bandwidth of Adam in GB/s per node while all ``each`` ranks run it."""
        self.meter.meet()
        slowest_s = max(gather_objects(host_adam_s()))
        return rounded(each * HOST_ADAM_BYTES / slowest_s / 1e9)

    def devices(self, ranks_on_node: int) -> list[DeviceKind]:
        """Kind of each rank's device; raises PulseError if ``--device`` names one for several."""
        device, usable = self.settings.device, USABLE if self.cuda else 1.0
        name = measured_device(device, num_threads(device))
        known = known_device(name) if self.cuda else None
        figures = None
        if known is None and self.settings.planned_device is None:
            figures = DeviceFigures(*self._figures())
        memory = device_memory(device, ranks_on_node)
        mine = ProbedDevice(known.name if known else name, memory, figures, known is not None)
        found = gather_objects(mine)
        planned, names = self.settings.planned_device, sorted({one.name for one in found})
        if planned is not None and len(names) > 1:
            raise PulseError(
                f"--device {planned} names one device, but ranks have {' and '.join(names)}. Leave "
                "it out, and name the device of each kind in the file"
            )
        return kinds_of_devices(found, usable, planned)

    def _figures(self) -> tuple[float, float]:
        """TFLOP/s of a matrix product and GB/s of a copy, all ranks at once."""
        size = 8192 if self.cuda else 768
        dtype = torch.float32
        if self.cuda:
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
        left = torch.ones(size, size, dtype=dtype, device=self.settings.device)
        source = torch.ones(2**24, device=self.settings.device)
        target = torch.empty_like(source)
        product_s = self.meter.fastest(lambda: left @ left)
        copy_s = self.meter.fastest(lambda: target.copy_(source))
        return 2 * size**3 / product_s / 1e12, 2 * 4 * len(source) / copy_s / 1e9


def _exchange(num_elements: int, size: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """All-to-all of ``num_elements`` in fp32 for each of ``size`` ranks, into new memory as in a
    run."""
    rows = torch.empty(size * num_elements, device=device)
    counts = [num_elements] * size
    dist.all_to_all_single(torch.empty_like(rows), rows, counts, counts, group=group)


def _network_namespace() -> int:
    """Identity of the network namespace; processes in different ones count as different nodes."""
    try:
        return os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return 0


def _has_infiniband() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())
