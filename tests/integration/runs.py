"""Whole training runs through ``launch/pretrain_diffusion.py``'s main, on forked ranks."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from tests.ranks import run_ranks

TINY: dict[str, list[str]] = {
    "none": [],
    "uvit": [
        "--pulse-backbone", "uvit-tiny",
        "--pulse-option", "in_channels=1",
        "--pulse-option", "depth=8",
        "--pulse-option", "embed_dim=32",
    ],
    "unet": [
        "--pulse-backbone", "unet-tiny",
        "--pulse-option", "sample_size=8",
        "--pulse-option", "block_out_channels=8,16",
        "--pulse-option", "norm_num_groups=4",
    ],
}  # fmt: skip
# Added to the "unet": reads text states, and no labels.
TEXT = [
    "--pulse-backbone", "sd-tiny",
    "--pulse-option", "in_channels=1", "--pulse-option", "out_channels=1",
    "--pulse-option", "transformer_depth=0,1", "--pulse-option", "layers_per_block=1",
    "--pulse-option", "cross_attention_dim=16", "--pulse-option", "context_length=6",
]  # fmt: skip
BASE = [
    "--pulse-data", "digits8", "--pulse-no-progress",
    "--micro-batch-size", "2", "--lr", "1e-3", "--clip-grad", "1.0",
    "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "1000",
    "--pulse-timeout-s", "60", "--pulse-solver", "none", "--pulse-solver-seconds", "0.3",
]  # fmt: skip


@dataclass
class Run:
    """What a run computed: exact losses, gradient norms, validation losses and final weights."""

    losses: list[float]
    grad_norms: list[float]
    validation: list[float]
    weights: dict[str, Any]
    averages: dict[str, Any]


@dataclass
class Kill:
    """SIGKILL ``rank`` in the middle of training step ``step`` (counted from 1)."""

    rank: int
    step: int


def train(argv: list[str], kill: Kill | None = None) -> dict[str, Any]:
    """One rank's part of a run; records what ``Run`` holds."""
    import torch

    torch.use_deterministic_algorithms(True)
    import megatron.training.training as training

    from megatron_pulse.integration import pretrain
    from megatron_pulse.integration.model import unwrap

    seen: dict[str, Any] = {"losses": [], "norms": [], "validation": []}
    original_step, original_evaluate = training.train_step, training.evaluate

    def step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if kill is not None and int(os.environ["RANK"]) == kill.rank:
            _kill_in_step(kill.step - len(seen["losses"]))
        result = original_step(forward_step, data, model, *args, **kwargs)
        if result[0]:
            seen["losses"].append(result[0]["loss"].item())
        else:
            seen["losses"].append(None)
        seen["norms"].append(float(result[5]))
        seen["model"] = model
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original_evaluate(*args, **kwargs)
        if result[0]:
            seen["validation"].append(result[0]["loss"].item())
        return result

    training.train_step, training.evaluate = step, evaluate
    sys.argv = ["pretrain_diffusion.py", *argv]
    pretrain.main()
    weights, averages = {}, {}
    for chunk in seen.pop("model"):
        stage = unwrap(chunk)
        weights.update({n: p.detach().float().clone() for n, p in stage.named_parameters()})
        averages.update(stage.ema.state if stage.ema is not None else {})
    return {**seen, "weights": weights, "averages": averages}


def _kill_in_step(steps_left: int) -> None:
    from megatron_pulse.runtime.executor import Executor

    if steps_left != 1:
        return
    original = Executor._backward

    def backward(self: Executor, op: Any) -> None:
        if op.microbatch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, op)

    Executor._backward = backward  # type: ignore[method-assign]


def run(
    num_ranks: int,
    *argv: str,
    backbone: str = "uvit",
    kill: Kill | None = None,
    timeout_s: float = 180,
) -> Run:
    """A run on ``num_ranks``; Megatron's last rank is asked for the losses."""
    flags = [*TINY[backbone], *BASE, *argv]
    results = run_ranks(num_ranks, train, flags, kill, timeout_s=timeout_s)
    last = results[-1]
    weights, averages = {}, {}
    for result in results:
        weights.update(result["weights"])
        averages.update(result["averages"])
    return Run(last["losses"], last["norms"], last["validation"], weights, averages)


def pipeline(num_devices: int, *more: str) -> list[str]:
    """Flags for that many pipeline devices."""
    return ["--pipeline-model-parallel-size", str(num_devices), *more]


def assert_same(got: Run, expected: Run) -> None:
    """Bit for bit the same losses, norms, validation, weights and averages."""
    import torch

    assert got.losses == expected.losses
    assert got.grad_norms == expected.grad_norms
    assert got.validation == expected.validation
    for mine, theirs in ((got.weights, expected.weights), (got.averages, expected.averages)):
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not different, different
