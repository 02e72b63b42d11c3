"""Small chains with random costs on small clusters, for the tuner's tests."""

from __future__ import annotations

import random

from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.tune.config import Choices, Config, Recompute, configs
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.layer_records import LayerTimes, ProfiledLayer, ProfiledSkip, ShardSums
from megatron_pulse.profile.profile import Profile, Source


def cluster(
    nodes: int = 1,
    devices_per_node: int = 4,
    memory_gb: float = 16.0,
    intra_gbs: float = 50.0,
    inter_gbs: float = 5.0,
    host_gbs: float = 0.0,
) -> Cluster:
    """Devices of 10 TFLOP/s; the node's devices share the link to other nodes, and have one each to
    the host, if any."""
    inter = ClusterLink("infiniband", inter_gbs, 10.0, BandwidthScope.NODE) if nodes > 1 else None
    return Cluster(
        "test",
        nodes,
        devices_per_node,
        memory_gb,
        DeviceFigures(10.0, 500.0),
        ClusterLink("nvlink", intra_gbs, 5.0, BandwidthScope.DEVICE),
        inter,
        host=ClusterLink("pcie", host_gbs, 10.0, BandwidthScope.DEVICE) if host_gbs else None,
    )


def profile(
    rng: random.Random,
    num_layers: int,
    num_skips: int,
    megabytes: float = 2.0,
    parameters: int = 20_000_000,
    saved_mb: float = 100.0,
    even: bool = False,
    dear: tuple[float, float] | None = None,
) -> Profile:
    """Layers of some milliseconds a sample; nested skips from the outermost inwards. Of what layers
    save a share within ``dear`` is not cheap (None: not known)."""
    weights = [1.0 if even else rng.uniform(0.5, 1.5) for _ in range(num_layers)]
    shares = [0.0 if dear is None else rng.uniform(*dear) for _ in weights]
    size = round(megabytes * 1e6)
    sums = ShardSums((size, size), (size, size))

    def times(batch: int) -> tuple[LayerTimes, ...]:
        return tuple(
            LayerTimes(
                forward_s=1e-3 * w * (0.3 + batch),
                input_grad_s=1e-3 * w * (0.3 + batch),
                weight_grad_s=0.9e-3 * w * (0.3 + batch),
                forward_spread_s=0.0,
                input_grad_spread_s=0.0,
                weight_grad_spread_s=0.0,
                saved_bytes=round(batch * w * saved_mb * 1e6),
                peak_bytes=round(batch * w * saved_mb * 1.2e6),
                selective_bytes=round(batch * w * share * saved_mb * 1e6),
                selective_s=0.1e-3 * w * (0.3 + batch) * (share > 0),
            )
            for w, share in zip(weights, shares, strict=True)
        )

    return Profile(
        backbone={"name": "test chain", "options": {}},
        source=Source.ANALYTIC,
        device="test",
        memory_bytes=16 * 10**9,
        dtype="bfloat16",
        recompute=False,
        method="made up",
        layers=tuple(
            ProfiledLayer(f"layer{i}", parameters, size, parameters // 2 * 2, sums)
            for i in range(num_layers)
        ),
        times={1: times(1), 8: times(8)},
        skips=tuple(
            ProfiledSkip(f"skip{i}", i, num_layers - 1 - i, size) for i in range(num_skips)
        ),
    )


def random_evaluator(seed: int) -> tuple[Evaluator, list[Config]]:
    """A problem that is small enough to simulate all of its configs, and these."""
    rng = random.Random(seed)
    nodes, inside = rng.choice([(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (1, 6), (2, 4)])
    machine = cluster(
        nodes,
        inside,
        memory_gb=rng.choice([3.0, 6.0, 40.0]),
        intra_gbs=rng.choice([2.0, 20.0, 200.0]),
        inter_gbs=rng.choice([0.5, 5.0]),
    )
    layers = rng.randint(8, 14)
    skips = rng.choice([0, layers // 2 - 2, layers // 2 - 1])
    chain = profile(rng, layers, skips, rng.choice([0.5, 4.0]), saved_mb=rng.choice([20.0, 120.0]))
    few = machine.num_devices > 4
    count = machine.num_devices * (1 if few else rng.choice([1, 2, 3]))
    evaluator = Evaluator(chain, machine, count, sequence_parallel=rng.random() < 0.5)
    evaluator.effort = 1
    both, one = (False, True), rng.choice([(False,), (True,)])
    choices = Choices(
        tensor=(1, 2) if few else rng.choice([(1,), (1, 2)]),
        micro_batch_size=rng.choice([(1,), (1,), (1, 2)]),
        split=one if few else both,
        max_in_flight=rng.choice([(False,), both]),
        recompute=rng.choice(
            [(Recompute.NEVER,), (Recompute.ALWAYS,), (Recompute.NEVER, Recompute.NEEDED)]
        ),
        distributed_optimizer=rng.choice([(False,), (True,)]),
    )
    found = configs(machine.num_devices, inside, count, bool(skips), choices)
    return evaluator, list(found)
