"""Constraints between Megatron's supported flags, and values at which Megatron fails later."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import linecache
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.training.arguments import validate_args

from megatron_pulse.dataclass_flags import ABOVE_ZERO, BELOW_ONE, FROM_ONE, FROM_ZERO, flag_name
from megatron_pulse.integration.flags.optimizers import EMERGING, missing_package
from megatron_pulse.integration.flags.parse import CommandLine

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with CUDA's number of hardware queues."""

_FILE = Path(__file__).with_name("constraints.txt")
_RANGES = {each.must: each for each in (FROM_ONE, FROM_ZERO, BELOW_ONE, ABOVE_ZERO)}


def check_constraints(line: CommandLine) -> list[str]:
    """Faults of Megatron's given flags: combinations and values."""
    args = line.args
    return [
        *_check_needs(line),
        *_check_numbers(args),
        *_check_loss_scale(line),
        *_check_optimizer(args),
        *_check_rate(args),
        *_check_output(args),
        *_check_reading(args),
    ]


def check_megatron(args: argparse.Namespace) -> list[str]:
    """Faults found by Megatron's own validation of ``args``, which stay unchanged."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            validate(copy.deepcopy(args))
        except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
            why = str(error) or _line_of(error)
            return [f"Megatron refuses these flags: {why}"]
    return []


def validate(args: argparse.Namespace) -> None:
    """Apply Megatron's own validation, which changes ``args``.

    --optimizer-cpu-offload implies --use-precision-aware-optimizer, as Megatron demands. With fp16,
    the latter demands gradients accumulated in fp32.

    With tensor or context parallelism Megatron checks ``CUDA_DEVICE_MAX_CONNECTIONS``, even before
    CUDA starts and if the user has chosen a value. The variable is set for the check only;
    ``pretrain.set_cuda_connections`` restores the choice.
    """
    args.use_precision_aware_optimizer |= args.optimizer_cpu_offload
    args.accumulate_allreduce_grads_in_fp32 |= args.optimizer_cpu_offload and args.fp16
    chosen = os.environ.get(CONNECTIONS)
    if args.tensor_model_parallel_size * args.context_parallel_size > 1:
        os.environ[CONNECTIONS] = "1"
    try:
        validate_args(args, {})
    finally:
        if chosen is None:
            os.environ.pop(CONNECTIONS, None)
        else:
            os.environ[CONNECTIONS] = chosen


def _line_of(error: BaseException) -> str:
    """Source line that raised ``error``, for an error without a text."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return linecache.getline(frame.filename, frame.lineno or 0).strip()


@functools.cache
def _section(name: str) -> list[tuple[str, str]]:
    """Lines of section ``[name]`` in ``constraints.txt``, as (before, after) the colon."""
    _, _, rest = _FILE.read_text(encoding="utf-8").partition(f"[{name}]\n")
    return [
        (a, b) for a, _, b in (row.partition(": ") for row in rest.split("\n\n")[0].splitlines())
    ]


def _check_needs(line: CommandLine) -> Iterator[str]:
    for name in line.given:
        for needed, flags in _section("needs"):
            one = needed.split(" or ")
            if name in flags.split() and not any(_is_set(line, flag) for flag in one):
                yield f"{name} was given without {needed}"
    if "--sequence-parallel" in line.given and line.args.tensor_model_parallel_size == 1:
        yield "--sequence-parallel was given without --tensor-model-parallel-size 2 or more"
    yield from _check_constant_rate(line)


def _check_constant_rate(line: CommandLine) -> Iterator[str]:
    """Faults of flags that describe a decay of the learning rate when it is constant."""
    args = line.args
    if args.lr_decay_style != "constant":
        return
    ignored = ["--min-lr"] if args.min_lr else []
    if args.lr_warmup_fraction is None:  # else the warm-up is a share of them
        ignored += ["--lr-decay-iters", "--lr-decay-samples"]
    for name in ignored:
        if name in line.given:
            yield (
                f"{name} was given without --lr-decay-style: the learning rate is constant by "
                "default"
            )


def _is_set(line: CommandLine, flag: str) -> bool:
    """True if the flag is set or was given; a contradicting plan is reported elsewhere."""
    name, _, value = flag.partition(" ")
    held = getattr(line.args, name[2:].replace("-", "_"))
    if value:
        return str(held) == value
    return bool(held) or (held is False and flag in line.given)


def _check_numbers(args: argparse.Namespace) -> Iterator[str]:
    for must, flags in _section("numbers"):
        for name in flags.split():
            yield from _RANGES[must].faults(name, getattr(args, name[2:].replace("-", "_")))


_DYNAMIC_SCALE = ("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis")


def _check_loss_scale(line: CommandLine) -> Iterator[str]:
    """Flags of a dynamic loss scale beside a fixed one, and one that begins below its least."""
    args, first = line.args, line.args.initial_loss_scale
    if args.loss_scale is not None:
        for name in (name for name in _DYNAMIC_SCALE if name in line.given):
            yield f"{name} excludes --loss-scale, which fixes the loss scale: give one of them"
    elif args.fp16 and args.min_loss_scale > first:
        default = "" if "--initial-loss-scale" in line.given else "the default "
        yield (
            f"--min-loss-scale {args.min_loss_scale:g} is above {default}--initial-loss-scale "
            f"{first:g}, the initial loss scale: lower the first or raise the second"
        )


def _check_optimizer(args: argparse.Namespace) -> Iterator[str]:
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other: give one"
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each "
            "other: give one"
        )
    if missing := missing_package(args.optimizer):
        yield f"--optimizer {args.optimizer}: {missing}"
    if args.optimizer in EMERGING and args.fp16:
        yield f"--optimizer {args.optimizer} cannot be used with --fp16 in Megatron: use --bf16"
    if args.optimizer != "adam" and args.use_distributed_optimizer and not args.pulse_fsdp:
        yield (
            f"--optimizer {args.optimizer} cannot be used with --use-distributed-optimizer, which "
            "shards Adam's state: leave one out"
        )
    if args.optimizer_cpu_offload and args.bf16 and args.log_params_norm:
        yield (
            "--log-params-norm cannot be used with --optimizer-cpu-offload and --bf16: the norm "
            "needs fp32 weights on the device, and these are on the host"
        )
    if args.ddp_num_buckets is not None and args.ddp_bucket_size is not None:
        yield "--ddp-num-buckets and --ddp-bucket-size exclude each other: give one"
    if args.overlap_param_gather and args.save_params_interval is not None:
        yield (
            "--save-params-interval cannot be used with --overlap-param-gather, which leaves "
            "weights incomplete between steps"
        )
    if args.transformer_impl == "transformer_engine" and not torch.cuda.is_available():
        yield (
            "--transformer-impl transformer_engine: its layers need GPUs, and torch finds none. "
            "Leave the flag out"
        )
    elif args.transformer_impl == "transformer_engine" and (
        importlib.util.find_spec("transformer_engine") is None
    ):
        yield (
            "--transformer-impl transformer_engine: Transformer Engine is not installed. Install "
            "it (pip install 'transformer-engine[pytorch]'), or leave the flag out"
        )


def _check_rate(args: argparse.Namespace) -> Iterator[str]:
    if args.train_iters is not None and args.train_samples is not None:
        yield "--train-iters and --train-samples exclude each other: give one"
        return
    unit = "samples" if args.train_samples is not None else "iters"
    other = "iters" if unit == "samples" else "samples"
    for name in (f"lr_warmup_{other}", f"lr_decay_{other}", f"lr_wsd_decay_{other}"):
        if getattr(args, name):
            yield f"{flag_name(name)} has another unit than --train-{unit}: use {unit} in all flags"
    total = getattr(args, f"train_{unit}")
    decay = getattr(args, f"lr_decay_{unit}")
    decay = total if decay is None else decay
    warmup = getattr(args, f"lr_warmup_{unit}")
    if args.lr_warmup_fraction is not None and warmup:
        yield f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other: give one"
    if decay is not None and decay < 1 and decay != total:
        yield f"--lr-decay-{unit} is {decay}; it must be 1 or more"
    elif decay is not None and warmup >= max(decay, 1) and not args.skip_train:
        given = f"--lr-warmup-{unit} {warmup}"
        if args.pulse_warmup_epochs is not None:
            given = f"--pulse-warmup-epochs {args.pulse_warmup_epochs:g} ({warmup} steps)"
        yield (
            f"{given} must be below {decay}, the length of the learning-rate "
            f"schedule: --lr-decay-{unit} (default --train-{unit})"
        )
    wsd = getattr(args, f"lr_wsd_decay_{unit}")
    if args.lr_decay_style == "WSD" and None not in (wsd, decay) and wsd > decay >= 1:
        yield (
            f"--lr-wsd-decay-{unit} {wsd} is above {decay}, the length of the learning-rate "
            f"schedule: give at most --lr-decay-{unit} (default --train-{unit})"
        )
    if args.lr is not None and args.lr > 0:
        for name in ("min_lr", "lr_warmup_init"):
            if getattr(args, name) > args.lr:
                yield f"{flag_name(name)} {getattr(args, name):g} is above --lr {args.lr:g}"
    if args.lr_decay_style == "WSD" and wsd is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    if args.weight_decay_incr_style != "constant":
        ends = args.start_weight_decay, args.end_weight_decay
        if None in ends:
            yield (
                f"--weight-decay-incr-style {args.weight_decay_incr_style} needs "
                "--start-weight-decay and --end-weight-decay"
            )
        elif ends[1] < ends[0]:
            yield f"--end-weight-decay {ends[1]:g} is below --start-weight-decay {ends[0]:g}"


def _check_output(args: argparse.Namespace) -> Iterator[str]:
    interval, retain = args.save_interval, args.save_retain_interval
    if interval and retain and retain % interval:
        yield f"--save-retain-interval {retain} is no multiple of --save-interval {interval}"
    memory = args.log_memory_interval
    if memory and args.log_interval > 0 and memory % args.log_interval:
        yield f"--log-memory-interval {memory} is no multiple of --log-interval {args.log_interval}"
    if args.profile and args.profile_step_end <= args.profile_step_start:
        yield (
            f"--profile-step-end {args.profile_step_end} is not after --profile-step-start "
            f"{args.profile_step_start}"
        )
    if args.wandb_project and args.wandb_save_dir is None and args.save is None:
        yield "--wandb-project was given without --wandb-save-dir or --save"


def _check_reading(args: argparse.Namespace) -> Iterator[str]:
    how = args.ckpt_fully_parallel_load_exchange_algo
    if args.ckpt_fully_parallel_load and how != "gather_object" and not torch.cuda.is_available():
        yield (
            f"--ckpt-fully-parallel-load exchanges loaded tensors by {how}, which needs GPUs, and "
            "torch finds none. Give --ckpt-fully-parallel-load-exchange-algo gather_object"
        )
