"""Damaged files of weights, and those that would lead elsewhere, are refused with every fault."""

import copy
import time
import zipfile

import pytest
import torch

from megatron_pulse.backbone.published_weights import PublishedError
from tests.cli.small_unet import EPSILON, damaged, importing, make_folder, sharded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("pipeline"))


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
def test_import_names_every_wrong_tensor(change, words, folder, tmp_path, refused):
    refused(importing(damaged(folder, tmp_path, change), tmp_path, *EPSILON), *words)


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
    "file": (lambda f, t: f / "unet" / "config.json", ["name its --backbone"]),
    "shard": (lost_shard, ["00002-of", "is missing"]),
    "index of other names": (
        lambda f, t: sharded(f, t, lambda m: m.update({"conv_in.b": m.pop("conv_in.bias")})),
        ["conv_in.b is in no file"],
    ),
    "twice": (name_in_two_files, [" is in diffusion", "1-of-00", " and in diffusion", "2-of-00"]),
    **{
        f"index leads to {file!r}": (named(file), [f"{file!r} is not a file name"])
        for file in ("../../secret.safetensors", "/etc/hosts", "a/b", "..", "")
    },
}


@pytest.mark.parametrize("case", UNSOUND)
def test_import_refuses_other_files(case, folder, tmp_path, refused):
    make, words = UNSOUND[case]
    source = make(folder, tmp_path / "unet")
    refused(importing(source, tmp_path, *([] if source.is_file() else EPSILON)), *words)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"cross_attention_dim": 7}, ["to_k.weight has the shape [16, 6], expected [16, 7]"]),
        (
            {"block_out_channels": [8000, 16000]},
            ["describes at least", "different models"],
        ),
        ({"layers_per_block": 200}, ["describes at least", "tensors there (conv_in"]),
        ({"layers_per_block": 10**6}, ["1000000 exceeds 1,000"]),
        ({"sample_size": 8_000_000}, ["values for each sample"]),
    ],
)
def test_sizes_of_another_model_are_refused_before_anything_is_built(
    sizes, words, folder, tmp_path, refused, monkeypatch
):
    from megatron_pulse.integration.checkpoint import published_weights

    monkeypatch.setattr(published_weights, "whole_stage", None)
    source = sharded(folder, tmp_path / "unet", **sizes)
    begin = time.process_time()
    refused(importing(source, tmp_path, *EPSILON), *words)
    assert time.process_time() - begin < 60  # to build one takes minutes


def test_import_refuses_files_that_torch_did_not_write(tmp_path):
    from megatron_pulse.diffusion.published import read_state_dict

    (tmp_path / "model.pth").write_text("{}")
    with pytest.raises(PublishedError, match="not a state dict of torch.save"):
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
        with pytest.raises(PublishedError, match="it is not an archive of torch.save"):
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
        with pytest.raises(PublishedError, match="its head has [0-9,]+ bytes; at most"):
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
    with pytest.raises(PublishedError, match="its records overlap"):
        read_state_dict(path)
