"""What a process gets from where it was started: its end, streams, folder and port; its imports.

Processes end with the one that started them, however that ends (Linux; nothing elsewhere):
``python processes.py PID PROGRAM ARGUMENT...`` becomes PROGRAM, which is killed when PID ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

NO_FOLDER = "the working folder is no longer there: change into another"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when the thread that started it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def parent_has_ended(pid: int) -> bool:
    """Whether ``pid``, which started this process, has ended, or has begun to.

    Its first thread, at whose end the kernel speaks, may be gone well before the last.
    """
    if os.getppid() != pid:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "ZX"


def ending_with_us(command: Sequence[str]) -> list[str]:
    """``command`` in a process that is killed when this one ends, by SIGKILL too."""
    return [sys.executable, "-P", "-S", str(Path(__file__)), str(os.getpid()), *command]


def port_is_taken(error: BaseException) -> bool:
    """Whether another program has the port that a store was to listen at."""
    return "EADDRINUSE" in str(error)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """For long imports, exports and searches: they make hundreds of thousands of objects that stay,
    and to look for garbage among them again and again takes a quarter of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def open_closed_streams() -> None:
    """Give standard output and error that were closed (``>&-``) a place: nowhere.

    Files that are opened later would otherwise take their numbers, and what is printed.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    end_with_parent()
    if os.getppid() == int(sys.argv[1]):  # else it ended before
        os.execvp(sys.argv[2], sys.argv[2:])
