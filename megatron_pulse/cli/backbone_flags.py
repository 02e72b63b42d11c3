"""Flags for the backbone, shared by several commands.

They are ``--backbone``, ``--module``, ``--option``, ``--train``, ``--freeze``, ``--adapter`` and
``--quantization``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_pulse.adapters.choice import AdapterChoice
from megatron_pulse.cli.flag_checks import add_flag
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.dataclass_flags import add_flags, key_values, read_flags
from megatron_pulse.dataclass_flags import flag_faults as dataclass_faults
from megatron_pulse.errors import UserError, collecting

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone

_MODULE = (
    "a torch module, or a chain of your own: diffusers:FOLDER, diffusers:CLASS, FILE.py:FACTORY or "
    "PACKAGE.MODULE:FACTORY"
)


def add_backbone_flags(parser: Any, meaning: str) -> None:
    """Add ``--backbone``, whose help is ``meaning``, and ``--module`` to an exclusive group."""
    add_flag(parser, "--backbone NAME", meaning, type=backbone_name_type)
    add_flag(parser, "--module NAME", _MODULE, dest="backbone", type=_named_module)


def add_layers_flags(parser: argparse.ArgumentParser, file_flag: str, meaning: str) -> None:
    """Add flags for a command's layers: a backbone, or a file of costs.

    The backbone has options and patterns of trained parameters. ``file_flag`` names the file, and
    ``meaning`` is its help.
    """
    what = parser.add_mutually_exclusive_group(required=True)
    add_backbone_flags(what, "one of 'pulse backbones'")
    add_flag(what, f"{file_flag} FILE", meaning, reads=True)
    add_option_flag(parser, "override one of the backbone's options")
    for flag, does in (
        ("--train", "train matching parameters, as *.bias, and freeze all others"),
        ("--freeze", "freeze matching parameters, as down_blocks.0.*"),
    ):
        add_flag(parser, f"{flag} PATTERN", f"{does} (repeatable)", action="append", default=[])
    add_flags(AdapterChoice, parser)


def layers_faults(args: argparse.Namespace, is_file: bool) -> list[str]:
    """Faults of the backbone flags; beside a file there are none."""
    if not is_file:
        return [*backbone_faults(args), *dataclass_faults(read_flags(AdapterChoice, args))]
    return [
        f"--{name} is for --backbone"
        for name in ("option", "train", "freeze", "adapter", "quantization")
        if getattr(args, name)
    ]


def add_code_flag(parser: Any, what: str) -> None:
    """Add ``--module`` to a command that reads ``what``, which may name code."""
    add_flag(
        parser,
        "--module NAME",
        f"code of your own that {what} names: it runs only if you name it here",
        type=_named_module,
    )


def backbone_name_type(name: str) -> str:
    """Argument type of a flag that names a backbone; named code may run from here on."""
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
    return backbone_name_type(name)


def add_option_flag(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``--option``; ``meaning`` is its help."""
    add_flag(parser, "--option KEY=VALUE", f"{meaning} (repeatable)", action="append", default=[])


def trained_backbone(args: argparse.Namespace, dtype: str) -> Backbone:
    """Backbone of the backbone flags, for parameters of ``dtype``."""
    from megatron_pulse.profile.trainable import TrainedPart
    from model_specs import in_dtype, load_backbone, trained_as

    options = in_dtype(args.backbone, options_of(args), dtype)
    backbone = load_backbone(args.backbone, options)
    adapter = read_flags(AdapterChoice, args)
    part = TrainedPart(tuple(args.train), tuple(args.freeze), adapter.record, adapter.quantization)
    if any(part):
        prepare_megatron()
    backbone = trained_as(backbone, part)
    shares = getattr(args, "shares", None)
    return backbone if shares is None else with_shares(backbone, shares)


def add_shares(parser: argparse.ArgumentParser) -> None:
    """Add ``--shares``."""
    add_flag(
        parser,
        "--shares X,X,...",
        "how often samples have each shape of --option buckets ('pulse data info' counts them; "
        "default: equally often)",
    )


def with_shares(backbone: Backbone, text: str) -> Backbone:
    """``backbone`` with the shares of its shapes; raises UserError for others."""
    try:
        shares = tuple(map(float, text.split(",")))
        if len(shares) != backbone.num_shapes or not all(0 < x < math.inf for x in shares):
            raise ValueError
    except ValueError as error:
        raise UserError(
            f"--shares {text}: give a number above 0 for each of the {backbone.num_shapes} "
            f"shape(s) of {backbone.name}"
        ) from error
    return replace(backbone, shares=shares)


def option_faults(args: argparse.Namespace) -> list[str]:
    """Faults of ``--option`` values that are not KEY=VALUE."""
    faults: list[str] = []
    with collecting(faults):
        options_of(args)
    return faults


def backbone_faults(args: argparse.Namespace) -> list[str]:
    """Faults of ``--backbone`` and its options."""
    from model_specs import check_options, is_module, load_backbone, unknown_backbone

    if fault := unknown_backbone(args.backbone):
        return [fault, *option_faults(args)]
    faults: list[str] = []
    with collecting(faults):
        options = options_of(args)
        if is_module(args.backbone):
            check_options(args.backbone, options)  # exported later, in the dtype needed
        else:
            load_backbone(args.backbone, options)
    return faults


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """Values of ``--option``, as ``load_backbone`` takes them."""
    return key_values(args.option, "--option")
