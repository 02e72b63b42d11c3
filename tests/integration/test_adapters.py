"""LoRA in whole runs: saved without the frozen weights, resumed, exported, and begun with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_pulse.adapters import files
from megatron_pulse.adapters.adapter import FORMATS, Adapter
from megatron_pulse.adapters.choice import AdapterChoice
from megatron_pulse.adapters.files import read_adapter, write_adapter
from megatron_pulse.adapters.low_rank import A, B, M, factor_shapes, first_magnitude, is_factor
from megatron_pulse.adapters.merge import merged
from megatron_pulse.cli.main import main
from megatron_pulse.dataclass_flags import flag_faults
from megatron_pulse.errors import UserError
from model_specs import TrainedPart, load_backbone, trained_as
from tests.cli.small_diffusion import make_diffusion
from tests.integration.runs import BASE, Run, pipeline, run
from tests.ranks import RanksFailed

ADAPTER = ["--pulse-adapter", "lora", "--pulse-adapter-rank", "3", "--pulse-adapter-alpha", "6"]
ADAPTER += ["--pulse-adapter-target", "to_q", "--pulse-adapter-target", "to_out.0"]
ADAPTER += ["--pulse-adapter-dropout", "0.25"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a pipeline, pictures, and a run of two steps saved after each."""
    return make_place(tmp_path_factory.mktemp("lora"))


def make_place(folder: Path) -> Path:
    """Write a pipeline and pictures into ``folder``."""
    (folder / "sd").mkdir()
    make_diffusion(folder / "sd")
    (folder / "pictures").mkdir()
    for i in range(6):
        Image.new("RGB", (8, 8), (40 * i, 100, 20)).save(folder / "pictures" / f"{i}.png")
        (folder / "pictures" / f"{i}.txt").write_text("a cat")
    return folder


def flags(place: Path, *more: str) -> list[str]:
    sd = str(place / "sd")
    words = ["--pulse-module", f"diffusers:{sd}", "--pulse-option", "height=4"]
    words += ["--pulse-option", "width=4", "--pulse-encoders", sd, *BASE]
    words += ["--pulse-data", f"captions:{place / 'pictures'}", "--lr", "1e-2"]
    words += ["--global-batch-size", "4", "--train-iters", "2", "--pulse-ema-decay", "0.5"]
    return [*words, *more]


@pytest.fixture(scope="module")
def trained(place: Path) -> Run:
    save = ["--save", str(place / "run"), "--save-interval", "1"]
    return run(2, *flags(place, *ADAPTER, *save, *pipeline(2)), backbone="none")


def folder_of(place: Path, step: int) -> Path:
    return place / "run" / f"iter_{step:07d}"


def test_a_checkpoint_holds_the_adapter_alone_and_continues_in_another_layout(
    place: Path, trained: Run
) -> None:
    held = dist_checkpointing.load_tensors_metadata(str(folder_of(place, 2)))
    assert held and all(".lora_A." in name or ".lora_B." in name for name in held)
    rest = ["--load", str(place / "run"), "--ckpt-step", "1"]
    got = run(1, *flags(place, *ADAPTER, *rest), backbone="none")
    assert got.losses == trained.losses[1:]
    assert all(torch.equal(got.weights[name], trained.weights[name]) for name in trained.weights)
    assert all(torch.equal(got.averages[name], trained.averages[name]) for name in got.averages)


def test_another_adapter_or_other_weights_are_refused(
    place: Path, trained: Run, tmp_path: Path
) -> None:
    save = ["--save", str(place / "run"), "--train-iters", "3"]
    with pytest.raises(RanksFailed, match="lora of rank 3.*trains lora of rank 4"):
        run(1, *flags(place, *ADAPTER, *save, "--pulse-adapter-rank", "4"), backbone="none")
    with pytest.raises(RanksFailed, match="this run trains no adapter"):
        run(1, *flags(place, *save), backbone="none")
    with pytest.raises(RanksFailed, match="alpha 6, dropout 0.25 on.*alpha 6, dropout 0.5 on"):
        run(1, *flags(place, *ADAPTER, *save, "--pulse-adapter-dropout", "0.5"), backbone="none")
    weights = place / "sd" / "unet" / "diffusion_pytorch_model.safetensors"
    kept = tmp_path / "kept.safetensors"
    shutil.copy(weights, kept)
    try:
        tensors = load_file(weights)
        tensors["conv_out.weight"] *= 1.001
        save_file(tensors, weights, {"format": "pt"})
        with pytest.raises(RanksFailed, match="they have changed"):
            run(1, *flags(place, *ADAPTER, *save), backbone="none")
        out = ["--to", str(tmp_path / "out")]
        assert main(["export", "--load", str(place / "run"), *out]) == 2
    finally:
        shutil.copy(kept, weights)
    assert not (tmp_path / "out").exists()


def test_a_recipe_with_another_adapter_is_refused_before_anything_is_planned(
    place: Path, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "run", tmp_path / "out" / "checkpoints")
    text = f"""
        output = "{tmp_path}/out"
        model = {{ weights = "{place}/sd", options = {{ height = 4, width = 4 }} }}
        data = {{ source = "captions:{place}/pictures" }}
        encoders = {{ folder = "{place}/sd" }}
        optimizer = {{ lr = 1e-2 }}
        training = {{ batch_size = 4, steps = 3 }}
        parallel = {{ devices = 1 }}
    """
    (tmp_path / "whole.toml").write_text(text)
    (tmp_path / "other.toml").write_text(f'{text}\nadapter = {{ type = "lora", rank = 4 }}')
    for name, ours in (("whole", "no adapter"), ("other", "lora of rank 4")):
        assert main(["train", str(tmp_path / f"{name}.toml"), "--print"]) == 2
        told = capsys.readouterr().err
        assert "it trains lora of rank 3, alpha 6, dropout 0.25 on to_q, to_out.0" in told
        assert f"but this run trains {ours}" in told and "another output" in told, told


def predict(unet: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    sample, states = (torch.randn(s, generator=generator) for s in ((2, 4, 4, 4), (2, 5, 8)))
    with torch.no_grad():
        return unet(sample, torch.tensor([7, 400]), states).sample  # type: ignore[no-any-return]


def test_every_format_predicts_as_the_merged_model_does(
    place: Path, trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from peft import PeftModel

    def export(name: str, *words: str) -> Path:
        to = tmp_path / name
        assert main(["export", "--load", str(place / "run"), "--to", str(to), *words]) == 0
        return to

    merged = UNet2DConditionModel.from_pretrained(export("merged", "--merge"))
    expected = predict(merged)
    base = UNet2DConditionModel.from_pretrained(place / "sd" / "unet")
    assert (expected - predict(base)).abs().max() > 1e-4
    for name in ("diffusers", "kohya"):
        pipe = StableDiffusionPipeline.from_pretrained(place / "sd", safety_checker=None)
        pipe.load_lora_weights(str(export(name, "--adapter-format", name)))
        torch.testing.assert_close(predict(pipe.unet), expected, atol=1e-6, rtol=1e-6)
    by_peft = PeftModel.from_pretrained(base, str(export("peft", "--adapter-format", "peft")))
    torch.testing.assert_close(predict(by_peft), expected, atol=1e-6, rtol=1e-6)
    whole = export("whole", "--merge", "--pipeline")
    assert torch.equal(predict(StableDiffusionPipeline.from_pretrained(whole).unet), expected)
    assert main(["export", "--load", str(place / "run"), "--to", str(tmp_path / "x"),
                 "--pipeline"]) == 2  # fmt: skip
    assert "add --merge" in capsys.readouterr().err

    card = (tmp_path / "diffusers" / "README.md").read_text()
    assert (
        "lora of rank 3, alpha 6, dropout 0.25 on to_q, to_out.0" in card
        and "load_lora_weights" in card
    )
    averages = {name: value for name, value in trained.averages.items()}
    for name in ("diffusers", "kohya", "peft"):
        found = read_adapter(tmp_path / name)
        assert (found.rank, found.alpha) == (3, 6.0)
        layers = {name.rpartition(".lora_")[0] for name in averages}
        factors = found.named_as(layers).factors
        assert factors.keys() == averages.keys()
        assert all(torch.equal(factors[key], averages[key]) for key in averages)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_dora_predict_as_the_merged_model_does(
    place: Path, kind: str, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from peft import PeftModel

    base = UNet2DConditionModel.from_pretrained(place / "sd" / "unet")
    weights = base.state_dict()
    factors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name in ("conv_in", "mid_block.attentions.0.proj_in", "time_embedding.linear_1"):
        weight = weights[f"{name}.weight"]
        shapes = factor_shapes(weight, 2)
        for factor, shape in zip((A, B), shapes, strict=True):
            factors[f"{name}.{factor}"] = torch.randn(shape, generator=generator)
        magnitude = first_magnitude(weight, None, weight.device).detach()
        factors[f"{name}.{M}"] = torch.rand(magnitude.shape, generator=generator) + 0.5
    adapter = Adapter(2, 3.0, type="dora")
    write_adapter(tmp_path / "a", kind, adapter, factors, "UNet2DConditionModel")
    found = read_adapter(tmp_path / "a")
    assert (found.type, found.rank, found.alpha) == ("dora", 2, 3.0)
    again = found.named_as([name.removesuffix(".weight") for name in weights]).factors
    assert again.keys() == factors.keys()
    assert all(torch.equal(again[name], factors[name]) for name in factors)
    expected = UNet2DConditionModel.from_pretrained(place / "sd" / "unet")
    expected.load_state_dict({**weights, **merged(weights, factors, adapter.scale)})
    difference = predict(base) - predict(expected)
    assert difference.abs().max() > 1e-3
    if kind == "kohya":  # diffusers leaves dora_scale out
        stored = load_file(tmp_path / "a" / "pytorch_lora_weights.safetensors")
        out = len(weights["conv_in.weight"])
        assert stored["lora_unet_conv_in.dora_scale"].shape == (out, 1, 1, 1)
        assert stored["lora_unet_time_embedding_linear_1.dora_scale"].dim() == 2
        return
    if kind == "peft":
        model: Any = PeftModel.from_pretrained(base, str(tmp_path / "a"))
    else:
        pipe = StableDiffusionPipeline.from_pretrained(place / "sd", safety_checker=None)
        pipe.load_lora_weights(str(tmp_path / "a"))
        model = pipe.unet
    torch.testing.assert_close(predict(model), predict(expected), atol=1e-5, rtol=1e-5)


def by_lycoris(weight: Tensor, layer: str, stored: dict[str, Tensor]) -> Tensor:
    """Weight with a LyCORIS file's effect, by the rules of ComfyUI."""
    parts = {n.removeprefix(f"{layer}."): t for n, t in stored.items() if n.startswith(f"{layer}.")}
    whole = parts.get("lokr_w2")
    scale = 1.0 if whole is not None else parts["alpha"].item() / len(parts["lokr_w2_b"])
    if whole is None:
        whole = parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    change = torch.kron(parts["lokr_w1"], whole.flatten(1)).view(weight.shape)
    return weight + scale * change


def test_a_run_of_lokr_resumes_and_its_files_are_read_by_others(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import UNet2DConditionModel
    from peft import PeftModel

    given = ["--pulse-adapter", "lokr", "--pulse-adapter-rank", "2", "--pulse-adapter-alpha", "5"]
    for target in ("to_q", "to_out.0", "conv1"):
        given += ["--pulse-adapter-target", target]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    whole = run(2, *flags(place, *given, *save, *pipeline(2)), backbone="none")
    rest = ["--load", str(tmp_path / "run"), "--ckpt-step", "1"]
    got = run(1, *flags(place, *given, *rest), backbone="none")
    assert got.losses == whole.losses[1:]
    assert all(torch.equal(got.weights[name], whole.weights[name]) for name in whole.weights)

    words = ["export", "--load", str(tmp_path / "run"), "--raw"]
    for name, more in {
        "merged": ["--merge"],
        "peft": [],
        "kohya": ["--adapter-format", "kohya"],
    }.items():
        assert main([*words, *more, "--to", str(tmp_path / name)]) == 0
    assert main([*words, "--adapter-format", "diffusers", "--to", str(tmp_path / "x")]) == 2
    assert "diffusers reads no LoKr" in capsys.readouterr().err
    merged = UNet2DConditionModel.from_pretrained(tmp_path / "merged")
    base = UNet2DConditionModel.from_pretrained(place / "sd" / "unet")
    assert (predict(merged) - predict(base)).abs().max() > 1e-4
    weights = dict(base.state_dict())
    stored = load_file(tmp_path / "kohya" / "pytorch_lora_weights.safetensors")
    assert any(n.endswith("lokr_w2") for n in stored) and any("lokr_w2_a" in n for n in stored)
    for name, expected in merged.state_dict().items():
        layer = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
        found = weights[name]
        if f"{layer}.alpha" in stored:
            found = by_lycoris(found, layer, stored)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "peft"))
    torch.testing.assert_close(predict(by_peft), predict(merged), atol=1e-6, rtol=1e-6)

    layers = [name.removesuffix(".weight") for name in weights]
    trained = {n: t for n, t in whole.weights.items() if ".lokr_" in n}
    for name in ("peft", "kohya"):
        read = read_adapter(tmp_path / name)
        assert (read.type, read.rank, read.alpha, read.factor) == ("lokr", 2, 5.0, -1)
        factors = read.named_as(layers).factors
        assert factors.keys() == trained.keys()
        for key, tensor in trained.items():
            torch.testing.assert_close(factors[key], tensor, atol=0, rtol=1e-6)
    begin = ["--pulse-adapter", "lokr", "--pulse-adapter-weights", str(tmp_path / "peft")]
    more = run(1, *flags(place, *begin, "--train-iters", "1"), backbone="none")
    assert more.losses[0] != whole.losses[0]
    stored["lora_unet_conv_in.lokr_t2"] = torch.ones(2, 2, 3, 3)
    save_file(stored, tmp_path / "odd.safetensors")
    with pytest.raises(UserError, match="lokr_t2 is neither a factor nor an alpha"):
        read_adapter(tmp_path / "odd.safetensors")


def test_lokr_of_a_family_is_refused_and_so_is_dropout() -> None:
    part = TrainedPart(adapter=Adapter(type="lokr").to_record())
    with pytest.raises(ValueError, match="dit-tiny is a hand-written family, which takes no lokr"):
        trained_as(load_backbone("dit-tiny"), part)
    for choice in (
        AdapterChoice("lokr", adapter_dropout=0.1),
        AdapterChoice("lora", adapter_factor=2),
    ):
        (fault,) = flag_faults(choice)
        assert "lokr" in fault


def test_a_run_begins_with_an_adapter_file(place: Path, trained: Run, tmp_path: Path) -> None:
    to = ["--to", str(tmp_path / "a.safetensors"), "--raw", "--adapter-format", "kohya"]
    assert main(["export", "--load", str(place / "run"), "--iteration", "1", *to]) == 0
    begin = ["--pulse-adapter", "lora", "--pulse-adapter-weights", to[1], "--train-iters", "1"]
    got = run(2, *flags(place, *begin, *pipeline(2)), backbone="none")
    begin += ["--pulse-adapter-dropout", "0.25"]  # kohya's files hold none
    fresh = run(2, *flags(place, *ADAPTER, "--train-iters", "1", *pipeline(2)), backbone="none")
    assert fresh.losses == trained.losses[:1] and got.losses != fresh.losses
    assert got.weights.keys() == fresh.weights.keys()
    with pytest.raises(RanksFailed, match="has rank 3, not 5"):
        run(1, *flags(place, *begin, "--pulse-adapter-rank", "5"), backbone="none")


def test_files_that_hold_no_adapter_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {"unet.a.lora_A.weight": torch.ones(2, 3), "unet.b.lora_A.weight": torch.ones(3, 3)}
    save_file({**tensors, "unet.b.lora_B.weight": torch.ones(3, 3), "odd": torch.ones(1)}, file)
    with pytest.raises(UserError) as refused:
        read_adapter(file)
    for fault in ("odd is neither", "a.lora_B.weight is missing", "ranks 2, 3"):
        assert fault in str(refused.value)
    save_file({"conv_in.weight": torch.ones(2, 3)}, file)
    with pytest.raises(UserError, match="it holds 1 tensor.s., such as conv_in.weight"):
        read_adapter(file)
    with pytest.raises(UserError, match="no such file"):
        read_adapter(tmp_path / "none")
    (tmp_path / "peft").mkdir()
    config = {"r": 2, "lora_alpha": 4, "use_dora": True, "use_rslora": True}
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {"base_model.model.a.lora_A.weight": torch.ones(2, 3),
         "base_model.model.a.lora_B.weight": torch.ones(3, 2)},
        tmp_path / "peft" / "adapter_model.safetensors",
    )  # fmt: skip
    with pytest.raises(UserError) as refused:
        read_adapter(tmp_path / "peft")
    for fault in ("use_rslora is unsupported", "a.lora_magnitude_vector.weight is missing"):
        assert fault in str(refused.value)


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, opened = tmp_path / "a.safetensors", list[Any]()

    def counting(*given: Any) -> Any:
        opened.append(given)
        return safe_open(*given)

    monkeypatch.setattr(files, "safe_open", counting)
    for rank in (2, 3):
        factors = {"a.lora_A.weight": torch.ones(rank, 3), "a.lora_B.weight": torch.ones(3, rank)}
        write_adapter(file, "diffusers", Adapter(rank, 1.0), factors, "UNet2DModel")
        choice = AdapterChoice("lora", adapter_weights=str(file))
        assert not list(flag_faults(choice)) and choice.record is not None
        assert choice.record["rank"] == read_adapter(file).rank == rank
    assert len(opened) == 2


def test_a_family_trains_it_over_tensors_and_diffusers_predicts_the_same(tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    from tests.integration.test_families import FAMILIES, write_latents
    from tests.integration.test_process import write_pipeline

    given = write_pipeline(tmp_path / "published", "sd3")
    weights = tmp_path / "published" / "transformer" / "diffusion_pytorch_model.safetensors"
    drawn = torch.Generator().manual_seed(0)
    save_file(  # gates and heads begin at zero, and would hide the adapter
        {name: tensor + 0.05 * torch.randn(tensor.shape, generator=drawn)
         for name, tensor in load_file(weights).items()},
        weights,
        {"format": "pt"},
    )  # fmt: skip
    assert main(["import", *given, "--to", str(tmp_path / "start")]) == 0
    write_latents(tmp_path / "latents", FAMILIES["sd3"])
    words = ["--pulse-backbone", "sd3-tiny", "--pulse-data", f"latents:{tmp_path / 'latents'}"]
    words += ["--global-batch-size", "4", "--lr", "1e-2", "--pulse-ema-decay", "0.5"]
    words += ["--pulse-adapter", "dora", "--pulse-adapter-rank", "3"]
    begin = ["--pretrained-checkpoint", str(tmp_path / "start")]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    shards = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    words += ["--train-iters", "3"]
    got = run(
        4, *words, *begin, *shards, *pipeline(2), *save, "--exit-interval", "2", backbone="none"
    )
    alone = run(1, *words, *begin, backbone="none")
    lora = ["--pulse-adapter", "lora", "--train-iters", "1"]
    plain = run(1, *words, *begin, *lora, backbone="none")
    assert alone.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)  # an adapter without effect
    assert got.losses == pytest.approx(alone.losses[:2], rel=1e-5) and all(got.grad_norms)
    assert got.grad_norms == pytest.approx(alone.grad_norms[:2], rel=1e-4)
    held = dist_checkpointing.load_tensors_metadata(str(folder_of(tmp_path, 2)))
    assert {name for name in held if not is_factor(name)} == {"pos_embed.pos_embed"}  # a buffer
    (tmp_path / "start").rename(tmp_path / "moved")
    with pytest.raises(RanksFailed, match="holds none: give their folder: --pretrained-checkpoint"):
        run(1, *words, *save, backbone="none")
    begin = ["--pretrained-checkpoint", str(tmp_path / "moved")]
    again = run(1, *words, *begin, *save, backbone="none")
    assert again.losses == pytest.approx(alone.losses[2:], rel=1e-5)
    branch = run(1, *words, *begin, "--load", save[1], "--ckpt-step", "2", backbone="none")
    assert branch.losses == again.losses

    (tmp_path / "moved").rename(tmp_path / "kept")  # the adapter's files need no frozen weights
    export = ["export", "--load", save[1], "--to"]
    assert main([*export, str(tmp_path / "lora")]) == 0
    merge = [*export, str(tmp_path / "merged"), "--merge"]
    assert main(merge) == 2 and not (tmp_path / "merged").exists()
    assert main([*merge, "--frozen-weights", str(tmp_path / "kept")]) == 0
    torch.manual_seed(0)
    model = SD3Transformer2DModel.from_pretrained(tmp_path / "published" / "transformer")
    merged = SD3Transformer2DModel.from_pretrained(tmp_path / "merged")
    size = merged.config.sample_size
    inputs = {
        "hidden_states": torch.randn(2, merged.config.in_channels, size, size),
        "encoder_hidden_states": torch.randn(2, 5, merged.config.joint_attention_dim),
        "pooled_projections": torch.randn(2, merged.config.pooled_projection_dim),
        "timestep": torch.tensor([7.0, 400.0]),
    }
    with torch.no_grad():
        before, expected = (each(**inputs).sample for each in (model, merged))
        file = "pytorch_lora_weights.safetensors"
        model.load_lora_adapter(str(tmp_path / "lora"), prefix="transformer", weight_name=file)
        found = model(**inputs).sample
    assert (before - expected).abs().max() > 1e-5
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
