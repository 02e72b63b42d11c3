"""Time that may be spent, and how much of it a piece of work will take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

type Clock = Callable[[], float]
"""Seconds since whenever; the wall's (``time.monotonic``) or a process's (``time.process_time``)"""


class Budget:
    """``seconds`` by ``clock``, from now on.

    Work has a kind and a size. What sizes of its kind took so far says what more will take, so that
    none is begun which would end too late, however slow the machine is at the moment.
    """

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._began = clock()
        self._took: defaultdict[str, float] = defaultdict(float)
        self._sizes: defaultdict[str, float] = defaultdict(float)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain, not below 0."""
        return max(0.0, self.seconds - self.spent)

    def fits(self, kind: str, size: float) -> bool:
        """Whether work of that size should be done in time; of an unknown kind while any is left"""
        return self.left > size * self.seconds_per_unit(kind)

    def seconds_per_unit(self, kind: str) -> float:
        """What a unit of such work took in the mean; 0 if none was done."""
        return self._took[kind] / self._sizes[kind] if self._sizes[kind] else 0.0

    @contextmanager
    def timed(self, kind: str, size: float) -> Iterator[None]:
        """Work of that kind and size; remembers what it takes."""
        began = self._clock()
        try:
            yield
        finally:
            self._took[kind] += self._clock() - began
            self._sizes[kind] += size
