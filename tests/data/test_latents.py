import json
import pickle

import pytest
import torch

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.latents import LatentFolder, LatentLayout, LatentType, LatentWriter

SHAPE, CONTEXT = (4, 3, 3), (2, 5)


def layout(dtype=LatentType.FLOAT32, **options):
    return LatentLayout(SHAPE, 10, dtype, CONTEXT, shard_size=4, **options)


def samples(count=10):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SHAPE, generator=generator), i % 10, torch.randn(CONTEXT, generator=generator))
        for i in range(count)
    ]


def write(root, layout, stop=None):
    """Encode all samples; ``stop`` raises before that one, as an interruption does."""
    with LatentWriter(root, layout) as writer:
        for i, sample in enumerate(samples()[writer.num_written :], start=writer.num_written):
            if i == stop:
                raise KeyboardInterrupt
            writer.add(*sample)


@pytest.mark.parametrize("dtype", LatentType)
def test_round_trip(tmp_path, dtype):
    write(tmp_path, layout(dtype))
    dataset = pickle.loads(pickle.dumps(LatentFolder(tmp_path, verify=True)))
    assert len(dataset) == 10 and dataset.image_shape == SHAPE and dataset.context_shape == CONTEXT
    stored = getattr(torch, dtype)
    for i, (latent, label, context) in enumerate(samples()):
        found = dataset[i]
        assert torch.equal(found["image"], latent.to(stored).float())
        assert torch.equal(found["context"], context.to(stored).float())
        assert found["label"].item() == label and found["image"].dtype == torch.float32
    train, held_out = open_dataset(f"latents:{tmp_path}", expected_shape=SHAPE)
    assert (len(train), len(held_out)) == (9, 1)


@pytest.mark.parametrize("stop", [0, 3, 4, 9])
def test_an_interrupted_writer_goes_on_after_the_last_whole_shard(tmp_path, stop):
    write(tmp_path / "whole", layout())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut", layout(), stop)
    assert not list((tmp_path / "cut").glob(".*"))
    assert LatentWriter(tmp_path / "cut", layout()).num_written == stop // 4 * 4
    with pytest.raises(DataError, match="writer"):
        LatentFolder(tmp_path / "cut")
    write(tmp_path / "cut", layout())
    files = [sorted((tmp_path / name).iterdir()) for name in ("whole", "cut")]
    assert [f.name for f in files[0]] == [f.name for f in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


def test_an_incomplete_folder_can_be_read_on_purpose(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, layout(), stop=6)
    with pytest.raises(DataError, match="not finished: 4 samples"):
        LatentFolder(tmp_path)
    assert len(LatentFolder(tmp_path, allow_incomplete=True)) == 4


def test_all_damage_is_listed_at_once(tmp_path):
    write(tmp_path, layout())
    (tmp_path / "latent-00000.npy").unlink()
    with open(tmp_path / "label-00001.npy", "ab") as file:
        file.write(b"x")
    damaged = bytearray((tmp_path / "context-00002.npy").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "context-00002.npy").write_bytes(damaged)
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path, verify=True)
    assert [fault.split()[0] for fault in error.value.faults] == [
        "latent-00000.npy",
        "label-00001.npy",
        "context-00002.npy",
    ]
    with pytest.raises(DataError) as error:
        LatentFolder(tmp_path)
    assert len(error.value.faults) == 2


def test_headers_must_fit_meta(tmp_path):
    write(tmp_path, layout())
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["layout"]["shape"] = [4, 3, 4]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        DataError, match=r"holds float32 \(4, 4, 3, 3\), not float32 \(4, 4, 3, 4\)"
    ):
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
            writer.add(torch.zeros(1), 10, None)
        assert len(error.value.faults) == 3
        writer.add(*samples()[0])
    with pytest.raises(DataError, match="source: there 'vae a', now 'vae b'"):
        LatentWriter(tmp_path, layout(source="vae b"))
    again = LatentWriter(tmp_path, layout(source="vae a"))
    assert again.complete and again.num_written == 1
    with pytest.raises(DataError, match="complete"):
        again.add(*samples()[1])
