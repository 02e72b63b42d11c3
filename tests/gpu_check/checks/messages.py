"""Messages over NCCL that need no second rank: to oneself, and many ahead of the GPU."""

from __future__ import annotations

import time
from typing import Any

from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures

AHEAD = 100
MEGABYTES = 16
MOST_HELD = 10
"""Tensors that may be held when so many were sent, each waited for by the stream at once."""


def _join() -> Any:
    """A group of this process alone, over NCCL."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return device


def exchange(sent: Any, received: Any) -> None:
    """From this process to itself: both in one group of NCCL's, or neither would end."""
    import torch.distributed as dist

    both = [dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def self_send(bench: Bench) -> Figures:
    """A message to oneself, 64 B to 64 MB: what arrives, and how long it takes."""
    import torch

    device = _join()
    rows: list[dict[str, Any]] = []
    bench.figures["messages"] = rows
    for power in range(6, 27, 2):
        size = 1 << power
        sent = torch.arange(size, device=device).to(torch.uint8)
        received = torch.zeros_like(sent)
        for _ in range(3):
            exchange(sent, received)
        torch.cuda.synchronize()
        assert torch.equal(sent, received), f"{size} bytes arrived as others"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        begin.record()
        for _ in range(20):
            exchange(sent, received)
        end.record()
        host_us = 1e6 * (time.perf_counter() - began) / 20
        torch.cuda.synchronize()
        us = 1e3 * begin.elapsed_time(end) / 20
        rows.append({"bytes": size, "us": us, "GB/s": size / us / 1e3, "host us": host_us})
    return bench.figures


def run_ahead(bench: Bench) -> Figures:
    """A hundred sends while the GPU is busy: how much memory they hold until they are done."""
    import torch

    device = _join()
    received = torch.empty(MEGABYTES << 20, dtype=torch.uint8, device=device)
    exchange(torch.zeros_like(received), received)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda._sleep(2_000_000_000)  # cycles: a second or more
    began = time.perf_counter()
    for i in range(AHEAD):
        exchange(torch.full_like(received, i), received)
    host_s = time.perf_counter() - began
    held = torch.cuda.memory_reserved() - before
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - began
    assert int(received[0]) == AHEAD - 1, "what arrived last is not what was sent last"
    bench.figures |= {
        "sends": AHEAD, "MB each": MEGABYTES, "MB reserved": held / 2**20,
        "host, s": host_s, "until all were done, s": whole_s,
    }  # fmt: skip
    assert host_s < whole_s / 2, f"the host was held up: {host_s:.2f} of {whole_s:.2f} s"
    limit = MOST_HELD * MEGABYTES
    assert held <= limit << 20, f"{held >> 20} MB are held, more than {limit}: nothing is let go"
    return bench.figures
