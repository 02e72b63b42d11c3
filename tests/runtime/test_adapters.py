"""LoRA beside frozen weights: bit for bit one process, and peft's own training."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.tuners.lokr.layer import factorization
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.adapters.adapter import ATTENTION, Adapter
from megatron_pulse.adapters.kronecker import divide
from megatron_pulse.adapters.low_rank import AdapterDropout, seed_of
from megatron_pulse.adapters.low_rank import M as MAGNITUDE
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
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
    make_pipeline,
    mean_squared_error,
    merge,
    references,
    train,
    train_split,
)

M = 2
OF_TRANSFORMER = Adapter(3, 6.0)
DROPPING = Adapter(3, 6.0, (*ATTENTION, "text_embedder.linear_1"), dropout=0.3)
DORA = replace(OF_TRANSFORMER, type="dora")
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


def chain(adapter: Adapter = OF_TRANSFORMER) -> Backbone:
    return with_adapter(pulse.from_module(transformer(), of_transformer()), adapter)


def run_cases(
    cases: list[tuple[Case, int | None]], adapter: Adapter = OF_TRANSFORMER
) -> list[Outcome]:
    return train_split(functools.partial(chain, adapter), cases, 2)


def by_peft(backbone: Backbone, case: Case, module: nn.Module, config: Any) -> dict[str, Tensor]:
    """Parameters after the same training of peft's module, under our names.

    Its dropout draws from torch's generator, which has the seed of our masks before each.
    """
    named = {
        name.replace(".base_layer.", ".").replace(".default", ""): parameter
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
    key = 0

    def seeded(name: str, dropout: nn.Module, given: Any) -> None:
        layer = name.removesuffix(".lora_dropout.default")
        torch.manual_seed(seed_of(SEED, key, f"{layer}.weight"))

    for name, part in module.named_modules():
        if isinstance(part, nn.Dropout) and ".lora_dropout." in name:
            part.register_forward_pre_hook(functools.partial(seeded, name))
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            key = int(batch["positions"][0])
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


def test_dropout_has_the_bits_of_pefts_in_every_layout() -> None:
    embedders = frozenset({"embed.time_text_embed"})
    cases = [CASES[1], (replace(FOLD, selective=1, replicated=embedders), None)]
    cases += [(replace(FOLD, offload=1), 1)]
    run = functools.partial(run_cases, adapter=DROPPING)
    (expected,) = references(run, [(FOLD.alone, None)])
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.3, target_modules=list(DROPPING.targets))
    theirs = by_peft(chain(DROPPING), FOLD, transformer(), config)
    # Gradients of conditioning are summed in fp64 here, and the next step reads what they change.
    assert max(differences(expected.parameters, theirs).values(), default=0.0) < 1e-6
    ranks = run_ranks(2, run, cases)
    for i, (case, _) in enumerate(cases):
        found = differences(
            merge([outcomes[i] for outcomes in ranks]).parameters, expected.parameters
        )
        # Copies of an embedder sum its gradients in another order.
        assert max(found.values(), default=0.0) < (1e-6 if case.replicated else 1e-30), found
    (without,) = references(run_cases, [(FOLD.alone, None)])
    assert without.losses[0] != expected.losses[0] and without.losses[M] != expected.losses[M]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dora_has_the_bits_of_pefts_in_every_layout(dropout: float) -> None:
    adapter = replace(DORA, dropout=dropout)
    cases = CASES[:1] if dropout else CASES[1:]
    run = functools.partial(run_cases, adapter=adapter)
    (expected,) = references(run, [(FOLD.alone, None)])
    targets = list(ATTENTION)
    config = LoraConfig(
        r=3, lora_alpha=6, lora_dropout=dropout, target_modules=targets, use_dora=True
    )
    theirs = by_peft(chain(adapter), FOLD, transformer(), config)
    assert not differences(expected.parameters, theirs)
    magnitudes = [name for name in expected.gradients if name.endswith(MAGNITUDE)]
    assert 3 * len(magnitudes) == len(expected.gradients)
    ranks = run_ranks(2, run, cases)
    for i, (case, _) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        assert not differences(got.parameters, expected.parameters), case


def test_dropout_drops_the_given_share_by_layer_and_microbatch() -> None:
    dropout, inputs = AdapterDropout(0.25, (7, 0)), torch.full((64, 64), 3.0)
    first = dropout(inputs, "a")
    assert set(first.unique().tolist()) == {0.0, 4.0}
    assert abs((first == 0).double().mean() - 0.25) < 0.03
    assert torch.equal(dropout(inputs, "a"), first)
    halves = [dropout(inputs[:, :32], "a", (-1, 2, rank)) for rank in range(2)]
    assert torch.equal(torch.cat(halves, 1), first)
    others = [dropout(inputs, "b"), AdapterDropout(0.25, (7, 1))(inputs, "a")]
    others.append(AdapterDropout(0.25, (8, 0))(inputs, "a"))
    for other in others:  # independent: both drop 1 of 16
        assert abs(((first == 0) & (other == 0)).double().mean() - 1 / 16) < 0.02
    assert torch.equal(AdapterDropout(0.25, None)(inputs, "a"), inputs)


def test_dropout_is_off_without_training() -> None:
    backbone = chain(DROPPING)
    modules = [layer.build(None) for layer in backbone.layers]
    dropping = [module for module in modules if module.adapter_dropout is not None]
    assert len(dropping) == 4 and all(m.adapter_dropout.probability == 0.3 for m in dropping)
    case = replace(FOLD.alone, steps=1)
    pipeline, batches = make_pipeline(backbone, case, None, None), make_batches(backbone, case, 0)
    moved = [{**batch, "positions": batch["positions"] + 5} for batch in batches]
    bare = [{n: t for n, t in batch.items() if n != "positions"} for batch in batches]
    told = [pipeline.evaluate(each)[0].item() for each in (batches, moved, bare)]
    assert told[0] == told[1] == told[2]
    assert pipeline.step(batches)[0].item() != pipeline.step(moved)[0].item()
    with pytest.raises(BackboneError, match="give each microbatch the field 'positions'"):
        pipeline.step(bare)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_convolutions_and_any_linear_layer_take_it(kind: str) -> None:
    case = replace(FOLD.alone, dtype="float64")
    backbone = with_adapter(pulse.from_module(unet(), of_unet()), replace(OF_UNET, type=kind))
    pattern = r".*\.(to_q|to_out\.0|linear_2)|mid_block\..*\.conv1|conv_in"
    config = LoraConfig(r=4, lora_alpha=6, target_modules=pattern, use_dora=kind == "dora")
    expected = by_peft(backbone, case, unet(), config)
    got = train(backbone, case, None, None).parameters
    # Where a skip begins, plain torch adds gradients in another order.
    assert max(differences(got, expected).values(), default=0.0) < 1e-9


@given(st.integers(1, 5000), st.integers(1, 80) | st.just(-1))
def test_dimensions_are_divided_as_by_peft(size: int, factor: int) -> None:
    assert divide(size, factor) == factorization(size, factor)


LOKR = Adapter(2, 6.0, ("to_q", "to_out.0", "mid_block.*.conv1", "conv_in", "linear_2"), 0, "lokr")


@pytest.mark.parametrize("factor", [-1, 2])
def test_lokr_trains_as_pefts_does(factor: int) -> None:
    """Factors that are products and whole ones, of linear layers and of convolutions."""
    case = replace(FOLD.alone, dtype="float64")
    adapter = replace(LOKR, factor=factor)
    backbone = with_adapter(pulse.from_module(unet(), of_unet()), adapter)
    pattern = r".*\.(to_q|to_out\.0|linear_2)|mid_block\..*\.conv1|conv_in"
    config = LoKrConfig(r=2, alpha=6, target_modules=pattern, decompose_factor=factor)
    got = train(backbone, case, None, None).parameters
    kinds = {(name.rpartition(".")[2], p.dim()) for name, p in got.items() if ".lokr_" in name}
    assert {("lokr_w2_a", 2), ("lokr_w2_b", 2)} <= kinds
    assert factor == 2 or {("lokr_w2", 4), ("lokr_w2", 2)} & kinds
    assert max(differences(got, by_peft(backbone, case, unet(), config)).values()) < 1e-9


def test_a_pipeline_with_lokr_trains_bit_for_bit_as_one_process() -> None:
    adapter = replace(OF_TRANSFORMER, type="lokr")
    run = functools.partial(run_cases, adapter=adapter)
    (expected,) = references(run, [(FOLD.alone, None)])
    got = merge([outcomes[0] for outcomes in run_ranks(2, run, CASES[:1])])
    assert got.losses == expected.losses and got.gradients
    assert not differences(got.parameters, expected.parameters)


def test_targets_without_a_layer_are_refused() -> None:
    with pytest.raises(Faults, match="'to_qq' matches no linear layer.*did you mean to_q"):
        with_adapter(pulse.from_module(unet(), of_unet()), Adapter(4, 4.0, ("to_qq", "to_k")))
