"""Captions to latents with a pipeline's encoders, and prompts to pictures."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.fields import Wanted, unencoded
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.microbatches import make_microbatch, noised_here
from megatron_pulse.diffusion.choice import Objective
from megatron_pulse.diffusion.noise import start_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.encoders.autoencoder import Autoencoder, posterior_noise, sampled
from megatron_pulse.encoders.pipeline import TextEncoders
from megatron_pulse.encoders.tokens import Tokenizers, digest_of
from model_specs.common.texts import SD
from tests.cli.test_data import make_vae
from tests.cli.test_weights import TINY as UNET
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_pipeline

TINY: dict[str, Any] = {**UNET, "sample_size": 4, "cross_attention_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny Stable Diffusion."""
    index = {
        "_class_name": "StableDiffusionPipeline",
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "vae": ["diffusers", "AutoencoderKL"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    root = make_pipeline(tmp_path_factory.mktemp("sd"), "clip", **index)
    make_vae(
        root / "vae", latent_channels=4, block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        scaling_factor=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    diffusers.UNet2DConditionModel(**TINY).save_pretrained(root / "unet")
    diffusers.DDIMScheduler(
        clip_sample=False, timestep_spacing="trailing", beta_schedule="scaled_linear"
    ).save_pretrained(root / "scheduler")
    return root


def backbone(folder: Path) -> list[str]:
    options = ("sample_size=4", f"text_length={LENGTH}")
    said = [word for option in options for word in ("--option", option)]
    return ["--module", f"diffusers:{folder / 'unet'}", *said[2:]]


def write(folder: Path, source: str, out: Path, *more: str) -> int:
    return main([
        "data", "write-latents", "--from", source, "--image-size", "8", "--encoders", str(folder),
        *backbone(folder), "--dtype", "fp32", "-o", str(out), *more,
    ])  # fmt: skip


def test_captions_as_the_backbone_reads_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = captioned_digits(tmp_path, 5), tmp_path / "latents"
    assert write(folder, source, out, "--shard-size", "2") == 0
    written = LatentFolder(out, verify=True)
    assert written.image_shape == (4, 4, 4) and written.pixel_size == (8, 8)
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    with torch.no_grad():
        states, null = theirs.encode_prompt("a dark digit three", "cpu", 1, True)
    assert torch.equal(written.conditioning(3)["context"], states[0])
    assert torch.equal(written.null_conditioning()["context"], null[0])
    made = json.loads((out / "meta.json").read_text())["layout"]["made_by"]["context"]
    for words in ("text_encoder last", "CLIPTextModel float32 sha256:", f"{LENGTH} tokens"):
        assert words in made
    vae = Autoencoder(folder / "vae")
    assert written.made_by["latent"] == vae.made_by() and "scale [0.5], shift" in vae.made_by()
    assert f"sha256:{digest_of(folder / 'vae')[7:]}" in vae.made_by()

    capsys.readouterr()
    assert main(["data", "info", f"latents:{out}"]) == 0
    said = capsys.readouterr().out
    assert "made by      latent: AutoencoderKL sha256:" in said and f"context: {made}" in said

    meta = out / "meta.json"  # as after a kill behind the first shard
    whole = {file.name: file.read_bytes() for file in out.iterdir()}
    content = json.loads(meta.read_text())
    content["shards"], content["complete"] = content["shards"][:1], False
    meta.write_text(json.dumps(content))
    capsys.readouterr()
    assert write(folder, source, out, "--shard-size", "2", "--encoders-dtype", "bf16") == 2
    said = capsys.readouterr().err
    assert "CLIPTextModel float32" in said and "CLIPTextModel bfloat16" in said
    assert write(folder, source, out, "--shard-size", "2") == 0
    assert "resuming after 2 of 5" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole


def test_stored_or_made_in_the_step_is_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Latents and states, token ids alone, and nothing ahead: the same microbatch, to the bit."""
    source = captioned_digits(tmp_path, 12)
    assert write(folder, source, tmp_path / "states") == 0
    more = ("--store-text", "tokens", "--posterior", "sample")
    assert write(folder, source, tmp_path / "tokens", *more) == 0
    shapes = {"context": (LENGTH, 8)}
    encoders, vae = TextEncoders(folder, SD, shapes), Autoencoder(folder / "vae")
    plain = Wanted((4, 4, 4), {"context": FieldSpec((LENGTH, 8))}, made_by=encoders.made_by())
    text = unencoded(plain, Tokenizers(folder, SD, shapes), SD.fields)
    both = unencoded(text, pixels=(vae.in_channels, vae.factor))
    latents = {"latent": vae.made_by()}
    batches = []
    for spec, wanted in (
        (f"latents:{tmp_path / 'states'}", replace(plain, made_by=plain.made_by | latents)),
        (f"latents:{tmp_path / 'tokens'}", replace(text, made_by=text.made_by | latents)),
        (source, both),
    ):
        data, _ = open_dataset(spec, wanted=wanted)
        items = [(i, 100 + i) for i in range(6)]
        batches.append(make_microbatch(data, items, DiffusionProcess(Objective.FLOW), 3, 0.5))
    stored, tokens, raw = batches
    for batch in (tokens, raw):
        states = [encoders.encode({name: ids[i] for name, ids in batch.items()}) for i in range(6)]
        assert torch.equal(torch.stack([row["context"] for row in states]), stored["context"])
    made = noised_here(raw, *vae.posterior(raw["pixels"]), DiffusionProcess(Objective.FLOW))
    assert all(torch.equal(value, stored[name]) for name, value in made.items())
    assert 0 < raw["dropped"].sum() < 6

    kept = LatentFolder(tmp_path / "tokens")
    assert kept.deviation(0) is None and kept.fields.keys() >= {"text_encoder_ids"}
    means = LatentFolder(tmp_path / "states")
    noise = posterior_noise(0, 2, 0, (4, 4, 4))
    assert torch.equal(kept.image(2), sampled(means.image(2), means.deviation(2), noise))
    capsys.readouterr()
    assert write(folder, source, tmp_path / "tokens", *more[:2]) == 2
    said = capsys.readouterr().err
    assert "deviates" in said and "a sample of each posterior" in said
    argv = ["--from", "digits8", "-o", str(tmp_path / "c"), "--posterior", "mean"]
    assert main(["data", "write-latents", *argv, "--store-text", "tokens"]) == 2
    said = capsys.readouterr().err
    assert "--posterior is of an autoencoder" in said and "--store-text is for --enc" in said


def test_what_a_folder_holds(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "encoders", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "component", "text_encoder", "tokenizer", "vae", "unet", "scheduler",
    ]  # fmt: skip
    assert "float32  context: last" in lines[1]
    assert "latents of 4 channels, 2 times smaller, scale [0.5], shift [0.0]" in lines[3]
    assert lines[-1] == "read by the folder's own UNet2DConditionModel"

    assert main(["data", "encoders", str(folder), *backbone(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in record["components"]}
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    assert parts["unet"]["num_parameters"] == unet.num_parameters()
    assert parts["vae"]["num_bytes"] == 4 * parts["vae"]["num_parameters"] > 0
    assert parts["tokenizer"]["read_as"] == f"{LENGTH} tokens"
    assert main(["data", "encoders", str(folder), "--backbone", "sd-v1.5"]) == 2
    assert f"make context {LENGTH}x8, the backbone reads 77x768" in capsys.readouterr().err

    index = {
        "_class_name": "SomePipeline", "text_encoder": ["transformers", "CLIPTextModel"],
        "vae": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None],
    }  # fmt: skip
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/config.json").write_text("{}")
    assert main(["data", "encoders", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "model.safetensors is missing" in said and "vae           AutoencoderKL" in said
    make_vae(tmp_path / "vae")
    assert main(["data", "encoders", str(tmp_path)]) == 0
    assert "latents of 2 channels, 1 times smaller" in capsys.readouterr().out
    assert "there is no such folder" in said and "what reads them is not known" in said
    assert main(["data", "encoders", str(tmp_path / "no"), "--option", "a=b"]) == 2
    assert "--option is for --backbone" in capsys.readouterr().err
    assert main(["data", "encoders", str(tmp_path / "no")]) == 2
    assert "model_index.json" in capsys.readouterr().err


def test_what_does_not_fit_is_said_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = captioned_digits(tmp_path, 3), tmp_path / "latents"
    argv = ["data", "write-latents", "--from", source, "--image-size", "8", "-o", str(out)]
    assert main([*argv, "--encoders", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no model_index.json" in said and "--backbone or --module" in said
    assert main([*argv, "--encoders", str(folder), "--backbone", "sd-v1.5"]) == 2
    assert "takes 4x64x64, and these images make 4x4x4" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("0.png", "1.png"):
        (bare / name).write_bytes((tmp_path / "captions" / name).read_bytes())
    assert write(folder, f"folder:{bare}", out) == 2
    assert f"folder:{bare} has no captions" in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture(scope="module")
def imported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert main(["import", "--from", str(folder), "--to", str(target)]) == 0
    return target


def test_prompts_give_the_pictures_of_the_pipeline(
    folder: Path, imported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from megatron_pulse.diffusion import grid

    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(grid, "save_grid", lambda images, *_: drawn.append(images))
    assert main([
        "sample", "--load", str(imported), "--raw", "--prompt", "a red bird", "--per-class", "2",
        "--negative-prompt", "old cat", "--encoders", str(folder), "--steps", "4",
        "--option", f"context_length={LENGTH}", "-o", str(tmp_path / "birds.png"),
    ]) == 0  # fmt: skip
    theirs = diffusers.StableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        ["a red bird"] * 2, negative_prompt=["old cat"] * 2, num_inference_steps=4,
        guidance_scale=2.0, latents=start_noise(0, range(2), (4, 4, 4)), output_type="pt",
    ).images  # fmt: skip
    torch.testing.assert_close(drawn[0] / 2 + 0.5, expected, rtol=0, atol=5e-7)
    assert drawn[0].std() > 0.01


def test_encoders_of_other_data_are_refused(
    folder: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_pulse.cli.models.encoding import require_same
    from megatron_pulse.faults import UserError

    out = tmp_path / "latents"
    assert write(folder, captioned_digits(tmp_path, 3).replace("captions", "folder", 1), out) == 0
    shapes = {"context": (LENGTH, 8)}
    same = TextEncoders(folder, SD, shapes)
    trained = Namespace(pulse_data=f"latents:{out}")
    require_same(same, trained)
    other = TextEncoders(make_pipeline(tmp_path / "other", ("clip", 8, 9)), SD, shapes)
    with pytest.raises(UserError) as caught:
        require_same(other, trained)
    for digest in (same.encoders[1].digest, other.encoders[1].digest):
        assert digest in str(caught.value)
    argv = ["sample", "--load", str(imported), "--classes", "1", "--encoders", str(folder)]
    assert main([*argv, "--negative-prompt", "x", "-o", str(tmp_path / "a.png")]) == 2
    assert "--encoders is for --prompt" in capsys.readouterr().err
