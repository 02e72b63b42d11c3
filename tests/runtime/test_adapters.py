"""LoRA beside frozen weights: bit for bit one process, and peft's own training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.adapters.attach import with_adapter
from megatron_pulse.adapters.choice import Adapter
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults
from megatron_pulse.runtime.stage import layer_seed
from tests.ranks import run_ranks
from tests.runtime.equality import (
    SEED,
    Case,
    Outcome,
    differences,
    join_pipeline,
    make_batches,
    mean_squared_error,
    merge,
    plan_of,
    references,
    split,
    train,
)

M = 3
ADAPTER = Adapter(4, 6.0, ("to_q", "to_v", "to_out.0", "mid_block.*.conv1", "conv_in", "linear_2"))
FOLD = Case("fold", M, dtype="float32", steps=2)
SEQUENTIAL = replace(FOLD, placement="sequential")
CASES: list[tuple[Case, int | None]] = [
    (FOLD, None),
    (replace(FOLD, recompute=2), 1),
    (SEQUENTIAL, 1),
    (SEQUENTIAL, None),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""


def unet() -> nn.Module:
    """A small UNet with attention and text."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(3)
    return UNet2DConditionModel(  # type: ignore[no-any-return]
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def inputs() -> dict[str, Tensor]:
    return {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3.0, 500.0]),
        "encoder_hidden_states": torch.randn(2, 5, 8),
    }


def chain() -> Backbone:
    return with_adapter(pulse.from_module(unet(), inputs()), ADAPTER)


def run_cases(cases: list[tuple[Case, int | None]]) -> list[Outcome]:
    """All of them on this rank."""
    torch.set_num_threads(1)
    config, group = join_pipeline()
    backbone, outcomes = chain(), []
    for case, delay in cases:
        if delay is not None:
            schedule = plan_of(backbone, case, 2).step(case.num_microbatches).schedule
            case = replace(case, schedule=split(schedule, delay))
        outcomes.append(train(backbone, case, config, group))
    torch.distributed.barrier()
    return outcomes


def by_peft(case: Case) -> dict[str, Tensor]:
    """Parameters after the same training of peft's module, under our names."""
    given: Any = LoraConfig(
        r=ADAPTER.rank,
        lora_alpha=ADAPTER.alpha,
        target_modules=r".*\.(to_q|to_v|to_out\.0|linear_2)|mid_block\..*\.conv1|conv_in",
    )
    backbone, module = chain(), inject_adapter_in_model(given, unet())
    named = {
        name.replace(".base_layer.", ".").replace(".default.", "."): parameter
        for name, parameter in module.named_parameters()
    }
    torch.manual_seed(SEED)
    ours = {n: p for layer in backbone.layers for n, p in layer.build(None).named_parameters()}
    assert ours.keys() == named.keys()
    assert {n for n, p in ours.items() if p.requires_grad} == {
        n for n, p in named.items() if p.requires_grad
    }
    with torch.no_grad():
        for name, parameter in named.items():
            generator = torch.Generator().manual_seed(layer_seed(SEED, name))
            noise = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(ours[name] + noise)
    optimizer = torch.optim.AdamW(
        [p for p in named.values() if p.requires_grad], lr=1e-2, foreach=False
    )
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            result = module(
                batch["noisy"].float(), batch["timesteps"], batch["encoder_hidden_states"].float()
            )
            (mean_squared_error(result.sample, batch) / M).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_a_pipeline_with_lora_trains_as_peft_does() -> None:
    alone: list[tuple[Case, int | None]] = [(case.alone, None) for case, _ in CASES]
    expected = references(run_cases, alone)
    # Where a skip begins, plain torch adds gradients in another order.
    found = differences(expected[0].parameters, by_peft(CASES[0][0]))
    assert max(found.values(), default=0.0) < 1e-6, found
    ranks = run_ranks(2, run_cases, CASES)
    for i, (case, _) in enumerate(CASES):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses and len(got.losses) == 2 * M, case
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        assert all(g.abs().max() > 0 for g in got.gradients.values()), case
        assert all(".lora_" in name for name in got.gradients)


def test_targets_without_a_layer_are_refused() -> None:
    with pytest.raises(Faults, match="'to_qq' matches no linear layer.*did you mean to_q"):
        with_adapter(pulse.from_module(unet(), inputs()), Adapter(4, 4.0, ("to_qq", "to_k")))
