"""Costs of context parallelism, from the layers of one rank beside the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts, RankShare
from megatron_pulse.profile.mean_over_shapes import context_over_shapes
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES

if TYPE_CHECKING:
    from megatron_pulse.tracing.context_parallel.divided_backbone import LayerTraffic

_SIZES = (2, 3)
"""Numbers of ranks of which the first possible one, and twice as many, show what ranks divide."""


def with_context_costs(
    profile: Profile, backbone: Backbone, profile_rank: Callable[[Backbone, int], Profile]
) -> Profile:
    """``profile`` of ``backbone`` with its costs of context parallelism.

    ``profile_rank`` profiles the share of the first of so many ranks, without communication, at
    some microbatch size of ``profile``; it is called for two numbers of ranks, if the heads divide.
    Raises Faults if the tokens cannot be divided.
    """
    from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of

    def divided(backbone: Backbone, rank: int, size: int) -> Backbone:
        if rings := [each.layer for each in traffic_of(backbone, size) if each.num_rings]:
            raise Faults(
                [
                    f"{rings[0]}: its heads do not divide over {size} ranks, and plans have no "
                    "ring attention. Give the layout by flags (--context-parallel-size)"
                ]
            )
        return divide_context(backbone, rank, size)

    shares = _divided(backbone, divided)
    parts = {size: profile_rank(share, size) for size, share in shares.items()}
    compute_bytes = ELEMENT_BYTES[profile.dtype]
    each = [
        traffic_of(backbone, min(parts), index, compute_bytes)
        for index in range(backbone.num_shapes)
    ]
    if not profile.shapes:
        return replace(profile, context=_costs(profile, parts, each[0], backbone))
    shapes = tuple(
        replace(
            shape,
            context=_costs(
                profile.at_shape(i),
                {size: part.at_shape(i) for size, part in parts.items()},
                each[i],
                backbone,
            ),
        )
        for i, shape in enumerate(profile.shapes)
    )
    merged = context_over_shapes(
        [shape.share for shape in shapes], [shape.context for shape in shapes]
    )
    return replace(profile, shapes=shapes, context=merged)


def _divided(
    backbone: Backbone, divide: Callable[[Backbone, int, int], Backbone]
) -> dict[int, Backbone]:
    """Share of the first of the least number of ranks that can share the tokens, and of twice as
    many, if they can too."""
    faults: list[str] = []
    for size in _SIZES:
        try:
            found = {size: divide(backbone, 0, size)}
        except Faults as error:
            faults = faults or error.faults
            continue
        with suppress(Faults):
            found[2 * size] = divide(backbone, 0, 2 * size)
        return found
    raise Faults(faults)


def _costs(
    whole: Profile,
    parts: Mapping[int, Profile],
    traffic: Sequence[LayerTraffic],
    backbone: Backbone,
) -> ContextCosts:
    size, part = next(iter(parts.items()))
    samples = max(part.micro_batch_sizes)

    def divided(records: Sequence[Any], shares: Sequence[Any], name: str) -> tuple[int, ...]:
        every = zip(records, shares, strict=True)
        return tuple(_divided_bytes(getattr(a, name), getattr(b, name), size) for a, b in every)

    def shares(name: str) -> list[RankShare]:
        rows = {n: [getattr(r, name) for r in p.times_at(samples)] for n, p in parts.items()}
        return [
            RankShare.fit(getattr(row, name), {n: own[i] for n, own in rows.items()})
            for i, row in enumerate(whole.times_at(samples))
        ]

    layers = tuple(
        LayerContextCosts(
            time,
            saved,
            peak,
            boundary,
            sent.all_to_all,
            sent.num_attentions,
            sent.gathered,
            len(sent.gathers),
        )
        for time, saved, peak, boundary, sent in zip(
            shares("whole_s"),
            shares("saved_bytes"),
            shares("peak_bytes"),
            divided(whole.layers, part.layers, "boundary_bytes"),
            traffic,
            strict=True,
        )
    )
    heads = {heads for sent in traffic for heads in sent.heads} or set(backbone.num_heads)
    return ContextCosts(
        tuple(sorted(heads)),
        layers,
        divided(whole.skips, part.skips, "num_bytes"),
        divided(whole.conditioning, part.conditioning, "num_bytes"),
    )


def _divided_bytes(whole: int, part: int, size: int) -> int:
    """Bytes that ranks divide, if one of them has ``part`` of ``whole``; of uneven shares about."""
    return max(0, min(whole, round(size * (whole - part) / (size - 1))))
