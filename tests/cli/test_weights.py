"""``pulse import`` and ``pulse export``: diffusers folders and U-ViT's files, there and back."""

import copy
import errno
import json
import os
import shutil
import time
import zipfile
from unittest.mock import patch

import pytest
import torch

import model_specs
from megatron_pulse.backbone.published import PublishedError
from megatron_pulse.cli.main import main
from megatron_pulse.integration.checkpoint.checkpoints import read_saved_run
from tests.ranks import run_ranks

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

EPSILON = ["--objective", "epsilon", "--noise-schedule", "scaled_linear"]


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
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    target = tmp_path_factory.mktemp("imported") / "checkpoint"
    with patch.object(strategy.logger, "warning") as warning:
        assert main(["import", "--from", str(folder), "--to", str(target)]) == 0
    assert not warning.called, "of what nobody has asked for"
    return target


def test_there_and_back_bit_for_bit(folder, checkpoint, tmp_path):
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
    from megatron_pulse.integration.checkpoint.weights import weights_of, whole_stage

    options = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    backbone = model_specs.load_backbone("uvit-tiny", options)
    stage = whole_stage(backbone, initialise=True)
    tensors = to_published(model_specs.published_form(backbone), weights_of(stage))
    write_state_dict(tmp_path / f"model{suffix}", tensors)
    flags = [text for key, value in options.items() for text in ("--option", f"{key}={value}")]
    flags += ["--backbone", "uvit-tiny"]
    source = ["--from", str(tmp_path / f"model{suffix}"), *EPSILON]
    target = ["--to", str(tmp_path / "checkpoint")]
    assert main(["import", *source, *flags, *target]) == 0
    again = tmp_path / f"again{suffix}"
    assert main(["export", "--load", str(tmp_path / "checkpoint"), "--to", str(again)]) == 0
    found = read_state_dict(again)
    assert found.keys() == tensors.keys()
    assert "in_blocks.0.attn.qkv.weight" in found
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


def damaged(folder, tmp_path, change):
    """A copy of the UNet with one file of weights, changed."""
    from safetensors.torch import save_file

    from megatron_pulse.diffusion.published import read_folder

    copy = tmp_path / "damaged"
    copy.mkdir()
    shutil.copy(folder / "unet" / "config.json", copy)
    tensors = dict(read_folder(folder / "unet"))
    change(tensors)
    save_file(tensors, copy / "diffusion_pytorch_model.safetensors")
    return copy


def importing(source, tmp_path, *flags):
    return ["import", "--from", str(source), "--to", str(tmp_path / "checkpoint"), *flags]


def wrong_names(tensors):
    del tensors["conv_in.bias"], tensors["mid_block.resnets.0.norm1.weight"]
    tensors["conv_in.lora"] = torch.zeros(1)
    tensors["conv_out.bias"] = torch.zeros(5)


def no_weights(tensors):
    tensors["conv_in.bias"] = tensors["conv_in.bias"].to(torch.int8)
    tensors["conv_out.bias"] = tensors["conv_out.bias"].bool()
    tensors["conv_norm_out.weight"] = tensors["conv_norm_out.weight"].to(torch.complex64)
    tensors["conv_in.weight"][1, 0, 2, 1] = torch.inf
    tensors["conv_out.weight"] = tensors["conv_out.weight"].half()
    tensors["conv_out.weight"][0, 3, 0, 0] = torch.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_names, ["4 faults", "conv_in.bias is missing", "conv_in.lora is unexpected",
                       "mid_block.resnets.0.norm1.weight is missing",
                       "conv_out.bias has the shape [5], expected [4]"]),
        (no_weights, ["5 faults", "conv_in.bias has the type int8, expected float32",
                      "conv_out.bias has the type bool",
                      "conv_norm_out.weight has the type complex64",
                      "conv_in.weight holds NaN or infinite values",
                      "conv_out.weight holds NaN or infinite values"]),
    ],
)  # fmt: skip
def test_every_wrong_tensor_is_named(change, words, folder, tmp_path, refused):
    refused(importing(damaged(folder, tmp_path, change), tmp_path, *EPSILON), *words)


def sharded(folder, root, change=lambda weight_map: None, **settings):
    """A copy of the UNet in shards, with other ``settings``, whose index ``change`` alters."""
    shutil.copytree(folder / "unet", root)
    index, config = next(root.glob("*.index.json")), root / "config.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return root


def lost_shard(folder, root):
    next(sharded(folder, root).glob("*00002-of*")).unlink()
    return root


def name_in_two_files(folder, root):
    from safetensors.torch import load_file, save_file

    first, second = sorted(sharded(folder, root).glob("*.safetensors"))[:2]
    save_file({**load_file(second), **dict([next(iter(load_file(first).items()))])}, second)
    return root


def named(file):
    return lambda f, t: sharded(f, t, lambda files: files.update({"conv_in.bias": file}))


UNSOUND = {
    "missing": (lambda f, t: t, ["there is no such file or folder"]),
    "empty": (lambda f, t: t.parent, ["not a diffusers folder", "config.json"]),
    "class": (lambda f, t: sharded(f, t, _class_name="Kandinsky"), ["no family builds", "UNet2D"]),
    "settings": (
        lambda f, t: sharded(f, t, resnet_time_scale_shift="shift", dual_cross_attention=True),
        ["resnet_time_scale_shift", "dual_cross_attention"],
    ),
    "file": (lambda f, t: f / "unet" / "config.json", ["say with --backbone"]),
    "shard": (lost_shard, ["00002-of", "is missing"]),
    "index of other names": (
        lambda f, t: sharded(f, t, lambda m: m.update({"conv_in.b": m.pop("conv_in.bias")})),
        ["conv_in.b is in no file"],
    ),
    "twice": (name_in_two_files, [" is in diffusion", "1-of-00", " and in diffusion", "2-of-00"]),
    **{
        f"index leads to {file!r}": (named(file), [f"{file!r} is not the name of a file"])
        for file in ("../../secret.safetensors", "/etc/hosts", "a/b", "..", "")
    },
}


@pytest.mark.parametrize("case", UNSOUND)
def test_what_cannot_be_imported(case, folder, tmp_path, refused):
    make, words = UNSOUND[case]
    source = make(folder, tmp_path / "unet")
    refused(importing(source, tmp_path, *([] if source.is_file() else EPSILON)), *words)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"cross_attention_dim": 7}, ["to_k.weight has the shape [16, 6], expected [16, 7]"]),
        ({"block_out_channels": [8000, 16000]}, ["make a model of", "or more", "another model's"]),
        ({"layers_per_block": 200}, ["make a model of", "tensors there (conv_in"]),
        ({"layers_per_block": 10**6}, ["1000000 is beyond 1,000"]),
        ({"sample_size": 8_000_000}, ["values for each sample"]),
    ],
)
def test_sizes_of_another_model_are_refused_before_anything_is_built(
    sizes, words, folder, tmp_path, refused, monkeypatch
):
    from megatron_pulse.integration.checkpoint import weights

    monkeypatch.setattr(weights, "whole_stage", None)
    source = sharded(folder, tmp_path / "unet", **sizes)
    begin = time.process_time()
    refused(importing(source, tmp_path, *EPSILON), *words)
    assert time.process_time() - begin < 60  # to build one takes minutes


def test_null_classes_are_for_models_with_classes(folder, tmp_path, refused):
    refused(importing(folder, tmp_path, "--null-class"), "has no classes")


def test_targets_are_never_overwritten(folder, checkpoint, tmp_path, refused):
    (tmp_path / "mine").write_text("mine")
    for target in (tmp_path, tmp_path / "mine"):
        for words in (["import", "--from", str(folder)], ["export", "--load", str(checkpoint)]):
            refused([*words, "--to", str(target)], "name a new one")


def test_the_process_must_be_known(folder, tmp_path, capsys):
    flags = ["--from", str(folder / "unet"), "--to", str(tmp_path / "checkpoint")]
    assert main(["import", *flags]) == 0  # the scheduler lies beside it
    said = capsys.readouterr().out
    assert "process: v, linear betas 0.0001 to 0.02, 1000 timesteps" in said
    shutil.copytree(folder / "unet", tmp_path / "alone")
    flags = ["--from", str(tmp_path / "alone"), "--to", str(tmp_path / "other")]
    for said, lacking in (
        ([], "--objective and --noise-schedule"),
        (["--objective", "epsilon"], "with --noise-schedule"),
        (["--objective", "flow"], "with --flow-shift"),
    ):
        assert main(["import", *flags, *said]) == 2
        assert lacking in capsys.readouterr().err
    assert main(["import", *flags, *EPSILON, "--flow-shift", "3"]) == 2
    assert "only flow has that" in capsys.readouterr().err
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


def test_memory_of_an_import(tmp_path):
    """The weights in fp32 once and one published tensor, whatever else is kept of them."""
    options = ["--option", "embed_dim=768", "--option", "depth=6", "--option", "num_heads=8"]
    flags = ["--from", str(tmp_path / "half.safetensors"), "--backbone", "uvit-tiny", *options]
    flags += [*EPSILON, "--to", str(tmp_path / "checkpoint")]
    size = run_ranks(1, write_half, tmp_path / "half.safetensors", options[1::2])[0]
    growth = run_ranks(1, import_measured, flags)[0]
    assert size > 1.5e8 and growth < 1.5 * size


def write_half(path, options):
    """Writes fp16 weights; their bytes in fp32."""
    from megatron_pulse.backbone.published import to_published
    from megatron_pulse.diffusion.published import write_state_dict
    from megatron_pulse.integration.checkpoint.weights import weights_of, whole_stage

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


def test_what_torch_did_not_write_is_no_state_dict(tmp_path):
    from megatron_pulse.diffusion.published import read_state_dict

    (tmp_path / "model.pth").write_text("{}")
    with pytest.raises(PublishedError, match="no state dict that torch.save wrote"):
        read_state_dict(tmp_path / "model.pth")


def repacked(path, compression):
    """A file of ``torch.save`` with its records written anew."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def test_only_archives_as_torch_writes_them_are_read(tmp_path):
    """Compressed records can hold gigabytes in few bytes, and were mapped as other numbers."""
    from megatron_pulse.diffusion.published import read_state_dict

    path, state = tmp_path / "model.pth", {"a": torch.arange(100.0), "b": torch.ones(3, 2)}
    for before in (True, False):  # torch 1.6 wrote archives
        torch.save(state, path, _use_new_zipfile_serialization=not before)
        assert all(torch.equal(read_state_dict(path)[name], state[name]) for name in state)
    repacked(path, zipfile.ZIP_STORED)
    assert all(torch.equal(read_state_dict(path)[name], state[name]) for name in state)
    whole = path.read_bytes()
    repacked(path, zipfile.ZIP_DEFLATED)
    with pytest.raises(PublishedError, match="records are compressed .*torch.save never does"):
        read_state_dict(path)
    for changed in (b"PK\3\4" + whole, whole + b"\0", whole[:-40] + whole, whole[:60]):
        path.write_bytes(changed)
        with pytest.raises(PublishedError, match="it is no archive as torch.save writes it"):
            read_state_dict(path)


def test_heads_of_safetensors_are_as_long_as_those_of_models(tmp_path):
    """Each tensor that a head names takes a kilobyte, and there is no end to names."""
    from megatron_pulse.diffusion.published import read_state_dict

    path = tmp_path / "model.safetensors"
    tensor = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    for count, ours in ((3, True), (400_000, False)):
        head = f"{{{','.join(tensor % i for i in range(count))}}}".encode()
        path.write_bytes(len(head).to_bytes(8, "little") + head)
        if ours:
            assert len(read_state_dict(path)) == count
            continue
        with pytest.raises(PublishedError, match="its head has [0-9,]+ bytes, no more than"):
            read_state_dict(path)


def test_records_that_lie_over_each_other_are_refused(tmp_path):
    """A record that is listed a hundred times is read a hundred times."""
    from megatron_pulse.diffusion.published import read_state_dict

    path = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(10_000)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        (data,) = (one for one in archive.infolist() if one.filename.endswith("data/0"))
        for i in range(1, 100):
            again = copy.copy(data)
            again.filename = data.filename.replace("data/0", f"data/{i}")
            archive.filelist.append(again)
        archive.writestr(data.filename.replace("data/0", "last"), b"")
    with pytest.raises(PublishedError, match="its records lie over each other"):
        read_state_dict(path)


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
    from megatron_pulse.integration.data import can_drop

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
         ["block_out_channels: (8, 24), the UNet's is (8, 16)", "num_heads: (4,), the UNet's"]),
        (["--from", str(folder), "--controlnet", f"{control}s"], ["there is no such folder"]),
        (["--from", str(folder), "--controlnet", str(folder / "unet")], ["UNet2DConditionModel"]),
        (["--from", control], ["runs beside the UNet that it controls"]),
    ]  # fmt: skip
    for flags, words in cases:
        assert main(["import", *flags, "--to", str(target)]) == 2
        told = capsys.readouterr().err
        assert all(word in told for word in words), told
        assert not target.exists()
