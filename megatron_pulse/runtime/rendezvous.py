"""Rendezvous of a rank with its job: startup, messages printed once, and orderly exit."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_pulse.processes import RANKS_FOLDER, port_is_taken
from megatron_pulse.runtime.failure_board import ANSWER_S, FailureBoard, PulseError
from megatron_pulse.runtime.watchdog.call_with_timeout import backstop_timeout_s, call_with_timeout
from megatron_pulse.runtime.watchdog.watchdog import Watchdog

_GENERATION, _HERE, _LEFT, _PORT, _REORDERED, _ROSTER, _SAID = (
    f"megatron_pulse/{key}"
    for key in ("generation", "here", "left", "port", "reordered", "roster", "said")
)
_REORDER_S = 60.0
"""Longest wait for ranks to end the collectives of their first process group."""
STORE_ERRORS = (RuntimeError, ValueError, OSError, KeyError)
"""Errors that an unreachable store raises."""


class Job:
    """The job described by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Ranks meet in a store: torchrun's agent store, or else rank 0's. Process groups use a store of
    rank 0's own, because torchrun's may end before the ranks do. MASTER_ADDR is the host of the
    launcher's rank 0, which therefore hosts both stores whatever rank a plan gives to it.
    """

    def __init__(self) -> None:
        self.rank = self.launcher_rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.store_rank = 0
        """Rank of the process that hosts the store."""
        self._reached: dist.Store | None = None
        self._meeting: dist.Store | None = None
        self._store: dist.Store | None = None
        self._unmet = ""
        self.watch: Watchdog | None = None
        """Watchdog of this rank, set once flags are read."""

    @property
    def has_launcher(self) -> bool:
        """True if ranks meet in torchrun's store, which ends with torchrun."""
        return self.world_size > 1 and _is_the_agents()

    @property
    def is_first_of_node(self) -> bool:
        """True if this rank reports for its node while other ranks cannot be asked."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def reorder(self, device_order: Sequence[int]) -> None:
        """Renumber ranks: rank k runs on the device of the launcher's rank ``device_order[k]``.

        LOCAL_RANK stays, as the device does. Call it on all ranks before they form process groups.
        If they have, it returns once all ranks have called it, so that groups can be destroyed, and
        formed again by the store of ``assemble``. Raises ValueError if the order is no permutation
        of the job's ranks.
        """
        if sorted(device_order) != list(range(self.world_size)):
            raise ValueError(
                f"device_order {list(device_order)} is no permutation of the job's ranks 0 to "
                f"{self.world_size - 1}. Make the plan anew for this cluster ('pulse tune')"
            )
        new_ranks = [device_order.index(rank) for rank in range(self.world_size)]
        self.rank, self.store_rank = new_ranks[self.launcher_rank], new_ranks[0]
        os.environ["RANK"] = str(self.rank)
        _tell_rank_to_launcher(self.launcher_rank, self.rank)
        if self._store is not None:
            self._store = dist.PrefixStore(_REORDERED, self._store)
            self._store.set(f"{_HERE}/{self.rank}", "")
            everybody = [f"{_HERE}/{rank}" for rank in range(self.world_size)]
            self._store.wait(everybody, timedelta(seconds=_REORDER_S))
        if self.watch is not None:
            self.watch.renumber(new_ranks)

    def board(self, limit_s: float = 5.0) -> FailureBoard | None:
        """Failure board of the job; None if unreachable within ``limit_s`` seconds."""
        if self._meeting is None:
            if self.world_size == 1:
                self._meeting = dist.HashStore()
            else:
                try:
                    self._reached = _reach(self.launcher_rank, limit_s)
                except STORE_ERRORS as error:
                    if port_is_taken(error):
                        self._unmet = ": another program uses this port; set MASTER_PORT to another"
                    return None
                self._meeting = dist.PrefixStore(_start(), self._reached)
        return FailureBoard(self._meeting, self.rank)

    def assemble(self, limit_s: float) -> dist.Store:
        """Wait for all ranks; returns the store for their process groups, each time it is called.

        torchrun's store outlives a start. Restarted ranks of an elastic job find their earlier
        entries, and nodes may differ in their restart counts. Ranks therefore meet under a new name
        chosen by rank 0::

            rank 0    generation = g    here/0 ... waits for here/0 .. here/n    roster = all here
            rank r    reads g           here/r = a name of its own ............. it is in the roster

        Raises PulseError if a rank fails before, or on timeout.
        """
        if self._store is not None:
            return self._store
        host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
        listener = "torchrun" if _is_the_agents() else f"rank {self.store_rank}"
        where = f"{host}:{port}, where {listener} should listen"
        if self.watch is not None and self.world_size > 1:
            self.watch.expect(where)
        waits_s = limit_s if self.watch is None else backstop_timeout_s(limit_s)
        board = self.board(waits_s)
        if board is None or self._meeting is None:
            raise PulseError(
                f"rank {self.rank} cannot reach the other ranks at {where}, within {limit_s:g} "
                f"s{self._unmet}"
            )
        if self._reached is not None:
            self._meeting = self._gather(self._reached, board, (host, port), limit_s)
            if self.watch is not None:
                self.watch.meet(self._meeting, self.world_size, (host, port))
        self._store = self._own_store(self._meeting, waits_s)
        return self._store

    def _gather(
        self, reached: dist.Store, board: FailureBoard, master: tuple[str, int], limit_s: float
    ) -> dist.Store:
        """Part of the store for this start alone, once all ranks are present."""
        own, generation, deadline = uuid.uuid4().hex, "", time.monotonic() + limit_s
        meeting: dist.Store = reached
        everybody = [f"{_HERE}/{rank}" for rank in range(self.world_size)]
        if self.rank == 0:
            reached.set(_GENERATION, own)
        while True:
            if self.rank == 0:
                said = own
            else:
                said = reached.get(_GENERATION).decode() if reached.check([_GENERATION]) else ""
            if said != generation:
                generation, meeting = said, dist.PrefixStore(said, reached)
                if self.watch is not None:
                    self.watch.announce(meeting, master)
                meeting.set(f"{_HERE}/{self.rank}", own)
            if generation and self.rank == 0 and meeting.check(everybody):
                meeting.set(_ROSTER, b",".join(meeting.multi_get(everybody)).decode())
                return meeting
            if generation and self.rank and meeting.check([_ROSTER]):
                if own in meeting.get(_ROSTER).decode().split(","):
                    return meeting
            if failure := board.first_failure():
                raise PulseError(f"stopped, because another rank failed: {failure}")
            if time.monotonic() > deadline:
                raise PulseError(self._who_is_missing(meeting, everybody, limit_s))
            time.sleep(0.02 + 1e-4 * self.world_size)  # one store serves all ranks

    def _who_is_missing(self, meeting: dist.Store, everybody: list[str], limit_s: float) -> str:
        missing = [rank for rank, here in enumerate(everybody) if not meeting.check([here])]
        missing = missing or [
            0
        ]  # all were present in an earlier start; rank 0 has not begun this one
        named = ", ".join(f"rank {rank}" for rank in missing[:16])
        more = f" and {len(missing) - 16} more" if len(missing) > 16 else ""
        return (
            f"only {self.world_size - len(missing)} of {self.world_size} ranks came within "
            f"{limit_s:g} s (--pulse-timeout-s); missing: {named}{more}"
        )

    def _own_store(self, meeting: dist.Store, limit_s: float) -> dist.Store:
        if self.world_size == 1 or not _is_the_agents():
            return meeting
        host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=limit_s)
        if self.launcher_rank == 0:
            own = dist.TCPStore(host, 0, None, True, timeout=limit, wait_for_workers=False)
            meeting.set(_PORT, str(own.port))
            return own
        return dist.TCPStore(host, int(meeting.get(_PORT)), None, False, timeout=limit)

    def say_once(self, text: str) -> None:
        """Print ``text`` unless another rank has printed the same."""
        if self._claims(text):
            print(text, file=sys.stderr, flush=True)

    def _claims(self, text: str) -> bool:
        if self.board() is None or self._meeting is None:
            return True
        meeting, key = self._meeting, f"{_SAID}/{hashlib.sha256(text.encode()).hexdigest()}"
        return call_with_timeout(ANSWER_S, lambda: int(meeting.add(key, 1)) == 1, True)

    def part(self, limit_s: float) -> None:
        """Sign off; the store's host waits at most ``limit_s`` seconds for all ranks."""
        store = self._store or (None if _is_the_agents() else self._meeting)
        if store is None:
            return
        deadline = time.monotonic() + limit_s
        # If the host stopped waiting, it does not answer.
        num_left = call_with_timeout(ANSWER_S, lambda: store.add(_LEFT, 1), self.world_size)
        while (
            self.launcher_rank == 0 and num_left < self.world_size and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            num_left = call_with_timeout(ANSWER_S, lambda: store.add(_LEFT, 0), self.world_size)


def _is_the_agents() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _start() -> str:
    """Name of this start of the job, by this node's restart count."""
    return f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _reach(launcher_rank: int, limit_s: float) -> dist.Store:
    """Connect to the common store: torchrun's, or else one hosted by the launcher's rank 0.

    Waits only for the host, so that missing ranks can be reported.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = launcher_rank == 0 and not _is_the_agents()
    limit = timedelta(seconds=limit_s)
    return dist.TCPStore(host, port, None, hosts, timeout=limit, wait_for_workers=False)


def _tell_rank_to_launcher(launcher_rank: int, rank: int) -> None:
    """Write ``rank`` for ``pulse run``, which reports ranks that are killed without a word."""
    if (folder := os.environ.get(RANKS_FOLDER)) is None:
        return
    with suppress(OSError):  # the launcher then names its own rank
        (Path(folder) / str(launcher_rank)).write_text(str(rank))


def report_to_torchrun(text: str, is_first: bool) -> None:
    """Write ``text`` to torchrun's error file as the reason of this rank's failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # torchrun names the earliest failure as the cause, at a resolution of whole seconds.
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + (0 if is_first else 1))}
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
    except OSError:
        pass  # torchrun then reports no reason
