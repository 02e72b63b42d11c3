"""``--backbone``, ``--module``, ``--option``, ``--train`` and ``--freeze`` of several commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.errors import no_file
from megatron_pulse.faults import collecting
from megatron_pulse.flag_fields import key_values

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone

_MODULE = (
    "a torch module as it is, or a chain of your own: diffusers:FOLDER, diffusers:CLASS, "
    "FILE.py:FACTORY or PACKAGE.MODULE:FACTORY"
)


def add_backbone_flags(parser: Any, meaning: str) -> None:
    """Add ``--backbone``, whose help is ``meaning``, and ``--module`` to a group of which one is
    given."""
    parser.add_argument("--backbone", metavar="NAME", type=named, help=meaning)
    parser.add_argument(
        "--module", dest="backbone", metavar="NAME", type=_named_module, help=_MODULE
    )


def add_layers_flags(parser: argparse.ArgumentParser, file_flag: str, meaning: str) -> None:
    """Add flags for the layers that a command works on: a backbone, its options and what of it is
    trained; or a file of what layers cost, by ``file_flag``, whose help is ``meaning``."""
    what = parser.add_mutually_exclusive_group(required=True)
    add_backbone_flags(what, "one of 'pulse backbones'")
    what.add_argument(file_flag, type=Path, metavar="FILE", help=meaning)
    add_option_flag(parser, "override one of the backbone's options")
    for flag, does in (
        ("--train", "train the parameters whose names match, as *.bias, freeze all others"),
        ("--freeze", "freeze the parameters whose names match, as down_blocks.0.*"),
    ):
        parser.add_argument(
            flag, action="append", default=[], metavar="PATTERN", help=f"{does} (repeatable)"
        )


def layers_faults(args: argparse.Namespace, **file: Path | None) -> list[str]:
    """Why there is no such backbone, or no such file, given by its flag's name."""
    if all(path is None for path in file.values()):
        return backbone_faults(args)
    return no_file(**file) + [
        f"--{name} is for --backbone" for name in ("option", "train", "freeze")
        if getattr(args, name)
    ]  # fmt: skip


def add_code_flag(parser: Any, what: str) -> None:
    """Add ``--module`` to a command that reads ``what``, which may name code."""
    parser.add_argument(
        "--module",
        metavar="NAME",
        type=_named_module,
        help=f"the code of your own that {what} names, if it does: it runs only if you name it too",
    )


def named(name: str) -> str:
    """The type of a flag that names a backbone: if that is code, it may be run."""
    from model_specs import allow

    allow(name)
    return name


def _named_module(name: str) -> str:
    from model_specs import is_module, misnamed

    if not is_module(name):
        raise argparse.ArgumentTypeError(
            misnamed(name)
            or f"{name!r} is no module: write diffusers:FOLDER, diffusers:CLASS, FILE.py:FACTORY "
            "or PACKAGE.MODULE:FACTORY; named backbones are --backbone's"
        )
    return named(name)


def add_option_flag(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``--option``; ``meaning`` is its help."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help=f"{meaning} (repeatable)"
    )


def trained_backbone(args: argparse.Namespace, dtype: str) -> Backbone:
    """What ``--backbone``, ``--option``, ``--train`` and ``--freeze`` say, for parameters of
    ``dtype``."""
    from megatron_pulse.cli.megatron import prepare_megatron
    from megatron_pulse.profile.trained import trained_as
    from model_specs import in_dtype, load_backbone

    options = in_dtype(args.backbone, options_of(args), dtype)
    backbone = load_backbone(args.backbone, options)
    if args.train or args.freeze:
        prepare_megatron()
    return trained_as(backbone, {"train": args.train, "freeze": args.freeze})


def option_faults(args: argparse.Namespace) -> list[str]:
    """A fault for each that is not of that form."""
    faults: list[str] = []
    with collecting(faults):
        options_of(args)
    return faults


def backbone_faults(args: argparse.Namespace) -> list[str]:
    """Why there is no such backbone, or not with these options."""
    from model_specs import check_options, is_module, load_backbone, unknown_backbone

    if fault := unknown_backbone(args.backbone):
        return [fault, *option_faults(args)]
    faults: list[str] = []
    with collecting(faults):
        options = options_of(args)
        if is_module(args.backbone):
            check_options(args.backbone, options)  # its chain is made in the dtype that is needed
        else:
            load_backbone(args.backbone, options)
    return faults


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """What was given, as ``load_backbone`` takes it."""
    return key_values(args.option, "--option")
