"""A family's ``TransformerConfig``, derived from the run's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.errors import Faults

InitMethod = Callable[[torch.Tensor], Any]


def truncated_normal_init(weight: torch.Tensor) -> torch.Tensor:
    """N(0, 0.02) cut at +-2: the initialisation of U-ViT's linears and positions."""
    return torch.nn.init.trunc_normal_(weight, std=0.02)


def normal_init(weight: torch.Tensor) -> torch.Tensor:
    """N(0, 0.02)."""
    return torch.nn.init.normal_(weight, std=0.02)


def uniform_init(weight: torch.Tensor) -> torch.Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's default for linears, as in diffusers' UNets."""
    return torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def xavier_init(weight: torch.Tensor) -> torch.Tensor:
    """Xavier uniform, as in the linears of DiT's blocks (q, k and v as one matrix)."""
    return torch.nn.init.xavier_uniform_(weight)


def tanh_gelu(hidden: torch.Tensor) -> torch.Tensor:
    """GELU approximated with tanh: diffusers' "gelu-approximate"."""
    return F.gelu(hidden, approximate="tanh")


def transformer_config(
    base: TransformerConfig,
    *,
    hidden_size: int,
    num_attention_heads: int,
    ffn_hidden_size: int,
    init_method: InitMethod,
    gated_linear_unit: bool = False,
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
    layernorm_epsilon: float = 1e-5,
    sequence_parallel: bool | None = None,
) -> TransformerConfig:
    """Copy of ``base`` with one family's sizes and plain, exact transformer arithmetic.

    Parallel sizes, dtypes, recomputation and the implementation stay ``base``'s, but for context
    parallelism: layers exchange tokens themselves (see ``TokenShares``). Values that
    ``TransformerConfig`` derives from the model's size are derived again. ``base.num_layers`` and
    the pipeline size thus have no influence; Megatron scales the initialisation of output layers
    with the number of layers. Weights are drawn whole on the CPU from the default generator, then
    sliced, so the layout does not change them. ``sequence_parallel`` overrides the run's flag for
    families whose tensors between layers are not sequences.

    Raises ValueError if heads or widths are not divisible by the tensor-parallel size.
    """
    tensor_parallel = base.tensor_model_parallel_size
    faults = [
        f"{what} {size} is not divisible by the tensor-parallel size {tensor_parallel}"
        for what, size in (
            ("number of attention heads", num_attention_heads),
            ("feed-forward width", ffn_hidden_size),
        )
        if size % tensor_parallel
    ]
    if faults:
        raise Faults(faults)
    config = copy.copy(base)
    overrides: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_query_groups": num_attention_heads,
        "kv_channels": hidden_size // num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "init_method": init_method,
        "output_layer_init_method": init_method,
        "use_cpu_initialization": True,
        "normalization": "LayerNorm",
        "layernorm_epsilon": layernorm_epsilon,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "gated_linear_unit": gated_linear_unit,
        "activation_func": activation_func,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "use_te_activation_func": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "window_size": None,
        "apply_query_key_layer_scaling": False,
        "attention_output_gate": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "no_rope_freq": None,
        "fused_single_qkv_rope": False,
        "num_moe_experts": None,
        "use_mup": False,
        "context_parallel_size": 1,
    }
    if sequence_parallel is not None:
        overrides["sequence_parallel"] = sequence_parallel
    for name, value in overrides.items():
        if not hasattr(config, name):
            raise AttributeError(f"TransformerConfig has no field {name!r}")
        setattr(config, name, value)
    return config


class DiTSizes(Protocol):
    """Block sizes in the configurations of DiT-like transformers."""

    @property
    def dim(self) -> int:
        """Width of the tokens."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Heads of every attention."""
        ...


def dit_config(
    sizes: DiTSizes, base: TransformerConfig, ffn_dim: int | None = None
) -> TransformerConfig:
    """Configuration common to DiT, PixArt, Hunyuan-DiT, SD3 and Flux.

    MLPs use tanh-GELU (of width 4D by default), norms an epsilon of 1e-6, linears Xavier's rule.
    """
    return transformer_config(
        base,
        hidden_size=sizes.dim,
        num_attention_heads=sizes.num_attention_heads,
        ffn_hidden_size=ffn_dim or 4 * sizes.dim,
        init_method=xavier_init,
        activation_func=tanh_gelu,
        layernorm_epsilon=1e-6,
    )
