"""Sending or replicating an embedder: whichever moves fewer bytes."""

import pytest

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.planner.layout.embedder_choice import choose_embedders, provided
from megatron_pulse.planner.layout.placement import Partition, make_placement
from megatron_pulse.planner.program.plan import Plan

TOKENS = TensorSpec((8,))
TEXT = TensorSpec((10, 4), dtype="float32")


def chain(users):
    """An embedder of text and six layers, some of which use it."""
    layers = [
        Layer("embed", None, (TOKENS,), (TOKENS,), provides={"text": TEXT}, embedder=True),
        *(
            Layer(f"b.{i}", None, (TOKENS,), (TOKENS,), uses=("text",) if i in users else ())
            for i in range(6)
        ),
    ]
    return Backbone("chain", tuple(layers))


def choose(users, samples, policy="auto", parameters=100, placement="sequential", devices=3):
    placement = make_placement(placement, devices, 2)
    cuts = (0, 3, 5, 7) if devices == 3 else (0, 7)
    partition = Partition(placement, cuts)
    (choice,) = choose_embedders(
        provided(chain(users), 2),
        partition,
        [parameters] + [9] * 6,
        samples,
        compute_bytes=2,
        policy=policy,
    ).values()
    return choice


def test_volumes():
    """Two other devices: each sample's 40 fp32 values out and fp64 gradients back, or the
    100 bf16 parameters out and their fp32 gradients back."""
    choice = choose({0, 2, 3, 4}, samples=7)
    assert choice.sent_bytes == 2 * 7 * 40 * (4 + 8)
    assert choice.replicated_bytes == 2 * 100 * (2 + 4)
    assert choice.replicated


@pytest.mark.parametrize(("samples", "replicated"), [(1, False), (2, True)])
def test_the_smaller_volume_wins(samples, replicated):
    assert choose({4}, samples).replicated == replicated


@pytest.mark.parametrize(("policy", "replicated"), [("send", False), ("replicate", True)])
def test_the_user_may_decide(policy, replicated):
    for samples in (1, 1000):
        assert choose({2, 4}, samples, policy).replicated == replicated


@pytest.mark.parametrize("policy", ["auto", "send", "replicate"])
def test_what_stays_on_one_device_is_neither(policy):
    for choice in (choose({0, 1}, 5, policy), choose({0, 5}, 5, policy, devices=1)):
        assert (choice.sent_bytes, choice.replicated_bytes, choice.replicated) == (0, 0, False)


@pytest.mark.parametrize(("policy", "word"), [("send", "sent"), ("replicate", "replicated")])
def test_the_plan_shows_the_choice(policy, word):
    partition = Partition(make_placement("sequential", 3, 2), (0, 3, 5, 7))
    choices = choose_embedders(provided(chain({4}), 2), partition, [100] + [9] * 6, 50, 2, policy)
    plan = Plan(chain({4}), partition, embedders=tuple(choices.values()))
    said = f"embed: {word} (per step: 0.024 MB if sent, 0.0006 MB if replicated)"
    assert said in plan.describe()
    assert plan.summary()["embedders"][0]["replicated"] == (policy == "replicate")
