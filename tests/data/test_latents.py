import json
import os
import pickle
import random

import numpy as np
import pytest
import torch

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.latents.layout import LatentLayout, LatentType, sha256_of
from megatron_pulse.data.latents.row_hashes import HASH_TYPE, hashes_of
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.diffusion.noise import draw
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.encoders.autoencoder import posterior_noise
from megatron_pulse.files import write_with_checksum
from tests.reference import unsealed_record

SHAPE = (4, 3, 3)
FIELDS = {
    "context": FieldSpec((2, 5)),
    "context_mask": FieldSpec((2,), "int64"),
    "time_ids": FieldSpec((6,), "float32"),
}
NULLS = {"context": torch.linspace(-1, 1, 10).view(2, 5)}


def layout(dtype=LatentType.FLOAT32, **options):
    return LatentLayout(SHAPE, 10, dtype, FIELDS, shard_size=4, **options)


def samples(count=10):
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(SHAPE, generator=generator),
            i % 10,
            {
                "context": torch.randn(2, 5, generator=generator),
                "context_mask": torch.tensor([1, i % 2]),
                "time_ids": torch.arange(6) + 1000.0 + i,
            },
        )
        for i in range(count)
    ]


def write(root, layout, stop=None):
    """Encode all samples; ``stop`` raises before that one, as an interruption does."""
    with LatentWriter(root, layout, NULLS) as writer:
        for i, sample in enumerate(samples()[writer.num_written :], start=writer.num_written):
            if i == stop:
                raise KeyboardInterrupt
            writer.add(*sample)


@pytest.mark.parametrize("dtype", LatentType)
def test_round_trip(tmp_path, dtype):
    write(tmp_path, layout(dtype))
    dataset = pickle.loads(pickle.dumps(LatentFolder(tmp_path, verify=True)))
    assert len(dataset) == 10 and dataset.image_shape == SHAPE and dataset.fields == FIELDS
    stored = getattr(torch, dtype)
    for i, (latent, label, conditioning) in enumerate(samples()):
        found = dataset[i]
        assert torch.equal(found["image"], latent.to(stored).float())
        assert torch.equal(found["context"], conditioning["context"].to(stored).float())
        assert torch.equal(found["context_mask"], conditioning["context_mask"])
        assert torch.equal(found["time_ids"], conditioning["time_ids"]), "exact in any dtype"
        assert found["label"].item() == label and found["image"].dtype == torch.float32
    null = dataset.null_conditioning()
    assert null.keys() == {"context", "context_mask"}, "time_ids stay"
    assert torch.equal(null["context"], NULLS["context"].to(stored).float())
    assert null["context_mask"].tolist() == [1, 1]
    train, held_out = open_dataset(f"latents:{tmp_path}", wanted=WantedFields(SHAPE, FIELDS, 10))
    assert (len(train), len(held_out)) == (9, 1)
    assert torch.equal(held_out.null_conditioning()["context"], null["context"])


def test_what_made_the_latents_must_be_what_is_needed(tmp_path):
    made = {"latent": "AutoencoderKL 1", "context": "text_encoder last (CLIPTextModel 1)"}
    write(tmp_path, layout(made_by=made))

    def opened(**needed):
        return open_dataset(
            f"latents:{tmp_path}", wanted=WantedFields(SHAPE, FIELDS, 10, made_by=needed)
        )

    assert opened(context="text_encoder last", pooled="x")[0].made_by == made
    opened(**made)
    with pytest.raises(DataError) as error:
        opened(context="text_encoder penultimate", latent="AutoencoderKL 2")
    assert error.value.faults == [
        f"context was made by {made['context']}, but the run needs text_encoder penultimate",
        "latent was made by AutoencoderKL 1, but the run needs AutoencoderKL 2",
    ]
    with pytest.raises(DataError, match="CLIPTextModel 1.*CLIPTextModel 2"):
        opened(context="text_encoder last (CLIPTextModel 2)")


def test_posteriors_are_kept_and_sampled_at_each_reading(tmp_path):
    kept = layout(LatentType.BFLOAT16, deviates=True)
    with LatentWriter(tmp_path, kept, NULLS) as writer:
        for i, sample in enumerate(samples()):
            writer.add(*sample, deviation=torch.full(SHAPE, i / 4))
        for given, words in ((None, "deviation is missing"), (torch.ones(2), "deviation has")):
            with pytest.raises(DataError, match=words):
                writer.add(*samples()[0], deviation=given)
    train, _ = open_dataset(f"latents:{tmp_path}", wanted=WantedFields(SHAPE, FIELDS, 10))
    index = train.source.at(7)
    assert (train.deviation(7) == index / 4).all()
    flow = DiffusionProcess(Objective.FLOW)
    for position in (3, 12):
        batch = make_microbatch(train, [(7, position)], flow, 5)
        noise = draw(5, 7, position, SHAPE).noise
        drawn = train.image(7) + index / 4 * posterior_noise(5, 7, position, SHAPE)
        assert torch.equal(batch["target"][0], noise - drawn)
    content = unsealed_record(tmp_path / "meta.json")
    del content["layout"]["deviates"]
    (tmp_path / "meta.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="shards.0.files.deviation is of no field"):
        LatentFolder(tmp_path)
    with pytest.raises(DataError, match="deviation is not part of the layout"):
        LatentWriter(tmp_path / "b", layout()).add(*samples()[0], deviation=torch.ones(SHAPE))


def test_the_size_of_the_images_is_kept(tmp_path):
    write(tmp_path / "a", layout(pixel_size=(64, 48)))
    write(tmp_path / "b", layout())
    found = [LatentFolder(tmp_path / name).pixel_size for name in ("a", "b")]
    assert found == [(64, 48), (3, 3)]


@pytest.mark.parametrize("stop", [0, 3, 4, 9])
def test_an_interrupted_writer_goes_on_after_the_last_whole_shard(tmp_path, stop):
    write(tmp_path / "whole", layout())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut", layout(), stop)
    assert not list((tmp_path / "cut").glob(".*"))
    assert LatentWriter(tmp_path / "cut", layout(), NULLS).num_written == stop // 4 * 4
    with pytest.raises(DataError, match="writer"):
        LatentFolder(tmp_path / "cut")
    if stop == 9:  # as of a writer that was killed
        (tmp_path / "cut" / ".latent-00001.77.part.npy").write_bytes(b"half")
    write(tmp_path / "cut", layout())
    files = [sorted((tmp_path / name).iterdir()) for name in ("whole", "cut")]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_a_missing_folder_is_refused_with_the_command_that_writes_it(tmp_path):
    with pytest.raises(DataError, match=r"(?s)no such folder.*pulse data write-latents .*-o .*/x"):
        LatentFolder(tmp_path / "x")


def test_an_incomplete_folder_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, layout(), stop=6)
    with pytest.raises(DataError, match="incomplete: 4 samples"):
        LatentFolder(tmp_path)


def test_all_damage_is_listed_at_once(tmp_path):
    write(tmp_path, layout())
    (tmp_path / "null-context.npy").write_bytes(b"")
    (tmp_path / "latent-00000.npy").unlink()
    with open(tmp_path / "label-00001.npy", "ab") as file:
        file.write(b"x")
    damaged = bytearray((tmp_path / "context-00002.npy").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "context-00002.npy").write_bytes(damaged)
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path, verify=True)
    assert [fault.split()[0] for fault in error.value.faults] == [
        "null-context.npy",
        "latent-00000.npy",
        "label-00001.npy",
        "context-00002.npy",
    ]
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path)
    assert len(error.value.faults) == 3


def test_a_changed_bit_of_null_conditioning_is_always_seen(tmp_path):
    write(tmp_path, layout())
    damaged = bytearray((tmp_path / "null-context.npy").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "null-context.npy").write_bytes(damaged)
    with pytest.raises(DataError, match=r"null-context.npy differs from what was written"):
        LatentFolder(tmp_path)


def test_any_flipped_bit_is_seen_when_it_is_read(tmp_path):
    """Headers at opening, rows when they are read; of which file is said."""
    write(tmp_path, layout())
    chance = random.Random(3)
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for place in (chance.randrange(8 * 128), chance.randrange(8 * len(content))):
            damaged = bytearray(content)
            damaged[place // 8 % len(content)] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=path.name):
                dataset = LatentFolder(tmp_path)
                for i in range(len(dataset)):
                    dataset[i]
        path.write_bytes(content)


def test_shards_of_before_rows_were_hashed_are_read(tmp_path):
    write(tmp_path, layout())
    content = unsealed_record(tmp_path / "meta.json")
    for shard in content["shards"]:
        (tmp_path / shard.pop("hashes")["name"]).unlink()
    (tmp_path / "meta.json").write_text(json.dumps(content))
    assert torch.equal(LatentFolder(tmp_path)[9]["image"], samples()[9][0])


def test_headers_must_fit_meta(tmp_path):
    write(tmp_path, layout())
    meta = unsealed_record(tmp_path / "meta.json")
    meta["layout"]["shape"] = [4, 3, 4]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        DataError, match=r"holds float32 \(4, 4, 3, 3\), not float32 \(4, 4, 3, 4\)"
    ):
        LatentFolder(tmp_path)


def test_a_folder_of_the_old_format_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text('{"format": 1, "layout": {"context_shape": [77, 768]}}')
    with pytest.raises(DataError, match="format is 1, but this version of megatron_pulse reads 2"):
        LatentFolder(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 9}', '{"format": 1}'])
def test_bad_meta(tmp_path, content):
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    with pytest.raises(DataError, match="meta.json"):
        LatentFolder(tmp_path)


def test_wrong_samples_and_other_layouts_are_refused(tmp_path):
    with LatentWriter(tmp_path, layout(source="vae a")) as writer:
        with pytest.raises(DataError) as error:
            writer.add(
                torch.zeros(1),
                10,
                {"context": torch.zeros(2, 4), "context_mask": torch.zeros(2), "pooled": NULLS},
            )
        faults = error.value.faults
        assert len(faults) == 6
        for part in ("latent", "context has", "context_mask is", "pooled", "time_ids", "label 10"):
            assert any(fault.startswith(part) for fault in faults), part
        writer.add(*samples()[0])
    with pytest.raises(DataError, match="source: there 'vae a', now 'vae b'"):
        LatentWriter(tmp_path, layout(source="vae b"))
    again = LatentWriter(tmp_path, layout(source="vae a"))
    assert again.complete and again.num_written == 1
    with pytest.raises(DataError, match=r"null values: there of \[\], now of \['context'\]"):
        LatentWriter(tmp_path, layout(source="vae a"), NULLS)
    with pytest.raises(DataError, match="complete"):
        again.add(*samples()[1])


def test_null_values_must_fit_and_stay(tmp_path):
    with pytest.raises(DataError) as error:
        LatentWriter(tmp_path, layout(), {"context": torch.zeros(3), "pooled": torch.zeros(2)})
    assert len(error.value.faults) == 2 and not list(tmp_path.iterdir())
    write(tmp_path, layout())
    with pytest.raises(DataError, match="null value of context: another one there"):
        LatentWriter(tmp_path, layout(), {"context": torch.zeros(2, 5)})


@pytest.mark.parametrize("name", ["labels", "latent", "a-b", "../x"])
def test_names_that_no_field_can_have(name):
    with pytest.raises(DataError, match=name):
        LatentLayout(SHAPE, 10, fields={name: FieldSpec((2,))})


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (LatentType.FLOAT16, 65519.0, None),
        (LatentType.FLOAT16, 65520.0, "the largest float16, 65504"),
        (LatentType.BFLOAT16, 65520.0, None),
        (LatentType.FLOAT32, float("nan"), "NaN or infinite"),
    ],
)
@pytest.mark.parametrize("name", ["latent", "context"])
def test_what_the_type_on_disk_cannot_hold_is_refused(tmp_path, name, dtype, value, words):
    with LatentWriter(tmp_path, layout(dtype), NULLS) as writer:
        for i, (latent, label, conditioning) in enumerate(samples()):
            if i == 7:
                given = {"latent": latent, **conditioning}
                given[name].view(-1)[3] = value
            if i == 7 and words:
                with pytest.raises(DataError, match=f"sample 7:[^$]*{name} .*{words}"):
                    writer.add(latent, label, conditioning)
            else:
                writer.add(latent, label, conditioning)
    assert len(LatentFolder(tmp_path)) == 10 - bool(words)
    with pytest.raises(DataError, match="null value of context holds NaN"):
        nulls = {"context": torch.full((2, 5), torch.nan)}
        LatentWriter(tmp_path / "nulls", layout(dtype), nulls)


def edited(root, name, row, value):
    """Write ``value`` into a row of a file, and all hashes as a writer would: none tells."""
    path = root / name
    array = np.lib.format.open_memmap(path, mode="r+")
    array.reshape(len(array), -1)[row, 0] = value
    array.flush()
    content = unsealed_record(root / "meta.json") | {"complete": True}
    for shard in content["shards"]:
        for field, file in shard["files"].items():
            if file["name"] == name:
                table = np.memmap(root / shard["hashes"]["name"], HASH_TYPE, "r+")
                table = table.reshape(len(shard["files"]), -1)
                table[sorted(shard["files"]).index(field)] = hashes_of(path, array)
                table.flush()
        for file in (*shard["files"].values(), shard["hashes"]):
            file["sha256"] = sha256_of(root / file["name"])
    for file in content["nulls"].values():
        file["sha256"] = sha256_of(root / file["name"])
    write_with_checksum(root / "meta.json", json.dumps(content))


@pytest.mark.parametrize("label", [-1, 10, 99])
def test_labels_of_no_class_are_refused(tmp_path, label):
    """A backbone's table of classes has one more row, for none of them: 10 would be trained as
    that, and 99 end a run on a GPU with an error of the device."""
    write(tmp_path, layout())
    edited(tmp_path, "label-00001.npy", 2, label)
    fault = f"label-00001.npy: its sample 2 has the label {label}, and those of 10 classes are 0"
    dataset = LatentFolder(tmp_path)
    assert dataset.label(5) == 5
    with pytest.raises(DataError, match=fault):
        dataset.label(6)
    with pytest.raises(DataError, match=fault):
        make_microbatch(dataset, [(6, 0)], DiffusionProcess(Objective.FLOW), 0, needs_image=False)
    with pytest.raises(DataError, match=fault):
        LatentFolder(tmp_path, verify=True)


@pytest.mark.parametrize("dtype", LatentType)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path, dtype, value):
    kept = layout(dtype, deviates=True)
    with LatentWriter(tmp_path, kept, NULLS) as writer:
        for sample in samples():
            writer.add(*sample, deviation=torch.ones(SHAPE))
    bits = torch.tensor(value).bfloat16().view(torch.int16).numpy().view(np.uint16)
    stored = bits if dtype is LatentType.BFLOAT16 else value
    files = ("latent-00000.npy", "deviation-00001.npy", "context-00002.npy")
    for row, name in enumerate((*files[:2], files[2])):
        edited(tmp_path, name, min(row, 1), stored)
    edited(tmp_path, "time_ids-00000.npy", 3, value)
    dataset = LatentFolder(tmp_path)
    for read in (dataset.image, dataset.deviation, dataset.conditioning):
        read(1)
    for read, index, name in (
        (dataset.image, 0, files[0]),
        (dataset.deviation, 5, files[1]),
        (dataset.conditioning, 9, files[2]),
        (dataset.conditioning, 3, "time_ids-00000.npy"),
    ):
        with pytest.raises(DataError, match=f"{name}: its sample {index % 4} holds NaN or inf"):
            read(index)
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path, verify=True)
    assert [fault.split(" holds")[0] for fault in error.value.faults] == [
        f"{name}: its sample {row}"
        for name, row in (
            (files[0], 0), ("time_ids-00000.npy", 3), (files[1], 1), (files[2], 1),
        )
    ]  # fmt: skip
    edited(tmp_path, "null-context.npy", 0, stored)
    with pytest.raises(DataError, match="null-context.npy holds NaN or infinite values"):
        LatentFolder(tmp_path)


def test_large_numbers_are_finite(tmp_path):
    """Also where their sum is not."""
    large = torch.full(SHAPE, torch.finfo(torch.float32).max)
    with LatentWriter(tmp_path, LatentLayout(SHAPE, 1, LatentType.FLOAT32)) as writer:
        writer.add(large, 0)
    assert torch.equal(LatentFolder(tmp_path, verify=True).image(0), large)


def test_what_stands_in_a_files_place_is_told(tmp_path):
    write(tmp_path, layout())
    names = ("latent-00000.npy", "label-00001.npy", "null-context.npy", "context-00000.npy")
    for name in names:
        (tmp_path / name).rename(tmp_path / f"{name}.was")
    os.mkfifo(tmp_path / names[0])
    (tmp_path / names[1]).mkdir()
    (tmp_path / names[2]).symlink_to("nothing.npy")
    with open(tmp_path / names[3], "wb") as file:
        np.savez(file, context=np.zeros(3))
        file.truncate((tmp_path / f"{names[3]}.was").stat().st_size)
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path)
    null, latent, context, label = error.value.faults
    assert null == "null-context.npy is a link to nothing.npy, which does not exist"
    assert latent == "latent-00000.npy is no regular file"
    assert context.startswith(
        "context-00000.npy is not a .npy file: the magic string is not correct"
    )
    assert label == "label-00001.npy is a folder, not a file"
    for name in names:
        path = tmp_path / name
        path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / f"{name}.was").rename(path)
    (tmp_path / "hashes-00001.bin").unlink()
    os.mkfifo(tmp_path / "hashes-00001.bin")
    with pytest.raises(DataError, match="hashes-00001.bin is no regular file"):
        LatentFolder(tmp_path)


@pytest.mark.parametrize(
    "name", ["..", "../x.npy", "/x.npy", "a/x.npy", "a\\x.npy", ".", "é" * 200]
)
def test_files_elsewhere_are_not_named(tmp_path, name):
    write(tmp_path, layout())
    content = unsealed_record(tmp_path / "meta.json")
    content["shards"][1]["files"]["label"]["name"] = name
    write_with_checksum(tmp_path / "meta.json", json.dumps(content))
    with pytest.raises(DataError, match="shards.1.files.label.name is .* a file in the folder"):
        LatentFolder(tmp_path)
