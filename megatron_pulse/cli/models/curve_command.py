"""``pulse curve``: picture of a run's losses."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
)
from megatron_pulse.cli.output import add_json, print_result

_DESCRIPTION = """\
Reads the TensorBoard files of a run. The values are written beside the picture as JSON (loss.png
and loss.json); --json prints them too.

example:
  pulse curve --tensorboard-dir runs/quickstart/tensorboard -o loss.png
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``curve``."""
    parser = add_parser(
        commands, "curve", "draw the training and validation loss of a run", _DESCRIPTION, run
    )
    add_flag(
        parser,
        "--tensorboard-dir DIR",
        "the folder that training was given as --tensorboard-dir",
        type=Path,
        required=True,
    )
    add_flag(parser, "-o, --output PNG", "the picture to write", writes=[".png"], required=True)
    add_flag(parser, "--title TITLE", "heading of the picture (default: Loss)", default="Loss")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Draw the picture, and print the first and last losses."""
    faults = command_faults(args)
    if not args.tensorboard_dir.is_dir():
        faults.append(f"--tensorboard-dir {args.tensorboard_dir} is not a folder")
    require(faults)
    from megatron_pulse.integration.loss_curve import draw_loss_curve

    with as_user_error(OSError, KeyError):
        values = draw_loss_curve(args.tensorboard_dir, args.output, title=args.title)
    lines = []
    for name, curve in values.items():
        first, last = curve["values"][0], curve["values"][-1]
        lines.append(f"{name} loss: {first:.4f} -> {last:.4f} at iteration {curve['steps'][-1]}")
    lines.append(f"{args.output} and {args.output.with_suffix('.json')}")
    print_result(args, lines, lambda: values)
