"""MMDiT modules of SD3 and Flux: block, embeddings and head (arXiv:2403.03206, section 4).

Neither model's initialisation is published, so weights are drawn as in DiT, which has the same
blocks. Linear weights are Xavier with zero biases. Embeddings of vectors are N(0, 0.02). All
modulations and the last linear are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import Rotary, mlp, self_attention
from model_specs.common.joint_attention import JointAttention, head_rms_norm
from model_specs.common.layers import (
    LayerModule,
    Named,
    Tensors,
    TimestepEmbedder,
    VectorMlp,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import DiTSizes, dit_config, normal_init, xavier_init
from model_specs.common.patches import gated, normed
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced


class MMDiTSizes(DiTSizes, Protocol):
    """Fields of an SD3 or Flux configuration that blocks and embeddings need."""

    @property
    def joint_attention_dim(self) -> int:
        """Width of the text's states."""
        ...

    @property
    def pooled_projection_dim(self) -> int:
        """Width of the pooled text."""
        ...

    @property
    def context_length(self) -> int:
        """Number of text tokens."""
        ...

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Number of image tokens of each shape of samples."""
        ...


def joint_shares(sizes: MMDiTSizes, context: LayerContext, text_first: bool) -> TokenShares:
    """Shares of the tokens of a joint attention, in its order."""
    order = -1 if text_first else 1
    joined = [(count, sizes.context_length)[::order] for count in sizes.token_counts]
    return TokenShares(context.pg_collection, joined)


class Modulation(torch.nn.Module):
    """Map temb to ``count`` vectors [b, D] that shift, scale and gate: Linear(SiLU(temb)),
    zero-init. The width of temb is ``inputs``, or D.
    """

    def __init__(self, config: TransformerConfig, count: int, inputs: int | None = None) -> None:
        super().__init__()
        self.count = count
        width = config.hidden_size
        self.linear = linear(inputs or width, count * width, config, torch.nn.init.zeros_)
        works_on_shards(self, config)

    def forward(self, temb: torch.Tensor) -> Tensors:
        """``temb`` [b, inputs] to ``count`` tensors [b, D]."""
        vectors: Tensors = self.linear(F.silu(temb)).chunk(self.count, dim=-1)
        return vectors


class JointBlock(TokenLayer, TokenSliced):
    """MMDiT block (figure 2b): modulated attention and MLP of both streams, with gated residuals.

    With ``dual_attention`` (SD3.5), ``attn2`` is attention within the image stream beside the joint
    attention.
    """

    def __init__(
        self,
        sizes: MMDiTSizes,
        context: LayerContext,
        *,
        head_norm: bool,
        text_ends: bool = False,
        dual_attention: bool = False,
        text_first: bool = False,
        make_rotary: Callable[[TokenShares], Rotary] | None = None,
    ) -> None:
        config, groups = dit_config(sizes, context.config), context.pg_collection
        super().__init__(config, groups)
        joint = joint_shares(sizes, context, text_first)
        image = TokenShares(groups, [(count,) for count in sizes.token_counts])
        self.shares = joint, image
        self.norm1 = Modulation(config, 9 if dual_attention else 6)
        self.norm1_context = Modulation(config, 2 if text_ends else 6)
        self.attn = JointAttention(
            config,
            groups,
            joint,
            head_norm=head_norm,
            text_ends=text_ends,
            text_first=text_first,
            rotary=None if make_rotary is None else make_rotary(joint),
        )
        self.attn2 = None
        if dual_attention:
            norm = head_rms_norm(config) if head_norm else None
            self.attn2 = self_attention(config, groups, image, qkv_bias=True, head_norm=norm)
        self.ff = mlp(config, groups)
        self.ff_context = None if text_ends else mlp(config, groups)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (image, text) tokens to (image, text), or to (image,); takes temb [b, D]."""
        image, text = inputs
        shift, scale, gate, *mlp = self.norm1(conditioning["temb"])
        of_text = self.norm1_context(conditioning["temb"])
        if self.ff_context is None:
            text_scale, text_shift = of_text
        else:
            text_shift, text_scale, text_gate, *text_mlp = of_text
        for_attn2 = image
        attended, text_attended = self.attn(
            normed(image, shift, scale), normed(text, text_shift, text_scale)
        )
        if self.attn2 is not None:
            image = image + gate * attended
            *mlp, shift, scale, gate = mlp
            image = image + gated(self.attn2, for_attn2, shift, scale, gate, attention_mask=None)
            image = self._feed_forward(self.ff, [image], *mlp)
        else:
            image = self._feed_forward(self.ff, [image, attended], gate, *mlp)
        if self.ff_context is None:
            return (image,)
        streams = text, text_attended
        return image, self._feed_forward(self.ff_context, streams, text_gate, *text_mlp)

    def _feed_forward(
        self, ff: torch.nn.Module, streams: Sequence[torch.Tensor], *vectors: torch.Tensor
    ) -> torch.Tensor:
        """Gated residual of ``ff``, after that of an attention if ``streams`` has its result."""

        def changed(tokens: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            if len(streams) > 1:
                attended, gate, *given = given  # type: ignore[assignment]
                tokens = tokens + gate * attended
            shift, scale, gate = given
            return tokens + gated(ff, tokens, shift, scale, gate)

        return self.in_slices(changed, [ff], streams, *vectors)


class TimeTextEmbed(LayerModule):
    """Provides temb [b, D]: the embedded timestep plus the embedded pooled text."""

    def __init__(self, sizes: MMDiTSizes, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.timestep_embedder = self._of_scalar()
        self.text_embedder = VectorMlp(
            linear(sizes.pooled_projection_dim, sizes.dim, config, normal_init),
            linear(sizes.dim, sizes.dim, config, normal_init),
        )
        self.to(dtype=config.params_dtype)
        works_on_shards(self, config)

    def _of_scalar(self) -> TimestepEmbedder:
        config = self.config
        return TimestepEmbedder(config.hidden_size, initialize=config.perform_initialization)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in fp32 and pooled [b, pooled_dim]."""
        time = self.timestep_embedder(conditioning["timesteps"])
        return (*inputs, time + self.text_embedder(conditioning["pooled"]))


class ContextEmbedder(LayerModule):
    """Start of the text stream: a linear map of the batch's text states."""

    def __init__(self, sizes: MMDiTSizes, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.linear = linear(sizes.joint_attention_dim, sizes.dim, config, xavier_init)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map image tokens to (image, text) tokens; ``conditioning``: context [b, s_txt, dim]."""
        text = self.linear(conditioning["context"]).transpose(0, 1).contiguous()
        return (*inputs, self.enter_sequence(text))


class Head(LayerModule):
    """Map image tokens to the prediction: modulated norm, linear, ``to_image``.

    ``to_image`` places the features [s, b, features] of all tokens in the image, given the rows and
    columns of tokens: those in ``grids`` of the microbatch's shape. There are ``token_counts``
    tokens of each shape (None: those of the grids).
    """

    def __init__(
        self,
        sizes: DiTSizes,
        context: LayerContext,
        features: int,
        grids: Sequence[tuple[int, int]],
        to_image: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor],
        token_counts: Sequence[int] | None = None,
    ) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.chain_shape, self.grids = 0, grids
        self.token_counts = token_counts or [math.prod(grid) for grid in grids]
        self.to_image = to_image
        self.norm_out = Modulation(config, 2)
        self.proj_out = linear(sizes.dim, features, config, torch.nn.init.zeros_)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb [b, D]."""
        scale, shift = self.norm_out(conditioning["temb"])
        features = self.proj_out(normed(inputs[0], shift, scale))
        tokens = self.leave_sequence(features, self.token_counts[self.chain_shape])
        return (self.to_image(tokens, self.grids[self.chain_shape]),)
