"""Costs of context parallelism, from the layers of one rank beside the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.token_shares import uses_ring
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
    """``profile`` of ``backbone`` with its costs of context parallelism, also in slices of tokens.

    ``profile_rank`` profiles the share of the first of so many ranks, without communication, at
    some microbatch size of ``profile`` and in its numbers of slices. It is called for one or two
    numbers of ranks, which divide the heads if any such numbers can share the tokens. Raises Faults
    if the tokens cannot be divided.
    """
    parts = {size: profile_rank(share, size) for size, share in _divided(backbone).items()}
    compute_bytes = ELEMENT_BYTES[profile.dtype]
    each = [
        _traffic(backbone, min(parts), index, compute_bytes) for index in range(backbone.num_shapes)
    ]
    if not profile.shapes:
        sliced = {
            count: _costs(
                profile.in_slices(count),
                {size: part.in_slices(count) for size, part in parts.items()},
                each[0],
            )
            for count in profile.sliced
        }
        context = _costs(profile, parts, each[0])
        return replace(profile, context=context, sliced_context=sliced)
    shapes = tuple(
        replace(
            shape,
            context=_costs(
                profile.at_shape(i),
                {size: part.at_shape(i) for size, part in parts.items()},
                each[i],
            ),
        )
        for i, shape in enumerate(profile.shapes)
    )
    merged = context_over_shapes(
        [shape.share for shape in shapes], [shape.context for shape in shapes]
    )
    return replace(profile, shapes=shapes, context=merged)


def _divided(backbone: Backbone) -> dict[int, Backbone]:
    """Share of the first of the least number of ranks that can share the tokens, and of twice as
    many, if they can too.

    Ranks that divide the heads come first. Both numbers divide them, or neither.
    """
    from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of

    def has_rings(size: int) -> bool:
        return any(layer.num_rings for layer in traffic_of(backbone, size))

    faults: list[str] = []
    for rings, size in product((False, True), _SIZES):
        try:
            if has_rings(size) is not rings:
                continue
            found = {size: divide_context(backbone, 0, size)}
        except Faults as error:
            faults = faults or error.faults
            continue
        with suppress(Faults):
            if has_rings(2 * size) is rings:
                found[2 * size] = divide_context(backbone, 0, 2 * size)
        return found
    raise Faults(faults)


@dataclass(frozen=True)
class _Traffic:
    """Traffic of layers, with the bytes of both kinds of attention. See ``LayerContextCosts``."""

    layers: tuple[LayerTraffic, ...]
    all_to_all: tuple[int, ...]
    ring: tuple[int, ...]
    heads: tuple[int, ...]


def _traffic(backbone: Backbone, size: int, index: int, compute_bytes: int) -> _Traffic:
    """Traffic of ``size`` ranks; where they divide heads, with the bytes of rings, and the other
    way round."""
    from megatron_pulse.tracing.context_parallel.divided_backbone import traffic_of

    layers = traffic_of(backbone, size, index, compute_bytes)
    found = {heads for layer in layers for heads in layer.heads} or set(backbone.num_heads)
    heads, nothing = tuple(sorted(found)), (0,) * len(layers)
    own = tuple((layer.gathered, len(layer.gathers)) for layer in layers)

    def of_least(rings: bool, bytes_of: Callable[[LayerTraffic], int]) -> tuple[int, ...]:
        sizes = range(2, max(heads, default=0) + 2)
        if (least := next((n for n in sizes if uses_ring(heads, n) is rings), None)) is None:
            return nothing
        try:
            other = traffic_of(backbone, least, index, compute_bytes)
        except Faults:
            return nothing
        gathers = tuple((layer.gathered, len(layer.gathers)) for layer in other)
        return tuple(map(bytes_of, other)) if gathers == own else nothing  # else it is gathered

    return _Traffic(
        tuple(layers),
        of_least(False, lambda layer: layer.all_to_all),
        of_least(True, lambda layer: layer.ring),
        heads,
    )


def _costs(
    whole: Profile,
    parts: Mapping[int, Profile],
    traffic: _Traffic,
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
            all_to_all,
            sent.num_attentions,
            sent.gathered,
            len(sent.gathers),
            ring,
        )
        for time, saved, peak, boundary, sent, all_to_all, ring in zip(
            shares("whole_s"),
            shares("saved_bytes"),
            shares("peak_bytes"),
            divided(whole.layers, part.layers, "boundary_bytes"),
            traffic.layers,
            traffic.all_to_all,
            traffic.ring,
            strict=True,
        )
    )
    return ContextCosts(
        traffic.heads,
        layers,
        divided(whole.skips, part.skips, "num_bytes"),
        divided(whole.conditioning, part.conditioning, "num_bytes"),
    )


def _divided_bytes(whole: int, part: int, size: int) -> int:
    """Bytes that ranks divide, if one of them has ``part`` of ``whole``; of uneven shares about."""
    return max(0, min(whole, round(size * (whole - part) / (size - 1))))
