"""transformers' text encoders, split into layers with bit-identical results.

Inputs are ``ids`` and ``mask`` (both [b, length], int64). Outputs are ``last``, ``penultimate`` and
``pooled``, as far as requested. Layers without a requested output are omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States
from megatron_pulse.encoders.text_recipe import ComponentKind, State

_HIDDEN = "hidden"
_SEEN = "_seen"
"""Mask in the attention's own format, empty if none is needed."""
_BIAS = "bias"


def text_pieces(
    kind: ComponentKind, model: Any, states: frozenset[State], masked: bool
) -> tuple[EncoderPiece, ...]:
    """Layers of ``model`` that compute ``states``; ``masked`` layers do not attend to padding."""
    if kind is ComponentKind.T5:
        pieces = _t5(model, masked)
    elif kind is ComponentKind.BERT:
        pieces = _bert(model, masked)
    else:
        pieces = _clip(model, masked, State.POOLED in states)
    if states <= {State.PENULTIMATE, State.MASK}:
        return pieces[:-2]
    return pieces


type Masking = Callable[[Tensor, Tensor | None], Tensor | None]
"""Function from hidden states and a text's mask to the attention's own mask, or None."""


def _seen(states: States, masked: bool, make: Masking) -> Tensor:
    """Attention mask, computed if missing, since samples from other devices come without a mask.

    A text that fills all its tokens needs no mask, so the need depends on the sample.
    """
    if _SEEN in states:
        return states[_SEEN]
    hidden = states[_HIDDEN]
    made = make(hidden, states["mask"] if masked else None)
    return hidden.new_empty(0) if made is None else made


def _layer(
    name: str,
    module: nn.Module,
    run: Callable[[Tensor, Tensor | None], Tensor],
    seen: Callable[[States], Tensor],
    before_last: bool,
) -> EncoderPiece:
    """Layer of the trunk; the layer ``before_last`` gives the penultimate states."""

    def through(states: States) -> States:
        mask = seen(states)
        hidden = run(states[_HIDDEN], mask if mask.numel() else None)
        made = {_HIDDEN: hidden, _SEEN: mask}
        return states | made | ({State.PENULTIMATE.value: hidden} if before_last else {})

    return EncoderPiece(name, through, (module,))


def _clip(model: Any, masked: bool, pooled: bool) -> tuple[EncoderPiece, ...]:
    from transformers.masking_utils import create_causal_mask

    trunk = getattr(model, "text_model", model)
    projection = getattr(model, "text_projection", None)

    def embed(states: States) -> States:
        return states | {_HIDDEN: trunk.embeddings(input_ids=states["ids"])}

    def masking(hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        made: Tensor | None = create_causal_mask(
            config=trunk.config, inputs_embeds=hidden, attention_mask=mask, past_key_values=None
        )
        return made

    def seen(states: States) -> Tensor:
        return _seen(states, masked, masking)

    def layer(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
        return lambda hidden, mask: module(hidden, mask, is_causal=True)

    def end(states: States) -> States:
        last = trunk.final_layer_norm(states[_HIDDEN])
        if not pooled:
            return states | {State.LAST.value: last}
        ids = states["ids"].int()
        # An eos_token_id of 2 in older configs means the token with the highest id.
        eos = trunk.eos_token_id
        ends = ids.argmax(-1) if eos == 2 else (ids == eos).int().argmax(-1)
        vector = last[torch.arange(len(last), device=last.device), ends]
        vector = vector if projection is None else projection(vector)
        return states | {State.LAST.value: last, State.POOLED.value: vector}

    layers = list(trunk.encoder.layers)
    ends = (trunk.final_layer_norm, *([projection] if pooled and projection is not None else []))
    return (
        EncoderPiece("embeddings", embed, (trunk.embeddings,)),
        *(
            _layer(f"layers.{i}", module, layer(module), seen, i == len(layers) - 2)
            for i, module in enumerate(layers)
        ),
        EncoderPiece("end", end, ends),
    )


def _t5(model: Any, masked: bool) -> tuple[EncoderPiece, ...]:
    from transformers.masking_utils import create_bidirectional_mask

    stack = model.encoder

    def embed(states: States) -> States:
        return states | {_HIDDEN: stack.embed_tokens(states["ids"])}

    def masking(hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        made: Tensor | None = create_bidirectional_mask(
            config=stack.config, inputs_embeds=hidden, attention_mask=mask
        )
        return made

    def block(module: Any) -> Callable[[States], States]:
        def through(states: States) -> States:
            # The first block computes the position bias of all blocks.
            seen = _seen(states, masked, masking)
            mask = seen if seen.numel() else None
            hidden, bias, *_ = module(states[_HIDDEN], mask, states.get(_BIAS))
            return states | {_HIDDEN: hidden, _BIAS: bias, _SEEN: seen}

        return through

    def end(states: States) -> States:
        return states | {State.LAST.value: stack.final_layer_norm(states[_HIDDEN])}

    return (
        EncoderPiece("embeddings", embed, (stack.embed_tokens,)),
        *(EncoderPiece(f"block.{i}", block(m), (m,)) for i, m in enumerate(stack.block)),
        EncoderPiece("end", end, (stack.final_layer_norm,)),
    )


def _bert(model: Any, masked: bool) -> tuple[EncoderPiece, ...]:
    from transformers.masking_utils import create_bidirectional_mask

    def embed(states: States) -> States:
        return states | {_HIDDEN: model.embeddings(input_ids=states["ids"])}

    def masking(hidden: Tensor, mask: Tensor | None) -> Tensor | None:
        made: Tensor | None = create_bidirectional_mask(
            config=model.config, inputs_embeds=hidden, attention_mask=mask
        )
        return made

    def seen(states: States) -> Tensor:
        return _seen(states, masked, masking)

    def layer(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
        return lambda hidden, mask: module(hidden, mask)

    layers = list(model.encoder.layer)
    return (
        EncoderPiece("embeddings", embed, (model.embeddings,)),
        *(
            _layer(f"layer.{i}", module, layer(module), seen, i == len(layers) - 2)
            for i, module in enumerate(layers)
        ),
        EncoderPiece("end", lambda states: states | {State.LAST.value: states[_HIDDEN]}),
    )
