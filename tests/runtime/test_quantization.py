"""Quantised frozen weights below LoRA: bitsandbytes' arithmetic, in every layout bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.adapters.adapter import ATTENTION
from megatron_pulse.adapters.quantized_linear import (
    dequantize,
    is_quantized,
    num_values,
    quantize,
    quantized_linear,
)
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.partition.memory import effective_parameters
from megatron_pulse.planner.tune.fsdp.configs import FsdpConfigs
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.roofline import Roofline, custom_device
from megatron_pulse.runtime.stage import Stage
from megatron_pulse.tracing.from_module import with_quantization
from model_specs import load_backbone
from model_specs.common.attach_adapter import with_adapter
from tests.ranks import run_ranks
from tests.runtime.equality import (
    SEED,
    Case,
    Outcome,
    differences,
    leave_zero,
    make_batches,
    mean_squared_error,
    merge,
    plan_of,
    references,
    train_split,
)
from tests.runtime.test_adapters import OF_TRANSFORMER, of_transformer, transformer

M = 2
FOLD = Case("fold", M, dtype="float32", steps=2)
SEQUENTIAL = replace(FOLD, placement="sequential")
CASES: list[tuple[Case, int | None]] = [
    (FOLD, None),
    (FOLD, 1),
    (replace(SEQUENTIAL, recompute=2, selective=1), None),
]
"""With the number of backwards after which a weight gradient follows; None: whole ones."""
SHAPES = ((64, 128), (24, 8), (10, 16))


def by_bitsandbytes(linear: nn.Linear) -> Any:
    """The layer with the same weight in NF4; ``to`` quantises it."""
    dtype = linear.weight.dtype
    made = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=False,
        quant_type="nf4",
    )
    made.load_state_dict(linear.state_dict())
    return made.to("cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_map_of_nf4_is_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], dtype=dtype)
    held = quantize(linear.weight.detach(), "nf4")
    theirs = by_bitsandbytes(linear)
    assert torch.equal(held[0], theirs.weight)
    a = torch.randn(3, 5, shape[1], dtype=dtype, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    found = quantized_linear(a, *held, linear.bias.detach(), "nf4", shape)
    expected = theirs(b)
    assert torch.equal(found, expected)
    gradient = torch.randn(found.shape, dtype=dtype)
    found.backward(gradient)
    expected.backward(gradient)
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_parts_of_a_weight_are_quantised_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 75)
    whole = quantize(weight, "nf4")
    monkeypatch.setattr("megatron_pulse.adapters.quantized_linear.PART", 128)
    assert all(map(torch.equal, quantize(weight, "nf4"), whole))


def test_int8_has_the_integers_of_bitsandbytes() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40)
    weight[3] = 0.0
    integers, scales = quantize(weight, "int8")
    half = quantize(weight.half(), "int8")
    expected, rows, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight[:3].half())
    assert torch.equal(half[0][:3], expected)
    assert torch.equal(half[1][:3].view(torch.float32), rows)
    found = dequantize(integers, scales, "int8", (24, 40), torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((found - weight).abs() <= 0.5001 * step).all() and not found[3].any()
    inputs = torch.randn(2, 40, requires_grad=True)
    result = quantized_linear(inputs, integers, scales, None, "int8", (24, 40))
    (gradient,) = torch.autograd.grad(result.square().sum(), inputs)
    (by_autograd,) = torch.autograd.grad((inputs @ found.t()).square().sum(), inputs)
    torch.testing.assert_close(gradient, by_autograd)


def test_fp8_has_one_scale_and_the_rounding_of_torch() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40, dtype=torch.bfloat16)
    integers, scale = quantize(weight, "fp8")
    factor = scale.view(torch.float32)
    assert integers.nbytes == 24 * 40 and scale.numel() == 1
    expected = (weight.float() / factor).to(torch.float8_e4m3fn)
    assert torch.equal(integers.view(torch.float8_e4m3fn).float(), expected.float())
    assert expected.float().abs().max() == 448
    found = dequantize(integers, scale, "fp8", (24, 40), torch.float32)
    assert ((found - weight.float()).abs() <= weight.float().abs() / 16 + factor / 512).all()
    inputs = torch.randn(2, 40, requires_grad=True)
    result = quantized_linear(inputs, integers, scale, None, "fp8", (24, 40))
    (gradient,) = torch.autograd.grad(result.square().sum(), inputs)
    (by_autograd,) = torch.autograd.grad((inputs @ found.t()).square().sum(), inputs)
    torch.testing.assert_close(gradient, by_autograd)
    assert not dequantize(*quantize(0 * weight, "fp8"), "fp8", (24, 40), weight.dtype).any()


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_backward_keeps_the_quantised_weight_alone(kind: str) -> None:
    weight = torch.randn(32, 64)
    held, saved = quantize(weight, kind), []
    inputs = torch.randn(2, 64, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        quantized_linear(inputs, *held, None, kind, (32, 64))
    assert saved == [held[0].data_ptr(), held[1].data_ptr()]


def chain(kind: str = "nf4") -> Backbone:
    derived = pulse.from_module(transformer(), of_transformer())
    return with_adapter(with_quantization(derived, kind), OF_TRANSFORMER)


def run_cases(cases: list[tuple[Case, int | None]], kind: str = "nf4") -> list[Outcome]:
    return train_split(functools.partial(chain, kind), cases, 2)


def by_peft(backbone: Backbone, case: Case) -> dict[str, Tensor]:
    """Parameters after the same training by peft over bitsandbytes' layers, under our names."""
    module = transformer()
    for name, layer in list(module.named_modules()):
        if isinstance(layer, nn.Linear) and name.startswith("transformer_blocks."):
            module.set_submodule(name, by_bitsandbytes(layer))
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(ATTENTION))
    named = {}
    for name, parameter in inject_adapter_in_model(config, module).named_parameters():
        name = name.replace(".base_layer.", ".").replace(".default.", ".")
        held = name if parameter.is_floating_point() else f"{name}.nf4"
        named[held] = parameter
    torch.manual_seed(SEED)
    ours = {n: p for layer in backbone.layers for n, p in layer.build(None).named_parameters()}
    assert {name for name in ours if not name.endswith(".absmax")} == named.keys()
    holder = nn.Module()
    holder.named_parameters = lambda: named.items()  # type: ignore[assignment, method-assign]
    with torch.no_grad():
        for name, parameter in named.items():
            if ".lora_" in name:
                parameter.copy_(ours[name])
    leave_zero(holder)
    trained = [parameter for name, parameter in sorted(named.items()) if ".lora_" in name]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
    fields = {"hidden_states": "noisy", "timestep": "timesteps"}
    for step in range(case.steps):
        optimizer.zero_grad()
        for batch in make_batches(backbone, case, step):
            given = {
                name: batch[fields.get(name, name)].to(value.dtype)
                for name, value in of_transformer().items()
            }
            (mean_squared_error(module(**given).sample, batch) / M).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


def test_pipeline_over_nf4_trains_bit_for_bit_as_peft_over_bitsandbytes() -> None:
    alone: list[tuple[Case, int | None]] = [(case.alone, None) for case, _ in CASES]
    expected = references(run_cases, alone)
    without_scales = {n: p for n, p in expected[0].parameters.items() if "absmax" not in n}
    assert not differences(without_scales, by_peft(chain(), FOLD))
    ranks = run_ranks(2, run_cases, CASES)
    for i, (case, _) in enumerate(CASES):
        got, reference = merge([outcomes[i] for outcomes in ranks]), expected[i]
        assert got.losses == reference.losses and len(got.losses) == 2 * M, case
        assert not differences(got.gradients, reference.gradients), case
        assert not differences(got.parameters, reference.parameters), case
        assert got.gradients and all(".lora_" in name for name in got.gradients)


def test_whatever_is_outside_of_blocks_stays() -> None:
    names = [n for layer in chain("int8").layers for n, _ in layer.build(None).named_parameters()]
    held = {name.removesuffix(".int8") for name in names if name.endswith(".int8")}
    module = transformer()
    linear = {f"{n}.weight" for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    assert held == {name for name in linear if name.startswith("transformer_blocks.")}
    assert linear - held <= set(names)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_plan_has_the_bytes_of_each_stage_and_the_time_of_dequantising(kind: str) -> None:
    backbone, device = chain(kind), custom_device(1e9, 10, 0)
    plain = with_adapter(pulse.from_module(transformer(), of_transformer()), OF_TRANSFORMER)
    roofline = Roofline(device, "float32", launch_s=0.0, bandwidth_efficiency=1.0)
    profile, without = (analyse(each, [2], roofline) for each in (backbone, plain))
    costs = profile.at(2)
    assert costs.parameters == without.at(2).parameters
    assert costs.trained_parameters == without.at(2).trained_parameters
    assert costs.stored_parameters == effective_parameters(costs, 1.0)

    plan = plan_of(backbone, FOLD, 2)
    stored = plan.partition.per_stage(costs.stored_parameters)
    for stage, count in enumerate(stored):
        held = sum(p.nbytes for p in Stage(backbone, plan.routes, stage, SEED).parameters())
        assert 0 <= 4 * count - held < 4 * len(backbone.layers)
    configs = FsdpConfigs(profile, 2, 4, 1e9, [2])
    units = configs.bare(configs.starts(12))
    assert sum(unit.moved_bytes for unit in units) == 4 * sum(costs.stored_parameters)

    forward_s, backward_s = (
        [a - b for a, b in zip(with_it, without_it, strict=True)]
        for with_it, without_it in (
            (costs.forward_s, without.at(2).forward_s),
            (costs.backward_s, without.at(2).backward_s),
        )
    )
    for layer, more_s in zip(backbone.layers, forward_s, strict=True):
        held = [p for p in layer.build(None).parameters() if is_quantized(p)]
        least_s = sum(p.nbytes + 4 * num_values(p) for p in held) / 10e9  # read, and written
        assert more_s == pytest.approx(least_s, abs=1e-12) if kind == "nf4" else more_s >= least_s
    # Nothing before the first adapter has a backward pass.
    assert 0.5 * sum(forward_s) < sum(backward_s) < sum(forward_s)


def test_a_family_and_a_module_without_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="dit-tiny is a hand-written family.*diffusers:FOLDER"):
        with_quantization(load_backbone("dit-tiny"), "nf4")
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    derived = pulse.from_module(flat, {"input": torch.randn(2, 4)}, sample="input")
    with pytest.raises(ValueError, match="no linear layer in a list of blocks"):
        with_quantization(derived, "nf4")
