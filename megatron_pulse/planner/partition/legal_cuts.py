"""Legal cuts: pairs of cuts that keep both ends of every skip together, and their deepest
nesting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_pulse.backbone.costs import Floats
from megatron_pulse.planner.layout.crossing import SkipEnds
from megatron_pulse.planner.partition.pair_costs import Bools, Ints


def largest_fold(num_layers: int, skips: Sequence[SkipEnds]) -> int:
    """Largest P for which a one-wave fold has a cut with all skips collocated; 0 if there is none.

    See README.md beside this: Legal cuts.
    """
    closed = legal_cut_pairs(num_layers, skips)
    # depth[a, b]: the most pairs of stages that nest inside the layers a <= i < b
    depth: Ints = np.zeros((num_layers + 2, num_layers + 2), dtype=np.int64)
    for width in range(2, num_layers + 1):
        for a in range(num_layers - width + 1):
            b = a + width
            inner = max(depth[a + 1, b], depth[a, b - 1])
            if closed[a, b]:
                inner = max(inner, 1 + depth[a + 1, b - 1])
            depth[a, b] = inner
    return int(depth[0, num_layers])


def legal_cut_pairs(num_layers: int, skips: Sequence[SkipEnds]) -> Bools:
    """``[a, b]`` is true if no skip has exactly one end among the layers a <= i < b."""
    closed: Bools = np.ones((num_layers + 1, num_layers + 1), dtype=np.bool_)
    for skip in skips:
        i, j = skip.source, skip.destination
        closed[: i + 1, i + 1 : j + 1] = False  # a <= i < b <= j: only the source is inside
        closed[i + 1 : j + 1, j + 1 :] = False  # i < a <= j < b: only the destination is
    return closed


def balanced_cut_pairs(closed: Bools, work: Floats, most: int) -> Bools:
    """``closed`` if it has at most ``most`` pairs; otherwise its most balanced pairs.

    The three best partners of each cut are kept. Partners are best if both cuts are at like shares
    of ``work`` (running sums) between the first and the last partner of the other.
    """
    pairs: Bools = np.triu(closed, 1)
    if pairs.sum() <= most:
        return closed
    unlike = np.abs(_share(pairs, work) + _share(pairs.T, work).T - 1)
    unlike[~pairs] = np.inf
    rank = np.minimum(*(unlike.argsort(axis).argsort(axis) for axis in (0, 1)))
    kept: Bools = pairs & (rank < 3)
    return kept | np.eye(len(closed), dtype=np.bool_)


def _share(pairs: Bools, work: Floats) -> Floats:
    """``[a, b]`` is the relative position of b, by work, between the first and last partner of
    a."""
    first = np.where(pairs, work, np.inf).min(axis=1)[:, None]
    last = np.where(pairs, work, -np.inf).max(axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num((work - first) / (last - first), nan=0.5, posinf=1, neginf=0)
