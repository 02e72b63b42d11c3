"""U-ViT and UNet, built from Megatron's modules, under every placement: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_pulse.backbone.chain import Backbone
from model_specs import load_backbone
from tests.ranks import run_ranks
from tests.runtime.equality import Case, Outcome, differences, join_pipeline, merge, train

OPTIONS: dict[str, dict[str, Any]] = {
    "uvit": {"depth": 8, "embed_dim": 16, "num_heads": 2, "image_size": 4, "in_channels": 1},
    "unet": {"sample_size": 8, "block_out_channels": "8,16", "norm_num_groups": 4},
    "unet-text": {
        "sample_size": 8,
        "block_out_channels": "8,16",
        "norm_num_groups": 4,
        "transformer_depth": "0,1",
        "cross_attention_dim": 6,
    },
}
NAMES = {"uvit": "uvit-tiny", "unet": "unet-tiny", "unet-text": "sd-tiny"}


def backbone(kind: str) -> Backbone:
    """A small backbone; each has an odd chain and a middle without skips."""
    return load_backbone(NAMES[kind], OPTIONS[kind])


def run_cases(kind: str, cases: list[Case]) -> list[Outcome]:
    config, group = join_pipeline()
    outcomes = [train(backbone(kind), case, config, group) for case in cases]
    torch.distributed.barrier()
    return outcomes


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_real_backbones_equal_one_process(kind: str, num_devices: int) -> None:
    cases = [
        Case(placement, m, dtype="float32", steps=2, recompute=m == num_devices)
        for placement in ("fold", "sequential", "interleaved")
        for m in (num_devices - 1, num_devices, 2 * num_devices + 1)
    ]
    (expected,) = run_ranks(1, run_cases, kind, cases)
    ranks = run_ranks(num_devices, run_cases, kind, cases, timeout_s=240)
    for i, case in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == expected[i].losses, case
        assert not differences(got.gradients, expected[i].gradients), case
        assert not differences(got.parameters, expected[i].parameters), case
        if case.placement == "fold":
            assert got.skip_bytes == 0
