"""Damaged or other encoders of a pipeline are refused before anything is encoded."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_pulse.cli.main import main
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.tokens import Tokenizers
from model_specs.common.text_recipes import SD
from tests.cli.small_diffusion import backbone, make_diffusion
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_diffusion(tmp_path_factory.mktemp("sd"))


def test_half_of_an_encoder_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries would draw what is missing at random, and tell words by none."""
    from megatron_pulse.encoders.autoencoder import AutoencoderError
    from megatron_pulse.encoders.tokens import EncodersError

    half = tmp_path / "half"
    shutil.copytree(folder, half)
    weights = half / "text_encoder/model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if "fc1.weight" in name)
    save_file({n: t for n, t in tensors.items() if n != name}, weights, {"format": "pt"})
    with pytest.raises(EncodersError, match=r"its weights lack 1 tensors \(.*fc1\.weight"):
        TextEncoders(half, SD, {"context": (LENGTH, 8)})
    shutil.copy(folder / "text_encoder/model.safetensors", weights)
    TextEncoders(half, SD, {"context": (LENGTH, 8)})
    larger = transformers.AutoTokenizer.from_pretrained(half / "tokenizer")
    larger.add_tokens(["zebra"])
    larger.save_pretrained(half / "tokenizer")
    with pytest.raises(EncodersError, match="tokenizer has 16 tokens, but text_encoder has 15"):
        TextEncoders(half, SD, {"context": (LENGTH, 8)})
    (half / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(EncodersError, match=r"tokenizer"):
        TextEncoders(half, SD, {"context": (LENGTH, 8)})
    vae = half / "vae/diffusion_pytorch_model.safetensors"
    save_file({"x": torch.zeros(1)}, vae, {"format": "pt"})
    with pytest.raises(AutoencoderError, match="its weights lack"):
        Autoencoder(half / "vae")
    vae.unlink()
    capsys.readouterr()
    assert main(["data", "encoders", str(half)]) == 0
    assert main(["data", "encoders", str(folder), *backbone(folder)]) == 0
    shutil.copytree(folder / "tokenizer", half / "tokenizer", dirs_exist_ok=True)
    assert main(["data", "encoders", str(half), *backbone(folder)]) == 2
    assert f"{half}: vae: vae holds no such weights" in capsys.readouterr().err
    assert "newly initialized" not in capsys.readouterr().err


def test_weights_that_the_libraries_would_unpack_or_wait_for_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    """Those of ``.bin`` files are read as torch writes them; compressed ones have no end."""
    from megatron_pulse.encoders.autoencoder import AutoencoderError
    from megatron_pulse.encoders.tokens import EncodersError

    pickled = Path(shutil.copytree(folder, tmp_path / "pickled"))
    named = (("text_encoder", "model", "pytorch_model"), ("vae", *["diffusion_pytorch_model"] * 2))

    def read() -> None:
        TextEncoders(pickled, SD, {"context": (LENGTH, 8)})

    reads = (read, lambda: Autoencoder(pickled / "vae"))
    for (part, stem, other), reading in zip(named, reads, strict=True):
        weights, file = pickled / part / f"{stem}.safetensors", pickled / part / f"{other}.bin"
        torch.save(load_file(weights), file)
        weights.unlink()
        reading()
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in records.items():
                archive.writestr(name, content)
        with pytest.raises((EncodersError, AutoencoderError), match="records are compressed"):
            reading()
        file.unlink()
        os.mkfifo(weights)
        with pytest.raises((EncodersError, AutoencoderError), match="(no|not a) regular file"):
            reading()
        weights.unlink()
        index = {"metadata": {}, "weight_map": {"a": "../outside.safetensors"}}
        (pickled / part / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises((EncodersError, AutoencoderError), match="is not a file name"):
            reading()


def test_a_configuration_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before any weights are read: the libraries leave layers out, and draw others at random."""
    from megatron_pulse.encoders.autoencoder import AutoencoderError
    from megatron_pulse.encoders.tokens import EncodersError

    other = tmp_path / "other"
    shutil.copytree(folder, other)

    def changed(part: str, **settings: Any) -> None:
        config = json.loads((folder / part / "config.json").read_text())
        (other / part / "config.json").write_text(json.dumps({**config, **settings}))

    for depth, said in (
        (2, "have 16 .*encoder.layers.2.* beyond the layers"),
        (5, "lack 32 .* of its config.json"),
    ):
        changed("text_encoder", num_hidden_layers=depth)
        with pytest.raises(EncodersError, match=f"its weights {said}"):
            TextEncoders(other, SD, {"context": (LENGTH, 8)}, places=())
    padded = other / "tokenizer/tokenizer_config.json"
    said = padded.read_text()
    padded.write_text(json.dumps({**json.loads(said), "pad_token": None}))
    with pytest.raises(EncodersError, match="tokenizer has no pad_token"):
        Tokenizers(other, SD, {"context": (LENGTH, 8)})
    padded.write_text(said)
    changed("text_encoder", intermediate_size=16)
    with pytest.raises(EncodersError, match="is 12, but its config.json says 16"):
        TextEncoders(other, SD, {"context": (LENGTH, 8)}, places=())
    for settings, said in (
        ({"layers_per_block": 2}, "lack .* of its config.json"),
        ({"_class_name": "AsymmetricAutoencoderKL"}, "describes AsymmetricAutoencoderKL"),
        ({"block_out_channels": [8, 16]}, "its config.json says"),
    ):
        changed("vae", **settings)
        for weighs in (False, True):
            with pytest.raises(AutoencoderError, match=said if not weighs else ""):
                Autoencoder(other / "vae", weighs=weighs)


def test_an_autoencoder_that_overflows_in_fp16_is_run_in_fp32_or_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, source = tmp_path / "other", captioned_digits(tmp_path, 2)
    shutil.copytree(folder, other)
    path = other / "vae/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["encoder.down_blocks.0.resnets.0.conv2.weight"] *= 3e5
    save_file(weights, path, {"format": "pt"})
    argv = ["data", "write-latents", "--from", source, "--image-size", "8", *backbone(folder)]
    argv += ["--encoders", str(other), "--encoders-dtype", "fp16"]
    assert main([*argv, "-o", str(tmp_path / "a")]) == 0
    assert f"warning: {other}/vae runs in fp32: it may overf" in capsys.readouterr().err
    config = other / "vae/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"force_upcast": False}))
    assert main([*argv, "-o", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert f"autoencoder {other}/vae, in float16, returns values that are not finite" in said
    assert "(--encoders-dtype, in training --pulse-encoders-dtype)" in said
