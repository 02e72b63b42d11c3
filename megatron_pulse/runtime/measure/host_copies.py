"""How fast a device copies to pinned memory of its node and back, both ways at once, and how fast
the processor's Adam is there."""

from __future__ import annotations

import statistics
import time

import torch

from megatron_pulse.runtime.parameters.host_adam import HostAdam
from megatron_pulse.runtime.saved.away import Streams

LARGE_BYTES, SMALL_BYTES = 1 << 26, 1 << 12
"""What is copied for bandwidth, and for latency."""

ADAM_PARAMETERS = 1 << 23
"""More than caches hold."""

ROUNDS = 7
"""Of which the median counts."""


def host_copies(device: torch.device) -> tuple[float, float]:
    """GB/s each way while both are in use, and microseconds of an empty copy.

    Streams are those that activations take in a run. On a CPU it is from memory to memory.
    """
    large_s, small_s = (_both_ways_s(device, num_bytes) for num_bytes in (LARGE_BYTES, SMALL_BYTES))
    return LARGE_BYTES / large_s / 1e9, 1e6 * small_s


def host_adam_s() -> float:
    """Seconds of the processor's Adam for one parameter, of many."""
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
