"""JSON schema of a cluster file."""

from __future__ import annotations

from typing import Any

from megatron_pulse.json_validation import COUNT, faults_of, number, record
from megatron_pulse.profile.roofline import PRESETS

KINDS = (
    "nvlink",
    "hccs",
    "pcie",
    "shared-memory",
    "loopback",
    "infiniband",
    "roce",
    "ethernet",
    "other",
)

MOST_DEVICES = 100_000
"""The largest cluster that plans can be made for."""


def _above_0(what: str) -> dict[str, Any]:
    limits = {"minimum": 1e-6, "maximum": 1e6}
    return number(f"a number from 1e-6 to 1e6: {what}", **limits)


_LINK = record(
    "a record with kind, bandwidth_gbs, latency_us and shared",
    ["kind", "bandwidth_gbs", "latency_us", "shared"],
    kind={"enum": list(KINDS), "description": f"one of {', '.join(KINDS)}"},
    bandwidth_gbs=_above_0("GB/s from one device to one other, or to the host, one direction"),
    latency_us=number(
        "a number from 0 to 1e9: microseconds of an empty message", minimum=0, maximum=1e9
    ),
    shared={
        "enum": ["device", "node"],
        "description": "device (each device has this bandwidth) or node (all of a node share it)",
    },
)
_DEVICE = {
    "anyOf": [
        {"enum": list(PRESETS)},
        {"type": "string", "pattern": r"\.json$"},
        record(
            "figures",
            ["tflops", "bandwidth_gbs"],
            tflops=_above_0("TFLOP/s"),
            bandwidth_gbs=_above_0("GB/s of its memory"),
        ),
    ],
    "description": f"one of {', '.join(PRESETS)}; or the .json file that 'pulse profile' wrote; "
    "or {tflops: from 1e-6 to 1e6, bandwidth_gbs: the same}, the peaks of a device and its memory",
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **record(
        "a record with name, nodes, devices_per_node, memory_gb, device and links",
        ["name", "nodes", "devices_per_node", "memory_gb", "device", "links"],
        name={"type": "string", "minLength": 1, "description": "text"},
        nodes=COUNT,
        devices_per_node=COUNT,
        memory_gb=_above_0("10^9 bytes of one device"),
        usable_memory=number(
            "a number above 0, at most 1: the share that planning may fill",
            exclusiveMinimum=0,
            maximum=1,
        ),
        device=_DEVICE,
        links=record(
            "a record with intra_node, inter_node (for several nodes) and host (for activation "
            "and optimizer offload)",
            ["intra_node"],
            intra_node=_LINK,
            inter_node=_LINK,
            host=_LINK,
        ),
        all_reduce_efficiency=_above_0("share of the bandwidth that collectives reach"),
        reduce_scatter_efficiency=_above_0("share that reduce-scatters reach"),
        all_gather_efficiency=_above_0("share that all-gathers reach"),
        collective_latency=_above_0("share of the latency that applies to a collective's ring"),
        small_collectives=_above_0("speed of small collectives relative to large ones"),
        host_memory_gbs=_above_0("GB/s that Adam reads and writes in a node's memory"),
        operation_us=number(
            "a number from 0 to 1e9: microseconds that the runtime adds to an operation",
            minimum=0,
            maximum=1e9,
        ),
    ),
}


def cluster_faults(content: Any) -> list[str]:
    """Return every fault of a cluster file's content: its position, and the allowed values."""
    faults = faults_of(SCHEMA, content)
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
