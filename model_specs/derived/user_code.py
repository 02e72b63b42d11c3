"""Loading of user code by name, only if the command line names the code.

Names from files (records, plans) never run code by themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_pulse.errors import describe_exception

_allowed: set[str] = set()


def allow(name: str) -> None:
    """Permit running the code ``name``; for names from the command line of this process."""
    _allowed.add(canonical(name))


def canonical(name: str) -> str:
    """Name as stored in records: ``./a/../mine.py:build`` becomes ``mine.py:build``."""
    place, _, attribute = name.rpartition(":")
    return f"{os.path.normpath(place)}:{attribute}" if place.endswith(".py") else name


def find(name: str) -> Any:
    """Import and return the object called ``name``.

    Raises ValueError if the object does not exist or the name was not allowed.
    """
    name = canonical(name)
    if name.startswith("hf:"):
        raise ValueError(f"{name} is a folder on a hub, not code. Write diffusers:{name}")
    given = _given(name)
    if given is None:
        others = f" (you named {', '.join(sorted(_allowed))})" if _allowed else ""
        raise ValueError(
            f"{name} is code. It runs only if named on the command line, not if named by a "
            f"file{others}. Review it, and give --module {name} (in training --pulse-module "
            f"{name})"
        )
    place, _, attribute = given.rpartition(":")
    try:
        module = _load(Path(place)) if place.endswith(".py") else _import(place)
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"{name}: {place} cannot be imported: {describe_exception(error)}"
        ) from error
    if not hasattr(module, attribute):
        there = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise ValueError(f"{name}: {place} has no {attribute!r}; it has: {there}")
    return getattr(module, attribute)


def _given(name: str) -> str | None:
    """Command-line form of the code ``name``, or None if the code was not named.

    A record stores the path relative to the folder of its run (``mine.py``). The command line may
    give the same file as ``../mine.py`` or ``/home/me/mine.py``.
    """
    if name in _allowed:
        return name
    place, _, attribute = name.rpartition(":")
    path = Path(place)
    for other in sorted(_allowed):
        there, _, called = other.rpartition(":")
        if not there.endswith(".py") or (called, Path(there).name) != (attribute, path.name):
            continue
        if not path.is_file() or path.resolve() == Path(there).resolve():
            return other
    return None


def _import(name: str) -> Any:
    with _searched(Path.cwd()):  # as with python -m
        return importlib.import_module(name)


@contextmanager
def _searched(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on the import path."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    known = f"_pulse_{path.resolve().with_suffix('').as_posix().replace('/', '_')}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        try:
            with _searched(path.resolve().parent):  # as a script's own folder is
                spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[known]
            raise
    return sys.modules[known]
