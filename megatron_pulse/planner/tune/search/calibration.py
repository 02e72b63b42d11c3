"""Calibration: ratios of simulated to estimated step times."""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.search.grouping import (
    LayoutKey,
    RankKey,
    SizeKey,
    layout_key,
    size_key,
)


class Calibration:
    """Ratios of simulated to estimated step times, by partition, by ranks and by size.

    Estimates neglect part of the idle time behind slow messages, and memory limits with few
    microbatches. The error depends on the placement; one simulation reveals it for similar configs.
    Among equal ranks the smallest ratio counts, so that one bad partition does not rule out the
    rest.
    """

    def __init__(self) -> None:
        self._of_cuts: dict[tuple[LayoutKey, Partition], float] = {}
        self._of_ranks: dict[RankKey, float] = {}
        self._of_sizes: dict[SizeKey, float] = {}

    def took(self, config: Config, cuts: Partition, times: float) -> None:
        """Record that a simulated step took ``times`` its estimate."""
        self._of_cuts[layout_key(config), cuts] = times
        size = ranks, *_ = size_key(config)
        self._of_sizes[size] = min(times, self._of_sizes.get(size, times))
        self._of_ranks[ranks] = min(times, self._of_ranks.get(ranks, times))

    def of_cuts(self, kind: LayoutKey, cuts: Partition) -> float:
        """Ratio for a partition; 1 if unknown."""
        return self._of_cuts.get((kind, cuts), 1.0)

    def of_sizes(self, size: SizeKey) -> float:
        """Ratio for a size; for an unknown size the square root of that for the ranks."""
        others = self._of_ranks.get(size[0], 1.0)
        return self._of_sizes.get(size, float(others**0.5))

    def know(self, kind: LayoutKey) -> bool:
        """True if any config of that degree and layout was simulated."""
        return any(tried == kind for tried, _ in self._of_cuts)
