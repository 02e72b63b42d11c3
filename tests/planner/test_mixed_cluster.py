"""Clusters of unlike devices: files, their faults, orders of devices, and parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterError,
    ClusterLink,
    cluster,
    from_record,
    load_cluster,
    save_cluster,
    to_record,
    to_yaml,
)

LINK = {"kind": "pcie", "bandwidth_gbs": 10, "latency_us": 20, "shared": "device"}
SLOW = {"kind": "ethernet", "bandwidth_gbs": 1, "latency_us": 50, "shared": "node"}
RECORD = {
    "name": "home",
    "usable_memory": 0.9,
    "kinds": {
        "large": {"device": "A100-80GB", "memory_gb": 24, "usable_memory": 0.95},
        "small": {"device": {"tflops": 60, "bandwidth_gbs": 600}, "memory_gb": 16},
    },
    "devices_per_node": 2,
    "nodes": [{"devices": ["large", "small"]}, {"kind": "small", "count": 2}],
    "links": {"intra_node": LINK, "inter_node": SLOW},
}


def home(**changes: object) -> Cluster:
    return from_record({**RECORD, **changes})


def names(one: Cluster) -> list[str]:
    return [one.kind_of(rank).name for rank in range(one.num_devices)]


def test_each_device_has_its_kind() -> None:
    one = home()
    assert one.mixed and names(one) == ["large", *["small"] * 5]
    assert (one.nodes, one.num_devices) == (3, 6)
    assert one.kind_of(0).usable_bytes == 24e9 * 0.95 and one.kind_of(1).usable_bytes == 16e9 * 0.9
    assert one.usable_bytes == 16e9 * 0.9, "what ignores kinds counts with the smallest"


def test_an_order_moves_devices_with_their_nodes_and_links() -> None:
    one = home()
    moved = one.with_order([2, 1, 0, 3, 4, 5])
    assert names(moved) == ["small", "small", "large", *["small"] * 3]
    assert [moved.node_of(rank) for rank in range(6)] == [1, 0, 0, 1, 2, 2]
    for a in range(6):
        for b in range(6):
            assert moved.link(a, b) == one.link(moved.device_of(a), moved.device_of(b))
    assert moved.with_order([2, 1, 0, 3, 4, 5]) == one.with_order(range(6))
    assert to_record(moved) == to_record(one)
    with pytest.raises(ClusterError, match="order lists each of the devices 0 to 5 once"):
        one.with_order([0, 0, 1, 2, 3, 4])


def test_files_round_trip(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("{}")
    kinds = {
        name: {**kind, "device": str(tmp_path / file)}
        for (name, kind), file in zip(RECORD["kinds"].items(), ("a.json", "b.json"), strict=True)
    }
    one = home(kinds=kinds)
    save_cluster(one, tmp_path / "c.yaml")
    assert "device: a.json" in (tmp_path / "c.yaml").read_text()
    assert cluster(tmp_path / "c.yaml") == one
    (tmp_path / "a.json").unlink()
    (tmp_path / "b.json").unlink()
    with pytest.raises(ClusterError, match=r"kinds.large.device: .*\n.*kinds.small.device"):
        load_cluster(tmp_path / "c.yaml")


def test_one_kind_is_an_ordinary_cluster() -> None:
    links = {"intra_node": LINK, "inter_node": SLOW}
    plain = {"name": "c", "nodes": 2, "devices_per_node": 2, "memory_gb": 16, "usable_memory": 0.9}
    plain |= {"device": "V100-32GB", "links": links}
    kind = {"memory_gb": 16, "device": "V100-32GB"}
    for kinds, nodes in (
        ({"only": {**kind, "usable_memory": 0.9}}, [{"kind": "only", "count": 2}]),
        (
            {"a": {**kind, "usable_memory": 0.9}, "b": {**kind, "usable_memory": 0.9}},
            [{"devices": ["a", "b"]}, {"kind": "a"}],
        ),
    ):
        of_kinds = {"name": "c", "kinds": kinds, "devices_per_node": 2, "nodes": nodes}
        found = from_record({**of_kinds, "links": links})
        assert found == from_record(plain) and to_yaml(found) == to_yaml(from_record(plain))


def test_parts_are_the_first_devices() -> None:
    one = home()
    assert names(one.part(2)) == ["large", "small"] and one.part(3) is None
    assert not one.part(1).mixed and one.part(1).memory_gb == 24
    assert names(one.part(4)) == ["large", "small", "small", "small"]
    with pytest.raises(ClusterError, match="nodes have unlike devices"):
        one.with_nodes(4)
    assert names(one.part(2).with_nodes(2)) == ["large", "small"] * 2


def test_more_memory_is_given_to_those_with_less() -> None:
    assert home().with_memory_gb(20).kind_of(1).usable_bytes == 18e9
    assert home().with_memory_gb(20).kind_of(0).usable_bytes == 24e9 * 0.95


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"memory_gb": 16, "device": "H100"},
            ["memory_gb: each of kinds has its own", "device: each of kinds has its own"],
        ),
        (
            {"nodes": [{"devices": ["large"]}, {"kind": "smal"}, {"count": 2}]},
            [
                "nodes.0.devices lists 1 devices; devices_per_node is 2",
                "nodes.1: no kind is called 'smal'",
                "nodes.2: give either kind",
                "kinds.small: no node has such a device",
            ],
        ),
        ({"nodes": 2}, ["nodes is 2; allowed is a list, not empty"]),
        ({"nodes": [{"kind": "large", "count": 0}]}, ["nodes.0.count is 0; allowed is a whole"]),
        ({"links": {"intra_node": LINK}}, ["links.inter_node is missing; 3 nodes require it"]),
        (
            {"kinds": {"large": {"device": "H1000", "memory_gb": 0}}},
            ["kinds.large.device is 'H1000'; allowed is one of", "kinds.large.memory_gb is 0"],
        ),
        ({"nodes": [{"kind": "large", "count": 90_000}, {"kind": "small"}]}, ["100,000 devices"]),
    ],
)
def test_every_fault_of_a_file_is_listed(changes: dict[str, object], faults: list[str]) -> None:
    text = yaml.safe_dump({**RECORD, **changes})
    with pytest.raises(ClusterError) as error:
        from_record(yaml.safe_load(text))
    for fault in faults:
        assert fault in str(error.value)


def test_kinds_of_code_are_checked() -> None:
    link = ClusterLink("pcie", 10, 20, BandwidthScope.DEVICE)
    kinds = home().kinds
    plain = Cluster("c", 1, 2, 16, "H100", link)
    assert plain.of_kinds(kinds).memory_gb == 16 and not plain.of_kinds(kinds[:1] * 2).mixed
    with pytest.raises(ClusterError, match="device_kinds are of 1 devices; there are 2"):
        Cluster("c", 1, 2, 16, "H100", link, device_kinds=kinds[:1])
    with pytest.raises(ClusterError, match="those of the smallest of device_kinds"):
        Cluster("c", 1, 2, 16, "H100", link, device_kinds=kinds)
