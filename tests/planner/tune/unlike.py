"""Random chains on small clusters of unlike devices, for the tuner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.unlike_devices import combine
from tests.planner.tune.problems import cluster, profile

_SECONDS = [name for name in LayerTimes.__dataclass_fields__ if name.endswith("_s")]


def slower(chain: Profile, rng: random.Random, times: tuple[float, float]) -> Profile:
    """``chain`` on another device, where each layer takes its own multiple within ``times``."""
    factors = [rng.uniform(*times) for _ in chain.layers]

    def of(rows: Sequence[LayerTimes]) -> tuple[LayerTimes, ...]:
        return tuple(
            replace(row, **{name: factor * getattr(row, name) for name in _SECONDS})
            for row, factor in zip(rows, factors, strict=True)
        )

    times_of = {size: of(rows) for size, rows in chain.times.items()}
    return replace(chain, device=f"up to {times[1]:g} times as slow", times=times_of)


def with_kinds(machine: Cluster, names: Sequence[str], memory_gb: Sequence[float]) -> Cluster:
    """``machine`` with devices of these kinds; the k-th kind is the k-th letter."""
    kinds = {
        name: DeviceKind(name, gb, 1.0, DeviceFigures(10.0 / (k + 1), 500.0 / (k + 1)))
        for k, (name, gb) in enumerate(zip("abc", memory_gb, strict=False))
    }
    return machine.of_kinds([kinds[name] for name in names])


def box(memory_gb: Sequence[float] = (16.0, 10.0), times: tuple[float, float] = (1.5, 3.0),
        batch: int = 16, layers: int = 14, skips: int = 6) -> Evaluator:  # fmt: skip
    """A box with one fast and one slow device."""
    rng = random.Random(0)
    chain = profile(rng, layers, skips)
    own = {"a": chain, "b": slower(chain, rng, times)}
    return Evaluator(combine(own), with_kinds(cluster(1, 2), "ab", memory_gb), batch)


def random_unlike(seed: int) -> Evaluator:
    """Two to eight devices of two or three kinds in any order, on one node or several."""
    rng = random.Random(seed)
    nodes, inside = rng.choice([(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1)])
    speeds = {"intra_gbs": rng.choice([2.0, 20.0, 200.0]), "inter_gbs": rng.choice([0.5, 5.0])}
    machine = cluster(nodes, inside, **speeds)
    layers = rng.randint(8, 14)
    skips = rng.choice([0, layers // 2 - 2, layers // 2 - 1])
    chain = profile(rng, layers, skips, rng.choice([0.5, 4.0]), saved_mb=rng.choice([20.0, 120.0]))
    kinds = {"a": chain, "b": slower(chain, rng, (0.8, 3.0)), "c": slower(chain, rng, (0.5, 2.0))}
    names = [*"abc"[: rng.randint(2, 3)]]
    names = [*names, *rng.choices(names, k=machine.num_devices)][: machine.num_devices]
    rng.shuffle(names)
    used = {name: kinds[name] for name in dict.fromkeys(names)}
    memory = [rng.choice([3.0, 4.0, 6.0, 40.0]) for _ in "abc"]
    batch = machine.num_devices * rng.choice([1, 2, 4])
    evaluator = Evaluator(combine(used), with_kinds(machine, names, memory), batch)
    evaluator.effort = 1
    return evaluator
