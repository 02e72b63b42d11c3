"""``pulse``: backbones, profiles, partitions, schedules, data, curves, samples, weights.

Only the module of the command that runs is imported, and slow dependencies only as it runs.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from megatron_pulse.cli.flag_checks import warn
from megatron_pulse.dataclass_flags import NearestChoiceParser, with_new_names
from megatron_pulse.diffusion.hub import with_local_folders
from megatron_pulse.errors import UserError, did_you_mean, summarize, unknown_name
from megatron_pulse.full_disk import full_remedy, why_full
from megatron_pulse.processes import (
    NO_FOLDER,
    hide_package_warnings,
    open_closed_streams,
    raise_on_interrupt,
)

_EPILOG = """\
Training is started with 'pulse train', or by flags with 'pulse run'. A first tour:

  bash launch/quickstart.sh                            train on digits, then all of the below
  pulse recipe digits > digits.toml                    a recipe to begin with
  pulse train digits.toml                              train by it
  pulse backbones                                      named backbones and how far they fold
  pulse module diffusers:UNet2DModel                   any torch module as a chain
  pulse profile --backbone uvit-tiny -o profile.json   costs of each layer on this machine
  pulse partition --profile profile.json -p 2          cuts for two devices
  pulse schedule --profile profile.json -p 2 -m 8      schedule of 8 microbatches on them
  pulse tune --profile profile.json --cluster cpu --global-batch-size 64 -o plan.json
  pulse check plan.json                                can the plan run?
  pulse verify plan.json                               gradients beside one process's
  pulse show plan.json -o plan.html                    timeline, memory, messages
  pulse compare plan.json runs/trace                   a run beside its plan
  pulse flags optimizer                                which of Megatron's flags work
  pulse data info mnist                                size and classes of a dataset
  pulse curve --tensorboard-dir runs/quickstart/tensorboard -o loss.png
  pulse checkpoint list runs/quickstart/checkpoints    saved steps, and whether they are whole
  pulse sample --load runs/quickstart/checkpoints -o digits.png --score mnist

'pulse COMMAND --help' explains a command and shows examples.
"""


_COMMANDS = {
    "backbones": "models.backbones_command",
    "module": "models.module_command",
    "profile": "measure.profile_command",
    "clusters": "plan.clusters_command",
    "probe": "measure.probe_command",
    "partition": "plan.partition_command",
    "schedule": "plan.schedule_command",
    "tune": "plan.tuning.tune_command",
    "check": "plan.check_command",
    "verify": "plan.verify_command",
    "show": "plan.show_command",
    "compare": "measure.compare_command",
    "recipe": "recipe_command",
    "train": "train_command",
    "run": "run_command",
    "sample": "models.sample_command",
    "curve": "models.curve_command",
    "checkpoint": "models.checkpoint_command",
    "data": "models.data_command",
    "flags": "flags_command",
    "import": "models.import_export_commands",
    "export": "models.import_export_commands",
    "unpack": "models.unpack_command",
}
"""Module of each command, in the order of the help."""

_ELSEWHERE = {
    ("pretrain", "launch", "torchrun", "fine-tune", "finetune", "resume"): (
        "training is 'pulse train RECIPE' ('pulse recipe' writes one), or by flags 'pulse run "
        "--nproc-per-node N launch/pretrain_diffusion.py'"
    ),
    ("generate", "infer", "inference", "predict"): "samples are drawn by 'pulse sample'",
    ("convert", "load", "save"): (
        "weights are read by 'pulse import' and written by 'pulse export'"
    ),
    ("prove", "certify", "compare-gradients"): "'pulse verify' compares a plan's gradients",
    ("eval", "evaluate", "score", "validate", "test"): (
        "'pulse sample --score' scores samples, and training evaluates every --eval-interval steps"
    ),
    ("plan", "auto", "search"): "plans are made by 'pulse tune' and shown by 'pulse show'",
    ("visualize", "draw", "plot"): "'pulse show' draws plans, 'pulse curve' losses",
}
"""Guessed names of commands, with the command that does the same here."""


def make_parser(only: str = "") -> argparse.ArgumentParser:
    """Make the parser of all commands, or of the one that is named.

    Each sets ``run``, which takes the parsed arguments.
    """
    parser = NearestChoiceParser(
        prog="pulse",
        description="Plan and run pipeline-parallel training of diffusion backbones.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    modules = [_COMMANDS[only]] if only else dict.fromkeys(_COMMANDS.values())
    for module in modules:
        importlib.import_module(f"megatron_pulse.cli.{module}").add_command(commands)
    return parser


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return cast(Mapping[str, argparse.ArgumentParser], action.choices)
    return {}


def _parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words``; an unknown flag is an error of its command, with similar flags as a hint."""
    args, rest = parser.parse_known_args(words)
    if not rest:
        return args
    for word in words:
        if (of := _commands(parser).get(word)) is None:
            break
        parser = of
    own = list(parser._option_string_actions)
    faults = []
    for word in rest:
        if word.startswith("--memory") and "--cluster" in own:
            faults.append(f"{word}: a device's memory is memory_gb in the file of --cluster")
        elif word.startswith("--"):
            faults.append(
                f"there is no {word.partition('=')[0]}; {did_you_mean(word, own)}".rstrip("; ")
            )
    parser.error(summarize(faults or [f"what is {' '.join(rest)!r}? no flag takes it"]))


def _no_command(name: str) -> str:
    """Error for an unknown command, with the command that is meant; empty if it exists."""
    if name in _COMMANDS:
        return ""
    for guesses, instead in _ELSEWHERE.items():
        if name.lower().replace("_", "-") in guesses:
            return f"there is no command {name!r}: {instead}"
    return unknown_name("command", name, _COMMANDS)


def _unprinted() -> str:
    """Reason why standard output cannot be written; empty, after printing a line, if it can."""
    try:
        print(flush=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _drop_output() -> None:
    """Discard pending output, so that the interpreter's exit raises nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(error: Exception, args: argparse.Namespace) -> str | None:
    """Reason, if ``error`` comes from an unwritable file in ``args`` or from a full output.

    Pending output is then discarded.
    """
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:40]}...: the name is too long; give a shorter one"
    full = why_full(error, [value for value in vars(args).values() if isinstance(value, Path)])
    if full is not None and (reason := _unprinted()):
        _drop_output()
        return f"standard output: {reason}"
    if full is None:
        return None
    return f"{full}; {full_remedy(full)}, or write to another place"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for a user's error, 130 if interrupted."""
    open_closed_streams()
    hide_package_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal's encoding may lack characters
            stream.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:
        print(f"pulse: error: {NO_FOLDER}", file=sys.stderr)
        return 2
    words = list(sys.argv[1:] if argv is None else argv)
    named = words[0] if words and not words[0].startswith("-") else None
    if named is not None and (reason := _no_command(named)):
        print(f"pulse: error: {reason}", file=sys.stderr)
        return 2
    parser = make_parser(named or "")
    if words[:1] != ["run"]:  # what stands behind a script is the script's
        words, renamed = with_new_names(words)
        warn(*renamed)
    words, faults = with_local_folders(words)
    if faults:
        print(f"pulse {words[0]}: error: {summarize(faults)}", file=sys.stderr)
        return 2
    args = _parsed(parser, words)
    args.words = words
    raise_on_interrupt()
    try:
        args.run(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"pulse {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\npulse {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has ended
        _drop_output()
        return 141  # as a shell reports SIGPIPE
    except Exception as error:
        if (fault := _unwritten(error, args)) is None:
            raise
        print(f"pulse {args.command}: error: {fault}", file=sys.stderr)
        return 2
    return 0
