"""Hunyuan-DiT: a text-to-image DiT with long skips (Li et al., arXiv:2405.08748; diffusers).

Of n blocks, block i < n/2 - 1 hands its output to block n - 1 - i; the two in the middle have no
skip. A block is three layers: self-attention, cross-attention to the text, and feed-forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.backbone.published import PerHead, Published, Rule
from model_specs._options import fixed, run_choice
from model_specs._published import require_settings

PUBLISHED_AS = "HunyuanDiT2DModel"

_LEARNED = "what takes the place of padding is learned for each token"


@dataclass(frozen=True)
class HunyuanDiTConfig:
    """Sizes of a Hunyuan-DiT; ``sample_size`` is the side of the latent.

    Text is ``text_len`` CLIP states of width ``cross_attention_dim`` and ``text_len_t5`` mT5
    states of width ``cross_attention_dim_t5``. With ``style_and_size`` the model is told the size
    of the image and has a style embedding (versions up to 1.1).
    """

    sample_size: int = run_choice(
        128, "rotary positions are computed at {0.sample_size}, spaced as for 64"
    )
    patch_size: int = 2
    in_channels: int = 4
    learn_sigma: bool = True
    num_layers: int = 40
    num_attention_heads: int = 16
    attention_head_dim: int = 88
    ffn_dim: int = 6144
    cross_attention_dim: int = 1024
    cross_attention_dim_t5: int = 2048
    pooled_projection_dim: int = 1024
    text_len: int = fixed(77, _LEARNED)
    text_len_t5: int = fixed(256, _LEARNED)
    style_and_size: bool = False

    def faults(self) -> list[str]:
        """What is inconsistent between the fields."""
        least = {"num_layers": 2}
        found = [
            f"{key}: must be at least {least.get(key, 1)}, is {getattr(self, key)}"
            for key in self.__dataclass_fields__
            if getattr(self, key) < least.get(key, 1)
            and key not in ("learn_sigma", "style_and_size")
        ]
        if found:
            return found
        divisors = {
            "num_layers": 2,
            "attention_head_dim": 4,
            "sample_size": self.patch_size,
            "cross_attention_dim_t5": self.pooling_heads,
        }
        return [
            f"{key}: must be divisible by {divisor}, is {getattr(self, key)}"
            for key, divisor in divisors.items()
            if getattr(self, key) % divisor
        ]

    @property
    def hidden_size(self) -> int:
        """Width of the tokens and of the timestep embedding."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def pooling_heads(self) -> int:
        """Heads of the attention that pools the mT5 states, the same at every size."""
        return 8

    @property
    def out_channels(self) -> int:
        """Channels of the prediction: with ``learn_sigma`` a variance follows it."""
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    @property
    def side(self) -> int:
        """Patches in a row."""
        return self.sample_size // self.patch_size

    @property
    def num_skips(self) -> int:
        """Skips; the first as many blocks push one."""
        return self.num_layers // 2 - 1


# v1.2 and v1.1 are Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers and -v1.1-Diffusers. The others are
# v1.2 scaled by us: heads of 88 features, feed-forwards 48/11 of the width as in v1.2 (6144 of
# 1408), and the number of blocks that gives the number of parameters.
CONFIGS: dict[str, HunyuanDiTConfig] = {
    "hunyuan-dit-v1.2": HunyuanDiTConfig(),
    "hunyuan-dit-v1.1": HunyuanDiTConfig(style_and_size=True),
    "hunyuan-dit-0.8b": HunyuanDiTConfig(num_layers=36, num_attention_heads=12, ffn_dim=4608),
    "hunyuan-dit-2.2b": HunyuanDiTConfig(num_layers=38, num_attention_heads=20, ffn_dim=7680),
    "hunyuan-dit-3b": HunyuanDiTConfig(num_layers=38, num_attention_heads=24, ffn_dim=9216),
    "hunyuan-dit-6.0b": HunyuanDiTConfig(num_layers=42, num_attention_heads=32, ffn_dim=12288),
    "hunyuan-tiny": HunyuanDiTConfig(
        sample_size=8,
        num_layers=6,
        num_attention_heads=4,
        attention_head_dim=8,
        ffn_dim=80,
        cross_attention_dim=24,
        cross_attention_dim_t5=16,
        pooled_projection_dim=20,
        text_len=5,
        text_len_t5=7,
    ),
}


def published(config: HunyuanDiTConfig) -> Published:
    """As diffusers stores it."""
    same = (
        "sample_size", "patch_size", "in_channels", "learn_sigma", "num_layers",
        "num_attention_heads", "attention_head_dim", "hidden_size", "cross_attention_dim",
        "cross_attention_dim_t5", "pooled_projection_dim", "text_len", "text_len_t5",
    )  # fmt: skip
    settings = {key: getattr(config, key) for key in same} | {
        "mlp_ratio": _ratio(config.ffn_dim, config.hidden_size),
        "use_style_cond_and_image_meta_size": config.style_and_size,
        "activation_fn": "gelu-approximate",
        "norm_type": "layer_norm",
    }
    per_head = PerHead(config.num_attention_heads)
    rules = (
        Rule("text.*", "*"),
        Rule("head.*", "*"),
        Rule(
            "*.attention.linear_qkv.*",
            ("*.to_q.*", "*.to_k.*", "*.to_v.*"),
            per_head,
        ),
        Rule("*.attention.linear_q.*", "*.to_q.*"),
        Rule("*.attention.linear_kv.*", ("*.to_k.*", "*.to_v.*"), per_head),
        Rule("*.attention.linear_proj.*", "*.to_out.0.*"),
        Rule("*.attention.core_attention.q_layernorm.*", "*.norm_q.*"),
        Rule("*.attention.core_attention.k_layernorm.*", "*.norm_k.*"),
        Rule("*.ff.mlp.linear_fc1.*", "*.ff.net.0.proj.*"),
        Rule("*.ff.mlp.linear_fc2.*", "*.ff.net.2.*"),
        Rule("*.attn1.*", "*.*"),
        Rule("*.attn2.*", "*.*"),
        Rule("*.ff.*", "*.*"),
    )
    return Published("diffusers", PUBLISHED_AS, settings, rules)


def _ratio(ffn_dim: int, width: int) -> float:
    """By what diffusers multiplies ``width``, and rounds down, to get ``ffn_dim``.

    Rounded up to four digits as v1.2's is, or to more where four give another width.
    """
    ratios = (math.ceil(ffn_dim / width * 10**digits) / 10**digits for digits in range(4, 16))
    exact = (ratio for ratio in ratios if int(width * ratio) == ffn_dim)
    return next(exact, math.nextafter(ffn_dim / width, math.inf))


# What diffusers takes for settings that config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "sample_size": 32,
    "learn_sigma": True,
    "num_layers": 28,
    "num_attention_heads": 16,
    "attention_head_dim": 88,
    "hidden_size": 1152,
    "mlp_ratio": 4.0,
    "cross_attention_dim": 1024,
    "cross_attention_dim_t5": 2048,
    "pooled_projection_dim": 1024,
    "text_len": 77,
    "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": True,
}


def config_from_published(config: Mapping[str, Any]) -> HunyuanDiTConfig:
    """The sizes in a ``config.json``; raises ValueError for settings that this family lacks."""
    settings = {**_DEFAULTS, **config}
    width = settings["num_attention_heads"] * settings["attention_head_dim"]
    require_settings(
        settings,
        {"activation_fn": "gelu-approximate", "norm_type": "layer_norm", "hidden_size": width},
    )
    same = {key: settings[key] for key in HunyuanDiTConfig.__dataclass_fields__ if key in settings}
    return HunyuanDiTConfig(
        **same,
        ffn_dim=int(width * settings["mlp_ratio"]),
        style_and_size=settings["use_style_cond_and_image_meta_size"],
    )


def build_backbone(name: str, config: HunyuanDiTConfig) -> Backbone:
    """The chain: two embedders, ``pos_embed``, each block's ``attn1 attn2 ff``, ``head``."""
    image = TensorSpec((config.in_channels, config.sample_size, config.sample_size))
    tokens = TensorSpec((config.side**2, config.hidden_size), batch_dim=1, sequence=True)
    text = TensorSpec((config.text_len + config.text_len_t5, config.cross_attention_dim), 1)
    prediction = TensorSpec((config.out_channels, *image.shape[1:]))
    fields = {
        "timesteps": TensorSpec((), dtype="float32"),
        "context": TensorSpec((config.text_len, config.cross_attention_dim)),
        "context_mask": TensorSpec((config.text_len,), dtype="int64"),
        "context_t5": TensorSpec((config.text_len_t5, config.cross_attention_dim_t5)),
        "context_t5_mask": TensorSpec((config.text_len_t5,), dtype="int64"),
    }
    if config.style_and_size:
        fields["image_meta_size"] = TensorSpec((6,), dtype="float32")

    def build(kind: str, **arguments: Any) -> functools.partial[Any]:
        return functools.partial(_build, kind, config, arguments)

    def embedder(layer: str, kind: str, provided: str, spec: TensorSpec, *uses: str) -> Layer:
        return Layer(
            layer,
            build(kind),
            (image,),
            (image,),
            provides={provided: spec},
            uses=uses,
            embedder=True,
        )

    def on_tokens(layer: str, kind: str, *uses: str) -> Layer:
        return Layer(layer, build(kind), (tokens,), (tokens,), uses=uses)

    def block(i: int) -> tuple[Layer, ...]:
        mirror = config.num_layers - 1 - i
        pop = f"blocks.{mirror}" if mirror < config.num_skips else None
        return (
            Layer(
                f"blocks.{i}.attn1",
                build("SelfAttentionLayer", pop=pop),
                (tokens,),
                (tokens,),
                pops={pop: tokens} if pop else {},
                uses=("temb",),
            ),
            on_tokens(f"blocks.{i}.attn2", "CrossAttentionLayer", "text"),
            Layer(
                f"blocks.{i}.ff",
                build("FeedForwardLayer"),
                (tokens,),
                (tokens,),
                pushes={f"blocks.{i}": 0} if i < config.num_skips else {},
            ),
        )

    texts = ("context", "context_mask", "context_t5", "context_t5_mask")
    extras = ("image_meta_size",) if config.style_and_size else ()
    temb = TensorSpec((config.hidden_size,))
    layers = (
        embedder("time_extra_emb", "TimeEmbedding", "temb", temb, "timesteps", texts[2], *extras),
        embedder("text", "TextEmbedding", "text", text, *texts),
        Layer("pos_embed", build("Patches"), (image,), (tokens,)),
        *(layer for i in range(config.num_layers) for layer in block(i)),
        Layer("head", build("Head"), (tokens,), (prediction,), uses=("temb",)),
    )
    return Backbone(name, layers, fields)


def _build(
    kind: str, config: HunyuanDiTConfig, arguments: Mapping[str, Any], context: LayerContext
) -> Any:
    """The module of class ``kind``, sized by ``config``."""
    from model_specs.modules import hunyuan_dit

    return getattr(hunyuan_dit, kind)(config, context, **arguments)
