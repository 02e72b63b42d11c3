"""Ranks meet in a store that has seen starts before, as torchrun's does in an elastic job."""

from __future__ import annotations

import os

import torch.distributed as dist

from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.rendezvous import Job
from tests.ranks import free_port, run_ranks


def _meet(port: int, restarts: tuple[int, int], word: str, limit_s: float) -> str:
    """Result of the rendezvous, or the reason of its failure, after so many ``restarts``."""
    os.environ |= {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts[int(os.environ["RANK"])]),
    }
    job = Job()
    if word == "alone" and job.rank == 0:
        return ""  # it does not come
    try:
        store = job.assemble(limit_s)
    except PulseError as error:
        return str(error)
    store.set(f"said/{job.rank}", f"{word} {job.rank}")
    said = store.get(f"said/{1 - job.rank}").decode()
    job.part(5)
    return said


def test_each_start_is_counted_anew() -> None:
    """Nodes have seen different numbers of restarts; what an earlier start said counts for nothing,
    not even that all were there."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    for word, restarts in {"first": (0, 1), "second": (2, 1)}.items():
        assert run_ranks(2, _meet, port, restarts, word, 60.0) == [f"{word} 1", f"{word} 0"]
    _, alone = run_ranks(2, _meet, port, (3, 3), "alone", 2.0)
    assert alone.startswith("only 1 of 2 ranks came within 2 s") and "missing: rank 0" in alone
    del agent
