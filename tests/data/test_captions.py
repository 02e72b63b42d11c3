"""Captioned images, and the word vectors that stand for their texts."""

import json

import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import Wanted
from megatron_pulse.data.text.captions import CaptionedImages
from megatron_pulse.data.text.words import WordEncoder, split_words

FIELDS = {
    "context": FieldSpec((5, 64)),
    "context_mask": FieldSpec((5,), "int64"),
    "pooled": FieldSpec((48,)),
}
TEXTS = ["A red bird", "a BLUE bird", "fish", "Straße 東京, été", "", "one two three four five six"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Smiling face with heart-shaped_eyes!", "smiling face with heart shaped eyes".split()),
        ("  E\u0301TÉ 東京 №5 ", ["été", "東京", "5"]),
        ("...", []),
    ],
)
def test_words(text, words):
    assert split_words(text) == words


def test_states_are_words_at_positions():
    encode = WordEncoder({**FIELDS, "guidance": FieldSpec(())})
    assert encode.fields == FIELDS, "guidance is no text"
    red, blue, fish, _, empty, long = [encode(text) for text in TEXTS]
    for encoded in (red, fish, empty, long):
        assert {n: (tuple(v.shape), v.dtype) for n, v in encoded.items()} == {
            n: (spec.shape, spec.torch_dtype) for n, spec in FIELDS.items()
        }
    same = [torch.equal(a, b) for a, b in zip(red["context"], blue["context"], strict=True)]
    assert same == [True, False, True, True, True]
    assert [e["context_mask"].sum().item() for e in (red, fish, empty, long)] == [4, 2, 1, 5]
    for encoded in (red, fish, empty, long):
        assert (encoded["context"].abs().sum(1) > 0).long().tolist() == (
            encoded["context_mask"].tolist()
        )
    assert torch.equal(encode("one two three four")["context"], long["context"]), "cut off"
    assert not torch.equal(encode("bird red")["context"][0], encode("red bird")["context"][1])
    torch.testing.assert_close(encode("bird red")["pooled"], encode("red bird")["pooled"])
    assert 0.8 < long["context"].std() < 1.2 and 0.7 < red["pooled"].std() < 1.3


def test_the_vectors_are_fixed():
    """Pinned: a model must meet the same words in every run and on every machine."""
    states = WordEncoder({"context": FieldSpec((2, 3))})("bird")["context"]
    expected = [[-0.9755096, -1.2310102, 0.6113129], [0.2952796, 0.7362665, 0.2458181]]
    torch.testing.assert_close(states, torch.tensor(expected), rtol=0, atol=1e-6)


def captioned(root, texts=TEXTS):
    lines = []
    for i, text in enumerate(texts):
        name = f"sub/{i}.png" if i % 2 else f"{i}.png"
        (root / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 12), (40 * i, 0, 0)).save(root / name)
        lines.append(json.dumps({"file_name": name, "text": text, "more": i}))
    (root / "metadata.jsonl").write_text("\n".join(lines) + "\n\n")
    return root


def test_captioned_images(tmp_path):
    data = CaptionedImages(captioned(tmp_path), 8, fields=FIELDS, verify=True)
    assert len(data) == 6 and data.captions == TEXTS and data.num_classes == 1
    encode = WordEncoder(FIELDS)
    for i in range(6):
        sample = data[i]
        assert sample["image"].shape == (3, 8, 8)
        assert sample["image"][0, 0, 0].item() == pytest.approx(40 * i / 127.5 - 1)
        assert all(torch.equal(sample[n], v) for n, v in encode(TEXTS[i]).items())
    assert all(torch.equal(data.null_conditioning()[n], v) for n, v in encode("").items())
    train, held_out = open_dataset(f"captions:{tmp_path}", wanted=Wanted((1, 4, 4), FIELDS))
    assert (len(train), len(held_out)) == (5, 1) and train[0]["image"].shape == (1, 4, 4)
    assert train.null_conditioning().keys() == FIELDS.keys()
    assert open_dataset(f"captions:{tmp_path}", 8)[0].fields == {}


def test_a_backbone_that_wants_more_than_text(tmp_path):
    fields = {**FIELDS, "vector": FieldSpec((3,))}
    with pytest.raises(DataError, match="reads vector") as error:
        open_dataset(f"captions:{captioned(tmp_path)}", wanted=Wanted((3, 4, 4), fields))
    assert len(error.value.faults) == 1


def test_every_bad_line_is_listed(tmp_path):
    captioned(tmp_path)
    with open(tmp_path / "metadata.jsonl", "a") as file:
        file.write('{"file_name": "no.png", "text": "a"}\n{"text": "b"}\n{"file_name": 3}\n[]\n{\n')
        file.write('{"file_name": "0.png", "text": null}\n')
    with pytest.raises(DataError) as error:
        CaptionedImages(tmp_path, 8)
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        f"metadata.jsonl, line {n}" for n in (8, 9, 10, 11, 12, 13)
    ]
    assert "no file no.png" in error.value.faults[0] and "file_name" in error.value.faults[1]


def test_folders_without_captions(tmp_path):
    with pytest.raises(DataError, match="pulse data emoji"):
        CaptionedImages(tmp_path, 8)
    (tmp_path / "metadata.jsonl").write_text("\n")
    with pytest.raises(DataError, match="names no images"):
        CaptionedImages(tmp_path, 8)
    with pytest.raises(DataError, match="image_size"):
        open_dataset(f"captions:{tmp_path}")


def test_unreadable_images_are_listed(tmp_path):
    captioned(tmp_path)
    for name in ("0.png", "sub/1.png"):
        (tmp_path / name).write_text("no image")
    with pytest.raises(DataError) as error:
        CaptionedImages(tmp_path, 8, verify=True)
    assert len(error.value.faults) == 2
