"""Whole training runs through ``launch/pretrain_diffusion.py``'s main, on forked ranks."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from tests.ranks import run_ranks

TINY = {
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
BASE = [
    "--pulse-data", "digits8", "--pulse-no-progress",
    "--micro-batch-size", "2", "--lr", "1e-3", "--clip-grad", "1.0",
    "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "1000",
    "--pulse-timeout-s", "60",
]  # fmt: skip


@dataclass
class Run:
    """What a run printed: losses as the exact floats of every step, and its gradient norms."""

    losses: list[float]
    grad_norms: list[float]
    validation: list[float]
    output: str


def train(argv: list[str]) -> dict[str, Any]:
    """One rank's part of a run; records every step's exact loss and gradient norm."""
    import torch

    torch.use_deterministic_algorithms(True)
    import megatron.training.training as training

    from megatron_pulse.integration import pretrain

    losses: list[float] = []
    norms: list[float] = []
    validation: list[float] = []
    original_step, original_evaluate = training.train_step, training.evaluate

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original_step(*args, **kwargs)
        if "loss" in result[0]:
            losses.append(result[0]["loss"].item())
            norms.append(float(result[5]))
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = original_evaluate(*args, **kwargs)
        if result[0]:
            validation.append(result[0]["loss"].item())
        return result

    training.train_step, training.evaluate = step, evaluate
    sys.argv = ["pretrain_diffusion.py", *argv]
    pretrain.main()
    return {"losses": losses, "norms": norms, "validation": validation}


def run(num_ranks: int, *argv: str, backbone: str = "uvit", timeout_s: float = 120) -> Run:
    """A run on ``num_ranks``; Megatron's last rank is asked for the losses."""
    results = run_ranks(num_ranks, train, [*TINY[backbone], *BASE, *argv], timeout_s=timeout_s)
    last = results[-1]
    return Run(last["losses"], last["norms"], last["validation"], "")


def pipeline(num_devices: int, *more: str) -> list[str]:
    """Flags for that many pipeline devices."""
    return ["--pipeline-model-parallel-size", str(num_devices), *more]


def faults(output: str) -> list[str]:
    """The faults that a refused run listed."""
    return re.findall(r"^  - (.*)$", output, re.MULTILINE)
