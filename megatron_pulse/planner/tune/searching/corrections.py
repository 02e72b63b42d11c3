"""How much longer steps take by simulation than by their estimates."""

from __future__ import annotations

from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.searching.kinds import Kind, Ranks, Sized, kind_of, sized


class Corrections:
    """What simulations took, times what was estimated: by cuts, by ranks and by sizes.

    Estimates do not see all that a chain of slow messages idles, nor memory for few microbatches,
    for one placement much (twice), for another nothing; once one is simulated the others need not
    be, to know. Of ranks in the same places the least counts, so that nothing is put off for good
    by one bad cut.
    """

    def __init__(self) -> None:
        self._of_cuts: dict[tuple[Kind, Partition], float] = {}
        self._of_ranks: dict[Ranks, float] = {}
        self._of_sizes: dict[Sized, float] = {}

    def took(self, config: Config, cuts: Partition, times: float) -> None:
        """A config was simulated with these cuts, and a step took so many times its estimate."""
        self._of_cuts[kind_of(config), cuts] = times
        size = ranks, *_ = sized(config)
        self._of_sizes[size] = min(times, self._of_sizes.get(size, times))
        self._of_ranks[ranks] = min(times, self._of_ranks.get(ranks, times))

    def of_cuts(self, kind: Kind, cuts: Partition) -> float:
        """Times the estimate that a step with these cuts takes, as far as is known."""
        return self._of_cuts.get((kind, cuts), 1.0)

    def of_sizes(self, size: Sized) -> float:
        """Times their estimates that those take; of other sizes half of that (its square root) is
        believed."""
        others = self._of_ranks.get(size[0], 1.0)
        return self._of_sizes.get(size, float(others**0.5))

    def know(self, kind: Kind) -> bool:
        """Whether a step of any cuts of the kind was simulated."""
        return any(tried == kind for tried, _ in self._of_cuts)
