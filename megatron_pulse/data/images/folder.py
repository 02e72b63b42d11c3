"""Image files as a dataset: a folder of images, with classes as subfolders or none."""

from __future__ import annotations

import os
import shlex
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Self

from PIL import Image
from PIL.ImageFile import ImageFile
from torch import Tensor

from megatron_pulse.data.dataset import (
    NO_FIELDS,
    CorruptSample,
    DataError,
    DiffusionDataset,
    FieldSpec,
    Framing,
    Variation,
)
from megatron_pulse.data.images.metadata import TEXT, read_captions, uncaptioned
from megatron_pulse.data.images.opening import SUFFIXES, UNREADABLE, opened
from megatron_pulse.data.images.pictures import (
    Crop,
    decoded,
    fitted,
    upright_size,
)
from megatron_pulse.data.images.shapes import NearestShape, shown
from megatron_pulse.data.images.sizes import NUM_READERS, Head, heads_of
from megatron_pulse.data.split_groups import content_hash, ends_hash, name_hash, same_files
from megatron_pulse.data.stored_file import StoredFile
from megatron_pulse.progress import track

ImageSize = int | Sequence[tuple[int, ...]]
"""Side of square pictures, or the (height, width) of each of several shapes; of clips (height,
width, frames)."""


class ImageFiles(DiffusionDataset):
    """Images by their ``files``, each with a class in ``labels`` and possibly a caption.

    Images are scaled to cover ``image_size`` (bicubic, antialiased), cropped to their centre and
    scaled to [-1, 1]. Of several shapes each image has the one with the nearest aspect ratio (see
    ``NearestShape``), unless ``assigned`` gives the index of each. ``verify`` decodes every file at
    once and lists all unreadable ones. Otherwise a bad file raises CorruptSample with its name when
    it is read. A file that storage does not deliver raises DataError.
    """

    frames = True
    has_files = True
    samples = "pictures"
    """Name of samples for people."""
    kind = "folder"
    """How ``--pulse-data`` names such a dataset."""

    def __init__(
        self,
        root: Path,
        files: Sequence[StoredFile],
        labels: Sequence[int],
        num_classes: int,
        image_size: ImageSize,
        channels: int = 3,
        verify: bool = False,
        captions: Sequence[str] = (),
        groups: Sequence[str] = (),
        assigned: Sequence[int] = (),
    ) -> None:
        self.root = root
        self.files = files
        self.labels = labels
        self.captions = captions
        self._prefix = ""
        self.has_captions = len(captions) > 0
        self._groups = groups
        self.has_groups = any(groups)
        self.num_classes = num_classes
        self._heads: Sequence[Head | None] | None = None
        self._resize(image_size, channels, assigned)
        if verify:
            self.verify()

    def _resize(self, image_size: ImageSize, channels: int, assigned: Sequence[int] = ()) -> None:
        sizes = [(image_size, image_size)] if isinstance(image_size, int) else image_size
        if frames := [size for size in sizes if len(size) > 2 and size[2] > 1]:
            fault = f"its pictures have one frame, and {frames[0][2]} are asked for"
            remedy = "Give videos:PATH, or leave the frames out."
            raise DataError(f"{self.kind}:{self.root}", [fault], remedy)
        self.shapes = [(size[0], size[1]) for size in sizes]
        """(height, width) of each shape."""
        self.num_shapes = len(self.shapes)
        self.image_shape = (channels, *self.shapes[0])
        self._assigned = assigned
        self._sound = bytearray(len(self.files))  # 1: was decoded

    def resized(
        self, image_size: ImageSize, channels: int, fields: Mapping[str, FieldSpec] = NO_FIELDS
    ) -> Self:
        """The same files as pictures of other sizes, and texts as other ``fields``.

        Files and picture headers are not read again.
        """
        found = copy(self)
        found._resize(image_size, channels)
        return found

    def verify(self) -> None:
        """Decode every file; raises DataError with all that are unreadable."""
        if faults := list(self._verified()):
            raise DataError(f"image folder {self.root}", faults, "Replace or remove these files.")

    def __len__(self) -> int:
        return len(self.files)

    def label(self, index: int) -> int:
        return self.labels[index]

    def caption(self, index: int) -> str:
        caption = self.captions[index] if self.has_captions else ""
        return self._prefix + caption if caption else ""

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        return fitted(self._decoded(index), self.shapes[self.shape_index(index)], variation)

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        known = None if self._heads is None else self._heads[index]
        if known is None:
            with self.opened(index) as file:
                width, height = upright_size(file)
        else:
            height, width, _ = known
        target = self.shapes[self.shape_index(index)]
        place = None if variation is None else variation.crop
        return Framing((height, width), Crop.of((width, height), target, place).corner, target)

    @property
    def heads(self) -> Sequence[Head | None]:
        """Headers of the files; None for unreadable ones."""
        if self._heads is None:
            self._heads = heads_of(self.root, self.files)
        return self._heads

    @property
    def sizes(self) -> Sequence[tuple[int, int] | None]:
        """(height, width) of each image as it is; None for unreadable ones."""
        return [None if head is None else head[:2] for head in self.heads]

    @property
    def assigned(self) -> Sequence[int]:
        """Index of each image's shape; unreadable images have the first."""
        if not self._assigned:
            nearest = NearestShape(self.shapes)
            self._assigned = [0 if size is None else nearest(size) for size in self.deciding_sizes]
        return self._assigned

    @property
    def deciding_sizes(self) -> Sequence[tuple[int, int] | None]:
        """Size by which each sample has its shape."""
        return self.sizes

    def shape_index(self, index: int) -> int:
        return self.assigned[index] if self.num_shapes > 1 else 0

    def pixels_of(self, shape: int) -> tuple[int, int]:
        return self.shapes[shape]

    def begin_captions(self, prefix: str) -> None:
        """Put ``prefix`` before each caption that is not empty."""
        self._prefix = prefix

    def check(self, index: int) -> None:
        if not self._sound[index]:
            self._decoded(index)

    def describe(self, index: int) -> str:
        return str(self.files[index])

    def revision(self, index: int) -> str:
        return os.path.relpath(str(self.files[index]), self.root)

    def identity(self, index: int) -> int:
        with self._told(index):
            return content_hash(self.files[index])

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        files = dict.fromkeys(self.files[index] for index in indices)
        with ThreadPoolExecutor(NUM_READERS) as readers:
            known = dict(zip(files, readers.map(ends_hash, files), strict=True))
        return [name_hash(f"{known[self.files[i]]} {self.caption(i)}") for i in indices]

    def group(self, index: int) -> str:
        return self._groups[index] if self.has_groups else ""

    def ties(self) -> Sequence[Sequence[Hashable]]:
        pictures = same_files(self.files)
        if not self.has_groups:
            return [(picture,) for picture in pictures]
        named = [("group", group) if group else None for group in self._groups]
        return [
            (picture,) if group is None else (picture, group)
            for picture, group in zip(pictures, named, strict=True)
        ]

    def pictures(self) -> Sequence[StoredFile]:
        return self.files

    def _decoded(self, index: int) -> Image.Image:
        """Decode the whole image; raises DataError with the file's name and the remedy."""
        with self.opened(index) as file:
            image = decoded(file, self.image_shape[0])
        self._sound[index] = 1
        return image

    @contextmanager
    def opened(self, index: int) -> Iterator[ImageFile]:
        """Open the file and read only its beginning; faults become DataErrors."""
        with self._told(index), opened(self.files[index]) as file:
            yield file

    @property
    def remedy(self) -> str:
        """The remedy for files that cannot be read."""
        channels, (height, width) = self.image_shape[0], self.shapes[0]
        spec, size = shlex.quote(f"{self.kind}:{self.root}"), f"--image-size {height}"
        if len(self.shapes) > 1 or height != width:
            size = f"--buckets {','.join(map(shown, self.shapes))}"
        return (
            "Replace or remove this file, or train with --pulse-skip-corrupt to skip such files. "
            f"'pulse data info {spec} {size} --channels {channels} --verify' lists "
            "them all."
        )

    @contextmanager
    def _told(self, index: int) -> Iterator[None]:
        """Turn errors of a file into DataErrors."""
        try:
            yield
        except UNREADABLE as error:
            # What storage does not give has a number; it may be there for others, or later.
            missing = isinstance(error, OSError) and error.errno is not None
            kind = DataError if missing else CorruptSample
            fault = f"{self.files[index]}: {error}"
            raise kind(f"image folder {self.root}", [fault], self.remedy) from error

    def _verified(self) -> Iterator[str]:
        """Fault for every file that cannot be read."""
        for index in track(range(len(self)), "verifying", "files"):
            try:
                self.check(index)
            except DataError as error:
                yield from error.faults


class ImageFolder(ImageFiles):
    """``root/CLASS/**/*.png`` (classes numbered in order of name), or images in ``root`` alone.

    If captions are beside the images (see ``metadata.py``), images beside folders are allowed and
    form one class. Images without a caption have the caption ``default``.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: ImageSize,
        channels: int = 3,
        verify: bool = False,
        column: str = TEXT,
        default: str = "",
    ) -> None:
        root = Path(root)
        said = read_captions(root, column, default)
        if said.pairs:
            files = [path for path, _ in said.pairs]
            self.class_names, labels = classes_of(root, files)
        else:
            self.class_names, files, labels = _scan(root, said.pictures)
        captions = [caption for _, caption in said.pairs]
        groups = [said.groups.get(path, "") for path in files]
        num_classes = max(len(self.class_names), 1)
        super().__init__(
            root, files, labels, num_classes, image_size, channels, verify, captions, groups
        )
        self.cautions = [*said.cautions, *uncaptioned(root, said.bare, default)]


def classes_of(root: Path, files: Sequence[Path]) -> tuple[list[str], list[int]]:
    """Class folders in ``root`` and the class of each file; one class without a name if some files
    are in no folder.
    """
    if not all(root in file.parents and file.parent != root for file in files):
        return [], [0] * len(files)
    of = [file.relative_to(root).parts[0] for file in files]
    classes = sorted(set(of))
    return classes, [classes.index(name) for name in of]


def _scan(root: Path, pictures: Sequence[Path]) -> tuple[list[str], list[Path], list[int]]:
    what = f"image folder {root}"
    wanted = f"{', '.join(SUFFIXES)} files in it, or in one subfolder per class"
    if not root.is_dir():
        raise DataError(what, ["it is not a folder"], f"Give a folder with {wanted}.")
    flat = sorted(path for path in pictures if path.parent == root)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    by_class = {folder.name: list[Path]() for folder in folders}
    for path in sorted(pictures):
        if path.parent != root:
            by_class[path.relative_to(root).parts[0]].append(path)
    if flat and any(by_class.values()):
        raise DataError(
            what,
            [
                (
                    f"{len(flat)} images beside {len(by_class)} class folders; the class of these "
                    "images is unclear"
                )
            ],
            "Move the images into class folders, or the folders elsewhere.",
        )
    if flat:
        return [], flat, [0] * len(flat)
    faults = [f"class folder {name} has no images" for name, files in by_class.items() if not files]
    if faults or not by_class:
        raise DataError(what, faults or ["it has no images"], f"There must be {wanted}.")
    files = [file for files in by_class.values() for file in files]
    labels = [label for label, files in enumerate(by_class.values()) for _ in files]
    return list(by_class), files, labels
