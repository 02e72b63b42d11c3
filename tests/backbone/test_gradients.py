"""Gradients that a partly frozen chain computes."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.planner.layout.placement import Partition, make_placement, sequential
from megatron_pulse.planner.layout.routes import Payload
from megatron_pulse.planner.partition.memory import kept_bytes
from megatron_pulse.planner.partition.volume import volume
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.profile.trainable import TrainedError, choose_trained
from tests.toys import toy_backbone

SKIPS = [(0, 7), (1, 6), (2, 5)]


def chain(*trained: int) -> Backbone:
    """An embedder that layers 2 and 6 use, 8 blocks and a head, of which those are trained."""
    whole = toy_backbone(8, SKIPS, conditioned=(2, 6), embedder=True)
    layers = [
        dataclasses.replace(layer, trained=i in trained) for i, layer in enumerate(whole.layers)
    ]
    return dataclasses.replace(whole, layers=tuple(layers))


def test_a_gradient_is_wanted_where_something_before_is_trained() -> None:
    wanted = required_gradients(chain(5))
    assert wanted.layers == (*[False] * 5, *[True] * 5)
    assert list(map(any, wanted.boundaries)) == [*[False] * 6, *[True] * 4]
    assert not any(wanted.skips.values()) and not wanted.conditioning["temb"]
    wanted = required_gradients(chain(2))  # block 1
    assert wanted.skips == {"s0-7": False, "s1-6": True, "s2-5": True}


def test_a_trained_embedder_is_reached_through_what_it_provides() -> None:
    """The noisy sample, which it hands on, wants nothing; its first user gives it a gradient."""
    wanted = required_gradients(chain(0))
    assert wanted.conditioning["temb"]
    assert list(map(any, wanted.boundaries)) == [*[False] * 4, *[True] * 6]
    assert wanted.layers == (True, False, False, *[True] * 7)


def test_only_wanted_gradients_travel() -> None:
    backbone = chain(6, 7)  # blocks 5 and 6, in the third stage of four
    plan = Plan(backbone, Partition(sequential(4), (0, 3, 6, 8, 10)), "1f1b")
    messages = plan.step(2).communication.messages
    back = {(m.source, m.destination, m.payload) for m in messages
            if m.producer.kind is OpType.BACKWARD}  # fmt: skip
    assert back == {(3, 2, Payload.BOUNDARY)}
    there = [m for m in messages if m.producer.kind is OpType.FORWARD]
    assert {(0, 3), (1, 2), (0, 1)} <= {(m.source, m.destination) for m in there}
    costs = weighted_costs(backbone, [1.0] * 10)
    assert costs.backward_s == (*[0.0] * 6, 2.0, 2.0, 1.0, 1.0)
    moved = volume(costs, plan.partition)
    assert moved.links[3, 2] > 0 and (2, 1) not in moved.links and (3, 0) not in moved.links
    assert moved.links[0, 3] > 0


def test_stages_without_a_backward_do_not_run_ahead_without_bound() -> None:
    """Their outputs wait at the consumer, and count as memory."""
    backbone = chain(6, 7)
    costs = dataclasses.replace(
        weighted_costs(backbone, [1.0] * 10), saved_bytes=(0,) * 6 + (7,) * 4
    )
    cut = Partition(sequential(4), (0, 3, 6, 8, 10))
    boundary = costs.boundary_bytes[3]
    assert boundary > 0 and kept_bytes(costs, cut) == (boundary, boundary, 14, 14)


def test_patterns_choose_and_are_refused_all_at_once() -> None:
    whole = toy_backbone(8, SKIPS, conditioned=(2, 6), embedder=True)
    half = choose_trained(whole, freeze=["embed.*", "blocks.[0-3].*"])
    assert [layer.trained for layer in half.layers] == [*[False] * 5, *[True] * 5]
    biases = choose_trained(whole, train=["*.bias"], freeze=["head.*"])
    assert [layer.trained for layer in biases.layers] == [*[True] * 9, False]
    module = biases.layers[1].build(None)
    assert {n for n, p in module.named_parameters() if p.requires_grad} == {
        "linear.bias",
        "side.bias",
    }
    with pytest.raises(TrainedError) as caught:
        choose_trained(whole, train=["blocks.9.*"], freeze=["hed.linear.weight"])
    assert "'blocks.9.*'" in str(caught.value)
    assert "did you mean head.linear.weight" in str(caught.value)
    with pytest.raises(TrainedError, match="none of its 40 parameters is trained"):
        choose_trained(whole, freeze=["*"])


@pytest.mark.parametrize("placement", ["fold", "sequential", "interleaved"])
def test_plans_of_frozen_stages_are_proven(placement: str) -> None:
    """Stages without a backward pass take no time for it, and every schedule of them runs."""
    from megatron_pulse.planner.program.make_plan import make_plan

    backbone = chain(8, 9)
    costs = weighted_costs(backbone, [1.0] * 10)
    plan = make_plan(backbone, costs, make_placement(placement, 2, 2))
    assert plan.step(4).programs and plan.problem is not None
    assert min(plan.problem.backward) < 1e-9 < min(plan.problem.forward)
