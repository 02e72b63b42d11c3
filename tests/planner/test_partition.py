"""Cuts: optimal against brute force, legal by the skip edges, and clear when there is none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from megatron_pulse.planner.partition import Partition, PartitionError, balanced_partition
from megatron_pulse.planner.partition import largest_fold as largest
from megatron_pulse.planner.placement import (
    Placement,
    fold,
    interleaved,
    make_placement,
    sequential,
)
from tests.planner.chains import HUNYUAN_DIT, SD_UNET, SDXL_UNET, UVIT_L, UVIT_S, chain

Edges = Sequence[tuple[int, int]]


def score(partition: Partition, weights: Sequence[int]) -> tuple[int, int]:
    """(largest device load, largest stage)."""
    placement = partition.placement
    stages = [
        sum(weights[i] for i in partition.layers_of_stage(s)) for s in range(placement.num_stages)
    ]
    loads = [
        sum(stages[s] for s in placement.stages_of_device(d)) for d in range(placement.num_devices)
    ]
    return max(loads), max(stages)


def is_legal(partition: Partition, edges: Edges) -> bool:
    return all(partition.device_of_layer(i) == partition.device_of_layer(j) for i, j in edges)


def all_partitions(num_layers: int, placement: Placement) -> list[Partition]:
    inner = itertools.combinations(range(1, num_layers), placement.num_stages - 1)
    return [Partition(placement, (0, *cuts, num_layers)) for cuts in inner]


def random_edges(rng: random.Random, num_layers: int) -> Edges:
    """Nested, crossing or no skips, each layer the source of at most one."""
    if rng.random() < 0.6:
        left = sorted(rng.sample(range(num_layers), 2 * rng.randint(0, num_layers // 2)))
        half = len(left) // 2
        return list(zip(left[:half], reversed(left[half:]), strict=True))
    return [
        (i, rng.randint(i + 1, num_layers - 1))
        for i in rng.sample(range(num_layers - 1), rng.randint(0, min(3, num_layers - 1)))
    ]


@pytest.mark.parametrize("seed", range(300))
def test_fold_is_optimal_among_all_legal_cuts(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, placement = rng.randint(4, 11), fold(rng.randint(2, 4))
    edges = random_edges(rng, num_layers)
    weights = [rng.randint(0, 9) for _ in range(num_layers)]
    for exact in (True, False):
        options = [
            score(p, weights)
            for p in all_partitions(num_layers, placement)
            if not exact or is_legal(p, edges)
        ]
        if not options:
            with pytest.raises(PartitionError, match="largest legal P"):
                balanced_partition(chain(num_layers, edges), weights, placement, exact)
            continue
        found = balanced_partition(chain(num_layers, edges), weights, placement, exact)
        assert found.placement == placement
        assert score(found, weights) == min(options)
        assert not exact or is_legal(found, edges)


@pytest.mark.parametrize("seed", range(100))
def test_sequential_is_optimal_and_ignores_skips(seed: int) -> None:
    rng = random.Random(seed)
    num_layers, placement = rng.randint(4, 12), sequential(rng.randint(2, 4))
    weights = [rng.randint(0, 9) for _ in range(num_layers)]
    found = balanced_partition(chain(num_layers, random_edges(rng, num_layers)), weights, placement)
    options = [score(p, weights) for p in all_partitions(num_layers, placement)]
    assert score(found, weights) == min(options)


@pytest.mark.parametrize("seed", range(60))
def test_several_stages_per_device_stay_near_the_optimum(seed: int) -> None:
    """Not optimal by promise: legal, non-empty, and within the documented bound of stages."""
    rng = random.Random(seed)
    placement = rng.choice([interleaved(2), interleaved(3), interleaved(2, 3), fold(2, 2)])
    num_layers = rng.randint(placement.num_stages, 12)
    weights = [rng.randint(1, 9) for _ in range(num_layers)]
    found = balanced_partition(chain(num_layers), weights, placement)
    assert list(found.cuts) == sorted(set(found.cuts))
    assert len(found.cuts) == placement.num_stages + 1
    options = [score(p, weights) for p in all_partitions(num_layers, placement)]
    assert min(options) <= score(found, weights)
    assert score(found, weights)[0] <= placement.num_chunks * min(stage for _, stage in options)
    assert score(found, weights)[0] <= 1.5 * min(options)[0]


@pytest.mark.parametrize("seed", range(100))
def test_largest_fold_is_the_largest_with_a_legal_cut(seed: int) -> None:
    rng = random.Random(seed)
    num_layers = rng.randint(2, 10)
    edges = random_edges(rng, num_layers)
    feasible = [
        p
        for p in range(1, num_layers // 2 + 1)
        if any(is_legal(c, edges) for c in all_partitions(num_layers, fold(p)))
    ]
    assert largest(chain(num_layers, edges)) == max(feasible, default=0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(SD_UNET, 13), (SDXL_UNET, 10), (HUNYUAN_DIT, 21), (UVIT_S, 7), (UVIT_L, 11)],
)
def test_largest_fold_of_published_backbones(
    shape: tuple[int, list[tuple[int, int]]], expected: int
) -> None:
    num_layers, edges = shape
    backbone = chain(num_layers, edges)
    assert largest(backbone) == expected
    found = balanced_partition(backbone, [1.0] * num_layers, fold(expected))
    assert is_legal(found, edges)
    with pytest.raises(PartitionError, match=rf"largest legal P .*: {expected}\b"):
        balanced_partition(backbone, [1.0] * num_layers, fold(expected + 1))


def test_unet_is_cut_by_its_edges_not_by_mirrored_indices() -> None:
    num_layers, edges = SD_UNET
    for num_waves in (1, 2, 3):
        found = balanced_partition(chain(num_layers, edges), [1.0] * 30, fold(4, num_waves))
        assert is_legal(found, edges)
        assert len(set(found.cuts)) == 8 * num_waves + 1
    message = r"keeps both ends of each of its 12 skips.*with 4 stages per device: 6\b"
    with pytest.raises(PartitionError, match=message):
        balanced_partition(chain(num_layers, edges), [1.0] * 30, fold(7, 2))


def test_conditioning_never_constrains() -> None:
    edges = [(0, 7), (1, 6)]
    weights = [1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]
    plain = balanced_partition(chain(8, edges), weights, fold(2))
    conditioned = chain(8, edges, {0: range(1, 8), 3: [5, 6]})
    assert len(conditioned.conditioning) == 2
    assert balanced_partition(conditioned, weights, fold(2)) == plain


def test_crossing_skips_that_fit_no_fold_say_so() -> None:
    backbone = chain(6, [(0, 3), (2, 5)])
    assert largest(backbone) == 1
    with pytest.raises(PartitionError, match=r"let skips travel \(exact=False\)"):
        balanced_partition(backbone, [1.0] * 6, fold(2))


def test_one_device_holds_the_whole_chain() -> None:
    for kind in ("sequential", "interleaved", "fold"):
        found = balanced_partition(chain(3, [(0, 2)]), [1, 2, 3], make_placement(kind, 1))
        assert found.cuts == (0, 3)


def test_bad_input_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"3 layers, too few for 4 stages.*P.*: 3\b"):
        balanced_partition(chain(3), [1, 1, 1], sequential(4))
    with pytest.raises(PartitionError, match=r"too few for 4 stages.*: 1\b"):
        balanced_partition(chain(3), [1, 1, 1], fold(2))
    with pytest.raises(PartitionError, match="needs a fold"):
        balanced_partition(chain(8), [1] * 8, interleaved(2), exact=True)
    for weights in ([1, 1], [1, 1, -1], [1, 1, float("nan")], [1, float("inf"), 1]):
        with pytest.raises(ValueError, match="3 finite weights"):
            balanced_partition(chain(3), weights, sequential(2))
