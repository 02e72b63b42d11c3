"""U-ViT's modules (arXiv:2209.12152, section 3): tokens are [s, b, D] in Megatron's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.context import LayerContext
from model_specs.modules.attention import Builder, mlp_spec, self_attention_spec
from model_specs.modules.common import LayerModule, LayerNorm, timestep_embedding
from model_specs.modules.config import transformer_config, truncated_normal_init
from model_specs.uvit import UViTConfig

Tensors = tuple[torch.Tensor, ...]
Named = Mapping[str, torch.Tensor]


def uvit_transformer_config(sizes: UViTConfig, base: TransformerConfig) -> TransformerConfig:
    """The Megatron configuration of every block of this U-ViT."""
    return transformer_config(
        base,
        hidden_size=sizes.embed_dim,
        num_attention_heads=sizes.num_heads,
        ffn_hidden_size=sizes.mlp_ratio * sizes.embed_dim,
        init_method=truncated_normal_init,
    )


def _linear(inputs: int, outputs: int, config: TransformerConfig) -> torch.nn.Linear:
    linear = torch.nn.Linear(inputs, outputs, dtype=config.params_dtype)
    if config.perform_initialization:
        linear.weight.data.copy_(truncated_normal_init(torch.empty(outputs, inputs)))
        torch.nn.init.zeros_(linear.bias)
    return linear


class Embed(LayerModule):
    """Image [b, c, h, w] to tokens [s, b, D]: (class,) time, patches, plus learned positions."""

    def __init__(self, sizes: UViTConfig, context: LayerContext) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        dim, patch = sizes.embed_dim, sizes.patch_size
        self.patch_embed = torch.nn.Conv2d(sizes.in_channels, dim, patch, stride=patch)
        if sizes.num_classes:
            self.label_embed = torch.nn.Embedding(sizes.num_classes + 1, dim)
        self.pos_embed = torch.nn.Parameter(torch.zeros(1, sizes.sequence_length, dim))
        if config.perform_initialization:
            truncated_normal_init(self.pos_embed)
        self.to(dtype=config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in fp32 and, if there are classes, labels [b]."""
        (image,) = inputs
        dtype = self.pos_embed.dtype
        time = timestep_embedding(conditioning["timesteps"], self.pos_embed.shape[-1])
        tokens = [time.to(dtype)[:, None], self.patch_embed(image).flatten(2).transpose(1, 2)]
        if "labels" in conditioning:
            tokens.insert(0, self.label_embed(conditioning["labels"])[:, None])
        return ((torch.cat(tokens, dim=1) + self.pos_embed).transpose(0, 1).contiguous(),)


@dataclass
class BlockSubmodules:
    """The replaceable parts of a block."""

    norm1: Builder
    attention: ModuleSpec
    norm2: Builder
    mlp: ModuleSpec


class Block(LayerModule):
    """Pre-norm transformer block; with ``pop``, Linear(2D -> D) on [x, skip] comes first.

    ``skip_linear`` is replicated over tensor-parallel ranks, not split: the sums are those of one
    process, and a seventh of an out-block's weights is multiplied on every rank. Under sequence
    parallelism the block works on its shard of the sequence and gathers at its end, so that
    tensors between layers are whole whatever the layout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: BlockSubmodules,
        pop: str | None,
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__(config, pg_collection)
        self.pop = pop
        dim = config.hidden_size
        self.sequence_parallel = config.sequence_parallel and config.tensor_model_parallel_size > 1
        if pop is not None:
            self.skip_linear = _linear(2 * dim, dim, config)
            for parameter in self.skip_linear.parameters():
                parameter.sequence_parallel = config.sequence_parallel
        tp_group = pg_collection.tp if pg_collection is not None else None
        self.norm1 = submodules.norm1(config, dim, eps=config.layernorm_epsilon)
        self.attn = build_module(submodules.attention, config=config, pg_collection=pg_collection)
        self.norm2 = submodules.norm2(config, dim, eps=config.layernorm_epsilon)
        self.mlp = build_module(
            submodules.mlp,
            config=config,
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=tp_group,
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens [s, b, D] to tokens [s, b, D]."""
        tokens = inputs[0]
        if self.pop is not None:
            tokens = torch.cat([tokens, skips[self.pop]], dim=-1)
        if self.sequence_parallel:
            tokens = scatter_to_sequence_parallel_region(tokens, group=self._group())
        if self.pop is not None:
            tokens = self.skip_linear(tokens)
        out, bias = self.attn(self.norm1(tokens), attention_mask=None)
        tokens = tokens + (out + bias)
        out, bias = self.mlp(self.norm2(tokens))
        tokens = tokens + (out + bias)
        if self.sequence_parallel:
            tokens = gather_from_sequence_parallel_region(
                tokens, tensor_parallel_output_grad=False, group=self._group()
            )
        return (tokens,)

    def _group(self) -> Any:
        return getattr(self, "tp_group", None)


def block_spec(config: TransformerConfig) -> ModuleSpec:
    """The block with Megatron-Core's attention and MLP."""
    return ModuleSpec(
        Block,
        submodules=BlockSubmodules(
            norm1=LayerNorm,
            attention=self_attention_spec(config),
            norm2=LayerNorm,
            mlp=mlp_spec(config),
        ),
    )


def build_block(sizes: UViTConfig, pop: str | None, context: LayerContext) -> Block:
    """The block that takes the skip ``pop``, if any."""
    config = uvit_transformer_config(sizes, context.config)
    tensor_parallel = config.tensor_model_parallel_size
    if config.sequence_parallel and sizes.sequence_length % tensor_parallel:
        raise ValueError(
            f"sequence parallelism: {sizes.sequence_length} tokens do not divide by the "
            f"tensor-parallel size {tensor_parallel}; leave out --sequence-parallel"
        )
    block: Block = build_module(
        block_spec(config), config=config, pop=pop, pg_collection=context.pg_collection
    )
    return block


class Head(LayerModule):
    """Tokens [s, b, D] to the prediction [b, c, h, w]: norm, linear, unpatchify, 3x3 conv."""

    def __init__(self, sizes: UViTConfig, context: LayerContext) -> None:
        config = uvit_transformer_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.sizes = sizes
        channels = sizes.in_channels
        self.norm = torch.nn.LayerNorm(sizes.embed_dim, eps=config.layernorm_epsilon)
        self.decoder_pred = _linear(sizes.embed_dim, sizes.patch_size**2 * channels, config)
        self.final_layer = torch.nn.Conv2d(channels, channels, 3, padding=1)
        self.to(dtype=config.params_dtype)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Drops the extra tokens; each patch's features are ordered (row, column, channel)."""
        patches = self.decoder_pred(self.norm(inputs[0][self.sizes.num_extra_tokens :]))
        size, patch = self.sizes.image_size, self.sizes.patch_size
        side = size // patch
        grid = patches.view(side, side, -1, patch, patch, self.sizes.in_channels)
        image = grid.permute(2, 5, 0, 3, 1, 4).reshape(-1, self.sizes.in_channels, size, size)
        return (self.final_layer(image),)
