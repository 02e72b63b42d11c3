"""Survey of an image folder: readability, sizes and cropping of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from megatron_pulse.data.dataset import CorruptSample, DataError, DiffusionDataset
from megatron_pulse.data.images.conditioning import ControlPictures
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.masks import Masks
from megatron_pulse.data.images.pictures import has_alpha, upright_size
from megatron_pulse.data.images.shapes import cropped_fraction
from megatron_pulse.data.images.sizes import Head
from megatron_pulse.data.stored_file import StoredFile, stored_size
from megatron_pulse.progress import track

MOST_DECODED = 32 << 20
"""Bytes of files: so many are decoded at the start of a run, which takes some seconds. Of more,
only the heads are read."""


@dataclass
class Survey:
    """Counts of the pictures of one folder; ``unreadable`` has a fault for each unreadable file."""

    files: ImageFiles
    num_pictures: int = 0
    decoded: bool = False
    num_cropped: int = 0
    num_enlarged: int = 0
    num_with_alpha: int = 0
    num_other_crop: int = 0
    num_black: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def cautions(self) -> list[str]:
        """Warnings about black masks, and pictures of another aspect ratio than their photos'."""
        if not isinstance(self.files, ControlPictures):
            return []
        of_all, found = f"of {self.num_pictures:,} {self.files.what}s", list[str]()
        if self.num_other_crop:
            found.append(
                f"{self.files.root}: {self.num_other_crop:,} {of_all} have another aspect ratio "
                "than their photos: both are cropped to their centre, so they no longer show the "
                "same part. Crop or scale the files alike"
            )
        if self.num_black:
            found.append(
                f"{self.files.root}: {self.num_black:,} {of_all} are all black, so nothing is "
                "learned from their pictures. Remove these pictures, or paint what counts white"
            )
        return found

    def describe(self) -> str:
        """Line with the number of pictures and their treatment."""
        height, width = self.files.image_shape[-2:]
        least = f"{width}x{height}" if self.files.num_shapes == 1 else "their bucket"
        square = " to the central square" if height == width and least != "their bucket" else ""
        told = [
            f"{self.num_pictures:,} {self.files.samples}",
            f"{self.num_cropped:,} cropped{square}",
            f"{self.num_enlarged:,} smaller than {least} and enlarged",
            f"{self.num_with_alpha:,} with transparency, which is ignored",
        ]
        if self.unreadable:
            told.append(f"{len(self.unreadable):,} cannot be read")
        how = "all decoded" if self.decoded else "heads read; 'pulse data check' decodes all"
        return f"{self.files.root}: {', '.join(told)} ({how})"


def surveys(data: Sequence[DiffusionDataset], whole: bool | None = None) -> list[Survey]:
    """Surveys of all image folders in ``data``; each file is read once.

    ``whole`` decodes every picture (None: only if all together have at most ``MOST_DECODED``
    bytes).
    """
    sources = dict.fromkeys(source for one in data for source in one.sources)
    files = [one for one in sources if isinstance(one, ImageFiles)]
    paired = any(isinstance(one, ControlPictures) for one in files)
    sizes: dict[StoredFile, tuple[int, int]] | None = {} if paired else None
    found = [_survey(one, whole, sizes) for one in files]
    for each in found:
        if isinstance(each.files, ControlPictures) and sizes is not None:
            each.num_other_crop = _num_other_crop(each.files, sizes)
    return found


def require_readable(found: Sequence[Survey]) -> None:
    """Raise DataError listing all pictures that cannot be read."""
    faults = [fault for each in found for fault in each.unreadable]
    if faults:
        first = next(each for each in found if each.unreadable)
        raise DataError(f"image folder {first.files.root}", faults, first.files.remedy)


def require_white(found: Sequence[Survey]) -> None:
    """Raise DataError for masks that are all black, from which a run would learn nothing."""
    for each in found:
        if each.num_pictures and each.num_black == each.num_pictures:
            raise DataError(
                f"masks {each.files.root}",
                [f"all {each.num_black:,} are black, so nothing would be learned"],
                "White counts in the loss, black does not: invert them, or leave the masks out.",
            )


def _num_other_crop(controls: ControlPictures, sizes: Mapping[StoredFile, tuple[int, int]]) -> int:
    """Number of control pictures whose aspect ratio differs from their photo's by over a pixel."""
    other = set[StoredFile]()
    for photo, control in zip(controls.photos, controls.files, strict=True):
        if photo in sizes and control in sizes:
            (width, height), (own_width, own_height) = sizes[photo], sizes[control]
            apart = abs(width * own_height - own_width * height)
            if apart > max(width, height, own_width, own_height):
                other.add(control)
    return len(other)


def _survey(
    files: ImageFiles, whole: bool | None, sizes: dict[StoredFile, tuple[int, int]] | None
) -> Survey:
    """Survey of one folder; adds (width, height) of its pictures to ``sizes``."""
    first: dict[StoredFile, int] = {}
    for index, path in enumerate(files.files):
        first.setdefault(path, index)
    if whole is None:
        whole = _num_bytes(list(first)) <= MOST_DECODED
    found = Survey(files, len(first), whole)
    masks = files if isinstance(files, Masks) else None

    heads = files.heads

    def look(index: int) -> tuple[Head, bool] | DataError:
        """Head of a picture, and whether it is a black mask."""
        head = heads[index]
        try:
            if head is None:
                with files.opened(index) as file:
                    width, height = upright_size(file)
                    head = height, width, has_alpha(file)
            is_black = whole and masks is not None and masks.is_black(index)
            if whole:
                files.check(index)
        except DataError as error:
            return error
        return head, is_black

    looks: Iterator[tuple[Head, bool] | DataError] = map(look, first.values())
    if whole:
        looks = track(looks, "decoding pictures", "files", len(first))
    for path, seen in zip(first, looks, strict=True):
        if isinstance(seen, DataError):
            found.unreadable += seen.faults
            continue
        (height, width, alpha), is_black = seen
        if sizes is not None:
            sizes[path] = width, height
        shape = files.shapes[files.shape_index(first[path])]
        found.num_cropped += cropped_fraction((height, width), shape) > 0
        found.num_enlarged += height < shape[0] or width < shape[1]
        found.num_with_alpha += alpha
        found.num_black += is_black
    if masks is not None and not whole and not found.unreadable:
        with suppress(CorruptSample):  # decoded until one is not black: mostly one alone
            found.num_black = len(first) * all(map(masks.is_black, first.values()))
    return found


def _num_bytes(paths: Sequence[StoredFile]) -> int:
    """Total size of files, counted up to the limit of decoding."""
    total = 0
    for path in paths:
        with suppress(OSError):  # told where it is read
            total += stored_size(path)
        if total > MOST_DECODED:
            break
    return total
