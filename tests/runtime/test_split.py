"""Backward passes split into input gradient and weight gradient: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_pulse.planner.schedule.operations import Kind, Operation, Schedule
from megatron_pulse.runtime.weight_gradients import Later, deferring
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, join_pipeline, merge, train
from tests.runtime.test_backbones import backbone

KINDS = ("uvit", "unet", "unet-text")


def split(schedule: Schedule, delay: int) -> Schedule:
    """``schedule`` with every backward split, each weight gradient ``delay`` backwards later."""
    orders = []
    for order in schedule.order:
        waiting: list[Operation] = []
        new = []
        for op in order:
            if op.kind is not Kind.BACKWARD:
                new.append(op)
                continue
            new.append(Operation(Kind.INPUT_GRAD, op.stage, op.microbatch))
            waiting.append(Operation(Kind.WEIGHT_GRAD, op.stage, op.microbatch))
            if len(waiting) > delay:
                new.append(waiting.pop(0))
        orders.append((*new, *waiting))
    return Schedule(
        "split", schedule.placement, schedule.num_microbatches, tuple(map(tuple, orders))
    )


def run_cases(kind: str, cases: list[Case], delay: int | None) -> list[Outcome]:
    from megatron_pulse.integration.compat import wait_for_weight_gradients
    from megatron_pulse.planner import plan

    config, group = join_pipeline()
    wait_for_weight_gradients()
    if delay is not None:
        make = plan.make_schedule
        plan.make_schedule = lambda *args, **kwargs: split(make(*args, **kwargs), delay)
    outcomes = [train(backbone(kind), case, config, group) for case in cases]
    torch.distributed.barrier()
    return outcomes


@pytest.mark.parametrize(("kind", "delay"), [*((kind, 3) for kind in KINDS), ("uvit", 0)])
def test_split_schedules_equal_one_process(kind: str, delay: int) -> None:
    cases = [
        Case(placement, m, dtype="float32", steps=2, recompute=m == 2)
        for placement in ("fold", "sequential")
        for m in (1, 2, 5)
    ]
    (expected,) = run_ranks(1, run_cases, kind, cases, None)
    (alone,) = run_ranks(1, run_cases, kind, cases, delay)
    ranks = run_ranks(2, run_cases, kind, cases, delay, timeout_s=240)
    for i, case in enumerate(cases):
        for got in (merge([outcomes[i] for outcomes in ranks]), alone[i]):
            assert got.losses == expected[i].losses, case
            assert not differences(got.gradients, expected[i].gradients), case
            assert not differences(got.parameters, expected[i].parameters), case


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.Flatten(2),
        nn.Linear(16, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 4, bias=False),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_wait_and_are_the_same(dtype: torch.dtype) -> None:
    module = layers().to(dtype)
    image = torch.randn(2, 3, 8, 8, dtype=dtype, requires_grad=True)

    def backward(later: Later | None) -> dict[str, Any]:
        module.zero_grad()
        image.grad = None
        with deferring(later):
            out = module(image)
        out.square().sum().backward()
        return {name: p.grad for name, p in module.named_parameters()} | {"image": image.grad}

    expected = {name: grad.clone() for name, grad in backward(None).items()}
    later = Later()
    early = backward(later)
    waiting = {name for name, grad in early.items() if grad is None}
    heavy = {"0.weight", "0.bias", "2.weight", "3.weight", "3.bias"}
    assert waiting == heavy | {"5.weight", "5.bias", "7.weight"}
    assert {p for n, p in module.named_parameters() if n in waiting} == later.parameters
    later.compute()
    assert not later.parameters
    for name, grad in expected.items():
        found = image.grad if name == "image" else module.get_parameter(name).grad
        assert torch.equal(found, grad), name


def test_no_operation_is_computed_twice() -> None:
    """Input gradients and weight gradients together take the operations of one backward."""
    from torch.utils.flop_counter import FlopCounterMode

    def count(later: Later | None) -> tuple[int, int]:
        module, image = layers(), torch.randn(2, 3, 8, 8, requires_grad=True)
        with deferring(later):
            out = module(image).square().sum()
        with FlopCounterMode(display=False) as first:
            out.backward()
        with FlopCounterMode(display=False) as second:
            if later is not None:
                later.compute()
        return first.get_total_flops(), second.get_total_flops()

    whole, nothing = count(None)
    inputs, weights = count(Later())
    assert nothing == 0 and inputs + weights == whole
    assert 0.3 < weights / whole < 0.7


def test_weights_of_an_input_without_gradient_do_not_wait() -> None:
    module, later = layers(), Later()
    with deferring(later):
        out = module(torch.randn(2, 3, 8, 8))
    out.sum().backward()
    assert module.get_parameter("0.weight").grad is not None
    assert module.get_parameter("2.weight").grad is None
