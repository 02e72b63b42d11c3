"""Time budget of a search, and estimates of the time that work will take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

type Clock = Callable[[], float]
"""Function that returns seconds since an arbitrary origin."""

LATE = 4.0
"""Maximum ratio of wall time to process time for a search."""


class ProcessorClock:
    """Process time in seconds since the clock was made, so that other load does not change results.

    If wall time divided by ``LATE`` is larger, that counts instead.
    """

    def __init__(self) -> None:
        self._processor, self._wall = time.process_time(), time.monotonic()

    def __call__(self) -> float:
        return max(time.process_time() - self._processor, self.wall_s / LATE)

    @property
    def wall_s(self) -> float:
        """Wall time in seconds since the clock was made."""
        return time.monotonic() - self._wall

    @property
    def is_late(self) -> bool:
        """True if wall time decides: the machine gives less than 1 / ``LATE`` of a core."""
        return self.wall_s / LATE > time.process_time() - self._processor


class Budget:
    """Budget of ``seconds`` by ``clock``, from now on.

    Work has a kind and a size. The seconds of earlier work of a kind predict those of later work.
    No work starts that would end too late, however slow the machine is.
    """

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds, self._clock = seconds, clock or ProcessorClock()
        self.begin()
        self._took: defaultdict[str, float] = defaultdict(float)
        self._sizes: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Restart the budget."""
        self._began = self._clock()

    @property
    def spent(self) -> float:
        """Seconds spent."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.seconds - self.spent)

    def part(self, share: float) -> Budget:
        """New budget with a share of the time left, without the measured times."""
        return Budget(share * self.left, self._clock)

    def fits(self, kind: str, size: float, share: float = 1.0) -> bool:
        """True if the work is expected to fit in a share of the time left."""
        return share * self.left > self.estimate(kind, size)

    def estimate(self, kind: str, size: float) -> float:
        """Expected seconds of the work.

        For a new kind, the measurements of kinds with the same part before the comma count, then
        those with the same last part, else 0.
        """
        if self._sizes[kind]:
            return self._took[kind] / self._sizes[kind] * size
        for part in (0, -1):
            alike = [k for k in self._sizes if k.split(",")[part] == kind.split(",")[part]]
            if sizes := sum(self._sizes[k] for k in alike):
                return sum(self._took[k] for k in alike) / sizes * size
        return 0.0

    @contextmanager
    def timed(self, kind: str, size: float) -> Iterator[None]:
        """Context that measures work of that kind and size."""
        began = self._clock()
        try:
            yield
        finally:
            self._took[kind] += self._clock() - began
            self._sizes[kind] += size
