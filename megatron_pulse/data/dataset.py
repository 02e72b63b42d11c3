"""Dataset interface: images (or latents), labels and named conditioning fields, by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from megatron_pulse.data.stored_file import StoredFile
from megatron_pulse.diffusion.noise import Stream, philox
from megatron_pulse.encoders.text_recipe import TextParts
from megatron_pulse.errors import PicklableError, UserError, format_faults
from megatron_pulse.json_validation import Text


class DataError(PicklableError, UserError):
    """Unusable data; ``faults`` lists every reason, the message gives the remedy."""

    def __init__(self, what: str, faults: Sequence[str], remedy: str) -> None:
        self.what, self.faults, self.remedy = what, list(faults), remedy
        super().__init__(format_faults(what, faults, remedy))


class CorruptSample(DataError):
    """Sample whose file exists and can be read, but holds no image."""


Size = Annotated[int, Ge(1), Le(1 << 20)]
COMPUTE = "compute"
LATENT = "latent"
"""Name of a dataset's images in ``made_by``."""


@dataclass(frozen=True)
class FieldSpec:
    """Shape and dtype of one conditioning field of a sample.

    ``dtype`` is ``"int64"``, ``"float32"`` (numbers that must stay exact, such as image sizes) or
    ``"compute"`` (states: a latent folder stores them in its own type). In memory the latter two
    are float32.
    """

    shape: tuple[Size, ...]
    dtype: Text = COMPUTE

    def fits(self, other: FieldSpec) -> bool:
        """True if a tensor of this kind satisfies ``other``."""
        return self.shape == other.shape and self.torch_dtype == other.torch_dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype in memory."""
        return torch.int64 if self.dtype == "int64" else torch.float32

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.torch_dtype}".replace(
            "torch.", ""
        )


NO_FIELDS: Mapping[str, FieldSpec] = {}


@dataclass(frozen=True)
class Framing:
    """Scaling and crop between an image and the picture made from it.

    An image of ``original`` (height, width) was scaled. The picture is the part of size ``target``
    from the corner ``crop`` (top, left; in pixels after scaling). A clip has ``fps`` frames a
    second and a ``motion_bucket``; the defaults are those of SVD's pipeline.
    """

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]
    fps: int = 7
    motion_bucket: float = 127.0

    @classmethod
    def whole(cls, size: tuple[int, int]) -> Framing:
        """Framing of an image used as a whole, without scaling."""
        return cls(size, (0, 0), size)


@dataclass(frozen=True)
class Variation:
    """Random change of a sample at one visit (see ``augmentation.py``).

    - ``flip``: mirror the picture from left to right.

    - ``crop``: (down, across), place of the crop in [0, 1) of its free way; None for the centre.

    - ``tag_order``: seed of the order of the caption's tags, after the first ``keep_tags``; None
      leaves the caption as it is.

    - ``patch``: (down, across), place of a patch in [0, 1) of its free way.

    - ``start``: place of a clip's first frame in [0, 1) of its free way; None for the middle.
    """

    flip: bool = False
    crop: tuple[float, float] | None = None
    tag_order: int | None = None
    keep_tags: int = 0
    patch: tuple[float, float] | None = None
    start: float | None = None


class DiffusionDataset(ABC):
    """Samples by index. Image, label and conditioning are read separately.

    A device in the middle of the pipeline thus reads no images. ``image_shape`` is ``(c, h, w)``;
    ``fields`` names the conditioning, such as text states. Pictures of several shapes are divided
    by ``shape_index`` (see ``OfShape``). A ``variation`` changes what is read.
    """

    image_shape: tuple[int, ...]
    num_classes: int
    class_names: Sequence[str] = ()
    """Names of the classes by label, where they have any."""
    fields: Mapping[str, FieldSpec] = NO_FIELDS
    frames: bool = False
    """True if framings differ between samples."""
    has_captions: bool = False
    has_files: bool = False
    """True if each sample belongs to a file that may change."""
    has_groups: bool = False
    """True if samples have a ``group``."""
    num_shapes: int = 1
    """Number of shapes for which the dataset was opened (see ``shape_index``)."""
    has_pairs: bool = False
    """True if samples 2k and 2k + 1 are the winner and the loser of pair k."""
    text_parts: TextParts = {}
    """Parts of ``fields`` made by each text encoder, where known."""
    made_by: Mapping[str, str] = {}
    """Provenance of precomputed fields (and of the images, as LATENT), where known."""
    cautions: Sequence[str] = ()
    """Warnings for people about ignored files."""
    latent_shape: tuple[int, ...] | None = None
    """Shape of latents that the training step encodes from ``image``; None without encoding."""

    @property
    def parts(self) -> tuple[DiffusionDataset, ...]:
        """Datasets of one sample shape each, if there are several shapes."""
        return (self,)

    @property
    def members(self) -> tuple[DiffusionDataset, ...]:
        """Datasets that are joined here, one of each name in ``--pulse-data``."""
        return (self,)

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        """Underlying datasets that read files or make samples."""
        return (self,)

    def part_of(self, index: int) -> tuple[int, int]:
        """Index in ``parts`` of a sample's part, and the sample's index there."""
        return 0, index

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        """Float32 ``image_shape``, pixels in [-1, 1]."""

    def deviation(self, index: int, variation: Variation | None = None) -> Tensor | None:
        """Standard deviation of a posterior whose mean is ``image(index)``, of the same shape, or
        None.

        Training draws a new sample of the posterior at every visit.
        """
        return None

    def mask(self, index: int, variation: Variation | None = None) -> Tensor | None:
        """Weight of each pixel in the loss, float32 ``[1, h, w]`` in [0, 1], or None."""
        return None

    @abstractmethod
    def label(self, index: int) -> int:
        """The class, 0 to ``num_classes`` - 1."""

    def caption(self, index: int) -> str:
        """Text that belongs to the image; empty if the data has none."""
        return ""

    def excess(self, index: int) -> int:
        """Number of words or tokens that are truncated from the sample's caption."""
        return 0

    def uncaptioned(self, index: int) -> bool:
        """True for a sample without a caption in a captioned dataset; such samples train
        unconditionally.
        """
        return self.has_captions and not self.caption(index)

    def check(self, index: int) -> None:
        """Raise CorruptSample exactly if ``image`` would."""
        return None

    def describe(self, index: int) -> str:
        """Name of the sample for people: its file."""
        return f"sample {index}"

    def damaged(self, index: int) -> Sequence[str]:
        """Names of the unreadable files of a corrupt sample."""
        return [self.describe(index)]

    def revision(self, index: int) -> str:
        """Identifier that changes if the sample's file is another one; empty without files."""
        return ""

    def identity(self, index: int) -> int:
        """63-bit hash of the content of the sample's file; 0 without files."""
        return 0

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        """Hash of each of these samples: of its files (size, beginning and end) and caption, or of
        all stored values.

        Empty if samples have no files. Unreadable files are no fault here.
        """
        return ()

    def group(self, index: int) -> str:
        """Group name of the sample; a group is in training or in validation as a whole. Empty for
        none.
        """
        return ""

    def ties(self) -> Sequence[Sequence[Hashable]]:
        """Keys that tie each sample to others, such as the picture that several captions share.

        Samples with a common key must be on one side of the split. Empty if all samples are
        independent.
        """
        return ()

    def pictures(self) -> Sequence[StoredFile]:
        """Picture file of each sample; empty if samples are no files."""
        return ()

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        """The tensor of every name in ``fields``."""
        return {}

    def shape_index(self, index: int) -> int:
        """Index of the sample's shape, where the dataset was opened for several."""
        return 0

    def null_conditioning(self) -> dict[str, Tensor]:
        """Replacement values of a sample whose conditioning is dropped, for classifier-free
        guidance.

        Fields that are missing here keep the sample's own value.
        """
        return {}

    def null_of(self, index: int) -> dict[str, Tensor]:
        """``null_conditioning`` of one sample, where joined datasets differ."""
        return self.null_conditioning()

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        """Framing of ``image(index)``, or of the image behind a latent."""
        return Framing.whole(self.pixel_size)

    @property
    def pixel_size(self) -> tuple[int, int]:
        """(height, width) of the images, even if ``image_shape`` is that of latents."""
        height, width = self.image_shape[-2:]
        return height, width

    def pixels_of(self, shape: int) -> tuple[int, int]:
        """``pixel_size`` of the samples with this ``shape_index``."""
        return self.pixel_size

    def frames_of(self, shape: int) -> int:
        """Number of frames of the samples with this ``shape_index``; 1 of pictures."""
        return self.image_shape[1] if len(self.image_shape) > 3 else 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample with ``image``, ``label`` and ``index`` (int64 scalars), and its ``fields``."""
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

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        image = self.images[index]
        return image.flip(-1) if variation is not None and variation.flip else image

    def label(self, index: int) -> int:
        return int(self.labels[index])


class Derived(DiffusionDataset):
    """View of ``source``; subclasses override parts of the interface."""

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
        self.has_pairs = source.has_pairs
        self.num_shapes = source.num_shapes
        self.text_parts = source.text_parts
        self.made_by = source.made_by
        self.cautions = source.cautions
        self.latent_shape = source.latent_shape

    @property
    def sources(self) -> tuple[DiffusionDataset, ...]:
        return self.source.sources

    def at(self, index: int) -> int:
        """Index in ``source`` of the sample at ``index``."""
        return index

    def __len__(self) -> int:
        return len(self.source)

    def image(self, index: int, variation: Variation | None = None) -> Tensor:
        return self.source.image(self.at(index), variation)

    def deviation(self, index: int, variation: Variation | None = None) -> Tensor | None:
        return self.source.deviation(self.at(index), variation)

    def mask(self, index: int, variation: Variation | None = None) -> Tensor | None:
        return self.source.mask(self.at(index), variation)

    def label(self, index: int) -> int:
        return self.source.label(self.at(index))

    def caption(self, index: int) -> str:
        return self.source.caption(self.at(index))

    def excess(self, index: int) -> int:
        return self.source.excess(self.at(index))

    def uncaptioned(self, index: int) -> bool:
        return self.source.uncaptioned(self.at(index))

    def check(self, index: int) -> None:
        self.source.check(self.at(index))

    def describe(self, index: int) -> str:
        return self.source.describe(self.at(index))

    def damaged(self, index: int) -> Sequence[str]:
        return self.source.damaged(self.at(index))

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

    def pictures(self) -> Sequence[StoredFile]:
        files = self.source.pictures()
        return [files[self.at(i)] for i in range(len(self))] if files else ()

    def conditioning(self, index: int, variation: Variation | None = None) -> dict[str, Tensor]:
        return self.source.conditioning(self.at(index), variation)

    def framing(self, index: int, variation: Variation | None = None) -> Framing:
        return self.source.framing(self.at(index), variation)

    def shape_index(self, index: int) -> int:
        return self.source.shape_index(self.at(index))

    def null_conditioning(self) -> dict[str, Tensor]:
        return self.source.null_conditioning()

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self.source.pixel_size

    def pixels_of(self, shape: int) -> tuple[int, int]:
        return self.source.pixels_of(shape)

    def frames_of(self, shape: int) -> int:
        return self.source.frames_of(shape)


class Subset(Derived):
    """Samples of ``source`` at ``indices``, renumbered from 0."""

    def __init__(self, source: DiffusionDataset, indices: np.ndarray) -> None:
        super().__init__(source)
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def at(self, index: int) -> int:
        return int(self.indices[index])


class OfShape(Subset):
    """Samples of ``source`` at ``indices``, all with the ``shape_index`` ``shape``.

    ``image_shape`` is theirs; ``fields`` replace those that depend on it.
    """

    def __init__(
        self,
        source: DiffusionDataset,
        indices: np.ndarray,
        shape: int,
        image_shape: tuple[int, ...],
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
    ) -> None:
        super().__init__(source, indices)
        self.image_shape, self.num_shapes = image_shape, 1
        self.fields = {**self.fields, **fields}
        self._pixel_size = source.pixels_of(shape)
        self._num_frames = source.frames_of(shape)

    def frames_of(self, shape: int) -> int:
        return self._num_frames

    @property
    def pixel_size(self) -> tuple[int, int]:
        return self._pixel_size


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """Fixed shuffle of ``range(size)``, int64.

    The order is an argsort of raw Philox words. NumPy guarantees those bits for ever, but not those
    of ``Generator.permutation``, and a resumed run must not depend on NumPy's version.
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

    At least one sample is kept for validation unless the fraction is 0. ``units``, if given, has a
    unit number per sample; a unit is on one side as a whole. ``sides`` maps units to True
    (validation) or False. Its entries decide, even if one side stays empty, and new units are added
    to it. A new unit that has all samples is divided, and counts as trained on.
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
