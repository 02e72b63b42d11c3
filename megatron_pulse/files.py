"""Files: written whole or not at all, and read within limits that nothing true of ours reaches.

Every file that a user gives is read here: as text in UTF-8 (a byte order mark is passed over), not
larger than it can be, JSON and YAML without repeated keys, numbers that cannot be computed with,
or characters that cannot be shown. What was read holds what the file says, or FileError says why
it cannot.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from megatron_pulse.faults import Faults, UserError, faults_in, first_of, told
from megatron_pulse.file_kinds import FileKind, kind_of
from megatron_pulse.letters import NO_LETTER
from megatron_pulse.seal import sealed, unsealed

MAX_BYTES = 64 << 20
"""The largest file that is read at once."""
MAX_YAML_BYTES = 64 << 10
"""The largest YAML file; its parser takes seconds for a megabyte."""
LARGEST = 2.0**63
"""Numbers in files are smaller than this, and 0 or above ``SMALLEST``: products stay finite."""
SMALLEST = 1e-30

MAX_VALUES = 4_000_000
"""The most values of a JSON text, by its commas and opening brackets: each takes up to 100 times
its bytes of memory. An operation of a plan is one, and steps of more than some 100,000 are not
planned; one of a trace is five, of which no more fit into ``MAX_BYTES``."""

_MAX_DEPTH = 32
_MAX_KEY = 1000
_MAX_TEXT = 1 << 20


class FileError(UserError):
    """A file that cannot be read as what it should be; the message names it and says why."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is renamed to ``path``.

    If the block raises, the temporary file is removed and ``path`` is untouched. The temporary
    name keeps the suffix, from which Pillow, NumPy and matplotlib choose the format.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder``, which must not exist or be empty; on success it takes
    its place, else it is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    beside.mkdir()
    try:
        yield beside
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_sealed(path: str | Path, text: str) -> None:
    """Write an object in JSON or YAML, whole or not at all, with its hash (see ``seal``)."""
    with replacing(path) as beside:
        beside.write_text(sealed(text), encoding="utf-8")


def unwritable(folder: Path, what: str = "") -> str | None:
    """Why nothing can be written below ``folder``, which is called ``what``; leaves nothing there.

    A file without a name is made, since permissions do not tell all, of root's least.
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
    """The text of a file in UTF-8; raises FileError. Captions alone may be empty."""
    with _opened(path, kind) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _unreadable(path, kind, f"it is larger than {max_bytes >> 10:,} KiB")
    text = _decoded(content, path, kind)
    if not text.strip() and kind is not FileKind.CAPTION:
        raise _unreadable(path, kind, "it is empty")
    return text


def read_lines(path: str | Path, kind: FileKind) -> Iterator[str]:
    """The lines of a text in UTF-8 that may be long, without line breaks; raises FileError."""
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
    """A regular file, opened; raises OSError, without a number where it is something else."""
    # Opening a pipe that nobody writes to would wait for ever.
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        yield file


@contextmanager
def _opened(path: str | Path, kind: FileKind) -> Iterator[BinaryIO]:
    """A regular file, opened; what goes wrong with it is told as FileError."""
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
    return FileError(told(f"{path} cannot be read as {kind}", faults))


def _decoded(content: bytes, path: str | Path, kind: FileKind) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(path, kind, f"it is no text in UTF-8 (byte {error.start})") from error


def read_json(path: str | Path, kind: FileKind, *, infinities: bool = False) -> dict[str, Any]:
    """The object in a JSON file; raises FileError with every fault, or naming what it is instead.

    With ``infinities`` numbers may be infinite, as in files of diffusers' schedulers.
    """
    text = read_text(path, kind)
    try:
        value = parse_json(text, infinities=infinities)
    except ValueError as error:
        if Path(path).suffix in (".yaml", ".yml") and not text.lstrip().startswith("{"):
            read_yaml(path, kind)  # says what it is instead
        raise _unreadable(path, kind, *faults_in(error)) from error
    return _of_kind(path, kind, value, text)


def parse_json(text: str, *, infinities: bool = False, only: Collection[str] | None = None) -> Any:
    """The value of a JSON text; raises ValueError with every fault.

    Of a record, ``only`` these keys are looked at where they are given.
    """
    # Each but the first of a list or an object is behind a comma.
    if (most := text.count(",") + text.count("[") + text.count("{")) > MAX_VALUES:
        raise ValueError(f"it has up to {most:,} values; no more than {MAX_VALUES:,} are read")
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
        raise ValueError(f"it is no JSON: {error}") from error
    again = (f"the key {key[:60]!r} is there more than once" for key in repeated)
    if only is not None and isinstance(value, dict):
        _sound({key: part for key, part in value.items() if key in only}, again, infinities)
        return value
    return _sound(value, again, infinities)


def read_yaml(path: str | Path, kind: FileKind) -> dict[str, Any]:
    """The mapping in a YAML file; raises FileError as ``read_json`` does.

    Plain values are those of JSON (YAML 1.2's core schema), so that 010, 1:30, yes and 2001-02-03
    are texts. Aliases and tags are refused.
    """
    import yaml

    from megatron_pulse.plain_yaml import PlainLoader

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
        raise _unreadable(path, kind, f"it is no plain YAML: {error}") from error
    except ValueError as error:
        raise _unreadable(path, kind, *faults_in(error)) from error
    return _of_kind(path, kind, value, text)


_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} deep"


def _of_kind(path: str | Path, kind: FileKind, value: Any, text: str) -> dict[str, Any]:
    """``value``, read from ``text``, without its hash."""
    if not isinstance(value, dict):
        shown = "a list" if isinstance(value, list) else repr(value)[:60]
        raise _unreadable(path, kind, f"expected an object, got {shown}")
    try:
        record = unsealed(text, value)
    except ValueError as error:
        raise _unreadable(path, kind, str(error)) from error
    other = kind_of(record)
    if other is not None and other is not kind:
        raise FileError(f"{path}: this is {other}, not {kind}: {other.use(path)}")
    return record


def _sound(value: Any, faults: Iterable[str] = (), infinities: bool = False) -> Any:
    """``value`` if all of it can be computed with and shown; else ValueError, after ``faults``."""
    if found := first_of(chain(faults, _unsound(value, infinities))):
        raise Faults(found)
    return value


def _unsound(value: Any, infinities: bool) -> Iterator[str]:
    """What of ``value`` cannot be computed with or shown, one after the other."""
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
                # Not-a-number fails both; comparisons of whole numbers with a float are exact.
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
    found = NO_LETTER.search(text)
    return f"has the character {found[0]!r}" if found else ""


def _at(where: Sequence[Any]) -> str:
    """The path of a value, from the keys to it."""
    return ascii(".".join(f"{key!s:.60}" for key in where[1:]))[1:-1] or "it"
