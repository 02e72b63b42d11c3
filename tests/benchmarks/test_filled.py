"""The harness of encoders beside the alternatives: who encodes what, and what arrives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.diffusionpipe import greedy
from megatron_pulse.planner.bubble_fill.filled_schedule import filled_schedule
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import sequential
from megatron_pulse.planner.schedule.registry import make_schedule
from tests.benchmarks.contestant import Contestant, Encoders, Engine
from tests.benchmarks.contestants import Planner
from tests.benchmarks.emulation import emulate, relaying
from tests.benchmarks.sleeping_encoders import Encoded, result_faults
from tests.ranks import run_ranks

COUNT, SIZE = 4, 2
SAMPLES = COUNT * SIZE


def components() -> tuple[Component, ...]:
    def layers(count: int, seconds: float) -> tuple[FrozenLayer, ...]:
        return tuple(FrozenLayer(f"{i}", {1: seconds}, output_bytes=64) for i in range(count))

    text = Component("text", layers(3, 4e-4), (), 32, (0, 1))
    return text, Component("vae", layers(2, 1e-3), (), 48, (0,))


@pytest.fixture(scope="module")
def entered() -> tuple[Contestant, Contestant, Backbone]:
    """1F1B with relayed skips on our executor: filled by the greedy, and with encoders in front."""
    emulation = emulate("uvit-s", 0.02)
    planner = Planner(emulation, emulation.link(10e9), 2, COUNT, 0.0)
    row = planner.cut(planner.relayed, sequential(2))
    assert row is not None
    problem = planner.problem(planner.relayed, row, False)
    order = make_schedule("1f1b", row.placement, COUNT)
    filling = FillProblem(problem, order, components(), SAMPLES, None, Link())
    made = replace(
        planner.make("greedy", Engine.OURS, planner.relayed, row, problem),
        schedule=filled_schedule(filling, greedy(filling)),
        encoders=Encoders(components(), SAMPLES),
    )
    return made, replace(made, schedule=order), relaying(emulation.backbone, planner.relayed)


def seen(contestants: list[Contestant], backbone: Backbone) -> list[Any]:
    """Per contestant what ran in its second step, faults of results, and bytes sent by steps."""
    import torch.distributed as dist

    from tests.benchmarks import runners, sleeping_encoders
    from tests.benchmarks.contestant import Runner

    dist.init_process_group("gloo")
    made: list[Encoded] = []

    class Kept(Encoded):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    sleeping_encoders.Encoded = Kept  # type: ignore[misc]
    found: list[Any] = []
    for contestant in contestants:
        runner = runners.ours(contestant, backbone)
        runner.step()
        before = runner.sent_bytes()
        runner.step()
        found.append((dict(made[-1].ran), faults(made[-1]), runner.sent_bytes() - before))
    nothing = Runner(lambda: None, lambda: 0)
    alone = sleeping_encoders.before_step(nothing, Encoders(components(), SAMPLES), True)
    alone.step()
    alone.step()
    found.append((dict(made[-1].ran), faults(made[-1]), 0))
    dist.barrier()
    return found


def faults(encoded: Encoded) -> list[str]:
    names = {name for results in encoded.results for name in results}
    return [*result_faults(encoded, components()), *sorted(names)]


def test_every_layer_of_an_encoder_runs_once_on_every_sample(
    entered: tuple[Contestant, Contestant, Backbone],
) -> None:
    filled, front, backbone = entered
    ranks = run_ranks(2, seen, [filled, front], backbone)
    wanted = {
        (c.name, layer, sample)
        for c in components()
        for layer in range(len(c.layers))
        for sample in range(SAMPLES)
    }
    for number in range(3):
        ran: dict[tuple[str, int, int], int] = {}
        for rank in ranks:
            for key, count in rank[number][0].items():
                ran[key] = ran.get(key, 0) + count
        assert ran == dict.fromkeys(wanted, 1)
    # In idle time results go to those who read them, in front to all; a replica has its own.
    assert [rank[0][1] for rank in ranks] == [["text", "vae"], ["text"]]
    assert [rank[1][1] for rank in ranks] == [["text", "vae"]] * 2
    mine = {sample for _, _, sample in ranks[1][2][0]}
    assert mine == {*range(1, SAMPLES, 2)} and ranks[1][2][1] == ["text", "vae"]
    assert sum(r[0][2] for r in ranks) > sum(r[1][2] for r in ranks) == filled.expected_bytes


def test_results_of_another_sample_are_told() -> None:
    encoded = Encoded.__new__(Encoded)
    encoded.batches = [{"index": torch.arange(2)}]
    right = torch.tensor([[0.0, 3.0], [1.0, 3.0]])
    encoded.results = [{"text": {"result": right}}]
    assert result_faults(encoded, components()) == []
    encoded.results = [{"text": {"result": right.flip(0)}}]
    assert "text: results are" in result_faults(encoded, components())[0]
