"""transformers' text encoders, split into layers with bit-identical results.

Inputs are ``ids`` and ``mask`` (both [b, length], int64). Outputs are ``last``, ``penultimate``,
``pooled`` and ``hidden_N``, as far as requested. Layers without a requested output are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States
from megatron_pulse.encoders.text_recipe import ComponentKind, State
from megatron_pulse.errors import UserError

_HIDDEN = "hidden"
_SEEN = "_seen"
"""Mask in the attention's own format, empty if none is needed."""
_BIAS = "bias"
_ROTARY = ("_cos", "_sin")
_TURN = "_turn"
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Kept:
    """States that an encoder keeps of its tokens.

    Those of ``crop`` tokens are dropped: of the first, or of ``template`` ``[crop]``, whose ids
    follow the first token; of a text without it the last are dropped. States of padding are zero if
    ``trimmed``, and all if ``absent`` and the mask is zero.
    """

    crop: int = 0
    template: Tensor | None = None
    trimmed: bool = False
    absent: bool = False

    @property
    def changes(self) -> bool:
        """True unless all states are kept as they are."""
        return bool(self.crop or self.trimmed or self.absent)

    def __call__(self, name: str, value: Tensor, given: States) -> Tensor:
        """Kept part of the state ``value`` ``[b, length, ...]`` of this name."""
        if (self.trimmed or self.absent) and name != State.MASK:
            mask = given[State.MASK].unsqueeze(-1)
            seen = mask if self.trimmed else mask.amax(1, keepdim=True)
            value = value.masked_fill(seen == 0, 0)
        if self.template is None:
            return value[:, self.crop :]
        begins = given["ids"][:, 1 : 1 + self.crop] == self.template.to(value.device)
        has_template = begins.all(1).view(-1, *[1] * (value.dim() - 1))
        kept = torch.cat([value[:, :1], value[:, 1 + self.crop :]], dim=1)
        return torch.where(has_template, kept, value[:, : kept.shape[1]])


ALL_KEPT = Kept()


def text_pieces(
    kind: ComponentKind,
    model: Any,
    states: frozenset[str],
    masked: bool,
    kept: Kept = ALL_KEPT,
    connectors: nn.Module | None = None,
) -> tuple[EncoderPiece, ...]:
    """Layers of ``model`` that compute ``states`` (``Part.key``), as far as they are ``kept``.

    ``masked`` layers do not attend to padding. ``connectors`` join the states of all layers.
    """
    if connectors is not None:
        count = len(model.layers)
        every = frozenset(_layer_states(count))
        return (*_decoder(model, masked, every), _connecting(connectors, count))
    if kind is ComponentKind.GLM:
        pieces = _glm(model, masked, states)
    elif kind.is_decoder:
        pieces = _decoder(model, masked, states)
    elif kind in (ComponentKind.T5, ComponentKind.UMT5):
        pieces = _t5(model, masked, shares_bias=kind is ComponentKind.T5)
    elif kind is ComponentKind.BERT:
        pieces = _bert(model, masked)
    else:
        pieces = _clip(model, masked, State.POOLED in states)
    if not states & {State.LAST, State.POOLED}:
        made = _hidden_layers(states, len(pieces) - 2)
        pieces = pieces[: 1 + max(made.values(), default=len(pieces) - 3)]
    if not kept.changes:
        return pieces
    *others, end = pieces

    def through(given: States) -> States:
        found = end.run(given)
        return found | {n: kept(n, found[n], found) for n in states - {State.POOLED}}

    return (*others, replace(end, run=through))


def _layer_states(num_layers: int) -> list[str]:
    """Names of the embeddings and of the states after each layer, the last with the norm."""
    return [*(f"{State.HIDDEN}_{i}" for i in range(num_layers)), State.LAST.value]


def _connecting(connectors: Any, num_layers: int) -> EncoderPiece:
    """LTX-2's connectors, without those of sound, after the layers of its encoder."""
    names = _layer_states(num_layers)

    def connect(given: States) -> States:
        stacked = torch.stack([given[name] for name in names], dim=-1).flatten(2)
        made, _, mask = connectors(stacked, given[State.MASK], padding_side="left")
        return {State.CONNECTED.value: made, State.CONNECTED_MASK.value: mask}

    return EncoderPiece("connectors", connect, (connectors,))


def _hidden_layers(states: Iterable[str], num_layers: int) -> dict[str, int]:
    """Number of layers before each requested state that follows a layer, without a norm."""
    found = {}
    for name in states:
        if name == State.PENULTIMATE:
            found[name] = num_layers - 1
        elif name.startswith(f"{State.HIDDEN}_"):
            layer = int(name.removeprefix(f"{State.HIDDEN}_"))
            found[name] = layer if layer >= 0 else num_layers + 1 + layer
            if not 0 <= found[name] < num_layers:
                raise UserError(
                    f"it has {num_layers} layers, but the states after {found[name]} are needed"
                )
    return found


type Masking = Callable[[Tensor, Tensor | None], Tensor | None]
"""Function from hidden states and a text's mask to the attention's own mask, or None."""


def _seen(states: States, masked: bool, make: Masking, name: str = _SEEN) -> Tensor:
    """Attention mask, computed if missing, since samples from other devices come without a mask.

    A text that fills all its tokens needs no mask, so the need depends on the sample.
    """
    if name in states:
        return states[name]
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


def _t5(model: Any, masked: bool, shares_bias: bool) -> tuple[EncoderPiece, ...]:
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
            # T5's first block computes the position bias of all blocks; each of UMT5's has its own.
            seen = _seen(states, masked, masking)
            mask = seen if seen.numel() else None
            if not shares_bias:
                return states | {_HIDDEN: module(states[_HIDDEN], mask), _SEEN: seen}
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


def _decoder(model: Any, masked: bool, states: frozenset[str]) -> tuple[EncoderPiece, ...]:
    """Layers of a causal language model without its head (Llama, Gemma, Mistral, Qwen)."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config, layers = model.config, list(model.layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [_SLIDING if window else _FULL] * len(layers)
    makers = {_FULL: create_causal_mask, _SLIDING: create_sliding_window_causal_mask}
    by_kind = hasattr(model.rotary_emb, "layer_types")
    """True if kinds of layers have rotary embeddings of their own (Gemma 3)."""
    wanted: dict[int, list[str]] = {}
    for name, count in _hidden_layers(states, len(layers)).items():
        wanted.setdefault(count, []).append(name)

    def embed(given: States) -> States:
        made = model.embed_tokens(given["ids"])
        return given | {_HIDDEN: made} | dict.fromkeys(wanted.get(0, ()), made)

    def layer(index: int) -> Callable[[States], States]:
        kind = kinds[index]
        make, seen_name = makers[kind], f"{_SEEN}_{kind}"
        rotary = [f"{name}_{kind}" if by_kind else name for name in _ROTARY]

        def masking(hidden: Tensor, mask: Tensor | None) -> Tensor | None:
            made: Tensor | None = make(
                config=config, inputs_embeds=hidden, attention_mask=mask, past_key_values=None
            )
            return made

        def through(given: States) -> States:
            hidden = given[_HIDDEN]
            seen = _seen(given, masked, masking, seen_name)
            places = torch.arange(hidden.shape[1], device=hidden.device)[None]
            turned = [given.get(name) for name in rotary]
            if turned[0] is None:
                turned = list(model.rotary_emb(hidden, places, *([kind] if by_kind else [])))
            made = layers[index](
                hidden, attention_mask=seen if seen.numel() else None, position_ids=places,
                position_embeddings=tuple(turned),
            )  # fmt: skip
            kept = {seen_name: seen, **dict(zip(rotary, turned, strict=True))}
            named = dict.fromkeys(wanted.get(index + 1, ()), made)
            return given | kept | {_HIDDEN: made} | named

        return through

    def end(given: States) -> States:
        return given | {State.LAST.value: model.norm(given[_HIDDEN])}

    return (
        EncoderPiece("embeddings", embed, (model.embed_tokens,)),
        *(EncoderPiece(f"layers.{i}", layer(i), (m,)) for i, m in enumerate(layers)),
        EncoderPiece("end", end, (model.norm,)),
    )


def _glm(model: Any, masked: bool, states: frozenset[str]) -> tuple[EncoderPiece, ...]:
    """Layers of Kolors' ChatGLM, which take ``[length, b, width]``.

    The pooled state is that of the last token before the final norm: texts end there, with padding
    on the left.
    """
    layers = list(model.encoder.layers)

    def embed(given: States) -> States:
        return given | {_HIDDEN: model.embedding(given["ids"]).transpose(0, 1)}

    def rotary(given: States) -> Tensor:
        """Rotary embedding of tokens that are counted from the first of the text."""
        if _TURN in given:
            return given[_TURN]
        places = (given["mask"].cumsum(1) - 1).clamp(min=0)
        table: Tensor = model.rotary_pos_emb(model.seq_length)
        return table[places].transpose(0, 1).contiguous()

    def seen(given: States) -> Tensor:
        def make(hidden: Tensor, mask: Tensor | None) -> Tensor | None:
            if mask is None or mask.all():
                return None
            full: Tensor = model.get_masks(given["ids"], None, padding_mask=mask)
            return full

        return _seen(given, masked, make)

    def layer(index: int) -> Callable[[States], States]:
        def through(given: States) -> States:
            mask, turn = seen(given), rotary(given)
            made, _ = layers[index](
                given[_HIDDEN].transpose(0, 1), mask if mask.numel() else None, turn,
                use_cache=False,
            )  # fmt: skip
            hidden = made.transpose(0, 1)
            named = {State.PENULTIMATE.value: hidden} if index == len(layers) - 2 else {}
            return given | {_HIDDEN: hidden, _SEEN: mask, _TURN: turn} | named

        return through

    def end(given: States) -> States:
        hidden = given[_HIDDEN]
        made = {State.POOLED.value: hidden[:, -1]} if State.POOLED in states else {}
        if State.LAST in states:
            made[State.LAST.value] = model.encoder.final_layernorm(hidden)
        return given | made

    ends = (model.encoder.final_layernorm,) if State.LAST in states else ()
    return (
        EncoderPiece("embeddings", embed, (model.embedding,)),
        *(EncoderPiece(f"layers.{i}", layer(i), (m,)) for i, m in enumerate(layers)),
        EncoderPiece("end", end, ends),
    )
