"""LoRA beside frozen weights: bit for bit one process, and peft's own training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.adapters.adapter import ATTENTION, Adapter
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.errors import Faults
from megatron_pulse.runtime.stage import layer_seed
from model_specs.common.attach_adapter import with_adapter
from tests.ranks import run_ranks
from tests.runtime.equality import (
    SEED,
    Case,
    Outcome,
    differences,
    make_batches,
    mean_squared_error,
    merge,
    references,
    train,
    train_split,
)

M = 2
OF_TRANSFORMER = Adapter(3, 6.0)
OF_UNET = Adapter(4, 6.0, ("to_q", "to_out.0", "mid_block.*.conv1", "conv_in", "linear_2"))
FOLD = Case("fold", M, dtype="float32", steps=2)
SEQUENTIAL = replace(FOLD, placement="sequential")
CASES: list[tuple[Case, int | None]] = [(FOLD, 1), (replace(SEQUENTIAL, recompute=2), None)]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""


def transformer() -> nn.Module:
    """A small SD3: two streams, no skips."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(3)
    return SD3Transformer2DModel(  # type: ignore[no-any-return]
        sample_size=8,
        num_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=8,
        pooled_projection_dim=8,
        in_channels=4,
        out_channels=4,
    )


def of_transformer() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 5, 8),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([3.0, 500.0]),
    }


def unet() -> nn.Module:
    """A small UNet in fp64, with attention and convolutions."""
    from diffusers import UNet2DModel

    torch.manual_seed(3)
    return UNet2DModel(  # type: ignore[no-any-return]
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()


def of_unet() -> dict[str, Tensor]:
    return {"sample": torch.randn(2, 3, 8, 8).double(), "timestep": torch.tensor([3.0, 500.0])}


def chain() -> Backbone:
    return with_adapter(pulse.from_module(transformer(), of_transformer()), OF_TRANSFORMER)


def run_cases(cases: list[tuple[Case, int | None]]) -> list[Outcome]:
    return train_split(chain, cases, 2)


def by_peft(backbone: Backbone, case: Case, module: nn.Module, config: Any) -> dict[str, Tensor]:
    """Parameters after the same training of peft's module, under our names."""
    named = {
        name.replace(".base_layer.", ".").replace(".default.", "."): parameter
        for name, parameter in inject_adapter_in_model(config, module).named_parameters()
    }
    torch.manual_seed(SEED)
    ours = {n: p for layer in backbone.layers for n, p in layer.build(None).named_parameters()}
    trained = [{n for n, p in each.items() if p.requires_grad} for each in (ours, named)]
    assert ours.keys() == named.keys() and trained[0] == trained[1]
    with torch.no_grad():
        for name, parameter in named.items():
            generator = torch.Generator().manual_seed(layer_seed(SEED, name))
            noise = 0.02 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(ours[name] + noise)
    parameters = [named[name] for name in sorted(trained[0])]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
    fields = {"hidden_states": "noisy", "sample": "noisy", "timestep": "timesteps"}
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            inputs = of_unet() if "sample" in module.forward.__code__.co_varnames else None
            given = {
                name: batch[fields.get(name, name)].to(value.dtype)
                for name, value in (inputs or of_transformer()).items()
            }
            (mean_squared_error(module(**given).sample, batch) / M).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_a_pipeline_with_lora_trains_bit_for_bit_as_peft_does() -> None:
    alone: list[tuple[Case, int | None]] = [(case.alone, None) for case, _ in CASES]
    expected = references(run_cases, alone)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(ATTENTION))
    assert not differences(expected[0].parameters, by_peft(chain(), FOLD, transformer(), config))
    ranks = run_ranks(2, run_cases, CASES)
    for i, (case, _) in enumerate(CASES):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses and len(got.losses) == 2 * M, case
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        assert all(".lora_" in name for name in got.gradients)


def test_convolutions_and_any_linear_layer_take_it() -> None:
    case = replace(FOLD.alone, dtype="float64")
    backbone = with_adapter(pulse.from_module(unet(), of_unet()), OF_UNET)
    pattern = r".*\.(to_q|to_out\.0|linear_2)|mid_block\..*\.conv1|conv_in"
    config = LoraConfig(r=4, lora_alpha=6, target_modules=pattern)
    expected = by_peft(backbone, case, unet(), config)
    got = train(backbone, case, None, None).parameters
    # Where a skip begins, plain torch adds gradients in another order.
    assert max(differences(got, expected).values(), default=0.0) < 1e-9


def test_targets_without_a_layer_are_refused() -> None:
    with pytest.raises(Faults, match="'to_qq' matches no linear layer.*did you mean to_q"):
        with_adapter(pulse.from_module(unet(), of_unet()), Adapter(4, 4.0, ("to_qq", "to_k")))
