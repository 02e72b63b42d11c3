"""Pictures in parquet files and in folders of Hugging Face's ``datasets``, read by index.

Reading is that of ``datasets`` and pyarrow, through memory maps. Parquet is unpacked once, into the
cache folder, since a row in the middle of it cannot be read alone. No code of a dataset is run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_pulse.data.archives.images import CAPTIONS, ArchivedImages
from megatron_pulse.data.dataset import NO_FIELDS, CorruptSample, DataError, FieldSpec
from megatron_pulse.data.images.folder import ImageSize
from megatron_pulse.data.lazy_sequence import LazySequence
from megatron_pulse.data.split_groups import ends_hash, name_hash
from megatron_pulse.data.standard_splits import require_one_split
from megatron_pulse.data.stored_file import ArchivedFile
from megatron_pulse.errors import UserError
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, cache_folder, read_json
from megatron_pulse.fonts import printable
from megatron_pulse.paths import is_file_name

_PICTURES = ("image", "jpg", "jpeg", "png", "webp", "picture", "img")
"""Names of columns of bytes that are taken for pictures; of several the first here counts."""
_LABEL = "label"
_STATE = "state.json"
_INSTALL = "Install what reads it: pip install megatron-pulse[data]."


class TableImages(ArchivedImages):
    """Pictures in the rows of the tables at ``place``.

    The picture is the column of Hugging Face's images, or of bytes with such a name. Its caption is
    the column ``column`` (default: text or caption), its class the column label. Raises DataError.
    """

    def __init__(
        self,
        place: str | Path,
        image_size: ImageSize,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
        column: str | None = None,
        default: str = "",
    ) -> None:
        what, path = f"{self.kind} {place}", Path(place)
        table = self._table(path)
        columns = _Columns.of(what, table.features, column)
        with _told(what):
            _require_sound(table.data, filter(None, (columns.picture, columns.caption)))
        rows = TableRows(path, table.select_columns([columns.picture]).with_format("arrow"))
        labels, names = [0] * len(rows), ()
        if columns.label:
            found = table.select_columns([columns.label]).with_format("arrow")[:]
            labels = found.column(columns.label).to_pylist()
            names = tuple(getattr(table.features[columns.label], "names", None) or ())
        if faults := list(_label_faults(labels, len(names))):
            raise DataError(what, faults, "Correct the column label, or leave it out.")
        captions: Sequence[str] = ()
        if columns.caption:
            texts = table.select_columns([columns.caption]).with_format("arrow")
            captions = TableCaptions(texts, columns.caption, default)
        elif default:
            captions = [default] * len(rows)
        super().__init__(
            path, rows, labels, image_size, channels, fields, verify, captions, names
        )  # fmt: skip
        self.cautions = [f"{what}: {each}" for each in columns.cautions]

    @staticmethod
    @abstractmethod
    def _table(path: Path) -> Any:
        """Rows at ``path``, a ``datasets.Dataset``."""

    def fingerprints(self, indices: Sequence[int]) -> Sequence[int]:
        def caption(index: int) -> str:
            with suppress(CorruptSample):  # told where it is read
                return self.caption(index)
            return ""

        return [name_hash(f"{ends_hash(self.files[i])} {caption(i)}") for i in indices]


class DatasetImages(TableImages):
    """Pictures in a folder that ``datasets`` has saved (``Dataset.save_to_disk``)."""

    kind = "datasets"

    @staticmethod
    def _table(path: Path) -> Any:
        what = f"datasets {path}"
        if not (path / _STATE).is_file():
            splits = sorted(each.parent.name for each in path.glob(f"*/{_STATE}"))
            fault = f"there is no {_STATE}, so it is no folder of Dataset.save_to_disk"
            remedy = "Give such a folder, or parquet files with parquet:PATH."
            if splits:
                fault = f"it has several splits: {', '.join(splits)}"
                remedy = f"Give one of them: datasets:{path / splits[0]}."
            raise DataError(what, [fault], remedy)
        with _told(what):
            state = read_json(path / _STATE, FileKind.DATASETS)
        files = state.get("_data_files")
        names = [each.get("filename") for each in files] if isinstance(files, list) else [None]
        if strange := [
            str(name) for name in names if not (isinstance(name, str) and is_file_name(name))
        ]:
            fault = f"{_STATE} names no files of the folder: {', '.join(strange[:3])}"
            raise DataError(what, [fault], "Save the dataset again.")
        return _read(what, lambda library: library.load_from_disk(str(path)))


class ParquetImages(TableImages):
    """Pictures in a parquet file, or in all parquet files of a folder, in order of name."""

    kind = "parquet"

    @staticmethod
    def _table(path: Path) -> Any:
        what = f"parquet {path}"
        files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
        if not files:
            fault = "there are no parquet files in it" if path.is_dir() else "it is not there"
            raise DataError(what, [fault], "Give a parquet file, or a folder with some.")
        require_one_split(what, path, files, prefixes=True)

        def load(library: Any) -> Any:
            return library.load_dataset(
                "parquet",
                data_files=[str(each) for each in files],
                split="train",
                cache_dir=str(cache_folder() / "parquet"),
            )

        return _read(what, load)


@dataclass(frozen=True)
class TableRow(ArchivedFile):
    """The picture in row ``index`` of ``rows``."""

    rows: TableRows
    index: int

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        import pyarrow

        yield pyarrow.BufferReader(self.rows.content(self.index))

    def num_bytes(self) -> int:
        return len(self.rows.content(self.index))

    def version(self) -> str:
        return f"{self.rows.version} {self.index}"

    def relative_to(self, root: Path) -> str:
        return f"row {self.index}"

    def __str__(self) -> str:
        return f"{self.rows.place}: row {self.index}"


class TableRows(LazySequence[TableRow]):
    """Pictures of all rows of ``table``, a ``datasets.Dataset`` of one column, at ``place``."""

    def __init__(self, place: Path, table: Any) -> None:
        self.place = place
        self._table = table
        self.version = str(table._fingerprint)
        """Text that is another one for other rows, as ``datasets`` names them."""
        (self._column,) = table.column_names

    def __len__(self) -> int:
        return len(self._table)

    def make(self, index: int) -> TableRow:
        return TableRow(self, index)

    def content(self, index: int) -> Any:
        """Bytes of a picture, a buffer of pyarrow; raises ValueError without any."""
        value = self._table[index].column(self._column)[0]
        if hasattr(value, "keys") and value.is_valid:
            path, value = value["path"].as_py() if "path" in value else None, value["bytes"]
            if not value.is_valid and path:
                raise ValueError(f"it holds a path ({path}) and no picture: save it with pictures")
        if not value.is_valid:
            raise ValueError("it holds no picture")
        return value.as_buffer()


class TableCaptions(LazySequence[str]):
    """Captions in ``column`` of ``table``, read when asked for; ``default`` without one."""

    def __init__(self, table: Any, column: str, default: str) -> None:
        self._table, self._column, self._default = table, column, default

    def __len__(self) -> int:
        return len(self._table)

    def make(self, index: int) -> str:
        try:
            text = self._table[index].column(self._column)[0].as_py()
        except UnicodeDecodeError as error:
            raise ValueError("is not UTF-8") from error
        return printable(text or "").strip() or self._default


@dataclass(frozen=True)
class _Columns:
    """Columns of a table that are read; empty where there is none."""

    picture: str
    caption: str
    label: str
    cautions: Sequence[str] = ()

    @classmethod
    def of(cls, what: str, features: Mapping[str, Any], wanted: str | None) -> _Columns:
        """Choose the columns of a table; raises DataError."""
        images = [name for name, each in features.items() if type(each).__name__ == "Image"]
        held = [name for name, each in features.items() if _is_bytes(each)]
        named = [name for name in _PICTURES if name in images or (name in held and not images)]
        pictures = named or images
        texts = [name for name, each in features.items() if _is_text(each)]
        faults, has = list[str](), ", ".join(features)
        if not pictures:
            faults.append(f"no column holds pictures; its columns are {has}")
        elif not named and len(pictures) > 1:
            faults.append(f"several columns hold pictures ({', '.join(pictures)}): name one image")
        if wanted is not None and wanted not in texts:
            faults.append(f"there is no column {wanted} of texts; its columns are {has}")
        if faults:
            remedy = "Columns are image (bytes of files), text or PATH#NAME, and label."
            raise DataError(what, faults, remedy)
        caption = wanted or next((name for name in CAPTIONS if name in texts), "")
        label = _LABEL if _is_label(features.get(_LABEL)) else ""
        others = [name for name in texts if name != caption]
        cautions = []
        if not caption and others:
            cautions.append(
                f"no caption is read; name its column as PATH#NAME: {', '.join(others)}"
            )
        if _LABEL in features and not label:
            kind = getattr(features[_LABEL], "dtype", "unknown")
            cautions.append(f"the column {_LABEL} is of type {kind}, not of integers: ignored")
        if aside := [name for name in images if name != pictures[0]]:
            cautions.append(f"further columns of pictures are ignored: {', '.join(aside)}")
        return cls(pictures[0], caption, label, cautions)


def _require_sound(table: Any, columns: Iterable[str]) -> None:
    """Raise an error of pyarrow for offsets beyond a column's bytes.

    Reading there would kill the process. Contents are not read.
    """
    import pyarrow

    binary = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    for name in columns:
        column = table.column(name)
        column.cast(binary.get(column.type, column.type)).validate(full=True)


def _is_bytes(feature: Any) -> bool:
    """True for bytes, or for the struct of bytes and path that images are kept in."""
    if isinstance(feature, Mapping):
        return _is_bytes(feature.get("bytes"))
    return getattr(feature, "dtype", "") in ("binary", "large_binary")


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _is_label(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint"))


def _label_faults(labels: Sequence[int | None], num_names: int) -> Iterator[str]:
    classes = [label for label in labels if label is not None and label >= 0]
    if unfit := len(labels) - len(classes):
        yield f"{unfit:,} of {len(labels):,} rows have no class from 0 on in the column label"
    elif num_names and (most := max(classes, default=0)) >= num_names:
        yield f"the column label has {most}, but {num_names} names of classes"


def _read(what: str, load: Callable[[Any], Any]) -> Any:
    """Read a table by ``datasets``, without progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(what, [f"{error}"], _INSTALL) from error
    datasets.disable_progress_bars()
    with _told(what):
        return load(datasets)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn errors of a library that reads strangers' files into DataErrors."""
    try:
        yield
    except (FileError, UserError) as error:
        raise DataError(what, [str(error)], "Write it again.") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(what, [f"it cannot be read: {reason}"], "Write it again.") from error
