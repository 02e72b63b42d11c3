"""Messages over NCCL that need no second rank: to oneself."""

from __future__ import annotations

import time
from typing import Any

from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures


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
    rows = bench.rows("messages")
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
