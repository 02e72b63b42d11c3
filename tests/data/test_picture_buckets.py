"""Pictures of several shapes: nearest bucket, contents and framing by PIL, order in any layout."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps

from megatron_pulse.data.augmentation import Augmentation, with_tags_in_order
from megatron_pulse.data.buckets import Buckets, BucketSampler, buckets_of
from megatron_pulse.data.build import open_buckets, picture_sizes
from megatron_pulse.data.dataset import CorruptSample, DataError, DiffusionDataset, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.folder import ImageFiles, ImageFolder
from megatron_pulse.data.images.pictures import Crop
from megatron_pulse.data.images.shapes import (
    NearestShape,
    chosen_shapes,
    cropped_fraction,
    read_shapes,
)
from megatron_pulse.data.images.sizes import heads_of
from megatron_pulse.data.images.survey import surveys
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from megatron_pulse.errors import UserError

Size = tuple[int, int]
SHAPES = [(16, 16), (12, 20), (20, 12), (8, 28)]
"""(height, width)"""
FIELDS = {"time_ids": FieldSpec((6,), "float32")}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 pictures of 40 sizes in three classes, with captions and some groups."""
    root, numbers = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    sizes = [tuple(numbers.integers(5, 40, 2).tolist()) for _ in range(40)]
    lines = ["file_name,text,group"]
    for i in range(300):
        name = f"{'abc'[i % 3]}/{i}.png"
        (root / name).parent.mkdir(exist_ok=True)
        pixels = numbers.integers(0, 256, (*sizes[i % 40], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)
        lines.append(f'{name},"tag {i}, red, green, blue",{i // 4 if i % 2 else ""}')
    (root / "metadata.csv").write_text("\n".join(lines))
    return root


def opened(photos: Path, spec: str = "", **how: object) -> tuple[DiffusionDataset, ...]:
    wanted = [WantedFields((3, *shape), FIELDS, 3) for shape in SHAPES]
    return open_buckets(spec or f"folder:{photos}", wanted, **how)[:2]  # type: ignore[arg-type]


def distance(shape: Size, image: Size) -> float:
    return abs(math.log(image[1] / image[0]) - math.log(shape[1] / shape[0]))


def by_pil(path: Path, size: Size, flip: bool, corner: Size) -> tuple[np.ndarray, np.ndarray]:
    """The image scaled by torchvision's rule and cropped at a corner: in one step, and in two.

    Pillow's order of passes may differ between these, and with it what is clipped.
    """
    image = Image.open(path).convert("RGB")
    image = ImageOps.mirror(image) if flip else image
    (width, height), (rows, columns) = image.size, size
    scale = max(columns / width, rows / height)
    whole = (
        (columns, max(rows, int(height * columns / width + 1e-9)))
        if scale == columns / width
        else (max(columns, int(width * rows / height + 1e-9)), rows)
    )
    scaled = np.asarray(image.resize(whole, Image.Resampling.BICUBIC))
    top, left = corner
    across, down = width / whole[0], height / whole[1]
    right, bottom = min((left + columns) * across, width), min((top + rows) * down, height)
    box = (left * across, top * down, right, bottom)
    at_once = np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC, box=box))
    return at_once, scaled[top : top + rows, left : left + columns]


def test_pictures_are_in_the_nearest_shape_as_pil_makes_them(photos: Path) -> None:
    train, held = opened(photos)
    one, other = open_buckets(f"folder:{photos}", [WantedFields((3, 16, 16), FIELDS, 3)])[:2]

    def paths(data: DiffusionDataset) -> list[str]:
        return [data.describe(i) for i in range(len(data))]

    assert sorted(paths(train)) == sorted(paths(one))  # the split of one shape
    assert sorted(paths(held)) == sorted(paths(other))
    assert not {*paths(train)} & {*paths(held)}
    labels = {one.describe(i): (one.label(i), one.caption(i)) for i in range(len(one))}
    for part in train.parts:
        size = part.image_shape[1:]
        for i in range(0, len(part), 3):
            path = Path(part.describe(i))
            width, height = Image.open(path).size
            best = min(distance(shape, (height, width)) for shape in SHAPES)
            assert distance(size, (height, width)) == pytest.approx(best)
            assert (part.label(i), part.caption(i)) == labels[str(path)]
            framing = part.framing(i)
            ids = [height, width, *framing.crop, *size]
            assert part.conditioning(i)["time_ids"].tolist() == ids
            varied = Augmentation(0.5, random_crop=True, shuffle_tags=True, keep_tags=1)
            for variation in (None, varied.draw(0, i, 5)):
                corner = part.framing(i, variation).crop
                flip = variation is not None and variation.flip
                found = ((part.image(i, variation).numpy() + 1) * 127.5).transpose(1, 2, 0)
                if size == (16, 16) and variation is None:
                    continue  # see test_framing.py
                at_once, in_two = by_pil(path, size, flip, corner)
                assert np.abs(found - at_once).max() < 0.01, path
                assert np.abs(found - in_two.astype(float)).mean() < 1.5, path
    told = buckets_of(train, held)
    assert [bucket.pixels for bucket in told] == SHAPES
    assert [bucket.num_training for bucket in told] == [len(part) for part in train.parts]
    assert told[0].describe(of=len(train)).startswith("bucket 16x16: ")
    crops = [
        cropped_fraction(framing.original, (12, 20))
        for framing in map(train.parts[1].framing, range(len(train.parts[1])))
    ]
    assert told[1].cropped == pytest.approx(sum(crops) / len(crops))
    twice, _ = opened(photos, f"folder:{photos}*2")
    assert Counter(paths(twice)) == Counter(paths(train) * 2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_each_sample_comes_once_in_any_layout(photos: Path, data: st.DataObject) -> None:
    """DP 4, then 3, then 1, with other microbatch sizes, also of each bucket's own, are one
    uninterrupted run."""
    train = _remembered(photos)
    sizes = [len(part) for part in train.parts]
    batch, seed = 12, data.draw(st.integers(0, 9))
    per_pass = sum(-(-size // batch) for size in sizes) * batch + 2 * batch
    ends = sorted(data.draw(st.lists(st.integers(0, per_pass // batch), min_size=2, max_size=2)))
    seen, done = list[tuple[int, int]](), 0
    for replicas, end in zip((4, 3, 1), (*ends, per_pass // batch + 4), strict=True):
        own = batch // replicas
        any_size = st.sampled_from([m for m in range(1, own + 1) if own % m == 0])
        micro, several = data.draw(any_size), data.draw(st.booleans())
        micros = [data.draw(any_size) for _ in sizes] if several else []
        places = [(sizes, done * batch, micro, r, replicas, seed) for r in range(replicas)]
        ranks = [
            iter(BucketSampler(*place, group_size=batch, micro_batch_sizes=micros))
            for place in places
        ]
        until = len(seen) + (end - done) * batch
        while len(seen) < until:
            for items in map(next, ranks):
                (part,) = {train.part_of(index)[0] for index, _ in items}
                assert len(items) == (micros[part] if several else micro)
                seen += items
        done = max(done, end)
    alone = iter(BucketSampler(sizes, 0, 1, 0, 1, seed, group_size=batch))
    expected = [one for items in islice(alone, len(seen)) for one in items]
    assert seen == expected
    for number, size in enumerate(sizes):  # each pass of a shape has each of its samples once
        order = [train.part_of(i)[1] for i, _ in expected if train.part_of(i)[0] == number]
        for first in range(0, len(order) - size + 1, size):
            assert sorted(order[first : first + size]) == list(range(size))


_KNOWN: dict[Path, Buckets] = {}


def _remembered(photos: Path) -> Buckets:
    if photos not in _KNOWN:
        train, _ = opened(photos)
        assert isinstance(train, Buckets)
        _KNOWN[photos] = train
    return _KNOWN[photos]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=60),
       st.sampled_from([256, 512, 1024]), st.integers(1, 12))  # fmt: skip
def test_chosen_shapes_crop_little(sizes: list[Size], resolution: int, most: int) -> None:
    counts = Counter(sizes)
    shapes = chosen_shapes(counts, resolution, 64, most)
    assert 1 <= len(shapes) <= most
    for height, width in shapes:
        assert height % 64 == 0 and width % 64 == 0 and 0.5 <= width / height <= 2
        assert 0.75 * resolution**2 <= width * height <= resolution**2
    nearest = NearestShape(shapes)
    used = {nearest(size) for size in counts}
    assert used == set(range(len(shapes)))  # each has pictures
    cropped = [cropped_fraction(size, shapes[nearest(size)]) for size in sizes]
    one = min(
        sum(cropped_fraction(size, other) for size in sizes)
        for other in chosen_shapes(counts, resolution, 64, 12)
    )
    assert sum(cropped) <= one + 0.01 * len(sizes)  # no worse than one of them alone
    for size in counts:
        least = min(distance(shape, size) for shape in shapes)
        assert distance(shapes[nearest(size)], size) == pytest.approx(least)


def test_varied_squares_are_those_of_diffusers_sdxl_script(tmp_path: Path) -> None:
    """It resizes the shorter side, flips, then crops, and records the corner of the crop."""
    numbers = np.random.default_rng(1)
    Image.fromarray(numbers.integers(0, 256, (37, 60, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(numbers.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / "b.png")
    data = ImageFolder(tmp_path, 16)
    seen = set()
    for position in range(12):
        variation = Augmentation(0.5, random_crop=True).draw(3, 0, position)
        assert variation is not None
        image = Image.open(tmp_path / "a.png").resize((25, 16), Image.Resampling.BICUBIC)
        image = ImageOps.mirror(image) if variation.flip else image
        framing = data.framing(0, variation)
        y1, x1 = framing.crop
        theirs = np.asarray(image.crop((x1, y1, x1 + 16, y1 + 16)))
        ours = ((data.image(0, variation).numpy() + 1) * 127.5).transpose(1, 2, 0)
        assert np.abs(ours - theirs.astype(float)).mean() < 1.5
        assert framing.original == (37, 60) and framing.target == (16, 16)
        seen.add((variation.flip, framing.crop))
    assert len(seen) > 6 and {flip for flip, _ in seen} == {True, False}


def test_microbatches_are_varied_by_seed_sample_and_position(photos: Path) -> None:
    train = _remembered(photos)
    how = {
        "process": DiffusionProcess(Objective.V),
        "seed": 4,
        "augmentation": Augmentation(0.5, True),
    }
    items = [(0, 7), (3, 8), (0, 9), (0, 10)]
    whole = make_microbatch(train, items, **how)
    for row, item in enumerate(items):
        alone = make_microbatch(train, [item], **how)
        for name, values in alone.items():
            assert torch.equal(values[0], whole[name][row]), name
    assert len({tuple(ids.tolist()) for ids in whole["time_ids"][[0, 2, 3]]}) > 1


def test_tags_change_places_but_the_first() -> None:
    caption, varied = "ohwx, a, b , c, d", Augmentation(shuffle_tags=True, keep_tags=1)
    found = {with_tags_in_order(caption, varied.draw(0, 1, p)) for p in range(40)}
    assert len(found) > 10
    for text in found:
        first, *rest = text.split(", ")
        assert first == "ohwx" and sorted(rest) == ["a", "b", "c", "d"]
    assert with_tags_in_order(caption, None) == caption


def test_control_pictures_masks_and_pairs_have_the_shape_of_their_picture(tmp_path: Path) -> None:
    photos, masks = tmp_path / "photos", tmp_path / "masks"
    control, pairs = tmp_path / "photos.conditioning", tmp_path / "pairs"
    for folder in (photos, masks, control, pairs):
        folder.mkdir()
    ramp = np.linspace(0, 255, 40, dtype=np.uint8)
    lines = ["winner,loser,text"]
    for i in range(8):
        wide = np.broadcast_to(ramp[None, :, None], (20, 40, 3))
        image = Image.fromarray(np.ascontiguousarray(wide if i % 2 else wide.transpose(1, 0, 2)))
        image.putpixel((0, 0), (i, i, i))
        image.save(photos / f"{i}.png")
        image.convert("L").save(masks / f"{i}.png")
        image.resize((10, 10)).save(control / f"{i}.png")  # another aspect ratio
        image.save(pairs / f"w{i}.png")
        image.transpose(Image.Transpose.ROTATE_90).save(pairs / f"l{i}.png")
        lines.append(f"w{i}.png,l{i}.png,x")
    (pairs / "metadata.csv").write_text("\n".join(lines))
    wanted = [
        WantedFields((3, h, w), {"conditioning": FieldSpec((3, 2 * h, 2 * w))})
        for h, w in ((8, 16), (16, 8))
    ]
    train = open_buckets(f"folder:{photos}", wanted, masks=str(masks))[0]
    variation = Augmentation(0.99, random_crop=True).draw(0, 0, 0)
    for part in train.parts:
        height, width = part.image_shape[1:]
        for i in range(len(part)):
            mask, field = part.mask(i, variation), part.conditioning(i, variation)["conditioning"]
            assert mask is not None and mask.shape == (1, height, width)
            assert field.shape == (3, 2 * height, 2 * width)
            image = (part.image(i, variation) + 1) / 2
            assert (mask[0] - image[0]).abs().max() < 0.02  # both are mirrored
    wanted = [WantedFields((3, h, w)) for h, w in ((8, 16), (16, 8))]
    train = open_buckets(f"pairs:{pairs}", wanted, pairs=True)[0]
    assert len(train.parts) == 2
    for part in train.parts:
        for i in range(0, len(part), 2):
            winner, loser = (Path(part.describe(j)).name for j in (i, i + 1))
            assert winner[0] == "w" and loser == winner.replace("w", "l")
            assert part.image(i).shape == part.image(i + 1).shape


def test_strange_pictures_are_read_right_or_said(tmp_path: Path) -> None:
    numbers = np.random.default_rng(2)
    Image.fromarray(numbers.integers(0, 256, (1, 10000, 3), dtype=np.uint8)).save(
        tmp_path / "a.png"
    )
    notes = Image.Exif()
    notes[ExifTags.Base.Orientation] = 6
    Image.fromarray(numbers.integers(0, 256, (10, 30, 3), dtype=np.uint8)).save(
        tmp_path / "b.jpg", exif=notes
    )
    frames = [Image.fromarray(np.full((30, 10), i, np.uint8)) for i in (50, 200)]
    frames[0].save(tmp_path / "c.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "d.png").write_bytes((tmp_path / "a.png").read_bytes()[:20])
    (tmp_path / "e.png").write_bytes(b"no picture")
    data = ImageFolder(tmp_path, [(8, 16), (16, 8)])
    assert list(data.sizes) == [(1, 10000), (30, 10), (30, 10), None, None]
    assert list(data.assigned) == [0, 1, 1, 0, 0]
    assert [data.image(i).shape[1:] for i in range(3)] == [(8, 16), (16, 8), (16, 8)]
    assert (data.image(2) == 50 / 127.5 - 1).all()
    for i in (3, 4):
        with pytest.raises(CorruptSample, match="--buckets 16x8,8x16"):
            data.image(i)
    assert Crop.of((10000, 1), (8, 16)).box == (4999, 0, 5001, 1)


def test_sizes_are_remembered_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_pulse.data.images import sizes

    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sizes, "_FEWEST_KEPT", 2)
    folder = tmp_path / "photos"
    folder.mkdir()
    files = [folder / f"{i}.png" for i in range(4)]
    for i, path in enumerate(files):
        Image.new("L", (i + 1, 9)).save(path)
    expected = [(9, i + 1, False) for i in range(4)]
    for _ in range(2):
        assert heads_of(folder, files) == expected
    (kept,) = (tmp_path / "cache" / "picture-sizes").glob("*.npy")
    before = kept.read_bytes()
    Image.new("L", (70, 60)).save(files[2])
    assert heads_of(folder, files)[2] == (60, 70, False)
    assert kept.read_bytes() != before
    kept.write_bytes(b"damaged")
    assert heads_of(folder, files[:2]) == expected[:2]


def test_unreadable_shapes_are_refused(photos: Path) -> None:
    assert read_shapes("512x768,768x512") == [(768, 512), (512, 768)]
    for text in ("512", "512x", "0x4", "4x4,4x4", "axb"):
        with pytest.raises(UserError):
            read_shapes(text)
    with pytest.raises(DataError, match="0 times an epoch"):
        opened(photos, f"folder:{photos}*0")
    assert sum(picture_sizes(f"folder:{photos}*3").values()) == 900
    assert issubclass(ImageFolder, ImageFiles)


def test_sizes_of_buckets_that_do_not_divide_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="(?s)4 consumed samples end within 12.*12.*= 4 \\* 2"):
        BucketSampler([20, 8], 4, 2, 0, 2, 0, group_size=12, micro_batch_sizes=[2, 4])


def test_pictures_are_listed_once_in_a_start(tmp_path: Path) -> None:
    """Training has the listing by which shapes were chosen; changes are found at reading."""
    for i in range(12):
        size = (16, 8) if i % 2 else (8, 16)
        Image.new("RGB", size, (20 * i, 0, 0)).save(tmp_path / f"{i:02}.png")
        (tmp_path / f"{i:02}.txt").write_text(f"a picture {i}")
    spec, images = f"captions:{tmp_path}", OpenedImages()
    wanted = [WantedFields((3, 8, 16), FIELDS), WantedFields((3, 16, 8), FIELDS)]
    fresh = open_buckets(spec, wanted)[0]
    assert picture_sizes(spec, images=images) == {(8, 16): 6, (16, 8): 6}
    for path in tmp_path.iterdir():
        path.write_bytes(f"another {path.name}".encode())
    train = open_buckets(spec, wanted, images=images)[0]
    assert [len(part) for part in train.parts] == [len(part) for part in fresh.parts]
    assert all(train.caption(i) == fresh.caption(i) for i in range(len(train)))
    assert torch.equal(train.conditioning(0)["time_ids"], fresh.conditioning(0)["time_ids"])
    assert len(surveys([train])[0].unreadable) == 12
    with pytest.raises(CorruptSample, match="not an image"):
        train.image(0)
    with pytest.raises(DataError):
        open_buckets(spec, wanted)[0].image(0)
