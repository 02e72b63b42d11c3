"""Cluster of a plan: nodes of devices, their memory, and the links between them.

A cluster is a small YAML file. It is a preset beside this module, the output of ``pulse probe``
inside a job, or a file of the user. Ranks fill one node after another. A link's bandwidth is that
from one device to one other, in one direction. If ``shared`` is ``node``, devices that send at once
divide it. Devices may be of several kinds (``device_kinds``).

Collectives are rings (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). A reduce-scatter of n bytes over r ranks takes r - 1 steps of n / r bytes. An
all-gather takes as many, and an all-reduce is one after the other.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import yaml
from annotated_types import Ge, Le

from megatron_pulse.errors import UserError, format_faults, unknown_name
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_yaml, write_with_checksum
from megatron_pulse.json_validation import Count, OneOf, Some, Text, faults_of
from megatron_pulse.planner.cluster.all_to_alls import AllToAllTimes, all_to_all_faults
from megatron_pulse.planner.cluster.device_kinds import (
    DeviceFigures,
    DeviceKind,
    DeviceOfFile,
    KindsOfFile,
    Memory,
    NodesOfFile,
    Positive,
    UsableShare,
    kind_faults,
    kinds_of_record,
    num_nodes,
    record_of_kinds,
)
from megatron_pulse.profile.roofline import PRESETS, Device
from megatron_pulse.yaml_subset import PlainDumper

SMALL_BYTES = 2**20
"""Size up to which a collective fits a processor's cache, and NCCL's protocols for few bytes."""

HOST_ADAM_BYTES = 28
"""Bytes of host memory per parameter that Adam on the CPU reads and writes, in fp32.

It reads weight, gradient and both moments, and writes all but the gradient.
"""


KINDS = (
    *("nvlink", "hccs", "pcie", "shared-memory", "loopback"),
    *("infiniband", "roce", "ethernet", "other"),
)
"""Kinds of links."""

MOST_DEVICES = 100_000
"""The largest cluster that plans can be made for."""

_Microseconds = Annotated[float, Ge(0), Le(1e9)]


class ClusterError(UserError):
    """A cluster that does not exist, or an invalid cluster file; lists every fault."""


class BandwidthScope(StrEnum):
    """Scope of a link's bandwidth: each device alone, or the devices of a node together."""

    DEVICE = "device"
    NODE = "node"


@dataclass(frozen=True)
class ClusterLink:
    """A kind of connection: GB/s of one message one way, and latency in microseconds."""

    kind: Annotated[str, OneOf(KINDS)]
    bandwidth_gbs: Annotated[
        Positive, "GB/s from one device to one other, or to the host, one direction"
    ]
    latency_us: Annotated[_Microseconds, "microseconds of an empty message"]
    shared: Annotated[
        BandwidthScope,
        "device (each device has this bandwidth) or node (all of a node share it)",
    ]

    def used_by(self, users: int) -> Link:
        """Link of one of ``users`` devices of a node that send over it at once."""
        share = max(users, 1) if self.shared is BandwidthScope.NODE else 1
        return Link(self.latency_us / 1e6, self.bandwidth_gbs * 1e9 / share)


class _Links(TypedDict):
    """``inter_node`` is for several nodes, ``host`` for activation and optimizer offload."""

    intra_node: ClusterLink
    inter_node: NotRequired[ClusterLink]
    host: NotRequired[ClusterLink]


class _Common(TypedDict):
    """Content of a cluster's file, apart from its devices."""

    name: Text
    devices_per_node: Count
    usable_memory: NotRequired[UsableShare]
    links: _Links
    all_reduce_efficiency: NotRequired[
        Annotated[Positive, "share of the bandwidth that collectives reach"]
    ]
    reduce_scatter_efficiency: NotRequired[Annotated[Positive, "share that reduce-scatters reach"]]
    all_gather_efficiency: NotRequired[Annotated[Positive, "share that all-gathers reach"]]
    collective_latency: NotRequired[
        Annotated[Positive, "share of the latency that applies to a collective's ring"]
    ]
    small_collectives: NotRequired[
        Annotated[Positive, "speed of small collectives relative to large ones"]
    ]
    host_memory_gbs: NotRequired[
        Annotated[Positive, "GB/s that Adam reads and writes in a node's memory"]
    ]
    operation_us: NotRequired[
        Annotated[_Microseconds, "microseconds that the runtime adds to an operation"]
    ]
    all_to_alls: NotRequired[tuple[AllToAllTimes, ...]]


class _File(_Common):
    """Content of the file of a cluster of equal devices."""

    nodes: Count
    memory_gb: Memory
    device: DeviceOfFile


class _MixedFile(_Common):
    """Content of the file of a cluster with ``kinds`` of devices."""

    kinds: KindsOfFile
    nodes: Some[NodesOfFile]


@dataclass(frozen=True)
class Cluster:
    """``nodes`` times ``devices_per_node`` devices of ``memory_gb`` (10^9 bytes) each.

    ``device`` is a preset of ``profile.devices``, the path of a measured profile, or figures.
    ``usable_memory`` is the share of memory that planning may fill. ``operation_us`` is the
    runtime's overhead per operation in microseconds.

    ``all_reduce_efficiency`` is the share of the links' bandwidth that collectives reach.
    ``reduce_scatter_efficiency`` and ``all_gather_efficiency`` replace it for their collectives, if
    given. ``collective_latency`` is the share of the links' latency that a step of a ring has. The
    first ``SMALL_BYTES`` of a collective are ``small_collectives`` times as fast, apart from
    latency. Tensor-parallel reductions are that small, gradients are not.

    ``all_to_alls`` are measured times of all-to-alls inside a node, which replace those by links.

    ``host`` is the link from a device to pinned memory of its node, if usable. ``host_memory_gbs``
    is the memory bandwidth of Adam on the CPU, for all devices of a node at once.

    ``device_kinds`` are the kinds of the devices, node by node, if they differ. ``memory_gb``,
    ``usable_memory`` and ``device`` are then those of the kind with the least usable memory (see
    ``of_kinds``). ``order`` is the device of each rank (default: rank k is device k).

    Raises ClusterError for values that a file could not have either.
    """

    name: str
    nodes: int
    devices_per_node: int
    memory_gb: float
    device: str | DeviceFigures
    intra_node: ClusterLink
    inter_node: ClusterLink | None = None
    usable_memory: float = 1.0
    all_reduce_efficiency: float = 1.0
    reduce_scatter_efficiency: float | None = None
    all_gather_efficiency: float | None = None
    collective_latency: float = 1.0
    small_collectives: float = 1.0
    operation_us: float = 0.0
    host: ClusterLink | None = None
    host_memory_gbs: float | None = None
    device_kinds: tuple[DeviceKind, ...] = ()
    order: tuple[int, ...] = ()
    all_to_alls: tuple[AllToAllTimes, ...] = ()

    def __post_init__(self) -> None:
        faults = [] if self._plain else list(self._kind_faults())
        _refuse(faults or _file_faults(to_record(self)), f"cluster {self.name!r}")

    @property
    def _plain(self) -> bool:
        return not self.device_kinds and not self.order

    def _kind_faults(self) -> Iterator[str]:
        num = self.num_devices
        if self.order and sorted(self.order) != list(range(num)):
            yield f"order lists each of the devices 0 to {num - 1} once; is {self.order!r:.60}"
        if self.device_kinds and len(self.device_kinds) != num:
            yield f"device_kinds are of {len(self.device_kinds)} devices; there are {num}"
        elif self.device_kinds and self._smallest.figures != (
            *(self.memory_gb, self.usable_memory),
            self.device,
        ):
            yield "memory_gb, usable_memory and device are those of the smallest of device_kinds"
        for name, count in Counter(kind.name for kind in set(self.device_kinds)).items():
            if count > 1:
                yield f"device_kinds: {count} unlike kinds are called {name!r}"

    def of_kinds(self, kinds: Sequence[DeviceKind]) -> Cluster:
        """Cluster with devices of these kinds, node by node; alike kinds make an ordinary one."""
        smallest = min(kinds, key=lambda kind: kind.usable_bytes)
        mixed = len({kind.figures for kind in kinds}) > 1
        return replace(
            self,
            memory_gb=smallest.memory_gb,
            usable_memory=smallest.usable_memory,
            device=smallest.device,
            device_kinds=tuple(kinds) if mixed else (),
        )

    @property
    def mixed(self) -> bool:
        """True if the devices are of different kinds."""
        return bool(self.device_kinds)

    @property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """Kinds of the devices, each once, in the order of the devices."""
        return tuple(dict.fromkeys(self.device_kinds)) or (self._smallest,)

    @property
    def _smallest(self) -> DeviceKind:
        if self.device_kinds:
            return min(self.device_kinds, key=lambda kind: kind.usable_bytes)
        return DeviceKind(self.name, self.memory_gb, self.usable_memory, self.device)

    def device_of(self, rank: int) -> int:
        """Device of ``rank`` in the order of the file.

        Raises ClusterError for a rank that the cluster does not have.
        """
        if not 0 <= rank < self.num_devices:
            raise ClusterError(f"{self.name} has ranks 0 to {self.num_devices - 1}; got {rank}")
        return self.order[rank] if self.order else rank

    def kind_of(self, rank: int) -> DeviceKind:
        """Kind of the device of ``rank``."""
        device = self.device_of(rank)
        return self.device_kinds[device] if self.device_kinds else self._smallest

    def with_order(self, order: Sequence[int]) -> Cluster:
        """Cluster whose rank k is this one's rank ``order[k]``, with the nodes and links of its
        device."""
        return replace(self, order=tuple(map(self.device_of, order)))

    def with_memory_gb(self, memory_gb: float) -> Cluster:
        """Cluster whose devices have ``memory_gb``; if mixed, those that have less."""
        if not self.mixed:
            return replace(self, memory_gb=memory_gb)
        return self.of_kinds(
            [replace(k, memory_gb=max(k.memory_gb, memory_gb)) for k in self.device_kinds]
        )

    def only(self, kind: str) -> Cluster:
        """The devices of one kind, in the nodes that have the most of them."""
        each = self.devices_per_node
        names = [one.name for one in self.device_kinds]
        counts = [names[i : i + each].count(kind) for i in range(0, len(names), each)]
        chosen = next(one for one in self.device_kinds if one.name == kind)
        fewer = self._smaller(counts.count(max(counts)), max(counts))
        return fewer.of_kinds([chosen] * fewer.num_devices)

    @property
    def alike_nodes(self) -> bool:
        """True if all nodes have the same devices, in the same order."""
        node = self.device_kinds[: self.devices_per_node]
        return self.device_kinds == node * self.nodes

    def with_nodes(self, nodes: int) -> Cluster:
        """Cluster of ``nodes`` nodes; raises ClusterError if nodes have unlike devices."""
        if not self.mixed:
            return replace(self, nodes=nodes)
        if not self.alike_nodes:
            raise ClusterError(
                f"{self.name}: its nodes have unlike devices, so {nodes} of them can be several "
                "things. Write the nodes that there are into the file"
            )
        node = self.device_kinds[: self.devices_per_node]
        return replace(self, nodes=nodes, device_kinds=node * nodes)

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def part(self, num_devices: int) -> Cluster | None:
        """The first ``num_devices`` devices: whole nodes, or a part of one; None if impossible."""
        if not 0 < num_devices <= self.num_devices:
            return None
        nodes, left = divmod(num_devices, self.devices_per_node)
        if nodes and left:
            return None
        each = left or self.devices_per_node
        alike = self._smaller(nodes or 1, each)
        return alike.of_kinds(self.device_kinds[:num_devices]) if self.mixed else alike

    def _smaller(self, nodes: int, devices_per_node: int) -> Cluster:
        """Cluster of smaller nodes, without kinds of devices."""
        kept = tuple(each for each in self.all_to_alls if devices_per_node % each.ranks == 0)
        alike = replace(self, all_to_alls=kept, device_kinds=(), order=())
        return replace(alike, nodes=nodes, devices_per_node=devices_per_node)

    @property
    def usable_bytes(self) -> float:
        """Bytes that planning may put on any device: those of the smallest kind."""
        return self.memory_gb * 1e9 * self.usable_memory

    @property
    def memory_caution(self) -> str:
        """Warning that plans may fill a device to the last byte; empty if some memory is left."""
        full = [kind for kind in self.kinds if kind.usable_memory == 1]
        if not full:
            return ""
        gb = " and ".join(dict.fromkeys(f"{kind.memory_gb:g}" for kind in full))
        return (
            f"{self.name} lets plans use all {gb} GB of a device. CUDA, NCCL and "
            "fragmentation need memory too: write 'usable_memory: 0.9' into its file, or the share "
            "that your runs can use"
        )

    @property
    def to_host(self) -> Link | None:
        """Link from a device to the memory of its node, one way, with all devices active."""
        return None if self.host is None else self.host.used_by(self.devices_per_node)

    @property
    def peaks(self) -> Device | None:
        """Device for a roofline, of the smallest kind; None if ``device`` is a measured profile."""
        return self._smallest.peaks

    def node_of(self, rank: int) -> int:
        """Node of ``rank``; raises ClusterError for a rank that the cluster does not have."""
        return self.device_of(rank) // self.devices_per_node

    def link(self, rank_a: int, rank_b: int, concurrent: int = 1) -> Link:
        """Link from one rank to another, while ``concurrent`` devices of the node use it."""
        if rank_a == rank_b and self.node_of(rank_a) >= 0:
            return Link()
        return self._kind(rank_a, rank_b).used_by(concurrent)

    def link_between(self, ranks: Sequence[int], concurrent: int = 1) -> Link:
        """Slowest link of the ring through ``ranks`` in this order, with all its links in use.

        ``concurrent`` such rings, on other devices of the same nodes, run at once. Links of a ring
        that leave the same node share the node's bandwidth, and so do links inside it.
        """
        self._check_group(ranks, concurrent)
        ring = list(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True)) if len(ranks) > 1 else []
        users = Counter((self.node_of(a), self.node_of(a) == self.node_of(b)) for a, b in ring)
        links = [
            self._kind(a, b).used_by(
                concurrent * users[self.node_of(a), self.node_of(a) == self.node_of(b)]
            )
            for a, b in ring
        ] or [Link()]
        return Link(max(x.latency_s for x in links), min(x.bytes_per_s for x in links))

    def allreduce_s(self, num_bytes: float, ranks: Sequence[int], concurrent: int = 1) -> float:
        """Seconds of an all-reduce of ``num_bytes`` on every rank: two passes of a ring."""
        return 2 * self._pass_s(num_bytes, ranks, concurrent, self.all_reduce_efficiency)

    def all_gather_s(self, num_bytes: float, ranks: Sequence[int], concurrent: int = 1) -> float:
        """Seconds until every rank has all of ``num_bytes``, of which each rank had its part."""
        efficiency = self.all_gather_efficiency or self.all_reduce_efficiency
        return self._pass_s(num_bytes, ranks, concurrent, efficiency)

    def reduce_scatter_s(
        self, num_bytes: float, ranks: Sequence[int], concurrent: int = 1
    ) -> float:
        """Seconds until every rank has its part of the sum over ranks of ``num_bytes``."""
        efficiency = self.reduce_scatter_efficiency or self.all_reduce_efficiency
        return self._pass_s(num_bytes, ranks, concurrent, efficiency)

    def all_to_all_s(self, num_bytes: float, ranks: Sequence[int], concurrent: int = 1) -> float:
        """Seconds until every rank has sent its part of ``num_bytes`` to each of the others.

        ``num_bytes`` are what one rank has for all, itself included. Messages to all ranks leave at
        once, over the links inside a node and, beside them, over those between nodes.
        ``concurrent`` such groups run at once. No arithmetic delays the messages: the efficiency is
        that of all-gathers. In a node, times in ``all_to_alls`` for as many ranks replace links.
        """
        self._check_group(ranks, concurrent)
        inside = max(Counter(map(self.node_of, ranks)).values())
        for measured in self.all_to_alls:
            if measured.ranks == len(ranks) == inside:
                return measured.time_s(num_bytes)
        num_bytes, seconds = self._as_large(num_bytes), 0.0
        for link, others in (
            (self.intra_node, inside - 1),
            (self.inter_node, len(ranks) - inside),
        ):
            if link is None or not others:
                continue
            used = link.used_by(inside * concurrent)
            efficiency = self.all_gather_efficiency or self.all_reduce_efficiency
            latency_s = used.latency_s * self.collective_latency
            reached = Link(latency_s, used.bytes_per_s * efficiency)
            seconds = max(seconds, reached.time_s(num_bytes * others / len(ranks)))
        return seconds

    def _pass_s(
        self, num_bytes: float, ranks: Sequence[int], concurrent: int, efficiency: float
    ) -> float:
        """Seconds in which every part of ``num_bytes`` passes through ``ranks``.

        ``concurrent`` such groups run at once. One ring over r ranks takes (r - 1) (latency +
        num_bytes / (r bandwidth)). A group with m ranks on each of k nodes, m and k above 1, works
        in two levels. First there is a ring inside each node, then m concurrent rings across nodes,
        each of num_bytes / m. Other groups are one ring at the speed of its slowest link.
        Bandwidths are multiplied by ``efficiency``.
        """
        self._check_group(ranks, concurrent)
        num_bytes = self._as_large(num_bytes)

        def ring_s(num_bytes: float, size: int, link: Link) -> float:
            latency_s = link.latency_s * self.collective_latency
            reached = Link(latency_s, link.bytes_per_s * efficiency)
            return (size - 1) * reached.time_s(num_bytes / size)

        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.node_of(rank), []).append(rank)
        inside = len(next(iter(nodes.values())))
        if any(len(members) != inside for members in nodes.values()):
            ordered = [rank for members in nodes.values() for rank in members]
            return ring_s(num_bytes, len(ranks), self.link_between(ordered, concurrent))
        seconds = ring_s(num_bytes, inside, self.intra_node.used_by(inside * concurrent))
        if len(nodes) > 1:
            across = self._kind(*(members[0] for members in list(nodes.values())[:2]))
            link = across.used_by(inside * concurrent)
            seconds += ring_s(num_bytes / inside, len(nodes), link)
        return seconds

    def _as_large(self, num_bytes: float) -> float:
        """Bytes that a large collective would move in the time of ``num_bytes``."""
        small = min(num_bytes, SMALL_BYTES)
        return small / self.small_collectives + num_bytes - small

    def _kind(self, rank_a: int, rank_b: int) -> ClusterLink:
        if self.node_of(rank_a) == self.node_of(rank_b):
            return self.intra_node
        assert self.inter_node is not None  # the schema requires it for several nodes
        return self.inter_node

    def _check_group(self, ranks: Sequence[int], concurrent: int) -> None:
        for rank in ranks:
            self.node_of(rank)
        if not ranks or len(set(ranks)) != len(ranks) or concurrent < 1:
            raise ClusterError(
                f"a group is one or more different ranks, {concurrent} at once; got {list(ranks)}"
            )


_OF_KIND = ("memory_gb", "device")
"""Values that each kind has of its own."""

_MEASURED = (
    "all_reduce_efficiency",
    "reduce_scatter_efficiency",
    "all_gather_efficiency",
    "collective_latency",
    "small_collectives",
    "operation_us",
    "host_memory_gbs",
)


def to_record(cluster: Cluster) -> dict[str, Any]:
    """Content of the cluster's file; optional values only if they are not the default.

    The file lists devices in their own order, whatever the ``order`` of the ranks.
    """
    links = {
        "intra_node": cluster.intra_node,
        "inter_node": cluster.inter_node,
        "host": cluster.host,
    }
    record: dict[str, Any] = {
        "name": cluster.name,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "memory_gb": cluster.memory_gb,
        "usable_memory": cluster.usable_memory,
        "device": vars(cluster.device) if not isinstance(cluster.device, str) else cluster.device,
        "links": {
            name: {**vars(link), "shared": str(link.shared)} for name, link in links.items() if link
        },
        **{name: getattr(cluster, name) for name in _MEASURED},
        "all_to_alls": [
            {**vars(each), "num_bytes": [*each.num_bytes], "seconds": [*each.seconds]}
            for each in cluster.all_to_alls
        ],
    }
    if not cluster.all_to_alls:
        del record["all_to_alls"]
    for name in ("usable_memory", *_MEASURED):
        if record[name] == Cluster.__dataclass_fields__[name].default:
            del record[name]
    if cluster.mixed:
        of_kinds = record_of_kinds(cluster.device_kinds, cluster.devices_per_node)
        same = ("name", "devices_per_node", "nodes", "memory_gb", "usable_memory", "device")
        rest = {name: value for name, value in record.items() if name not in same}
        record = {"name": cluster.name, **of_kinds, **rest}
    return record


def from_record(record: Any, where: str = "the cluster") -> Cluster:
    """Cluster of a record; raises ClusterError with every fault, about ``where``."""
    _refuse(_file_faults(record), where)
    links = {
        name: ClusterLink(**{**link, "shared": BandwidthScope(link["shared"])})
        for name, link in record["links"].items()
    }
    rest = {name: value for name, value in record.items() if name != "links"}
    rest |= {name: links.get(name) for name in ("inter_node", "host")}
    rest["intra_node"] = links["intra_node"]
    rest["all_to_alls"] = _all_to_alls(record)
    if "kinds" not in record:
        if isinstance(rest["device"], dict):
            rest["device"] = DeviceFigures(**rest["device"])
        return Cluster(**rest)
    kinds = kinds_of_record(record)
    rest |= {"nodes": num_nodes(record), "memory_gb": kinds[0].memory_gb}
    rest |= {"device": kinds[0].device, "usable_memory": kinds[0].usable_memory}
    del rest["kinds"]
    return Cluster(**rest).of_kinds(kinds)


def _all_to_alls(record: Mapping[str, Any]) -> tuple[AllToAllTimes, ...]:
    return tuple(
        AllToAllTimes(each["ranks"], tuple(each["num_bytes"]), tuple(each["seconds"]))
        for each in record.get("all_to_alls", ())
    )


def _file_faults(content: Any) -> list[str]:
    """Return every fault of a cluster file's content: its position, and the allowed values."""
    if not isinstance(content, dict) or "kinds" not in content:
        faults, nodes = faults_of(_File, content), None
        if isinstance(content, dict) and type(content.get("nodes")) is int:
            nodes = content["nodes"]
    else:
        once = {name: value for name, value in content.items() if name not in _OF_KIND}
        faults, nodes = faults_of(_MixedFile, once), None
        if not faults:
            nodes, faults = num_nodes(once), list(kind_faults(once))
        faults += [
            f"{name}: each of kinds has its own; leave it out here"
            for name in _OF_KIND
            if name in content
        ]
    if isinstance(content, dict) and isinstance(content.get("links"), dict):
        if nodes is not None and nodes > 1 and "inter_node" not in content["links"]:
            faults.append(f"links.inter_node is missing; {nodes} nodes require it")
    if not faults:
        faults += all_to_all_faults(_all_to_alls(content), content["devices_per_node"])
    if not faults and nodes is not None and nodes * content["devices_per_node"] > MOST_DEVICES:
        faults.append(
            f"{nodes} nodes of {content['devices_per_node']} are more than the "
            f"maximum of {MOST_DEVICES:,} devices"
        )
    return faults


def to_yaml(cluster: Cluster, comment: str = "") -> str:
    """Text of the cluster's file, ``comment`` first."""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return lines + str(yaml.dump(to_record(cluster), Dumper=PlainDumper, sort_keys=False))


def save_cluster(cluster: Cluster, path: str | Path, comment: str = "") -> None:
    """Write a cluster file; the path of a measured profile is written relative to it."""
    path = Path(path)
    write_with_checksum(
        path, to_yaml(_with_profiles(cluster, lambda of: os.path.relpath(of, path.parent)), comment)
    )


def _with_profiles(cluster: Cluster, changed: Callable[[str], str]) -> Cluster:
    """Cluster with the paths of its measured profiles changed."""

    def of_kind(kind: DeviceKind) -> DeviceKind:
        if isinstance(kind.device, str) and kind.device not in PRESETS:
            return replace(kind, device=changed(kind.device))
        return kind

    if cluster.mixed:
        return cluster.of_kinds(tuple(map(of_kind, cluster.device_kinds)))
    return replace(cluster, device=of_kind(cluster.kinds[0]).device)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; raises ClusterError that lists every fault."""
    path = Path(path)
    try:
        record = read_yaml(path, FileKind.CLUSTER)
    except FileError as error:
        raise ClusterError(str(error)) from error
    found = from_record(record, str(path))
    missing = []
    for kind in found.kinds:
        if isinstance(kind.device, str) and kind.device not in PRESETS:
            profile = path.parent / kind.device
            where = f"kinds.{kind.name}.device" if found.mixed else "device"
            missing += [] if profile.is_file() else [f"{where}: there is no profile {profile}"]
    if len(missing) == 1:
        raise ClusterError(f"{path}: {missing[0]}")
    _refuse(missing, str(path))
    return _with_profiles(found, lambda of: str(path.parent / of))


def cluster_presets() -> dict[str, Path]:
    """Files of the presets by name."""
    folder = Path(str(resources.files(__package__))) / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def cluster(name_or_path: str | Path, nodes: int | None = None) -> Cluster:
    """Load a preset or a cluster file, with ``nodes`` nodes if given, also as ``dgx-a100:4``."""
    text = str(name_or_path)
    presets = cluster_presets()
    counted = re.fullmatch(r"(.+):(\d+)", text)
    if counted is None and text.partition(":")[0] in presets and ":" in text:
        raise ClusterError(f"{text}: behind the colon goes a number of nodes, as in dgx-a100:4")
    if counted and nodes is None and not Path(text).exists():
        text, nodes = counted[1], int(counted[2])
    if text in presets:
        found = load_cluster(presets[text])
    elif Path(text).suffix in (".yaml", ".yml") or Path(text).is_file():
        found = load_cluster(text)
    elif Path(text).is_dir():
        raise ClusterError(f"{text} is a directory: give a .yaml file in it, or a preset's name")
    else:
        raise ClusterError(
            f"{unknown_name('cluster', text, presets)}; or give a .yaml file "
            "('pulse clusters NAME' prints one to start from, 'pulse probe' measures one)"
        )
    return found if nodes is None else found.with_nodes(nodes)


def _refuse(faults: list[str], where: str) -> None:
    if faults:
        raise ClusterError(format_faults(where, faults))


@dataclass(frozen=True)
class Link:
    """A connection between pipeline devices, each way; the default costs nothing."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def time_s(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0
