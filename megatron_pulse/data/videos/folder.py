"""Clips of a folder: films, folders of frames, and pictures as clips of one frame.

A folder whose pictures have names that differ in a number only (``0001.png``, ``0002.png``) is a
film without times. Captions are read as those of pictures (see ``images/metadata.py``), beside
films and folders of frames: ``a.txt`` for ``a.mp4`` or ``a/``.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash
from PIL import Image
from torch import Tensor

from megatron_pulse.data.captions import WordedImages
from megatron_pulse.data.dataset import (
    NO_FIELDS,
    DataError,
    FieldSpec,
    Framing,
    Variation,
)
from megatron_pulse.data.images.folder import ImageSize, classes_of
from megatron_pulse.data.images.listing import Listing, is_picture, some
from megatron_pulse.data.images.metadata import TEXT, read_captions, uncaptioned
from megatron_pulse.data.images.opening import UNREADABLE, opened
from megatron_pulse.data.images.pictures import Crop, decoded, fitted
from megatron_pulse.data.images.shapes import NearestShape, shown
from megatron_pulse.data.images.sizes import Head, heads_of
from megatron_pulse.data.picture_choice import ClipChoice
from megatron_pulse.data.split_groups import ends_hash, name_hash
from megatron_pulse.data.stored_file import StoredFile
from megatron_pulse.data.videos.films import SUFFIXES, Film, film_of, frames_of
from megatron_pulse.progress import track

_NUMBERED = re.compile(r"(.*?)(\d+)")
_NAMED = 20
"""Most clips that are named among those left aside."""
_MIDDLE = 0.5
_INSTANT_S = 1e-6
"""Difference of times that counts as none."""
_ABOVE = 1.01
"""Ratio of rates from which on clips take more frames than a film has; times are rounded."""


def frame_numbers(
    film: Film | int, count: int, choice: ClipChoice, place: float = _MIDDLE
) -> np.ndarray | None:
    """Indices of the ``count`` frames of a clip; None if the film is too short.

    A film shows at each moment the last frame whose time stamp is not later. With frames a second,
    moments are ``frame_stride / fps`` apart; otherwise every ``frame_stride``-th frame is taken, as
    always of a number of frames without times. ``place`` in [0, 1) is that of the clip's first
    frame in its free way; the default is the middle.
    """
    length = film if isinstance(film, int) else len(film.pts)
    if isinstance(film, int) or choice.fps is None or count == 1:
        free = length - 1 - (count - 1) * choice.frame_stride
        if free < 0:
            return None
        first = int(place * (free + 1))
        found: np.ndarray = np.array([first + i * choice.frame_stride for i in range(count)])
        return found
    seconds, apart = film.seconds, choice.frame_stride / choice.fps
    way = float(seconds[-1]) - (count - 1) * apart
    if way < -_INSTANT_S:
        return None
    moments = [place * max(way, 0.0) + i * apart + _INSTANT_S for i in range(count)]
    found = np.array(np.searchsorted(seconds, moments, side="right") - 1)
    return found


def frame_rate(film: Film | int, choice: ClipChoice) -> float | None:
    """Frames a second of a clip; None of frames without times."""
    if isinstance(film, int) or len(film.pts) < 2:
        return None
    rate = choice.fps or (len(film.pts) - 1) / float(film.seconds[-1])
    return rate / choice.frame_stride


@dataclass(frozen=True)
class ClipListing(Listing):
    """Files below a folder, with folders of frames in the place of their pictures.

    ``mixed`` are folders with other pictures beside numbered ones, which are then no frames.
    """

    mixed: tuple[Path, ...] = ()

    @classmethod
    def of(cls, root: Path) -> ClipListing:
        """List a folder; raises OSError as ``Listing.of``."""
        whole = Listing.of(root)
        inside = defaultdict[Path, list[Path]](list)
        for path in whole.pictures:
            if path.suffix.lower() not in SUFFIXES and path.parent != root:
                inside[path.parent].append(path)
        frames = {folder for folder, pictures in inside.items() if _are_frames(pictures)}
        files = [p for p in whole.files if p.parent not in frames or not is_picture(p)]
        mixed = [
            folder for folder, own in inside.items() if folder not in frames and _numbered(own)
        ]
        return cls(root, sorted([*files, *frames]), whole.hidden, whole.links, tuple(sorted(mixed)))

    @property
    def pictures(self) -> list[Path]:
        return [path for path in self.files if self.is_sample(path)]

    def is_sample(self, path: Path) -> bool:
        return is_picture(path) or path.suffix.lower() in SUFFIXES or path.is_dir()


def _are_frames(pictures: Sequence[Path]) -> bool:
    found = [_NUMBERED.fullmatch(path.stem) for path in pictures]
    names = {match[1] if match else None for match in found}
    return len(pictures) > 1 and len(names) == 1 and None not in names


def _numbered(pictures: Sequence[Path]) -> bool:
    found = [match[1] for path in pictures if (match := _NUMBERED.fullmatch(path.stem))]
    return len({*found}) < len(found)


def frame_files(folder: Path) -> list[Path]:
    """Pictures of a folder of frames, by their numbers."""
    return sorted(
        (path for path in folder.iterdir() if is_picture(path) and not path.name.startswith(".")),
        key=lambda path: (int(match[2]) if (match := _NUMBERED.fullmatch(path.stem)) else -1, path),
    )


def _require_no_gap(pictures: Sequence[Path]) -> None:
    """ValueError if frames, in the order of their numbers, do not all follow at one distance."""
    numbers = [int(path.stem[len(path.stem.rstrip("0123456789")) :]) for path in pictures]
    apart = min(b - a for a, b in pairwise(numbers)) if len(numbers) > 1 else 1
    for (a, first), (b, second) in pairwise(zip(numbers, pictures, strict=True)):
        if b - a != (apart or 1):
            raise ValueError(
                f"{second.name} follows {first.name}: a frame is missing or there twice. Add or "
                "remove it, or number the frames without gaps"
            )


class VideoFolder(WordedImages):
    """Clips below ``root``, in frames x height x width of several shapes.

    ``image_size`` gives (height, width) or (height, width, frames) of each. A clip has, of the
    shapes with most frames that it fills, that of the nearest aspect ratio. What cannot be read, or
    fills no shape, is left aside, with a caution. The other arguments are those of CaptionedImages.
    """

    samples = "clips"
    kind = "videos"

    def __init__(
        self,
        root: str | Path,
        image_size: ImageSize,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        column: str = TEXT,
        default: str = "",
    ) -> None:
        root = Path(root)
        if not root.is_dir():
            raise DataError(f"videos {root}", ["it is not a folder"], _WANTED)
        listing = ClipListing.of(root)
        said = read_captions(root, column, default, listing)
        captions = dict(said.pairs)
        every = [path for path, _ in said.pairs] or listing.pictures
        self.choice = ClipChoice()
        """Frames of clips, for ``resized``."""
        self._films = dict[StoredFile, Film | int]()
        aside = list[str]()
        heads = dict[StoredFile, Head]()
        for path in track(dict.fromkeys(every), "reading films", "files"):
            try:
                heads[path] = self._look(path)
            except UNREADABLE as error:
                aside.append(f"{path.relative_to(root)}: {error}")
        if not heads:
            faults = aside or ["it has no films, folders of frames or pictures"]
            raise DataError(f"videos {root}", faults, _WANTED)
        kept = [path for path in every if path in heads]
        self.class_names, labels = classes_of(root, kept) if not captions else ([], [0] * len(kept))
        texts = [text for path, text in said.pairs if path in heads]
        groups = [said.groups.get(path, "") for path in kept]
        super().__init__(
            root, kept, labels, max(len(self.class_names), 1), image_size, channels, False, texts,
            groups, fields=fields,
        )  # fmt: skip
        self._heads = [heads[path] for path in kept]
        self._bare, self._default = set(said.bare), default
        self.cautions = [
            *said.cautions,
            *_left_aside(root, aside),
            *(
                f"{folder}: its numbered pictures are no film, as there are others"
                for folder in listing.mixed
            ),
        ]

    def _look(self, path: Path) -> Head:
        """Head of a clip, whose film is then known; raises ``UNREADABLE``."""
        if path.is_dir():
            pictures = frame_files(path)
            _require_no_gap(pictures)
            self._films[path] = len(pictures)
            (head,) = heads_of(path, pictures[:1])
            if head is None:
                raise ValueError(f"its first frame, {pictures[0].name}, cannot be read")
            return head
        if path.suffix.lower() in SUFFIXES:
            film = self._films[path] = film_of(path)
            return film.height, film.width, False
        self._films[path] = 1
        (head,) = heads_of(path.parent, [path])
        if head is None:
            with opened(path):  # which says why
                raise ValueError("its head cannot be read")
        return head

    def _resize(self, image_size: ImageSize, channels: int, assigned: Sequence[int] = ()) -> None:
        sizes = [(image_size, image_size)] if isinstance(image_size, int) else [*image_size]
        super()._resize([(size[0], size[1]) for size in sizes], channels, assigned)
        self.frame_counts = [size[2] if len(size) > 2 else 1 for size in sizes]
        """Number of frames of each shape."""
        self.image_shape = (channels, self.frame_counts[0], *self.shapes[0])

    def resized(
        self, image_size: ImageSize, channels: int, fields: Mapping[str, FieldSpec] = NO_FIELDS
    ) -> Self:
        found = super().resized(image_size, channels, fields)
        return found._long_enough()

    def _long_enough(self) -> Self:
        """Leave aside what fills no shape."""
        shapes, aside, kept = list[int](), list[str](), list[int]()
        assert self._heads is not None
        for index, (path, head) in enumerate(zip(self.files, self._heads, strict=True)):
            assert head is not None
            shape = self._shape_of(self._films[path], head)
            if shape is None:
                length = self._films[path]
                count = length if isinstance(length, int) else len(length.pts)
                name = Path(str(path)).relative_to(self.root)
                aside.append(f"{name}: it has {count} frame{'s' * (count > 1)}, too few")
                continue
            kept.append(index)
            shapes.append(shape)
        if not kept:
            remedy = "Give fewer frames, a smaller stride, more frames a second, or longer films."
            raise DataError(f"videos {self.root}", _first(aside), remedy)
        self.files = [self.files[i] for i in kept]
        self.labels = [self.labels[i] for i in kept]
        self.captions = [self.captions[i] for i in kept] if self.has_captions else ()
        self._groups = [self._groups[i] for i in kept] if self.has_groups else ()
        self._heads = [self._heads[i] for i in kept]
        self._assigned, self._sound = shapes, bytearray(len(kept))
        bare = [path for path in dict.fromkeys(self._clips()) if path in self._bare]
        self.cautions = [
            *self.cautions,
            *_left_aside(self.root, aside),
            *uncaptioned(self.root, bare, self._default),
            *self._repeated_frames(),
        ]
        return self

    def _clips(self) -> Iterator[Path]:
        for path in self.files:
            assert isinstance(path, Path)
            yield path

    def _repeated_frames(self) -> Iterator[str]:
        """Caution on films with fewer frames a second than clips take."""
        rates = {
            path: rate
            for path, shape in zip(self._clips(), self._assigned, strict=True)
            if self.frame_counts[shape] > 1
            and (rate := frame_rate(self._films[path], ClipChoice())) is not None
        }
        wanted = (self.choice.fps or 0.0) / self.choice.frame_stride
        slow = {path: rate for path, rate in rates.items() if wanted > rate * _ABOVE}
        if slow:
            few, least = some(self.root, slow, "film"), min(slow.values())
            yield (
                f"{self.root}: {few} of fewer frames a second, at the least {least:.4g}, than the "
                f"{wanted:.4g} that clips take: frames are repeated. Give fewer frames a second."
            )

    def _shape_of(self, film: Film | int, head: Head) -> int | None:
        filled = [
            count
            for count in sorted({*self.frame_counts}, reverse=True)
            if frame_numbers(film, count, self.choice) is not None
        ]
        if not filled:
            return None
        alike = [i for i, count in enumerate(self.frame_counts) if count == filled[0]]
        return alike[NearestShape([self.shapes[i] for i in alike])(head[:2])]

    @property
    def assigned(self) -> Sequence[int]:
        return self._assigned

    def frames_of(self, shape: int) -> int:
        return self.frame_counts[shape]

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        """Float32 ``[c, frames, height, width]`` in [-1, 1]."""
        shape, path = self.shape_index(index), self.files[index]
        place = _MIDDLE if variation is None or variation.start is None else variation.start
        numbers = frame_numbers(self._films[path], self.frame_counts[shape], self.choice, place)
        assert numbers is not None, "too short clips are left aside"
        with self._told(index):
            pictures = self._pictures(path, numbers)
            sized = [fitted(_coloured(p, self.image_shape[0]), self.shapes[shape], variation)
                     for p in pictures]  # fmt: skip
        return torch.stack(sized, dim=1)

    def _pictures(self, path: StoredFile, numbers: np.ndarray) -> list[Image.Image]:
        assert isinstance(path, Path)
        film = self._films[path]
        if not isinstance(film, int):
            return frames_of(path, film.pts[numbers].tolist())
        files = frame_files(path) if path.is_dir() else [path]
        pictures = []
        for number in numbers.tolist():
            with opened(files[number]) as file:
                pictures.append(decoded(file, 3))
        if len({picture.size for picture in pictures}) > 1:
            raise ValueError("its frames have several sizes")
        return pictures

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        assert self._heads is not None
        head = self._heads[index]
        assert head is not None
        target, place = self.shapes[self.shape_index(index)], None
        place = None if variation is None else variation.crop
        corner = Crop.of((head[1], head[0]), target, place).corner
        rate = frame_rate(self._films[self.files[index]], self.choice)
        whole = Framing(head[:2], corner, target, motion_bucket=self.choice.motion_bucket)
        return whole if rate is None else replace(whole, fps=max(1, round(rate)))

    @property
    def remedy(self) -> str:
        """The remedy for clips that cannot be read."""
        spec, choice = shlex.quote(f"{self.kind}:{self.root}"), self.choice
        words = [
            f"--buckets {','.join(dict.fromkeys(map(shown, self.shapes)))}",
            f"--frames {','.join(map(str, dict.fromkeys(self.frame_counts)))}",
            *([] if choice.fps is None else [f"--fps {choice.fps:g}"]),
            *([] if choice.frame_stride == 1 else [f"--frame-stride {choice.frame_stride}"]),
        ]
        return (
            "Replace or remove it, or train with --pulse-skip-corrupt to skip such clips. "
            f"'pulse data check {spec} {' '.join(words)}' lists them all."
        )

    def check(self, index: int) -> None:
        """Decode all frames, and compare their number with that of the time stamps."""
        if self._sound[index]:
            return
        path = self.files[index]
        film = self._films[path]
        with self._told(index):
            if isinstance(film, int):
                self._pictures(path, np.arange(film))
            else:
                assert isinstance(path, Path)
                frames_of(path, film.pts.tolist())
        self._sound[index] = 1

    @contextmanager
    def opened(self, index: int) -> Iterator[None]:  # type: ignore[override]
        """Nothing is left to read of a clip whose head is known."""
        yield

    def identity(self, index: int) -> int:
        path = self.files[index]
        if isinstance(path, Path) and path.is_dir():
            return name_hash(repr([ends_hash(file) for file in frame_files(path)]))
        return super().identity(index)

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        return [name_hash(f"{self._ends(self.files[i])} {self.caption(i)}") for i in indices]

    def _ends(self, path: StoredFile) -> int:
        if isinstance(path, Path) and path.is_dir():
            whole = xxhash.xxh3_64()
            for file in frame_files(path):
                whole.update(ends_hash(file).to_bytes(8, "little"))
            return whole.intdigest() >> 1
        return ends_hash(path)


_WANTED = (
    "Give a folder with films (" + ", ".join(SUFFIXES) + "), folders of numbered pictures, or "
    "pictures."
)


def _coloured(picture: Image.Image, channels: int) -> Image.Image:
    return picture.convert("L") if channels == 1 else picture


def _left_aside(root: Path, faults: Sequence[str]) -> list[str]:
    """Cautions on clips that are not used."""
    return [f"{root}: left aside: {fault}" for fault in _first(faults)]


def _first(faults: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    return [*faults[:_NAMED], *[f"{len(faults) - _NAMED} more"] * (len(faults) > _NAMED)]
