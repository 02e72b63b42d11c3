"""Hunyuan-DiT's conditioning (arXiv:2405.08748; diffusers' HunyuanDiT2DModel): time and text.

Initialised as in the authors' code: Xavier in linears, N(0, 0.02) in the embedders of time and
extra conditions.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.layers import (
    LayerModule,
    Named,
    Tensors,
    TimestepEmbedder,
    linear,
    timestep_embedding,
    works_on_shards,
)
from model_specs.common.megatron_config import InitMethod, normal_init, xavier_init
from model_specs.hunyuan_dit.config import HunyuanDiTConfig

_SIZE_FEATURES = 256  # sinusoids for each of the six numbers of image_meta_size


drawn_zeros: InitMethod = functools.partial(torch.nn.init.normal_, std=0.0)
"""Zero initialisation that advances the random generator, as in the authors' code."""


def silu_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """SiLU computed in fp32, in the tensor's dtype."""
    return F.silu(tensor.float()).to(tensor.dtype)


class Projection(torch.nn.Module):
    """Linear to four times ``width``, SiLU, linear to ``outputs``."""

    def __init__(
        self,
        inputs: int,
        width: int,
        outputs: int,
        config: TransformerConfig,
        draw: InitMethod = xavier_init,
    ) -> None:
        super().__init__()
        self.linear_1 = linear(inputs, 4 * width, config, draw)
        self.linear_2 = linear(4 * width, outputs, config, draw)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        projected: torch.Tensor = self.linear_2(silu_fp32(self.linear_1(states)))
        return projected


class AttentionPool(torch.nn.Module):
    """Pool states [b, length, width] to [b, outputs]: their mean attends to itself and all
    states."""

    def __init__(
        self, length: int, width: int, outputs: int, heads: int, config: TransformerConfig
    ) -> None:
        super().__init__()
        self.heads = heads
        self.positional_embedding = torch.nn.Parameter(torch.randn(length + 1, width) / width**0.5)
        self.k_proj = linear(width, width, config, xavier_init)
        self.q_proj = linear(width, width, config, xavier_init)
        self.v_proj = linear(width, width, config, xavier_init)
        self.c_proj = linear(width, outputs, config, xavier_init)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Pool all states; the text mask is not used."""
        states = torch.cat([states.mean(dim=1, keepdim=True), states], dim=1)
        states = states + self.positional_embedding
        query, key, value = (
            tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for tensor in (self.q_proj(states[:, :1]), self.k_proj(states), self.v_proj(states))
        )
        pooled = F.scaled_dot_product_attention(query, key, value)
        result: torch.Tensor = self.c_proj(pooled.transpose(1, 2).flatten(1))
        return result


class TimeEmbedding(LayerModule):
    """Provides temb [b, D]: embedded timestep, plus pooled mT5 states and other conditions."""

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        dim = sizes.dim
        self.timestep_embedder = TimestepEmbedder(dim, 0, config.perform_initialization)
        self.pooler = AttentionPool(
            sizes.text_len_t5,
            sizes.cross_attention_dim_t5,
            sizes.pooled_projection_dim,
            sizes.pooling_heads,
            config,
        )
        extra = sizes.pooled_projection_dim
        self.style_embedder = torch.nn.Embedding(1, dim) if sizes.style_and_size else None
        if sizes.style_and_size:
            extra += 6 * _SIZE_FEATURES + dim
        self.extra_embedder = Projection(extra, dim, dim, config, normal_init)
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps and context_t5; image_meta_size [b, 6] for v1.1."""
        extra = self.pooler(conditioning["context_t5"])
        if self.style_embedder is not None:
            numbers = conditioning["image_meta_size"]
            meta = timestep_embedding(numbers.flatten(), _SIZE_FEATURES).to(extra.dtype)
            style = self.style_embedder.weight.expand(len(numbers), -1)
            extra = torch.cat([extra, meta.view(len(numbers), -1), style], dim=1)
        time = self.timestep_embedder(conditioning["timesteps"])
        return (*inputs, time + self.extra_embedder(extra))


class TextEmbedding(LayerModule):
    """Provides the text [length, b, width]: CLIP states, then projected mT5 states.

    Masked states are replaced by learned ones, so attention needs no mask.
    """

    def __init__(self, sizes: HunyuanDiTConfig, context: LayerContext) -> None:
        config = context.config
        super().__init__(config, context.pg_collection)
        width, width_t5 = sizes.cross_attention_dim, sizes.cross_attention_dim_t5
        self.text_embedder = Projection(width_t5, width_t5, width, config)
        length = sizes.text_len + sizes.text_len_t5
        self.text_embedding_padding = torch.nn.Parameter(torch.randn(length, width))
        self.to(dtype=config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: both kinds of states [b, length, width] and masks [b, length]."""
        states = [conditioning["context"], self.text_embedder(conditioning["context_t5"])]
        masks = [conditioning["context_mask"], conditioning["context_t5_mask"]]
        mask = torch.cat(masks, dim=1)[:, :, None] != 0
        text = torch.where(mask, torch.cat(states, dim=1), self.text_embedding_padding)
        return (*inputs, text.transpose(0, 1).contiguous())
