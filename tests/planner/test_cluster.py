"""Clusters: ranks and links, times of collectives, presets, files, and files that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.planner.cluster.all_to_alls import AllToAllTimes
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterError,
    ClusterLink,
    DeviceFigures,
    Link,
    cluster,
    cluster_presets,
    load_cluster,
    save_cluster,
)

INSIDE = ClusterLink("nvlink", 100, 2, BandwidthScope.DEVICE)
BETWEEN = ClusterLink("ethernet", 10, 20, BandwidthScope.NODE)


def two_by_four(**changes) -> Cluster:
    """2 nodes of 4 devices: 100 GB/s and 2 us inside, 10 GB/s of the node and 20 us between."""
    values = {"device": "H100", "intra_node": INSIDE, "inter_node": BETWEEN, **changes}
    return Cluster("small", 2, 4, 80, **values)


def test_ranks_fill_node_after_node() -> None:
    small = two_by_four()
    assert [small.node_of(rank) for rank in range(small.num_devices)] == [0] * 4 + [1] * 4
    assert small.link(0, 3) == Link(2e-6, 100e9) and small.link(3, 4) == Link(20e-6, 10e9)
    assert small.link(5, 5) == Link() and small.link(0, 4, concurrent=4) == Link(20e-6, 2.5e9)
    assert small.link(0, 1, concurrent=4) == small.link(0, 1)
    for call in (lambda: small.node_of(8), lambda: small.link(-1, 0), lambda: small.link(8, 8)):
        with pytest.raises(ClusterError, match="small has ranks 0 to 7"):
            call()


def test_the_slowest_link_of_a_ring() -> None:
    small = two_by_four()
    assert small.link_between(range(4)) == Link(2e-6, 100e9)
    assert small.link_between(range(8)) == Link(20e-6, 10e9)
    assert small.link_between([0, 4, 1, 5]) == Link(20e-6, 5e9), "two links leave each node"
    assert small.link_between([0, 4], concurrent=4) == Link(20e-6, 2.5e9)
    assert small.link_between([6]) == Link()
    own = two_by_four(inter_node=ClusterLink("infiniband", 10, 20, BandwidthScope.DEVICE))
    assert own.link_between([0, 4, 1, 5], concurrent=2) == Link(20e-6, 10e9)
    for ranks, concurrent in (([], 1), ([0, 0], 1), ([0, 1], 0)):
        with pytest.raises(ClusterError, match="different ranks"):
            small.link_between(ranks, concurrent)


def test_collectives_by_hand() -> None:
    small = two_by_four()
    inside = 3 * (2e-6 + 1e9 / 4 / 100e9)
    assert small.reduce_scatter_s(1e9, range(4)) == pytest.approx(inside)
    pair = 20e-6 + 1e9 / 2 / 10e9
    assert small.all_gather_s(1e9, [0, 4]) == pytest.approx(pair)
    assert small.allreduce_s(1e9, [0, 4]) == pytest.approx(2 * pair)
    shared = 20e-6 + 1e9 / 2 / 2.5e9
    assert small.reduce_scatter_s(1e9, [0, 4], concurrent=4) == pytest.approx(shared)
    both = inside + 20e-6 + 1e9 / 4 / 2 / (10e9 / 4)
    assert small.reduce_scatter_s(1e9, range(8)) == pytest.approx(both)
    uneven = 4 * (20e-6 + 1e9 / 5 / 10e9)
    assert small.reduce_scatter_s(1e9, [4, 0, 1, 2, 3]) == pytest.approx(uneven)
    assert small.allreduce_s(1e9, [3]) == 0 and small.allreduce_s(0, range(8)) == 0
    half = two_by_four(all_reduce_efficiency=0.5)
    assert half.reduce_scatter_s(1e9, [0, 4]) == pytest.approx(20e-6 + 1e9 / 2 / 5e9)


@settings(max_examples=60, derandomize=True)
@given(
    ranks=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
    num_bytes=st.floats(1, 1e10),
    concurrent=st.integers(1, 4),
)
def test_collectives_take_longer_for_more(ranks, num_bytes: float, concurrent: int) -> None:
    small = two_by_four()
    seconds = small.allreduce_s(num_bytes, ranks, concurrent)
    assert small.allreduce_s(2 * num_bytes, ranks, concurrent) >= seconds
    assert small.allreduce_s(num_bytes, ranks, concurrent + 1) >= seconds
    assert small.allreduce_s(num_bytes, ranks[::-1], concurrent) == pytest.approx(seconds)
    if len(ranks) > 1:  # no algorithm sends less than this from a rank, at its fastest link
        least = 2 * (len(ranks) - 1) / len(ranks) * num_bytes / 100e9
        assert seconds >= least * (1 - 1e-9)


def test_presets_are_what_they_say() -> None:
    assert {"pulse-v100", "pulse-910a", "dgx-a100", "dgx-h100", "cpu"} <= set(cluster_presets())
    for name in cluster_presets():
        assert cluster(name).name == name and cluster(name).peaks is not None
    paper = cluster("pulse-v100")
    assert (paper.nodes, paper.devices_per_node, paper.memory_gb) == (2, 8, 32)
    assert paper.link(0, 7).bytes_per_s == 300e9 and paper.link(7, 8).bytes_per_s == 10e9
    ascend = cluster("pulse-910a")
    assert ascend.num_devices == 64 and ascend.link(0, 8).bytes_per_s == 19e9


def test_the_number_of_nodes_may_be_given() -> None:
    assert cluster("dgx-a100:4") == cluster("dgx-a100", nodes=4)
    assert cluster("dgx-a100:4").num_devices == 32
    with pytest.raises(ClusterError, match="links.inter_node is missing; 2 nodes require it"):
        cluster("cpu:2")
    with pytest.raises(ClusterError, match="nodes is 0; allowed is a whole number, 1 or more"):
        cluster("dgx-h100", nodes=0)
    with pytest.raises(ClusterError, match="no cluster is called 'dgx'; did you mean .*dgx-a100"):
        cluster("dgx")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"device": DeviceFigures(1.5, 20), "usable_memory": 0.8},
        {"nodes": 1, "inter_node": None, "all_reduce_efficiency": 0.7},
    ],
)
def test_files_round_trip(tmp_path: Path, changed) -> None:
    values = {**vars(two_by_four()), **changed}
    save_cluster(Cluster(**values), tmp_path / "c.yaml", "Written by\n\na test")
    assert cluster(tmp_path / "c.yaml") == Cluster(**values)
    assert "\n# Written by\n#\n# a test\nname: small\n" in (tmp_path / "c.yaml").read_text()


def test_a_profile_is_found_beside_the_file(tmp_path: Path) -> None:
    profile = tmp_path / "profiles" / "p.json"
    small = two_by_four(device=str(profile))
    assert small.peaks is None
    save_cluster(small, tmp_path / "c.yaml")
    with pytest.raises(ClusterError, match="there is no profile"):
        load_cluster(tmp_path / "c.yaml")
    profile.parent.mkdir()
    profile.write_text("{}")
    assert load_cluster(tmp_path / "c.yaml") == small


def test_every_fault_of_a_file_is_listed(tmp_path: Path) -> None:
    text = """
name: ''
nodes: 2.5
memory_gb: .nan
memory: 3
device: {tflops: 3}
usable_memory: 1.5
links:
  intra_node: {kind: string, bandwidth_gbs: 0, latency_us: -1, shared: both, speed: 3}
  internode: 3
"""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ClusterError) as failed:
        load_cluster(tmp_path / "c.yaml")
    message = str(failed.value)
    assert "13 faults" in message
    for part in (
        "name is ''; allowed is text",
        "nodes is 2.5; allowed is a whole number, 1 or more",
        "devices_per_node is missing; allowed is a whole number, 1 or more",
        "memory_gb is '.nan'; allowed is a number from 1e-6",
        "memory is unknown; did you mean memory_gb or usable_memory or host_memory_gbs? allowed",
        "usable_memory is 1.5; allowed is a number above 0, at most 1",
        "device is {'tflops': 3}; allowed is one of V100-32GB",
        "links.intra_node.kind is 'string'; allowed is one of nvlink",
        "links.intra_node.bandwidth_gbs is 0; allowed is a number from 1e-6 to 1e6: GB/s",
        "links.intra_node.latency_us is -1; allowed is a number from 0 to 1e9",
        "links.intra_node.shared is 'both'; allowed is device",
        "links.intra_node.speed is unknown",
        "links.internode is unknown; did you mean inter_node or intra_node? allowed are intra_node",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "c.yaml cannot be read as a cluster: it is empty"),
        ("- 3", "expected an object, got a list"),
        ("a: [", "cannot be read as a cluster"),
    ],
)
def test_files_that_are_no_cluster(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ClusterError, match=reason):
        load_cluster(tmp_path / "c.yaml")
    with pytest.raises(ClusterError, match="absent.yaml cannot be read"):
        cluster(tmp_path / "absent.yaml")


def test_values_made_in_code_are_checked_too() -> None:
    with pytest.raises(ClusterError, match="memory_gb is -1"):
        Cluster("c", 1, 1, -1, "H100", INSIDE)
    with pytest.raises(ClusterError, match="links.inter_node is missing"):
        Cluster("c", 2, 1, 1, "H100", INSIDE)


EXCHANGES = AllToAllTimes(2, (1000, 3000), (1e-3, 2e-3))


def test_measured_all_to_alls_inside_a_node(tmp_path: Path) -> None:
    measured = two_by_four(all_to_alls=(EXCHANGES,))
    times = {500: 1e-3, 1000: 1e-3, 2000: 1.5e-3, 3000: 2e-3, 6000: 4e-3}
    for num_bytes, seconds in times.items():
        assert measured.all_to_all_s(num_bytes, (2, 3)) == pytest.approx(seconds)
    for ranks in ((3, 4), range(4)):  # between nodes, and of another number
        assert measured.all_to_all_s(2000, ranks) == two_by_four().all_to_all_s(2000, ranks)
    save_cluster(measured, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == measured


def test_smaller_nodes_keep_all_to_alls_that_divide_them() -> None:
    measured = two_by_four(all_to_alls=(EXCHANGES, replace(EXCHANGES, ranks=4)))
    for num, kept in ((8, [2, 4]), (4, [2, 4]), (3, []), (2, [2]), (1, [])):
        part = measured.part(num)
        assert part is not None and [each.ranks for each in part.all_to_alls] == kept


def test_all_to_alls_that_contradict_themselves_are_refused() -> None:
    wrong = AllToAllTimes(2, (3000, 1000), (2e-3, 1e-3, 1e-3))
    with pytest.raises(ClusterError) as refused:
        two_by_four(all_to_alls=(EXCHANGES, wrong))
    for said in ("2 num_bytes and 3 seconds", "ascending", "less with more", "2 ranks occur twice"):
        assert said in str(refused.value)
    with pytest.raises(ClusterError, match=r"all_to_alls\.0\.ranks is 1"):
        two_by_four(all_to_alls=(replace(EXCHANGES, ranks=1),))
    with pytest.raises(ClusterError, match="groups of 3 ranks do not divide 4 devices"):
        two_by_four(all_to_alls=(replace(EXCHANGES, ranks=3),))
