"""Shares of a sequence's tokens that context-parallel ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults


def share_of(length: int, rank: int, size: int) -> tuple[int, int]:
    """First token and number of tokens of ``rank`` among ``length``; the first ranks may have one
    token more.
    """
    base, rest = divmod(length, size)
    return rank * base + min(rank, rest), base + (rank < rest)


def uses_ring(num_heads: Iterable[int], size: int, tensor_parallel: int = 1) -> bool:
    """True if ``size`` context-parallel ranks cannot divide heads, of which tensor-parallel ranks
    have shares: keys and values then visit every rank (ring attention).
    """
    return any(heads % (tensor_parallel * size) for heads in num_heads)


def with_token_shares(backbone: Backbone, rank: int, size: int) -> Backbone:
    """Backbone of a hand-written family whose sequences are the shares of ``rank``.

    A backbone that has shares already gets those of ``rank`` instead, undivided by sequence
    parallelism. Raises Faults if the tokens of its layers cannot be divided over ``size`` ranks.
    """
    whole = backbone.whole or backbone
    if size == 1:
        return replace(whole, shares=backbone.shares)
    if faults := list(_faults(whole, size)):
        raise Faults(faults)
    own = whole.with_sequences(lambda length: share_of(length, rank, size)[1])
    return replace(own, whole=whole, shares=backbone.shares)


def _faults(backbone: Backbone, size: int) -> Iterator[str]:
    if not backbone.sequences:
        yield (
            f"{backbone.name} has no token sequence between its layers. Its convolutions would "
            "need rows of neighbouring ranks (halos), and its group norms sums over all ranks. "
            "Leave the flag out, or train a transformer"
        )
    elif not any(layer.attends for layer in backbone.layers):
        yield (
            f"{backbone.name}: no layer names its self-attentions (Layer.attends), in which ranks "
            "exchange tokens"
        )
    if not backbone.ring_attention and uses_ring(backbone.num_heads, size):
        heads = ", ".join(map(str, backbone.num_heads))
        yield (
            f"{size} context-parallel ranks do not divide the {heads} heads of {backbone.name}, "
            "whose attention needs all tokens of a head"
        )
    every = reversed(backbone.sequences)  # the first place of a length is told
    few = {length: (name, shape) for name, shape, length in every if length < size}
    for length, where in sorted(few.items()):
        yield f"{length} tokens of {backbone.place_of(*where)} are fewer than {size} ranks"
