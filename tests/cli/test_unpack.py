"""Whole original files, with autoencoder and text encoders, unpacked to diffusers folders."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import model_specs
from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.single_file import PREFIX, OriginalLayout
from tests.cli.conftest import Refused
from tests.cli.test_prompts import FAMILIES

PARTS = {
    "sd": {"text_encoder": "cond_stage_model.transformer.text_model."},
    "sdxl": {
        "text_encoder": "conditioner.embedders.0.transformer.text_model.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "sd3": {
        "text_encoder": "text_encoders.clip_l.transformer.text_model.",
        "text_encoder_2": "text_encoders.clip_g.transformer.text_model.",
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    },
}
_VAE = (
    (r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2"),
    (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d+)\.resnets\.(\d+)", r"up.\1.block.\2"),
    (r"up_blocks\.(\d+)\.upsamplers\.0", r"up.\1.upsample"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_([qkv])", r"mid.attn_1.\1"),
    (r"mid_block\.attentions\.0\.to_out\.0", "mid.attn_1.proj_out"),
    ("conv_shortcut", "nin_shortcut"),
    ("conv_norm_out", "norm_out"),
)
_OPEN_CLIP = (
    ("embeddings.token_embedding.", "token_embedding."),
    ("embeddings.position_embedding.weight", "positional_embedding"),
    ("encoder.layers.", "transformer.resblocks."),
    ("layer_norm1", "ln_1"), ("layer_norm2", "ln_2"), ("final_layer_norm", "ln_final"),
    ("mlp.fc1", "mlp.c_fc"), ("mlp.fc2", "mlp.c_proj"), ("self_attn.out_proj", "attn.out_proj"),
)  # fmt: skip


def autoencoder(state: dict[str, Tensor], levels: int) -> dict[str, Tensor]:
    """The tensors by CompVis' names; levels of the decoder are counted from the other end."""
    found = {}
    for name, tensor in state.items():
        for pattern, original in _VAE:
            name = re.sub(pattern, original, name)
        name = re.sub(r"\.up\.(\d+)", lambda m: f".up.{levels - 1 - int(m[1])}", name)
        if "attn_1." in name and name.endswith("weight") and "norm" not in name:
            tensor = tensor[:, :, None, None]
        found[f"first_stage_model.{name}"] = tensor
    return found


def open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {"text_projection": state.pop("text_projection.weight").T}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        for ours, original in _OPEN_CLIP:
            name = name.replace(ours, original)
        if match := re.fullmatch(r"(.*)self_attn\.([qkv])_proj\.(\w+)", name):
            fused.setdefault(f"{match[1]}attn.in_proj_{match[3]}", {})[match[2]] = tensor
        else:
            found[name] = tensor
    return found | {n: torch.cat([parts[k] for k in "qkv"]) for n, parts in fused.items()}


def text_encoder(folder: Path, prefix: str) -> dict[str, Tensor]:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    state = getattr(transformers, kind).from_pretrained(folder).state_dict()
    state = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    if prefix.endswith(".model."):
        state = open_clip(state)
    found = {prefix + name: tensor for name, tensor in state.items()}
    projection = f"{prefix}text_projection.weight"
    if projection in found:
        found[projection.replace("text_model.", "")] = found.pop(projection)
    return found


def write(family: str, folder: Path) -> dict[str, Tensor]:
    """A tiny pipeline in ``folder``, and all its tensors by original names."""
    tiny = FAMILIES[family]
    if family == "sd3":  # whose CLIP L projects to its own width
        first, *others = tiny.encoders
        wider = tiny.settings | {"pooled_projection_dim": 18}
        tiny = replace(tiny, encoders=((*first[:2], first[1]), *others), settings=wider)
    tiny.write(folder)
    part = "unet" if (folder / "unet").is_dir() else "transformer"
    published = model_specs.published_form(
        model_specs.load_published(model_specs.read_published(folder / part))
    )
    assert published is not None
    backbone = FAMILIES[family].denoiser.from_pretrained(folder / part).state_dict()
    tensors = OriginalLayout(published).write(backbone)
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae").state_dict()
    tensors |= autoencoder(vae, FAMILIES[family].levels)
    for name, prefix in PARTS[family].items():
        tensors |= text_encoder(folder / name, prefix)
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def without_weights(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        path.unlink()


def assert_same_weights(folder: Path, other: Path) -> None:
    from safetensors.torch import load_file

    files = {path.relative_to(folder) for path in folder.rglob("*.safetensors")}
    assert files == {path.relative_to(other) for path in other.rglob("*.safetensors")}
    for name in files:
        found, wanted = load_file(other / name), load_file(folder / name)
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], name


@pytest.mark.parametrize("family", PARTS)
def test_whole_file_is_the_pipeline_that_it_was_written_from(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = write(family, tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "configs")
    without_weights(tmp_path / "configs")
    if family == "sd":
        torch.save({"state_dict": tensors, "epoch": 3}, file := tmp_path / "whole.ckpt")
    else:
        save_file(tensors, file := tmp_path / "whole.safetensors")
    command = ["unpack", str(file), "--config", str(tmp_path / "configs")]
    assert main([*command, "--to", str(tmp_path / "out")]) == 0
    assert "vae: AutoencoderKL, of the file" in capsys.readouterr().out
    assert_same_weights(tmp_path / "original", tmp_path / "out")
    assert diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")


def test_components_that_a_file_lacks_come_from_the_folder_or_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused
) -> None:
    tensors = write("sd", base := tmp_path / "original")
    alone = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    save_file(alone, file := tmp_path / "unet.safetensors")
    command = ["unpack", str(file), "--config", str(base), "--to", str(tmp_path / "out")]
    assert main(command) == 0
    assert f"vae: AutoencoderKL, of {base}" in capsys.readouterr().out
    assert_same_weights(base, tmp_path / "out")
    without_weights(base / "vae")
    command[-1] = str(tmp_path / "other")
    refused(command, "vae (AutoencoderKL) is neither in the file nor with weights in")
    assert not (tmp_path / "other").exists()
    lost = "cond_stage_model.transformer.text_model.final_layer_norm.bias"
    save_file({n: t for n, t in tensors.items() if n != lost}, file)
    refused(command, "text_encoder of the file", "final_layer_norm.bias is missing")


def test_autoencoder_alone_is_one_component(tmp_path: Path) -> None:
    tensors = write("sd", base := tmp_path / "original")
    beginning = "first_stage_model."
    vae = {n.removeprefix(beginning): t for n, t in tensors.items() if n.startswith(beginning)}
    save_file(vae, file := tmp_path / "vae.safetensors")
    command = ["unpack", str(file), "--config", str(base / "vae"), "--to", str(tmp_path / "vae")]
    assert main(command) == 0
    assert_same_weights(base / "vae", tmp_path / "vae")


def test_checkpoint_with_code_is_refused(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors: dict[str, Any] = write("sd", base := tmp_path / "original")
    torch.save(
        {"state_dict": tensors, "callbacks": FAMILIES["sd"]}, file := tmp_path / "whole.ckpt"
    )
    command = ["unpack", str(file), "--config", str(base), "--to", str(tmp_path / "out")]
    capsys.readouterr()
    refused(command, "holds more than tensors, which is never unpickled")
