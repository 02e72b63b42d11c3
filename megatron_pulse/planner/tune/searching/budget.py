"""Time that may be spent, and how much of it a piece of work will take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

type Clock = Callable[[], float]
"""Seconds since whenever"""

LATE = 4.0
"""Times as many seconds of the wall as of the processor that a search takes at the most."""


class ProcessorClock:
    """Seconds of this process's time since the clock was made, so that answers do not depend on
    what else the machine does; those of the wall over ``LATE`` where that is more."""

    def __init__(self) -> None:
        self._processor, self._wall = time.process_time(), time.monotonic()

    def __call__(self) -> float:
        return max(time.process_time() - self._processor, self.wall_s / LATE)

    @property
    def wall_s(self) -> float:
        """Seconds of the wall since then."""
        return time.monotonic() - self._wall

    @property
    def is_late(self) -> bool:
        """True if the wall decides: the machine gives less than 1 / ``LATE`` of a core."""
        return self.wall_s / LATE > time.process_time() - self._processor


class Budget:
    """``seconds`` by ``clock``, from now on.

    Work has a kind and a size. What sizes of its kind took so far says what more will take, so that
    none is begun which would end too late, however slow the machine is at the moment.
    """

    def __init__(self, seconds: float, clock: Clock | None = None) -> None:
        self.seconds, self._clock = seconds, clock or ProcessorClock()
        self.begin()
        self._took: defaultdict[str, float] = defaultdict(float)
        self._sizes: defaultdict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Count from now on."""
        self._began = self._clock()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain, not below 0."""
        return max(0.0, self.seconds - self.spent)

    def part(self, share: float) -> Budget:
        """A share of the time that is left, from now on; what work takes is not known there."""
        return Budget(share * self.left, self._clock)

    def fits(self, kind: str, size: float, share: float = 1.0) -> bool:
        """Whether work of that size should be done in a share of the time that is left."""
        return share * self.left > self.estimate(kind, size)

    def estimate(self, kind: str, size: float) -> float:
        """Seconds that work of that size will take; where none of its kind was done, what all says
        that is called alike before a comma, or else after it, or 0."""
        if self._sizes[kind]:
            return self._took[kind] / self._sizes[kind] * size
        for part in (0, -1):
            alike = [k for k in self._sizes if k.split(",")[part] == kind.split(",")[part]]
            if sizes := sum(self._sizes[k] for k in alike):
                return sum(self._took[k] for k in alike) / sizes * size
        return 0.0

    @contextmanager
    def timed(self, kind: str, size: float) -> Iterator[None]:
        """Work of that kind and size; remembers what it takes."""
        began = self._clock()
        try:
            yield
        finally:
            self._took[kind] += self._clock() - began
            self._sizes[kind] += size
