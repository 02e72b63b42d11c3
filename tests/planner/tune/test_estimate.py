"""What is worked out of a config without a schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.planner.layout.layouts import ROW, WHOLE
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.estimate import OPTIMIZER_BYTES
from megatron_pulse.planner.tune.evaluate import Evaluator
from tests.planner.tune.problems import cluster, profile

CHAIN = profile(random.Random(0), 4, 1)
MEASURED = replace(cluster(), device="profile.json")
"""A cluster whose device is a measured profile."""


@pytest.mark.parametrize(
    ("machine", "device", "threads", "gb_per_s"),
    [
        (cluster(), "test", 0, 500),  # what the cluster says comes first
        (replace(cluster(), device="V100-32GB"), "NVIDIA H200", 0, 900),
        (MEASURED, "NVIDIA A100-SXM4-80GB", 0, 2039),
        (MEASURED, "NVIDIA H200", 0, 4800),
        (MEASURED, "CPU (Xeon, 1 thread)", 1, 10),
        (MEASURED, "a CPU of an older profile", 4, 10),
    ],
)
def test_the_optimizer_takes_as_long_as_its_device_needs(
    machine: Cluster, device: str, threads: int, gb_per_s: float
) -> None:
    evaluator = Evaluator(replace(CHAIN, device=device, threads=threads), machine, 8)
    seconds = evaluator.optimizer_s(Config(1, 4, 1, 1, WHOLE), 1e9)
    assert seconds == pytest.approx(OPTIMIZER_BYTES / gb_per_s)
    halved = Config(1, 4, 1, 1, WHOLE, distributed_optimizer=True)
    assert evaluator.optimizer_s(halved, 1e9) == pytest.approx(seconds / 4)


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA H100 PCIe"])
def test_a_device_whose_memory_is_not_known_is_refused(device: str) -> None:
    with pytest.raises(ClusterError, match="bandwidth_gbs: Y") as error:
        Evaluator(replace(CHAIN, device=device), MEASURED, 8)
    assert device in str(error.value)
    Evaluator(replace(CHAIN, device=device), cluster(), 8)


def test_a_measured_optimizer_comes_before_its_bytes() -> None:
    layers = tuple(replace(layer, optimizer_s=0.25) for layer in CHAIN.layers)
    evaluator = Evaluator(replace(CHAIN, layers=layers, device="NVIDIA L40S"), MEASURED, 8)
    held = sum(layer.parameters for layer in layers)
    config = Config(1, 4, 1, 1, WHOLE)
    assert evaluator.optimizer_s(config, held) == pytest.approx(0.25 * len(layers))
    divided = replace(config, distributed_optimizer=True)
    assert evaluator.optimizer_s(divided, held) == pytest.approx(0.25 * len(layers) / 4)


def test_what_the_runtime_adds_lengthens_every_operation() -> None:
    config = Config(2, 1, 1, 1, ROW, split=True)
    machine = cluster(devices_per_node=2)
    plain = Evaluator(CHAIN, machine, 4).problem(config, 4)
    slowed = Evaluator(CHAIN, replace(machine, operation_us=500), 4).problem(config, 4)
    for name in ("forward", "backward", "weight_grad"):
        pairs = zip(getattr(plain, name), getattr(slowed, name), strict=True)
        assert [b - a for a, b in pairs] == pytest.approx([5e-4] * 2)


def test_collectives_have_their_own_efficiency_and_latency() -> None:
    machine = replace(
        cluster(intra_gbs=10.0),
        all_reduce_efficiency=0.5,
        all_gather_efficiency=0.25,
        collective_latency=3.0,
    )
    ranks, latency_s = range(4), 3 * 3 * 5e-6
    assert machine.allreduce_s(4e9, ranks) == pytest.approx(2 * (3 / 5 + latency_s))
    assert machine.reduce_scatter_s(4e9, ranks) == pytest.approx(3 / 5 + latency_s)
    assert machine.all_gather_s(4e9, ranks) == pytest.approx(3 / 2.5 + latency_s)
