"""Where the chain is cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_pulse.backbone.chain import Backbone, Skip
from megatron_pulse.planner.placement import Placement, PlacementKind

type Floats = NDArray[np.float64]
type BoolMatrix = NDArray[np.bool_]
type IntMatrix = NDArray[np.int64]


class PartitionError(ValueError):
    """No legal partition exists; the message says why and what would be legal."""


@dataclass(frozen=True)
class Partition:
    """Stage ``s`` holds the layers ``cuts[s] <= i < cuts[s + 1]``."""

    placement: Placement
    cuts: tuple[int, ...]

    def layers_of_stage(self, stage: int) -> range:
        """Indices of the layers in ``stage``."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds the layer at index ``layer``."""
        return next(s for s in range(len(self.cuts) - 1) if layer < self.cuts[s + 1])

    def device_of_layer(self, layer: int) -> int:
        """The device that hosts the layer at index ``layer``."""
        return self.placement.device_of_stage[self.stage_of_layer(layer)]


def balanced_partition(
    backbone: Backbone,
    weights: Sequence[float],
    placement: Placement,
    exact: bool | None = None,
) -> Partition:
    """Cuts that minimise the largest device load, then the largest stage.

    ``weights[i] >= 0`` is the cost of layer i in any unit; a device's load is the sum over all its
    stages. With ``exact`` (default: on the fold) both ends of every skip are on one device;
    legality follows from the skip edges, so layers without skips are free, and conditioning never
    constrains.

    The result is optimal with one stage per device and on the fold with one wave (PULSE, section
    IV, algorithm 1, with the device load in place of the largest stage). With more stages per
    device a dynamic program would be exponential in them; there the largest mirror pair of stages
    s, S-1-s (fold) or the largest stage (interleaved) is minimised, which is optimal for that
    measure, and single cuts are then moved while that lowers the device loads. On a fold of
    several waves the exact constraint keeps each skip in one mirror pair before that.

    Raises PartitionError when no legal cut exists, naming the largest legal P, and ValueError for
    weights that do not fit the backbone.
    """
    num_layers, num_stages = len(backbone.layers), placement.num_stages
    if len(weights) != num_layers or not all(math.isfinite(w) and w >= 0 for w in weights):
        raise ValueError(
            f"{backbone.name}: need {num_layers} finite weights >= 0, one per layer; "
            f"got {len(weights)}: {list(weights)}"
        )
    folded = placement.kind is PlacementKind.FOLD and num_stages > 1
    exact = folded if exact is None else exact and num_stages > 1
    if exact and not folded:
        raise PartitionError(
            f"exact collocation of skips needs a fold; the placement is {placement.kind.value}. "
            f"Use a fold, or let skips travel (exact=False)"
        )
    if num_layers < num_stages:
        largest = largest_fold(backbone) if exact else num_layers
        raise PartitionError(
            f"{backbone.name} has {num_layers} layers, too few for {num_stages} stages; largest "
            f"legal P with {placement.num_chunks} stages per device: "
            f"{_largest_devices(largest, placement, exact)}"
        )
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    if folded:
        closed = _closed(backbone if exact else None, num_layers)
        cuts = _fold_cuts(sums, closed, num_stages // 2)
    else:
        cuts = _chain_cuts(sums, num_stages)
    if cuts is None:
        raise PartitionError(
            f"{backbone.name}: no cut into {num_stages} stages on {placement.num_devices} devices "
            f"keeps both ends of each of its {len(backbone.skips)} skips on one device; largest "
            f"legal P with {placement.num_chunks} stages per device: "
            f"{_largest_devices(largest_fold(backbone), placement, True)}. Use fewer devices, or "
            f"let skips travel (exact=False)"
        )
    partition = Partition(placement, cuts)
    if placement.num_chunks > 2 or (placement.num_chunks == 2 and not folded):
        partition = _move_cuts(partition, sums, backbone.skips if exact else ())
    return partition


def largest_fold(backbone: Backbone) -> int:
    """The largest P whose one-wave fold has a cut with all skips collocated; 0 where none has.

    Source: the project's scheduling.md, section 6.
    """
    num = len(backbone.layers)
    closed = _closed(backbone, num)
    # depth[a, b]: the most pairs of stages that nest inside the layers a <= i < b.
    depth: IntMatrix = np.zeros((num + 2, num + 2), dtype=np.int64)
    for width in range(2, num + 1):
        for a in range(num - width + 1):
            b = a + width
            inner = max(depth[a + 1, b], depth[a, b - 1])
            if closed[a, b]:
                inner = max(inner, 1 + depth[a + 1, b - 1])
            depth[a, b] = inner
    return int(depth[0, num])


def _largest_devices(pairs_or_stages: int, placement: Placement, exact: bool) -> int:
    per_device = placement.num_chunks // 2 if exact else placement.num_chunks
    return pairs_or_stages // per_device


def _closed(backbone: Backbone | None, num: int) -> BoolMatrix:
    """``[a, b]``: no skip has exactly one end among the layers a <= i < b."""
    closed: BoolMatrix = np.ones((num + 1, num + 1), dtype=np.bool_)
    for skip in backbone.skips if backbone is not None else ():
        i, j = skip.source, skip.destination
        closed[: i + 1, i + 1 : j + 1] = False  # a <= i < b <= j: only the source is inside
        closed[i + 1 : j + 1, j + 1 :] = False  # i < a <= j < b: only the destination is
    return closed


def _chain_cuts(sums: Floats, num_stages: int) -> tuple[int, ...]:
    """Contiguous stages of the smallest possible largest sum (every stage non-empty)."""
    num = len(sums) - 1
    value = np.full(num + 1, np.inf)
    value[0] = 0.0
    choice: IntMatrix = np.zeros((num_stages + 1, num + 1), dtype=np.int64)
    for stage in range(1, num_stages + 1):
        new = np.full(num + 1, np.inf)
        for end in range(stage, num + 1):
            costs = np.maximum(value[:end], sums[end] - sums[:end])
            choice[stage, end] = begin = int(np.argmin(costs))
            new[end] = costs[begin]
        value = new
    cuts = [num]
    for stage in range(num_stages, 0, -1):
        cuts.append(int(choice[stage, cuts[-1]]))
    return tuple(reversed(cuts))


def _fold_cuts(sums: Floats, closed: BoolMatrix, num_pairs: int) -> tuple[int, ...] | None:
    """Nested pairs of stages: the smallest largest pair, then the smallest largest stage.

    Two passes, because a lexicographic minimum has no optimal substructure: the first finds the
    smallest load, the second the smallest stage among the cuts that keep it.
    """
    cuts = _fold_pass(sums, closed, num_pairs, math.inf)
    if cuts is None:
        return None
    loads = [
        sums[cuts[k + 1]] - sums[cuts[k]] + sums[cuts[-1 - k]] - sums[cuts[-2 - k]]
        for k in range(num_pairs)
    ]
    return _fold_pass(sums, closed, num_pairs, max(loads) + 1e-12 * float(sums[-1]))


def _fold_pass(
    sums: Floats, closed: BoolMatrix, num_pairs: int, limit: float
) -> tuple[int, ...] | None:
    """One dynamic program from both ends over (encoder cut a, decoder cut b); None if illegal.

    ``value[a, b]`` is the best for the layers a <= i < b in the innermost k pairs. Without a
    ``limit`` it is the largest pair's load; with one, the largest stage with no pair above it.
    """
    num = len(sums) - 1
    legal = [(a, b) for a in range(num - 1) for b in range(a + 2, num + 1) if closed[a, b]]
    value = np.full((num + 1, num + 1), np.inf)
    inner: list[dict[tuple[int, int], tuple[int, int]]] = []
    for pairs in range(1, num_pairs + 1):
        new = np.full_like(value, np.inf)
        chosen: dict[tuple[int, int], tuple[int, int]] = {}
        for a, b in legal if pairs < num_pairs else [(0, num)]:
            if b - a < 2 * pairs:
                continue
            if pairs == 1:
                turns = np.arange(a + 1, b)
                left, right = sums[turns] - sums[a], sums[b] - sums[turns]
                rest = np.zeros(len(turns))
            else:
                left = (sums[a + 1 : b] - sums[a])[:, None]
                right = (sums[b] - sums[a + 1 : b])[None, :]
                rest = value[a + 1 : b, a + 1 : b]
            load = left + right
            cost = load if limit == math.inf else np.maximum(left, right)
            total = np.where(load <= limit, np.maximum(rest, cost), np.inf)
            best = int(np.argmin(total))
            if not np.isfinite(total.flat[best]):
                continue
            new[a, b] = total.flat[best]
            row, column = (best, best) if pairs == 1 else divmod(best, b - a - 1)
            chosen[a, b] = (a + 1 + row, a + 1 + column)
        inner.append(chosen)
        value = new
    if not np.isfinite(value[0, num]):
        return None
    heads, tails = [0], [num]
    for chosen in reversed(inner):
        a, b = chosen[heads[-1], tails[-1]]
        heads.append(a)
        tails.append(b)
    return (*heads, *reversed(tails[:-1]))


def _move_cuts(partition: Partition, sums: Floats, skips: Sequence[Skip]) -> Partition:
    """Move single cuts while that lowers (largest device load, largest stage) legally."""
    best, best_score = partition, _score(partition, sums)
    improved = True
    while improved:
        improved = False
        for k in range(1, len(best.cuts) - 1):
            for cut in range(best.cuts[k - 1] + 1, best.cuts[k + 1]):
                moved = Partition(best.placement, (*best.cuts[:k], cut, *best.cuts[k + 1 :]))
                score = _score(moved, sums)
                if score < best_score and all(_is_collocated(moved, s) for s in skips):
                    best, best_score, improved = moved, score, True
    return best


def _is_collocated(partition: Partition, skip: Skip) -> bool:
    return partition.device_of_layer(skip.source) == partition.device_of_layer(skip.destination)


def _score(partition: Partition, sums: Floats) -> tuple[float, float]:
    """(largest device load, largest stage), rounded so that noise does not count as progress."""
    stages = np.diff(sums[list(partition.cuts)])
    loads = np.bincount(partition.placement.device_of_stage, weights=stages)
    unit = float(sums[-1]) or 1.0
    return round(float(loads.max()) / unit, 12), round(float(stages.max()) / unit, 12)
