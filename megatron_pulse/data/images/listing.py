"""Files of an image folder: pictures, texts, lists, and ignored files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_pulse.data.images.opening import SUFFIXES

METADATA = "metadata.jsonl"
TABLE = "metadata.csv"
TEXT_SUFFIX = ".txt"
_UNREAD = (".avif", ".heic", ".heif", ".ico", ".jp2", ".jxl", ".psd", ".svg")
"""Of pictures in formats that are not read here."""
_TABLES = (".json", ".jsonl", ".csv")
_ABOUT = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Files of Hugging Face's datasets about themselves, which are no tables of pictures."""
_NAMED = 3


@dataclass(frozen=True)
class Listing:
    """Files below ``root``, sorted by folder.

    - ``hidden``: hidden files with names of pictures.

    - ``links``: links to folders that are not followed.
    """

    root: Path
    files: Sequence[Path]
    hidden: Sequence[Path] = ()
    links: Sequence[Path] = ()

    @classmethod
    def of(cls, root: Path) -> Listing:
        """List a folder.

        Links to folders are followed in ``root`` only, since classes may be links, unless they lead
        back to ``root``. Hidden folders are not entered. Raises OSError for other folders that
        cannot be read.
        """
        found, hidden, links = list[Path](), list[Path](), list[Path]()

        def add(path: Path) -> None:
            if not path.name.startswith("."):
                found.append(path)
            elif is_picture(path):
                hidden.append(path)

        def look_into(folder: Path) -> None:
            with suppress(OSError):  # a system's own, which nobody else may read
                hidden.extend(path for path in sorted(folder.iterdir()) if is_picture(path))

        def stop(error: OSError) -> None:
            raise error

        for top in sorted(root.iterdir()) if root.is_dir() else ():
            if not top.is_dir():
                add(top)
            elif top.is_symlink() and root.resolve().is_relative_to(top.resolve()):
                links.append(top)  # a loop, whose pictures would come twice
            elif top.name.startswith("."):
                look_into(top)
            else:
                for folder, folders, names in os.walk(top, onerror=stop):
                    for name in folders:
                        if name.startswith("."):
                            look_into(Path(folder, name))
                        elif os.path.islink(Path(folder, name)):
                            links.append(Path(folder, name))
                    folders[:] = sorted(name for name in folders if not name.startswith("."))
                    for name in sorted(names):
                        add(Path(folder, name))
        return cls(root, found, hidden, links)

    @property
    def pictures(self) -> list[Path]:
        """Files with the suffix of a supported picture format."""
        return [path for path in self.files if is_picture(path)]

    def is_sample(self, path: Path) -> bool:
        """True if a caption may be of this file."""
        return is_picture(path)

    @property
    def texts(self) -> list[Path]:
        """Texts that may be captions."""
        return [path for path in self.files if path.suffix == TEXT_SUFFIX]

    @property
    def lists(self) -> list[Path]:
        """Lists of captions."""
        return [path for path in self.files if path.name in (METADATA, TABLE)]

    def ignored_files(self) -> Iterator[str]:
        """Lines on ignored files: reason, number, and some names."""
        pictures = self.pictures
        names = {path.with_suffix("") for path in pictures}
        others = [path for path in self.files if path.suffix.lower() in _UNREAD]
        # A text that is beside no picture at all is no caption: a README, a licence.
        folders = {name.parent for name in names} | {path.parent for path in others}
        lone = [p for p in self.texts if p.with_suffix("") not in names and p.parent in folders]
        if lone:
            yield f"{self._has(lone, 'text')} without a picture of that name: ignored"
        if others:
            yield (
                f"{self._has(others, 'picture')} in unsupported formats: ignored. Convert them to "
                f"{', '.join(SUFFIXES)}"
            )
        if self.hidden:
            yield f"{self._has(self.hidden, 'hidden file')} with picture names: ignored"
        if self.links:
            yield (
                f"{self._has(self.links, 'link')} to folders below class folders, or to the folder "
                "itself: not followed"
            )
        known = {*pictures, *self.texts, *self.lists, *others}
        tables = [p for p in self.files if p not in known and p.suffix.lower() in _TABLES]
        if tables := [path for path in tables if path.name not in _ABOUT]:
            yield (
                f"{self._has(tables, 'table')}: ignored; captions are read from {METADATA}, "
                f"{TABLE}, or NAME{TEXT_SUFFIX} beside each picture"
            )
        if strange := [p for p in self.files if p not in known and not _is_note(p)]:
            yield f"{self._has(strange, 'file')} without a picture's suffix: ignored"

    def _has(self, paths: Sequence[Path], what: str) -> str:
        return f"{self.root} has {some(self.root, paths, what)}"


def is_picture(path: Path) -> bool:
    """True if the file's suffix is that of a supported picture format."""
    return path.suffix.lower() in SUFFIXES


def some(root: Path, paths: Collection[Path], what: str) -> str:
    """Number of paths below ``root``, each a ``what``, and the names of the first."""
    shown = ", ".join(str(path.relative_to(root)) for path in [*paths][:_NAMED])
    more = ", ..." if len(paths) > _NAMED else ""
    return f"{len(paths)} {what}{'s' * (len(paths) > 1)} ({shown}{more})"


def by_stem(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    """Paths by name without suffix."""
    found = defaultdict[Path, list[Path]](list)
    for path in paths:
        found[path.with_suffix("")].append(path)
    return found


def _is_note(path: Path) -> bool:
    """True if a file describes the folder: a README, a licence, a script, or a table."""
    return path.suffix.lower() in ("", ".md", ".rst", ".py", ".sh", *_TABLES)
