"""Host work in a step: on a GPU the host must never wait for the stream or for a copy.

Steps run on torch's meta device, which computes nothing. Reading a value there raises, and every
copy from the host to the device is recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.shape_buckets import fields_of
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from megatron_pulse.runtime.pipeline import Pipeline
from tests.ranks import run_ranks
from tests.runtime.equality import (
    Case,
    join_pipeline,
    make_batches,
    plan_of,
    split,
)
from tests.runtime.tiny import FAMILIES, backbone

DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Copies from the host to the device, by whether the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_to_copy" and args[0].device != result.device:
            self.found["posted" if kwargs.get("non_blocking") else "awaited"] += 1
        if name == "copy_" and args[0].device != args[1].device and args[1].dim():
            self.found["posted" if (*args, False)[2] else "awaited"] += 1
        return result


class Made(TorchFunctionMode):
    """Tensors that are made on the device from values of the host, which are copied and waited
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and result.device == DEVICE:
            if not (args and isinstance(args[0], Tensor)):
                self.found.append(f"{func.__name__}{args}")
        return result


def loss(prediction: Tensor, batch: Any) -> Tensor:
    """As the training loop's: of a prediction on the device and a target on the host."""
    process = DiffusionProcess(Objective.EPSILON)
    return process.loss(prediction, batch["target"].to(prediction.device, non_blocking=True))


def audited(config: Any, family: str) -> tuple[Counter[str], list[str], int]:
    """Audit of one step: copies, tensors made from values, and number of fields."""
    chain, case = backbone(family), Case("sequential", 1, dtype="bfloat16", recompute=True)
    schedule = split(plan_of(chain, case, 1).step(case.num_microbatches).schedule, 0)
    pipeline = Pipeline(
        plan_of(chain, replace(case, schedule=schedule), 1),
        loss,
        case.micro_batch_size,
        dtype=torch.bfloat16,
        device=DEVICE,
        context=LayerContext(config),
    )
    pipeline._tried = True  # on zeros, which each first step does
    with Copies() as copies, Made() as made:
        pipeline.step(make_batches(chain, case, 0))
    return copies.found, made.found, (len(fields_of(chain)) + 1) * case.num_microbatches


def audit_all() -> dict[str, tuple[Counter[str], list[str], int]]:
    config, _ = join_pipeline()
    return {family: audited(config, family) for family in FAMILIES}


def test_a_step_copies_its_batch_once_and_waits_for_nothing() -> None:
    """Forwards, forwards again, gradients of inputs and of weights, in every family."""
    (found,) = run_ranks(1, audit_all)
    assert found.keys() == FAMILIES.keys()
    for family, (copies, made, num_fields) in found.items():
        assert not made, (family, made)
        assert copies == Counter(posted=num_fields), family


@pytest.mark.parametrize("objective", Objective)
def test_noise_and_estimates_of_samples_on_the_device(objective: Objective) -> None:
    """As where images are encoded by the step, or a backbone conditions itself."""
    process = DiffusionProcess(objective)
    sample, timesteps = torch.zeros(2, 3, 4, 4, device=DEVICE), torch.tensor([0.0, 999.0])
    process.noised(sample, sample, timesteps)  # copies a schedule's table, once
    with Copies() as copies:
        noisy, target = process.noised(sample, sample, timesteps)
        clean = process.clean(noisy, target, timesteps)
    assert {noisy.device, target.device, clean.device} == {DEVICE}
    assert copies.found == Counter(posted=1 if objective is Objective.SAMPLE else 2)
