"""Microbatches of several shapes in one step: bit for bit those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.shape_buckets import ShapeError, at_shape, shape_of
from megatron_pulse.runtime.failure_board import PulseError
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, make_batches, merge, train

WIDTH = 6
IMAGE = pulse.TensorSpec((WIDTH, 4, 6), others=((WIDTH, 6, 4), (WIDTH, 2, 8)))
TEXT = pulse.TensorSpec((3, 5), dtype="float32", others=((3, 5), (7, 5)))
STATES = pulse.TensorSpec((3, WIDTH), others=((3, WIDTH), (7, WIDTH)))


class Reading(nn.Module):
    """Embeds a text of any length; which shape it was told is compared with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.chain_shape = 0
        self.linear = nn.Linear(5, WIDTH)

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> tuple[Tensor, ...]:
        text = conditioning["text"]
        assert text.shape[1:] == TEXT.at(self.chain_shape).shape
        return (*inputs, self.linear(text.to(self.linear.weight.dtype)))


class Mixing(nn.Module):
    """A convolution of its input and skips, and attention to the text."""

    def __init__(self, num_skips: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH * (1 + num_skips), WIDTH, 3, padding=1)

    def forward(self, inputs: Any, skips: Any, conditioning: Any) -> tuple[Tensor, ...]:
        made = torch.tanh(self.convolution(torch.cat([*inputs, *skips.values()], 1)))
        states = conditioning["states"]
        scores = torch.einsum("bchw,btc->bthw", made, states).softmax(1)
        return (inputs[0] + torch.einsum("bthw,btc->bchw", scores, states),)


def several() -> pulse.Backbone:
    """A chain with skips, an embedder and a text, whose microbatches have three shapes."""

    def layer(i: int) -> pulse.Layer:
        pops = {f"skip{7 - i}": IMAGE} if i > 4 else {}
        return pulse.Layer(
            f"part.{i}",
            lambda context: Mixing(len(pops)),
            (IMAGE,),
            (IMAGE,),
            pushes={f"skip{i}": 0} if i < 3 else {},
            pops=pops,
            uses=("states",),
        )

    reading = pulse.Layer(
        "reading", lambda context: Reading(), (IMAGE,), (IMAGE,), provides={"states": STATES},
        uses=("text",), embedder=True,
    )  # fmt: skip
    return pulse.Backbone("several", (reading, *map(layer, range(8))), {"text": TEXT})


CASES = [
    Case("fold", 4, dtype="float32"),
    Case("sequential", 4, "zb-h1", dtype="float32", recompute=2),
    Case("interleaved", 4, dtype="float32"),
    Case("fold", 4, dtype="float32", replicated=frozenset({"reading"})),
]


def _train_here(cases: list[Case]) -> list[Outcome]:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    chain = several()
    return [train(chain, case, None, group) for case in cases]


def test_steps_of_several_shapes_equal_one_process() -> None:
    (alone,) = run_ranks(1, _train_here, [CASES[0].alone])
    expected = alone[0]
    for case, outcomes in zip(CASES, zip(*run_ranks(2, _train_here, CASES), strict=True),
                              strict=True):  # fmt: skip
        got = merge(list(outcomes))
        if case.replicated:  # sums of copies are rounded once more
            assert got.losses == pytest.approx(expected.losses, rel=1e-6)
            continue
        assert got.losses == expected.losses, case
        for what in ("gradients", "parameters"):
            assert not differences(getattr(got, what), getattr(expected, what)), (case, what)
    assert len(set(expected.losses)) == CASES[0].steps * CASES[0].num_microbatches


def _with_an_unknown_shape() -> str:
    dist.init_process_group("gloo")
    ends = dist.new_group([0, 1])
    chain = several()
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 9), pulse.fold(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2, timeout_s=2.0)
    batches = make_batches(chain, Case("fold", 4, dtype="float32"), 0)
    bad = {**batches[2], "noisy": torch.zeros(2, WIDTH, 5, 5)}
    executor = pipeline.executor(4)
    try:  # as a loader gives them: each device for itself, without a check of all before
        executor.run(iter([*batches[:2], bad, batches[3]]), pipeline._settings)
    except Exception as error:
        dist.barrier(ends)  # rank 0 holds the board, on which one finds what the other said
        return str(error)
    return ""


def test_an_unknown_shape_is_told_by_all() -> None:
    """By a device that would receive it, too, and by one that waits for such a device."""
    for said in run_ranks(2, _with_an_unknown_shape, timeout_s=60.0):
        assert (
            "a microbatch of noisy 6x5x5, text 7x5 matches no shape that several takes: noisy 6x"
        ) in said


def test_a_batch_says_its_shape() -> None:
    chain = several()
    batches = make_batches(chain, Case("fold", 3), 0)
    assert [shape_of(chain, batch) for batch in batches] == [0, 1, 2]
    middle = {**batches[1], "noisy": batches[1]["noisy"].to("meta")}
    assert shape_of(chain, middle) == 1
    with pytest.raises(ShapeError, match="matches several"):
        shape_of(chain, {"text": batches[0]["text"]})
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 9), pulse.fold(1))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2, dtype=torch.float64)
    mixed = {**batches[0], "text": batches[2]["text"]}
    with pytest.raises(PulseError, match="(?s)microbatch 1: a microbatch of .*text 7x5 matches no"):
        pipeline.step([batches[0], mixed])
    assert len(pipeline.step(batches)) == len(pipeline.evaluate(batches)) == 3


def test_shapes_that_do_not_fit_are_told() -> None:
    chain = several()
    assert [at_shape(chain, shape_index).input_spec.shape for shape_index in range(3)] == [
        (6, 4, 6), (6, 6, 4), (6, 2, 8)
    ]  # fmt: skip
    assert IMAGE.numel_per_sample == 6 * 4 * 6
    short = replace(chain, batch_fields={"text": replace(TEXT, others=((3, 5),))})
    with pytest.raises(BackboneError, match="text: has 2 shapes, but the sample has 3"):
        pulse.Pipeline(
            pulse.make_plan(short, pulse.weighted_costs(short, [1.0] * 9), pulse.fold(1)),
            lambda y, batch: y.mean(), 2,
        )  # fmt: skip
    twice = pulse.TensorSpec((4,), others=((4,),))
    wrong = pulse.TensorSpec((4,), others=((0,), 7))  # type: ignore[arg-type]
    for spec, said in (
        (twice, "shapes 0 and 1: samples and batch fields have equal sizes"),
        (wrong, r"(?s)shape 1: the shape \(0,\) has a dim.*shape 2: the shape must be a tuple"),
    ):
        with pytest.raises(BackboneError, match=said):
            pulse.chain([nn.Identity] * 2, spec)
    assert pulse.check_backbone(replace(chain, shares=(1.0, 0.0, 2.0))) == [
        "shares: must be 3 numbers above 0, one for each shape, are (1.0, 0.0, 2.0)"
    ]
