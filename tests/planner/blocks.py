"""Published backbones as chains of blocks or finer units, with operations in the place of time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from megatron_pulse.backbone.costs import ChainCosts, SkipCost

OPTIONS: Mapping[str, Mapping[str, int]] = {
    "sd-v2.1": {"sample_size": 64},
    "sdxl": {"sample_size": 128},
    "hunyuan-dit-v1.2": {"sample_size": 128},
    "uvit-h": {"image_size": 32},
}


def block_of(name: str) -> str:
    """The name of the block that a layer is part of."""
    name = re.sub(r"\.(resnets|attentions)\.(\d+).*", r".pair\2", name)  # UNet: a pair
    name = re.sub(r"^(blocks\.\d+)\..*", r"\1", name)  # Hunyuan-DiT
    name = re.sub(r"^((in_blocks|out_blocks)\.\d+|mid_block)\.(attn|mlp)$", r"\1", name)  # U-ViT
    return {"time_embedding": "conv_in", "time_extra_emb": "pos_embed", "text": "pos_embed"}.get(
        name, name
    )


@lru_cache
def fine_costs(name: str) -> ChainCosts:
    """The finest units: 1 s is 1 TFLOP; bytes in bf16 for one sample."""
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.profile.roofline import Device, Roofline
    from model_specs import load_backbone

    device = Device("1 TFLOP/s", {"bfloat16": 1e12}, 1e30, 0)
    roofline = Roofline(device, "bfloat16", 1.0, 1.0, launch_s=0.0)
    return analyse(load_backbone(name, OPTIONS[name]), [1], roofline).at(1)


def block_costs(name: str) -> ChainCosts:
    """Whole blocks."""
    return grouped(fine_costs(name), block_of)


def grouped(costs: ChainCosts, group: Callable[[str], str]) -> ChainCosts:
    """Neighbouring units of one group as one unit."""
    starts = [
        i
        for i, name in enumerate(costs.names)
        if i == 0 or group(name) != group(costs.names[i - 1])
    ]
    ends = [*starts[1:], len(costs.names)]
    unit = {i: k for k, (a, b) in enumerate(zip(starts, ends, strict=True)) for i in range(a, b)}

    def sums(column: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(column[a:b]) for a, b in zip(starts, ends, strict=True))

    return ChainCosts(
        tuple(group(costs.names[a]) for a in starts),
        sums(costs.forward_s),
        sums(costs.backward_s),
        tuple(map(int, sums(costs.parameters))),
        tuple(map(int, sums(costs.saved_bytes))),
        tuple(costs.boundary_bytes[a] for a in starts),
        tuple(SkipCost(unit[s.source], unit[s.destination], s.num_bytes) for s in costs.skips),
    )
