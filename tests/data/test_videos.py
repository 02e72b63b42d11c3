"""Clips: frames by time stamps, the bits of PyAV, what is left aside, and shapes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.augmentation import Augmentation
from megatron_pulse.data.build import open_buckets
from megatron_pulse.data.dataset import DataError, Variation
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.pictures import fitted
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.data.opened_images import OpenedImages
from megatron_pulse.data.picture_choice import ClipChoice
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from tests.data.films import CODECS, frames_by_pyav, turn, write_film, write_sound

pytest.importorskip("av")

from megatron_pulse.data.videos.films import Film, film_of, frames_of  # noqa: E402
from megatron_pulse.data.videos.folder import VideoFolder, frame_numbers  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))


def write_frames(folder: Path, count: int, size: tuple[int, int] = (48, 32)) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", size, (i * 12, 0, 0)).save(folder / f"frame{i + 1}.png")
    return folder


def opened(root: Path, *sizes: tuple[int, int, int], **choice: float) -> VideoFolder:
    images = OpenedImages(ClipChoice(**choice))
    return images.listed("videos", str(root), "text").resized(sizes, 3)


@pytest.mark.parametrize("suffix", CODECS)
def test_frames_are_those_of_pyav_bit_for_bit(suffix: str, tmp_path: Path) -> None:
    """All in turn, and some in another order, found by seeking."""
    path = write_film(tmp_path / f"a{suffix}")
    expected, film = frames_by_pyav(path), film_of(path)
    assert (len(film.pts), film.height, film.width) == (len(expected), 32, 48) == (20, 32, 48)
    assert all(np.array_equal(a, b) for a, b in zip(frames_of(path), expected, strict=True))
    some = [17, 2, 7, 2]
    found = frames_of(path, film.pts[some].tolist())
    assert all(np.array_equal(frame, expected[i]) for frame, i in zip(found, some, strict=True))
    again = film_of(path)  # remembered
    assert np.array_equal(again.pts, film.pts) and again.seconds_per_pts == film.seconds_per_pts


def test_frames_of_avi_are_shown_in_another_order_than_they_are_decoded(tmp_path: Path) -> None:
    path = write_film(tmp_path / "a.avi", codec="libx264", max_b_frames=3)
    expected, film = frames_by_pyav(path), film_of(path)
    assert len(film.pts) == len(expected) == 20
    found = frames_of(path, film.pts[[16, 3, 4, 5, 19]].tolist())
    for frame, i in zip(found, [16, 3, 4, 5, 19], strict=True):
        assert np.array_equal(frame, expected[i])


def test_moments_take_the_frame_that_is_shown(tmp_path: Path) -> None:
    times = [0, 40, 80, 200, 1000, 1040, 1500, 2000]  # of a variable frame rate
    film = film_of(write_film(tmp_path / "a.mkv", len(times), milliseconds=times))
    assert film.seconds == pytest.approx(np.array(times) / 1000)
    chosen = frame_numbers(film, 5, ClipChoice(fps=2.0))
    assert chosen is not None and chosen.tolist() == [0, 3, 4, 6, 7]
    begun = frame_numbers(film, 3, ClipChoice(fps=2.0), 0.5)  # from 0.5 s on
    assert begun is not None and begun.tolist() == [3, 4, 6]
    assert frame_numbers(film, 6, ClipChoice(fps=2.0)) is None
    every = frame_numbers(film, 3, ClipChoice(frame_stride=2), 0.99)
    assert every is not None and every.tolist() == [3, 5, 7]


@pytest.mark.parametrize("count", [1, 2, 5, 17])
@pytest.mark.parametrize("stride", [1, 3])
def test_every_place_is_a_clip_within_the_film(count: int, stride: int) -> None:
    for length in range(1, 60):
        film = Film(1, 1, np.arange(length) * 10, 0.004)
        fits = length >= 1 + (count - 1) * stride
        firsts = set()
        for place in np.linspace(0, 1, 101)[:-1]:
            for choice in (ClipChoice(frame_stride=stride), ClipChoice(25.0, stride)):
                found = frame_numbers(film, count, choice, place)
                assert (found is not None) == fits
                if found is not None:
                    assert (np.diff(found) == stride).all() and 0 <= found[0] <= found[-1] < length
                    firsts.add(found[0])
        if fits:
            assert {0, length - 1 - (count - 1) * stride} <= firsts


def test_a_clip_starts_by_seed_and_position(tmp_path: Path) -> None:
    for name in "abc":
        write_film(tmp_path / f"films/{name}.mkv")
    data = open_buckets(
        f"videos:{tmp_path / 'films'}", [WantedFields((3, 5, 16, 24))], images=OpenedImages()
    )[0]
    process, drawn = DiffusionProcess(Objective.FLOW), Augmentation(random_start=True)

    def clean(position: int, seed: int = 3) -> torch.Tensor:
        batch = make_microbatch(data, [(1, position)], process, seed, augmentation=drawn)
        return batch["noisy"] - batch["target"]  # noise and time cancel no film

    starts = {drawn.draw(3, 1, position).start for position in range(9)}
    assert len(starts) == 9 and all(0 <= s < 1 for s in starts)
    assert torch.equal(clean(4), clean(4))
    images = [data.image(1, drawn.draw(3, 1, p)) for p in range(9)]
    assert len({tuple(image.flatten().tolist()) for image in images}) > 3
    middle = frames_by_pyav(Path(str(data.sources[0].files[0])))[8:13]
    expected = [fitted(Image.fromarray(frame), (16, 24)) for frame in middle]
    assert torch.equal(data.image(0), torch.stack(expected, dim=1))


def test_frames_folders_and_pictures_are_clips_too(tmp_path: Path) -> None:
    root = tmp_path / "clips"
    write_film(root / "film.mp4", 12)
    write_frames(root / "walk", 12)
    Image.new("RGB", (48, 32), (200, 0, 0)).save(root / "one.png")
    for name in ("film", "walk", "one"):
        (root / f"{name}.txt").write_text(f"this is {name}")
    data = opened(root, (16, 24, 5), (16, 24, 1))
    names = [Path(data.describe(i)).name for i in range(len(data))]
    assert sorted(names) == ["film.mp4", "one.png", "walk"]
    for i, name in enumerate(names):
        assert data.caption(i) == f"this is {name.split('.')[0]}"
        image = data.image(i)
        assert image.shape == (3, 1 if name == "one.png" else 5, 16, 24)
        if name == "walk":  # in the order of numbers, not of names: frame2 before frame10
            reds = ((image[0, :, 0, 0] + 1) * 127.5).round().tolist()
            assert reds == [12.0 * n for n in range(4, 9)]
    assert len({data.identity(i) for i in range(3)}) == 3


def test_clips_have_the_most_frames_and_the_nearest_aspect_ratio(tmp_path: Path) -> None:
    root = tmp_path / "clips"
    write_film(root / "wide.mp4", 20)
    write_film(root / "tall.mp4", 20, size=(32, 48))
    write_film(root / "short.mp4", 6)
    write_film(root / "brief.mp4", 3)
    Image.new("RGB", (24, 16)).save(root / "one.png")
    sizes = [(h, w, f) for f in (9, 5, 1) for h, w in ((16, 24), (24, 16))]
    data = opened(root, *sizes)
    shapes = {Path(data.describe(i)).stem: tuple(data.image(i).shape[1:]) for i in range(len(data))}
    assert shapes == {
        "wide": (9, 16, 24), "tall": (9, 24, 16), "short": (5, 16, 24), "brief": (1, 16, 24),
        "one": (1, 16, 24),
    }  # fmt: skip
    long = opened(root, (16, 24, 9))
    assert {Path(long.describe(i)).stem for i in range(len(long))} == {"wide", "tall"}
    assert sum("left aside" in caution for caution in long.cautions) == 3
    assert any("brief.mp4: it has 3 frames, too few" in caution for caution in long.cautions)
    with pytest.raises(DataError, match=r"(?s)too few.*Give fewer frames"):
        opened(root, (16, 24, 33))


def test_what_is_used_alone_is_told_of(tmp_path: Path) -> None:
    """Captions and rates of used clips, and frames whose numbers have a gap."""
    for name, count in {"used": 20, "slow": 20, "short": 3}.items():
        write_film(tmp_path / f"{name}.mp4", count, rate=10 if name == "slow" else 25)
    (tmp_path / "used.txt").write_text("a film")
    frame = write_frames(tmp_path / "walk", 9) / "frame5.png"
    frame.unlink()
    told = "\n".join(opened(tmp_path, (16, 24, 5), fps=20.0).cautions)
    assert "1 picture (slow.mp4) without a caption" in told
    assert "1 film (slow.mp4) of fewer frames a second, at the least 10, than the 20 that" in told
    assert "left aside: walk: frame6.png follows frame4.png: a frame is missing" in told
    assert "fewer frames" not in "".join(opened(tmp_path, (16, 24, 5), fps=10.0).cautions)
    Image.new("RGB", (48, 32)).save(frame)
    assert len(opened(tmp_path, (16, 24, 5))) == 3


def damages(root: Path) -> dict[str, Path]:
    """Files that are no film, each by what is wrong."""
    whole = write_film(root.parent / "whole.mp4").read_bytes()
    found = {"empty": b"", "one byte": b"x", "no index": whole[: len(whole) // 2]}
    found |= {"zeros": bytes(5000), "text": b"a film of a cat\n" * 9, "head": whole[:40]}
    found["playlist"] = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    found["concat"] = b"ffconcat version 1.0\nfile whole.mp4\n"
    for start in (0, 4, 8, 30, 60):
        changed = bytearray(whole)
        changed[start : start + 4] = b"\xff\xff\xff\xff"
        found[f"changed at {start}"] = bytes(changed)
    moov = whole.index(b"moov")
    found["no tracks"] = whole[:moov] + b"free" + whole[moov + 4 :]
    for box in (b"trak", b"mdia", b"minf", b"stbl", b"stsd"):
        place = whole.index(box)
        found[f"without {box.decode()}"] = whole[:place] + b"free" + whole[place + 4 :]
    paths = {}
    for number, (name, content) in enumerate(found.items()):
        paths[name] = root / f"{number}.mp4"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        paths[name].write_bytes(content)
    for number, cut in enumerate((1, 10, 100, 500)):
        paths[f"matroska of {cut} bytes"] = root / f"cut{number}.mkv"
        film = write_film(root.parent / "whole.mkv").read_bytes()
        paths[f"matroska of {cut} bytes"].write_bytes(film[:cut])
    paths["sound"] = write_sound(root / "sound.mp4")
    return paths


def test_what_is_no_film_is_left_aside_and_told(tmp_path: Path) -> None:
    root = tmp_path / "clips"
    wrong = damages(root)
    write_film(root / "good.mp4")
    (root / "folder.mp4").mkdir()
    data = opened(root, (16, 24, 5))
    read = [Path(data.describe(i)) for i in range(len(data))]
    for path in read:  # what FFmpeg still reads has whole clips
        assert data.image(read.index(path)).isfinite().all()
    told = [caution for caution in data.cautions if "left aside" in caution]
    aside = {path for path in wrong.values() if path not in read}
    assert root / "good.mp4" in read and len(aside) >= 15
    assert len(told) + (len(aside) > len(told)) >= min(len(aside), 20)
    alone = {name: wrong[name] for name in ("empty", "sound", "playlist", "no index")}
    reasons = dict.fromkeys(alone, "cannot be read as a film") | {
        "empty": "it is empty", "sound": "no video stream",
    }  # fmt: skip
    for name, path in alone.items():
        with pytest.raises(ValueError, match=reasons[name]):
            film_of(path)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".avi"])
def test_a_film_with_changed_bytes_is_read_or_refused(suffix: str, tmp_path: Path) -> None:
    """Never another exception, and never another number of frames."""
    whole = write_film(tmp_path / f"whole{suffix}").read_bytes()
    draw, refused = np.random.default_rng(0), 0
    for number in range(20):
        changed = bytearray(whole)
        for place in draw.integers(0, len(whole), 1 + number):
            changed[place] = int(draw.integers(256))
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(changed)
        try:
            film = film_of(path)
            assert len(frames_of(path, film.pts.tolist())) == len(film.pts)
        except ValueError as error:
            assert str(error)
            refused += 1
    assert 0 < refused


def damaged(suffix: str, folder: Path) -> dict[str, Path]:
    """Five damages of one film: cut, zeroed at two places, a wrong header, another suffix."""
    whole = write_film(folder / f"whole{suffix}").read_bytes()
    size, contents = len(whole), {"cut": (suffix, whole[: len(whole) // 2])}
    for name, start, stop in (("head", 0, size // 50), ("middle", 2 * size // 5, 9 * size // 20)):
        zeros = bytes(stop - start)
        contents[name] = suffix, whole[:start] + zeros + whole[stop:]
    contents["header"] = suffix, b"\xff" * 16 + whole[16:]
    contents["suffix"] = (".avi" if suffix == ".mp4" else ".mp4"), whole
    paths = {name: folder / f"{name}{ending}" for name, (ending, _) in contents.items()}
    for name, (_, content) in contents.items():
        paths[name].write_bytes(content)
    return paths


@pytest.mark.parametrize("suffix", CODECS)
def test_damaged_films_end_in_a_message_or_in_their_frames(suffix: str, tmp_path: Path) -> None:
    """Forty, none of which hangs; ffv1, VP9 and GIF have no checksums, and may lose one frame's
    bytes unseen (GIF's later frames build on it)."""
    paths = damaged(suffix, tmp_path)
    film = film_of(tmp_path / f"whole{suffix}")
    frames = frames_of(tmp_path / f"whole{suffix}", film.pts.tolist())
    expected = dict(zip(film.pts.tolist(), map(np.asarray, frames), strict=True))
    for name, path in paths.items():
        before = time.monotonic()
        try:
            found = film_of(path).pts.tolist()
            read = zip(found, frames_of(path, found), strict=True)
            wrong = [n for n, (at, x) in enumerate(read) if not np.array_equal(x, expected[at])]
        except ValueError as error:
            assert str(error) and name != "suffix"
            continue
        unseen = 1 if suffix in (".mkv", ".webm", ".gif") and name == "middle" else 0
        assert len(wrong) <= unseen, (name, wrong)
        assert time.monotonic() - before < 100


def test_a_film_cut_within_an_open_group_of_pictures_begins_at_its_key_frame(
    tmp_path: Path,
) -> None:
    import av

    options = {"x264-params": "open-gop=1:bframes=3:keyint=6:min-keyint=6:b-adapt=0:scenecut=0"}
    path = write_film(tmp_path / "whole.ts", 24, options=options, max_b_frames=3)
    cut, keys = tmp_path / "cut.mkv", 0
    with av.open(str(path)) as whole, av.open(str(cut), "w") as part:
        stream = part.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            keys += packet.is_keyframe
            if packet.dts is not None and keys > 1:
                packet.stream = stream
                part.mux(packet)
    expected, film = frames_of(path)[6:], film_of(cut)
    assert len(film.pts) == 18
    for frame, other in zip(frames_of(cut, film.pts.tolist()), expected, strict=True):
        assert np.array_equal(frame, other)


_BY_DECORD = """
import sys, numpy, decord
films = {}
for path in sys.argv[2:]:
    reader = decord.VideoReader(path)
    films[path] = numpy.stack([reader[i].asnumpy() for i in range(len(reader))])
numpy.savez(sys.argv[1], **films)
"""


@pytest.mark.skipif(find_spec("decord") is None, reason="decord is not installed")
def test_frames_are_those_of_decord_bit_for_bit(tmp_path: Path) -> None:
    """In a process without PyAV, whose FFmpeg is another. It opens no GIF, and of MPEG-TS it loses
    the first group of pictures."""
    suffixes = [suffix for suffix in CODECS if suffix not in (".gif", ".ts")]
    paths = [write_film(tmp_path / f"a{suffix}", size=(64, 48)) for suffix in suffixes]
    found = tmp_path / "frames.npz"
    command = [sys.executable, "-c", _BY_DECORD, str(found), *map(str, paths)]
    subprocess.run(command, check=True)
    with np.load(found) as theirs:
        for path in paths:
            assert np.array_equal(
                np.stack(list(map(np.asarray, frames_of(path)))), theirs[str(path)]
            )


def test_a_film_damaged_inside_is_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film = write_film(tmp_path / "clips/cut.mkv", 30).read_bytes()
    (tmp_path / "clips/cut.mkv").write_bytes(film[: 2 * len(film) // 3])
    write_film(tmp_path / "clips/good.mp4")
    write_film(tmp_path / "clips/other.mp4")
    flags = ["--image-size", "16", "--frames", "5"]
    code = main(["data", "check", f"videos:{tmp_path / 'clips'}", *flags])
    said = capsys.readouterr()
    whole = f"{said.out}{said.err}"
    assert "clips" in whole and code in (0, 2)
    found = film_of(tmp_path / "clips/cut.mkv")
    if code == 0:  # all frames before the cut are whole
        assert len(found.pts) == len(frames_by_pyav(tmp_path / "clips/cut.mkv")) < 30
    else:
        assert "cut.mkv" in whole


@pytest.mark.parametrize("write", [turn])
def test_a_turned_film_is_upright(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    (still, *_) = frames_by_pyav(write_film(path))
    film = film_of(write(path))
    assert (film.height, film.width) == (48, 32)
    (first, *_) = frames_of(path)
    assert np.array_equal(np.asarray(first), np.rot90(still, -1))


def test_odd_sizes_one_frame_and_pixels_that_are_not_square(tmp_path: Path) -> None:
    one = film_of(write_film(tmp_path / "one.mkv", 1, size=(35, 21)))
    assert (len(one.pts), one.height, one.width) == (1, 21, 35)
    wide = write_film(tmp_path / "wide.mp4", 3, sample_aspect_ratio=2)
    assert film_of(wide).width == 96
    assert frames_of(wide)[0].size == (96, 32)


def test_flips_and_crops_are_those_of_all_frames(tmp_path: Path) -> None:
    write_film(tmp_path / "clips/a.mkv")
    data = opened(tmp_path / "clips", (16, 16, 3))
    same = Variation(flip=True, crop=(0.2, 0.9), start=0.0)
    frames = frames_by_pyav(tmp_path / "clips/a.mkv")[:3]
    expected = [fitted(Image.fromarray(frame), (16, 16), same) for frame in frames]
    assert torch.equal(data.image(0, same), torch.stack(expected, dim=1))


def test_show_and_info_tell_of_clips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        write_film(tmp_path / f"clips/{name}.mp4")
    Image.new("RGB", (48, 32)).save(tmp_path / "clips/one.png")
    spec = f"videos:{tmp_path / 'clips'}"
    flags = ["--buckets", "24x16", "--frames", "1,5", "--fps", "25"]
    assert main(["data", "show", spec, *flags, "-o", str(tmp_path / "sheet.png")]) == 0
    assert "24x16x5" in capsys.readouterr().out
    assert main(["data", "info", spec, *flags]) == 0
    assert "24x16x5: 3 samples" in capsys.readouterr().out.replace("bucket ", "")
    for wrong, said in (
        (["--buckets", "auto", "--resolution", "16"], "give clips a list of shapes"),
        (["--image-size", "16", "--frames", "0"], "--frames 0: write whole numbers above 0"),
    ):
        assert main(["data", "info", spec, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["data", "info", "mnist", "--frames", "5"]) == 2
    assert "are for videos:PATH" in capsys.readouterr().err


def test_numbered_pictures_beside_others_are_no_film_and_that_is_said(tmp_path: Path) -> None:
    folder = write_frames(tmp_path / "films/a", 4)
    Image.new("RGB", (48, 32)).save(folder / "cover.png")
    data = opened(tmp_path / "films", (16, 24, 1))
    assert len(data) == 5
    assert "a: its numbered pictures are no film, as there are others" in str(data.cautions)


def test_what_finds_damaged_clips_has_their_sizes(tmp_path: Path) -> None:
    write_film(tmp_path / "films/a.mp4")
    data = opened(tmp_path / "films", (16, 24, 5), (16, 24, 1), fps=25.0, frame_stride=2)
    words = "--buckets 24x16 --frames 5,1 --fps 25 --frame-stride 2' lists them all"
    assert words in data.remedy
