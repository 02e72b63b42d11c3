"""Files that other files name: which names are of a folder's own files, and why one is no file.

Who wrote an index, a list or a ``meta.json`` may be a stranger: what it names elsewhere is not
read. A file in the folder may be a link to elsewhere, as in the Hub's cache: links are followed,
since whoever unpacks a folder makes them.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_file_name(name: object) -> bool:
    """Whether it can be that of a file in a folder, and of none elsewhere."""
    if not isinstance(name, str) or len(name.encode(errors="replace")) >= 256:
        return False  # no file system has longer ones
    elsewhere = {"\\", "\0"} & set(name)
    return name not in ("", "..") and not elsewhere and name == Path(name).name


def within(root: Path, folder: Path, name: str) -> Path | None:
    """The path below ``root`` that a file in ``folder``, below it too, calls ``name``; None for one
    elsewhere, as the words of the name go."""
    relative = os.path.normpath(folder.relative_to(root) / name)
    if os.path.isabs(relative):
        relative = os.path.relpath(relative, os.path.abspath(root))
    return None if relative.split(os.sep)[0] == ".." else root / relative


def no_file(path: Path) -> str:
    """Why ``path`` is nothing to read from, as a pipe, which would keep who opens it waiting for
    ever; empty where it is a file."""
    if path.is_file():
        return ""
    if path.is_symlink() and not path.exists():
        return f"{path.name} is a link to {os.readlink(path)}, where there is no file"
    if path.is_dir():
        return f"{path.name} is a folder, not a file"
    return f"{path.name} is {'no regular file' if path.exists() else 'missing'}"
