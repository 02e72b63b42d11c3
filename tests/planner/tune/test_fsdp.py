"""FSDP2 baseline: compared with all configurations, and with hand arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from math import inf

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.fsdp_layout import Gathering
from megatron_pulse.planner.tune.estimate import OPTIMIZER_BYTES
from megatron_pulse.planner.tune.fsdp.baseline import (
    collective_seconds,
    fsdp_baseline,
    groups,
)
from megatron_pulse.planner.tune.fsdp.configs import UNITS, FsdpConfigs
from megatron_pulse.planner.tune.fsdp.layer_dp import (
    ActivationRoom,
    LayerPolicy,
    cheapest_recompute,
)
from megatron_pulse.planner.tune.fsdp.recompute import RecomputeCosts
from megatron_pulse.planner.tune.fsdp.step import (
    ShardedUnit,
    Sharding,
    least_s,
    step_s,
)
from megatron_pulse.profile.profile import Profile
from tests.planner.tune.problems import cluster, profile

ADAM_S = 1e-10
SIZES = (1, 2, 4, 8, 16)


def soonest_of_all(
    chain_: Profile,
    where: Cluster,
    samples: int,
    adam_s: float = ADAM_S,
    exchanging: Callable[[int, int], tuple[float, float]] | None = None,
) -> float | None:
    """Seconds of the fastest of all configurations, each simulated."""
    each = samples // where.num_devices
    sizes = [size for size in SIZES if each % size == 0]
    of = chain_, where.num_devices, samples, where.usable_bytes, sizes
    configs = FsdpConfigs(*of, exchanging=exchanging)
    byte_s = adam_s / OPTIMIZER_BYTES if chain_.threads else None
    fitted = map(configs.fit, chain.from_iterable(map(configs.configs, groups(where))))
    trained = sum(layer.trained_parameters for layer in chain_.layers)
    return min(
        (
            step_s(one.sharding, collective_seconds(where, one.sharding, byte_s))
            + adam_s * trained / one.sharding.group
            for one in fitted
            if one.needs_bytes <= where.usable_bytes
        ),
        default=None,
    )


def soonest_of_all_choices(layers: Profile, where: Cluster, samples: int) -> float | None:
    """The same with every choice of layers that are computed again, all or what is cheap."""
    each = samples // where.num_devices
    sizes = [size for size in SIZES if each % size == 0]
    configs = FsdpConfigs(layers, where.num_devices, samples, where.usable_bytes, sizes)
    num = len(layers.layers)
    masks = [
        ActivationPolicies(
            recompute=(i for i in range(num) if mask[i] == 1),
            selective=(i for i in range(num) if mask[i] == 2),
        )
        for mask in product(range(3), repeat=num)
    ]
    least = inf
    every = (config for group in groups(where) for config in configs.configs(group))
    for config, activations in product(
        (c for c in every if c.layout.starts == configs.starts(UNITS[0])), masks
    ):
        fitted = configs.costed(config, activations)
        if fitted.needs_bytes <= where.usable_bytes:
            least = min(least, step_s(fitted.sharding, collective_seconds(where, fitted.sharding)))
    return None if least == inf else least


def test_fsdp_baseline_recompute_is_optimal() -> None:
    """Four layers; refused only if no choice fits."""
    num_recomputed = 0
    for seed in range(20):
        rng = random.Random(seed)
        layers = profile(rng, 4, 1, saved_mb=60.0, dear=(0.3, 0.7))
        where = cluster(1, 2, rng.uniform(0.9, 1.6), intra_gbs=rng.choice([2.0, 20.0]))
        samples = 2 * rng.choice([1, 2])
        found = fsdp_baseline(layers, where, samples)
        least = soonest_of_all_choices(layers, where, samples)
        assert (found and found.step_s) == (least and pytest.approx(least))
        if found is not None:
            assert found.fitted.needs_bytes <= where.usable_bytes
            num_recomputed += bool(found.fitted.activations)
    assert num_recomputed > 5


@pytest.mark.parametrize("seed", range(30))
def test_cheapest_recompute_is_optimal(seed: int) -> None:
    """Room varies from layer to layer, and neighbours share bytes."""
    rng = random.Random(seed)
    layers, rooms = list[list[LayerPolicy]](), list[ActivationRoom]()
    left = 0.0
    for _ in range(7):
        saved, shared = rng.uniform(1, 9), rng.uniform(0, 0.5)
        held = (rng.uniform(0, 0.5) * saved + shared, rng.uniform(0.3, 0.9) * saved)
        layers.append(
            [
                LayerPolicy(0.0, saved),
                LayerPolicy(rng.uniform(0.1, 1), held[1], saved - held[1]),
                LayerPolicy(rng.uniform(0.5, 2), held[0], rng.uniform(1, 2) * saved, True, shared),
            ]
        )
        left += rng.uniform(0.5, 1) * saved
        rooms.append(ActivationRoom(left, left + rng.uniform(0, 8)))
    least: tuple[float, list[int]] | None = None
    for numbers in product(range(3), repeat=len(layers)):
        seconds = held_ = 0.0
        before = False
        for number, ways, room in zip(numbers, layers, rooms, strict=True):
            way = ways[number]
            seconds += way.seconds
            held_ += way.held - (way.shared if before and way.recomputed else 0.0)
            before = way.recomputed
            if held_ > room.held or held_ + way.made > room.making:
                break
        else:
            least = min(least or (inf, []), (seconds, list(numbers)))
    found = cheapest_recompute(layers, rooms)
    assert (found is None) == (least is None)
    if found is not None and least is not None:
        assert sum(ways[n].seconds for n, ways in zip(found, layers, strict=True)) == (
            pytest.approx(least[0])
        )


@pytest.mark.parametrize("seed", range(5))
def test_what_passes_by_is_counted_where_only_some_are_computed_again(seed: int) -> None:
    """Layers that are all computed again keep it once; what is chosen fits in any case."""
    rng = random.Random(seed)
    whole = profile(rng, 12, 3, megabytes=20.0, saved_mb=60.0)
    sharing = tuple(replace(x, passed_bytes=15_000_000) for x in whole.times[1])
    recomputing = RecomputeCosts(replace(whole, times={1: sharing}), 1)
    saved, num_recomputed = sum(recomputing.costs.saved_bytes), 0
    for share in (0.6, 0.7, 0.8, 0.9):
        found = recomputing.chosen((ActivationRoom(share * saved, share * saved),) * 12)
        assert recomputing.needed_bytes(found) <= share * saved
        num_recomputed += bool(found.recompute)
    assert num_recomputed > 2


@pytest.mark.parametrize("seed", range(6))
def test_none_of_all_ways_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    nodes, inside = rng.choice([(1, 2), (1, 4), (2, 2), (4, 1)])
    memory, rate = rng.choice([1.2, 2.5, 16.0]), rng.choice([0.5, 5.0, 50.0])
    where = cluster(nodes, inside, memory, intra_gbs=4 * rate, inter_gbs=rate)
    layers = profile(rng, rng.randint(6, 12), 2, saved_mb=rng.choice([5.0, 60.0]))
    if seed % 2:  # on CPUs collectives overlap with nothing
        layers = replace(layers, device="CPU of a test", threads=1)
    samples = where.num_devices * rng.choice([2, 4, 8])
    found = fsdp_baseline(layers, where, samples, ADAM_S)
    least = soonest_of_all(layers, where, samples)
    assert (found and found.step_s) == (least and pytest.approx(least))
    if found is not None:
        assert found.fitted.needs_bytes <= where.usable_bytes


def test_a_step_by_hand() -> None:
    """Two nodes of one device with 1 GB/s: 10 ms for half of each unit, and 10 us to begin."""
    where = cluster(2, 1, inter_gbs=1.0)
    unit = ShardedUnit(0.1, 0.2, 20_000_000, 20e6, 160e6)
    way = Sharding((unit,) * 3, 2, 1, 2, Gathering.PASS, False, 1)
    moved_s = 10e-6 + 0.01
    # The first gathering and the last reduction are not hidden, all others are.
    assert step_s(way, collective_seconds(where, way)) == pytest.approx(0.9 + 2 * moved_s)
    # Sent for longer than computed: 3 units forth, 2 back (the last is there), 3 reduced.
    busy = replace(way, units=(replace(unit, forward_s=1e-6, backward_s=1e-6),) * 3)
    assert step_s(busy, collective_seconds(where, busy)) == pytest.approx(8 * moved_s, rel=1e-3)
    # On CPUs all of these are waited for, and 20 MB are read or written four and six times.
    one_by_one = collective_seconds(where, way, byte_s=1e-10)
    expected_s = 0.9 + 8 * moved_s + 0.002 * (5 * 4 + 3 * 6)
    assert step_s(way, one_by_one) == pytest.approx(expected_s)
    assert least_s(way, one_by_one, 0.9) == pytest.approx(expected_s)


def test_shards_within_a_node_are_summed_over_the_network() -> None:
    """Two nodes of four: gathered over NVLink, summed by four rings that share 5 GB/s."""
    where = cluster(2, 4)
    unit = ShardedUnit(0.1, 0.2, 40_000_000, 40e6, 320e6)
    found = collective_seconds(where, Sharding((unit,), 8, 1, 4, Gathering.MICROBATCH, False, 1))
    assert found.apart
    assert found.gather == found.reduce == pytest.approx((3 * (5e-6 + 1e7 / 50e9),))
    assert found.sum == pytest.approx((2 * (10e-6 + 5e6 / (5e9 / 4)),))
    assert list(groups(where)) == [2, 4, 8]


def test_frozen_parameters_are_gathered_and_no_more() -> None:
    whole = profile(random.Random(0), 8, 2)
    frozen = replace(
        whole, layers=tuple(replace(x, frozen_parameters=x.parameters) for x in whole.layers)
    )
    made = [FsdpConfigs(p, 4, 16, 1e12, [4]) for p in (whole, frozen)]
    trained, still = (one.fit(next(one.configs(4))).sharding for one in made)
    assert [u.moved_bytes for u in trained.units] == [u.moved_bytes for u in still.units]
    assert {u.trained for u in trained.units} == {1.0} and {u.trained for u in still.units} == {0.0}
    assert collective_seconds(cluster(), still).reduce == (0.0,) * len(still.units)
    assert sum(u.state_bytes for u in trained.units) == 12 * 8 * 20_000_000
    assert sum(u.state_bytes for u in still.units) == 2 * 8 * 20_000_000
    for way, each in ((trained, 4), (still, 0)):
        assert sum(u.summed_bytes for u in way.units) == each * 8 * 20_000_000


def test_says_who_is_ahead_and_nothing_where_nothing_can_be_said() -> None:
    layers, where = profile(random.Random(0), 8, 2), cluster()
    found = fsdp_baseline(layers, where, 16)
    assert found is not None
    rate = found.throughput
    assert found.beside(rate / 1.1).endswith(
        "10 % faster than this plan, but flags (or CPUs) exclude it"
    )
    assert found.beside(rate / 0.9).endswith("10 % slower than this plan")
    assert found.beside(rate * 1.001).endswith("as fast as this plan")
    assert fsdp_baseline(layers, where, 15) is None  # four devices do not divide it
    assert fsdp_baseline(layers, cluster(devices_per_node=1), 16) is None
    assert fsdp_baseline(layers, cluster(memory_gb=0.5), 16) is None
