"""Captions to latents with a pipeline's encoders, and prompts to pictures."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.fields import WantedFields, unencoded
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.microbatches import make_microbatch, noised_here
from megatron_pulse.diffusion.noise import start_noise
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.encoders.autoencoder import Autoencoder, posterior_noise, sampled
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.tokens import Tokenizers, digest_of
from model_specs.common.text_recipes import SD
from tests.cli.small_diffusion import backbone, make_diffusion
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_pipeline
from tests.reference import unsealed_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_diffusion(tmp_path_factory.mktemp("sd"))


def write(folder: Path, source: str, out: Path, *more: str) -> int:
    return main([
        "data", "write-latents", "--from", source, "--image-size", "8", "--encoders", str(folder),
        *backbone(folder), "--dtype", "fp32", "-o", str(out), *more,
    ])  # fmt: skip


def test_write_latents_encodes_captions_for_the_backbone(
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
    content = unsealed_record(meta)
    content["shards"], content["complete"] = content["shards"][:1], False
    meta.write_text(json.dumps(content))
    capsys.readouterr()
    assert write(folder, source, out, "--shard-size", "2", "--encoders-dtype", "bf16") == 2
    said = capsys.readouterr().err
    assert "CLIPTextModel float32" in said and "CLIPTextModel bfloat16" in said
    assert write(folder, source, out, "--shard-size", "2") == 0
    assert "resuming after 2 of 5" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole


def test_stored_states_equal_states_of_the_step(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Latents and states, token ids alone, and nothing ahead: the same microbatch, to the bit."""
    source = captioned_digits(tmp_path, 12)
    assert write(folder, source, tmp_path / "states") == 0
    more = ("--store-text", "tokens", "--posterior", "sample")
    assert write(folder, source, tmp_path / "tokens", *more) == 0
    shapes = {"context": (LENGTH, 8)}
    encoders, vae = TextEncoders(folder, SD, shapes), Autoencoder(folder / "vae")
    plain = WantedFields((4, 4, 4), {"context": FieldSpec((LENGTH, 8))}, made_by=encoders.made_by())
    text = unencoded(plain, Tokenizers(folder, SD, shapes), SD.fields)
    both = unencoded(text, pixels=(vae.in_channels, 4 * vae.factor, 4 * vae.factor))
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
    assert "--posterior needs an autoencoder" in said and "--store-text is for --enc" in said


def test_encoders_lists_a_folder(
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
    assert f"make context {LENGTH}x8, but the backbone reads 77x768" in capsys.readouterr().err

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
    assert "there is no such folder" in said and "the backbone that reads them is not known" in said
    assert main(["data", "encoders", str(tmp_path / "no"), "--option", "a=b"]) == 2
    assert "--option is for --backbone" in capsys.readouterr().err
    assert main(["data", "encoders", str(tmp_path / "no")]) == 2
    assert "model_index.json" in capsys.readouterr().err


def test_write_latents_refuses_misfits_before_writing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = captioned_digits(tmp_path, 3), tmp_path / "latents"
    argv = ["data", "write-latents", "--from", source, "--image-size", "8", "-o", str(out)]
    assert main([*argv, "--encoders", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no model_index.json" in said and "--backbone or --module" in said
    assert main([*argv, "--encoders", str(folder), "--backbone", "sd-v1.5"]) == 2
    assert "takes 4x64x64, and these images make 4x4x4" in capsys.readouterr().err
    half = tmp_path / "half"
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("vae"))
    assert write(half, source, out) == 2
    assert "vae: there is no such folder, but model_index.json names it" in capsys.readouterr().err
    profile = ["profile", *backbone(folder), "--encoders", str(half), "--preset", "A100-80GB"]
    assert main([*profile, "-o", str(tmp_path / "costs.json")]) == 2
    assert "vae: there is no such folder" in capsys.readouterr().err
    assert main([*profile, "--components", "text", "-o", str(tmp_path / "costs.json")]) == 2
    assert "has no folder 'text'" in capsys.readouterr().err
    alone = ["--components", "text_encoder", "-o", str(tmp_path / "costs.json")]
    assert main([*profile, *alone]) == 0 and "text_encoder" in capsys.readouterr().out
    index = json.loads((half / "model_index.json").read_text())
    del index["vae"]
    (half / "model_index.json").write_text(json.dumps(index))
    assert write(half, source, out) == 2
    assert "has no autoencoder: give one as --vae" in capsys.readouterr().err
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


def test_import_says_how_long_texts_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", "--from", str(folder), "--to", str(tmp_path / "a")]) == 0
    assert f"--pulse-option context_length={LENGTH}" in capsys.readouterr().out
    assert main(["import", "--from", str(folder / "unet"), "--to", str(tmp_path / "b")]) == 0
    assert "context_length" not in capsys.readouterr().out
    drawn = str(tmp_path / "a.png")
    argv = ["sample", "--load", str(tmp_path / "a"), "--prompt", "a red bird", "--steps", "1"]
    assert main([*argv, "--encoders", str(folder), "-o", drawn]) == 0  # of the same length


def test_texts_of_a_module_are_as_long_as_its_pipeline_makes_them(folder: Path) -> None:
    from megatron_pulse.encoders.tokens import misfits
    from model_specs import load_backbone, text_recipe, with_texts_of

    name, one = f"diffusers:{folder}", "diffusers:UNet2DConditionModel"
    for each in (name, f"{name}/unet"):
        backbone = load_backbone(each)
        assert backbone.batch_fields["context"].shape[0] == LENGTH
    again = load_backbone(backbone.record["name"], backbone.record["options"])
    assert again.batch_fields["context"].shape[0] == LENGTH
    assert with_texts_of(name, {"text_length": "5"}) == {"text_length": "5"}
    assert with_texts_of(one, {}, folder) == {"text_length": str(LENGTH)}
    assert with_texts_of("diffusers:PixArtTransformer2DModel", {}, folder) == {}  # it cuts them
    recipes = [
        text_recipe(own, load_backbone(own, options))
        for own, options in ((name, {}), ("sd-tiny", {}), ("pixart-tiny", {}), ("hunyuan-tiny", {}))
    ]
    told = ("(text_length=N)", "(context_length=N)", "(caption_length=N)", "no option of this")
    for recipe, said in zip(recipes, told, strict=True):
        assert recipe is not None and said in misfits(recipe)


def test_encoders_of_other_data_are_refused(
    folder: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_pulse.errors import UserError
    from megatron_pulse.integration.training_encoders import require_same_encoders

    out = tmp_path / "latents"
    assert write(folder, captioned_digits(tmp_path, 3).replace("captions", "folder", 1), out) == 0
    shapes = {"context": (LENGTH, 8)}
    same = TextEncoders(folder, SD, shapes)
    trained = Namespace(pulse_data=f"latents:{out}")
    require_same_encoders(same, trained)
    other = TextEncoders(make_pipeline(tmp_path / "other", ("clip", 8, 9)), SD, shapes)
    with pytest.raises(UserError) as caught:
        require_same_encoders(other, trained)
    for digest in (same.encoders[1].digest, other.encoders[1].digest):
        assert digest in str(caught.value)
    argv = ["sample", "--load", str(imported), "--classes", "1", "--encoders", str(folder)]
    assert main([*argv, "--negative-prompt", "x", "-o", str(tmp_path / "a.png")]) == 2
    assert "--encoders is for --prompt" in capsys.readouterr().err


@pytest.fixture(scope="module")
def controlled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A ControlNet that sees its picture, and the checkpoint of it with the UNet."""
    root = tmp_path_factory.mktemp("control")
    torch.manual_seed(3)
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    control = diffusers.ControlNetModel.from_unet(
        unet, conditioning_channels=3, load_weights_from_unet=True,
        conditioning_embedding_out_channels=(4, 8),
    )  # fmt: skip
    for parameter in control.parameters():
        if not parameter.count_nonzero():
            torch.nn.init.normal_(parameter)
    control.save_pretrained(root / "control")
    argv = ["import", "--from", str(folder), "--controlnet", str(root / "control")]
    assert main([*argv, "--to", str(root / "checkpoint")]) == 0
    return root / "control", root / "checkpoint"


def control_images(folder: Path, count: int) -> list[Path]:
    """Pictures of 8x8, each another."""
    paths = [folder / f"edges{i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).save(path)
    return paths


def test_control_images_give_the_pictures_of_the_pipeline(
    folder: Path,
    controlled: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from megatron_pulse.diffusion import grid

    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(grid, "save_grid", lambda images, *_: drawn.append(images))
    paths = control_images(tmp_path, 2)
    argv = [
        "sample", "--load", str(controlled[1]), "--raw", "--prompt", "a red bird",
        "--negative-prompt", "old cat", "--encoders", str(folder), "--steps", "3",
        "--option", f"context_length={LENGTH}", "-o", str(tmp_path / "birds.png"),
    ]  # fmt: skip
    each = [flag for path in paths for flag in ("--control-image", str(path))]
    assert main([*argv, *each, "--per-class", "1"]) == 0
    assert main([*argv, *each[:2], "--per-class", "2"]) == 0
    theirs = diffusers.StableDiffusionControlNetPipeline.from_pretrained(
        folder, controlnet=diffusers.ControlNetModel.from_pretrained(controlled[0]),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    theirs.set_progress_bar_config(disable=True)
    for ours, seen in zip(drawn, (paths, [paths[0]] * 2), strict=True):
        expected = theirs(
            ["a red bird"] * 2, image=[Image.open(path) for path in seen],
            negative_prompt=["old cat"] * 2, num_inference_steps=3, guidance_scale=2.0,
            latents=start_noise(0, range(2), (4, 4, 4)), output_type="pt",
        ).images  # fmt: skip
        torch.testing.assert_close(ours / 2 + 0.5, expected, rtol=0, atol=2e-6)
    assert torch.equal(drawn[0][0], drawn[1][0])
    seen = (drawn[0][1] - drawn[1][1]).abs().max().item()
    assert seen > 0.01, f"another picture changes {seen}"


def test_control_images_that_cannot_be_followed(
    folder: Path,
    imported: Path,
    controlled: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = map(str, control_images(tmp_path, 2))
    (tmp_path / "c.png").write_text("no picture")
    length = ["--option", f"context_length={LENGTH}"]
    draw = ["sample", "-o", str(tmp_path / "x.png"), "--encoders", str(folder), *length]
    control = [*draw, "--load", str(controlled[1])]
    prompts = ["--prompt", "a", "--prompt", "b", "--prompt", "c"]
    cases = [
        ([*control, *prompts], "also reads conditioning. Give --control-image"),
        ([*control, *prompts, "--control-image", a, "--control-image", b], "2 pictures for 3 rows"),
        ([*control, *prompts, "--control-image", str(tmp_path / "c.png")], "not an image"),
        ([*control, *prompts, "--control-image", str(tmp_path / "d.png")], "there is no such file"),
        ([*control, "--from-data", "1", "--control-image", a], "--from-data has its own"),
        ([*draw, "--load", str(imported), "--prompt", "a", "--control-image", a], "no control"),
        ([*draw, "--load", str(imported), "--prompt", "a", "--negative-prompt", "b",
          "--guidance", "1"], "--guidance 1 is none"),
    ]  # fmt: skip
    for argv, words in cases:
        assert main(argv) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


def test_latents_of_a_controlnet_have_the_other_picture(
    folder: Path, controlled: tuple[Path, Path], tmp_path: Path
) -> None:
    """What a step that encodes gets of the files is what was written ahead."""
    photos, beside = tmp_path / "photos", tmp_path / "photos.conditioning"
    photos.mkdir()
    beside.mkdir()
    for path in control_images(photos, 4):
        path.with_suffix(".txt").write_text("a bird")
        (beside / path.name).write_bytes(path.read_bytes())
    options = [
        "block_out_channels=8,16", "layers_per_block=1", "transformer_depth=0,1", "num_heads=2",
        "cross_attention_dim=8", "norm_num_groups=4", "sample_size=4",
        f"context_length={LENGTH}", "conditioning_widths=4,8",
    ]  # fmt: skip
    flags = [flag for option in options for flag in ("--option", option)]
    argv = [
        "data", "write-latents", "--from", f"folder:{photos}", "--image-size", "8",
        "--dtype", "fp32", "--encoders", str(folder), "--backbone", "controlnet-tiny", *flags,
        "-o", str(tmp_path / "latents"),
    ]  # fmt: skip
    assert main(argv) == 0
    stored = LatentFolder(tmp_path / "latents")
    wanted = WantedFields((3, 8, 8), {"conditioning": FieldSpec((3, 8, 8))})
    files, _ = open_dataset(f"folder:{photos}", wanted=wanted, validation_fraction=0)
    assert stored.fields["conditioning"].shape == (3, 8, 8)
    for i in range(4):
        for name, value in files.conditioning(i).items():
            assert torch.equal(stored.conditioning(i)[name], value)


def test_a_folder_whose_files_changed_is_not_gone_on_with(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = captioned_digits(tmp_path, 3), tmp_path / "latents"
    photos, table = tmp_path / "captions", tmp_path / "captions/metadata.jsonl"
    assert write(folder, source, out) == 0
    assert write(folder, source, out) == 0
    assert "already complete" in capsys.readouterr().out
    said, picture = table.read_text(), (photos / "1.png").read_bytes()
    table.write_text(said.replace("digit one", "digit two"))
    assert write(folder, source, out) == 2
    assert ", files of " in capsys.readouterr().err
    table.write_text(said)
    before = (out / "latent-00000.npy").read_bytes()
    (photos / "1.png").write_bytes((photos / "2.png").read_bytes() + b"\0")
    assert write(folder, source, out) == 0
    said = capsys.readouterr().out
    assert f"1 of the pictures were edited since they were encoded ({photos}/1.png)" in said
    assert (out / "latent-00000.npy").read_bytes() != before
    (photos / "1.png").write_bytes(picture)
    assert write(folder, source, out) == 0
    assert (out / "latent-00000.npy").read_bytes() == before
    meta = out / "meta.json"
    older = re.sub(", files of [0-9a-f]+", "", json.dumps(unsealed_record(meta)))
    meta.write_text(older)
    assert write(folder, source, out) == 0, "earlier versions kept no digest of the files"


def test_captions_that_are_cut_off_are_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = captioned_digits(tmp_path, 3)
    table = tmp_path / "captions/metadata.jsonl"
    assert write(folder, source, tmp_path / "a") == 0
    assert "exceed" not in capsys.readouterr().err
    table.write_text(table.read_text().replace("digit one", "digit one" + " of a red bird" * 9))
    assert write(folder, source, tmp_path / "b") == 0
    told = capsys.readouterr().err
    assert "of the first 3 captions 1 exceed the text length of the model" in told
    assert told.rstrip().endswith("1.png")
