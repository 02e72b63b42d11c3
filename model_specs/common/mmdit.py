"""What SD3 and Flux share: MMDiT's block, embeddings and head (arXiv:2403.03206, section 4).

Neither model's initialisation is published; weights are drawn as DiT's, whose blocks these are:
Xavier, biases 0; N(0, 0.02) in what embeds vectors; 0 in all modulations and the last linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.context import LayerContext
from model_specs.common.attention import Rotary, make_mlp, mlp_spec, self_attention_spec
from model_specs.common.joint_attention import head_rms_norm, joint_attention_spec
from model_specs.common.layers import (
    LayerModule,
    Named,
    Tensors,
    TimestepEmbedder,
    drawn_linear,
    enter_sequence,
    leave_sequence,
    works_on_shards,
)
from model_specs.common.megatron_config import (
    normal_init,
    xavier_init,
)
from model_specs.common.patches import modulate

EPS = 1e-6


class Modulation(torch.nn.Module):
    """``count`` vectors [b, D] that shift, scale and gate: Linear(SiLU(temb)), 0 at first."""

    def __init__(self, config: TransformerConfig, count: int) -> None:
        super().__init__()
        self.count = count
        width = config.hidden_size
        self.linear = drawn_linear(width, count * width, config, torch.nn.init.zeros_)
        works_on_shards(self, config)

    def forward(self, temb: torch.Tensor) -> Tensors:
        """``temb`` [b, D] to ``count`` tensors [b, D]."""
        vectors: Tensors = self.linear(F.silu(temb)).chunk(self.count, dim=-1)
        return vectors


def normed(tokens: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """LayerNorm without parameters, modulated."""
    return modulate(F.layer_norm(tokens, tokens.shape[-1:], eps=EPS), shift, scale)


@dataclass
class JointBlockSubmodules:
    """The replaceable parts of ``JointBlock``; ``ff_context`` is None where the text ends."""

    attn: ModuleSpec
    attn2: ModuleSpec | None
    ff: ModuleSpec
    ff_context: ModuleSpec | None


class JointBlock(LayerModule):
    """MMDiT's block (figure 2b): each stream's modulated attention and MLP, with gated residuals.

    ``attn2``, if any, is attention within the image stream beside the joint one (SD3.5).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: JointBlockSubmodules,
        pg_collection: ProcessGroupCollection | None,
    ) -> None:
        super().__init__(config, pg_collection)
        groups = {"config": config, "pg_collection": pg_collection}
        self.norm1 = Modulation(config, 6 if submodules.attn2 is None else 9)
        self.norm1_context = Modulation(config, 2 if submodules.ff_context is None else 6)
        self.attn = build_module(submodules.attn, **groups)
        self.attn2 = submodules.attn2 and build_module(submodules.attn2, **groups)
        self.ff = make_mlp(submodules.ff, config, pg_collection)
        self.ff_context = submodules.ff_context and make_mlp(
            submodules.ff_context, config, pg_collection
        )

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """(image, text) tokens to the same, or to (image,); ``conditioning``: temb [b, D]."""
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
        image = image + gate * attended
        if self.attn2 is not None:
            *mlp, shift, scale, gate = mlp
            out, bias = self.attn2(normed(for_attn2, shift, scale), attention_mask=None)
            image = image + gate * (out + bias)
        image = image + gated_mlp(self.ff, image, *mlp)
        if self.ff_context is None:
            return (image,)
        text = text + text_gate * text_attended
        return image, text + gated_mlp(self.ff_context, text, *text_mlp)


def gated_mlp(
    mlp: torch.nn.Module,
    tokens: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    gate: torch.Tensor,
) -> torch.Tensor:
    """What the modulated MLP adds to ``tokens``."""
    out, bias = mlp(normed(tokens, shift, scale))
    return gate * (out + bias)


def joint_block_spec(
    config: TransformerConfig,
    *,
    head_norm: bool,
    text_ends: bool = False,
    dual_attention: bool = False,
    text_first: bool = False,
    rotary: Rotary | None = None,
    block: type[JointBlock] = JointBlock,
) -> ModuleSpec:
    """The block with Megatron-Core's attention and MLPs."""
    norm = head_rms_norm(config) if head_norm else None
    return ModuleSpec(
        block,
        submodules=JointBlockSubmodules(
            attn=joint_attention_spec(
                config,
                head_norm=head_norm,
                text_ends=text_ends,
                text_first=text_first,
                rotary=rotary,
            ),
            attn2=self_attention_spec(config, qkv_bias=True, head_norm=norm)
            if dual_attention
            else None,
            ff=mlp_spec(config),
            ff_context=None if text_ends else mlp_spec(config),
        ),
    )


class PooledTextEmbedder(torch.nn.Module):
    """The pooled text [b, inputs] through linear, SiLU, linear to [b, D]."""

    def __init__(self, inputs: int, config: TransformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.linear_1 = drawn_linear(inputs, width, config, normal_init)
        self.linear_2 = drawn_linear(width, width, config, normal_init)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """[b, inputs] to [b, D]."""
        embedded: torch.Tensor = self.linear_2(F.silu(self.linear_1(pooled)))
        return embedded


class TimeTextEmbed(LayerModule):
    """Provides temb [b, D]: the embedded timestep plus the embedded pooled text."""

    def __init__(self, config: TransformerConfig, context: LayerContext, pooled_dim: int) -> None:
        super().__init__(config, context.pg_collection)
        self.timestep_embedder = self._of_scalar()
        self.text_embedder = PooledTextEmbedder(pooled_dim, config)
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
    """Begins the text's stream: a linear map of the batch's text states."""

    def __init__(self, config: TransformerConfig, context: LayerContext, context_dim: int) -> None:
        super().__init__(config, context.pg_collection)
        self.groups = context.pg_collection
        self.linear = drawn_linear(context_dim, config.hidden_size, config, xavier_init)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """Image tokens to (image, text) tokens; ``conditioning``: context [b, s_txt, dim]."""
        text = self.linear(conditioning["context"]).transpose(0, 1).contiguous()
        return (*inputs, enter_sequence(text, self.config, self.groups))


class Head(LayerModule):
    """Image tokens to the prediction: modulated norm, linear, and ``to_image``, which places the
    features [s, b, features] of all tokens in the image."""

    def __init__(
        self,
        config: TransformerConfig,
        context: LayerContext,
        features: int,
        to_image: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__(config, context.pg_collection)
        self.groups = context.pg_collection
        self.to_image = to_image
        self.norm_out = Modulation(config, 2)
        self.proj_out = drawn_linear(config.hidden_size, features, config, torch.nn.init.zeros_)
        works_on_shards(self, config)

    def forward(self, inputs: Tensors, skips: Named, conditioning: Named) -> Tensors:
        """``conditioning``: temb [b, D]."""
        scale, shift = self.norm_out(conditioning["temb"])
        features = self.proj_out(normed(inputs[0], shift, scale))
        return (self.to_image(leave_sequence(features, self.config, self.groups)),)
