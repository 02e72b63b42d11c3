"""Quantised frozen weights in whole runs: saved, resumed in another layout, exported, refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from diffusers import UNet2DConditionModel
from megatron.core import dist_checkpointing
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_pulse.adapters.choice import AdapterChoice
from megatron_pulse.adapters.files import read_adapter
from megatron_pulse.adapters.quantized_linear import quantize
from megatron_pulse.cli.main import main
from megatron_pulse.dataclass_flags import flag_faults
from megatron_pulse.diffusion.single_file import OriginalLayout
from megatron_pulse.integration.sampling import load_model
from model_specs import load_backbone, published_form
from tests.integration.runs import BASE, STEPS, Run, pipeline, run
from tests.integration.test_adapters import ADAPTER, flags, make_place
from tests.ranks import RanksFailed

NF4 = [*ADAPTER, "--pulse-quantization", "nf4"]
BLOCKS = ("down_blocks.", "mid_block.attentions.", "mid_block.resnets.", "up_blocks.")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline, pictures, and a run of two steps saved after each."""
    return make_place(tmp_path_factory.mktemp("nf4"))


@pytest.fixture(scope="module")
def trained(place: Path) -> Run:
    save = ["--save", str(place / "run"), "--save-interval", "1"]
    return run(2, *flags(place, *NF4, *save, *pipeline(2)), backbone="none")


def published(place: Path) -> dict[str, Tensor]:
    return load_file(place / "sd" / "unet" / "diffusion_pytorch_model.safetensors")


def require_held(weights: dict[str, Any], published: dict[str, Tensor]) -> None:
    """The quantised weights of a run are those that are published, all in blocks."""
    held = {name.removesuffix(".nf4") for name in weights if name.endswith(".nf4")}
    assert held and all(name.startswith(BLOCKS) for name in held)
    assert not held & weights.keys() and "time_embedding.linear_1.weight" in weights
    for name in held:
        integers, scales = quantize(published[name], "nf4")
        assert torch.equal(weights[f"{name}.nf4"], integers.float())
        assert torch.equal(weights[f"{name}.absmax"], scales.float())


def test_checkpoint_holds_the_adapter_alone_and_continues_in_another_layout(
    place: Path, trained: Run
) -> None:
    require_held(trained.weights, published(place))
    held = dist_checkpointing.load_tensors_metadata(str(place / "run" / "iter_0000002"))
    assert held and all(".lora_A." in name or ".lora_B." in name for name in held)
    rest = ["--load", str(place / "run"), "--ckpt-step", "1"]
    got = run(1, *flags(place, *NF4, *rest), backbone="none")
    assert got.losses == trained.losses[1:]
    assert all(torch.equal(got.weights[name], trained.weights[name]) for name in trained.weights)
    assert all(torch.equal(got.averages[name], trained.averages[name]) for name in got.averages)
    plain = run(1, *flags(place, *ADAPTER, "--train-iters", "1"), backbone="none")
    assert plain.losses != trained.losses[:1]


def test_bf16_run_keeps_the_scales_in_fp32(place: Path) -> None:
    once = [*NF4, "--bf16", "--train-iters", "1"]
    alone, two = (run(n, *flags(place, *once, *pipeline(n)), backbone="none") for n in (1, 2))
    assert alone.losses == two.losses
    assert all(torch.equal(alone.weights[name], two.weights[name]) for name in alone.weights)
    require_held(two.weights, {n: t.bfloat16() for n, t in published(place).items()})


def test_merged_model_has_the_published_weights_and_samples_the_quantised(
    place: Path, trained: Run, tmp_path: Path
) -> None:
    out = ["--load", str(place / "run"), "--raw", "--to"]
    assert main(["export", *out, str(tmp_path / "merged"), "--merge"]) == 0
    assert main(["export", *out, str(tmp_path / "lora")]) == 0
    factors = read_adapter(tmp_path / "lora").factors
    merged = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    for name, weight in published(place).items():
        layer = name.removesuffix(".weight")
        if (a := factors.get(f"{layer}.lora_A.weight")) is not None:
            weight = weight + 2.0 * factors[f"{layer}.lora_B.weight"] @ a
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-6)

    unet: Any = UNet2DConditionModel.from_pretrained(place / "sd" / "unet")
    for name, part in list(unet.named_modules()):
        if isinstance(part, nn.Linear) and name.startswith(BLOCKS):
            theirs = bnb.nn.Linear4bit(
                part.in_features, part.out_features, part.bias is not None, torch.float32,
                compress_statistics=False, quant_type="nf4",
            )  # fmt: skip
            theirs.load_state_dict(part.state_dict())
            unet.set_submodule(name, theirs.to("cpu"))
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_out.0"])
    unet = inject_adapter_in_model(config, unet)
    named = dict(unet.named_parameters())
    with torch.no_grad():
        for name, factor in factors.items():
            named[name.replace(".weight", ".default.weight")].copy_(factor)
    generator = torch.Generator().manual_seed(1)
    noisy, states = (torch.randn(s, generator=generator) for s in ((2, 4, 4, 4), (2, 5, 8)))
    times = torch.tensor([7.0, 400.0])
    model = load_model(place / "run", averaged=False)
    (field,) = set(model.backbone.batch_fields) - {"timesteps"}
    found = model.predict(noisy, times, {field: states})
    with torch.no_grad():
        expected = unet(noisy, times, states).sample
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_another_quantization_is_refused(place: Path, trained: Run) -> None:
    save = ["--save", str(place / "run"), "--train-iters", "3"]
    with pytest.raises(
        RanksFailed,
        match="in nf4, and those of this run in int8. Give --pulse-quant",
    ):
        run(1, *flags(place, *NF4[:-1], "int8", *save), backbone="none")
    with pytest.raises(RanksFailed, match="are in nf4, and those of this run not quantised"):
        run(1, *flags(place, *ADAPTER, *save), backbone="none")


def test_what_cannot_be_quantised_is_refused(place: Path) -> None:
    asked = ["--pulse-quantization", "int8"]
    with pytest.raises(RanksFailed, match="--pulse-quantization int8 is for an adapter"):
        run(1, *flags(place, *asked))
    family = [*BASE, *STEPS, *ADAPTER, *asked, "--pulse-train", "*"]
    with pytest.raises(RanksFailed) as refused:
        run(1, *family, backbone="unet")
    assert "quantised weights cannot be trained. Leave --pulse-train out" in str(refused.value)
    assert "of a diffusers folder, and unet-tiny has none" in str(refused.value)


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (fault,) = flag_faults(AdapterChoice("lora", quantization="nf4"))
    assert fault.startswith("--quantization nf4 needs bitsandbytes: pip install")
    assert not list(flag_faults(AdapterChoice("lora", quantization="int8")))


def in_float8(tensors: dict[str, Tensor], style: str) -> dict[str, Tensor]:
    """A ComfyUI file of ``tensors``: matrices in float8, with scales of a ``style`` or without."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith(".weight"):
            scale = tensor.abs().max() / 448 if style else torch.ones(())
            found[name] = (tensor / scale).to(torch.float8_e4m3fn)
            if style:
                found[f"{name.removesuffix('.weight')}.{style}"] = scale
    if style == "scale_weight":
        found["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return found


@pytest.mark.parametrize("style", ["", "scale_weight", "weight_scale"])
def test_a_file_in_float8_is_the_frozen_base(style: str, tmp_path: Path) -> None:
    """Its bytes are kept below the adapter; one in original names is read by its rows."""
    place = make_place(tmp_path)
    file = place / "sd" / "unet" / "diffusion_pytorch_model.safetensors"
    stored = in_float8(load_file(file), style)
    kind = stored
    if style == "scale_weight":  # in original names
        form = published_form(load_backbone(f"diffusers:{file.parent}"))
        assert form is not None
        kind = in_float8(OriginalLayout(form).write(load_file(file)), style)
        assert any(name.endswith("input_blocks.0.0.weight") for name in kind)
    save_file(kind, file, {"format": "pt"})
    given = [*ADAPTER, "--pulse-quantization", "fp8"]
    alone, two = (run(n, *flags(place, *given, *pipeline(n)), backbone="none") for n in (1, 2))
    assert alone.losses == two.losses
    held = {name.removesuffix(".fp8") for name in two.weights if name.endswith(".fp8")}
    assert held and all(name.startswith(BLOCKS) for name in held)
    for name in held:
        assert torch.equal(two.weights[f"{name}.fp8"], stored[name].view(torch.int8).float()), name
        scale = stored[f"{name.removesuffix('.weight')}.{style}"] if style else torch.ones(())
        assert torch.equal(two.weights[f"{name}.absmax"], scale.view(torch.int32).float().view(1))
    name = "time_embedding.linear_1.weight"
    scale = stored[f"time_embedding.linear_1.{style}"] if style else 1.0
    assert torch.equal(two.weights[name], stored[name].float() * scale)
