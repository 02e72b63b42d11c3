"""The harness of the claim, on a cell of two ranks: its bytes, its times and its predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.layout.layouts import ROW
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.evaluate import Evaluator
from tests.benchmarks.contestant import OF_ADAPTERS, Contestant, Engine
from tests.benchmarks.emulation import emulate, num_bytes
from tests.benchmarks.network import unavailable
from tests.benchmarks.predict import blocking_1f1b

RATE = 2e9
COUNT = 2
SPLIT = Config(2, 1, 1, 4, ROW, split=True, max_in_flight=True)


@pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}")
def test_contestants_send_what_they_should_and_take_as_long_as_they_must() -> None:
    from tests.benchmarks.cell import compute_s, run_cell
    from tests.benchmarks.contestants import contestants, needed_bytes

    emulation = emulate("uvit-s", 0.1)
    link = emulation.link(RATE)
    entered = contestants(emulation, link, 2, COUNT, solver_s=0.0)
    sharded = {Engine.FSDP2, Engine.HSDP}
    assert {c.engine for c in entered} == set(Engine) - sharded - set(OF_ADAPTERS)
    results = run_cell(emulation.backbone, entered, 2, emulation.rate_mbit(RATE), 1)
    for contestant, result in zip(entered, results, strict=True):
        assert result.contestant == contestant.name
        if contestant.engine is not Engine.MEGATRON_INTERLEAVED:  # may pad
            assert result.sent_bytes == contestant.expected_bytes
        assert 1.0 < result.wire_bytes / result.sent_bytes < 1.25
        least = max(compute_s(contestant) / 2, result.sent_bytes / 2 / link.bytes_per_s / 1.3)
        assert min(result.seconds) > least
        assert min(result.seconds) < 3 * result.predicted_s + 0.2
        assert result.memory_bytes <= 1.001 * needed_bytes(contestant)


def test_the_picks_memory_is_the_plans() -> None:
    """Where weight gradients wait long: of what a stage keeps only a part does."""
    from tests.benchmarks.contestants import needed_bytes, tuned

    emulation = emulate("uvit-s", 0.1)
    link, size, config = ClusterLink("other", RATE / 1e9, 10.0, BandwidthScope.DEVICE), 4, SPLIT
    cluster = Cluster("claim", 2, 1, 32.0, "V100-32GB", link, link)
    outcome = Evaluator(emulation.profile, cluster, 8 * size).evaluate(config)
    emulated = emulation.variant(size, ActivationPolicies())
    best = tuned(emulated, emulation.link(RATE), outcome, [], f"b={size}")
    problem = outcome.problem
    assert best.wgrad_bytes == problem.wgrad_bytes and best.saved_bytes == problem.activation
    beside = max(outcome.memory_bytes) - needed_bytes(best)  # messages, and a layer that runs
    assert 0 <= beside < 0.2 * max(outcome.memory_bytes)
    assert best.peak_memory(best.schedule) == peak_memory(problem, best.schedule)


def test_blocking_1f1b_without_links_is_1f1b() -> None:
    assert blocking_1f1b((1.0,) * 4, (2.0,) * 4, (0.0,) * 5, 8) == pytest.approx(3 * (8 + 4 - 1))


def test_blocking_1f1b_waits_for_every_transfer() -> None:
    # One microbatch over two stages: forward, tensor, forward, backward, gradient, backward.
    assert blocking_1f1b((1.0,) * 2, (2.0,) * 2, (0.0, 0.5, 0.0), 1) == pytest.approx(7.0)


def test_ratio_of_communication_to_computing_is_the_real_one() -> None:
    emulation = emulate("uvit-s", 0.1)
    real, slow = emulation.costs, emulation.slow
    rate = 10e9
    at = len(real.names) // 2
    message = slow.boundary_bytes[at] / emulation.link(rate).bytes_per_s
    wanted = (real.boundary_bytes[at] / rate) / sum(real.forward_s)
    assert message / sum(slow.forward_s) == pytest.approx(wanted, rel=0.01)
    for split in (False, True):
        ours, theirs = slow.of_schedule(split), real.of_schedule(split)
        for name in ("forward_s", "backward_s", "weight_grad_s"):
            scaled = [emulation.time_scale * s for s in getattr(theirs, name)]
            assert getattr(ours, name) == pytest.approx(scaled)
    assert [s.num_bytes for s in slow.skips] == [
        num_bytes(s.spec) for s in emulation.backbone.skips
    ]


def test_who_is_predicted_to_be_slow_is_passed_over_but_the_soonest_of_his_kind() -> None:
    from tests.benchmarks.headline import within

    entered = [
        Contestant(engine.value, engine, 1, predicted_s=seconds)
        for engine, seconds in {
            Engine.OURS: 9.0,
            Engine.MEGATRON_1F1B: 9.0,
            Engine.TORCH_1F1B: 2.0,
            Engine.TORCH_ZBV: 2.7,
            Engine.DATA_PARALLEL: 5.0,
            Engine.FSDP2: 6.0,
            Engine.HSDP: 2.5,
            Engine.TORCH_INTERLEAVED: 2.5,
        }.items()
    ]
    found = within(entered, 1.3)
    assert [c.engine for c in found[1]] == [Engine.TORCH_ZBV, Engine.FSDP2]
    slow = [c for c in entered if c.engine is not Engine.HSDP]
    assert [c.engine for c in within(slow, 1.3)[1]] == [Engine.TORCH_ZBV]
    assert {c.name for c in entered} == {c.name for several in found for c in several}
    assert within(entered, float("inf")) == (entered, [])


def test_report_says_what_was_measured(tmp_path: Path) -> None:
    from tests.benchmarks.headline_report import write_report

    def result(name: str, engine: str, seconds: list[float], wire: float) -> dict[str, object]:
        return {
            "contestant": name,
            "engine": engine,
            "seconds": seconds,
            "wire_bytes": wire,
            "sent_bytes": 0.97 * wire,
            "expected_bytes": 1,
            "memory_bytes": 3e9,
            "state_bytes": 1e9,
            "predicted_s": 1.0,
            "compute_s": 2.0,
            "bubble": 0.5,
            "solver": "",
            "delays": [0.0, 0.0],
        }

    cell = {
        "backbone": "uvit-2.7b",
        "rate_gbs": 1.25,
        "ranks": 4,
        "ranks_per_node": 1,
        "microbatches": 8,
        "micro_batch_size": 16,
        "time_scale": 1.0,
        "byte_divisor": 128.0,
        "rate_mbit": 20.0,
        "num_skips": 3,
        "pick": {"config": "P=4, fold exact", "contestant": "fold exact", "predicted_s": 1.0},
        "results": [
            result("fold exact", "ours", [1.0, 1.1], 1e6),
            result("Megatron 1F1B", "Megatron 1F1B", [2.0, 2.2], 9e6),
            result("torch ZBV", "torch ZBV", [0.5, 0.5], 9e6),
        ],
        "passed_over": {"torch 1F1B": 1.28},
    }
    text = write_report(json.loads(json.dumps({"cells": [cell], "volumes": []})), tmp_path)
    assert (
        "| uvit-2.7b | 128 | - | 1.25 | fold exact | 121.9 | 2.00 (2.00 to 2.00) | torch ZBV |"
        in text
    )
    assert "0 of 1 cells with skips" in text
    assert "torch ZBV takes 52 % less time than ours" in text
    assert "| uvit-2.7b | 128 | - | 1.25 | torch 1F1B | 100.0 |" in text
    assert {p.name for p in tmp_path.iterdir()} >= {"report.md", "throughput.png", "throughput.svg"}
