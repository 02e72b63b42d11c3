"""Ranks meet in a store that has seen starts before, as torchrun's does in an elastic job."""

from __future__ import annotations

import os
import subprocess
import sys

import torch.distributed as dist

from tests.ranks import free_port

MEETS = """
import sys
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.job import Job
job = Job()
try:
    store = job.assemble(float(sys.argv[1]))
except PulseError as error:
    print(error)
else:
    store.set(f"said/{job.rank}", sys.argv[2])
    print(store.get(f"said/{1 - job.rank}").decode(), flush=True)
    job.part(5)
"""


def start(rank: int, restarts: int, port: int, word: str, limit_s: float) -> subprocess.Popen[str]:
    """A rank of two, on a node that has seen so many restarts."""
    job = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", MEETS, str(limit_s), word],
        env={**os.environ, **job},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_each_start_is_counted_anew() -> None:
    """Nodes have seen different numbers of restarts; what an earlier start said counts for nothing,
    not even that all were there."""
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    for number, counts in enumerate([(0, 1), (2, 1)]):
        ranks = [start(r, count, port, f"{number}{r}", 60) for r, count in enumerate(counts)]
        said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
        assert said == [[f"{number}1"], [f"{number}0"]]
    alone = start(1, 3, port, "alone", 2)
    said_alone = alone.communicate(timeout=60)[0]
    assert said_alone.startswith("only 1 of 2 ranks came") and "missing: rank 0" in said_alone
    del agent
