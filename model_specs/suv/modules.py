"""SUV's modules: tokens of the video are [s, b, D], those of the text [s_txt, b, D].

The initialisation is not published, so weights are drawn as in DiT: Xavier in linears, N(0, 0.02)
in the embedder, zeros in modulations and the last linear. Skips without norms add nothing at first,
as in the authors' code.
"""

from __future__ import annotations

import functools
import math

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.token_shares import uses_ring
from model_specs.common.attention import PreparedCoreAttention, mlp
from model_specs.common.joint_attention import StreamProjections
from model_specs.common.layers import (
    LayerModule,
    LayerNorm,
    Named,
    Table,
    Tensors,
    VectorMlp,
    linear,
    timestep_embedding,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config, normal_init, xavier_init
from model_specs.common.mmdit import Modulation
from model_specs.common.patches import PatchEmbed, unpatchify
from model_specs.common.rotary import RotaryOfShape
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.suv.attention import SkiparseAttention
from model_specs.suv.config import SUVConfig

__all__ = [
    "AttentionLayer",
    "CaptionProjection",
    "FeedForwardLayer",
    "Head",
    "Patches",
    "SkipLayer",
    "TimeTextEmbed",
]

_THETA = 10000


class TimeTextEmbed(LayerModule):
    """Provides temb [b, timestep_embed_dim]: embedded timestep plus embedded pooled text."""

    def __init__(self, sizes: SUVConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.width = sizes.timestep_embed_dim
        self.timestep_embedder = self._embedder(self.width)
        self.text_embedder = self._embedder(sizes.pooled_projection_dim)
        works_on_shards(self, config)

    def _embedder(self, inputs: int) -> VectorMlp:
        first = linear(inputs, self.width, self.config, normal_init)
        return VectorMlp(first, linear(self.width, self.width, self.config, normal_init))

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in fp32 and pooled [b, pooled_dim]."""
        sinusoids = timestep_embedding(conditioning["timesteps"], self.width)
        dtype = self.timestep_embedder.linear_1.weight.dtype
        time = self.timestep_embedder(sinusoids.to(dtype))
        return (*inputs, time + self.text_embedder(conditioning["pooled"]))


class Patches(PatchEmbed):
    """Patches of every frame, in order, without added positions; attention has rotary ones."""

    def __init__(self, sizes: SUVConfig, context: LayerContext) -> None:
        super().__init__(context, sizes.in_channels, sizes.dim, sizes.patch_size)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Video [b, c, f, h, w] to this rank's tokens [s, b, D]."""
        frames_below_each_other = inputs[0].flatten(2, 3)
        return super().forward((frames_below_each_other,), skips, conditioning)


class CaptionProjection(LayerModule):
    """Start of the text stream: a linear map of the batch's text states."""

    def __init__(self, sizes: SUVConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.linear = linear(sizes.caption_channels, sizes.dim, config, xavier_init)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map video tokens to (video, text); ``conditioning``: context [b, s_txt, channels]."""
        text = self.linear(conditioning["context"]).transpose(0, 1).contiguous()
        return (*inputs, self.enter_sequence(text))


class ModulatedNorms(Modulation):
    """Norms of both streams and the vectors that modulate them; ``norm_enc`` is the text's."""

    def __init__(self, sizes: SUVConfig, config: TransformerConfig, of_text: bool) -> None:
        super().__init__(config, 6, sizes.timestep_embed_dim)
        self.norm = LayerNorm(config, sizes.dim)
        self.norm_enc = LayerNorm(config, sizes.dim) if of_text else None


def _modulated(
    norm: torch.nn.Module, tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = norm(tokens) * (1 + scale) + shift
    return result


def _turn(table: Table, heads: torch.Tensor) -> torch.Tensor:
    """Rotate heads [s, b, heads, d] by their positions, in fp32 or wider.

    Of the features of each axis, i and i + half rotate together. Text turns by 0.
    """
    cos, sin = table.on(heads.device)[:, :, None, None]
    axes = heads.split(_axes(heads.shape[-1]), -1)
    halves = [half for axis in axes for half in reversed(axis.chunk(2, -1))]
    wide = torch.promote_types(heads.dtype, torch.float32)
    return (heads.to(wide) * cos + torch.cat(halves, -1).to(wide) * sin).to(heads.dtype)


def _axes(width: int) -> list[int]:
    """Features of a head that rotate with the frame, the row and the column."""
    return [width // 16 * part for part in (4, 6, 6)]


@functools.cache
def _rotary_table(grid: tuple[int, int, int], num_text: int, width: int) -> Table:
    """Cosines and signed sines [2, s, width] of video, then text; all blocks share one."""

    def make() -> torch.Tensor:
        places = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
        cosines, sines = [], []
        for place, features in zip(places, _axes(width), strict=True):
            exponents = torch.arange(0, features, 2).float() / features
            angles = torch.outer(place.flatten().float(), 1.0 / _THETA**exponents)
            angles = torch.cat([angles, angles.new_zeros(num_text, angles.shape[1])])
            cosines += [angles.cos()] * 2
            sines += [-angles.sin(), angles.sin()]
        return torch.stack([torch.cat(cosines, 1), torch.cat(sines, 1)])

    return Table(make)


class AttentionLayer(TokenLayer):
    """Gated residual of joint attention over a modulated norm of each stream.

    With ``text_ends`` the text's stream ends here.
    """

    def __init__(
        self,
        sizes: SUVConfig,
        context: LayerContext,
        sparsity: int,
        by_group: bool,
        text_ends: bool,
    ) -> None:
        config, groups = dit_config(sizes, context.config), context.pg_collection
        super().__init__(config, groups)
        num_text = sizes.context_length
        shares = TokenShares(groups, [(count, num_text) for count in sizes.token_counts])
        self.shares = (shares,)
        tensor = config.tensor_model_parallel_size
        if shares.size > 1 and uses_ring((config.num_attention_heads,), shares.size, tensor):
            raise ValueError(
                f"skiparse attention needs all tokens of a head: context-parallel size "
                f"{shares.size} x tensor-parallel size {tensor} must divide the "
                f"{config.num_attention_heads} heads"
            )
        self.norm1 = ModulatedNorms(sizes, config, of_text=True)
        self.image = StreamProjections(config, groups, head_norm=True, leads_back=True)
        self.text = StreamProjections(config, groups, head_norm=True, leads_back=not text_ends)
        width = config.kv_channels
        tables = [_rotary_table(grid, num_text, width) for grid in sizes.grids]
        attention = functools.partial(
            SkiparseAttention, shares=shares, sparsity=sparsity, by_group=by_group
        )
        self.core_attention = PreparedCoreAttention(
            config,
            layer_number=1,
            attn_mask_type=AttnMaskType.no_mask,
            attention_type="self",
            inner=shares.exchanged(attention),
            head_norm=None,
            rotary=RotaryOfShape(_turn, tables, shares),
            rotary_keys=True,
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (video, text) to the same, or to (video,); takes temb [b, d] and context_mask."""
        video, text = inputs
        shift, scale, gate, text_shift, text_scale, text_gate = self.norm1(conditioning["temb"])
        streams = (
            self.image.heads(_modulated(self.norm1.norm, video, shift, scale)),
            self.text.heads(_modulated(self.norm1.norm_enc, text, text_shift, text_scale)),
        )
        joined = [torch.cat(both) for both in zip(*streams, strict=True)]
        attended = self.core_attention(*joined, conditioning["context_mask"])
        counts = [stream[0].shape[0] for stream in streams]
        of_video, of_text = attended.split(counts)
        video = video + gate * self.image.back(of_video)
        if (back := self.text.back(of_text)) is None:
            return (video,)
        return video, text + text_gate * back


class FeedForwardLayer(LayerModule, TokenSliced):
    """Gated residuals of the streams' MLPs over modulated norms; of the video alone after
    ``text_ends``."""

    def __init__(self, sizes: SUVConfig, context: LayerContext, text_ends: bool) -> None:
        config, groups = dit_config(sizes, context.config), context.pg_collection
        super().__init__(config, groups)
        self.norm2 = ModulatedNorms(sizes, config, of_text=not text_ends)
        self.mlp = mlp(config, groups, bias=False)
        self.mlp_enc = None
        if sizes.double_ff and not text_ends:
            self.mlp_enc = mlp(config, groups, bias=False)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (video, text) or (video,) tokens to the same; ``conditioning``: temb [b, d]."""
        vectors = self.norm2(conditioning["temb"])
        video = self._stream(self.norm2.norm, self.mlp, inputs[0], *vectors[:3])
        if self.norm2.norm_enc is None:
            return (video,)
        of_text = self.mlp if self.mlp_enc is None else self.mlp_enc
        return video, self._stream(self.norm2.norm_enc, of_text, inputs[1], *vectors[3:])

    def _stream(
        self,
        norm: torch.nn.Module,
        feed_forward: torch.nn.Module,
        tokens: torch.Tensor,
        *vectors: torch.Tensor,
    ) -> torch.Tensor:
        def changed(
            tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, gate: torch.Tensor
        ) -> torch.Tensor:
            out, _ = feed_forward(_modulated(norm, tokens, shift, scale))
            return tokens + gate * out

        return self.in_slices(changed, [norm, feed_forward], [tokens], *vectors)


class SkipLayer(LayerModule):
    """Linear(2D -> D) of [tokens, skip] in each stream, replicated over tensor-parallel ranks.

    ``skips_of`` is the prefix of both skips' names.
    """

    def __init__(self, sizes: SUVConfig, context: LayerContext, skips_of: str) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.skips_of = skips_of
        self.image = JoinSkip(sizes, config)
        self.text = JoinSkip(sizes, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (video, text) tokens to the same."""
        video, text = inputs
        return (
            self.image(video, skips[f"{self.skips_of}.video"]),
            self.text(text, skips[f"{self.skips_of}.text"]),
        )


class JoinSkip(torch.nn.Module):
    """Tokens and skip side by side, normalised if the model does so, through one linear.

    Without norms, the result at first is the tokens.
    """

    def __init__(self, sizes: SUVConfig, config: TransformerConfig) -> None:
        super().__init__()
        dim = sizes.dim
        self.norm = LayerNorm(config, 2 * dim) if sizes.norm_skips else torch.nn.Identity()
        draw = xavier_init if sizes.norm_skips else torch.nn.init.eye_
        self.linear = linear(2 * dim, dim, config, draw)
        works_on_shards(self, config)

    def forward(self, tokens: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Both [s, b, D]."""
        joined: torch.Tensor = self.linear(self.norm(torch.cat([tokens, skip], dim=-1)))
        return joined


class Head(LayerModule):
    """Map video tokens to the prediction: two norms, the second modulated, linear, unpatchify."""

    def __init__(self, sizes: SUVConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.chain_shape, self.grids, self.patch_size = 0, sizes.grids, sizes.patch_size
        self.norm_final = LayerNorm(config, sizes.dim)
        self.norm_out = Modulation(config, 2, sizes.timestep_embed_dim)
        self.norm_out.norm = LayerNorm(config, sizes.dim)
        features = sizes.patch_size**2 * sizes.in_channels
        self.proj_out = linear(sizes.dim, features, config, torch.nn.init.zeros_)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Tokens to the video [b, c, f, h, w]; ``conditioning``: temb [b, d]."""
        shift, scale = self.norm_out(conditioning["temb"])
        tokens = _modulated(self.norm_out.norm, self.norm_final(inputs[0]), shift, scale)
        features = self.proj_out(tokens)
        grid = frames, rows, columns = self.grids[self.chain_shape]
        patches = self.leave_sequence(features, math.prod(grid))
        tall = unpatchify(patches, (frames * rows, columns), self.patch_size)
        return (tall.unflatten(2, (frames, -1)),)
