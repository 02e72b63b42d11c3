"""Skiparse attention (Open-Sora Plan 1.5): each token attends to one in n of a video, and the text.

Of n = 2 and eight tokens, both patterns make two groups that attend within themselves:

    single skip   0 2 4 6 | 1 3 5 7
    group skip    0 1 4 5 | 2 3 6 7

Each group attends to the whole text, too. The text's result is the mean over its results beside the
groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from model_specs.common.token_shares import TokenShares


class SkiparseAttention(torch.nn.Module):
    """Core attention of video tokens followed by text tokens, with the sparsity ``sparsity``.

    ``by_group`` is group skip, otherwise single skip. Tokens are those of all context-parallel
    ranks: which ones attend to each other depends on their places. Videos are padded to multiples
    of the squared sparsity; nothing attends to the padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        shares: TokenShares,
        sparsity: int,
        by_group: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.shares, self.sparsity, self.by_group = shares, sparsity, by_group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        text_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Query, key and value [s, b, heads, d] to [s, b, heads * d].

        ``text_mask`` [b, s_txt] is 0 for text that nothing attends to.
        """
        num_tokens, _ = self.shares.segments
        query, key, value = (
            self._grouped(tensor).permute(1, 2, 0, 3) for tensor in (query, key, value)
        )
        mask = self._keys(num_tokens, text_mask)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        result = attended.permute(2, 0, 1, 3).flatten(2)
        video, text = result.tensor_split([-text_mask.shape[1]])
        text = text.unflatten(1, (self.sparsity, -1)).mean(1)
        return self.shares.by_rank([self._placed(video)[:num_tokens], text])

    def _grouped(self, tokens: torch.Tensor) -> torch.Tensor:
        """Groups of video tokens, with all text each, as further samples."""
        video, text = self.shares.in_order(tokens)
        return torch.cat([self._divided(video), text.repeat(1, self.sparsity, 1, 1)])

    def _divided(self, video: torch.Tensor) -> torch.Tensor:
        """[tokens, b, ...] to [tokens of a group, groups * b, ...]."""
        n = self.sparsity
        if padding := -len(video) % n**2:
            video = torch.cat([video, video.new_zeros(padding, *video.shape[1:])])
        if not self.by_group:
            return video.unflatten(0, (-1, n)).flatten(1, 2)
        return video.unflatten(0, (-1, n, n)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _placed(self, grouped: torch.Tensor) -> torch.Tensor:
        """Inverse of ``_divided``, with the padding."""
        n = self.sparsity
        if not self.by_group:
            return grouped.unflatten(1, (n, -1)).flatten(0, 1)
        return grouped.unflatten(1, (n, -1)).unflatten(0, (-1, n)).transpose(1, 2).flatten(0, 2)

    def _keys(self, num_tokens: int, text_mask: torch.Tensor) -> torch.Tensor:
        """Keys that queries attend to: [groups * b, 1, 1, keys of a group]."""
        real = torch.ones(num_tokens, len(text_mask), dtype=torch.bool, device=text_mask.device)
        text = (text_mask != 0).repeat(self.sparsity, 1)
        return torch.cat([self._divided(real).T, text], dim=1)[:, None, None]
