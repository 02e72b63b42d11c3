"""Signals that ask a rank to stop, and their handling.

During training steps a signal is only recorded. All ranks stop together at the end of a step,
because a checkpoint needs all of them. Before the first step nothing can be lost, so the rank exits
at once, even from a wait for another rank. A thread reads the signals: Python's handlers would run
only after the main thread's wait.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from megatron_pulse.processes import end_with_parent, parent_has_ended

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class StopSignals:
    """Signals received by this process; one instance per process, created in its main thread."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._parent: int | None = None
        self.is_leaving = False
        """True once all ranks have agreed to end; missing ranks have then not failed."""
        self._leave: Callable[[signal.Signals], None] | None = None
        self.is_deferring = False
        """True while steps run; signals take effect at the end of a step."""
        self._is_listening = False
        self._lock = threading.Lock()

    @property
    def is_orphan(self) -> bool:
        """True if the kernel sent SIGTERM because the parent process ended
        (``end_with_parent``).
        """
        if self._parent is None or self.received is not signal.SIGTERM:
            return False
        return parent_has_ended(self._parent)

    def listen(self) -> None:
        """Start recording signals; forked children do not inherit the handlers."""
        if self._is_listening:
            return
        self._is_listening = True
        self._parent = os.getppid()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            self.listen_for(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # ``pulse train`` blocks SIGINT
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._read, args=(reader,), name="stop", daemon=True).start()

    def listen_for(self, number: signal.Signals) -> None:
        """Treat ``number`` as a request to stop, except SIGHUP under nohup."""
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)

    def exit_on_signal(self, leave: Callable[[signal.Signals], None]) -> None:
        """Call ``leave`` on a signal, including one received before, until ``defer``.

        ``leave`` runs in another thread and must end the process.
        """
        with self._lock:
            self._leave, self.is_deferring = leave, False
            received = self.received
        if received is not None:
            leave(received)

    def defer(self) -> None:
        """Only record signals from now on; a second Ctrl-C still takes effect at once."""
        self.is_deferring = True

    def _read(self, reader: int) -> None:
        while True:
            # The reader of this process's output may end at the same signal (Ctrl-C in a pipe, a
            # closed terminal). Later output must not raise.
            waiting_s = None if self.received is None else 0.02
            if select.select([reader], [], [], waiting_s)[0]:
                for number in os.read(reader, 64):
                    self._receive(signal.Signals(number))
            elif self.received is not None:
                drop_unread_output()

    def _receive(self, number: signal.Signals) -> None:
        with self._lock:
            again = self.received is signal.SIGINT and not self.is_leaving
            if self.received is None:
                self.received = number
            leave = self._leave if again or not self.is_deferring else None
        drop_unread_output()
        if leave is not None:
            leave(number)

    @staticmethod
    def _in_child() -> None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        end_with_parent()


def order(number: signal.Signals, is_orphan: bool) -> str:
    """Description of a signal."""
    return number.name + ": the launcher has exited" * is_orphan


def drop_unread_output() -> None:
    """Redirect stdout and stderr to the null device if nobody can read them."""
    streams = select.poll()
    for stream in (1, 2):
        streams.register(stream, 0)
    for stream, _ in streams.poll(0):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)


def end_process(status: int) -> NoReturn:
    """Exit now, without exit handlers, which may wait for ranks that are gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status)


STOP = StopSignals()
