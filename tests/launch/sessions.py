"""Commands with everything they start: what they say, which processes are theirs, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_pulse.processes import ending_with_us

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


class Session:
    """A command in a session of its own, whose output goes through a pipe, as to ``tee``.

    It is killed when this process ends, however that ends.

    Processes of the command are known by a variable that they inherit, whatever groups and
    sessions they make.
    """

    def __init__(self, command: Sequence[str | Path], **environment: str) -> None:
        self._mark = f"PULSE_TEST_SESSION={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            ending_with_us(list(map(str, command))),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
            | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._lines.extend(iter(self.process.stdout.readline, ""))

    def said(self) -> str:
        """All output until now."""
        return "".join(self._lines)

    def wait_until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Poll ``condition``; AssertionError with all output when it takes longer."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}\n{self.said()}"
            time.sleep(0.02)

    def wait_for(self, text: str, limit_s: float = 120) -> None:
        """Wait until ``text`` was said, or the command has ended without."""
        self.wait_until(
            lambda: text in self.said() or self.process.poll() is not None, repr(text), limit_s
        )
        assert text in self.said(), self.said()

    def processes(self) -> list[int]:
        """All processes that the command, or what it started, has left running."""
        mark, found = self._mark.encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile; a zombie has no environment
                continue
        return sorted(found)

    def children(self) -> list[int]:
        """The command's own children."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return list(map(int, text.split()))

    def ended(self, limit_s: float = 60) -> int:
        """Its status, once it and all it started have ended and let go of its output."""
        self.process.wait(2 * limit_s)
        self.wait_until(lambda: not self.processes(), "all processes to end", limit_s)
        self._reader.join(limit_s)
        assert not self._reader.is_alive(), "somebody holds the pipe"
        return self.process.returncode


@contextmanager
def session(command: Sequence[str | Path], **environment: str) -> Iterator[Session]:
    """A command, and the end of all that it started."""
    started = Session(command, **environment)
    try:
        yield started
    finally:
        while left := started.processes():  # also those that started while others were ended
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        started.process.wait()
