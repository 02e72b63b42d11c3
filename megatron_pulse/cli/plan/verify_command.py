"""``pulse verify``: check that a plan's step computes the same as one process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import (
    add_backbone_flags,
    add_option_flag,
    backbone_faults,
    options_of,
)
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.cli.output import add_json, print_result
from megatron_pulse.cli.shared_flags import DTYPES, add_plan
from megatron_pulse.dataclass_flags import ABOVE_ZERO, FROM_ONE, FROM_ZERO
from megatron_pulse.errors import UserError
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.integration.verify.verify import Progress, Settings
    from megatron_pulse.planner.plan_file.plan_file import PlanFile

_DESCRIPTION = """\
Runs two steps of the plan on all its ranks, and the same two steps in one process. Compares

  the output of every layer and the loss, for every microbatch
  the gradient of every parameter, summed over microbatches and replicas, before clipping
  every weight, on every replica, after the optimizer

The ranks use the plan's schedule and messages, and Megatron's data and tensor parallelism. The one
process is a plain loop over layers and microbatches. Pipelines are equal to the bit. Replicated
embedders, replicas and tensor-parallel ranks sum in another order; they are listed with their
bounds. A larger difference is located: the layer where it begins, the first microbatch, and its
size, absolute, relative to the layer's largest gradient, and in units in the last place (ulp).

Ranks run on this machine's GPUs (NCCL) if there are enough, else on its CPU cores (gloo). Small
random numbers are added to all weights: zeros would hide gradients. Batches are random, or with
--data the first of a training. --module is needed for the plan of a module: its code runs only if
you name it. With --by-stages the one process holds one stage at a time and recomputes boundaries,
for models that do not fit one device.

The certificate is written beside the plan (PLAN.verified.json), and 'pulse show PLAN' prints it.
The exit status is 0 if all is equal, 1 if something differs, 2 for an error.

examples:
  pulse verify plan.json
  pulse verify plan.json --module mine.py:build --data digits8
  pulse verify plan.json --by-stages --timeout-s 1800
  pulse verify plan.json --device cpu --dtype float32 --json
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``verify``."""
    parser = add_parser(
        commands,
        "verify",
        "compare a plan's gradients with one process's",
        _DESCRIPTION,
        run,
    )
    add = partial(add_flag, parser)
    add_plan(parser)
    what = parser.add_mutually_exclusive_group()
    add_backbone_flags(what, "require a plan of this backbone")
    add_option_flag(parser, "override an option (default: the plan's)")
    add("--data DATA", "as --pulse-data takes it (default: random numbers)")
    add("--steps N", "steps to make (default 2)", within=FROM_ONE, default=2)
    add("--seed N", "of weights and batches (default 0)", within=FROM_ZERO, default=0)
    add(
        "--device",
        "default: cuda where there is a GPU for each of the plan's ranks, else cpu",
        choices=["cuda", "cpu"],
    )
    add("--dtype", "of parameters and activations (default: the plan's)", choices=DTYPES)
    add(
        "--conditioning",
        "as --pulse-conditioning of the run (default auto)",
        choices=["auto", "send", "replicate"],
        default="auto",
    )
    add("--by-stages", "hold one stage at a time, for a model that does not fit a device")
    add("--timeout-s S", "time limit in seconds (default 600)", within=ABOVE_ZERO, default=600.0)
    add(
        "-o, --output JSON",
        "the certificate (default: PLAN.verified.json, beside the plan)",
        writes=[".json"],
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Verify, write the certificate, print it; ends with status 1 for a difference."""
    from megatron_pulse.planner.plan_file.certificate import (
        DIFFERS,
        certificate_path,
        save_verification,
        to_json,
    )
    from megatron_pulse.planner.tune.plans.verify_figures import load_checked

    output = args.output = args.output or certificate_path(args.plan)
    faults = command_faults(args)
    if args.backbone:
        faults += backbone_faults(args)
    elif args.option:
        faults.append("--option is for --backbone or --module; without, the options are the plan's")
    require(faults)
    given = load_checked(args.plan)

    prepare_profiling()
    with as_user_error(ValueError):
        settings = _settings(args, given)
    from megatron_pulse.integration.verify.verify import verify

    if settings.device == "cuda":  # read when cuBLAS starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cores = len(os.sched_getaffinity(0))
    if settings.device == "cpu" and given.world_size > 2 * cores:
        warn(f"{given.world_size} ranks share {cores} processor cores")
    with as_user_error(ValueError, OSError), _progress() as progress:
        found = verify(args.plan, settings, progress)
    save_verification(found, output)
    print_result(args, [*found.lines(), f"written to {output}"], lambda: to_json(found))
    if found.result == DIFFERS:
        sys.stdout.flush()
        sys.exit(1)


def _settings(args: argparse.Namespace, given: PlanFile) -> Settings:
    """Settings by flags and plan; raises ValueError for a plan of another backbone."""
    import torch

    from megatron_pulse.integration.verify.verify import Settings

    dtype = args.dtype or given.dtype
    name, options = _model(args, given, dtype)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = args.device or ("cuda" if count >= given.world_size else "cpu")
    if device == "cuda" and count < given.world_size:
        raise UserError(
            f"--device cuda: the plan has {given.world_size} ranks, and torch finds {count} "
            "GPU(s); give --device cpu, or use a machine with as many"
        )
    return Settings(
        name,
        options,
        dtype,
        device,
        args.data,
        args.steps,
        args.seed,
        args.timeout_s,
        args.by_stages,
        args.conditioning,
    )


def _model(args: argparse.Namespace, given: PlanFile, dtype: str) -> tuple[str, Mapping[str, Any]]:
    """Backbone name and options, in ``dtype``; raises UserError for another plan's backbone."""
    from megatron_pulse.profile.channels_last import in_format_of
    from megatron_pulse.profile.trainable import identity
    from model_specs import DTYPE, in_dtype, is_module, load_backbone, load_recorded

    planned = given.backbone
    name, options = planned["name"], planned["options"]
    of_plan = load_recorded(planned)
    if args.backbone:
        name = args.backbone
        said = in_format_of(planned, name, options_of(args)) if args.option else options
        try:
            here = load_backbone(name, in_dtype(name, said, given.dtype, str(args.plan)))
        except ValueError as error:
            raise UserError(_other(args, planned["name"], f": {error}")) from error
        if identity(here.record) != identity(of_plan.record):
            raise UserError(_other(args, planned["name"], ""))
        options = here.record["options"]
    return name, {**options, DTYPE: dtype} if is_module(name) else options


def _other(args: argparse.Namespace, planned: str, why: str) -> str:
    options = " with these options" * bool(args.option)
    return (
        f"{args.plan} is a plan of {planned}, not of {args.backbone}{options}{why}. Leave the "
        "backbone out, or make a plan of it with 'pulse tune'"
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Progress line on a terminal."""
    with ProgressLine("verifying", 0, "tasks") as line:

        def show(what: str, done: int, count: int) -> None:
            line.what, line.done, line.total = what, done, count

        yield show
