"""What a dataset is here: images (or latents), labels and named conditioning fields, by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_pulse.diffusion.noise import Stream, philox
from megatron_pulse.faults import Carried, UserError, told


class DataError(Carried, UserError):
    """Data that cannot be used; ``faults`` lists every reason, the message says what to do."""

    def __init__(self, what: str, faults: Sequence[str], remedy: str) -> None:
        self.what, self.faults, self.remedy = what, list(faults), remedy
        super().__init__(told(what, faults, remedy))


class CorruptSample(DataError):
    """A sample whose file is there and is read, but holds no image."""


COMPUTE = "compute"


@dataclass(frozen=True)
class FieldSpec:
    """Shape of one conditioning field of a sample, and its type.

    ``dtype`` is ``"int64"``, ``"float32"`` (numbers that must stay exact, such as image sizes) or
    ``"compute"`` (states: a latent folder stores them in its own type). In memory the latter two
    are float32.
    """

    shape: tuple[int, ...]
    dtype: str = COMPUTE

    def fits(self, other: FieldSpec) -> bool:
        """Whether a tensor of this kind can be given where ``other`` is asked for."""
        return self.shape == other.shape and self.torch_dtype == other.torch_dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type in memory."""
        return torch.int64 if self.dtype == "int64" else torch.float32

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.torch_dtype}".replace(
            "torch.", ""
        )


NO_FIELDS: Mapping[str, FieldSpec] = {}


@dataclass(frozen=True)
class Framing:
    """How a picture was made: an image of ``original`` (height, width), scaled, of which the part
    of size ``target`` from the corner ``crop`` (top, left; in pixels after scaling) was taken."""

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]

    @classmethod
    def whole(cls, size: tuple[int, int]) -> Framing:
        """An image that is the picture."""
        return cls(size, (0, 0), size)


class DiffusionDataset(ABC):
    """Samples by index. Image, label and conditioning are read apart, so that a device in the
    middle of the pipeline reads no images.

    ``image_shape`` is ``(c, h, w)``; ``fields`` names the conditioning, such as text states.
    """

    image_shape: tuple[int, ...]
    num_classes: int
    class_names: Sequence[str] = ()
    """Names of the classes by label, where they have any."""
    fields: Mapping[str, FieldSpec] = NO_FIELDS
    frames: bool = False
    """Whether framings differ between samples."""
    has_captions: bool = False
    has_files: bool = False
    """True if each sample is of a file that may change."""
    has_groups: bool = False
    """True if samples have a ``group``."""
    made_by: Mapping[str, str] = {}
    """What encoded fields (and ``latent``, the images) ahead, where that is known."""
    cautions: Sequence[str] = ()
    """What of the files is left aside, for people."""
    latent_shape: tuple[int, ...] | None = None
    """Of what a training step makes of ``image`` itself; None where it takes it as it is."""

    @property
    def parts(self) -> tuple[DiffusionDataset, ...]:
        """The samples of each shape, where there are several."""
        return (self,)

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        """The datasets that read files (or make samples), of which this one is made."""
        return (self,)

    def part_of(self, index: int) -> tuple[int, int]:
        """Which of ``parts`` a sample is in, and its index there."""
        return 0, index

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """Float32 ``image_shape``, pixels in [-1, 1]."""

    def deviation(self, index: int) -> Tensor | None:
        """Where ``image(index)`` is the mean of a posterior: its standard deviation, of that shape;
        every reading in training is a sample of it."""
        return None

    @abstractmethod
    def label(self, index: int) -> int:
        """The class, 0 to ``num_classes`` - 1."""

    def caption(self, index: int) -> str:
        """The text that belongs to the image; empty where the data has none."""
        return ""

    def uncaptioned(self, index: int) -> bool:
        """True if the sample has no caption where others have one: it trains unconditionally."""
        return self.has_captions and not self.caption(index)

    def check(self, index: int) -> None:
        """Raise CorruptSample exactly if ``image`` would."""
        return None

    def describe(self, index: int) -> str:
        """What people know the sample by: its file."""
        return f"sample {index}"

    def revision(self, index: int) -> str:
        """What is another one when the sample is of another file; empty where there is no file."""
        return ""

    def identity(self, index: int) -> int:
        """A hash of the content of the sample's file, of 63 bits; 0 where there is no file."""
        return 0

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        """A hash of each of these samples: of its files (size, beginning and end) and caption, or
        of all that is stored of it; empty where there are no files. Files that cannot be read are
        no fault here."""
        return ()

    def group(self, index: int) -> str:
        """The name of what the sample is held back or trained on with; empty for none."""
        return ""

    def ties(self) -> Sequence[Sequence[Hashable]]:
        """For each sample what ties it to others, as its picture does to those with other captions;
        empty where all stand alone."""
        return ()

    def pictures(self) -> Sequence[Path]:
        """The picture file of each sample; empty where samples are no files."""
        return ()

    def conditioning(self, index: int) -> dict[str, Tensor]:
        """The tensor of every name in ``fields``."""
        return {}

    def null_conditioning(self) -> dict[str, Tensor]:
        """What a sample gets whose conditioning is dropped, for classifier-free guidance.

        Fields that are left out keep the sample's own value.
        """
        return {}

    def framing(self, index: int) -> Framing:
        """How ``image(index)`` was made, or the image that it is a latent of."""
        return Framing.whole(self.pixel_size)

    @property
    def pixel_size(self) -> tuple[int, int]:
        """(height, width) of the images, also where ``image_shape`` is that of latents."""
        height, width = self.image_shape[-2:]
        return height, width

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: ``image``, ``label`` and ``index`` (int64 scalars), and its ``fields``."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {
            "image": self.image(index),
            "label": torch.tensor(self.label(index)),
            "index": torch.tensor(index),
            **self.conditioning(index),
        }


class ArrayDataset(DiffusionDataset):
    """Images ``[n, c, h, w]`` float32 and labels ``[n]`` in memory."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
        self.images = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32))
        self.labels: np.ndarray = labels.astype(np.int64)
        self.image_shape = tuple(self.images.shape[1:])
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        return self.images[index]

    def label(self, index: int) -> int:
        return int(self.labels[index])


class Derived(DiffusionDataset):
    """The samples of ``source``, in all that a subclass does not say of them."""

    def __init__(self, source: DiffusionDataset) -> None:
        self.source = source
        self.image_shape = source.image_shape
        self.num_classes = source.num_classes
        self.class_names = source.class_names
        self.fields = source.fields
        self.frames = source.frames
        self.has_captions = source.has_captions
        self.has_files = source.has_files
        self.has_groups = source.has_groups
        self.made_by = source.made_by
        self.cautions = source.cautions
        self.latent_shape = source.latent_shape

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        return self.source.sources

    def at(self, index: int) -> int:
        """Which sample of ``source`` is this one."""
        return index

    def __len__(self) -> int:
        return len(self.source)

    def image(self, index: int) -> Tensor:
        return self.source.image(self.at(index))

    def deviation(self, index: int) -> Tensor | None:
        return self.source.deviation(self.at(index))

    def label(self, index: int) -> int:
        return self.source.label(self.at(index))

    def caption(self, index: int) -> str:
        return self.source.caption(self.at(index))

    def uncaptioned(self, index: int) -> bool:
        return self.source.uncaptioned(self.at(index))

    def check(self, index: int) -> None:
        self.source.check(self.at(index))

    def describe(self, index: int) -> str:
        return self.source.describe(self.at(index))

    def revision(self, index: int) -> str:
        return self.source.revision(self.at(index))

    def identity(self, index: int) -> int:
        return self.source.identity(self.at(index))

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        return self.source.fingerprints([self.at(index) for index in indices])

    def group(self, index: int) -> str:
        return self.source.group(self.at(index))

    def ties(self) -> Sequence[Sequence[Hashable]]:
        ties = self.source.ties()
        return [ties[self.at(i)] for i in range(len(self))] if ties else ()

    def pictures(self) -> Sequence[Path]:
        files = self.source.pictures()
        return [files[self.at(i)] for i in range(len(self))] if files else ()

    def conditioning(self, index: int) -> dict[str, Tensor]:
        return self.source.conditioning(self.at(index))

    def framing(self, index: int) -> Framing:
        return self.source.framing(self.at(index))

    def null_conditioning(self) -> dict[str, Tensor]:
        return self.source.null_conditioning()

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self.source.pixel_size


class Subset(Derived):
    """The samples of ``source`` at ``indices``, renumbered from 0."""

    def __init__(self, source: DiffusionDataset, indices: np.ndarray) -> None:
        super().__init__(source)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, index: int) -> int:
        return int(self.indices[index])


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """A fixed shuffle of ``range(size)``, int64.

    Sorted from raw Philox words: NumPy promises those bits for ever, but not those of
    ``Generator.permutation``, and a resumed run must not depend on NumPy's version.
    """
    words = philox(seed, Stream.ORDER, 0, epoch).random_raw(size)
    order: np.ndarray = np.argsort(words, kind="stable")
    return order


def split_indices(
    size: int,
    validation_fraction: float,
    units: Sequence[int] = (),
    sides: dict[int, bool] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) indices, sorted and disjoint: the same split in every run.

    At least one sample is kept for validation unless the fraction is 0. Where ``units`` has a
    number for each sample, samples of one unit are on one side: that of ``sides`` (held back or
    not), which gets those that are new. Where ``sides`` decide for all, one side may have none. A
    unit that is new and has all samples is divided, and counts in ``sides`` as trained on.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction}; it must be in [0, 1)")
    held_out = round(size * validation_fraction)
    if validation_fraction > 0:
        held_out = min(max(held_out, 1), size - 1)
    order = permutation(size, seed=0, epoch=0)
    if not len(units) or not held_out:
        return np.sort(order[held_out:]), np.sort(order[:held_out])
    numbers = np.asarray(units)
    own = dict(zip(*np.unique(numbers, return_counts=True), strict=True))
    sides = {} if sides is None else sides
    held = {unit for unit in own if sides.get(unit)}
    left = held_out - sum(own[unit] for unit in held)
    free = [unit for unit in dict.fromkeys(numbers[order].tolist()) if unit not in sides]
    if free and len(own) == 1:
        sides[free[0]] = False
        return np.sort(order[held_out:]), np.sort(order[:held_out])
    for unit in free:
        if own[unit] <= left:
            held.add(unit)
            left -= own[unit]
    if not held and free:
        held.add(min(free, key=own.__getitem__))
    sides |= {unit: unit in held for unit in free}
    chosen = np.isin(numbers, list(held))
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
