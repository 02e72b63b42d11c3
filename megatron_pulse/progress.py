"""Progress line of long work on standard error, drawn by rich on a terminal.

Nothing is drawn in a pipe, or before work has taken ``DELAY_S`` seconds; rich is imported only
then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

DELAY_S, CALM_S = 2.0, 0.5

_live: Live | None = None
"""The line that is drawn; there is one at a time."""
_shown: ProgressLine | None = None
"""The line that ``_live`` draws."""


class ProgressLine:
    """Line with what is being done, how far, the time taken and left, and a note.

    ``total`` is in ``unit``; without it only the time is shown. Attributes may be set at any time.
    ``details`` are drawn below. If ``timed``, the seconds that passed are what is done. A
    ``silent`` one draws nothing. A ``calm`` one is drawn by ``advance`` alone, so that no thread
    disturbs what is timed. In a pipe a plain line is printed every ``log_s``, if given.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        done: float = 0,
        silent: bool = False,
        timed: bool = False,
        calm: bool = False,
        log_s: float | None = None,
        delay_s: float | None = None,
    ) -> None:
        self.what, self.total, self.unit, self.note, self.done = what, total, unit, "", done
        self.details: Sequence[str] = ()
        is_terminal = sys.stderr.isatty()
        self._log_s = None if silent or is_terminal else log_s
        self._first, self._began, self._timed = done, time.monotonic(), timed
        self._said = self._began
        self._live: Live | None = None
        self._delay_s = DELAY_S if delay_s is None else delay_s
        self._calm, self._draws = calm, is_terminal and not silent
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if self._draws and not self._calm:
            self._timer = threading.Timer(self._delay_s, self._draw)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        global _live, _shown
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._live is not None:
            self._live.stop()
            _live = self._live = _shown = None

    def advance(self, count: float = 1) -> None:
        """Count ``count`` more as done."""
        self.done += count
        now = time.monotonic()
        if self._log_s is not None and now - self._said >= self._log_s:
            self._said = now
            print(self, file=sys.stderr, flush=True)
        if self._draws and self._calm and now - self._began >= self._delay_s:
            if self._live is None:
                self._draw()
            elif now - self._said >= CALM_S:
                self._said = now
                self._live.refresh()

    def __str__(self) -> str:
        """The line as plain text, with the mean rate."""
        rate = (self.done - self._first) / max(time.monotonic() - self._began, 1e-9)
        return f"{self.what}: {self._how_far()}, {rate:.3g} a second, {self._left()} left"

    def _how_far(self) -> str:
        total = "" if self.total is None else f" of {self.total:.0f}"
        return f"{self.done:.0f}{total} {self.unit}".rstrip()

    def _left(self) -> str:
        new, took = self.done - self._first, time.monotonic() - self._began
        if self.total is None or not new:
            return "?"
        return _clock(max(0.0, self.total - self.done) * took / new)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live

        global _live, _shown
        if _live is not None:
            return
        console, line = Console(stderr=True), self._line
        _live = self._live = Live(
            console=console,
            transient=True,
            redirect_stdout=False,
            get_renderable=line,
            auto_refresh=not self._calm,
        )
        _shown = self
        _live.start()
        console.show_cursor()  # it stays where it is if the process is killed

    def _line(self) -> RenderableType:
        from rich.columns import Columns
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        seconds = time.monotonic() - self._began
        if self._timed:
            self.done = min(seconds, self.total or seconds)
        took, line = _clock(seconds), Table.grid(padding=(0, 1))
        if self.total is None:
            line.add_row(Text(self.what), took, Text(self.note))
        else:
            bar = ProgressBar(self.total, self.done, width=20)
            how = f"{self._how_far()}, {took}, {self._left()} left"
            line.add_row(Text(self.what), bar, Text(how), Text(self.note))
        if not self.details:
            return line
        return Group(line, Columns(map(Text, self.details), padding=(0, 3)))


def track[T](
    items: Iterable[T],
    what: str,
    unit: str = "",
    total: int | None = None,
    silent: bool = False,
    calm: bool = False,
) -> Iterator[T]:
    """Iterate over ``items`` with a progress line."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with ProgressLine(what, total, unit, silent=silent, calm=calm) as line:
        for item in items:
            yield item
            line.advance()


def show_details(stream: TextIO, details: Sequence[str]) -> bool:
    """Draw ``details`` below the progress line; False without one, or if ``stream`` is a file."""
    if _shown is None or not stream.isatty():
        return False
    _shown.details = details
    return True


def write_above(stream: TextIO, text: str) -> None:
    """Write whole lines to ``stream``; on a terminal above the progress line, if there is one."""
    if _live is not None and stream.isatty():
        _live.console.out(text, end="", highlight=False)
    else:
        stream.write(text)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
