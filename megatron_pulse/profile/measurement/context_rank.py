"""Costs of context parallelism, from the layers of one rank beside the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults
from megatron_pulse.profile.context_costs import (
    ContextCosts,
    LayerContextCosts,
    divided_share,
)
from megatron_pulse.profile.mean_over_shapes import context_over_shapes
from megatron_pulse.profile.profile import Profile

if TYPE_CHECKING:
    from megatron_pulse.tracing.context_parallel.divided_backbone import LayerTraffic

_SIZES = (2, 3)
"""Numbers of ranks of which the first possible one shows what ranks divide."""


def with_context_costs(
    profile: Profile, backbone: Backbone, profile_rank: Callable[[Backbone, int], Profile]
) -> Profile:
    """``profile`` of ``backbone`` with its costs of context parallelism.

    ``profile_rank`` profiles the share of the first of so many ranks, without communication, at
    some microbatch size of ``profile``. Raises Faults if the tokens cannot be divided.
    """
    from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of

    size, divided = _divided(backbone, divide_context)
    part = profile_rank(divided, size)
    each = [traffic_of(backbone, size, index) for index in range(backbone.num_shapes)]
    if not profile.shapes:
        return replace(profile, context=_costs(profile, part, size, each[0], backbone))
    shapes = tuple(
        replace(
            shape,
            context=_costs(profile.at_shape(i), part.at_shape(i), size, each[i], backbone),
        )
        for i, shape in enumerate(profile.shapes)
    )
    shares = [shape.share for shape in shapes]
    merged = context_over_shapes(shares, [shape.context for shape in shapes])
    return replace(profile, shapes=shapes, context=merged)


def _divided(
    backbone: Backbone, divide: Callable[[Backbone, int, int], Backbone]
) -> tuple[int, Backbone]:
    """Least number of ranks that can share the tokens, and the share of the first."""
    faults: list[str] = []
    for size in _SIZES:
        try:
            return size, divide(backbone, 0, size)
        except Faults as error:
            faults = faults or error.faults
    raise Faults(faults)


def _costs(
    whole: Profile, part: Profile, size: int, traffic: Sequence[LayerTraffic], backbone: Backbone
) -> ContextCosts:
    samples = max(part.micro_batch_sizes)

    def divided(records: Sequence[Any], parts: Sequence[Any]) -> tuple[int, ...]:
        every = zip(records, parts, strict=True)
        return tuple(_divided_bytes(a.num_bytes, b.num_bytes, size) for a, b in every)

    layers = tuple(
        LayerContextCosts(
            divided_share(times.whole_s, own.whole_s, size),
            divided_share(times.saved_bytes, own.saved_bytes, size),
            divided_share(times.peak_bytes, own.peak_bytes, size),
            _divided_bytes(layer.boundary_bytes, share.boundary_bytes, size),
            sent.all_to_all,
            sent.num_attentions,
            sent.gathered,
            len(sent.gathers),
        )
        for layer, share, times, own, sent in zip(
            whole.layers,
            part.layers,
            whole.times_at(samples),
            part.times_at(samples),
            traffic,
            strict=True,
        )
    )
    heads = {heads for sent in traffic for heads in sent.heads} or set(backbone.num_heads)
    skips, edges = (divided(getattr(whole, n), getattr(part, n)) for n in ("skips", "conditioning"))
    return ContextCosts(tuple(sorted(heads)), layers, skips, edges)


def _divided_bytes(whole: int, part: int, size: int) -> int:
    """Bytes that ranks divide, if one of them has ``part`` of ``whole``; of uneven shares about."""
    return max(0, min(whole, round(size * (whole - part) / (size - 1))))
