"""End of a run: one rank, the first that failed, prints the reason once."""

from __future__ import annotations

import argparse
import io
import math
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_pulse.errors import UserError
from megatron_pulse.full_disk import why_full
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.flags.startup_checks import FlagError
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.rendezvous import Job, report_to_torchrun
from megatron_pulse.runtime.stop_signals import STOP, end_process, order
from megatron_pulse.runtime.watchdog.watchdog import Watchdog

FAILURES = "failures"
"""Folder in ``--save`` with the tracebacks of a failed run, one file for each rank that failed."""
_LOST = re.compile(
    r"onnection (reset|closed|refused)|Connection was likely closed|Broken pipe|"
    r"closed the connection|wait timeout after|Timed out|timed out"
)
"""Texts of errors that mean that another rank is gone."""
LAST_RANK_S = 10.0
"""Longest time that rank 0, the host of the others' store, waits for them to leave."""


_SEEN_S = 1.0
"""Time that a rank stays after it lost another, so that others do not take it for the lost one."""


class UsageError(SystemExit):
    """Unknown flag, or invalid value of a flag; the process ends with status 2."""


def start_watchdog(job: Job, args: argparse.Namespace, options: PulseOptions) -> Watchdog | None:
    """Start the watchdog thread that ends this rank after ``--pulse-timeout-s`` without progress.

    None if the flag gives no positive, finite time.
    """
    if not 0 < options.timeout_s < math.inf:
        return None
    stacks = None if args.save is None else Path(args.save) / FAILURES / f"stacks{job.rank}.txt"
    watch = Watchdog(job.rank, options.timeout_s, stacks, report_to_torchrun)
    watch.start()
    return watch


def finish(job: Job) -> None:
    """End a run that all ranks have finished; the host of their store leaves last."""
    STOP.is_leaving = True
    if dist.is_initialized():
        dist.destroy_process_group()
    job.part(LAST_RANK_S)


@contextmanager
def print_parser_output_once(job: Job) -> Iterator[None]:
    """Print the output of the flags' parser (help, a complaint) on one rank only."""
    out, complaint = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(complaint):
            yield
    except SystemExit as stop:
        if stop.code == 2 and complaint.getvalue():
            raise UsageError(complaint.getvalue().rstrip()) from stop
        raise
    finally:
        if job.rank == 0:
            print(out.getvalue(), end="")


def obey_signal_at_once(job: Job, number: signal.Signals) -> NoReturn:
    """Obey a signal at once: it came before the first step, or was a second Ctrl-C."""

    def say() -> None:
        time.sleep(0.05)  # a killed launcher is gone only a moment after its ranks get the signal
        is_orphan = STOP.is_orphan
        request = order(number, is_orphan)
        text = f"stopped ({request}) before the first step; nothing to save"
        if STOP.is_deferring:
            text = f"second stop request ({request}): stopped within a step, without saving"
        board = None if is_orphan and job.has_launcher else job.board()  # its store is gone too
        if board is None:
            if job.is_first_of_node:
                print(text, file=sys.stderr, flush=True)
        elif (failure := board.first_failure()) is not None:
            report_to_torchrun(failure, is_first=False)  # torchrun ends us: another rank failed
            return
        else:
            job.say_once(text)
            board.report(text)
        report_to_torchrun(text, is_first=True)

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    speaker.join(10)  # the main thread may hold the store, or be in a long import
    end_process(128 + number)


def fail(error: BaseException, job: Job, args: argparse.Namespace | None) -> NoReturn:
    """End the process now, with status 0 if all ranks had agreed to end, 2 for bad input, else 1.

    A normal exit could wait for collectives that the other ranks will never join.
    """
    if STOP.is_leaving:
        end_process(0)  # the loss of another rank, or of its store, is no failure while all leave
    if isinstance(error, SystemExit):
        _refuse(str(error), job, 2 if isinstance(error, UsageError | FlagError) else 1)
    if STOP.received is not None and not STOP.is_deferring:
        obey_signal_at_once(job, STOP.received)
    _fail(error, job, args)


def _refuse(text: str, job: Job, status: int) -> NoReturn:
    """End a run that cannot start; equal texts of several ranks are printed once."""
    job.say_once(text)
    if (board := job.board()) is not None:
        board.report(text.partition("\n")[0])
    head, *faults = text.splitlines()
    report_to_torchrun(head + (faults[0] if faults else "") + " (listed above)", is_first=True)
    job.part(1.0)
    end_process(status)


def _fail(error: BaseException, job: Job, args: argparse.Namespace | None) -> NoReturn:
    """End a failed run; only the first failed rank prints why, as others fail in consequence."""
    written = [getattr(args, name, None) for name in ("save", "tensorboard_dir", "pulse_trace")]
    in_short, is_clear = _in_short(error, written)
    missing: dict[int, str] = {}
    if job.watch is not None and _LOST.search(str(error)):
        missing = job.watch.missing()
        in_short = "; ".join([*missing.values(), in_short])
    save = written[0]
    is_first, first = True, f"rank {job.rank}: {in_short}"
    if (board := job.board()) is not None:
        is_first, first = board.is_first(in_short)
    is_kept = save is not None and _keep(error, Path(save) / FAILURES, job.rank)
    if is_first:
        said = [] if is_clear else traceback.format_exception(error)
        said.append(f"rank {job.rank} stops; first failure in this job: {first}\n")
        if is_kept:
            said.append(f"tracebacks of all ranks: {save}/{FAILURES}\n")
        print("".join(said), end="", file=sys.stderr, flush=True)
    report_to_torchrun(first, is_first)
    if missing:
        time.sleep(_SEEN_S)
    if job.store_rank not in missing:  # else the store is lost with its host
        job.part(1.0)
    end_process(1)


def _in_short(error: BaseException, written: Sequence[str | None]) -> tuple[str, bool]:
    """(reason, whether the reason says all, so that a traceback would add nothing)."""
    text = str(error)
    if isinstance(error, PulseError | UserError):
        return text, True
    if (reason := why_full(error, written)) is not None:
        return reason, True
    if _LOST.search(text):
        return f"another rank exited, was killed or failed ({text.partition('. ')[0]})", True
    return f"{type(error).__name__}: {text}", False


def _keep(error: BaseException, folder: Path, rank: int) -> bool:
    """Write the traceback into ``folder``; false if that failed."""
    file = folder / f"rank{rank}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
    except OSError:  # a full disk, or a folder that is gone, may be the failure itself
        with suppress(OSError):
            file.unlink()
        return False
    return True


def ignore_full_disk_in_thread(failed: threading.ExceptHookArgs) -> None:
    """Report the exception of a thread, except a full disk, which its owner reports as well."""
    if failed.exc_value is None or why_full(failed.exc_value, []) is None:
        threading.__excepthook__(failed)
