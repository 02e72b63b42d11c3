"""Watchdog thread that ends the job when nothing makes progress within a time limit.

The watchdog samples the main thread. After the limit without progress it queries the status of all
ranks. The job has failed if no rank makes progress or some do not answer. The watchdog then reports
which rank blocks which, and ends all ranks. No wait for a store, disk or peer exceeds a few
seconds::

    main thread     F0:0 | wait for rank 1 .........................................
    watchdog                  . . . . . . limit: "where are you?" to all    "end" to all
    rank 1           (stopped)                     no response in 3 s
    rank 2          wait for rank 0 ..............: "waiting for ..."       ends too
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_pulse.runtime.stop_signals import STOP, end_process
from megatron_pulse.runtime.watchdog.call_with_timeout import call_with_timeout, start_and_leave
from megatron_pulse.runtime.watchdog.diagnosis import (
    Diagnosis,
    RankStatus,
    diagnose,
    seconds_until_diagnosis,
)
from megatron_pulse.runtime.watchdog.peer_status import (
    Address,
    Answer,
    Listener,
    NoAnswer,
    ask,
    own_host,
)
from megatron_pulse.runtime.watchdog.progress import PROGRESS

ANSWER_S = 3.0
"""Seconds within which a rank must answer a query."""
_TAKES_S = 2.0
"""Seconds allowed for writing the final report to a disk or a terminal."""
_PATIENCE = 10.0
"""Multiple of the limit within which a computing rank in a patient phase need not make progress."""
_COMPUTES, _WRITES = 0.5, 1e5
"""Thresholds for a working process: fraction of CPU time, and bytes per second of I/O.

A waiting process stays below them, although gloo's threads poll a hundred times a second.
"""
_MAX_POSITION_LENGTH = 2000
"""Maximum number of characters of a rank's position."""
_SECRET, _ADDRESS = "megatron_pulse/watch/secret", "megatron_pulse/watch"


class Watchdog:
    """Watch the main thread of this rank, which may make no progress for ``limit_s`` seconds.

    - ``stacks``: file for the stacks of all threads; None writes none.
    - ``on_failure``: called at the end with the failure, and whether this rank found it.
    - ``meet``: call to announce the other ranks; until then only this rank is known.
    """

    def __init__(
        self,
        rank: int,
        limit_s: float,
        stacks: Path | None = None,
        on_failure: Callable[[str, bool], None] = lambda text, is_first: None,
    ) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._stacks = stacks
        self._on_failure = on_failure
        self._tick_s = min(1.0, limit_s / 20)
        self._unmoved_s = self._computed_s = 0.0
        self._moved = 0
        self._listener: Listener | None = None
        self._secret = self._unmet = ""
        self._others: dict[int, Address] = {}
        self._processes = {rank: _this_process()}
        self._asked_by_lower = -limit_s
        self._stopped = threading.Event()
        self._ending = threading.Lock()

    def start(self) -> None:
        """Start watching."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def expect(self, where: str) -> None:
        """Set the place where other ranks are expected, for the report if they never appear."""
        self._unmet = where

    def announce(self, store: dist.Store, master: Address) -> None:
        """Publish in ``store`` the address where this rank answers.

        Call before the rank counts as present.
        """
        if self._rank == 0:
            store.set(_SECRET, secrets.token_hex(16))
        self._listener = Listener(self._answer)
        mine = f"{own_host(*master)} {self._listener.port} {_this_process()}"
        store.set(f"{_ADDRESS}/{self._rank}", mine)

    def meet(self, store: dist.Store, world_size: int, master: Address) -> None:
        """Look up the other ranks' addresses; all of them must have announced themselves."""
        assert self._listener is not None
        self._secret = self._listener.secret = store.get(_SECRET).decode()
        others = [rank for rank in range(world_size) if rank != self._rank]
        for rank, entry in zip(
            others, store.multi_get([f"{_ADDRESS}/{rank}" for rank in others]), strict=True
        ):
            host, port, process = entry.decode().split(" ", 2)
            self._others[rank] = host or master[0], int(port)
            self._processes[rank] = process

    def renumber(self, new_ranks: Sequence[int]) -> None:
        """Give rank r, here and in reports on others, the number ``new_ranks[r]``."""
        self._rank = new_ranks[self._rank]
        self._others = {new_ranks[rank]: address for rank, address in self._others.items()}
        self._processes = {new_ranks[rank]: name for rank, name in self._processes.items()}
        if self._stacks is not None:
            self._stacks = self._stacks.with_name(f"stacks{self._rank}.txt")

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def missing(self) -> dict[int, str]:
        """Describe the other ranks whose processes exited or do not respond."""
        answers = ask(self._others, self._secret, {"ask": self._rank}, ANSWER_S)
        return {
            rank: f"rank {rank} ({self._processes[rank]}): {one.value}"
            for rank, one in answers.items()
            if isinstance(one, NoAnswer)
        }

    def _watch(self) -> None:
        signature, asks_at_s = PROGRESS.signature(), self._asks_after_s
        looked = time.monotonic()
        while not self._stopped.wait(self._tick_s):
            # Time during which this process was stopped, or the node slept, does not count.
            now = time.monotonic()
            passed_s, looked = min(now - looked, 2 * self._tick_s), now
            works = self._works(passed_s)
            if signature != (signature := PROGRESS.signature()):
                self._unmoved_s, asks_at_s = 0.0, self._asks_after_s
            elif works:
                self._unmoved_s += passed_s / _PATIENCE
            else:
                self._unmoved_s += passed_s
            if self._stalled_s >= asks_at_s:
                asks_at_s = self._stalled_s + self._query_ranks()

    @property
    def _asks_after_s(self) -> float:
        """Seconds without progress until the first query; the lowest rank queries first."""
        return self._limit_s + min(0.25 * self._rank, 2.0)

    @property
    def _stalled_s(self) -> float:
        """Seconds without progress, less those granted to the current phase."""
        return max(0.0, self._unmoved_s - PROGRESS.phase.grants_s)

    def _works(self, passed_s: float) -> bool:
        """True if this process computes or does I/O in a patient phase."""
        if not PROGRESS.phase.is_patient:
            return False
        before_s, self._computed_s = self._computed_s, time.process_time() - time.thread_time()
        before, self._moved = self._moved, _moved_bytes()
        return (
            self._computed_s - before_s > _COMPUTES * passed_s
            or self._moved - before > _WRITES * passed_s
        )

    def _query_ranks(self) -> float:
        """Query all ranks; end the job, or return the seconds until the next query."""
        if time.monotonic() - self._asked_by_lower < 3 * ANSWER_S:
            return 2 * ANSWER_S  # a lower rank is already querying
        asked = ask(self._others, self._secret, {"ask": self._rank}, ANSWER_S)
        statuses = {self._rank: self._status()} | {
            rank: one if isinstance(one, NoAnswer) else _status_of(one)
            for rank, one in asked.items()
        }
        statuses = dict(sorted(statuses.items()))
        if (left_s := seconds_until_diagnosis(statuses, self._limit_s)) is not None:
            return min(max(left_s, 1.0), self._limit_s)
        diagnosis = diagnose(statuses, self._processes, self._limit_s)
        if self._unmet and not self._others:
            alone = f"rank {self._rank} has not reached the other ranks: {self._unmet}"
            diagnosis = replace(
                diagnosis, reason=diagnosis.reason.partition("; ")[0] + f"; {alone}"
            )
        self._end_all(diagnosis)
        return self._limit_s

    def _end_all(self, diagnosis: Diagnosis) -> None:
        if not self._ending.acquire(blocking=False):
            return
        lines = [
            *diagnosis.positions,
            f"rank {self._rank} stops; first failure in this job: {diagnosis.reason}",
        ]
        if self._stacks is not None:
            lines.append(f"stacks of all ranks: {self._stacks.parent}")
        if not STOP.is_leaving:
            call_with_timeout(
                _TAKES_S, lambda: print("\n".join(lines), file=sys.stderr, flush=True)
            )
        question = {"end": diagnosis.reason, "from": self._rank}
        call_with_timeout(_TAKES_S, lambda: ask(self._others, self._secret, question, ANSWER_S))
        self._leave(diagnosis.reason, is_first=True)

    def _leave(self, reason: str, is_first: bool) -> None:
        call_with_timeout(_TAKES_S, lambda: self._keep_stacks(reason))
        call_with_timeout(_TAKES_S, lambda: self._on_failure(reason, is_first))
        status = 0 if STOP.is_leaving else 1
        start_and_leave(
            lambda: _exit_later(status)
        )  # a blocked terminal may keep the process from exiting
        end_process(status)

    def _keep_stacks(self, reason: str) -> None:
        if self._stacks is None:
            return
        self._stacks.parent.mkdir(parents=True, exist_ok=True)
        with self._stacks.open("w") as file:
            print(f"{reason}\nthis rank: {PROGRESS.position().text}\n", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)

    def _status(self) -> RankStatus:
        position = PROGRESS.position()
        return RankStatus(position.text[:_MAX_POSITION_LENGTH], self._stalled_s, position.waits)

    def _answer(self, question: Answer) -> Answer:
        if "end" in question:
            if self._ending.acquire(blocking=False):
                start_and_leave(lambda: self._leave(str(question["end"]), is_first=False))
            return {}
        if question.get("ask", self._rank) < self._rank and self._stalled_s >= self._limit_s / 2:
            self._asked_by_lower = time.monotonic()
        status = call_with_timeout(
            ANSWER_S / 2, self._status, RankStatus(PROGRESS.phase.name, self._stalled_s, True)
        )
        return {"position": status.position, "stalled_s": status.stalled_s, "waits": status.waits}


def _status_of(answer: Answer) -> RankStatus:
    return RankStatus(
        str(answer.get("position", "")),
        float(answer.get("stalled_s", 0.0)),
        bool(answer.get("waits")),
    )


def _moved_bytes() -> int:
    """Bytes read and written by this process; 0 if the kernel does not report them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _exit_later(status: int) -> NoReturn:
    time.sleep(_TAKES_S)
    os._exit(status)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
