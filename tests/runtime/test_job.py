"""Ranks meet in a store that has seen starts before, as torchrun's does in an elastic job."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from megatron_pulse.runtime.collectives import broadcast_from_rank_0, gather_objects
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.rendezvous import Job
from megatron_pulse.runtime.watchdog.watchdog import Watchdog
from tests.benchmarks.network import Node, namespaces, unavailable
from tests.ranks import RanksFailed, free_port, run_ranks


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


def _reorder(order: tuple[int, ...], late: bool) -> None:
    """Meet in this order; rank 1 leaves, which the others see.

    ``late``: ranks have met before the order is known, as under ``--pulse-auto``.
    """
    job = Job()
    job.watch = Watchdog(job.rank, 60.0)
    if late:
        dist.init_process_group("gloo", store=job.assemble(30.0), rank=job.rank, world_size=3)
    job.reorder(order)
    if late:
        dist.destroy_process_group()
    assert job.rank == int(os.environ["RANK"])
    store = job.assemble(30.0)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=3)
    said = broadcast_from_rank_0(lambda: f"device {job.launcher_rank}")
    places = gather_objects(f"process {os.getpid()} on ")
    if job.rank == 1:
        dist.destroy_process_group()
        os._exit(7)
    deadline = time.monotonic() + 100
    while not (missing := job.watch.missing()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(places[rank] in text for rank, text in missing.items())
    assert (said, list(missing)) == (f"device {order[0]}", [1])
    store.set(f"seen/{job.rank}", "")
    store.wait(["seen/0", "seen/2"])
    job.part(2.0)


@pytest.mark.parametrize("late", [False, True])
def test_reordered_ranks_meet_in_the_store_of_the_launcher(late: bool) -> None:
    """The launcher's rank 0 hosts the store whatever its rank is; ranks are known by their own."""
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, _reorder, (1, 2, 0), late)
    assert failed.value.exit_codes == [0, 0, 7], failed.value


def _reorder_over_nodes(nodes: list[Node], of_torchrun: bool) -> str:
    """Words of rank 0 on the second node, of ranks in reversed order."""
    number = int(os.environ["RANK"])
    nodes[number].enter()
    os.environ["MASTER_ADDR"] = nodes[0].address
    agent = None
    if of_torchrun:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if number == 0:
            port = int(os.environ["MASTER_PORT"])
            agent = dist.TCPStore(nodes[0].address, port, None, True, wait_for_workers=False)
    job = Job()
    job.reorder((1, 0))
    store = job.assemble(20.0)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=2)
    said = broadcast_from_rank_0(lambda: f"rank {job.rank} of launcher's rank {number}")
    dist.destroy_process_group()
    job.part(5.0)
    del agent
    return said


@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "available")
@pytest.mark.parametrize("of_torchrun", [False, True])
def test_master_addr_leads_to_the_store_in_any_order(of_torchrun: bool) -> None:
    """Nodes of their own addresses: only the first can listen at MASTER_ADDR."""
    with namespaces(2, rate_mbit=1000) as nodes:
        said = run_ranks(2, _reorder_over_nodes, nodes, of_torchrun)
    assert said == ["rank 0 of launcher's rank 1"] * 2
