"""Flags that carry their checks, and messages for user errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from megatron_pulse.dataclass_flags import Range, flag_name
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.errors import UserError, summarize
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import unwritable
from megatron_pulse.full_disk import why_full


def require(faults: Sequence[str]) -> None:
    """Raise UserError with every fault, if there is any."""
    if faults:
        raise UserError(summarize(faults))


def warn(*cautions: str) -> None:
    """Print each non-empty warning to standard error."""
    for caution in cautions:
        if caution:
            print(f"warning: {caution}", file=sys.stderr)


@contextmanager
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds, whose messages are meant for users, into UserError.

    A full disk, quota or file size limit passes: ``main`` tells it with a remedy.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and why_full(error, []) is not None:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(text)) from error


def check_file(path: Path | None, flag: str, *suffixes: str) -> list[str]:
    """Faults of ``path``, if given, as a file of these kinds to write; creates nothing."""
    if path is None:
        return []
    if path.suffix.lower() not in suffixes:
        *first, last = suffixes
        ends = f"{', '.join(first)} or {last}" if first else last
        return [f"{flag} {path}: the file name must end in {ends}"]
    if path.is_dir():
        return [f"{flag} {path} is a folder; name a file in it"]
    return check_folder(path.parent, flag)


def check_folder(folder: Path, flag: str) -> list[str]:
    """Fault if ``folder`` cannot be written; creates nothing."""
    fault = unwritable(folder, "folder ")
    return [f"{flag}: {fault}"] if fault else []


_KINDS = {
    "profile": FileKind.PROFILE,
    "encoders": FileKind.ENCODERS,
    "verified": FileKind.VERIFICATION,
}
"""The kinds of files that flags of these names take."""


def no_such_file(name: str, path: Path, kind: FileKind | None) -> str:
    """The fault of a file that is not there, with the command that makes one of its kind."""
    how = "" if kind is None else kind.made(path)
    return f"{name} {path}: there is no such file" + (f"; {how}" if how else "")


def missing_file_faults(**paths: Path | None) -> list[str]:
    """Faults of flags that name a missing file."""
    return [
        f"{flag_name(name)} {path} is a folder; name a file in it"
        if path.is_dir()
        else no_such_file(flag_name(name), path, _KINDS.get(name))
        for name, path in paths.items()
        if path is not None and not path.is_file()
    ]


def vae_faults(vae: Path | None) -> list[str]:
    """Faults of ``--vae``, if given, as the folder of an autoencoder."""
    if vae is None or (vae / "config.json").is_file():
        return []
    if vae.is_file():
        from megatron_pulse.encoders.loading import files_amiss

        return [f"--vae: {fault}" for fault in files_amiss(vae)]
    if (vae / VAE / "config.json").is_file():
        whole = (vae / "model_index.json").is_file()
        return [
            f"--vae {vae} is a pipeline's folder: give the autoencoder in it, --vae {vae / VAE}"
            + f", or all its encoders, --encoders {vae}" * whole
        ]
    return [f"--vae {vae} holds no config.json of a diffusers AutoencoderKL"]


@dataclass(frozen=True)
class _FlagCheck:
    """Valid numbers of a flag, whether it names a file to read, and suffixes of one to write."""

    within: Range | None
    reads: bool
    writes: tuple[str, ...]


_CHECKS = WeakKeyDictionary[argparse.Action, _FlagCheck]()

PRINT = Path("-")
"""File of a flag that means standard output."""


def add_flag(
    parser: Any,
    form: str,
    help: str,
    *,
    within: Range | None = None,
    reads: bool = False,
    writes: Sequence[str] = (),
    **takes: Any,
) -> None:
    """Add a flag to a parser or a group of one, with checks for ``command_faults``.

    ``form`` is how help writes it: ``-o, --output FILE``, or ``--raw`` for a flag without a value.
    ``within`` is the range of its number. It names a file that is read, or one that is written with
    one of the suffixes ``writes``. A type that is not given is that of a default number. ``takes``
    is as for argparse.
    """
    *names, last = form.replace(", -", " -").split(" ")
    if names and not last.startswith("-"):
        takes["metavar"] = last
    else:
        names.append(last)
    if not takes.keys() & {"metavar", "choices", "action", "nargs"}:
        takes["action"] = "store_true"
    if reads or writes:
        takes.setdefault("type", Path)
    elif isinstance(takes.get("default"), int | float) and "choices" not in takes:
        takes.setdefault("type", type(takes["default"]))
    action = parser.add_argument(*names, help=help, **takes)
    _CHECKS[action] = _FlagCheck(within, reads, tuple(writes))


def command_faults(args: argparse.Namespace, without: Collection[str] = ()) -> list[str]:
    """Faults of numbers, of files to read and to write, in the order of the command's flags.

    Flags ``without`` are not checked.
    """
    faults = []
    read, written = list[Path](), dict[str, Path]()
    for action in args.parser._actions:
        if (check := _CHECKS.get(action)) is None or action.dest in without:
            continue
        value, name = getattr(args, action.dest), (action.option_strings or [action.dest])[-1]
        if check.within is not None:
            faults += check.within.faults(name, value)
        if value is None or value == PRINT:
            continue
        if check.reads:
            read.append(Path(value))
            if isinstance(value, Path) and action.option_strings:
                faults += missing_file_faults(**{action.dest: value})
        if check.writes:
            written[name] = value
            faults += check_file(value, name, *check.writes)
    return faults + overwrite_faults(written, *read)


def overwrite_faults(written: Mapping[str, Path], *read: Path) -> list[str]:
    """Fault for each flag of ``written`` whose file is also read, or is another flag's."""
    faults, others = [], dict[Path, str]()
    there = [path for path in read if path.exists()]
    for flag, path in written.items():
        if path.exists() and any(path.samefile(other) for other in there):
            faults.append(f"{flag} {path} would replace what is read")
        if (other := others.setdefault(path.resolve(), flag)) != flag:
            faults.append(f"{flag} {path} is what {other} writes")
    return faults


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    run: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.ArgumentParser:
    """Add the parser of command ``name``, which ``run`` carries out.

    ``description``, with its examples, is printed verbatim.
    """
    parser = commands.add_parser(
        name.split()[-1],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if run is not None:
        parser.set_defaults(run=run, command=name, parser=parser)
    return parser
