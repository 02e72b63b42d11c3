"""Original single files of UNets, SD3, Flux and Wan: read and written as diffusers reads them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.loaders.single_file_utils import CHECKPOINT_KEY_NAMES
from safetensors.torch import load_file, save_file

import model_specs
from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.single_file import PREFIX, OriginalLayout
from tests.cli.conftest import Refused
from tests.cli.small_unet import importing
from tests.cli.test_prompts import FAMILIES

SD3 = FAMILIES["sd3"].settings
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sd": (diffusers.UNet2DConditionModel, FAMILIES["sd"].settings),
    "sdxl": (diffusers.UNet2DConditionModel, FAMILIES["sdxl"].settings | {"layers_per_block": 2}),
    "sd3": (diffusers.SD3Transformer2DModel, SD3),
    "sd3.5": (
        diffusers.SD3Transformer2DModel,
        SD3 | {"num_layers": 3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
    ),
    "flux": (diffusers.FluxTransformer2DModel, FAMILIES["flux"].settings),
    "wan": (
        diffusers.WanTransformer3DModel,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 32,
            "num_layers": 2,
        },
    ),
}


def make(name: str, folder: Path) -> Any:
    """A tiny model in ``folder``, beside a scheduler."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    part = "unet" if kind is diffusers.UNet2DConditionModel else "transformer"
    model = kind(**settings)
    model.save_pretrained(folder / part)
    flow = part == "transformer"
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler if flow else diffusers.DDIMScheduler
    scheduler().save_pretrained(folder / "scheduler")
    return model


def export(checkpoint: Path, to: Path) -> Path:
    assert main(["export", "--load", str(checkpoint), "--raw", "--to", str(to)]) == 0
    return to


def assert_equal(found: Any, model: Any) -> None:
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_single_file_and_folder_are_the_same_weights(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(name, tmp_path)
    (config,) = (path.parent for path in tmp_path.glob("*/config.json"))
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "a")]) == 0
    flags = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("/a ")[2])
    single = export(tmp_path / "a", tmp_path / "single.safetensors")
    assert (tmp_path / "single.scheduler_config.json").is_file()
    if name != "flux":  # whose reader knows Flux's own width alone
        read = type(model).from_single_file(single, config=str(config), local_files_only=True)
        assert_equal(read.state_dict(), model)
    whole = {
        f"{PREFIX if name in ('flux', 'wan') else ''}{k}": v for k, v in load_file(single).items()
    }
    whole["first_stage_model.decoder.conv_in.weight"] = torch.zeros(2)
    save_file(whole, tmp_path / "whole.safetensors")
    given = importing(tmp_path / "whole.safetensors", tmp_path, "--config", str(tmp_path))
    assert main(given) == 0
    again = export(tmp_path / "checkpoint", tmp_path / "again")
    assert_equal(type(model).from_pretrained(again).state_dict(), model)
    named = [word.replace("--pulse-", "--") for word in flags]
    beside = ["import", "--from", str(single), "--to", str(tmp_path / "b"), *named]
    assert main(beside) == 0
    other = load_file(export(tmp_path / "b", tmp_path / "other.safetensors"))
    assert all(torch.equal(value, other[key]) for key, value in load_file(single).items())


def test_fused_projections_are_in_the_order_of_flux(tmp_path: Path) -> None:
    model = make("flux", tmp_path)
    published = model_specs.published_form(
        model_specs.load_published(model_specs.read_published(tmp_path / "transformer"))
    )
    assert published is not None
    state = model.state_dict()
    original = OriginalLayout(published).write(state)
    single, block = "single_transformer_blocks.0.", original["single_blocks.0.linear1.weight"]
    parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    assert torch.equal(block, torch.cat([state[f"{single}{part}.weight"] for part in parts]))
    scale, shift = state["norm_out.linear.weight"].chunk(2)
    assert torch.equal(original["final_layer.adaLN_modulation.1.weight"], torch.cat([shift, scale]))


@pytest.mark.parametrize(
    ("backbone", "count", "name"),
    [
        ("sd-v1.5", 686, CHECKPOINT_KEY_NAMES["v1"]),
        ("sdxl", 1680, f"{PREFIX}output_blocks.2.1.transformer_blocks.9.attn2.to_k.weight"),
        ("sd3-medium", 491, CHECKPOINT_KEY_NAMES["sd3"][1]),
        ("flux-dev", 780, CHECKPOINT_KEY_NAMES["flux"][0]),
    ],
)
def test_names_of_published_models_are_theirs(backbone: str, count: int, name: str) -> None:
    published = model_specs.published_form(model_specs.load_backbone(backbone))
    assert published is not None
    layout = OriginalLayout(published)
    names = [layout.prefix + one for one in layout.shapes()]
    assert name in names and len(names) == count


def test_faults_of_a_single_file_are_listed(tmp_path: Path, refused: Refused) -> None:
    model = make("sd3", tmp_path)
    published = model_specs.published_form(
        model_specs.load_published(model_specs.read_published(tmp_path / "transformer"))
    )
    assert published is not None
    original = OriginalLayout(published).write(model.state_dict())
    del original[f"{PREFIX}pos_embed"]
    original[f"{PREFIX}lora"] = torch.zeros(1)
    original[f"{PREFIX}x_embedder.proj.bias"] = torch.zeros(3)
    save_file({k: v.clone() for k, v in original.items()}, tmp_path / "bad.safetensors")
    words = ("3 faults", "pos_embed is missing", f"{PREFIX}lora is unexpected", "shape [3]")
    refused(importing(tmp_path / "bad.safetensors", tmp_path, "--config", str(tmp_path)), *words)
    wan = {"model.diffusion_model.head.modulation": torch.zeros(1)}
    save_file(wan, tmp_path / "wan.safetensors")
    refused(
        importing(tmp_path / "wan.safetensors", tmp_path, "--backbone", "sd-tiny"),
        "holds a WanTransformer3DModel (model.diffusion_model.head.modulation)",
    )


def test_models_without_an_original_layout_are_folders(tmp_path: Path, refused: Refused) -> None:
    FAMILIES["pixart"].write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(tmp_path / "a")]) == 0
    exported = ["export", "--load", str(tmp_path / "a"), "--to", str(tmp_path / "x.safetensors")]
    assert main(exported) == 2
    assert not (tmp_path / "x.safetensors").exists()
