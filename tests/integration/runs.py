"""Whole training runs through ``launch/pretrain_diffusion.py``'s main, on forked ranks."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicy
from tests.ranks import run_ranks
from tests.remembered import remembered

TINY: dict[str, list[str]] = {
    "none": [],
    "tokens": [
        "--pulse-module", f"{Path(__file__).with_name('tiny_tokens.py')}:build",
        "--pulse-objective", "v",
        "--pulse-noise-schedule", "scaled_linear",
        "--pulse-class-dropout", "0",
    ],
    "uvit": [
        "--pulse-backbone", "uvit-tiny",
        "--pulse-option", "in_channels=1",
        "--pulse-option", "depth=6",
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
    "--pulse-timeout-s", "200", "--pulse-solver", "none", "--pulse-solver-seconds", "0.3",
]  # fmt: skip

STEPS = ["--global-batch-size", "8", "--train-iters", "2"]
"""Of most runs, so that they have one reference; the second finds what the first has left."""


@dataclass
class Executed:
    """Execution on rank 0: kinds of operations, placement of stages, texts on embedders and
    recomputation, bytes of offloaded activations, and numbers of microbatches in training steps.
    """

    operations: set[str]
    placement: str
    replicated: frozenset[str]
    recomputed: bool
    offload_bytes: int = 0
    selective: int = 0
    microbatches: set[int] = field(default_factory=set)


@dataclass
class Run:
    """Results of a run.

    Losses, gradient norms and validation losses are exact; ``by_time`` has the parts of the latter.
    ``weights`` and ``main_params`` are the final parameters and the optimizer's copies,
    ``averages`` their EMA. ``steps`` holds iteration, samples before it and optimizer settings of
    each step. ``executed`` records the executed operations.
    """

    losses: list[float]
    grad_norms: list[float]
    validation: list[float]
    steps: list[dict[str, Any]]
    weights: dict[str, Any]
    main_params: dict[str, Any]
    averages: dict[str, Any]
    executed: Executed
    by_time: list[dict[str, float]]


@dataclass
class Kill:
    """SIGKILL ``rank`` in the middle of training step ``step`` (counted from 1)."""

    rank: int
    step: int


def train(argv: list[str], kill: Kill | None = None) -> dict[str, Any]:
    """Run one rank; records the fields of ``Run``."""
    import torch

    torch.use_deterministic_algorithms(True)
    import megatron.training.training as training

    from megatron_pulse.integration import pretrain
    from megatron_pulse.integration.loop.validation import ValidationLosses
    from megatron_pulse.integration.megatron.model import unwrap

    seen: dict[str, Any] = {"losses": [], "norms": [], "validation": [], "by_time": []}
    seen["steps"] = []
    original_step, original_result = training.train_step, ValidationLosses.result

    def step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if kill is not None and int(os.environ["RANK"]) == kill.rank:
            _kill_in_step(kill.step - len(seen["losses"]))
        seen["steps"].append(_settings(args[0]))
        result = original_step(forward_step, data, model, *args, **kwargs)
        if result[0]:
            seen["losses"].append(_loss(result[0]))
        else:
            seen["losses"].append(None)
        seen["norms"].append(None if result[1] else float(result[5]))  # None: skipped
        seen["model"] = model
        return result

    def result(self: ValidationLosses) -> Any:
        found = original_result(self)
        means = {name: value for name, value in found.items() if name.endswith("loss")}
        seen["validation"].append(_loss(means))
        seen["by_time"].append({name: value.item() for name, value in found.items()})
        return found

    training.train_step, ValidationLosses.result = step, result  # type: ignore[method-assign]
    seen["executed"] = _watch()
    sys.argv = ["pretrain_diffusion.py", *argv]
    try:
        pretrain.main()
    except SystemExit as end:  # --exit-interval and the like
        if end.code not in (None, 0):
            raise
    parts: dict[str, Any] = {"weights": [], "main_params": [], "averages": []}
    for chunk in seen.pop("model", ()):
        stage = unwrap(chunk)
        shares = stage.main_params.shares
        averages = stage.ema.state if stage.ema is not None else {}
        for name, p in stage.named_parameters():
            if stage.fully_sharded is None:
                parts["weights"].append((name, p.shape, 0, p.detach().float()))
            elif name in shares:
                parts["weights"].append((name, p.shape, shares[name].first, shares[name].values))
            if name in shares:
                first = shares[name].first or 0
                parts["main_params"].append((name, p.shape, first, shares[name].values))
                if name in averages:
                    parts["averages"].append((name, p.shape, first, averages[name]))
    return {**seen, **parts, "rank": int(os.environ["RANK"])}


def _loss(found: dict[str, Any]) -> Any:
    """A step's loss; of a cascade those of its chains by name."""
    if "loss" in found:
        return found["loss"].item()
    return {name.removesuffix(" loss"): value.item() for name, value in found.items()}


def _whole(parts: list[Any]) -> dict[str, Any]:
    """Tensors by name from (name, shape, first element, elements) of all ranks."""
    import torch

    wholes: dict[str, Any] = {}
    for name, shape, first, values in parts:
        flat = wholes.setdefault(name, torch.full(shape, torch.nan)).view(-1)
        flat[first : first + values.numel()] = values.reshape(-1)
    return wholes


def _settings(optimizer: Any) -> dict[str, Any]:
    from megatron.training.global_vars import get_args

    args = get_args()
    groups = [group for group in optimizer.param_groups if group["params"]]
    if not groups:  # a rank of frozen layers
        return {}
    # Where groups differ (biases do not decay), the larger is what the flag says.
    return {
        "iteration": args.curr_iteration,
        "samples": args.consumed_train_samples,
        "adam_steps": max(group.get("step", 0) for group in groups),
        **{
            name: max(group[name] for group in groups)
            for name in ("lr", "weight_decay", "betas")
            if name in groups[0]  # sgd has no betas
        },
    }


def _watch() -> Executed:
    """Fills while this rank runs."""
    from megatron_pulse.integration.megatron.model import unwrap
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.stage import Stage

    executed = Executed(set(), "", frozenset(), False)
    original = Executor._run

    def run(self: Executor, operation: Any) -> None:
        if any(type(stage) is Stage for stage in self._stages.values()):
            return original(self, operation)  # the probe's own step, which is not Megatron's
        executed.operations.add(operation.kind.value)
        if self._training:
            executed.microbatches.add(self._schedule.num_microbatches)
        executed.placement = self._routes.partition.placement.kind.name
        executed.replicated = frozenset(self._routes.replicated)
        executed.recomputed = all(
            {*unwrap(stage).policies} == {ActivationPolicy.RECOMPUTE}
            for stage in self._stages.values()
        )
        original(self, operation)
        executed.offload_bytes = max(executed.offload_bytes, self.offload_bytes)
        executed.selective = sum(
            unwrap(s).policies.count(ActivationPolicy.SELECTIVE) for s in self._stages.values()
        )

    Executor._run = run  # type: ignore[method-assign]
    return executed


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
    timeout_s: float = 240,
) -> Run:
    """A run on ``num_ranks``; Megatron's last rank is asked for the losses."""
    flags = [*TINY[backbone], *BASE, *argv]
    results = run_ranks(num_ranks, train, flags, kill, timeout_s=timeout_s)
    results.sort(key=lambda result: result["rank"])  # a plan may have renumbered them
    last, executed = results[-1], results[0]["executed"]
    executed.operations = set().union(*(each["executed"].operations for each in results))
    executed.offload_bytes = sum(each["executed"].offload_bytes for each in results)
    executed.selective = sum(each["executed"].selective for each in results)
    weights, main_params, averages = (
        _whole([part for result in results for part in result[kind]])
        for kind in ("weights", "main_params", "averages")
    )
    return Run(
        last["losses"],
        last["norms"],
        last["validation"],
        last["steps"],
        weights,
        main_params,
        averages,
        executed,
        last["by_time"],
    )


def alone(*argv: str, backbone: str = "uvit") -> Run:
    """The run of one process that others are compared with; once a session."""
    return remembered(("alone", backbone, argv), lambda: run(1, *argv, backbone=backbone))


def pipeline(num_devices: int, *more: str) -> list[str]:
    """Flags for that many pipeline devices."""
    return ["--pipeline-model-parallel-size", str(num_devices), *more]


def assert_same(got: Run, expected: Run) -> None:
    """Bit for bit the same losses, norms, validation, weights, masters and averages."""
    import torch

    assert got.losses == expected.losses
    assert got.grad_norms == expected.grad_norms
    assert got.validation == expected.validation
    for kind in ("weights", "main_params", "averages"):
        mine, theirs = getattr(got, kind), getattr(expected, kind)
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not different, different


def assert_equal_to_rounding(got: Run, expected: Run, tolerance: float = 1e-6) -> None:
    """Assert equality up to rounding, for runs that sum in another order, as with replicated
    embedders.
    """
    import pytest
    import torch

    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=10 * tolerance)
    assert got.validation == pytest.approx(expected.validation, rel=tolerance)
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in got.weights.items():
        # Adam turns rounding of a gradient near zero into a share of the rate, 1e-3.
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-4, atol=5e-5)
