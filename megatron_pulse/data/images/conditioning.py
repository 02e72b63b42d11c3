"""Control picture beside each sample, the input of a control branch (edges, depths, poses).

In training, the control picture of ``photos/a/b.png`` is ``photos.conditioning/a/b.png``, or else
the only picture of that name with another suffix. Reference pictures, whose tokens follow the
sample's, are those of ``photos.reference`` in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE
from megatron_pulse.data.dataset import (
    CorruptSample,
    DataError,
    Derived,
    DiffusionDataset,
    FieldSpec,
    Variation,
)
from megatron_pulse.data.images.folder import ImageFiles, ImageSize
from megatron_pulse.data.images.listing import Listing, by_stem, some
from megatron_pulse.data.images.opening import UNREADABLE, opened
from megatron_pulse.data.images.pictures import decoded, fitted
from megatron_pulse.data.split_groups import name_hash

CONDITIONING = "conditioning"
"""The batch field."""


def others_of(root: Path, suffix: str = CONDITIONING) -> Path:
    """Folder with the control pictures (or those of another ``suffix``) of those in ``root``."""
    return root.with_name(f"{root.name}.{suffix}")


class ControlPictures(ImageFiles):
    """Control pictures; ``photos`` are the pictures that they belong to, in the same order."""

    what = "control picture"
    """Name of one in messages."""
    suffix = CONDITIONING
    """Suffix of the folder with those of a folder's pictures."""

    def __init__(
        self,
        root: Path,
        files: list[Path],
        photos: Sequence[Path],
        image_size: ImageSize,
        channels: int = 3,
        verify: bool = False,
        assigned: Sequence[int] = (),
    ) -> None:
        self.photos = photos
        super().__init__(
            root, files, [0] * len(files), 1, image_size, channels, verify, assigned=assigned
        )


@dataclass(frozen=True)
class Pairing:
    """Pairs of (picture, control picture) of a folder.

    - ``faults``: pictures without a control picture (or mask).

    - ``cautions``: ignored and shared control pictures.
    """

    root: Path
    pairs: Sequence[tuple[Path, Path]]
    faults: Sequence[str]
    cautions: Sequence[str]
    kind: type[ControlPictures] = ControlPictures

    @classmethod
    def of(
        cls,
        source: ImageFiles,
        root: Path | None = None,
        kind: type[ControlPictures] = ControlPictures,
    ) -> Pairing:
        """Find the control pictures of ``source``, or others of a ``kind`` in ``root``."""
        root = others_of(source.root, kind.suffix) if root is None else root
        if not root.is_dir():
            return cls(root, [], [f"there is no folder {root}"], [], kind)
        pairs, faults, listing = list[tuple[Path, Path]](), list[str](), Listing.of(root)
        there, stems = set(listing.pictures), by_stem(listing.pictures)
        for path in source.files:
            assert isinstance(path, Path), "archives have no companions"
            at = root / path.relative_to(source.root)
            found = [at] if at in there else stems.get(at.with_suffix(""), [])
            if not found:
                faults.append(f"there is no {at}")
            elif len(found) > 1:
                faults.append(f"{' and '.join(map(str, found))} both exist. Remove one")
            pairs += [(path, other) for other in found[:1]]
        used = {other for _, other in pairs}
        cautions = list(listing.ignored_files())
        if extra := [path for path in listing.pictures if path not in used]:
            told = f"{root} has {some(root, extra, 'picture')} without a sample: ignored"
            cautions.append(told)
        count_of = Counter(other for _, other in set(pairs))
        if shared := [other for other, count in count_of.items() if count > 1]:
            told = f"{root} has {some(root, shared, 'picture')} that several pictures share"
            cautions.append(told)
        return cls(root, pairs, faults, cautions, kind)

    def error(self, source: ImageFiles) -> DataError:
        """Error of the ``faults``."""
        return DataError(
            f"image folder {source.root}",
            self.faults,
            f"Each picture needs a {self.kind.what} of the same name, in {self.root}.",
        )

    def pictures(
        self,
        image_size: ImageSize,
        channels: int,
        verify: bool = False,
        assigned: Sequence[int] = (),
    ) -> ControlPictures:
        """Dataset of the control pictures, of the shapes ``assigned`` to their pictures."""
        files = [other for _, other in self.pairs]
        photos = [photo for photo, _ in self.pairs]
        return self.kind(self.root, files, photos, image_size, channels, verify, assigned)


class Paired(Derived):
    """``source``, whose pictures are ``files``, with another picture of each sample.

    The other one belongs to the sample's content. ``image_size`` and ``channels`` are its own. Of
    several shapes it has that of its picture. Raises DataError listing all pictures without one.
    """

    def __init__(
        self,
        source: DiffusionDataset,
        files: ImageFiles,
        pairing: Pairing,
        image_size: ImageSize,
        channels: int,
        verify: bool,
    ) -> None:
        super().__init__(source)
        if pairing.faults:
            raise pairing.error(files)
        self.cautions = [*source.cautions, *pairing.cautions]
        assigned = files.assigned if files.num_shapes > 1 else ()
        self._others = pairing.pictures(image_size, channels, verify, assigned)

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        return (*super().sources, self._others)

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        self._others.check(index)
        return super().image(index, variation)

    def check(self, index: int) -> None:
        self._others.check(index)
        super().check(index)

    def damaged(self, index: int) -> Sequence[str]:
        found = list[str]()
        for files in (self.source, self._others):
            try:
                files.check(index)
            except CorruptSample:
                found += [name for name in files.damaged(index) if name not in found]
        return found

    def revision(self, index: int) -> str:
        return f"{super().revision(index)}; {self._others.revision(index)}"

    def identity(self, index: int) -> int:
        return name_hash(f"{super().identity(index)} {self._others.identity(index)}")

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        pairs = zip(super().fingerprints(indices), self._others.fingerprints(indices), strict=True)
        return [name_hash(f"{own} {other}") for own, other in pairs]


class ReferencePictures(ControlPictures):
    """Reference pictures, cropped and resized as the pictures that they belong to."""

    what = "reference picture"
    suffix = "reference"


class Referenced(Paired):
    """``source``, whose pictures are ``files``, with the field ``reference_image`` in [-1, 1].

    Raises DataError listing all pictures without a reference picture.
    """

    def __init__(self, source: DiffusionDataset, files: ImageFiles, verify: bool = False) -> None:
        pairing, channels = Pairing.of(files, kind=ReferencePictures), files.image_shape[0]
        super().__init__(source, files, pairing, files.shapes, channels, verify)
        self.fields = {**source.fields, REFERENCE_IMAGE: FieldSpec(source.image_shape)}

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        other = self._others.image(index, variation)
        return {**super().conditioning(index, variation), REFERENCE_IMAGE: other}


class Conditioned(Paired):
    """``source`` with the field ``conditioning``: the control picture, float32 in [0, 1].

    It is fitted to the field's spec (c, height, width), as the picture to its size. ``specs`` has
    one for each shape of ``source``. ``verify`` is that of ImageFiles. Raises DataError listing all
    pictures without a control picture.
    """

    def __init__(
        self, source: ImageFiles, specs: Sequence[FieldSpec], verify: bool = False
    ) -> None:
        channels = specs[0].shape[0]
        sizes = [(height, width) for _, height, width in (spec.shape for spec in specs)]
        super().__init__(source, source, Pairing.of(source), sizes, channels, verify)
        self.fields = {**source.fields, CONDITIONING: specs[0]}

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        other = in_unit_range(self._others.image(index, variation))
        return {**super().conditioning(index, variation), CONDITIONING: other}


def control_picture(path: Path, spec: FieldSpec) -> Tensor:
    """Control input of one file in sampling, as in training, for the field's ``spec``.

    Raises DataError if the file is no picture.
    """
    channels, height, width = spec.shape
    try:
        with opened(path) as file:
            return in_unit_range(fitted(decoded(file, channels), (height, width)))
    except UNREADABLE as error:
        remedy = "Give a picture like those of FOLDER.conditioning in training."
        raise DataError(f"control image {path}", [str(error)], remedy) from error


def in_unit_range(picture: Tensor) -> Tensor:
    """Convert from [-1, 1] to [0, 1]: the bits of pixels over 255, as in diffusers' pipelines."""
    return ((picture + 1) * 127.5).round() / 255
