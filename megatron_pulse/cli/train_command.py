"""``pulse train``: a training from a recipe: weights, ranks, resuming."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_pulse.cli import run_command
from megatron_pulse.cli.flag_checks import add_parser, as_user_error, warn
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.launcher_env import ranks_of
from megatron_pulse.dataclass_flags import RECIPE, RECIPE_KEYS, STARTING_RECIPE
from megatron_pulse.diffusion.hub import with_local_folders
from megatron_pulse.errors import UserError, collecting, format_faults, summarize
from megatron_pulse.files import replacing, unwritable
from megatron_pulse.integration.flags.recipe_keys import with_keys
from megatron_pulse.processes import end_on_interrupt, raise_on_interrupt
from megatron_pulse.recipe.flags import CHECKPOINTS, keys_by_flag, training_flags
from megatron_pulse.recipe.keys import Model, Recipe
from megatron_pulse.recipe.read import read_recipe, write_recipe
from model_specs import is_cascade

_DESCRIPTION = """\
Trains by a recipe, a TOML file ('pulse recipe' writes one to begin with). KEY=VALUE replaces a key
of the recipe for this start.
Starts one rank for each GPU, or parallel.devices ranks. Under torchrun or srun each process is a
rank. Pretrained weights are imported once, into the folder of the run. Without a plan or a layout
the training measures devices and links, tunes, and keeps its plan.
The same command again resumes from the newest checkpoint. The recipe of the last start lies in
the folder of the run.

examples:
  pulse recipe digits > digits.toml
  pulse train digits.toml
  pulse train digits.toml training.steps=2000 optimizer.lr=1e-3
  pulse train digits.toml --print                        the flags, and nothing else
  torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_pulse.cli train recipe.toml
"""

_ENTRY = "megatron_pulse.integration.train_entry"
_IMPORTED = "imported"
_RECORD = "imported.json"
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
_POLL_S = 1.0
_LONGEST_IMPORT_S = 3600.0
_LAST_RANK_S = 10.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``train``."""
    parser = add_parser(commands, "train", "train by a recipe", _DESCRIPTION, run)
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a .toml file")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys to replace, e.g. optimizer.lr=1e-4"
    )
    parser.add_argument("--prepare", action="store_true", help="import the weights; start nothing")
    parser.add_argument(
        "--print", action="store_true", help="print the commands that it stands for; start nothing"
    )
    # argparse takes no KEY=VALUE behind an option
    setattr(parser, "parse_known_args", partial(_options_first, parser.parse_known_args))  # noqa: B010


def _options_first(
    parse: Callable[..., Any], words: Sequence[str], namespace: argparse.Namespace | None = None
) -> Any:
    return parse(sorted(words, key=lambda word: not word.startswith("-")), namespace)


def run(args: argparse.Namespace) -> None:
    """Read the recipe, check it, import its weights, start or be ranks."""
    launched = {"RANK", "SLURM_STEP_ID"} & os.environ.keys() and not (args.prepare or args.print)
    place = ranks_of(os.environ) if launched else {}
    try:
        _train(args, place)
    except UserError as error:
        text = with_keys(str(error), keys_by_flag())
        if not place:
            raise UserError(text) from error
        _refuse_as_rank(place, f"pulse train: error: {text}")


def _train(args: argparse.Namespace, place: Mapping[str, str]) -> None:
    """Train by the recipe, as the rank at this ``place`` or as the parent of all ranks."""
    file = read_recipe(args.recipe, args.overrides)
    recipe, output = file.recipe, Path(file.recipe.output)
    num_ranks = int(place["WORLD_SIZE"]) if place else _num_ranks(recipe)
    rank = int(place["RANK"]) if place else 0
    flags, faults = training_flags(recipe)
    with _environment_kept():
        start = _in_place(recipe) or _without_import(recipe.model, output)
        if args.print:
            print("\n".join(_commands(recipe, flags, start, num_ranks)), flush=True)
        if faults or not (args.prepare or place and start):  # ranks check all that they know
            _check(args, recipe, start, num_ranks)
        if args.print:
            return
        if fault := unwritable(output):
            raise UserError(f"output {output}: {fault}")
        if start is None and place:
            start = _imported_by_rank_0(recipe.model, output, args, rank)
        elif start is None:
            start = import_weights(recipe.model, output)
            if not args.prepare:
                _check(args, recipe, start, num_ranks)
    if rank == 0:
        again = f"pulse train {output / RECIPE}"
        write_recipe(output / (RECIPE if args.prepare else STARTING_RECIPE), file.tables, again)
    if args.prepare:
        return
    os.environ[RECIPE_KEYS] = json.dumps(keys_by_flag())  # for what ranks print
    flags = [*start.flags, *start.pretrained, *flags]
    if place:
        _be_rank(place, flags)
    else:
        _start_ranks(recipe, flags, num_ranks)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Undo changes of the environment within, which are not for ranks."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check(
    args: argparse.Namespace, recipe: Recipe, start: TrainingStart | None, num_ranks: int
) -> None:
    """Raise UserError with all faults that can be found before ranks start.

    Without ``start``, before weights are imported, those that need no model.
    """
    flags, faults = training_flags(recipe)
    if start is not None:
        flags = [*start.flags, *start.pretrained, *flags]
    flags, absent = with_local_folders(flags, download=not args.print)
    if absent and args.print:
        warn(f"unchecked: {with_keys(summarize(absent), keys_by_flag())}")
        return
    weights = recipe.model.weights
    if start is None and weights and not (args.print and weights.startswith("hf:")):
        with collecting(faults):
            _local(weights)
    end_on_interrupt()  # imports may swallow a KeyboardInterrupt
    prepare_megatron()
    from megatron_pulse.integration.setup import faults_before_ranks

    raise_on_interrupt()
    faults += absent or faults_before_ranks(flags, num_ranks, has_backbone=start is not None)
    if faults:
        raise UserError(format_faults(str(args.recipe), faults))


@dataclass(frozen=True)
class TrainingStart:
    """Flags of the backbone that the weights name, and of the checkpoint made of them."""

    flags: tuple[str, ...] = ()
    pretrained: tuple[str, ...] = ()


def _in_place(recipe: Recipe) -> TrainingStart | None:
    """Start of a recipe whose weights are read where they are; None if they must be imported.

    These are an adapter's frozen weights in a diffusers folder: each rank reads its own layers.
    Tensor parallelism divides imported weights only. A run goes on with the weights of its first
    start: raises UserError if these cannot be divided.
    """
    model, output = recipe.model, Path(recipe.output)
    if recipe.adapter.type is None or model.weights is None or _known(model, output) is not None:
        return None
    if model.backbone or model.module or model.controlnet or model.null_class:
        return None
    place = Path(model.weights)
    if not model.weights.startswith("hf:") and (not place.is_dir() or _is_checkpoint(place)):
        return None
    if (tensor := recipe.parallel.tensor or 1) > 1:
        if _is_checkpoint(output / CHECKPOINTS):
            raise UserError(
                f"parallel.tensor {tensor}: {output} holds a run that reads the layers of "
                f"{model.weights} as they are, which tensor parallelism does not divide. Give "
                "parallel.tensor 1, or another output"
            )
        return None
    return TrainingStart(("--pulse-module", f"diffusers:{model.weights}"))


def import_weights(model: Model, output: Path) -> TrainingStart:
    """Import the model's weights into ``output``, unless an earlier start has done so.

    Weights that are a checkpoint already are used in their place.
    """
    if (start := _without_import(model, output)) is not None:
        return start
    assert model.weights is not None
    place = _local(model.weights)
    from megatron_pulse.cli.models.import_export_commands import import_published
    from megatron_pulse.diffusion.published import find_component
    from model_specs import is_traced, read_published

    target = output / _IMPORTED
    print(f"importing {model.weights} into {target}", flush=True)
    words = ["--from", str(place), "--to", str(target)]
    single = place.is_file()
    if single:
        name = model.module or model.backbone
        words += ["--module" if model.module else "--backbone", name] if name else []
    if single or is_traced(read_published(find_component(place))):  # families need no size
        for option, value in model.options.items():
            words += ["--option", f"{option}={value}"]
    if model.controlnet is not None:
        words += ["--controlnet", _local_words("--controlnet", model.controlnet)]
    words += ["--null-class"] * model.null_class
    flags = import_published(_import_arguments(words))
    flags = [] if single else flags  # the recipe has them
    with replacing(output / _RECORD) as new:
        new.write_text(json.dumps({"of": _identity(model), "flags": flags}, indent=1) + "\n")
    return TrainingStart(tuple(flags), ("--pretrained-checkpoint", str(target)))


def _without_import(model: Model, output: Path) -> TrainingStart | None:
    """Start of a model whose weights need no import; None if they do."""
    if model.weights is None:
        return TrainingStart()
    if (known := _known(model, output)) is None and _is_checkpoint(place := Path(model.weights)):
        flags = _checkpoint_flags(model, place)
        return TrainingStart(flags, ("--pretrained-checkpoint", str(place)))
    if model.backbone is not None and is_cascade(model.backbone):
        raise UserError(
            f"model.weights {model.weights}: a cascade has the weights of its chains. Leave the "
            "key out, and name folders in model.backbone, as high=diffusers:FOLDER"
        )
    return known


def _import_arguments(words: Sequence[str]) -> argparse.Namespace:
    from megatron_pulse.cli.models import import_export_commands

    parser = argparse.ArgumentParser(prog="pulse train")
    import_export_commands.add_command(parser.add_subparsers())
    return parser.parse_args(["import", *words])


def _identity(model: Model) -> dict[str, object]:
    """Keys that decide what an import makes."""
    names = ("weights", "controlnet", "null_class")
    return {name: getattr(model, name) for name in names}


def _known(model: Model, output: Path) -> TrainingStart | None:
    """Weights that an earlier start imported; raises UserError if those were others."""
    record = output / _RECORD
    if not record.is_file() or not (output / _IMPORTED).is_dir():
        return None
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        before, flags = found["of"], tuple(map(str, found["flags"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} is damaged ({error}): remove it and {_IMPORTED}/") from error
    if before != _identity(model):
        raise UserError(
            f"{output / _IMPORTED} was made of other weights ({before.get('weights')}): give the "
            f"run another output, or remove {_IMPORTED} and {_RECORD} there"
        )
    return TrainingStart(flags, ("--pretrained-checkpoint", str(output / _IMPORTED)))


def _imported_by_rank_0(
    model: Model, output: Path, args: argparse.Namespace, rank: int
) -> TrainingStart:
    """Weights that rank 0 imports, in a process of its own: an import is a world of one rank."""
    if rank == 0 and _known(model, output) is None:
        command = [sys.executable, "-m", "megatron_pulse.cli", "train", "--prepare"]
        alone = {k: v for k, v in os.environ.items() if k not in _OF_A_RANK}
        done = subprocess.run([*command, str(args.recipe), *args.overrides], env=alone)
        if done.returncode:
            sys.exit(done.returncode)
    end = time.monotonic() + _LONGEST_IMPORT_S
    while (known := _known(model, output)) is None:
        if time.monotonic() > end:
            raise UserError(
                f"rank 0 has not imported {model.weights} into {output} within "
                f"{_LONGEST_IMPORT_S:.0f} s; do all nodes share this folder?"
            )
        time.sleep(_POLL_S)
    return known


def _local(weights: str) -> Path:
    place = Path(_local_words("--from", weights))
    if not place.exists():
        raise UserError(f"model.weights {weights}: there is no such file or folder")
    return place


def _local_words(flag: str, value: str) -> str:
    words, faults = with_local_folders([flag, value])
    if faults:
        raise UserError(summarize(faults))
    return words[1]


def _is_checkpoint(place: Path) -> bool:
    from megatron_pulse.integration.checkpoint.folders import LATEST

    return (place / LATEST).is_file()


def _checkpoint_flags(model: Model, place: Path) -> tuple[str, ...]:
    """Flags of the backbone in a checkpoint, unless the recipe names one."""
    if model.backbone or model.module:
        return ()
    prepare_megatron()
    from megatron_pulse.cli.models.import_export_commands import flags_of
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    with as_user_error(ValueError):
        return tuple(flags_of(read_saved_run(place).load_backbone(), place=None))


def _commands(
    recipe: Recipe, flags: Sequence[str], start: TrainingStart | None, num_ranks: int
) -> list[str]:
    """Shell commands that the recipe stands for; without ``start``, one imports its weights."""
    found = []
    if start is None:
        target = str(Path(recipe.output) / _IMPORTED)
        words = ["pulse", "import", "--from", str(recipe.model.weights), "--to", target]
        found = [shlex.join(words), "# and the flags of the backbone, which it prints:"]
        start = TrainingStart((), ("--pretrained-checkpoint", target))
    lines = [shlex.join(["pulse", "run", "--nproc-per-node", str(num_ranks), "-m", _ENTRY])]
    for word in (*start.flags, *start.pretrained, *flags):
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return [*found, " \\\n    ".join(lines)]


def _num_ranks(recipe: Recipe) -> int:
    """Ranks to start on this machine."""
    parallel = recipe.parallel
    if parallel.devices is not None:
        return parallel.devices
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.device_count())
    if parallel.plan is not None and Path(parallel.plan).is_file():
        from megatron_pulse.planner.plan_file.plan_file import read_plan

        _, plan, _ = read_plan(parallel.plan)
        if plan is not None:
            return int(plan.world_size)
    return (parallel.pipeline or 1) * (parallel.tensor or 1) * (parallel.context or 1)


def _start_ranks(recipe: Recipe, flags: Sequence[str], num_ranks: int) -> None:
    """Start the ranks of this machine; ends the process with their status if it is not 0."""
    end_on_interrupt()
    print(f"training on {num_ranks} rank(s); the run is in {recipe.output}", flush=True)
    words = ["--nproc-per-node", str(num_ranks), "-m", _ENTRY, *flags]
    run_command.hold_interrupts_of_ranks()
    run_command.run(argparse.Namespace(command_line=words))


def _be_rank(place: Mapping[str, str], flags: Sequence[str]) -> None:
    """Train as the rank at this ``place`` in the job of a launcher."""
    _join(place)
    from megatron_pulse.integration.train_entry import start

    sys.argv = ["pulse train", *flags]
    start()


def _refuse_as_rank(place: Mapping[str, str], text: str) -> NoReturn:
    """End the rank at this ``place``; equal texts of several ranks are printed once."""
    _join(place)
    from megatron_pulse.runtime.rendezvous import Job, report_to_torchrun

    job = Job()
    job.say_once(text)
    report_to_torchrun(text, is_first=True)
    job.part(_LAST_RANK_S)
    sys.exit(2)


def _join(place: Mapping[str, str]) -> None:
    """Set the environment of the rank at this ``place``."""
    os.environ.update(place)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_node(os.environ.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_PORT" not in os.environ:
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        os.environ["MASTER_PORT"] = str(20_000 + job % 20_000)


def _first_node(nodes: str) -> str:
    """Name of the first node of a Slurm job."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60
        )
        return shown.stdout.splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError) as error:
        raise UserError(
            f"the first node of {nodes or 'this job'} is unknown ({error}): set MASTER_ADDR"
        ) from error
