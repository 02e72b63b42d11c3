"""Checks and messages for user errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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


def range_faults(
    allowed: Range, args: argparse.Namespace, *names: str, **values: float | None
) -> list[str]:
    """Faults of flags of these names, or of given values, outside the range ``allowed``."""
    given = {name: getattr(args, name) for name in names} | values
    return [fault for name in given for fault in allowed.faults(flag_name(name), given[name])]


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
        parser.set_defaults(run=run, command=name)
    return parser
