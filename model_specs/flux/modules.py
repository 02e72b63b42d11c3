"""Flux's own modules: packed latents, rotary positions, single blocks, embedded guidance."""

from __future__ import annotations

import functools

import torch

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.backbone.build_context import LayerContext
from model_specs.common.attention import column_linear, row_linear
from model_specs.common.joint_attention import StreamProjections, attend, core_attention
from model_specs.common.layers import (
    LayerModule,
    Named,
    Table,
    Tensors,
    linear,
    works_on_shards,
)
from model_specs.common.megatron_config import dit_config, xavier_init
from model_specs.common.mmdit import (
    ContextEmbedder,
    Head,
    JointBlock,
    Modulation,
    TimeTextEmbed,
    joint_shares,
)
from model_specs.common.patches import normed
from model_specs.common.rotary import RotaryOfShape
from model_specs.common.token_shares import TokenLayer, TokenShares
from model_specs.common.token_slices import TokenSliced
from model_specs.flux.config import PACKED, FluxConfig

__all__ = [
    "ContextEmbedder",
    "DoubleBlock",
    "PackedEmbed",
    "SingleBlock",
    "TimeTextGuidanceEmbed",
    "head",
]

_THETA = 10000
_SCALE = 1000  # factor applied to guidance in the model


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Pack latents [b, c, h, w] to tokens [h/2 * w/2, b, 4c], features as (channel, row,
    column)."""
    b, c, h, w = latents.shape
    squares = latents.reshape(b, c, h // PACKED, PACKED, w // PACKED, PACKED)
    return squares.permute(2, 4, 0, 1, 3, 5).reshape(-1, b, c * PACKED**2)


def unpack(tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Inverse of ``pack`` for rows and columns of tokens, of which others may follow."""
    (rows, columns), samples = grid, tokens.shape[1]
    squares = tokens[: rows * columns].reshape(rows, columns, samples, -1, PACKED, PACKED)
    image = squares.permute(2, 3, 0, 4, 1, 5)
    return image.reshape(samples, -1, rows * PACKED, columns * PACKED)


def _turn(table: Table, heads: torch.Tensor) -> torch.Tensor:
    """Rotate features 2i and 2i+1 of heads [s, b, heads, d] by their token's angle i, in fp32.

    s is text, then image.
    """
    cos, sin = table.on(heads.device)[:, :, None, None]
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(heads.dtype)


@functools.cache
def _rotary_table(
    grid: tuple[int, int], context_length: int, axes: tuple[int, ...], reference: int
) -> Table:
    """Cosines and sines [2, s, d / 2] of every token and feature pair; all blocks share one."""

    def make() -> torch.Tensor:
        angles = _angles(grid, context_length, axes, reference)
        return torch.stack([angles.cos(), angles.sin()])

    return Table(make)


def _angles(
    grid: tuple[int, int], context_length: int, axes: tuple[int, ...], reference: int
) -> torch.Tensor:
    """Angles of every token and feature pair, in fp64: [s, d / 2] (diffusers' ``FluxPosEmbed``)."""
    image = torch.cartesian_prod(torch.arange(1 + reference), *map(torch.arange, grid))
    coordinates = torch.cat([image.new_zeros(context_length, 3), image]).double()

    def turned(axis: int, width: int) -> torch.Tensor:
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        return torch.outer(coordinates[:, axis], 1.0 / _THETA**exponents)

    return torch.cat([turned(*axis) for axis in enumerate(axes)], dim=1)


def _rotary(sizes: FluxConfig, shares: TokenShares) -> RotaryOfShape:
    of = sizes.context_length, sizes.axes_dims_rope, sizes.reference
    return RotaryOfShape(_turn, [_rotary_table(grid, *of) for grid in sizes.grids], shares)


class PackedEmbed(LayerModule):
    """First layer: packed latents, and the reference picture's, through one linear map."""

    def __init__(self, sizes: FluxConfig, context: LayerContext) -> None:
        config = dit_config(sizes, context.config)
        super().__init__(config, context.pg_collection)
        self.linear = linear(sizes.in_channels * PACKED**2, sizes.dim, config, xavier_init)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Latents [b, c, h, w] to this rank's tokens [s, b, D]."""
        tokens = pack(inputs[0])
        if REFERENCE_IMAGE in conditioning:
            tokens = torch.cat([tokens, pack(conditioning[REFERENCE_IMAGE].to(tokens.dtype))])
        return (self.enter_sequence(self.linear(tokens)),)


class TimeTextGuidanceEmbed(TimeTextEmbed):
    """Provides temb [b, D]: embedded timestep, guidance (if the model has it) and pooled text.

    Both scalars are embedded in fp32. diffusers rounds them to the weights' dtype first. In bf16
    that merges neighbouring timesteps and alters the guidance.
    """

    def __init__(self, sizes: FluxConfig, context: LayerContext) -> None:
        super().__init__(sizes, context)
        if sizes.guidance_embeds:
            self.guidance_embedder = self._of_scalar().to(dtype=self.config.params_dtype)
            works_on_shards(self.guidance_embedder, self.config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: timesteps [b] in [0, 1000] and guidance [b] in fp32, and pooled."""
        embedded = self.timestep_embedder(conditioning["timesteps"])
        if "guidance" in conditioning:
            embedded = embedded + self.guidance_embedder(conditioning["guidance"] * _SCALE)
        return (*inputs, embedded + self.text_embedder(conditioning["pooled"]))


def within_half(tokens: torch.Tensor) -> torch.Tensor:
    """fp16 tokens with infinities replaced by the largest number, as diffusers does here."""
    limit = torch.finfo(torch.float16).max
    return tokens.clip(-limit, limit) if tokens.dtype == torch.float16 else tokens


class DoubleBlock(JointBlock):
    """MMDiT block with text first in its attention, and text outputs clipped to fp16's range."""

    def __init__(self, sizes: FluxConfig, context: LayerContext) -> None:
        make_rotary = functools.partial(_rotary, sizes)
        super().__init__(sizes, context, head_norm=True, text_first=True, make_rotary=make_rotary)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (image, text) tokens to the same; ``conditioning``: temb [b, D]."""
        image, text = super().forward(inputs, skips, conditioning)
        return image, within_half(text)


class SingleBlock(TokenLayer, TokenSliced):
    """Attention and MLP in parallel on one modulated norm; both streams share all weights.

    The streams stay separate while sharded and are joined only for attention. The last projection,
    of [attention, MLP], is two row-parallel linears with one bias. If the text ends here, only its
    keys and values are computed.
    """

    def __init__(self, sizes: FluxConfig, context: LayerContext, text_ends: bool) -> None:
        config, groups = dit_config(sizes, context.config), context.pg_collection
        super().__init__(config, groups)
        self.text_ends = text_ends
        width, hidden = config.hidden_size, config.ffn_hidden_size
        self.norm = Modulation(config, 3)
        self.attn = StreamProjections(config, groups, head_norm=True, leads_back=False)
        joint = joint_shares(sizes, context, text_first=True)
        self.shares = (joint,)
        self.core_attention = core_attention(config, groups, joint, _rotary(sizes, joint))
        self.proj_mlp = column_linear(config, groups, width, hidden, "fc1")
        bound = (6 / (width + hidden + width)) ** 0.5  # Xavier's bound of the two parts together
        draw = functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
        self.proj_out_attn = row_linear(config, groups, width, width, "proj", draw)
        self.proj_out_mlp = row_linear(config, groups, hidden, width, "fc2", draw, bias=False)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Map (image, text) tokens to the same, or to (image,); ``conditioning``: temb [b, D]."""
        image, text = inputs
        shift, scale, gate = self.norm(conditioning["temb"])
        hidden, text_hidden = normed(image, shift, scale), normed(text, shift, scale)
        text_attended, attended = attend(
            self.core_attention, self.attn.heads(text_hidden), self.attn.heads(hidden)
        )
        image = self._out(image, attended, hidden, gate)
        if self.text_ends:
            return (image,)
        return image, self._out(text, text_attended, text_hidden, gate)

    def _out(
        self,
        tokens: torch.Tensor,
        attended: torch.Tensor,
        hidden: torch.Tensor,
        gate: torch.Tensor,
    ) -> torch.Tensor:
        # Under sequence parallelism attention's results are of all tokens, others of this rank's.
        out, bias = self.proj_out_attn(attended)
        modules, streams = (self.proj_mlp, self.proj_out_mlp), (tokens, out, hidden)
        return self.in_slices(self._with_mlp, modules, streams, gate, bias)

    def _with_mlp(
        self,
        tokens: torch.Tensor,
        out: torch.Tensor,
        hidden: torch.Tensor,
        gate: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        activated = self.config.activation_func(self.proj_mlp(hidden)[0])
        return within_half(tokens + gate * (out + self.proj_out_mlp(activated)[0] + bias))


def head(sizes: FluxConfig, context: LayerContext) -> Head:
    """Last layer; a token's features are unpacked in the order of ``pack``."""
    features = sizes.in_channels * PACKED**2
    return Head(sizes, context, features, sizes.grids, unpack, sizes.token_counts)
