"""All forms in which others store weights are read alike: by importing, modules and encoders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import model_specs
from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.published import read_folder
from megatron_pulse.diffusion.single_file_refusal import READ
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.components import components, weight_faults
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.tracing.from_module import module_of
from megatron_pulse.tracing.initial_weights.sources import from_stored
from model_specs.common.text_recipes import SD
from tests.cli.conftest import Refused
from tests.cli.small_diffusion import make_diffusion
from tests.cli.small_unet import EPSILON, importing
from tests.encoders.pipelines import LENGTH

FILE = "diffusion_pytorch_model.safetensors"
OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_diffusion(tmp_path_factory.mktemp("sd"))


def age(file: Path) -> None:
    """Give attention the names of before diffusers 0.17."""
    tensors = load_file(file)
    assert any(".attentions." in name for name in tensors)
    for new, old in OLD.items():
        tensors = {
            name.replace(new, old) if ".attentions." in name else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, file, {"format": "pt"})


def test_old_names_of_attention_are_read_as_diffusers_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = tmp_path / "unet"
    diffusers.UNet2DModel(
        sample_size=4, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
        down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
        attention_head_dim=4, add_attention=False,
    ).save_pretrained(source)  # fmt: skip
    age(source / FILE)
    wanted = diffusers.UNet2DModel.from_pretrained(source).state_dict()
    assert main(importing(source, tmp_path, *EPSILON)) == 0
    target = tmp_path / "exported"
    assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(target)]) == 0
    back, info = diffusers.UNet2DModel.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, wanted[name]) for name, value in back.state_dict().items())
    module = module_of(model_specs.load_backbone(f"diffusers:{source}"))
    first = from_stored(read_folder(source), module, "it").parameters(0)
    assert first.keys() == dict(module.named_parameters()).keys()
    assert all(torch.equal(value, wanted[name]) for name, value in first.items())


@torch.no_grad()
def test_old_names_of_an_autoencoder_are_read_as_diffusers_does(
    folder: Path, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(folder / "vae", tmp_path / "vae"))
    age(old / FILE)
    image = torch.rand(1, 3, 8, 8)
    theirs = diffusers.AutoencoderKL.from_pretrained(old).encode(image).latent_dist.mean
    assert torch.equal(Autoencoder(old).encode(image), theirs * 0.5)


def variant(part: Any, folder: Path) -> None:
    part.save_pretrained(folder, variant="fp16")


def shards_of_a_variant(part: Any, folder: Path) -> None:
    part.save_pretrained(folder, variant="fp16", max_shard_size="2KB")


def saved_by_torch(part: Any, folder: Path) -> None:
    """transformers writes no such files any more."""
    part.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    stem = FILE.partition(".")[0] if "diffusion" in file.name else "pytorch_model"
    torch.save(load_file(file), folder / f"{stem}.bin")
    file.unlink()


def shards_saved_by_torch(part: Any, folder: Path) -> None:
    saved_by_torch(part, folder)
    (file,) = folder.glob("*.bin")
    tensors = torch.load(file)
    names = [f"{file.stem}-0000{i + 1}-of-00002.bin" for i in range(2)]
    places = {name: names[i % 2] for i, name in enumerate(tensors)}
    for name in names:
        torch.save({n: t for n, t in tensors.items() if places[n] == name}, folder / name)
    file.unlink()
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{file.name}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "save", [variant, shards_of_a_variant, saved_by_torch, shards_saved_by_torch]
)
@torch.no_grad()
def test_encoders_read_what_the_check_of_their_folder_accepts(
    save: Callable[[Any, Path], None], folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.safetensors"))
    save(
        transformers.CLIPTextModel.from_pretrained(folder / "text_encoder"), other / "text_encoder"
    )
    save(diffusers.AutoencoderKL.from_pretrained(folder / "vae"), other / "vae")
    parts = {part.name: part for part in components(folder)}
    for part in components(other)[:3]:
        assert (part.num_parameters, part.fault) == (parts[part.name].num_parameters, "")
    assert weight_faults(other, ["text_encoder", "vae"]) == []
    shapes = {"context": (LENGTH, 8)}
    ours, theirs = (TextEncoders(each, SD, shapes)("a red bird") for each in (other, folder))
    assert torch.equal(ours["context"], theirs["context"])
    image = torch.rand(1, 3, 8, 8)
    assert torch.equal(*(Autoencoder(each / "vae").encode(image) for each in (other, folder)))


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_whole_file_beside_an_index_counts_as_for_its_library(
    library: str, folder: Path, tmp_path: Path
) -> None:
    """transformers reads the whole file, diffusers the shards that the index names."""
    kind = transformers.CLIPTextModel if library == "transformers" else diffusers.AutoencoderKL
    stem = "model" if library == "transformers" else "diffusion_pytorch_model"
    source = folder / ("text_encoder" if library == "transformers" else "vae")
    shutil.copytree(source, tmp_path / "both")
    tensors = load_file(source / f"{stem}.safetensors")
    shard = f"{stem}-00001-of-00001.safetensors"
    save_file({n: t + 1 for n, t in tensors.items()}, tmp_path / "both" / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (tmp_path / "both" / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    read = read_folder(tmp_path / "both", library=library)
    theirs = kind.from_pretrained(tmp_path / "both").state_dict()
    name = next(name for name in tensors if name in theirs)
    assert torch.equal(read[name], theirs[name])


def test_averages_are_read_as_the_model_that_they_are_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EMAModel.save_pretrained writes seven settings that no model has."""
    kind = diffusers.UNet2DConditionModel
    unet = kind.from_pretrained(folder / "unet")
    EMAModel(unet.parameters(), model_cls=kind, model_config=unet.config).save_pretrained(
        tmp_path / "unet_ema"
    )
    plain = json.loads((folder / "unet/config.json").read_text())
    added = json.loads((tmp_path / "unet_ema/config.json").read_text())
    seven = {key: added[key] for key in added.keys() - plain.keys() if key[0] != "_"}
    assert len(seven) == 7
    assert main(importing(tmp_path / "unet_ema", tmp_path, *EPSILON)) == 0
    assert main(["export", "--load", f"{tmp_path}/checkpoint", "--to", f"{tmp_path}/out"]) == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert not seven.keys() & written.keys()
    assert "unknown settings" not in capsys.readouterr().err
    module = model_specs.load_backbone(f"diffusers:{tmp_path / 'unet_ema'}")
    assert not seven.keys() & module.kept.keys()


@pytest.mark.parametrize(
    "name", ["sd-tiny", "hunyuan-tiny", "dit-tiny", "pixart-tiny", "sd3-tiny", "flux-tiny"]
)
def test_settings_that_a_class_has_not_are_said_and_left_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one rule in all families, diffusers' own."""
    backbone = model_specs.load_backbone(name)
    form = model_specs.published_form(backbone)
    assert form is not None
    written = {"_class_name": form.class_name, **form.config, "decay": 0.9, "gated": 3}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = model_specs.read_published(tmp_path)
    assert "are ignored: gated" in capsys.readouterr().err
    assert config == json.loads(json.dumps({"_class_name": form.class_name, **form.config}))
    assert model_specs.load_published(config).record == model_specs.load_published(config).record
    model_specs.read_published(tmp_path)
    assert not capsys.readouterr().err, "once"


def test_older_names_of_classes_are_those_of_today(tmp_path: Path) -> None:
    kind = diffusers.DiTTransformer2DModel
    sizes = {"sample_size": 4, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 4}
    kind(**sizes, in_channels=4, out_channels=8, norm_num_groups=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(kind.__name__, "Transformer2DModel"))
    assert kind.from_pretrained(tmp_path)
    for config in (model_specs.read_published(tmp_path), json.loads(path.read_text())):
        assert model_specs.load_published(config).record["family"] == "dit"
    assert model_specs.load_backbone(f"diffusers:{tmp_path}").name == f"diffusers:{kind.__name__}"


ORIGINAL = {
    "StableDiffusionPipeline": "model.diffusion_model.input_blocks.0.0.weight",
    "StableDiffusionXLPipeline": "conditioner.embedders.0.transformer.text_model.x.weight",
    "StableDiffusion3Pipeline": "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",
    "FluxTransformer2DModel": "double_blocks.0.img_attn.qkv.weight",
    "UNet2DConditionModel": "input_blocks.0.0.weight",
    "AutoencoderKL": "encoder.down.0.block.0.conv1.weight",
    "ControlNetModel": "control_model.zero_convs.0.0.weight",
}


@pytest.mark.parametrize("kind", ORIGINAL)
def test_original_checkpoints_are_named_with_what_to_do(
    kind: str, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors: dict[str, Tensor] = {ORIGINAL[kind]: torch.zeros(2), "other.a.b": torch.zeros(1)}
    if kind == "StableDiffusionXLPipeline":
        tensors["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(1)
    repo = tmp_path / "repo"
    repo.mkdir()
    save_file(tensors, safe := repo / "v1.safetensors")
    words = ("v1.", "original single-file checkpoint", f"diffusers.{kind}.from_single_file(")
    given = importing(safe, tmp_path, "--backbone", "sd-tiny")
    if kind in READ:
        refused(importing(safe, tmp_path), *words[:2], "Name its model: --backbone (sd-v1.5")
        is_unet = READ[kind] == "UNet2DConditionModel"
        refused(given, "input_blocks.0.0.bias is missing" if is_unet else "name its own --backbone")
    else:
        refused(given, *words)
    refused(importing(repo, tmp_path), "no config.json", *words)
    pickled = tmp_path / "v1.ckpt"
    torch.save({"state_dict": tensors, "callbacks": repo}, pickled)  # as lightning writes it
    refused(importing(pickled, tmp_path), *(words[:2] if kind in READ else words))
    if kind == "AutoencoderKL":
        refused(["data", "write-latents", "--from", "digits8", "--vae", str(safe),
                 "-o", str(tmp_path / "latents")], *words)  # fmt: skip
    with pytest.raises(ValueError, match="original single-file"):
        model_specs.load_backbone(f"diffusers:{safe}")
    shutil.move(safe, repo / FILE)
    (repo / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "sample_size": 8}')
    refused(importing(repo, tmp_path, *EPSILON), *words[1:])
