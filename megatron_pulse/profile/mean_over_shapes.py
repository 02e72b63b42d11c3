"""Profile of a chain whose microbatches have several shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.shape_buckets import at_shape, shape_names, shares_of
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from megatron_pulse.profile.layer_records import BYTE_FIELDS, LayerTimes, ProfiledShape
from megatron_pulse.profile.profile import Profile


def over_shapes(backbone: Backbone, profile_of: Callable[[Backbone], Profile]) -> Profile:
    """Merge the profiles of ``profile_of`` at each of the chain's shapes.

    Times are means weighted by the chain's ``shares``. Bytes are those of the largest shape, since
    every shape must fit in memory and messages. ``shapes`` keep the costs of each.
    """
    shares, names = shares_of(backbone), shape_names(backbone)
    found = [profile_of(at_shape(backbone, which)) for which in range(len(shares))]
    if len(found) == 1:
        return found[0]
    first = found[0]
    return replace(
        first,
        method=f"{first.method}; the mean of {len(found)} shapes, bytes of the largest",
        layers=tuple(
            replace(
                same[0],
                boundary_bytes=max(layer.boundary_bytes for layer in same),
                optimizer_s=_mean(shares, [layer.optimizer_s for layer in same]),
                sharded_time=_mean(shares, [layer.sharded_time for layer in same]),
            )
            for same in zip(*(profile.layers for profile in found), strict=True)
        ),
        times={
            size: tuple(
                _over(shares, same)
                for same in zip(*(profile.times[size] for profile in found), strict=True)
            )
            for size in first.times
        },
        skips=tuple(
            replace(same[0], num_bytes=max(skip.num_bytes for skip in same))
            for same in zip(*(profile.skips for profile in found), strict=True)
        ),
        conditioning=tuple(
            replace(same[0], num_bytes=max(edge.num_bytes for edge in same))
            for same in zip(*(profile.conditioning for profile in found), strict=True)
        ),
        context=context_over_shapes(shares, [profile.context for profile in found]),
        shapes=tuple(
            ProfiledShape(
                name,
                share,
                profile.layers,
                profile.times,
                profile.skips,
                profile.conditioning,
                profile.context,
            )
            for name, share, profile in zip(names, shares, found, strict=True)
        ),
    )


def _over(shares: Sequence[float], same: Sequence[LayerTimes]) -> LayerTimes:
    """Merge one layer's times over all shapes."""
    names = LayerTimes.__dataclass_fields__
    seconds = [name for name in names if name.endswith("_s")]
    values: dict[str, Any] = {
        **{name: _mean(shares, [getattr(times, name) for times in same]) for name in seconds},
        **{name: max(getattr(times, name) for times in same) for name in BYTE_FIELDS},
    }
    return replace(same[0], **values)


def context_over_shapes(
    shares: Sequence[float], found: Sequence[ContextCosts | None]
) -> ContextCosts | None:
    """Merge the costs of context parallelism over all shapes; None unless all are known."""
    known = [costs for costs in found if costs is not None]
    if len(known) < len(found):
        return None

    def of_all(rows: Sequence[LayerContextCosts]) -> LayerContextCosts:
        def largest(found: Sequence[RankShare]) -> RankShare:
            return RankShare(max(s.fixed for s in found), max(s.divided for s in found))

        times = [row.time for row in rows]
        fixed, divided = (
            _mean(shares, values)
            for values in ([t.fixed for t in times], [t.divided for t in times])
        )
        counts = {
            each.name: max(getattr(row, each.name) for row in rows)
            for each in fields(LayerContextCosts)
            if each.type == "int"
        }
        saved, peak = largest([row.saved for row in rows]), largest([row.peak for row in rows])
        return LayerContextCosts(RankShare(fixed, divided), saved, peak, **counts)

    return ContextCosts(
        tuple(sorted({heads for costs in known for heads in costs.heads})),
        tuple(map(of_all, zip(*(costs.layers for costs in known), strict=True))),
        *(
            tuple(map(max, zip(*(getattr(costs, name) for costs in known), strict=True)))
            for name in ("skips", "conditioning")
        ),
    )


def _mean(shares: Sequence[float], values: Sequence[float]) -> float:
    return sum(share * value for share, value in zip(shares, values, strict=True))
