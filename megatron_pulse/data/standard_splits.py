"""Splits of a dataset by names of folders and files, as Hugging Face's ``datasets`` knows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_pulse.data.dataset import DataError

_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {name: split for split, names in _NAMES.items() for name in names}
_PREFIX = re.compile(rf"({'|'.join(_SPLIT_OF)})(?=[-_.])", re.IGNORECASE)


def require_one_split(what: str, root: Path, files: Iterable[Path], *, prefixes: bool) -> None:
    """Raise DataError if each of ``files`` belongs to a split, and these are several.

    A split is a folder in ``root`` (``val/``), or with ``prefixes`` the beginning of a file's name
    (``val-00001.parquet``). To train on all would also train on what is meant for validation.
    """
    found: dict[str, str] = {}
    for path in files:
        first = path.relative_to(root).parts[0] if root in path.parents else path.name
        of_name = _PREFIX.match(path.name) if prefixes else None
        name = first if first.lower() in _SPLIT_OF else of_name[1] if of_name else ""
        if not name:
            return
        found.setdefault(_SPLIT_OF[name.lower()], name)
    if len(found) < 2:
        return
    named = ", ".join(found.values())
    remedy = "Train on one, and give another as --pulse-validation-data (data.validation)."
    if all((root / name).is_dir() for name in found.values()):
        remedy = f"Name one, as in {root / next(iter(found.values()))}. {remedy}"
    else:
        remedy = f"Name the files of one, or move each split into its own folder. {remedy}"
    raise DataError(
        what, [f"it has the splits {named}, which would be trained on together"], remedy
    )
