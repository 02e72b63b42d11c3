"""Attention over two streams of tokens together (MMDiT, arXiv:2403.03206, figure 2b).

Streams are the image's tokens [s_img, b, D] and the text's [s_txt, b, D]. Under sequence
parallelism each is divided among the ranks by itself, so it is gathered by itself, by its own
column-parallel projection, before the two are joined.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from model_specs.common.attention import Builder, PreparedCoreAttention, Rotary, parts
from model_specs.common.layers import LayerModule, Tensors


def head_rms_norm(config: TransformerConfig) -> Builder:
    """RMSNorm over one head's features, gain 1."""
    return functools.partial(
        torch.nn.RMSNorm, eps=config.layernorm_epsilon, dtype=config.params_dtype
    )


@dataclass
class StreamSubmodules:
    """The replaceable parts of ``StreamProjections``; without ``linear_proj`` none leads back."""

    linear_qkv: Builder
    head_norm: Builder | None
    linear_proj: Builder | None


class StreamProjections(LayerModule):
    """One stream's way into attention and back: fused q, k, v of all heads, norms, projection."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: StreamSubmodules,
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__(config, pg_collection)
        width = config.hidden_size
        shared = {
            "config": config,
            "bias": True,
            "is_expert": False,
            "tp_group": pg_collection.tp if pg_collection is not None else None,
        }
        self.linear_qkv = submodules.linear_qkv(
            width,
            3 * width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **shared,
        )
        norm = submodules.head_norm
        self.q_layernorm = torch.nn.Identity() if norm is None else norm(config.kv_channels)
        self.k_layernorm = torch.nn.Identity() if norm is None else norm(config.kv_channels)
        if submodules.linear_proj is not None:
            self.linear_proj = submodules.linear_proj(
                width,
                width,
                init_method=config.output_layer_init_method,
                input_is_parallel=True,
                skip_bias_add=True,
                tp_comm_buffer_name="proj",
                **shared,
            )

    def heads(self, tokens: torch.Tensor) -> Tensors:
        """This rank's tokens to query, key and value [s, b, this rank's heads, d], s whole."""
        fused = self.linear_qkv(tokens)[0].unflatten(-1, (-1, 3, self.config.kv_channels))
        query, key, value = fused.unbind(-2)
        return self.q_layernorm(query), self.k_layernorm(key), value

    def back(self, attended: torch.Tensor) -> torch.Tensor:
        """What this rank's heads attended to, [s, b, heads * d], to this rank's tokens."""
        out, bias = self.linear_proj(attended)
        return out + bias


def attend(core_attention: torch.nn.Module, *streams: Tensors) -> Tensors:
    """Attention over all streams' queries, keys and values, joined in this order; each's part."""
    query, key, value = (torch.cat(tensors) for tensors in zip(*streams, strict=True))
    attended = core_attention(query, key, value, None, attn_mask_type=AttnMaskType.no_mask)
    divided: Tensors = attended.split([stream[0].shape[0] for stream in streams])
    return divided


def core_attention_builder(config: TransformerConfig, rotary: Rotary | None) -> Builder:
    """Unmasked attention of this rank's heads, with rotary positions of queries and keys if any."""
    core = parts(config).core_attention
    if rotary is not None:
        core = functools.partial(
            PreparedCoreAttention, inner=core, head_norm=None, rotary=rotary, rotary_keys=True
        )
    return functools.partial(
        core, layer_number=1, attn_mask_type=AttnMaskType.no_mask, attention_type="self"
    )


@dataclass
class JointAttentionSubmodules:
    """The replaceable parts of ``JointAttention``."""

    image: ModuleSpec
    text: ModuleSpec
    core_attention: Builder


class JointAttention(LayerModule):
    """Both streams attend to both; ``text_first`` is the order in which they are joined."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: JointAttentionSubmodules,
        pg_collection: ProcessGroupCollection | None,
        text_first: bool,
    ) -> None:
        super().__init__(config, pg_collection)
        groups = {"config": config, "pg_collection": pg_collection}
        self.text_first = text_first
        self.image = build_module(submodules.image, **groups)
        self.text = build_module(submodules.text, **groups)
        self.core_attention = submodules.core_attention(**groups)

    def forward(
        self, image: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's image and text tokens to the same; None where the text ends here."""
        streams = [self.image.heads(image), self.text.heads(text)]
        order = -1 if self.text_first else 1
        image, text = attend(self.core_attention, *streams[::order])[::order]
        ends = not hasattr(self.text, "linear_proj")
        return self.image.back(image), None if ends else self.text.back(text)


def joint_attention_spec(
    config: TransformerConfig,
    *,
    head_norm: bool,
    text_ends: bool = False,
    text_first: bool = False,
    rotary: Rotary | None = None,
) -> ModuleSpec:
    """Joint attention of Megatron's linears and core attention (local or Transformer Engine's)."""
    part = parts(config)

    def stream(ends: bool) -> ModuleSpec:
        norm = head_rms_norm(config) if head_norm else None
        linear_proj = None if ends else part.row
        return ModuleSpec(
            StreamProjections, submodules=StreamSubmodules(part.column, norm, linear_proj)
        )

    return ModuleSpec(
        JointAttention,
        params={"text_first": text_first},
        submodules=JointAttentionSubmodules(
            stream(ends=False), stream(text_ends), core_attention_builder(config, rotary)
        ),
    )
