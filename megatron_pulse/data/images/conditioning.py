"""Control picture beside each sample, the input of a control branch (edges, depths, poses).

In training, the control picture of ``photos/a/b.png`` is ``photos.conditioning/a/b.png``, or else
the only picture of that name with another suffix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron_pulse.data.dataset import DataError, Derived, DiffusionDataset, FieldSpec
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.listing import Listing, by_stem, some
from megatron_pulse.data.images.opening import UNREADABLE, opened
from megatron_pulse.data.images.pictures import decoded, squared
from megatron_pulse.data.split_groups import name_hash

CONDITIONING = "conditioning"
"""The batch field."""


def others_of(root: Path) -> Path:
    """Folder with the control pictures of those in ``root``."""
    return root.with_name(f"{root.name}.{CONDITIONING}")


class Conditioned(Derived):
    """``source`` with the field ``conditioning``: the control picture, float32 in [0, 1].

    Its central square is resized to the field's ``spec`` (c, side, side), as in diffusers'
    ControlNets. ``verify`` is that of ImageFiles. Raises DataError listing all pictures without a
    control picture.
    """

    def __init__(self, source: ImageFiles, spec: FieldSpec, verify: bool = False) -> None:
        super().__init__(source)
        root = others_of(source.root)
        files, faults, listing = list[Path](), list[str](), Listing.of(root)
        there, stems = set(listing.pictures), by_stem(listing.pictures)
        for path in source.files:
            at = root / path.relative_to(source.root)
            found = [at] if at in there else stems.get(at.with_suffix(""), [])
            if not found:
                faults.append(f"there is no {at}")
            elif len(found) > 1:
                faults.append(f"{' and '.join(map(str, found))} both exist. Remove one")
            files += found[:1]
        if not root.is_dir():
            faults = [f"there is no folder {root}"]
        if faults:
            raise DataError(
                f"image folder {source.root}",
                faults,
                f"A ControlNet needs a control picture of the same name for each, in {root}.",
            )
        used = set(files)
        self.cautions = [*source.cautions, *listing.ignored_files()]
        if extra := [path for path in listing.pictures if path not in used]:
            told = f"{root} has {some(root, extra, 'picture')} without a sample: ignored"
            self.cautions.append(told)
        pairs = Counter(other for _, other in set(zip(source.files, files, strict=True)))
        if shared := [other for other, count in pairs.items() if count > 1]:
            told = f"{root} has {some(root, shared, 'picture')} that several pictures share"
            self.cautions.append(told)
        channels, side, _ = spec.shape
        self.fields = {**source.fields, CONDITIONING: spec}
        self._others = ImageFiles(root, files, [0] * len(files), 1, side, channels, verify)

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        return (*super().sources, self._others)

    def image(self, index: int) -> Tensor:
        self._others.check(index)
        return super().image(index)

    def check(self, index: int) -> None:
        self._others.check(index)
        super().check(index)

    def revision(self, index: int) -> str:
        return f"{super().revision(index)}; {self._others.revision(index)}"

    def identity(self, index: int) -> int:
        return name_hash(f"{super().identity(index)} {self._others.identity(index)}")

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        pairs = zip(super().fingerprints(indices), self._others.fingerprints(indices), strict=True)
        return [name_hash(f"{own} {other}") for own, other in pairs]

    def conditioning(self, index: int) -> dict[str, Tensor]:
        other = _as_seen(self._others.image(index))
        return {**super().conditioning(index), CONDITIONING: other}


def control_picture(path: Path, spec: FieldSpec) -> Tensor:
    """Control input of one file in sampling, as in training, for the field's ``spec``.

    Raises DataError if the file is no picture.
    """
    channels, side, _ = spec.shape
    try:
        with opened(path) as file:
            return _as_seen(squared(decoded(file, channels), side))
    except UNREADABLE as error:
        remedy = "Give a picture like those of FOLDER.conditioning in training."
        raise DataError(f"control image {path}", [str(error)], remedy) from error


def _as_seen(picture: Tensor) -> Tensor:
    """Convert from [-1, 1] to [0, 1]: the bits of pixels over 255, as in diffusers' pipelines."""
    return ((picture + 1) * 127.5).round() / 255
