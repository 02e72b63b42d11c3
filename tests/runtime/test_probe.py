"""The probe on real ranks: of one machine, and of two emulated nodes whose link is known."""

from __future__ import annotations

import os
import re
import resource
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.cluster.cluster import (
    HOST_ADAM_BYTES,
    BandwidthScope,
    from_record,
    to_record,
)
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind
from megatron_pulse.runtime.measure.host_copies import host_adam_s, host_copies
from megatron_pulse.runtime.measure.link_times import StreamTimes, fit_link
from megatron_pulse.runtime.measure.probed_devices import ProbedDevice, kinds_of_devices
from tests.benchmarks.network import Node, namespaces, unavailable
from tests.ranks import RanksFailed, run_ranks


def probe_here(nodes: list[Node], max_bytes: int, planned_device: str | None = "A100-80GB"):
    """This rank's ``probe``; on ``nodes``, if there are any, as many ranks on each."""
    import torch
    import torch.distributed as dist

    from megatron_pulse.runtime.measure.probe import ProbeSettings, probe, probe_device

    if nodes:
        each = int(os.environ["WORLD_SIZE"]) // len(nodes)
        nodes[int(os.environ["RANK"]) // each].enter()
        os.environ["MASTER_ADDR"] = nodes[0].address
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    asked = ProbeSettings("here", torch.device("cpu"), max_bytes, 30.0, planned_device)
    try:
        if os.environ["WORLD_SIZE"] == "1":
            print("alone:", probe_device(asked))
        return probe(asked)
    finally:
        dist.destroy_process_group()


@settings(max_examples=50)
@given(
    latency=st.floats(0, 1e-3),
    rate=st.floats(1e8, 1e11),
    noise=st.lists(st.floats(0.99, 1.01), min_size=8, max_size=8),
)
def test_a_link_is_found_in_its_times(latency: float, rate: float, noise: list[float]) -> None:
    sizes = [64 * 4**i for i in range(8)] + [2**28]
    found = fit_link(
        sizes, [(latency + n / rate) * x for n, x in zip(sizes, [*noise, 1], strict=True)]
    )
    assert found.bytes_per_s == pytest.approx(rate, rel=0.05)
    assert found.latency_s == pytest.approx(latency, abs=70 / rate + 0.05 * latency + 1e-9)


def test_times_that_do_not_grow_are_no_link() -> None:
    with pytest.raises(ValueError, match="give a larger --max-mb"):
        fit_link([64, 1024, 4096], [1e-5, 1e-5, 1e-5])


def test_who_shares_a_link() -> None:
    assert StreamTimes(2, alone_gbs=10, at_once_gbs=5.1).shared is BandwidthScope.NODE
    assert StreamTimes(8, alone_gbs=10, at_once_gbs=9).shared is BandwidthScope.DEVICE


def test_two_ranks_of_this_machine() -> None:
    probed, other = run_ranks(2, probe_here, [], 2**20, None)
    assert other is None
    cluster = probed.cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.inter_node) == (1, 2, None)
    assert cluster.peaks is not None and cluster.peaks.peak_flops["float32"] > 1e8
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < 2e9 * cluster.memory_gb <= 1.01 * total
    (pair,) = probed.pairs
    assert pair.ranks == (0, 1) and pair.num_bytes[0] == 64 and pair.num_bytes[-1] == 2**20
    by_fit = cluster.link(0, 1).time_s(2**20)
    assert by_fit == pytest.approx(pair.median_s[-1], rel=0.5)
    (group,) = probed.all_reduces
    if group.latency_s < group.median_s:  # not where other work disturbs the machine
        predicted = cluster.allreduce_s(group.num_bytes, (0, 1))
        assert predicted == pytest.approx(group.median_s, rel=0.02)
    assert 0 < cluster.operation_us < 1e5 and cluster.collective_latency > 0
    assert cluster.host is None  # a CPU's copies are computing
    (exchanges,) = cluster.all_to_alls
    assert exchanges.ranks == 2 and exchanges.num_bytes[-1] == 2**20
    assert 0 < exchanges.seconds[0] <= exchanges.seconds[-1] < 1
    assert cluster.all_to_all_s(2**20, (0, 1)) == exchanges.seconds[-1]
    assert from_record(to_record(cluster)) == cluster


def test_copies_to_the_host_are_timed() -> None:
    """On a CPU from memory to memory, by what a GPU's are timed with."""
    gbs, latency_us = host_copies(torch.device("cpu"))
    assert 0.05 < gbs < 1000.0 and 0.0 < latency_us < 1e5


def test_adam_on_the_host_is_timed() -> None:
    """A parameter has 28 bytes to be moved."""
    assert 0.1 < HOST_ADAM_BYTES / host_adam_s() / 1e9 < 1000.0


def test_one_rank_is_told_to_start_more() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, probe_here, [], 2**20, None)
    said = failed.value.outputs[0]
    assert "links need two ends: start 2 ranks or more" in said
    figures = r"memory_gb=(\S+), .*DeviceFigures\(tflops=(\S+), bandwidth_gbs=(\S+)\)\)"
    measured = re.search(f"alone: .*{figures}", said)
    assert measured and all(float(figure) > 0 for figure in measured.groups())


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
def test_two_nodes_whose_link_is_known() -> None:
    rate_mbit = 400
    with namespaces(2, rate_mbit) as nodes:
        before = nodes[0].counters()
        probed = run_ranks(4, probe_here, nodes, 2**22)[0]
        sent, received = np.subtract(nodes[0].counters(), before)
    cluster = probed.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (2, 2)
    assert cluster.inter_node.bandwidth_gbs == pytest.approx(rate_mbit / 8000, rel=0.10)
    assert cluster.inter_node.shared is BandwidthScope.NODE
    assert cluster.intra_node.bandwidth_gbs > 3 * cluster.inter_node.bandwidth_gbs
    assert min(sent, received) > sum(p.num_bytes[-1] for p in probed.pairs if p.ranks[1] >= 2)


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
def test_namespaces_leave_nothing_behind() -> None:
    import subprocess

    with pytest.raises(KeyError), namespaces(2, 100, per_node=[50, 100]) as nodes:
        names = [node.name for node in nodes]
        raise KeyError
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30)
    assert not any(name in shown.stdout for name in names)


def probe_unlike(gb_of_rank: dict[int, float], threads_of_rank: dict[int, int]):
    """This rank's ``probe`` within limits of its process, as of ``ulimit -d``, and with threads."""
    rank = int(os.environ["RANK"])
    if (gb := gb_of_rank.get(rank)) is not None:
        limit = int(gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(threads_of_rank.get(rank, 1))
    return probe_here([], 2**16, None)


def test_kinds_of_one_node_are_found() -> None:
    """By memory and by threads; the record is that of a mixed cluster."""
    cluster = run_ranks(3, probe_unlike, {1: 3.0}, {2: 2})[0].cluster
    assert cluster.mixed and (cluster.nodes, cluster.devices_per_node) == (1, 3)
    first, second, third = (cluster.kind_of(rank) for rank in range(3))
    assert (first.name, second.name) == ("cpu", "cpu-3gb") and third.name.startswith("cpu-")
    assert second.memory_gb == 3.0 and first.memory_gb == third.memory_gb > 3.0
    assert cluster.memory_gb == 3.0
    record = to_record(cluster)
    assert record["nodes"] == [{"devices": [first.name, second.name, third.name]}]
    assert from_record(record) == cluster


def gpu(name: str, gb: float, tflops: float = 30.0, preset: bool = False) -> ProbedDevice:
    figures = None if preset else DeviceFigures(tflops, 500.0)
    return ProbedDevice(name, round(gb * 1e9), figures, preset)


def test_devices_within_tolerance_are_one_kind() -> None:
    alike = [gpu("NVIDIA T4", 15.8, 30.0), gpu("NVIDIA T4", 15.6, 26.0)]
    assert {*kinds_of_devices(alike, 0.9)} == {
        DeviceKind("t4", 15.6, 0.9, DeviceFigures(26.0, 500.0))
    }
    cpus = [
        ProbedDevice("CPU (x, 1 thread)", 4 * 10**9, DeviceFigures(t, 9.0), False) for t in (1, 3)
    ]
    assert len({*kinds_of_devices(cpus, 1.0)}) == 1


def test_kinds_differ_by_name_memory_and_speed() -> None:
    devices = [
        gpu("A100-80GB", 80.0, preset=True), gpu("NVIDIA GeForce RTX 3090", 25.4),
        gpu("A100-80GB", 80.0, preset=True), gpu("NVIDIA GeForce RTX 3090", 25.4, 15.0),
        gpu("NVIDIA GeForce RTX 3090", 12.6), gpu("NVIDIA GeForce RTX 3090", 25.4, 14.0),
    ]  # fmt: skip
    kinds = kinds_of_devices(devices, 0.9)
    names = [
        *("a100-80gb", "geforce-rtx-3090", "a100-80gb"),
        *("geforce-rtx-3090-25.4gb", "geforce-rtx-3090-12.6gb", "geforce-rtx-3090-25.4gb"),
    ]
    assert [kind.name for kind in kinds] == [name.replace(".", "-") for name in names]
    assert kinds[0].device == "A100-80GB"
    assert kinds[3].device == kinds[5].device == DeviceFigures(14.0, 500.0)
    assert {kind.device for kind in kinds_of_devices(devices, 0.9, "mine.json")} == {"mine.json"}


def planned_for_unlike():
    torch.set_num_threads(1 + int(os.environ["RANK"]))
    return probe_here([], 2**16, "H100")


def test_one_device_for_ranks_of_two_names_is_refused() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, planned_for_unlike)
    assert "--device H100 names one device, but ranks have CPU (" in failed.value.outputs[0]
