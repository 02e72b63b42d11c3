"""A backbone alone on this process's device, to be timed step by step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.gpu_check.bench import Bench
from tests.ranks import free_port

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "uvit-h": (8, {}),
    "sd-v2.1": (4, {}),
    "sdxl": (1, {}),
    "hunyuan-dit-v1.2": (1, {}),
    "sd3-medium": (1, {}),
}
"""Samples of a microbatch on a GPU, and options."""
UVIT = {"in_channels": 1, "depth": 8, "embed_dim": 32}
UNET = {"sample_size": 8, "block_out_channels": "8,16", "norm_num_groups": 4}
TINY: dict[str, tuple[int, dict[str, Any]]] = {"uvit-tiny": (2, UVIT), "unet-tiny": (2, UNET)}
"""On a CPU."""


def models(bench: Bench) -> Mapping[str, tuple[int, dict[str, Any]]]:
    """What to measure on this device."""
    return MODELS if bench.on_gpu else TINY


def options(given: Mapping[str, Any], flag: str = "--option") -> list[str]:
    """As flags."""
    return [word for name, value in given.items() for word in (flag, f"{name}={value}")]


def join() -> Any:
    """Megatron's groups of this process alone, and its configuration; kernels may choose any
    order."""
    from megatron_pulse.integration.megatron import compat

    compat.install()
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    import torch

    from tests.runtime.equality import join_pipeline

    config, _ = join_pipeline()
    torch.use_deterministic_algorithms(False)
    return config


@dataclass
class Alone:
    """``step`` runs all microbatches forward and backward, ``steps`` times until now; ``pipeline``
    has the modules."""

    pipeline: Any
    batches: list[dict[str, Any]]
    device: Any
    steps: int = 0

    def step(self, recorder: Any = None) -> None:
        """Enqueue one."""
        self.steps += 1
        self.pipeline.step(self.batches, recorder=recorder)

    def seconds(self, repetitions: int = 5) -> tuple[float, float]:
        """Medians of the host's seconds until a step is enqueued, and until it has ended."""
        rows = [timed(self.step, self.device) for _ in range(repetitions + 2)][2:]
        return median(row[0] for row in rows), median(row[1] for row in rows)


def timed(work: Callable[[], Any], device: Any) -> tuple[float, float]:
    """Seconds until ``work`` has returned, and until the device has done it."""
    synchronise(device)
    began = time.perf_counter()
    work()
    returned = time.perf_counter()
    synchronise(device)
    return returned - began, time.perf_counter() - began


def synchronise(device: Any) -> None:
    """Wait for a GPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alone(bench: Bench, config: Any, name: str, num_microbatches: int = 4, **how: Any) -> Alone:
    """The backbone with its batches, in bf16 on a GPU; ``how`` are fields of the ``Case``. Raises
    torch.OutOfMemoryError."""
    import torch

    from model_specs import load_backbone
    from tests.runtime.equality import Case, make_batches, make_pipeline

    size, given = models(bench)[name]
    backbone = load_backbone(name, given)
    device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
    dtype = "bfloat16" if bench.on_gpu else "float32"
    case = Case(
        "sequential", num_microbatches, dtype=dtype, micro_batch_size=size, device=str(device),
        **how,
    )  # fmt: skip
    pipeline = make_pipeline(backbone, case, config, None)
    batches = [
        {field: value.to(device) for field, value in batch.items()}
        for batch in make_batches(backbone, case, 0)
    ]
    return Alone(pipeline, batches, device)
