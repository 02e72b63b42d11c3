"""``pulse import`` and ``pulse export``: diffusers folders and U-ViT's files, there and back."""

import errno
import os
import shutil
import textwrap
from unittest.mock import patch

import pytest
import torch

import model_specs
from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
from tests.cli.small_unet import EPSILON, TINY, damaged, importing, make_folder, sharded
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    target = tmp_path_factory.mktemp("imported") / "checkpoint"
    with patch.object(strategy.logger, "warning") as warning:
        assert main(["import", "--from", str(folder), "--to", str(target)]) == 0
    assert not warning.called, "of what nobody has asked for"
    return target


def test_import_and_export_are_bit_for_bit(folder, checkpoint, tmp_path):
    from diffusers import UNet2DConditionModel

    args = read_saved_run(checkpoint).arguments
    assert (args.pulse_process["objective"], args.pulse_record["family"]) == ("v", "unet")
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


def test_export_in_half_precision(checkpoint, tmp_path, folder):
    from diffusers import UNet2DConditionModel

    flags = ["--dtype", "bfloat16", "--to", str(tmp_path / "half")]
    assert main(["export", "--load", str(checkpoint), *flags]) == 0
    half = UNet2DConditionModel.from_pretrained(tmp_path / "half", torch_dtype=torch.bfloat16)
    whole = UNet2DConditionModel.from_pretrained(folder / "unet")
    for key, tensor in whole.state_dict().items():
        assert torch.equal(half.state_dict()[key], tensor.bfloat16()), key


FILES = {
    ".safetensors": ("uvit-tiny", {"depth": 2, "embed_dim": 32, "num_heads": 2},
                     "in_blocks.0.attn.qkv.weight"),
    ".pth": ("suv-tiny", {"num_layers": "1,2,1", "sparse_n": "1,2,1"},
             "transformer_blocks.1.1.attn1.add_q_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", FILES)
def test_import_and_export_of_files(suffix, tmp_path):
    """A state dict with published names becomes a checkpoint and the same file again."""
    from megatron_pulse.backbone.published_weights import to_published
    from megatron_pulse.diffusion.published import read_state_dict, write_state_dict
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    name, options, weight = FILES[suffix]
    backbone = model_specs.load_backbone(name, options)
    stage = whole_stage(backbone, initialise=True)
    tensors = to_published(model_specs.published_form(backbone), weights_of(stage))
    write_state_dict(tmp_path / f"model{suffix}", tensors)
    flags = [text for key, value in options.items() for text in ("--option", f"{key}={value}")]
    flags += ["--backbone", name]
    source = ["--from", str(tmp_path / f"model{suffix}"), *EPSILON]
    target = ["--to", str(tmp_path / "checkpoint")]
    assert main(["import", *source, *flags, *target]) == 0
    again = tmp_path / f"again{suffix}"
    assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(again)]) == 0
    found = read_state_dict(again)
    assert found.keys() == tensors.keys()
    assert weight in found
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key
    # What was said of the process lies beside the file, and importing reads it there.
    assert (tmp_path / "again.scheduler_config.json").is_file()
    # An export of another name does not take the place of that file, and a model is one file.
    other = ".pth" if suffix == ".safetensors" else ".safetensors"
    for to in (tmp_path / f"again{other}", tmp_path / "plain"):
        assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(to)]) == 2
        assert not to.exists()
    target = tmp_path / "third"
    assert main(["import", "--from", str(again), *flags, "--to", str(target)]) == 0
    assert read_saved_run(target).process == read_saved_run(tmp_path / "checkpoint").process


TIED = """
    import torch
    from torch import nn


    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.blocks[2].weight = self.blocks[1].weight

        def forward(self, x, time):
            x = x + time[:, None, None, None]
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x


    def build():
        given = {"x": torch.zeros(2, 3, 6, 6), "time": torch.zeros(2)}
        return Tied(), given, {"sample": "x", "timestep": "time"}
"""


def test_tied_weights_come_and_go_under_all_their_names(tmp_path, refused):
    """Or some of them; of several values none counts."""
    from safetensors.torch import load_file

    code = textwrap.dedent(TIED)
    (tmp_path / "tied.py").write_text(code)
    name, made = f"{tmp_path}/tied.py:build", {}
    exec(compile(code, "tied.py", "exec"), made)
    module = made["build"]()[0]
    state = module.state_dict()
    own, other = "blocks.1.weight", "blocks.2.weight"
    files = {
        "all": state,
        "own": {key: tensor for key, tensor in state.items() if key != other},
        "other": {key: tensor for key, tensor in state.items() if key != own},
        "torn": {**state, other: state[other] + 1},
    }

    def importing(kind):
        torch.save(files[kind], tmp_path / f"{kind}.pth")
        to = ["--to", str(tmp_path / f"from {kind}"), "--module", name]
        return ["import", "--from", str(tmp_path / f"{kind}.pth"), *to, *EPSILON]

    refused(importing("torn"), f"{own} and {other} are one weight here, and their values differ")
    assert not (tmp_path / "from torn").exists()
    for kind in ("all", "own", "other"):
        assert main(importing(kind)) == 0
        written = tmp_path / f"{kind}.safetensors"
        load = ["--load", str(tmp_path / f"from {kind}"), "--module", name]
        assert main(["export", *load, "--to", str(written)]) == 0
        exported = load_file(written)
        made["build"]()[0].load_state_dict(exported, strict=True)
        assert all(torch.equal(exported[key], tensor) for key, tensor in state.items())


def test_a_traced_class_is_imported_at_the_size_that_is_given(folder, tmp_path, capsys):
    """Its default has more positions than the module."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    module = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=48, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    module.save_pretrained(tmp_path / "wan/transformer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path / "wan/scheduler")
    words = ["import", "--to", str(tmp_path / "checkpoint"), "--from"]
    wan, frames = str(tmp_path / "wan/transformer"), ["--option", "frames=3"]
    assert main([*words, wan]) == 2
    assert main([*words, str(folder), *frames]) == 2
    assert "--option is for classes that are built as modules" in capsys.readouterr().err
    size = ["--option", "height=8", "--option", "width=8", "--option", "text_length=6"]
    assert main([*words, wan, *frames, *size]) == 0
    assert read_saved_run(tmp_path / "checkpoint").load_backbone().sample_spec.shape == (4, 3, 8, 8)


def test_null_classes_are_for_models_with_classes(folder, tmp_path, refused):
    refused(importing(folder, tmp_path, "--null-class"), "has no classes")


def test_import_and_export_never_overwrite(folder, checkpoint, tmp_path, refused):
    (tmp_path / "mine").write_text("mine")
    for target in (tmp_path, tmp_path / "mine"):
        for words in (["import", "--from", str(folder)], ["export", "--load", str(checkpoint)]):
            refused([*words, "--to", str(target)], "name a new one")


def test_import_needs_the_diffusion_process(folder, tmp_path, capsys):
    flags = ["--from", str(folder / "unet"), "--to", str(tmp_path / "checkpoint")]
    assert main(["import", *flags]) == 0  # the scheduler lies beside it
    said = capsys.readouterr().out
    assert "process: v, linear betas 0.0001 to 0.02, 1000 timesteps" in said
    shutil.copytree(folder / "unet", tmp_path / "alone")
    flags = ["--from", str(tmp_path / "alone"), "--to", str(tmp_path / "other")]
    for said, lacking in (
        ([], "--objective and --noise-schedule"),
        (["--objective", "epsilon"], "process: --noise-schedule"),
        (["--objective", "flow"], "process: --flow-shift"),
    ):
        assert main(["import", *flags, *said]) == 2
        assert lacking in capsys.readouterr().err
    assert main(["import", *flags, *EPSILON, "--flow-shift", "3"]) == 2
    assert "only for flow" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["import", *flags, *EPSILON, "--flow-shift", "much"])
    assert "neither a number nor dynamic" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    said = [*EPSILON, "--beta-end", "0.018", "--num-timesteps", "500"]
    assert main(["import", *flags, *said]) == 0
    expected = "epsilon, scaled_linear betas 0.00085 to 0.018, 500 timesteps"
    assert expected in capsys.readouterr().out
    assert read_saved_run(tmp_path / "other").process.describe() == expected


def test_links_of_the_hub_s_cache_are_followed(folder, tmp_path):
    """snapshots/<commit>/unet/*.safetensors -> ../../../blobs/<hash>"""
    snapshot = sharded(folder, tmp_path / "snapshots" / "0" / "unet")
    (tmp_path / "blobs").mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(tmp_path / "blobs" / f"hash-of-{file.name}")
        file.symlink_to(f"../../../blobs/hash-of-{file.name}")
    flags = ["--from", str(snapshot.parent), "--to", str(tmp_path / "checkpoint")]
    assert main(["import", *flags, *EPSILON]) == 0


def test_import_memory_is_bounded(tmp_path):
    """The weights in fp32 once and one published tensor, whatever else is kept of them."""
    options = ["--option", "embed_dim=768", "--option", "depth=6", "--option", "num_heads=8"]
    flags = ["--from", str(tmp_path / "half.safetensors"), "--backbone", "uvit-tiny", *options]
    flags += [*EPSILON, "--to", str(tmp_path / "checkpoint")]
    size = run_ranks(1, write_half, tmp_path / "half.safetensors", options[1::2])[0]
    growth = run_ranks(1, import_measured, flags)[0]
    assert size > 1.5e8 and growth < 1.5 * size


def write_half(path, options):
    """Writes fp16 weights; their bytes in fp32."""
    from megatron_pulse.backbone.published_weights import to_published
    from megatron_pulse.diffusion.published import write_state_dict
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    backbone = model_specs.load_backbone("uvit-tiny", dict(text.split("=") for text in options))
    weights = {
        name: torch.ones_like(t).half() for name, t in weights_of(whole_stage(backbone)).items()
    }
    write_state_dict(path, to_published(model_specs.published_form(backbone), weights))
    return 4 * sum(weight.numel() for weight in weights.values())


def import_measured(flags):
    """By how many bytes the process grows at its peak."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["import", *flags]) == 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.fixture
def classes(tmp_path):
    """A UNet with 3 classes, as others publish it: no row of its table stands for none."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(1)
    model = UNet2DConditionModel(**TINY, num_class_embeds=3, upcast_attention=True)
    model.save_pretrained(tmp_path / "classes")
    return model


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_weights_and_its_scheduler_appear_together(suffix, tmp_path, monkeypatch):
    from megatron_pulse.diffusion import published

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(published, "save_file", full)
    monkeypatch.setattr(published.torch, "save", full)
    path, tensors = tmp_path / f"model{suffix}", {"a": torch.ones(2)}
    with pytest.raises(OSError, match="No space left"):
        published.write_state_dict(path, tensors, {"_class_name": "DDIMScheduler"})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    published.write_state_dict(path, tensors, {"_class_name": "DDIMScheduler"})
    assert len(list(tmp_path.iterdir())) == 2


def there_and_back(tmp_path, name, *flags):
    from diffusers import UNet2DConditionModel

    checkpoint, target = tmp_path / f"{name}-checkpoint", tmp_path / name
    source = ["--from", str(tmp_path / "classes"), "--to", str(checkpoint)]
    assert main(["import", *source, *EPSILON, *flags]) == 0
    assert main(["export", "--load", str(checkpoint), "--to", str(target)]) == 0
    loaded, info = UNet2DConditionModel.from_pretrained(target, output_loading_info=True)
    assert not any(info.values())
    return read_saved_run(checkpoint).load_backbone(), loaded


def test_class_unets_keep_their_last_class(classes, tmp_path):
    from megatron_pulse.integration.training_data import can_drop

    backbone, back = there_and_back(tmp_path, "as-published")
    assert (backbone.num_classes, backbone.null_label) == (3, None)
    assert not can_drop(backbone)
    assert back.config.num_class_embeds == 3 and back.config.upcast_attention
    table = back.class_embedding.weight
    assert torch.equal(table, classes.class_embedding.weight)

    backbone, back = there_and_back(tmp_path, "with-null", "--null-class")
    assert (backbone.num_classes, backbone.null_label) == (3, 3) and can_drop(backbone)
    assert torch.equal(back.class_embedding.weight[:3], table)
    assert back.config.num_class_embeds == 4 and not back.class_embedding.weight[3].any()
    assert back.config.upcast_attention
    shutil.rmtree(tmp_path / "classes")
    (tmp_path / "with-null").rename(tmp_path / "classes")
    again, twice = there_and_back(tmp_path, "again")
    assert again.record["options"] == backbone.record["options"], "the null class is known as such"
    assert torch.equal(twice.class_embedding.weight, back.class_embedding.weight)


def test_weights_that_a_type_cannot_hold_are_not_exported(folder, tmp_path, capsys, refused):
    def change(tensors):
        tensors["conv_in.bias"] = tensors["conv_in.bias"] + 1e6

    assert main(importing(damaged(folder, tmp_path, change), tmp_path, *EPSILON)) == 0
    capsys.readouterr()
    flags = ["--load", str(tmp_path / "checkpoint"), "--to", str(tmp_path / "half")]
    refused(["export", *flags, "--dtype", "float16"], "float16 cannot hold", "conv_in.bias")


CONTROL = {"conditioning_embedding_out_channels": (4, 8)}


@pytest.mark.parametrize("new", [True, False])
def test_controlnet_there_and_back_bit_for_bit(new, folder, tmp_path):
    """A new one begins as diffusers' from_unet does; one that was saved comes out as it went in."""
    from diffusers import ControlNetModel, UNet2DConditionModel

    torch.manual_seed(1)
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    others = {} if new else {**CONTROL, "load_weights_from_unet": False}
    first = ControlNetModel.from_unet(unet, **others)
    first.save_pretrained(tmp_path / "control")
    source = "new" if new else str(tmp_path / "control")
    flags = ["--from", str(folder), "--controlnet", source, "--to", str(tmp_path / "checkpoint")]
    assert main(["import", *flags]) == 0
    saved = read_saved_run(tmp_path / "checkpoint")
    assert saved.arguments.pulse_record["family"] == "controlnet"
    target = tmp_path / "exported"
    assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(target)]) == 0
    loaded, info = ControlNetModel.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert state.keys() == first.state_dict().keys()
    (key,) = CONTROL
    assert [*loaded.config[key]] == [*first.config[key]]
    for key, tensor in first.state_dict().items():
        drawn = new and key.startswith("controlnet_cond_embedding.") and ".conv_out." not in key
        assert drawn or torch.equal(state[key], tensor), key
        if drawn:  # both of torch's uniform distribution for convolutions
            ratio = state[key].abs().max() / tensor.abs().max()
            assert 0.5 < ratio < 2 and state[key].shape == tensor.shape, key


def test_a_controlnet_of_another_unet_is_refused(folder, tmp_path, capsys):
    from diffusers import ControlNetModel

    wider = {key: TINY[key] for key in TINY if key not in ("sample_size", "up_block_types")}
    wider |= {"block_out_channels": (8, 24), "attention_head_dim": 4}
    ControlNetModel(**wider, **CONTROL).save_pretrained(tmp_path / "control")
    target, control = tmp_path / "checkpoint", str(tmp_path / "control")
    cases = [
        (["--from", str(folder), "--controlnet", control],
         ["block_out_channels: (8, 24), but the UNet has (8, 16)", "num_heads: (4,), but"]),
        (["--from", str(folder), "--controlnet", f"{control}s"], ["there is no such folder"]),
        (["--from", str(folder), "--controlnet", str(folder / "unet")], ["UNet2DConditionModel"]),
        (["--from", control], ["runs beside the UNet that it controls"]),
    ]  # fmt: skip
    for flags, words in cases:
        assert main(["import", *flags, "--to", str(target)]) == 2
        told = capsys.readouterr().err
        assert all(word in told for word in words), told
        assert not target.exists()
