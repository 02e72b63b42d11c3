"""``pulse import`` and ``pulse export``: diffusers folders and U-ViT's files, there and back."""

import json
import shutil

import pytest
import torch

import model_specs
from megatron_pulse.cli import main
from megatron_pulse.integration.checkpoints import checkpoint_folder, saved_arguments

TINY = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline's folder with a small UNet and a scheduler."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    root = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    UNet2DConditionModel(**TINY).save_pretrained(root / "unet", max_shard_size="100KB")
    DDPMScheduler(prediction_type="v_prediction").save_pretrained(root / "scheduler")
    return root


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    target = tmp_path_factory.mktemp("imported") / "checkpoint"
    assert main(["import", "--from", str(folder), "--to", str(target)]) == 0
    return target


def test_there_and_back_bit_for_bit(folder, checkpoint, tmp_path):
    from diffusers import UNet2DConditionModel

    args = saved_arguments(checkpoint_folder(checkpoint))
    assert (args.pulse_objective, args.pulse_record["family"]) == ("v", "unet")
    original = UNet2DConditionModel.from_pretrained(folder / "unet")
    assert (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").exists()
    for name, flags in (("raw", ["--raw"]), ("ema", [])):
        target = tmp_path / name
        assert main(["export", "--load", str(checkpoint), "--to", str(target), *flags]) == 0
        loaded, info = UNet2DConditionModel.from_pretrained(target, output_loading_info=True)
        assert not any(info.values()), info
        state = loaded.state_dict()
        assert state.keys() == original.state_dict().keys()
        for key, tensor in original.state_dict().items():
            assert torch.equal(state[key], tensor), key
        image, context = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 6)
        with torch.no_grad():
            theirs, ours = (m(image, 7, context).sample for m in (original, loaded))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # memory is aligned anew


def test_half_precision(checkpoint, tmp_path, folder):
    from diffusers import UNet2DConditionModel

    flags = ["--dtype", "bfloat16", "--to", str(tmp_path / "half")]
    assert main(["export", "--load", str(checkpoint), *flags]) == 0
    half = UNet2DConditionModel.from_pretrained(tmp_path / "half", torch_dtype=torch.bfloat16)
    whole = UNet2DConditionModel.from_pretrained(folder / "unet")
    for key, tensor in whole.state_dict().items():
        assert torch.equal(half.state_dict()[key], tensor.bfloat16()), key


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_uvit_files(suffix, tmp_path):
    """A state dict with U-ViT's published names becomes a checkpoint and the same file again."""
    from megatron_pulse.backbone.published import to_published
    from megatron_pulse.diffusion.published import read_state_dict, write_state_dict
    from megatron_pulse.integration.weights import weights_of, whole_stage

    options = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = model_specs.load_backbone("uvit-tiny", options)
    stage = whole_stage(backbone, initialise=True)
    tensors = to_published(model_specs.published_form(backbone), weights_of(stage))
    write_state_dict(tmp_path / f"model{suffix}", tensors)
    flags = [text for key, value in options.items() for text in ("--option", f"{key}={value}")]
    source = ["--from", str(tmp_path / f"model{suffix}"), "--objective", "epsilon"]
    target = ["--to", str(tmp_path / "checkpoint")]
    assert main(["import", *source, "--backbone", "uvit-tiny", *flags, *target]) == 0
    again = tmp_path / f"again{suffix}"
    assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(again)]) == 0
    found = read_state_dict(again)
    assert found.keys() == tensors.keys()
    assert "in_blocks.0.attn.qkv.weight" in found
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


def damaged(folder, tmp_path, change):
    """A copy of the UNet with one file of weights, changed."""
    from safetensors.torch import save_file

    from megatron_pulse.diffusion.published import read_folder

    copy = tmp_path / "damaged"
    copy.mkdir()
    shutil.copy(folder / "unet" / "config.json", copy)
    tensors = read_folder(folder / "unet")
    change(tensors)
    save_file(tensors, copy / "diffusion_pytorch_model.safetensors")
    return copy


def test_every_wrong_tensor_is_named(folder, tmp_path, capsys):
    def change(tensors):
        del tensors["conv_in.bias"], tensors["mid_block.resnets.0.norm1.weight"]
        tensors["conv_in.lora"] = torch.zeros(1)
        tensors["conv_out.bias"] = torch.zeros(5)

    source = damaged(folder, tmp_path, change)
    target = tmp_path / "checkpoint"
    flags = ["--from", str(source), "--to", str(target), "--objective", "epsilon"]
    assert main(["import", *flags]) == 2
    said = capsys.readouterr().err
    assert "4 fault(s)" in said
    for words in (
        "conv_in.bias is missing",
        "mid_block.resnets.0.norm1.weight is missing",
        "conv_in.lora is unexpected",
        "conv_out.bias has the shape [5], expected [4]",
    ):
        assert words in said
    assert not target.exists()


def faulty_config(folder, tmp_path, **changes):
    copy = tmp_path / "config"
    shutil.copytree(folder / "unet", copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f, t: t / "nothing", ["there is no such file or folder"]),
        (lambda f, t: t, ["not a diffusers folder", "config.json"]),
        (lambda f, t: faulty_config(f, t, _class_name="Kandinsky"), ["no family builds", "UNet2D"]),
        (
            lambda f, t: faulty_config(
                f, t, resnet_time_scale_shift="scale_shift", dual_cross_attention=True
            ),
            ["resnet_time_scale_shift", "dual_cross_attention"],
        ),
        (lambda f, t: f / "unet" / "config.json", ["say with --backbone"]),
        (lambda f, t: lost_shard(f, t), ["00002-of", "No such file"]),
    ],
    ids=["missing", "empty", "class", "settings", "file", "shard"],
)
def test_what_cannot_be_imported(make, words, folder, tmp_path, capsys):
    source, target = make(folder, tmp_path), tmp_path / "checkpoint"
    objective = [] if source.is_file() else ["--objective", "epsilon"]
    assert main(["import", "--from", str(source), "--to", str(target), *objective]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert not target.exists()


def lost_shard(folder, tmp_path):
    copy = tmp_path / "lost"
    shutil.copytree(folder / "unet", copy)
    next(copy.glob("*00002-of*")).unlink()
    return copy


def test_targets_are_never_overwritten(folder, checkpoint, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for target in (tmp_path, tmp_path / "mine"):
        assert main(["import", "--from", str(folder), "--to", str(target)]) == 2
        assert main(["export", "--load", str(checkpoint), "--to", str(target)]) == 2
    assert (tmp_path / "mine").read_text() == "mine"
    assert "name a new one" in capsys.readouterr().err


def test_the_objective_must_be_known(folder, tmp_path, capsys):
    flags = ["--from", str(folder / "unet"), "--to", str(tmp_path / "checkpoint")]
    assert main(["import", *flags]) == 0  # the scheduler lies beside it
    shutil.copytree(folder / "unet", tmp_path / "alone")
    flags = ["--from", str(tmp_path / "alone"), "--to", str(tmp_path / "other")]
    assert main(["import", *flags]) == 2
    assert "give --objective" in capsys.readouterr().err
