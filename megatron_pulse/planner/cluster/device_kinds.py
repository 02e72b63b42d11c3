"""Kinds of devices of a cluster whose devices differ, and their part of a cluster file.

::

    kinds:
      large: {device: a100.json, memory_gb: 24, usable_memory: 0.9}
      small: {device: v100.json, memory_gb: 16}
    devices_per_node: 2
    nodes: [{devices: [large, small]}, {kind: small, count: 2}]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, groupby
from typing import Annotated, Any, NotRequired, TypedDict

from annotated_types import Ge, Gt, Le, MinLen

from megatron_pulse.errors import unknown_name
from megatron_pulse.json_validation import Count, Matching, OneOf, Some, Text
from megatron_pulse.profile.roofline import PRESETS, Device, custom_device

Positive = Annotated[float, Ge(1e-6), Le(1e6)]
"""Range of bandwidths, sizes and peaks."""

Memory = Annotated[Positive, "10^9 bytes of one device"]
UsableShare = Annotated[float, Gt(0), Le(1), "the share that planning may fill"]


@dataclass(frozen=True)
class DeviceFigures:
    """Peak figures of a device: TFLOP/s, and GB/s of its memory."""

    tflops: Positive
    bandwidth_gbs: Positive


DeviceOfFile = Annotated[
    Annotated[str, OneOf(tuple(PRESETS))] | Annotated[str, Matching(r"\.json$")] | DeviceFigures,
    f"one of {', '.join(PRESETS)}; or the .json file that 'pulse profile' wrote; or {{tflops: "
    "from 1e-6 to 1e6, bandwidth_gbs: the same}, the peaks of a device and its memory",
]


@dataclass(frozen=True)
class DeviceKind:
    """Kind of device: its name, memory (10^9 bytes), usable share of memory, and speed.

    ``device`` is a preset of ``profile.devices``, the path of a measured profile, or figures.
    """

    name: str
    memory_gb: float
    usable_memory: float
    device: str | DeviceFigures

    @property
    def usable_bytes(self) -> float:
        """Bytes that planning may put on such a device."""
        return self.memory_gb * 1e9 * self.usable_memory

    @property
    def peaks(self) -> Device | None:
        """Device for a roofline; None if ``device`` is a measured profile."""
        if isinstance(self.device, DeviceFigures):
            figures = self.device
            return custom_device(figures.tflops, figures.bandwidth_gbs, self.memory_gb)
        return PRESETS.get(self.device)

    @property
    def figures(self) -> tuple[object, ...]:
        """Everything but the name: kinds of equal figures are alike."""
        return self.memory_gb, self.usable_memory, self.device


class KindOfFile(TypedDict):
    """A kind in a cluster file."""

    device: DeviceOfFile
    memory_gb: Memory
    usable_memory: NotRequired[UsableShare]


class NodesOfFile(TypedDict):
    """``count`` nodes (default 1) of one kind, or each with these ``devices``."""

    kind: NotRequired[Text]
    devices: NotRequired[Some[Text]]
    count: NotRequired[Count]


KindsOfFile = Annotated[Mapping[Text, KindOfFile], MinLen(1)]


def kind_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between ``kinds`` and ``nodes`` of a well-formed record."""
    named, each = set[str](), record["devices_per_node"]
    for number, node in enumerate(record["nodes"]):
        where = f"nodes.{number}"
        if ("kind" in node) == ("devices" in node):
            yield f"{where}: give either kind, for nodes of one kind, or devices, a list of kinds"
            continue
        devices = node.get("devices", [node.get("kind")])
        if "devices" in node and len(devices) != each:
            yield f"{where}.devices lists {len(devices)} devices; devices_per_node is {each}"
        for name in dict.fromkeys(devices):
            if name not in record["kinds"]:
                yield f"{where}: {unknown_name('kind', name, record['kinds'])}"
        named.update(devices)
    for name in record["kinds"]:
        if name not in named:
            yield f"kinds.{name}: no node has such a device; leave it out"


def num_nodes(record: Mapping[str, Any]) -> int:
    """Number of nodes of a well-formed record with ``kinds``."""
    return sum(node.get("count", 1) for node in record["nodes"])


def kinds_of_record(record: Mapping[str, Any]) -> tuple[DeviceKind, ...]:
    """Kind of each device of a well-formed record, node by node."""
    usable = record.get("usable_memory", 1.0)
    kinds = dict[str, DeviceKind]()
    for name, kind in record["kinds"].items():
        device = kind["device"]
        kinds[name] = DeviceKind(
            name,
            kind["memory_gb"],
            kind.get("usable_memory", usable),
            DeviceFigures(**device) if isinstance(device, Mapping) else device,
        )
    found: list[DeviceKind] = []
    for node in record["nodes"]:
        names = node.get("devices") or [node["kind"]] * record["devices_per_node"]
        found += [kinds[name] for name in names] * node.get("count", 1)
    return tuple(found)


def record_of_kinds(kinds: Sequence[DeviceKind], devices_per_node: int) -> dict[str, Any]:
    """Fields ``kinds``, ``devices_per_node`` and ``nodes`` of the file with these devices."""
    nodes = []
    for names, alike in groupby(batched((kind.name for kind in kinds), devices_per_node)):
        same = len(set(names)) == 1
        node: dict[str, Any] = {"kind": names[0]} if same else {"devices": list(names)}
        if (count := len(list(alike))) > 1:
            node["count"] = count
        nodes.append(node)
    return {
        "kinds": {kind.name: _record(kind) for kind in dict.fromkeys(kinds)},
        "devices_per_node": devices_per_node,
        "nodes": nodes,
    }


def _record(kind: DeviceKind) -> dict[str, Any]:
    device = kind.device if isinstance(kind.device, str) else vars(kind.device)
    record = {"device": device, "memory_gb": kind.memory_gb, "usable_memory": kind.usable_memory}
    if kind.usable_memory == 1:
        del record["usable_memory"]
    return record
