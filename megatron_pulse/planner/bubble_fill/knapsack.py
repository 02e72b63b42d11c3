"""Subset-sum over prefixes of several chains, to fill a bubble."""

from __future__ import annotations

from collections.abc import Sequence

BINS = 4096
"""Bins of a bubble; times are rounded to them."""
FULL = 0.998
"""Filled share of a bubble that is good enough to stop."""
TRIES = 12
"""Overlong sums to skip before layers are dropped instead."""


def prefixes(length: float, chains: Sequence[Sequence[float]]) -> list[int]:
    """Number of layers of each chain that together fill ``length`` best.

    ``chains[i]`` are the times of a chain's next layers, which run without a pause. Earlier chains
    win ties. The subset-sum is a bit set: bit t of ``reach[i]`` says that the first i chains can
    take t bins.
    """
    if length <= 0:
        return [0] * len(chains)
    longest = length * (1 + 1e-9)
    bin_s, mask = length / BINS, (1 << (BINS + 1)) - 1
    reach, ends = [1], []
    for chain in chains:
        spent, mine = 0.0, []
        for seconds in chain:
            spent += seconds
            if spent > longest:
                break
            mine.append(round(spent / bin_s))
        ends.append(mine)
        now = reach[-1]
        for at in mine:
            now |= reach[-1] << at
        reach.append(now & mask)
        if reach[-1].bit_length() - 1 >= FULL * BINS:
            break
    sums = reach[-1]
    for _ in range(TRIES):
        taken = _taken(reach, ends, sums.bit_length() - 1)
        if _seconds(chains, taken) <= longest:
            break
        sums ^= 1 << (sums.bit_length() - 1)
    while _seconds(chains, taken) > longest:
        taken[max(i for i, count in enumerate(taken) if count)] -= 1
    return taken + [0] * (len(chains) - len(taken))


def _taken(reach: Sequence[int], ends: Sequence[Sequence[int]], total: int) -> list[int]:
    """Prefix lengths that add up to ``total`` bins."""
    taken = [0] * len(ends)
    for i in range(len(ends) - 1, -1, -1):
        if not reach[i] >> total & 1:
            taken[i] = next(
                n
                for n in range(len(ends[i]), 0, -1)
                if ends[i][n - 1] <= total and reach[i] >> (total - ends[i][n - 1]) & 1
            )
            total -= ends[i][taken[i] - 1]
    return taken


def _seconds(chains: Sequence[Sequence[float]], taken: Sequence[int]) -> float:
    return sum(sum(chain[:count]) for chain, count in zip(chains, taken, strict=False))
