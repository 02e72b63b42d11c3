"""Atomic writing and safe, bounded reading of files.

Every file given by a user is read here. Text is UTF-8 (a byte order mark is skipped) of limited
size. JSON and YAML have no repeated keys, no unusable numbers and no unprintable characters. Either
the values are those of the file, or FileError gives the reasons.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import xxhash

from megatron_pulse.errors import (
    Faults,
    UserError,
    faults_in,
    first_of,
    format_faults,
)
from megatron_pulse.file_kinds import FileKind, detect_kind
from megatron_pulse.fonts import UNPRINTABLE
from megatron_pulse.full_disk import full_error

MAX_BYTES = 64 << 20
"""Maximum size of a file that is read at once."""
MAX_YAML_BYTES = 64 << 10
"""Maximum size of a YAML file; its parser takes seconds per megabyte."""
LARGEST = 2.0**63
"""Numbers in files are below this value, and 0 or at least ``SMALLEST``, so products
stay finite.
"""
SMALLEST = 1e-30

MAX_VALUES = 4_000_000
"""Maximum number of values of a JSON text, counted by commas and opening brackets.

A value takes up to 100 times its bytes in memory. Plans have one value per operation, traces five;
neither reaches the limit within ``MAX_BYTES``.
"""

_MAX_DEPTH = 32
_MAX_KEY = 1000
_MAX_TEXT = 1 << 20


class FileError(UserError):
    """A file that cannot be read as its kind; the message names the file and the reason."""


def cache_folder() -> Path:
    """Folder of what costs only time to make again; it need not exist.

    ``$PULSE_CACHE_DIR``, or else ``megatron_pulse`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``.
    """
    if named := os.environ.get("PULSE_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron_pulse"


def digest_of_sources(*folders: Path) -> str:
    """Digest of all Python files in ``folders``, for caches whose results depend on this code."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success rename it to ``path``.

    On an exception the temporary file is removed and ``path`` is untouched. The temporary name
    keeps the suffix, from which Pillow, NumPy and matplotlib choose the format. Raises OSError that
    names ``path`` for a full disk, quota or file size limit, whatever the writer raised.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except Exception as error:
        if (full := full_error(error, beside, path)) is not None:
            raise full from error
        raise
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``; on success move it to ``folder``, else remove it.

    ``folder`` must not exist, or be empty. Raises OSError that names the folder, or the file in it,
    for a full disk, quota or file size limit, whatever the writer raised.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    beside.mkdir()
    try:
        yield beside
        os.replace(beside, folder)
    except Exception as error:
        if (full := full_error(error, beside, folder)) is not None:
            raise full from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_with_checksum(path: str | Path, text: str) -> None:
    """Write an object in JSON or YAML atomically, with its checksum (see ``add_checksum``)."""
    with replacing(path) as beside:
        beside.write_text(add_checksum(text), encoding="utf-8")


def unwritable(folder: Path, what: str = "") -> str | None:
    """Reason why nothing can be written below ``folder``; None if writing works.

    Tries an unnamed file, since permissions do not tell everything, least of all root's. ``what``
    precedes the folder in the text.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file, not a folder"
    try:
        with TemporaryFile(dir=folder):
            return None
    except OSError:
        return f"{what}{folder} is not writable"


def read_text(path: str | Path, kind: FileKind, max_bytes: int = MAX_BYTES) -> str:
    """Text of a UTF-8 file; raises FileError. Only captions may be empty."""
    with _opened(path, kind) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _unreadable(path, kind, f"it is larger than {max_bytes >> 10:,} KiB")
    text = _decoded(content, path, kind)
    if not text.strip() and kind is not FileKind.CAPTION:
        raise _unreadable(path, kind, "it is empty")
    return text


def read_lines(path: str | Path, kind: FileKind) -> Iterator[str]:
    """Lines of a UTF-8 file of any length, without line breaks; raises FileError."""
    with _opened(path, kind) as file:
        for number in count(1):
            line = file.readline(_MAX_TEXT + 1)
            if not line:
                return
            if len(line) > _MAX_TEXT:
                raise _unreadable(path, kind, f"line {number} is too long")
            yield _decoded(line, path, kind).rstrip("\r\n")


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file; raises OSError, without an errno for anything else."""
    # Opening a pipe without a writer would block for ever.
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is not a regular file")
        yield file


@contextmanager
def _opened(path: str | Path, kind: FileKind) -> Iterator[BinaryIO]:
    """Open a regular file; errors become FileError."""
    try:
        with open_regular(path) as file:
            yield file
    except FileError:
        raise
    except (OSError, ValueError) as error:
        reason = str((error.strerror if isinstance(error, OSError) else "") or error)
        if isinstance(error, FileNotFoundError) and (how := kind.made(path)):
            reason += f"; {how}"
        raise _unreadable(path, kind, reason) from error


def _unreadable(path: str | Path, kind: FileKind, *faults: str) -> FileError:
    return FileError(format_faults(f"{path} cannot be read as {kind}", faults))


def _decoded(content: bytes, path: str | Path, kind: FileKind) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, kind, f"it is not UTF-8 text (byte {error.start})") from error


def read_json(path: str | Path, kind: FileKind, *, infinities: bool = False) -> dict[str, Any]:
    """Object in a JSON file.

    Raises FileError with every fault, or naming the file's actual kind. With ``infinities`` numbers
    may be infinite, as in files of diffusers' schedulers.
    """
    text = read_text(path, kind)
    try:
        value = parse_json(text, infinities=infinities)
    except ValueError as error:
        if Path(path).suffix in (".yaml", ".yml") and not text.lstrip().startswith("{"):
            read_yaml(path, kind)  # names the file's actual kind
        raise _unreadable(path, kind, *faults_in(error)) from error
    return _of_kind(path, kind, value, text)


def parse_json(text: str, *, infinities: bool = False, only: Collection[str] | None = None) -> Any:
    """Value of a JSON text; raises ValueError with every fault.

    With ``only``, just these keys of a record are checked.
    """
    # Each value but the first of a list or object follows a comma.
    if (most := text.count(",") + text.count("[") + text.count("{")) > MAX_VALUES:
        raise ValueError(f"it has up to {most:,} values; at most {MAX_VALUES:,} are read")
    repeated: Counter[str] = Counter()

    def record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = (k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
            repeated.update(k for k in twice if only is None or k in only)
        return made

    try:
        value = json.loads(text, object_pairs_hook=record, strict=only is None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    again = (f"the key {key[:60]!r} occurs more than once" for key in repeated)
    if only is not None and isinstance(value, dict):
        _sound({key: part for key, part in value.items() if key in only}, again, infinities)
        return value
    return _sound(value, again, infinities)


def read_yaml(path: str | Path, kind: FileKind) -> dict[str, Any]:
    """Mapping in a YAML file; raises FileError as ``read_json`` does.

    Plain values are those of JSON (YAML 1.2's core schema): 010, 1:30, yes and 2001-02-03 are
    texts. Aliases and tags are refused.
    """
    import yaml

    from megatron_pulse.yaml_subset import PlainLoader

    text = read_text(path, kind)
    if text.lstrip().startswith("{"):
        return read_json(path, kind)
    if len(text) > MAX_YAML_BYTES:
        raise _unreadable(path, kind, f"it is larger than {MAX_YAML_BYTES >> 10} KiB")
    try:
        value = _sound(yaml.load(text, PlainLoader))
    except RecursionError:
        raise _unreadable(path, kind, _TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise _unreadable(path, kind, f"it is not plain YAML: {error}") from error
    except ValueError as error:
        raise _unreadable(path, kind, *faults_in(error)) from error
    return _of_kind(path, kind, value, text)


_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} deep"


def _of_kind(path: str | Path, kind: FileKind, value: Any, text: str) -> dict[str, Any]:
    """Check the kind of ``value``, read from ``text``, and remove its checksum."""
    if not isinstance(value, dict):
        shown = "a list" if isinstance(value, list) else repr(value)[:60]
        raise _unreadable(path, kind, f"expected an object, got {shown}")
    try:
        record = remove_checksum(text, value)
    except ValueError as error:
        raise _unreadable(path, kind, str(error)) from error
    other = detect_kind(record)
    if other is not None and other is not kind:
        raise FileError(f"{path}: this is {other}, not {kind}: {other.use(path)}")
    return record


def _sound(value: Any, faults: Iterable[str] = (), infinities: bool = False) -> Any:
    """Return ``value`` if all its parts are usable; else raise ValueError, after ``faults``."""
    if found := first_of(chain(faults, _unsound(value, infinities))):
        raise Faults(found)
    return value


def _unsound(value: Any, infinities: bool) -> Iterator[str]:
    """Yield faults of numbers and texts within ``value``."""
    where: list[Any] = []
    todo: list[Iterator[tuple[Any, Any]]] = [iter([("", value)])]
    while todo:
        for key, part in todo[-1]:
            where[len(todo) - 1 :] = [key]
            if isinstance(key, str) and (fault := _text_fault(key, _MAX_KEY)):
                yield f"{_at(where)}: the key {fault}"
            if isinstance(part, dict | list):
                if len(todo) > _MAX_DEPTH:
                    raise ValueError(_TOO_DEEP)
                todo.append(iter(part.items() if isinstance(part, dict) else enumerate(part)))
                break
            if isinstance(part, str):
                if fault := _text_fault(part, _MAX_TEXT):
                    yield f"{_at(where)} {fault}"
            elif isinstance(part, int | float) and not isinstance(part, bool):
                # NaN fails both; comparisons of integers with a float are exact.
                if infinities and part in (math.inf, -math.inf):
                    continue
                if not (part == 0 or SMALLEST <= abs(part) < LARGEST):
                    shown = (
                        repr(part) if isinstance(part, float) else f"of {part.bit_length()} bits"
                    )
                    yield (
                        f"{_at(where)} is a number {shown}; numbers are 0, or from {SMALLEST:g} to "
                        f"{LARGEST:.3g}"
                    )
        else:
            todo.pop()


def _text_fault(text: str, longest: int) -> str:
    if len(text) > longest:
        return f"has {len(text):,} characters, more than {longest:,}"
    found = UNPRINTABLE.search(text)
    return f"has the character {found[0]!r}" if found else ""


def _at(where: Sequence[Any]) -> str:
    """Path of a value, from its keys."""
    return ascii(".".join(f"{key!s:.60}" for key in where[1:]))[1:-1] or "it"


HASH = "xxh3_128"
_DIGEST = re.compile("[0-9a-f]{32}")


def add_checksum(text: str) -> str:
    """Prepend the checksum to ``text``, an object in JSON or YAML."""
    if text.startswith("{"):
        rest = text[1:].removeprefix("\n")
        return f'{{\n "{HASH}": "{_digest(rest)}",\n{rest}'
    return f'{HASH}: "{_digest(text)}"\n{text}'


def remove_checksum(text: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """``record``, read from ``text``, without its checksum.

    Raises ValueError if contents and checksum differ. A damaged name of the checksum's entry is
    recognised by its length and value.
    """
    first, value = next(iter(record.items()), ("", None))
    was_hash = len(str(first)) == len(HASH) and _DIGEST.fullmatch(str(value))
    if HASH not in record and not was_hash:
        return dict(record)
    rest = text.split("\n", 2 if text.startswith("{") else 1)[-1]
    if first != HASH or text != add_checksum("{" + rest if text.startswith("{") else rest):
        raise ValueError(
            "it is damaged, or was edited: its contents do not match its hash. Restore it, or "
            f"remove its line {HASH!r} to read it unchecked"
        )
    return {name: said for name, said in record.items() if name != HASH}


def _digest(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
