"""Process environment: end with the parent, streams, warnings, ports, garbage collection.

Processes end with their parent, however it ends (Linux only). ``python processes.py PID PROGRAM
ARGUMENT...`` becomes PROGRAM, which is killed when PID ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

RANKS_FOLDER = "PULSE_RANKS_FOLDER"
"""Variable of a launcher's folder: a file for each rank with the number that a plan gave to it."""

NO_FOLDER = "the working folder was deleted. Change to another folder"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send ``number`` to this process when the parent's starting thread ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def end_on_interrupt() -> None:
    """End this process at once on SIGINT, with one line, until ``raise_on_interrupt``.

    Imports of compiled modules may swallow a KeyboardInterrupt, and the command would go on.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, _interrupted)


def raise_on_interrupt() -> None:
    """Let SIGINT raise KeyboardInterrupt again, after ``end_on_interrupt``."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    print("\npulse: interrupted", file=sys.stderr, flush=True)
    os._exit(128 + number)


def hide_package_warnings() -> None:
    """Hide what packages log, as they are imported, about parts that no command uses.

    torch warns of a CUDA toolkit without a device, and bitsandbytes of kernels for CPUs that it
    would fetch; diffusers imports bitsandbytes wherever it is installed.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_missing_kernel)


def _is_no_missing_kernel(record: logging.LogRecord) -> bool:
    return "Failed to load CPU gemm_4bit_forward" not in str(record.msg)


def parent_has_ended(pid: int) -> bool:
    """True if the parent ``pid`` has ended, or is ending.

    The kernel signals at the end of its first thread, which may precede that of its last.
    """
    if os.getppid() != pid:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "ZX"


def ending_with_us(command: Sequence[str]) -> list[str]:
    """Command that runs ``command`` and is killed when this process ends, even by SIGKILL."""
    return [sys.executable, "-P", "-S", str(Path(__file__)), str(os.getpid()), *command]


def port_is_taken(error: BaseException) -> bool:
    """True if another program occupies the port of a store."""
    return "EADDRINUSE" in str(error)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Disable garbage collection during long imports, exports and searches.

    These create hundreds of thousands of lasting objects. Repeated collections would take a quarter
    of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def open_closed_streams() -> None:
    """Redirect closed standard streams (``>&-``) to the null device.

    Files opened later would otherwise get their descriptors, and receive printed text.
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
    if os.getppid() == int(sys.argv[1]):  # otherwise the parent has already ended
        os.execvp(sys.argv[2], sys.argv[2:])
