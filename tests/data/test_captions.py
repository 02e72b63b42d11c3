"""Captioned images, and the word vectors that stand for their texts."""

import json
from collections import Counter

import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.captions import CaptionedImages, Encoded, WordEncoder, split_words
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.folder import ImageFolder
from megatron_pulse.data.images.metadata import read_captions
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

FIELDS = {
    "context": FieldSpec((5, 64)),
    "context_mask": FieldSpec((5,), "int64"),
    "pooled": FieldSpec((48,)),
}
TEXTS = [
    "A red bird",
    "a BLUE bird",
    "fish",
    "Straße 東京, été",
    "...",
    "one two three four five six",
]


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


def picture(path):
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new("RGB", (9, 12), (40, 0, 0)).save(path)


def said_by(data):
    names = [str(file.relative_to(data.root)) for file in data.files]
    return list(zip(names, data.captions, strict=True))


def test_texts_beside_images_and_lists_in_subfolders(tmp_path):
    for name in ("b.png", "a.webp", "cats/c.jpg", "cats/old/d.png", ".hidden/e.png"):
        picture(tmp_path / name)
    for name, text in (("b", " a red\nbird \n"), ("a", "a fish"), ("README", "about this")):
        (tmp_path / f"{name}.txt").write_text(text)
    table = 'file_name,caption,text\nc.jpg,"a cat, ""old""\nor not",x\n\nold/d.png,two,y\n'
    table += "c.jpg,another,z\n"
    (tmp_path / "cats/metadata.csv").write_bytes(table.replace("\n", "\r\n").encode())
    expected = [
        ("cats/c.jpg", "x"), ("cats/old/d.png", "y"), ("cats/c.jpg", "z"),
        ("a.webp", "a fish"), ("b.png", "a red\nbird"),
    ]  # fmt: skip
    for data in (CaptionedImages(tmp_path, 8), ImageFolder(tmp_path, 8)):
        assert said_by(data) == expected and data.num_classes == 1
    train, _ = open_dataset(f"captions:{tmp_path}#caption", 8)
    assert said_by(train.source)[0] == ("cats/c.jpg", 'a cat, "old"\nor not')
    assert train.has_captions and train.caption(0) == train.source.captions[train.at(0)]


def test_names_are_relative_to_their_list_however_the_folder_is_named(tmp_path):
    for name in ("a", "sub/b"):
        picture(tmp_path / f"{name}.png")
    names = "./b.png", "../sub/../a.png", str(tmp_path / "a.png")
    lines = [json.dumps({"file_name": name, "text": name}) for name in names]
    (tmp_path / "sub/metadata.jsonl").write_text("\n".join(lines))
    data = CaptionedImages(tmp_path / "sub" / "..", 8)
    assert [file.resolve() for file in data.files] == [
        tmp_path / name for name in ("sub/b.png", "a.png", "a.png")
    ]
    for bad in ("x" * 300, "../b.png", str(tmp_path / "b.png"), "."):
        said = json.dumps({"file_name": bad, "text": "c"})
        (tmp_path / "sub/metadata.jsonl").write_text("\n".join([*lines, said]))
        with pytest.raises(DataError, match="line 4: there is no file"):
            CaptionedImages(tmp_path, 8)


@pytest.mark.parametrize(
    ("where", "name", "meant"),
    [
        ("train", "train/a.png", "a.png"),
        ("train", "Images/train/a.png", "a.png"),
        (".", "a.png", "train/a.png"),
        (".", r"train\a.png", "train/a.png"),
        (".", "train/A.PNG", "train/a.png"),
    ],
)
def test_names_relative_to_another_folder_are_told_how_they_should_be(tmp_path, where, name, meant):
    picture(tmp_path / "train/a.png")
    line = json.dumps({"file_name": name, "text": "c"})
    (tmp_path / where / "metadata.jsonl").write_text(line)
    with pytest.raises(DataError) as error:
        CaptionedImages(tmp_path, 8)
    (fault,) = error.value.faults
    assert f"there is no file {name}; did you mean {meant}? File names are relative" in fault


@pytest.mark.parametrize(
    "name", ["../../secret/s.png", "{}/secret/s.png", "a/../../../secret/s.png"]
)
@pytest.mark.parametrize("where", [".", "list"])
def test_files_outside_of_the_folder_are_not_read(tmp_path, name, where, monkeypatch):
    """Wherever in it the list lies, and however the folder is named; a link in it is followed."""
    picture(tmp_path / "secret/s.png")
    folder = tmp_path / "photos"
    for path in ("a.png", "list/b.png", "list/deep/c.png"):
        picture(folder / path)
    name = name.format(tmp_path) if where == "list" or "{" in name else name[3:]
    said = [{"file_name": n, "text": "x"} for n in (name, str(folder / "a.png"))]
    (folder / where / "metadata.jsonl").write_text("\n".join(map(json.dumps, said)))
    monkeypatch.chdir(tmp_path)
    for root in (folder, "photos"):
        with pytest.raises(DataError) as error:
            CaptionedImages(root, 8)
        assert error.value.faults[0].endswith(f"line 1: {repr(name)[:80]} is outside of the folder")
        assert not any("a.png" in fault for fault in error.value.faults), "it is in the folder"
    (folder / where / "metadata.jsonl").unlink()
    said = '{"file_name": "link.png", "text": "x"}'
    (folder / "linked").mkdir()
    (folder / "linked/metadata.jsonl").write_text(said)
    (folder / "linked/link.png").symlink_to(tmp_path / "secret/s.png")
    for path in ("a.png", "list/b.png", "list/deep/c.png"):
        (folder / path).unlink()
    assert CaptionedImages("photos", 8).image(0).shape == (3, 8, 8)


def test_a_folder_of_classes_may_have_captions(tmp_path):
    for name in ("dog/a", "cat/b", "cat/c"):
        picture(tmp_path / f"{name}.png")
    data, _ = open_dataset(f"folder:{tmp_path}", 8, validation_fraction=0)
    assert not data.has_captions and data.caption(0) == ""
    for name in ("dog/a", "cat/b", "cat/c"):
        (tmp_path / f"{name}.txt").write_text(f"this is {name}")
    data = ImageFolder(tmp_path, 8)
    assert data.class_names == ["cat", "dog"] and data.labels == [0, 0, 1]
    assert data.captions == ["this is cat/b", "this is cat/c", "this is dog/a"]


def test_pictures_without_a_caption_are_counted_and_have_the_default(tmp_path):
    for name in ("a", "b", "c", "d", "e", "f"):
        picture(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text(" \n")
    (tmp_path / "f.txt").write_text("six")  # listed without a caption
    said = [{"file_name": "c.png", "text": ""}, {"file_name": "d.png"}]
    said += [{"file_name": "e.png", "text": "five"}, {"file_name": "f.png", "text": None}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, said)))
    captions = dict.fromkeys(("b.png", "c.png", "d.png"), "")
    captions |= {"a.png": "one", "e.png": "five", "f.png": "six"}
    data = CaptionedImages(tmp_path, 8, fields=FIELDS)
    assert dict(said_by(data)) == captions
    (caution,) = data.cautions
    assert "3 pictures (c.png, d.png, b.png) without a caption" in caption_free(caution)
    assert caution.endswith("they train unconditionally")
    train, _ = open_dataset(f"folder:{tmp_path}", 8, default_caption="a thing")
    assert Counter(train.source.captions) == {"a thing": 3, "one": 1, "five": 1, "six": 1}
    assert train.cautions[0].endswith("caption 'a thing' is used")


def test_the_default_caption_is_that_of_all_where_none_has_any(tmp_path):
    for name in ("cat/a", "dog/b"):
        picture(tmp_path / f"{name}.png")
    data = ImageFolder(tmp_path, 8, default="a photo of sks")
    assert data.class_names == ["cat", "dog"] and data.captions == ["a photo of sks"] * 2
    assert CaptionedImages(tmp_path, 8, default="x").captions == ["x", "x"]


def caption_free(text):
    return text.replace(", or with an empty one", "")


def test_an_uncaptioned_sample_is_one_whose_conditioning_is_dropped(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_text("one")

    class Encode:
        def __call__(self, text):
            assert text, "an empty text may be another one than none"
            return {"context": torch.ones(2)}

        def null(self):
            return {"context": torch.zeros(2)}

        parts = {}

    data = Encoded(ImageFolder(tmp_path, 8), Encode(), {"context": FieldSpec((2,))})
    batch = make_microbatch(data, [(0, 0), (1, 1)], DiffusionProcess(Objective.V), 0)
    assert batch["context"].tolist() == [[1, 1], [0, 0]]
    assert batch["dropped"].tolist() == [False, True]


def test_lines_without_a_caption_are_one_sample(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": ""}\n' * 2)
    assert read_captions(tmp_path, default="any").pairs == [(tmp_path / "a.png", "any")]
    (tmp_path / "a.txt").write_text("a red bird")
    assert read_captions(tmp_path).pairs == [(tmp_path / "a.png", "a red bird")]


def test_a_text_of_several_pictures_is_said(tmp_path):
    for name in ("a.png", "a.jpg", "b.png"):
        picture(tmp_path / name)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    data = CaptionedImages(tmp_path, 8)
    assert data.captions == ["a", "a", "b"]
    (caution,) = data.cautions
    assert "1 text beside several pictures" in caution and "(a.jpg and a.png)" in caution


def test_keys_that_nothing_reads_are_not_looked_at(tmp_path):
    for name in ("a", "b"):
        picture(tmp_path / f"{name}.png")
    extra = '"score": NaN, "hash": 15148389476238741504, "p": 1e-33, "alt": "\\u000b\t", "p": 2'
    line = '{{"file_name": "{}.png", "text": "x", ' + extra + ', "gruop": "g"}}\n'
    (tmp_path / "metadata.jsonl").write_text("".join(line.format(n) for n in "ab"))
    data = CaptionedImages(tmp_path, 8)
    assert data.captions == ["x", "x"]
    (caution,) = data.cautions
    assert "the key 'gruop', on 2 lines" in caution and "Did you mean 'group'?" in caution
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "txt": "x"}\n' * 2)
    with pytest.raises(DataError, match=r"all lines: text is missing; did you mean txt\? it has"):
        CaptionedImages(tmp_path, 8)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x", "text": "y"}\n')
    with pytest.raises(DataError, match="'text' occurs more than once"):
        CaptionedImages(tmp_path, 8)


def test_listed_files_of_other_formats_are_left_aside(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "b.avif").write_bytes(b"x")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\nb.avif,y\n")
    data = CaptionedImages(tmp_path, 8)
    assert said_by(data) == [("a.png", "x")]
    assert "1 picture (b.avif) in unsupported formats" in data.cautions[0]
    assert "1 listed file (b.avif) of unsupported format" in data.cautions[1]


@pytest.mark.parametrize(
    ("table", "caption"),
    [
        ("file_name;text\na.png;one, two\n", "one, two"),
        ("file_name\ttext\na.png\tone; two\n", "one; two"),
        ('file_name, text\na.png, "one, two"\n', "one, two"),
        ("file_name ,text ; other\na.png, one\n", None),
        ('\ufefffile_name ; "text";x\r\na.png ; one, two ;y\r\n', "one, two"),
        ("file_name,text,a;b\na.png, one,x\n", " one"),
        ("file_name|text\na.png|one\n", None),
    ],
)
def test_tables_have_commas_semicolons_or_tabs(table, caption, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_bytes(table.encode())
    if caption is not None:
        assert read_captions(tmp_path).pairs == [(tmp_path / "a.png", caption)]
        return
    with pytest.raises(DataError, match="metadata.csv: expected one column named .*text") as caught:
        read_captions(tmp_path)
    told = "; columns are separated by commas, semicolons or tabs; it has file_name|text"
    assert (told in str(caught.value)) == ("|" in table)


def test_a_carriage_return_alone_ends_no_line(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\ra.png,cat\r")
    with pytest.raises(DataError, match=r"line 1: it holds a carriage return .* End lines") as told:
        read_captions(tmp_path)
    assert "universal" not in str(told.value)
    (tmp_path / "metadata.csv").write_bytes(b'file_name,text\r\na.png,"a\rcat"\r\n')
    assert read_captions(tmp_path).pairs == [(tmp_path / "a.png", "a\rcat")]


def test_faults_of_captions_are_listed_at_once(tmp_path):
    for name in ("a", "b", "c", "d", "f", "sub/e"):
        picture(tmp_path / f"{name}.png")
    table = "file_name,text\na.png,one\nno.png,two\nb.png, \n,\nc.png,3,4\nd.png,same\n"
    table += "no\0.png,x\nc.png,\x1b[1m\n"
    (tmp_path / "metadata.csv").write_text(table)
    (tmp_path / "a.txt").write_text("another")
    (tmp_path / "d.txt").write_text("same\n")
    for name, text in (("metadata.csv", "file_name,texts\n"), ("metadata.jsonl", "\n")):
        (tmp_path / "sub" / name).write_text(text)
    (tmp_path / "sub/e.txt").write_bytes(b"\xff")
    with pytest.raises(DataError) as error:
        CaptionedImages(tmp_path, 8)
    faults = error.value.faults
    for words in (
        "sub/metadata.jsonl and sub/metadata.csv both exist",
        "metadata.csv, line 3: there is no file no.png",
        "metadata.csv, line 6: 3 cells for 2 columns",
        "metadata.csv, line 8: there is no file no\0.png",
        "metadata.csv, line 9: the caption of c.png has the character '\\x1b'",
        "a.txt says 'another', and metadata.csv, line 2 'one'",
        "e.txt cannot be read as a caption",
    ):
        assert sum(words in fault for fault in faults) == 1, words
    assert not any("d.png" in fault or "b.png has" in fault for fault in faults)
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,one\nb.png,"two\nc.png,three\n')
    with pytest.raises(DataError, match="metadata.csv, line 4: unexpected end of data"):
        CaptionedImages(tmp_path, 8)
    (tmp_path / "sub/metadata.jsonl").unlink()
    with pytest.raises(DataError, match=r"one column named text; did you mean texts\? it has"):
        CaptionedImages(tmp_path, 8)


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
    train, held_out = open_dataset(f"captions:{tmp_path}", wanted=WantedFields((1, 4, 4), FIELDS))
    assert (len(train), len(held_out)) == (5, 1) and train[0]["image"].shape == (1, 4, 4)
    assert train.null_conditioning().keys() == FIELDS.keys()
    assert open_dataset(f"captions:{tmp_path}", 8)[0].fields == {}


def test_a_backbone_that_wants_more_than_text(tmp_path):
    fields = {**FIELDS, "vector": FieldSpec((3,))}
    with pytest.raises(DataError, match="reads vector") as error:
        open_dataset(f"captions:{captioned(tmp_path)}", wanted=WantedFields((3, 4, 4), fields))
    assert len(error.value.faults) == 1


def test_every_bad_line_is_listed(tmp_path):
    captioned(tmp_path)
    with open(tmp_path / "metadata.jsonl", "a") as file:
        file.write('{"file_name": "no.png", "text": "a"}\n{"text": "b"}\n{"file_name": 3}\n[]\n{\n')
        file.write('{"file_name": "0.png", "text": 3}\n{"file_name": "0.png", "text": null}\n')
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
    with pytest.raises(DataError, match="metadata.jsonl names no images"):
        CaptionedImages(tmp_path, 8)
    with pytest.raises(DataError, match="--image-size"):
        open_dataset(f"captions:{tmp_path}")


def test_unreadable_images_are_listed(tmp_path):
    captioned(tmp_path)
    for name in ("0.png", "sub/1.png"):
        (tmp_path / name).write_text("no image")
    with pytest.raises(DataError) as error:
        CaptionedImages(tmp_path, 8, verify=True)
    assert len(error.value.faults) == 2
