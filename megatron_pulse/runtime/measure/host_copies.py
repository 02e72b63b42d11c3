"""Speed of simultaneous copies to and from pinned host memory, and of Adam on the CPU."""

from __future__ import annotations

import statistics
import time

import torch

from megatron_pulse.runtime.activations.offload import Streams
from megatron_pulse.runtime.parameters.adam import HostAdam

LARGE_BYTES, SMALL_BYTES = 1 << 26, 1 << 12
"""Sizes for measuring bandwidth and latency."""

ADAM_PARAMETERS = 1 << 23
"""Large enough to exceed caches."""

ROUNDS = 7
"""Number of rounds; the median is reported."""


def host_copies(device: torch.device) -> tuple[float, float]:
    """Bandwidth in GB/s per direction with both in use, and latency in microseconds.

    Uses the same streams as activation offload. A CPU copies from memory to memory.
    """
    large_s, small_s = (_both_ways_s(device, num_bytes) for num_bytes in (LARGE_BYTES, SMALL_BYTES))
    return LARGE_BYTES / large_s / 1e9, 1e6 * small_s


def host_adam_s() -> float:
    """Seconds per parameter of Adam on the CPU, for large tensors."""
    weights = torch.nn.Parameter(torch.zeros(ADAM_PARAMETERS))
    weights.grad = torch.ones(ADAM_PARAMETERS)
    adam = HostAdam([weights], lr=1e-9)
    spent = []
    for _ in range(ROUNDS + 1):  # the first is not counted
        began = time.perf_counter()
        adam.step()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:]) / ADAM_PARAMETERS


def _both_ways_s(device: torch.device, num_bytes: int) -> float:
    streams = Streams.on(device)
    here, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    host, back = (
        torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=streams is not None) for _ in range(2)
    )
    spent = []
    for _ in range(ROUNDS + 1):  # the first is not counted
        _wait(device)
        began = time.perf_counter()
        with torch.cuda.stream(None if streams is None else streams.out):
            host.copy_(here, non_blocking=True)
        with torch.cuda.stream(None if streams is None else streams.back):
            there.copy_(back, non_blocking=True)
        _wait(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
