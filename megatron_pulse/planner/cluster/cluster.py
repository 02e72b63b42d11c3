"""Cluster of a plan: nodes of devices, their memory, and the links between them.

A cluster is a small YAML file. It is a preset beside this module, the output of ``pulse probe``
inside a job, or a file of the user. Ranks fill one node after another. A link's bandwidth is that
from one device to one other, in one direction. If ``shared`` is ``node``, devices that send at once
divide it.

Collectives are rings (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009). A reduce-scatter of n bytes over r ranks takes r - 1 steps of n / r bytes. An
all-gather takes as many, and an all-reduce is one after the other.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import yaml
from annotated_types import Ge, Gt, Le

from megatron_pulse.errors import UserError, format_faults, unknown_name
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_yaml, write_with_checksum
from megatron_pulse.json_validation import Count, Matching, OneOf, Text, faults_of
from megatron_pulse.profile.roofline import PRESETS, Device, custom_device
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

_Positive = Annotated[float, Ge(1e-6), Le(1e6)]
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
        _Positive, "GB/s from one device to one other, or to the host, one direction"
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


@dataclass(frozen=True)
class DeviceFigures:
    """Peak figures of a device: TFLOP/s, and GB/s of its memory."""

    tflops: _Positive
    bandwidth_gbs: _Positive


class _Links(TypedDict):
    """``inter_node`` is for several nodes, ``host`` for activation and optimizer offload."""

    intra_node: ClusterLink
    inter_node: NotRequired[ClusterLink]
    host: NotRequired[ClusterLink]


class _File(TypedDict):
    """Content of a cluster's file."""

    name: Text
    nodes: Count
    devices_per_node: Count
    memory_gb: Annotated[_Positive, "10^9 bytes of one device"]
    usable_memory: NotRequired[Annotated[float, Gt(0), Le(1), "the share that planning may fill"]]
    device: Annotated[
        Annotated[str, OneOf(tuple(PRESETS))]
        | Annotated[str, Matching(r"\.json$")]
        | DeviceFigures,
        f"one of {', '.join(PRESETS)}; or the .json file that 'pulse profile' wrote; or {{tflops: "
        "from 1e-6 to 1e6, bandwidth_gbs: the same}, the peaks of a device and its memory",
    ]
    links: _Links
    all_reduce_efficiency: NotRequired[
        Annotated[_Positive, "share of the bandwidth that collectives reach"]
    ]
    reduce_scatter_efficiency: NotRequired[Annotated[_Positive, "share that reduce-scatters reach"]]
    all_gather_efficiency: NotRequired[Annotated[_Positive, "share that all-gathers reach"]]
    collective_latency: NotRequired[
        Annotated[_Positive, "share of the latency that applies to a collective's ring"]
    ]
    small_collectives: NotRequired[
        Annotated[_Positive, "speed of small collectives relative to large ones"]
    ]
    host_memory_gbs: NotRequired[
        Annotated[_Positive, "GB/s that Adam reads and writes in a node's memory"]
    ]
    operation_us: NotRequired[
        Annotated[_Microseconds, "microseconds that the runtime adds to an operation"]
    ]


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

    ``host`` is the link from a device to pinned memory of its node, if usable. ``host_memory_gbs``
    is the memory bandwidth of Adam on the CPU, for all devices of a node at once.

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

    def __post_init__(self) -> None:
        _refuse(_file_faults(to_record(self)), f"cluster {self.name!r}")

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    def part(self, num_devices: int) -> Cluster | None:
        """Subset of ``num_devices`` devices: whole nodes, or a part of one; None if impossible."""
        if not 0 < num_devices <= self.num_devices:
            return None
        if num_devices <= self.devices_per_node:
            return replace(self, nodes=1, devices_per_node=num_devices)
        nodes, left = divmod(num_devices, self.devices_per_node)
        return None if left else replace(self, nodes=nodes)

    @property
    def usable_bytes(self) -> float:
        """Bytes that planning may put on one device."""
        return self.memory_gb * 1e9 * self.usable_memory

    @property
    def memory_caution(self) -> str:
        """Warning that plans may fill a device to the last byte; empty if some memory is left."""
        if self.usable_memory < 1:
            return ""
        return (
            f"{self.name} lets plans use all {self.memory_gb:g} GB of a device. CUDA, NCCL and "
            "fragmentation need memory too: write 'usable_memory: 0.9' into its file, or the share "
            "that your runs can use"
        )

    @property
    def to_host(self) -> Link | None:
        """Link from a device to the memory of its node, one way, with all devices active."""
        return None if self.host is None else self.host.used_by(self.devices_per_node)

    @property
    def peaks(self) -> Device | None:
        """Device for a roofline; None if ``device`` is a measured profile."""
        if isinstance(self.device, DeviceFigures):
            figures = self.device
            return custom_device(figures.tflops, figures.bandwidth_gbs, self.memory_gb)
        return PRESETS.get(self.device)

    def node_of(self, rank: int) -> int:
        """Node of ``rank``; raises ClusterError for a rank that the cluster does not have."""
        if not 0 <= rank < self.num_devices:
            raise ClusterError(f"{self.name} has ranks 0 to {self.num_devices - 1}; got {rank}")
        return rank // self.devices_per_node

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
    """Content of the cluster's file; optional values only if they are not the default."""
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
    }
    for name in ("usable_memory", *_MEASURED):
        if record[name] == Cluster.__dataclass_fields__[name].default:
            del record[name]
    return record


def from_record(record: Any, where: str = "the cluster") -> Cluster:
    """Cluster of a record; raises ClusterError with every fault, about ``where``."""
    _refuse(_file_faults(record), where)
    links = {
        name: ClusterLink(**{**link, "shared": BandwidthScope(link["shared"])})
        for name, link in record["links"].items()
    }
    rest = {name: value for name, value in record.items() if name != "links"}
    if isinstance(rest["device"], dict):
        rest["device"] = DeviceFigures(**rest["device"])
    rest |= {name: links.get(name) for name in ("inter_node", "host")}
    return Cluster(**rest, intra_node=links["intra_node"])


def _file_faults(content: Any) -> list[str]:
    """Return every fault of a cluster file's content: its position, and the allowed values."""
    faults = faults_of(_File, content)
    if isinstance(content, dict) and isinstance(content.get("links"), dict):
        nodes = content.get("nodes")
        if type(nodes) is int and nodes > 1 and "inter_node" not in content["links"]:
            faults.append(f"links.inter_node is missing; {nodes} nodes require it")
    if not faults and content["nodes"] * content["devices_per_node"] > MOST_DEVICES:
        faults.append(
            f"{content['nodes']} nodes of {content['devices_per_node']} are more than the "
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
    if isinstance(cluster.device, str) and cluster.device not in PRESETS:
        cluster = replace(cluster, device=os.path.relpath(cluster.device, path.parent))
    write_with_checksum(path, to_yaml(cluster, comment))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; raises ClusterError that lists every fault."""
    path = Path(path)
    try:
        record = read_yaml(path, FileKind.CLUSTER)
    except FileError as error:
        raise ClusterError(str(error)) from error
    found = from_record(record, str(path))
    if isinstance(found.device, str) and found.device not in PRESETS:
        profile = path.parent / found.device
        if not profile.is_file():
            raise ClusterError(f"{path}: device: there is no profile {profile}")
        found = replace(found, device=str(profile))
    return found


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
    return found if nodes is None else replace(found, nodes=nodes)


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
