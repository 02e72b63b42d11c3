"""Attention over two streams of tokens together (MMDiT, arXiv:2403.03206, figure 2b).

Streams are the image's tokens [s_img, b, D] and the text's [s_txt, b, D]. Under sequence
parallelism each stream is sharded separately. Its own column-parallel projection therefore gathers
each stream before the two are joined.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from model_specs.common.attention import (
    Builder,
    Rotary,
    column_linear,
    parts,
    prepared,
    row_linear,
)
from model_specs.common.layers import LayerModule, Tensors
from model_specs.common.token_shares import TokenShares


def head_rms_norm(config: TransformerConfig) -> Builder:
    """RMSNorm over one head's features, gain 1."""
    return functools.partial(
        torch.nn.RMSNorm, eps=config.layernorm_epsilon, dtype=config.params_dtype
    )


class StreamProjections(LayerModule):
    """Projections of one stream: fused q, k, v of all heads, norms, and the output projection.

    Without ``leads_back`` there is no output projection.
    """

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection | None,
        *,
        head_norm: bool,
        leads_back: bool,
    ) -> None:
        super().__init__(config, groups)
        width = config.hidden_size
        self.linear_qkv = column_linear(config, groups, width, 3 * width, "qkv")
        norm = head_rms_norm(config) if head_norm else torch.nn.Identity
        self.q_layernorm = norm(config.kv_channels)
        self.k_layernorm = norm(config.kv_channels)
        self.linear_proj = None
        if leads_back:
            self.linear_proj = row_linear(config, groups, width, width, "proj")

    def heads(self, tokens: torch.Tensor) -> Tensors:
        """Map this rank's tokens to query, key and value [s, b, this rank's heads, d], s
        unsharded."""
        fused = self.linear_qkv(tokens)[0].unflatten(-1, (-1, 3, self.config.kv_channels))
        query, key, value = fused.unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key), value

    def back(self, attended: torch.Tensor) -> torch.Tensor | None:
        """Project this rank's attention output [s, b, heads * d] to its tokens; None without
        projection.
        """
        if self.linear_proj is None:
            return None
        out, bias = self.linear_proj(attended)
        back: torch.Tensor = out + bias
        return back


def attend(core_attention: torch.nn.Module, *streams: Tensors) -> Tensors:
    """Attention over the streams' queries, keys and values, joined in this order, then
    split again."""
    query, key, value = (torch.cat(tensors) for tensors in zip(*streams, strict=True))
    attended = core_attention(query, key, value, None, attn_mask_type=AttnMaskType.no_mask)
    divided: Tensors = attended.split([stream[0].shape[0] for stream in streams])
    return divided


def core_attention(
    config: TransformerConfig,
    groups: ProcessGroupCollection | None,
    shares: TokenShares,
    rotary: Rotary | None,
) -> Any:
    """Unmasked attention of this rank's heads, with rotary positions of queries and keys if any."""
    part = parts(config)
    part = part._replace(core_attention=shares.exchanged(part.core_attention))
    core = prepared(part, None, rotary, rotary_keys=True)
    return core(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.no_mask,
        attention_type="self",
        pg_collection=groups,
    )


class JointAttention(LayerModule):
    """Joint attention of both streams; ``text_first`` is the order of concatenation."""

    def __init__(
        self,
        config: TransformerConfig,
        groups: ProcessGroupCollection | None,
        shares: TokenShares,
        *,
        head_norm: bool,
        text_ends: bool = False,
        text_first: bool = False,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__(config, groups)
        self.text_first = text_first
        self.image = StreamProjections(config, groups, head_norm=head_norm, leads_back=True)
        self.text = StreamProjections(config, groups, head_norm=head_norm, leads_back=not text_ends)
        self.core_attention = core_attention(config, groups, shares, rotary)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Map this rank's image and text tokens; None for the text if its stream ends here."""
        streams = [self.image.heads(image), self.text.heads(text)]
        order = -1 if self.text_first else 1
        image, text = attend(self.core_attention, *streams[::order])[::order]
        return self.image.back(image), self.text.back(text)
