"""``pulse recipe``: recipes to begin with, their keys, and other trainers' configurations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from megatron_pulse.cli.flag_checks import add_parser
from megatron_pulse.cli.output import table
from megatron_pulse.errors import UserError, unknown_name
from megatron_pulse.recipe.examples import example_names, example_summary, example_text
from megatron_pulse.recipe.keys import TABLES

_DESCRIPTION = """\
Without a NAME, lists the recipes that it can write. A recipe is a TOML file for 'pulse train';
--keys explains its keys. A configuration of diffusion-pipe becomes a recipe; what has no
counterpart here is listed as comments at its end.

examples:
  pulse recipe
  pulse recipe sd15 > recipe.toml
  pulse recipe --keys                        all keys, with the flag of each
  pulse recipe --keys warmup                 those with the word
  pulse recipe --from-diffusion-pipe main.toml > recipe.toml
  pulse recipe --devices rtx-4090,dgx-a100   how many devices each needs, by the planner
  pulse recipe flux-lora --devices rtx-4090  how many it needs
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``recipe``."""
    parser = add_parser(commands, "recipe", "write a recipe to begin with", _DESCRIPTION, run)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe of the list")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--keys", nargs="?", const="", metavar="WORD", help="explain keys, or those with a word"
    )
    what.add_argument(
        "--devices",
        metavar="CLUSTER[,CLUSTER...]",
        help="table of the devices and the memory that each recipe, or NAME, needs, by the planner "
        "(takes minutes): whole nodes of these clusters, or parts of one node",
    )
    what.add_argument(
        "--from-diffusion-pipe",
        type=Path,
        metavar="FILE",
        help="convert a configuration of diffusion-pipe, with the dataset file that it names",
    )


def run(args: argparse.Namespace) -> None:
    """Print a recipe, the list, keys, or a converted recipe."""
    given = [args.keys, args.from_diffusion_pipe]
    if args.name is not None and given != [None, None]:
        raise UserError(f"{args.name}: --keys, --from-diffusion-pipe take no name")
    if args.from_diffusion_pipe is not None:
        from megatron_pulse.recipe.from_diffusion_pipe import converted

        print(converted(args.from_diffusion_pipe), end="")
    elif args.devices is not None:
        from megatron_pulse.cli.recipe_devices import device_table

        print("\n".join(device_table(args.devices.split(","), args.name)))
    elif args.keys is not None:
        print("\n".join(_key_lines(args.keys.lower())))
    elif args.name is None:
        rows = [(name, example_summary(name)) for name in example_names()]
        print("\n".join(table(rows, left=(0, 1), titles=False)))
        print("\n'pulse recipe NAME > recipe.toml' writes one, 'pulse train recipe.toml' trains")
    elif args.name not in example_names():
        raise UserError(unknown_name("recipe", args.name, example_names()))
    else:
        print(example_text(args.name), end="")


def _key_lines(word: str) -> list[str]:
    rows = [row for row in _keys() if word in " ".join(row).lower()]
    if not rows:
        raise UserError(f"no key has {word!r}: 'pulse recipe --keys' lists all")
    return table([("key", "flag", "meaning"), *rows], left=(0, 1, 2))


def _keys() -> Iterator[tuple[str, str, str]]:
    yield "output", "--save, --tensorboard-dir", "folder of the run (required)"
    for name, kind in TABLES.items():
        for each in fields(kind):
            meaning = each.metadata["meaning"] + " (required)" * _is_required(each)
            yield f"{name}.{each.name}", each.metadata["flag"].replace(" ", ", "), meaning
    yield (
        "megatron.FLAG",
        "--FLAG",
        "any other flag of Megatron, without its dashes ('pulse flags')",
    )


def _is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING
