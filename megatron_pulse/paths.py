"""Safe paths for files named by other files.

An index, a list or a ``meta.json`` may come from a stranger, so names outside its folder are
refused. Symbolic links are followed, as in the Hub's cache, because whoever unpacks a folder
creates them.
"""

from __future__ import annotations

import os
from pathlib import Path


def is_file_name(name: object) -> bool:
    """True if ``name`` is a plain file name within a folder."""
    if not isinstance(name, str) or len(name.encode(errors="replace")) >= 256:
        return False  # exceeds the limit of every file system
    elsewhere = {"\\", "\0"} & set(name)
    return name not in ("", "..") and not elsewhere and name == Path(name).name


def within(root: Path, folder: Path, name: str) -> Path | None:
    """Path below ``root`` of the file that a file in ``folder`` calls ``name``.

    ``folder`` is below ``root`` too. None if the name, taken literally, leads outside.
    """
    relative = os.path.normpath(folder.relative_to(root) / name)
    if os.path.isabs(relative):
        relative = os.path.relpath(relative, os.path.abspath(root))
    return None if relative.split(os.sep)[0] == ".." else root / relative


def no_file(path: Path) -> str:
    """Reason why ``path`` is no regular file; empty for a regular file.

    Opening a pipe, for example, would block for ever.
    """
    if path.is_file():
        return ""
    if path.is_symlink() and not path.exists():
        return f"{path.name} is a link to {os.readlink(path)}, which does not exist"
    if path.is_dir():
        return f"{path.name} is a folder, not a file"
    return f"{path.name} is {'no regular file' if path.exists() else 'missing'}"
