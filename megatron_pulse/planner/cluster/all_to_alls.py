"""Measured times of all-to-alls, as context-parallel ranks exchange tokens for heads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, MinLen

from megatron_pulse.json_validation import Count


@dataclass(frozen=True)
class AllToAllTimes:
    """Seconds of all-to-alls in groups of ``ranks`` neighbours of a node, all groups at once.

    ``num_bytes`` are what one rank has for all ranks, itself included, in ascending order.
    """

    ranks: Annotated[int, Ge(2), "ranks of a group"]
    num_bytes: Annotated[tuple[Count, ...], MinLen(2)]
    seconds: Annotated[tuple[Annotated[float, Gt(0), Le(1e6)], ...], MinLen(2)]

    def time_s(self, num_bytes: float) -> float:
        """Seconds for ``num_bytes``, interpolated.

        Fewer bytes than measured take as long as the fewest. More have the bandwidth of the most.
        """
        sizes, seconds = self.num_bytes, self.seconds
        if num_bytes >= sizes[-1]:
            return seconds[-1] * num_bytes / sizes[-1]
        right = bisect_left(sizes, num_bytes)
        if right == 0:
            return seconds[0]
        left = right - 1
        share = (num_bytes - sizes[left]) / (sizes[right] - sizes[left])
        return seconds[left] + share * (seconds[right] - seconds[left])


def all_to_all_faults(found: Sequence[AllToAllTimes], devices_per_node: int) -> Iterator[str]:
    """Yield groups that are measured twice or do not divide a node, and measurements that are not
    one time for each size, in ascending order."""
    known = set[int]()
    for i, each in enumerate(found):
        where = f"all_to_alls.{i}"
        if len(each.num_bytes) != len(each.seconds):
            yield f"{where}: {len(each.num_bytes)} num_bytes and {len(each.seconds)} seconds"
        if list(each.num_bytes) != sorted(set(each.num_bytes)):
            yield f"{where}.num_bytes must be in ascending order"
        if list(each.seconds) != sorted(each.seconds):
            yield f"{where}.seconds must not become less with more bytes"
        if each.ranks in known:
            yield f"{where}: groups of {each.ranks} ranks occur twice"
        if devices_per_node % each.ranks:
            yield f"{where}: groups of {each.ranks} ranks do not divide {devices_per_node} devices"
        known.add(each.ranks)
