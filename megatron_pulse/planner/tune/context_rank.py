"""Costs of one context-parallel rank, with the seconds of its exchanges. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.collectives import collective_s, context_exchanges
from megatron_pulse.profile.context_costs import ContextCosts, LayerContextCosts
from megatron_pulse.profile.layer_records import LayerTimes, ProfiledLayer
from megatron_pulse.profile.profile import Profile, ProfileError

_SECONDS = (
    *("forward_s", "input_grad_s", "weight_grad_s", "selective_s"),
    *("split_forward_s", "split_input_grad_s", "split_weight_grad_s", "unrepeated_s"),
)
_SAVED = "saved_bytes", "recompute_bytes", "wgrad_bytes", "selective_bytes"
_PEAKS = "peak_bytes", "forward_bytes", "selective_peak_bytes"


def context_costs(profile: Profile) -> ContextCosts:
    """Costs of context parallelism of ``profile``; raises ProfileError if they are not known."""
    if profile.context is None:
        name = str(profile.backbone.get("name", "NAME"))
        kind = "--module" if ":" in name else "--backbone"
        raise ProfileError(
            "the profile has no costs of context parallelism. Make it anew with 'pulse profile "
            f"{kind} {name} --context-parallel' and the same "
            "options"
        )
    return profile.context


def exchanging_s(
    cluster: Cluster, size: int, ring: bool, layer: LayerContextCosts, samples: int
) -> tuple[float, float]:
    """Seconds of a layer's exchanges in a forward and in a backward of a microbatch of
    ``samples``; ``ring`` says whether its attentions are rings.

    All groups of ``size`` ranks of a node exchange at once.
    """
    groups = max(1, min(cluster.num_devices, cluster.devices_per_node) // size)

    def pass_s(backward: bool) -> float:
        calls = context_exchanges(layer, samples, size, ring=ring, backward=backward)
        return sum(collective_s(cluster, call, range(size), groups) for call in calls)

    return pass_s(False), pass_s(True)


def exchanges_of(
    profile: Profile, cluster: Cluster, size: int
) -> Callable[[int, int], tuple[float, float]]:
    """Seconds of the exchanges in the forward and in the backward of a layer, by its number and the
    samples of a microbatch."""
    costs = context_costs(profile)
    ring, trains = costs.is_ring(size), profile.has_backward

    def seconds(layer: int, samples: int) -> tuple[float, float]:
        each = exchanging_s(cluster, size, ring, costs.layers[layer], samples)
        return each[0], each[1] * trains[layer]

    return cache(seconds)


def sent_bytes(
    profile: Profile,
    size: int,
    tensor: int,
    activations: ActivationPolicies,
    first_pass: float = 0.0,
) -> tuple[float, float]:
    """Bytes that ``size`` ranks send together for a sample of a step: for attentions, and for
    gathers.

    ``tensor`` ranks divide the heads, and each gathers all. ``first_pass`` is the share of steps
    with all forwards once more.
    """
    by_attention = by_gather = 0.0
    costs = context_costs(profile)
    ring = costs.is_ring(size)
    for passes, layer in zip(
        passes_of(profile, activations, first_pass), costs.layers, strict=True
    ):
        for count, backward in zip(passes, (False, True), strict=True):
            attended, gathered = layer.sent_bytes(size, ring=ring, backward=backward)
            by_attention += count * attended
            by_gather += count * gathered
    return by_attention, tensor * by_gather


def passes_of(
    profile: Profile, activations: ActivationPolicies, first_pass: float
) -> Iterator[tuple[float, float]]:
    """Mean numbers of forwards (recomputation among them) and backwards of each layer in a step."""
    for i, has_backward in enumerate(profile.has_backward):
        yield 1 + first_pass + has_backward * (i in activations.recompute), float(has_backward)


def of_context_rank(profile: Profile, cluster: Cluster, size: int) -> Profile:
    """``profile`` as one of ``size`` context-parallel ranks in a node of ``cluster`` runs it.

    Exchanges lengthen forwards, their recomputation and backwards: nothing overlaps with them.
    Raises ProfileError if the costs are not known.
    """
    if size == 1:
        return profile
    costs = context_costs(profile)
    exchange_s = cache(partial(exchanging_s, cluster, size, costs.is_ring(size)))

    def of_rank(
        row: LayerTimes,
        layer: LayerContextCosts,
        boundary_bytes: int,
        samples: int,
        has_backward: bool,
    ) -> LayerTimes:
        forward_s, backward_s = exchange_s(layer, samples)
        more = {"forward_s": forward_s, "input_grad_s": has_backward * backward_s}
        if any((row.split_forward_s, row.split_input_grad_s, row.split_weight_grad_s)):
            more |= {f"split_{name}": seconds for name, seconds in more.items()}
        values: dict[str, float] = {
            name: getattr(row, name) * layer.time.of(size) + more.get(name, 0.0)
            for name in _SECONDS
        }
        for names, share in ((_SAVED, layer.saved), (_PEAKS, layer.peak)):
            values |= {name: math.ceil(getattr(row, name) * share.of(size)) for name in names}
        taken = _part(boundary_bytes, layer.boundary_bytes, size)
        values["passed_bytes"] = row.passed_bytes * taken // max(1, boundary_bytes)
        made = replace(row, **values)  # type: ignore[arg-type]
        halved_s = row.halved_s * made.whole_s / row.whole_s if row.whole_s else 0.0
        return replace(made, halved_s=halved_s)

    return replace(
        profile,
        layers=tuple(
            _layer_of_rank(layer, own, size)
            for layer, own in zip(profile.layers, costs.layers, strict=True)
        ),
        times={
            samples: tuple(
                of_rank(row, layer, whole.boundary_bytes, samples, has_backward)
                for row, layer, whole, has_backward in zip(
                    rows, costs.layers, profile.layers, profile.has_backward, strict=True
                )
            )
            for samples, rows in profile.times.items()
        },
        skips=tuple(
            replace(skip, num_bytes=_part(skip.num_bytes, divided, size))
            for skip, divided in zip(profile.skips, costs.skips, strict=True)
        ),
        conditioning=tuple(
            replace(edge, num_bytes=_part(edge.num_bytes, divided, size))
            for edge, divided in zip(profile.conditioning, costs.conditioning, strict=True)
        ),
        shapes=(),
        context=None,
        sliced_context={},
    )


def _layer_of_rank(layer: ProfiledLayer, costs: LayerContextCosts, size: int) -> ProfiledLayer:
    """``layer`` of one of ``size`` ranks, with its share of the sums over tensor-parallel ranks."""
    taken = _part(layer.boundary_bytes, costs.boundary_bytes, size)
    share, sums = taken / max(1, layer.boundary_bytes), layer.shard_sums
    rows, columns = (tuple(math.ceil(n * share) for n in of) for of in (sums.rows, sums.columns))
    return replace(
        layer, boundary_bytes=taken, shard_sums=replace(sums, rows=rows, columns=columns)
    )


def _part(whole: int, divided: int, size: int) -> int:
    """Bytes of a rank's share of ``whole``, of which ``divided`` are divided: the largest."""
    return whole - divided + math.ceil(divided / size)
