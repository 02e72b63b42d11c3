"""Every family in a size that trains in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from megatron_pulse.backbone.chain import Backbone
from model_specs import load_backbone
from tests.runtime.equality import Case, Outcome, join_pipeline, train

UNET = {
    "sample_size": 8,
    "block_out_channels": "8,16",
    "norm_num_groups": 4,
    "transformer_depth": "0,1",
    "layers_per_block": 1,
}
TEXT = {**UNET, "cross_attention_dim": 6, "context_length": 5}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "uvit": (
        "uvit-tiny",
        {"depth": 6, "embed_dim": 16, "num_heads": 2, "image_size": 4, "in_channels": 1},
    ),
    "unet": ("unet-tiny", {**UNET, "layers_per_block": 2}),
    "unet-text": ("sd-tiny", TEXT),
    "sdxl": ("sdxl-tiny", {**TEXT, "num_heads": "1,2"}),
    "controlnet": ("controlnet-tiny", {**TEXT, "conditioning_widths": "4,8"}),
    "hunyuan": ("hunyuan-tiny", {"num_layers": 4}),
    "dit": ("dit-tiny", {"num_layers": 4}),
    "pixart": ("pixart-tiny", {}),
    "sd3": ("sd3-tiny", {"num_layers": 4}),
    "flux": ("flux-tiny", {"num_layers": 2, "num_single_layers": 2}),
    "suv": ("suv-tiny", {"num_layers": "2,2,2", "sparse_n": "1,2,1"}),
}


UNUSED = {"suv": {"transformer_blocks.2.1.attn1.text.q_layernorm.weight"}}
"""Parameters without effect: queries of a text whose stream ends."""


def two_shapes(family: str) -> dict[str, str]:
    """Options of microbatches of two shapes, with as many tokens; none if a family has one."""
    sizes = {"uvit": "", "suv": "2x8x4,2x4x8"}.get(family, "8x4,4x8")
    return {"buckets": sizes} if sizes else {}


def backbone(family: str, options: Mapping[str, Any] = MappingProxyType({})) -> Backbone:
    """A small backbone; each has an odd chain and a middle without skips, or no skips."""
    name, own = FAMILIES[family]
    return load_backbone(name, {**own, **options})


def run_cases(
    cases: list[tuple[str, Case]], options: Mapping[str, Any] = MappingProxyType({})
) -> list[Outcome]:
    """(family, case) after (family, case) on this rank."""
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    on_gpu = any(case.device.startswith("cuda") for _, case in cases)
    config, group = join_pipeline("nccl" if on_gpu else "gloo")
    defer_wgrad()
    outcomes = [train(backbone(family, options), case, config, group) for family, case in cases]
    torch.distributed.barrier()
    return outcomes
