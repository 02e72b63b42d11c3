"""``--option KEY=VALUE``, which several commands take."""

from __future__ import annotations

import argparse

from megatron_pulse.faults import collecting
from megatron_pulse.flag_fields import key_values


def add_option_flag(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``--option``; ``meaning`` is its help."""
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help=f"{meaning} (repeatable)"
    )


def option_faults(args: argparse.Namespace) -> list[str]:
    """A fault for each that is not of that form."""
    faults: list[str] = []
    with collecting(faults):
        options_of(args)
    return faults


def backbone_faults(args: argparse.Namespace) -> list[str]:
    """Why there is no such backbone, or not with these options."""
    from model_specs import load_backbone, unknown_backbone

    if fault := unknown_backbone(args.backbone):
        return [fault, *option_faults(args)]
    faults: list[str] = []
    with collecting(faults):
        load_backbone(args.backbone, options_of(args))
    return faults


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """What was given, as ``load_backbone`` takes it."""
    return key_values(args.option, "--option")
