"""Disk cache of derived chains.

There is a file for each content of module and inputs, microbatch size and mode; the folder is
``graphs`` in the cache's (``files.cache_folder``). Its removal costs only time. A file that cannot
be read counts as missing. A chain whose content cannot be told is derived at each start; the log
says why, at level debug.

Values that forward reads from the environment are stored with the chain and compared. Files that
forward reads are not known to the cache.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import (
    FileError,
    cache_folder,
    digest_of_sources,
    read_json,
    write_with_checksum,
)
from megatron_pulse.tracing.cache.content import UnknownContent, digest_of, is_library
from megatron_pulse.tracing.cache.serialize import NotStorable, from_record, to_record
from megatron_pulse.tracing.checks.torch_settings import settings_now
from megatron_pulse.tracing.checks.untraced_effects import calls
from megatron_pulse.tracing.input_leaves import leaves_of
from megatron_pulse.tracing.units import UnitChain

log = logging.getLogger(__name__)

_FORMAT = "megatron_pulse graph 1"


def cached_chain(
    module: nn.Module,
    given: Mapping[str, Any],
    settings: tuple[Any, ...],
    derive: Callable[[], tuple[UnitChain, bool]],
) -> tuple[UnitChain, bool]:
    """Stored result of ``derive`` for this content; else its result, which is stored.

    ``derive`` returns the chain of ``module(**given)``, and whether it depends on the modes of the
    module's parts. ``settings`` are all that it depends on besides module and inputs. Raises only
    the exceptions of ``derive``.
    """
    name = type(module).__name__
    try:
        content = module, given, settings, settings_now(), torch.get_default_device()
        files = _own_files()
        key = digest_of(_FORMAT, _versions(), sorted(files.values()), content)
    except (UnknownContent, RecursionError) as error:
        log.debug("%s is derived at each start: %s", name, error)
        return derive()
    path = cache_folder() / "graphs" / f"{key[:40]}.json"
    own = {
        **dict(module.named_buffers(remove_duplicate=False)),
        **dict(module.named_parameters()),
        **{f"input {name}": leaf for name, leaf in leaves_of(given).items()},
    }
    try:
        record = read_json(path, FileKind.GRAPH)
        if all(os.environ.get(key) == value for key, value in record["environment"].items()):
            return from_record(record["chain"], own), record["reads_modes"]
    except FileError as error:
        log.debug("%s is derived: %s", name, error)
    except Exception as error:  # torch's too, for arguments that fit no operation
        log.debug("%s is derived, since %s is not valid: %s", name, path, error)
    with _environment_reads() as environment:
        chain, reads_modes = derive()
    try:
        if _own_files() != files:
            raise NotStorable("its forward imports files")
        record = {
            "format": _FORMAT,
            "environment": environment,
            "reads_modes": reads_modes,
            "chain": to_record(chain, own),
        }
        write_with_checksum(path, json.dumps(record) + "\n")
    except (NotStorable, OSError) as error:
        log.debug("%s is derived at each start: %s", name, error)
    return chain, reads_modes


@contextmanager
def _environment_reads() -> Iterator[dict[str, str | None]]:
    """Variables that are read within the context, with their values."""
    names: set[str] = set()
    found: dict[str, str | None] = {}
    with calls(type(os.environ).__getitem__, "key", names.add):
        yield found
    found.update((name, os.environ.get(name)) for name in sorted(names))


@functools.cache
def _versions() -> list[str]:
    """Python, torch, installed packages and this project's tracing."""
    installed = sorted(
        entry.name
        for folder in map(Path, sys.path)
        if folder.is_dir()
        for entry in os.scandir(folder)
        if entry.name.endswith((".dist-info", ".egg-info"))
    )
    package = Path(__file__).parents[2]
    code = digest_of_sources(package / "tracing", package / "backbone")
    return [sys.version, torch.__version__, str(torch.version.git_version), code, *installed]


def _own_files() -> dict[str, str]:
    """Digests of loaded files that belong to no library, except the program itself."""
    program = sys.modules.get("__main__")  # also named __mp_main__, where processes are spawned
    files = {
        name: file
        for name, module in list(sys.modules.items())
        if module is not program and (file := getattr(module, "__file__", None))
    }
    return {name: _digest_of_file(file) for name, file in files.items() if not is_library(file)}


@functools.cache
def _digest_of_file(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
