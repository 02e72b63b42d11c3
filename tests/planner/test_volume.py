"""Communication volume, against measured tables and the paper's figures."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_pulse.backbone.costs import ChainCosts, SkipCost, weighted_costs
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, fold, interleaved, sequential
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.partition.volume import relayed, volume
from tests.planner.blocks import block_costs, fine_costs
from tests.planner.chains import chain

FEWEST = ("load", "bytes")
# Backbone, P: MB per sample of relay, direct, exact fold; largest load over mean of relay, fold.
# FLOPs balanced first, then fewest bytes; whole blocks; bf16; forward and gradients.
MEASURED = {
    ("sd-v2.1", 2): (23.6, 23.6, 3.9, 1.01, 1.04),
    ("sd-v2.1", 4): (74.1, 36.0, 18.4, 1.05, 1.13),
    ("sd-v2.1", 8): (133.7, 43.9, 52.4, 1.27, 1.29),
    ("sdxl", 2): (102.2, 102.2, 7.9, 1.09, 1.12),
    ("sdxl", 4): (298.8, 112.7, 36.7, 1.27, 1.33),
    ("sdxl", 8): (686.8, 141.6, 144.2, 1.45, 1.77),
    ("hunyuan-dit-v1.2", 2): (461.4, 461.4, 46.1, 1.01, 1.00),
    ("hunyuan-dit-v1.2", 4): (945.8, 507.5, 138.4, 1.05, 1.00),
    ("hunyuan-dit-v1.2", 8): (1914.7, 599.8, 323.0, 1.05, 1.20),
    ("uvit-h", 2): (16.6, 16.6, 2.4, 1.03, 1.03),
    ("uvit-h", 4): (35.7, 20.2, 7.1, 1.04, 1.11),
    ("uvit-h", 8): (72.5, 23.8, 16.6, 1.19, 1.11),
}
# Where our optimum at the same balance moves less than the table's choice among ties.
FEWER = {("sdxl", 4, "relay"), ("sdxl", 8, "relay"), ("sdxl", 8, "fold"), ("uvit-h", 8, "relay")}


@pytest.mark.parametrize(("name", "num_devices"), MEASURED)
def test_volumes_and_balances_as_measured(name: str, num_devices: int) -> None:
    relay_mb, direct_mb, fold_mb, relay_balance, fold_balance = MEASURED[name, num_devices]
    costs = block_costs(name)
    for way, chain_costs, placement, collocate, expected, balance in (
        ("relay", relayed(costs), sequential(num_devices), False, relay_mb, relay_balance),
        ("direct", costs, sequential(num_devices), False, direct_mb, None),
        ("fold", costs, fold(num_devices), True, fold_mb, fold_balance),
    ):
        goal = Goal(FEWEST, collocate)
        found = find_partition(chain_costs, placement, goal)
        moved = volume(chain_costs, found)
        if (name, num_devices, way) in FEWER:
            assert moved.total / 1e6 < expected
        else:
            assert moved.total / 1e6 == pytest.approx(expected, abs=0.06), way
        if balance is not None:
            assert goal.evaluate(chain_costs, found).balance <= balance + 0.01, way
        if way == "fold":
            assert moved.skip == 0


def test_hunyuan_grows_with_the_boundaries_alone() -> None:
    """The paper's figure 14: one activation times 2(P-1), each way."""
    costs = block_costs("hunyuan-dit-v1.2")
    one = 2 * 4096 * 1408
    for num_devices in (2, 4, 5, 8, 10):
        found = find_partition(costs, fold(num_devices), Goal(collocate=True))
        assert volume(costs, found).total == 2 * one * 2 * (num_devices - 1)


def test_the_papers_example() -> None:
    """Eight blocks on four devices: 11 activations relayed, 6 folded, forward."""
    costs = weighted_costs(chain(8, [(i, 7 - i) for i in range(4)]), [1.0] * 8)
    one = costs.boundary_bytes[1]
    row = Partition(sequential(4), (0, 2, 4, 6, 8))
    assert volume(relayed(costs, merged=False), row).total == 2 * 11 * one
    assert volume(relayed(costs), row).total == 2 * 9 * one  # two skips are the boundary itself
    folded = Partition(fold(4), tuple(range(9)))
    assert volume(costs, folded).total == 2 * 6 * one
    assert volume(costs, folded).skip == 0


def test_devices_and_links() -> None:
    """0 -> 1 -> 2 with a skip from 0 to 2: device 1 sees both boundaries, not the skip."""
    costs = ChainCosts(
        ("a", "b", "c"), *[(1.0,) * 3] * 2, *[(0,) * 3] * 2, (0, 5, 7), (SkipCost(0, 2, 3),)
    )
    moved = volume(costs, Partition(sequential(3), (0, 1, 2, 3)))
    assert (moved.boundary, moved.skip, moved.total) == (24, 6, 30)
    assert moved.links == {
        (0, 1): 5, (1, 0): 5, (1, 2): 7, (2, 1): 7, (0, 2): 3, (2, 0): 3
    }  # fmt: skip
    assert [moved.of_device(d) for d in range(3)] == [16, 24, 20]
    assert moved.hottest == 24
    looped = volume(costs, Partition(interleaved(1, 3), (0, 1, 2, 3)))
    assert looped.total == 0 and looped.hottest == 0


def test_soft_beats_the_exact_fold_and_direct_sends() -> None:
    """SD 2.1 at 512 px on 8 devices, 50 TFLOP/s each and 12.5 GB/s between them: fine units and
    skips that may travel move less than either, in a shorter time."""
    costs = fine_costs("sd-v2.1")
    costs = dataclasses.replace(
        costs,
        forward_s=tuple(t / 50 for t in costs.forward_s),
        backward_s=tuple(t / 50 for t in costs.backward_s),
    )
    link = Link(5e-6, 12.5e9)
    found = {
        "soft": (fold(8), Goal(link=link)),
        "exact": (fold(8), Goal(link=link, collocate=True)),
        "direct": (sequential(8), Goal(link=link)),
    }
    moved, load = {}, {}
    for way, (placement, goal) in found.items():
        partition = find_partition(costs, placement, goal)
        moved[way] = volume(costs, partition).total
        load[way] = max(goal.evaluate(costs, partition).load_s)
    assert moved["soft"] < min(moved["exact"], moved["direct"]), moved
    assert load["soft"] <= load["exact"]
