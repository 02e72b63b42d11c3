"""Runs a function on several ranks, forked from one server that has imported torch and Megatron.

    results = run_ranks(4, train, config)

``train(config)`` runs in four processes with the usual environment (RANK, WORLD_SIZE,
MASTER_ADDR, ...); its return values come back in rank order. If a rank fails, ``RanksFailed``
holds what every rank said. Nothing outlives the call, nor the process that made it.

A rank is never forked from a process that has multiplied: MKL's memory manager may then search
for ever in its lists.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime import nccl_double

_PRELOAD = ["tests.preload"]
_ROOT = Path(__file__).parents[1]
SHARED = "PULSE_TESTS_SERVER"
"""The variable that says where a server listens which several processes share."""

AFTER_A_FAILURE_S = 45.0
"""How long the others may take to notice that one has failed."""


class RanksFailed(AssertionError):
    """At least one rank did not finish; ``outputs`` and ``exit_codes`` are in rank order."""

    def __init__(self, message: str, outputs: list[str], exit_codes: list[int | None]) -> None:
        super().__init__(message)
        self.outputs = outputs
        self.exit_codes = exit_codes


def said_once(failed: RanksFailed, text: str) -> bool:
    """Whether ``text`` was said by one rank, one time."""
    return "".join(failed.outputs).count(text) == 1


def free_port() -> int:
    """A TCP port that is free now, and that the system hands to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def share_server() -> None:
    """Start the server now, for the processes that this one will start as well.

    Each has one of its own where Python's (3.14 and later) speaks to its starter alone.
    """
    _context()
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if not hasattr(server, "_forkserver_authkey"):
        os.environ[SHARED] = server._forkserver_address


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_address is None and SHARED in os.environ:
        server._forkserver_address = os.environ[SHARED]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = multiprocessing.resource_tracker.ensure_running
    context.set_forkserver_preload(_PRELOAD)
    # It looks for what it preloads in its working directory, and says nothing if that is not there.
    with contextlib.chdir(_ROOT):
        server.ensure_running()
    return context


def _end_with_caller() -> None:
    """The server that ranks are forked from lives as long as they do: their caller counts."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _main(
    function: Callable[..., Any], args: tuple[Any, ...], folder: str, env: dict[str, str]
) -> None:
    threading.Thread(target=_end_with_caller, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup would have ranks ignore
    rank = env["RANK"]
    log = os.open(f"{folder}/log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    code = 1
    try:
        nccl_double.install_if_asked()
        result = function(*args)
        Path(f"{folder}/result.{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        import multiprocessing.util

        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, folder: str) -> list[Any]:
    """Start the ranks and return their processes; their output goes to ``folder/log.<rank>``."""
    port = free_port()
    processes = []
    context = _context()
    for rank in range(num_ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        process = context.Process(target=_main, args=(function, args, folder, env))
        process.start()
        processes.append(process)
    return processes


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240.0,
) -> list[Any]:
    """Run ``function(*args)`` on every rank and return the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(num_ranks, function, *args, folder=folder)
        deadline = time.monotonic() + timeout_s
        running = [p.sentinel for p in processes]
        while running and time.monotonic() < deadline:
            # A sentinel stays ready: none is asked for twice, and never is nothing waited for.
            ended = multiprocessing.connection.wait(running, deadline - time.monotonic())
            running = [sentinel for sentinel in running if sentinel not in ended]
            for p in processes:
                if p.sentinel in ended:
                    p.join()
            if any(p.exitcode for p in processes):
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        late = [r for r, p in enumerate(processes) if p.is_alive()]
        for rank in late:
            os.kill(processes[rank].pid, signal.SIGKILL)
            processes[rank].join()
        codes = [p.exitcode for p in processes]
        logs = [Path(f"{folder}/log.{r}") for r in range(num_ranks)]
        outputs = [log.read_text() if log.exists() else "" for log in logs]
        if any(codes):
            shown = "\n".join(
                f"--- rank {r} (exit code {code}{', timed out' if r in late else ''})\n"
                + output[-4000:]
                for r, (code, output) in enumerate(zip(codes, outputs, strict=True))
            )
            raise RanksFailed(f"ranks failed\n{shown}", outputs, codes)
        return [pickle.loads(Path(f"{folder}/result.{r}").read_bytes()) for r in range(num_ranks)]
