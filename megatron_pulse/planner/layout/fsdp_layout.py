"""Layout of fully sharded data parallelism: units of layers, their collectives, shard groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from megatron_pulse.format import with_plural

REDUCING = 2
"""Units whose gradients may be in reduction at once. The default of FSDP2 is 1."""


class Gathering(StrEnum):
    """Frequency of gathering a unit's parameters.

    PASS: in each forward and backward (``reshard_after_forward``). MICROBATCH: once for both. STEP:
    once a step, without ``reshard_after_backward``. A unit that would be gathered again before it
    is freed stays, such as the last unit for its backward.
    """

    PASS = "each pass"
    MICROBATCH = "each microbatch"
    STEP = "once a step"


@dataclass(frozen=True)
class FsdpLayout:
    """Sharding of a chain on one pipeline device by torch's ``fully_shard`` (FSDP2, HSDP).

    - ``starts``: first layer of each unit; a unit is gathered and freed as a whole.
    - ``group``: consecutive ranks that share one copy of the parameters. Several groups (HSDP) have
      a copy each.
    - ``reduce_once``: gradients accumulate locally and are reduced once a step.
    - ``prefetch``: units that are gathered ahead of the running one, from 1.
    """

    starts: tuple[int, ...]
    group: int
    gathering: Gathering = Gathering.PASS
    reduce_once: bool = False
    prefetch: int = 1

    @classmethod
    def of_size(cls, num_layers: int, size: int, **values: object) -> FsdpLayout:
        """Layout with units of ``size`` layers."""
        return cls(tuple(range(0, num_layers, size)), **values)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Name, with the number of ranks that share the parameters."""
        return f"FSDP2 over {self.group} ranks"

    def __str__(self) -> str:
        often = "once a step" if self.reduce_once else "each microbatch"
        return (
            f"{self.name}: {with_plural(len(self.starts), 'unit')}, gathered "
            f"{self.gathering}, reduced {often}"
        )

    def units(self, num_layers: int) -> Iterator[range]:
        """Layers of each unit."""
        for first, end in pairwise([*self.starts, num_layers]):
            yield range(first, end)


def prefetched_before_freed(units: int, prefetch: int) -> bool:
    """True if a unit at ``units`` from the turn of the pass is requested before it would be
    freed."""
    return 2 * units < prefetch
