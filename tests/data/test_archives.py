"""Pictures in tars and tables, beside the readers of webdataset and datasets themselves."""

import io
import json
import os
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_pulse.data.archives.webdataset import WebDataset, shards_of
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import CorruptSample, DataError, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.data.stored_file import open_stored
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def picture(value: int, width: int = 8, form: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((8, width, 3), value, np.uint8)).save(content, form)
    return content.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def read(file) -> bytes:
    with open_stored(file) as opened:
        return opened.read()


def values(dataset, count: int | None = None) -> list[int]:
    """Brightness of each picture, which the tests make all different."""
    indices = range(len(dataset) if count is None else count)
    return [round((dataset.image(i).mean().item() + 1) * 127.5) for i in indices]


names = st.text("ab7_é", min_size=1, max_size=3)
keys = st.lists(st.tuples(st.sampled_from(["", "a/", "b.c/"]), names), min_size=1, max_size=4)


@settings(max_examples=30)
@given(st.lists(keys, min_size=1, max_size=4), st.data())
def test_samples_are_those_of_webdatasets_reader(tmp_path_factory, tars, data):
    """Names, order, captions and pictures, with a cache and without."""
    root, number, paths = tmp_path_factory.mktemp("tars"), 0, []
    for shard, keys in enumerate(tars):
        members, before = [], None
        for key in map("".join, keys):
            if key == before:
                continue
            number, before = number + 1, key
            for end in data.draw(st.permutations(["PNG", "txt", "json", "cls", "x.npy"])):
                content = {"PNG": picture(number), "txt": f"tall {number}".encode()}
                members.append((f"{key}.{end}", content.get(end, b"3")))
        members.insert(0, ("__meta__/about.png", picture(255)))
        paths.append(write_tar(root / f"s-{shard:02}.tar", members))
    urls = [str(path) for path in paths]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    for _ in range(2):
        ours = WebDataset(root, 8)
        assert [(each["png"], each["txt"].decode()) for each in theirs] == [
            (read(ours.files[i]), ours.caption(i)) for i in range(len(ours))
        ]
        assert {ours.label(i) for i in range(len(ours))} == {3}
        assert ours.num_classes == 4
        assert [ours.files[i].name.rpartition(".")[0] for i in range(len(ours))] == [
            each["__key__"] for each in theirs
        ]
    assert len(set(ours.fingerprints(range(len(ours))))) == len(ours)


def _saved(rows: dict, place: Path, kind: str, **features) -> str:
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    if kind == "parquet":
        made.to_parquet(place / "rows.parquet", batch_size=2)
    else:
        made.save_to_disk(place)
    return f"{kind}:{place}"


@pytest.mark.parametrize("kind", ["webdataset", "parquet", "datasets"])
def test_an_archive_trains_as_the_folder_of_its_files(kind, tmp_path):
    """Microbatches with captions, classes apart: the same bits from a folder and an archive."""
    count, folder = 12, tmp_path / "folder"
    folder.mkdir()
    texts = [f"a bird {i}" if i != 11 else "" for i in range(count)]
    for i, text in enumerate(texts):
        (folder / f"{i:02}.png").write_bytes(picture(10 * i, 8 + i))
        (folder / f"{i:02}.txt").write_text(text)
    files = sorted(folder.glob("*.png"))
    place = tmp_path / "archive"
    place.mkdir()
    if kind == "webdataset":
        for first in (0, 5):
            chosen = files[first : 5 if not first else None]
            write_tar(place / f"s{first}.tar", [
                (each.name, each.read_bytes())
                for path in chosen for each in (path, path.with_suffix(".txt"))
            ])  # fmt: skip
        spec = f"webdataset:{place}"
    else:
        rows = {"image": [{"bytes": f.read_bytes(), "path": None} for f in files], "text": texts}
        of = {"image": datasets.Image(), "text": datasets.Value("string")}
        spec = _saved(rows, place, kind, **of)
    wanted = WantedFields((3, 8, 8), {"context": FieldSpec((4, 16))})
    process = DiffusionProcess(Objective.FLOW)
    batches = []
    for each in (f"captions:{folder}", spec):
        train, validation = open_dataset(each, wanted=wanted)
        assert (len(train), len(validation)) == (11, 1)
        batches.append([
            make_microbatch(part, [(i, i) for i in range(len(part))], process, 7, 0.0, None)
            for part in (train, validation)
        ])  # fmt: skip
        uncaptioned = [i for i in range(len(train)) if train.uncaptioned(i)]
        assert len(uncaptioned) + sum(map(validation.uncaptioned, range(1))) == 1
    for own, other in zip(*batches, strict=True):
        assert own.keys() == other.keys()
        assert all(own[name].equal(other[name]) for name in own)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_rows_have_classes_and_a_named_caption(kind, tmp_path):
    rows = {
        "png": [picture(i) for i in range(6)],
        "prompt": ["p\x07 0", None, "p 2", "p 3", "p 4", " "],
        "label": [0, 1, 0, 1, 0, 1],
    }
    kinds = {"png": datasets.Value("binary"), "prompt": datasets.Value("string")}
    place = tmp_path / "rows"
    place.mkdir()
    spec = _saved(rows, place, kind, **kinds, label=datasets.ClassLabel(names=["owl", "cat"]))
    every, _ = open_dataset(f"{spec}#prompt", 8, validation_fraction=0.0, default_caption="none")
    assert [every.caption(i) for i in range(6)] == [
        "p\ufffd 0",
        "none",
        "p 2",
        "p 3",
        "p 4",
        "none",
    ]
    assert list(every.class_names) == ["owl", "cat"]
    assert [every.label(i) for i in range(6)] == rows["label"]
    assert values(every) == list(range(6))
    unnamed, _ = open_dataset(spec, 8, validation_fraction=0.0)
    assert not unnamed.has_captions
    assert "#NAME: prompt" in unnamed.cautions[0]
    with pytest.raises(DataError, match="no column titel of texts; its columns are png, prompt"):
        open_dataset(f"{spec}#titel", 8)


def test_patterns_and_energons_splits_name_tars(tmp_path):
    tars = [write_tar(tmp_path / f"s-{i:03}.tar", [("a.png", picture(i))]) for i in range(12)]
    (tmp_path / "s-000.tar.idx").write_bytes(b"\0" * 16)
    assert shards_of(str(tmp_path)) == tars
    assert shards_of(f"{tmp_path}/s-{{009..011}}.tar") == tars[9:]
    assert shards_of(str(tars[3])) == [tars[3]]
    with pytest.raises(DataError, match=r"2 of 5 tars are missing: .*s-012.tar, .*s-013.tar"):
        shards_of(f"{tmp_path}/s-{{009..013}}.tar")
    with pytest.raises(DataError, match="goes from 3 to 1"):
        shards_of(f"{tmp_path}/s-{{3..1}}.tar")
    about = tmp_path / ".nv-meta"
    about.mkdir()

    def split(exclude=(), **parts):
        (about / "split.yaml").write_text(yaml.dump({"exclude": [*exclude], "split_parts": parts}))

    split(["s-001.tar"], train=["s-{000..004}.tar"], val=["s-005.tar"])
    assert shards_of(str(tmp_path)) == [tars[i] for i in (0, 2, 3, 4)]
    assert shards_of(f"{tmp_path}/val") == [tars[5]]
    with pytest.raises(DataError, match="no split test; its splits are: train, val"):
        shards_of(f"{tmp_path}/test")
    split(train=["../s-000.tar"])
    with pytest.raises(DataError, match="outside of the folder"):
        shards_of(str(tmp_path))
    split(["s-000.tar/a"], train=["s-000.tar"])
    with pytest.raises(DataError, match="excludes single samples"):
        shards_of(str(tmp_path))


DAMAGES = {
    "compressed": "it is compressed",
    "cut": "it is not a whole tar",
    "cut-head": "its end is missing",
    "joined": "bytes follow its end",
    "joined-small": "bytes follow its end",
    "backwards": "claims a size that cannot be",
    "huge-name": "it is not a whole tar",
    "text": "it is not a whole tar",
    "twice": "a.PNG comes twice in one sample",
    "class": "a.cls is no class number",
    "some-classes": "1 of 2 samples have no class",
    "no-picture": "its tars have no pictures",
    "empty": "its tars have no pictures",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tars_are_refused(damage, tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.png", picture(9)), ("b.png", picture(8))])
    content = path.read_bytes()
    match damage:
        case "compressed":
            with tarfile.open(path, "w:gz") as tar:
                tar.addfile(tarfile.TarInfo("a.png"))
        case "cut":
            path.write_bytes(content[: 512 + 1024 + 40])
        case "cut-head":
            path.write_bytes(content[: 512 + 512 + 100])
        case "joined-small":
            path.write_bytes(content + write_tar(path, [("c.png", picture(3))]).read_bytes())
        case "backwards":
            write_tar(path, [("x.png", picture(1)), ("a.png", picture(2)), ("b.npy", b"")])
            member = tarfile.TarInfo("b.npy")
            member.size = -1536
            write_tar(path, [("x.png", picture(1)), ("a.png", picture(2))])
            whole, end = path.read_bytes(), 4 * 512
            head = member.tobuf(tarfile.GNU_FORMAT)
            path.write_bytes(whole[:end] + head + bytes(2 * tarfile.RECORDSIZE))
        case "huge-name":
            member = tarfile.TarInfo("././@LongLink")
            member.type, member.size = tarfile.GNUTYPE_LONGNAME, 1 << 50
            path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + bytes(tarfile.RECORDSIZE))
        case "joined":
            path.write_bytes(content * 4)
        case "text":
            path.write_text("no tar at all " * 100)
        case "twice":
            write_tar(path, [("a.png", picture(1)), ("a.PNG", picture(2))])
        case "class":
            write_tar(path, [("a.png", picture(1)), ("a.cls", b"cat")])
        case "some-classes":
            write_tar(path, [("a.png", picture(1)), ("a.cls", b"1"), ("b.png", picture(2))])
        case "no-picture":
            write_tar(path, [("a.txt", b"words")])
        case "empty":
            write_tar(path, [])
    with pytest.raises(DataError, match=DAMAGES[damage]):
        open_dataset(f"webdataset:{tmp_path}", 8)


def test_odd_members_are_left_aside_or_told(tmp_path):
    """Names are never used as paths; texts that are none and pictures that are none are named."""
    link = tarfile.TarInfo("l.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = tmp_path / "odd.tar"
    said = {
        "../../up.jpg": picture(1, form="JPEG"),
        "/etc/root.webp": picture(2, form="WEBP"),
        "two.png": picture(3), "two.jpg": picture(4, form="JPEG"), "two.txt": "été\n".encode(),
        "seg.mask.png": picture(5), "seg.json": json.dumps({"caption": " c ", "n": 1}).encode(),
        "latin.png": picture(6), "latin.txt": b"\xe9t\xe9",
        "list.png": picture(7), "list.json": b"[1]",
        "number.png": picture(8), "number.json": b'{"text": 5}',
        "broken.png": picture(9)[:40],
        "gif.png": b"GIF87a", "none.txt": b"alone", "noext": b"x",
        "bom.png": picture(10), "bom.txt": "\ufeffmark".encode(),
        "long.png": picture(11), "long.txt": b"x" * (1 << 20) + b"x",
        "empty.png": b"",
    }  # fmt: skip
    with tarfile.open(path, "w") as tar:
        tar.addfile(link)
        for name, content in said.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    found = WebDataset(path, 8)
    at = {file.name: i for i, file in enumerate(found.files)}
    assert [*at][:4] == ["../../up.jpg", "/etc/root.webp", "two.png", "seg.mask.png"]
    assert found.caption(at["two.png"]) == "été"
    assert found.caption(at["seg.mask.png"]) == "c"
    assert found.caption(at["bom.png"]) == "mark"
    assert found.caption(at["../../up.jpg"]) == ""
    assert any("1 samples without a picture" in each for each in found.cautions)
    assert any("1 pictures beside the first" in each for each in found.cautions)
    assert any("1 links and sparse files" in each for each in found.cautions)
    faults = {
        "latin.png": "caption is not UTF-8", "list.png": "caption is JSON, but no object",
        "number.png": "caption is no text", "long.png": "caption has 1,048,577 bytes",
        "broken.png": "broken.png: ", "gif.png": "gif.png: ", "empty.png": "it is empty",
    }  # fmt: skip
    for name, fault in faults.items():
        with pytest.raises(CorruptSample, match=fault):
            found.check(at[name])
    sound = [name for name in at if name not in faults]
    for name in sound:
        found.check(at[name])
    with pytest.raises(DataError) as raised:
        WebDataset(path, 8, verify=True)
    assert len(raised.value.faults) == len(faults)


def test_a_tar_replaced_in_use_is_told(tmp_path):
    """The same size and time of change, other samples."""
    path = write_tar(tmp_path / "a.tar", [(f"{i}.png", picture(10 + i)) for i in range(3)])
    found, before = WebDataset(path, 8), path.stat()
    other = write_tar(tmp_path / "b.tar", [(f"{i}.png", picture(20 + i)) for i in range(3)])
    assert other.stat().st_size == before.st_size
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)
    with pytest.raises(DataError, match="has changed; begin again"):
        found.image(0)
    assert values(WebDataset(path, 8)) == [20, 21, 22]


def test_odd_tables_are_refused(tmp_path):
    of = {"image": datasets.Image(), "text": datasets.Value("string")}
    rows = {"image": [{"bytes": picture(3), "path": None}] * 3, "text": ["a", "b", "c"]}
    good = tmp_path / "good"
    _saved(rows, good, "datasets", **of)
    state = json.loads((good / "state.json").read_text())
    datasets.DatasetDict(train=datasets.load_from_disk(str(good))).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match="several splits: train"):
        open_dataset(f"datasets:{tmp_path / 'dict'}", 8)
    state["_data_files"][0]["filename"] = "../good/data-00000-of-00001.arrow"
    (good / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="names no files of the folder: ../good"):
        open_dataset(f"datasets:{good}", 8)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(DataError, match="it cannot be read"):
        open_dataset(f"parquet:{tmp_path / 'bad.parquet'}", 8)
    with pytest.raises(DataError, match="it is not there"):
        open_dataset(f"parquet:{tmp_path / 'none.parquet'}", 8)
    two = tmp_path / "two"
    both = {"left": datasets.Image(), "right": datasets.Image()}
    _saved({"left": rows["image"], "right": rows["image"]}, two, "datasets", **both)
    with pytest.raises(DataError, match=r"several columns hold pictures \(left, right\)"):
        open_dataset(f"datasets:{two}", 8)
    one, broken = len(picture(3)), tmp_path / "broken"
    _saved(rows, broken, "datasets", **of)
    file = next(broken.glob("*.arrow"))
    content = file.read_bytes()
    offsets = struct.pack("<4i", 0, one, 2 * one, 3 * one)
    beyond = struct.pack("<4i", 0, one, 2 * one, 1 << 30)
    assert content.count(offsets) == 1
    for damaged in (content.replace(offsets, beyond), content[: len(content) // 2]):
        file.write_bytes(damaged)  # pyarrow would kill the process when a row is read
        with pytest.raises(DataError, match=r"cannot be read: (.*Offset|Expected to )"):
            open_dataset(f"datasets:{broken}", 8)
    texts = tmp_path / "texts"
    _saved({"text": ["a"] * 3}, texts, "datasets", text=datasets.Value("string"))
    with pytest.raises(DataError, match="no column holds pictures; its columns are text"):
        open_dataset(f"datasets:{texts}", 8)
    pyarrow = pytest.importorskip("pyarrow")
    words = pyarrow.array([b"caf\xe9", b"b", b"c"]).view(pyarrow.string())
    kinds = pyarrow.array([picture(i) for i in range(3)])
    table = pyarrow.table({"png": kinds, "text": words, "label": pyarrow.array([0.5] * 3)})
    pyarrow.parquet.write_table(table, tmp_path / "latin.parquet")
    latin, _ = open_dataset(f"parquet:{tmp_path / 'latin.parquet'}", 8, validation_fraction=0.0)
    assert "label is of type float64" in latin.cautions[0]
    assert len(latin.fingerprints(range(3))) == 3
    with pytest.raises(CorruptSample, match="row 0: its caption is not UTF-8"):
        latin.check(0)
    assert latin.caption(1) == "b"
    holes = tmp_path / "holes"
    rows["image"] = [None, {"bytes": None, "path": "/etc/passwd"}, {"bytes": b"", "path": None}]
    kinds = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    _saved(rows, holes, "datasets", image=kinds, text=datasets.Value("string"))
    with pytest.raises(DataError) as raised:
        open_dataset(f"datasets:{holes}", 8, verify=True)
    assert [fault.partition(": ")[2][:20] for fault in raised.value.faults] == [
        "row 0: it holds no pict", "row 1: it holds a pa", "row 2: it is empty:",
    ] or len(raised.value.faults) == 3  # fmt: skip
