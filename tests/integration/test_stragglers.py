"""Diagnosis of faulty steps: stragglers, non-finite losses and gradients, and silent data
corruption.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pulse.integration.loop.stragglers import ENOUGH, Stragglers, slow_ranks
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.runtime.measure.recorder import StepTime
from tests.integration.runs import BASE, TINY, pipeline, train
from tests.ranks import RanksFailed, run_ranks, said_once

F2, B2 = (OpType.FORWARD, 2), (OpType.BACKWARD, 2)


@pytest.mark.parametrize(
    "ratios, slow",
    [
        ([1.0, 1.0], []),
        ([1.0, 1.6], [1]),
        ([3.0, 3.1, 2.9, 4.6], [3]),
        ([2.0, 2.0, 1.0], []),  # most are as slow: none of them is a straggler
        ([0.0, 0.0], []),
        ([1.2], []),
    ],
)
def test_slow_beside_the_median(ratios: list[float], slow: list[int]) -> None:
    assert slow_ranks(ratios, 1.5) == slow


def watcher(planned: bool, others: Callable[[float], list[float]]) -> Stragglers:
    plan = {F2: 0.2, B2: 0.4}
    return Stragglers(1, 1.5, (lambda: plan) if planned else None, others)


def steps(watch: Stragglers, forward_s: float, backward_s: float, count: int = ENOUGH) -> str:
    for _ in range(count):
        watch.note(StepTime(0.0, 0.0, {F2: forward_s, B2: backward_s}))
    return watch.look()


def test_beside_the_plan() -> None:
    """All are slower than it says: only what is slower still is named."""
    ratios: list[float] = []

    def others(own: float) -> list[float]:
        ratios.append(own)
        return [3.0, own, 3.2]

    watch = watcher(True, others)
    watch.note(StepTime(9.0, 9.0, {F2: 9.0}))  # the first step warms up
    assert steps(watch, 0.6, 1.2, ENOUGH - 1) == "" and ratios == []  # too few
    assert steps(watch, 0.6, 1.2, 1) == "" and ratios == pytest.approx([3.0])
    warning = steps(watch, 0.7, 2.8)
    assert (
        warning.startswith("warning: rank 1 (") and (") is a straggler: in 10 steps its") in warning
    )
    assert "took 5.83 times the planned time, those of the median rank 3.20 times" in warning
    assert warning.endswith("Slowest: backward of stage 2, 7.00 times")


def test_beside_its_own_first_steps() -> None:
    watch = watcher(False, lambda own: [1.0, own, 1.0])
    watch.note(None)  # traced
    assert steps(watch, 0.1, 0.1) == ""
    assert steps(watch, 0.13, 0.13) == ""
    assert "1.75 times the time of its first steps" in steps(watch, 0.25, 0.1)


FLAGS = [*TINY["uvit"], *BASE, "--global-batch-size", "8"]


def least_scale(scale: int) -> list[str]:
    """fp16 at a loss scale that cannot be lowered."""
    return ["--fp16", "--initial-loss-scale", str(scale), "--min-loss-scale", str(scale)]


def slow_down(flags: list[str]) -> Any:
    """Rank 1's backwards take six times as long from step 13 on, however slow the machine is."""
    import os

    from megatron_pulse.runtime.executor import Executor

    original, count = Executor._backward, 0

    def backward(self: Executor, op: Any) -> None:
        nonlocal count
        count += 1
        began = time.monotonic()
        original(self, op)
        if os.environ["RANK"] == "1" and count > 12 * 2 * 4:
            time.sleep(max(0.03, 5 * (time.monotonic() - began)))

    Executor._backward = backward  # type: ignore[method-assign]
    try:
        return train(flags)
    finally:
        print("end of the run", flush=True)
        raise SystemExit(3)  # so that what was said is kept


def test_a_device_that_becomes_slow() -> None:
    flags = [*FLAGS, *pipeline(2), "--train-iters", "24", "--log-interval", "12"]
    with pytest.raises(RanksFailed) as ended:
        run_ranks(2, slow_down, flags)
    assert ended.value.exit_codes == [3, 3], str(ended.value)
    assert said_once(ended.value, ") is a straggler: in 12 steps its operations took")
    assert "warning: rank 1 (" in ended.value.outputs[1]
    assert "Slowest: backward of stage" in ended.value.outputs[1]


def spoil(flags: list[str]) -> Any:
    """Make the third loss of replica 1 NaN."""
    import os

    from megatron_pulse.runtime import executor

    original, count = executor._loss, 0

    def loss(*given: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        found = original(*given)
        return found * math.nan if count == 3 and os.environ["RANK"] == "1" else found

    executor._loss = loss
    return train(flags)


def test_a_loss_that_is_no_number_is_named() -> None:
    flags = [*FLAGS, "--global-batch-size", "12", "--train-iters", "2"]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, spoil, flags)
    text = "the loss of microbatch 2 is nan in replica 1 (rank 1): lower --lr, check the data"
    assert text in str(failed.value) and "Traceback" not in str(failed.value)


def spoil_gradients(flags: list[str], call: int) -> Any:
    """Make a gradient on rank 1 NaN: that of a layer's result in the ``call``-th forward."""
    import os

    import megatron.training.training as training

    from megatron_pulse.integration.megatron.model import unwrap

    step, results = training.train_step, []

    def spoil(layer: Any, given: Any, result: Any) -> Any:
        (first, *others) = result if isinstance(result, tuple) else (result,)
        results.append(first.detach().clone())
        if len(results) >= call and first.equal(results[call - 1]):
            first = first + (first - first.detach()).abs().sqrt()
        return (first, *others) if isinstance(result, tuple) else first

    def spoiled(forward: Any, data: Any, model: Any, *args: Any, **named: Any) -> Any:
        for chunk in model if not results and os.environ["RANK"] == "1" else ():
            for name, layer in unwrap(chunk).named_layers():
                if name == "mid_block.mlp":
                    layer.register_forward_hook(spoil)
        return step(forward, data, model, *args, **named)

    training.train_step = spoiled
    return train(flags)


@pytest.mark.parametrize(
    ("layout", "call", "replica"),
    [
        (pipeline(2), 6, 0),
        (["--use-distributed-optimizer", "--overlap-grad-reduce"], 4, 1),
        (pipeline(2, *least_scale(4), "--pulse-max-skipped-steps", "1"), 6, 0),
    ],
    ids=["two devices", "two replicas", "fp16"],
)
def test_gradients_that_are_no_numbers_are_named(
    layout: list[str], call: int, replica: int
) -> None:
    """The step is made again with the same bits, and no weight was changed before; under fp16 at
    scale 1, where the scale that skips it is the least."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, spoil_gradients, [*FLAGS, *layout, "--train-iters", "3"], call)
    found = "the gradients of step 2 are not finite (nan), although"
    if "--fp16" in layout:
        found = (
            "1 consecutive step(s) were skipped: the gradients of the last, step 2, are not "
            "finite at loss scale 1 either, although"
        )
    text = (
        f"{found} its losses are finite: those of microbatch 1 in replica {replica} (rank 1) "
        "are not finite from layer mid_block.mlp down. Lower --lr"
    )
    assert text in str(failed.value), str(failed.value)
    assert "Traceback" not in str(failed.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (least_scale(2**40), "the minimum of --min-loss-scale, and are finite at scale 1: lower"),
        (["--fp16", "--loss-scale", str(2**40)], "fixed by --loss-scale, and are finite at"),
    ],
    ids=["least", "fixed"],
)
def test_a_loss_scale_that_no_step_bears_is_told_from_broken_gradients(
    flags: list[str], why: str, tmp_path: Path
) -> None:
    """After so many skipped steps as a flag says; what was saved before stays."""
    flags = [
        *flags,
        "--pulse-max-skipped-steps",
        "2",
        "--save",
        str(tmp_path),
        "--save-interval",
        "1",
    ]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(1, train, [*FLAGS, *flags, "--train-iters", "4"])
    text = f"of the last, step 2, overflow at loss scale {2.0**40:g}, {why}"
    assert f"2 consecutive step(s) were skipped: the gradients {text}" in str(failed.value)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def verified(flags: list[str]) -> int:
    """Number of recomputations by this rank."""
    from megatron_pulse.integration.loop.diagnosis.sdc_check import SdcCheck

    times, computed = 0, SdcCheck._computed

    def counted(*given: Any) -> Any:
        nonlocal times
        times += 1
        return computed(*given)

    SdcCheck._computed = counted
    train(flags)
    return times


def test_what_is_sound_is_verified() -> None:
    """All layers of both devices."""
    flags = [*TINY["unet"], *BASE, "--global-batch-size", "8", *pipeline(2)]
    flags += ["--pulse-sdc-check-interval", "1", "--pulse-conditioning", "replicate"]
    assert run_ranks(2, verified, [*flags, "--train-iters", "36"]) == [18, 18]


def corrupt(flags: list[str], what: str) -> Any:
    """Flip one bit on one rank, once: in a layer's result, or in the gradient of its input."""
    import os

    import megatron.training.training as training
    from megatron.training.global_vars import get_args

    from megatron_pulse.integration.megatron.model import unwrap

    step, times = training.train_step, 0

    def wrong(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * (1 + 2**-20)

    def spoil(layer: Any, given: Any, results: Any) -> Any:
        nonlocal times
        times += 1
        if times != 2:
            return results
        if what == "results":
            return wrong(results[0]), *results[1:]
        given[0][0].register_hook(wrong)
        return results

    def corrupted(forward: Any, data: Any, model: Any, *args: Any, **named: Any) -> Any:
        if get_args().curr_iteration == 1 and os.environ["RANK"] == "1":
            _, first = next(unwrap(model[0]).named_layers())
            first.register_forward_hook(spoil)
        return step(forward, data, model, *args, **named)

    training.train_step = corrupted
    return train(flags)


@pytest.mark.parametrize("what", ["results", "gradients"])
def test_a_bit_that_another_rank_does_not_get_is_named(what: str) -> None:
    flags = [*FLAGS, *pipeline(2), "--train-iters", "4", "--pulse-sdc-check-interval", "1"]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, corrupt, flags, what)
    said = str(failed.value)
    assert "step 2, microbatch 1, layer in_blocks.1.mlp: " in said, said
    assert f"mlp: {what}" in said and " of ranks 0 and 1 differ. " in said
    assert "Rank 1, repeated, gets the result of rank 0: rank 1 computed" in said
    assert "Traceback" not in said
