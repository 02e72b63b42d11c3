"""Checks of all flags at the start, reported together."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_pulse.dataclass_flags import ABOVE_ZERO, flag_faults, flag_name
from megatron_pulse.errors import faults_in, format_faults
from megatron_pulse.files import unwritable
from megatron_pulse.integration.flags.context_flags import context_faults, excluded_faults
from megatron_pulse.integration.flags.flag_constraints import check_constraints
from megatron_pulse.integration.flags.fsdp_flags import fsdp_faults
from megatron_pulse.integration.flags.parse import CommandLine
from megatron_pulse.integration.flags.pulse_options import (
    PREFIX,
    FlagMark,
    PulseOptions,
    pulse_flags,
)
from megatron_pulse.profile.roofline import PRESETS
from model_specs import is_module, weights_folders


class FlagError(SystemExit):
    """Refusal to start the run; the message lists every fault with its remedy."""

    def __init__(self, faults: list[str]) -> None:
        faults = list(dict.fromkeys(faults))
        # Of two that differ by the flag in front, the one with the flag.
        faults = [f for f in faults if not any(other.endswith(f" {f}") for other in faults)]
        self.faults = faults
        super().__init__(format_faults("error: this run cannot start", faults))


@contextmanager
def refusing(*kinds: type[Exception], where: str = "") -> Iterator[None]:
    """Within, turn errors of these ``kinds`` into a FlagError, with ``where`` as a prefix."""
    try:
        yield
    except kinds as error:
        raise FlagError([f"{where}{fault}" for fault in faults_in(error)]) from error


def check_flags(line: CommandLine, options: PulseOptions) -> list[str]:
    """Faults of the flags and their combinations, except layout, data and backbone.

    Flags with unreadable values are not reported again.
    """
    args = line.args
    found = [
        *check_constraints(line),
        *_check_processes(args),
        *_check_training(args),
        *flag_faults(options, PREFIX),
        *_check_folders(args),
        *_check_verifying(args, options),
        *_check_keeping(args, options),
        *_check_quantization(options),
        *_check_pairs(args, options),
        *fsdp_faults(args, options.fully_sharded),
        *context_faults(args, options),
        *_check_token_slices(args, options),
    ]
    return [*line.faults, *_without_unread(line, found)]


def check_layout(line: CommandLine, options: PulseOptions) -> list[str]:
    """Faults that make planning impossible, whatever the backbone."""
    return _without_unread(line, [*_check_sizes(line.args), *_check_plan_files(options)])


def _without_unread(line: CommandLine, faults: list[str]) -> list[str]:
    """``faults`` except those of unreadable flags, which have their defaults."""
    names = [re.compile(rf"{re.escape(name)}(?![\w-])") for name in line.unread]
    return [fault for fault in faults if not any(name.search(fault) for name in names)]


def _check_sizes(args: argparse.Namespace) -> Iterator[str]:
    pipeline, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if pipeline < 1 or tensor < 1:
        yield "--pipeline-model-parallel-size and --tensor-model-parallel-size must be positive"
        return
    context = args.context_parallel_size
    if context < 1:
        yield "--context-parallel-size must be positive"
        return
    if args.world_size % (pipeline * tensor * context):
        of_context = f" x --context-parallel-size {context}" if context > 1 else ""
        yield (
            f"{args.world_size} ranks cannot be divided into --pipeline-model-parallel-size "
            f"{pipeline} x --tensor-model-parallel-size {tensor}{of_context}. Start a multiple of "
            f"{pipeline * tensor * context} ranks (--nproc-per-node)"
        )
        return
    replicas = args.world_size // (pipeline * tensor * context)
    micro = args.micro_batch_size
    if micro is None or micro < 1:
        yield "--micro-batch-size must be given and positive"
        return
    bucket = args.pulse_bucket_batch
    if bucket is not None and bucket > 0:
        name = flag_name("pulse_bucket_batch")
        if bucket % micro:
            yield f"{name} {bucket} is not a multiple of --micro-batch-size {micro}"
        for other in ("global_batch_size", "eval_global_batch_size"):
            if (size := getattr(args, other)) is not None and size % bucket:
                yield f"{name} {bucket} does not divide {flag_name(other)} {size}"
        if (size := args.eval_micro_batch_size) is not None and bucket % size:
            yield f"{name} {bucket} is not a multiple of --eval-micro-batch-size {size}"
    sizes = [("global_batch_size", args.global_batch_size, micro)]
    if args.eval_global_batch_size is not None or args.eval_micro_batch_size is not None:
        size = args.eval_global_batch_size or args.global_batch_size or micro * replicas
        sizes.append(("eval_global_batch_size", size, args.eval_micro_batch_size or micro))
    for name, size, part in sizes:
        if size is not None and (size < 1 or size % (part * replicas)):
            unit = part * replicas
            near = max(size // unit * unit, unit)
            yield (
                f"{flag_name(name)} {size} is not a positive multiple of --micro-batch-size {part} "
                f"x {replicas} data-parallel replicas = {unit}. Give {near} or {near + unit}"
            )


_MOST_WORKERS = 32
"""Limit per core of a machine; more workers only take memory."""


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _check_processes(args: argparse.Namespace) -> Iterator[str]:
    if args.distributed_backend == "gloo" and torch.cuda.is_available():
        yield (
            "--distributed-backend gloo: GPUs are visible, so messages use NCCL. Leave it out, or "
            "train on CPUs with CUDA_VISIBLE_DEVICES= (empty)"
        )
    if args.distributed_backend == "nccl" and not torch.cuda.is_available():
        yield "--distributed-backend nccl: torch finds no GPU here; leave it out"
    if args.num_workers is not None and args.num_workers > (most := _MOST_WORKERS * _cores()):
        yield (
            f"--num-workers {args.num_workers} per rank exceed the {_cores()} cores of this "
            f"machine. Give at most {most}"
        )


def _check_training(args: argparse.Namespace) -> Iterator[str]:
    if args.train_iters is None and args.train_samples is None:
        yield "--train-iters (or --train-samples) must be given"
    elif (args.train_iters or args.train_samples or 0) < 1 and not args.skip_train:
        yield "--train-iters must be positive"
    if args.lr is None or args.lr <= 0:
        yield "--lr must be given and positive"
    else:
        yield from ABOVE_ZERO.faults("--lr", args.lr)


def _check_verifying(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    if not options.sdc_check_interval:
        return
    if args.world_size == 1:
        yield "--pulse-sdc-check-interval needs a second rank for the recomputation"
    if args.tensor_model_parallel_size > 1:
        yield (
            "--pulse-sdc-check-interval cannot be used with --tensor-model-parallel-size: sums "
            "over ranks may differ in the last bit on other ranks"
        )
    if args.distributed_backend == "nccl" and not args.deterministic_mode:
        yield (
            "--pulse-sdc-check-interval on GPUs needs --deterministic-mode: other kernels do not "
            "reproduce the same bits"
        )


def _check_keeping(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    if args.save is None:
        given = {"--pulse-keep-last": options.keep_last, "--pulse-keep-best": options.keep_best}
        yield from (f"{flag} was given without --save" for flag, value in given.items() if value)
        return
    if not options.keep_best:
        return
    if not args.eval_interval or not args.eval_iters:
        yield (
            "--pulse-keep-best compares validation losses, and --eval-interval or --eval-iters is "
            "0: give both"
        )
    elif args.save_interval and args.save_interval % args.eval_interval:
        yield (
            f"--pulse-keep-best: steps of --save-interval {args.save_interval} have no validation "
            f"loss. Make it a multiple of --eval-interval, {args.eval_interval}"
        )


def _check_quantization(options: PulseOptions) -> Iterator[str]:
    kind = options.adapter.quantization
    if kind is None or options.adapter.adapter is None:
        return
    flag, backbone = f"--pulse-quantization {kind}", options.backbone or ""
    if options.train:
        yield f"{flag}: quantised weights cannot be trained. Leave --pulse-train out"
    if None in weights_folders(backbone).values():
        lacking = f", and {backbone} has none" if backbone else ""
        yield (
            f"{flag} quantises the weights of a diffusers folder{lacking}. Give --pulse-module "
            "diffusers:FOLDER; in a recipe, model.weights alone"
        )


def _check_pairs(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    if not options.training_loss.is_preference:
        return
    for name in ("micro_batch_size", "eval_micro_batch_size", "pulse_bucket_batch"):
        if (size := getattr(args, name)) is not None and size % 2:
            yield (
                f"{flag_name(name)} {size} is odd, and --pulse-loss dpo counts the samples of "
                "pairs: give an even number"
            )


def _check_token_slices(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    if options.token_slices < 2:
        return
    hand_written = not is_module(options.backbone or "")
    excluded = {
        "--transformer-impl transformer_engine": (
            hand_written and args.transformer_impl == "transformer_engine",
            "keeps state in linear layers, which slices would update several times",
        ),
        "--pulse-adapter-dropout": (
            hand_written and bool(options.adapter.adapter_dropout),
            "draws a mask for whole sequences in hand-written layers: give 0",
        ),
    }
    yield from excluded_faults(excluded, f"--pulse-token-slices {options.token_slices}")


def _check_plan_files(options: PulseOptions) -> Iterator[str]:
    if options.schedule.endswith(".csv") and not Path(options.schedule).is_file():
        yield f"--pulse-schedule {options.schedule}: there is no such file"
    profile = options.profile
    if profile is not None and profile not in PRESETS and not Path(profile).is_file():
        yield f"--pulse-profile {profile} is neither a file nor one of {', '.join(PRESETS)}"


_FOLDERS = (
    "save",
    "tensorboard_dir",
    "non_persistent_global_ckpt_dir",
    "wandb_save_dir",
    "config_logger_dir",
    "dump_param_to_param_group_map",
)


def _check_folders(args: argparse.Namespace) -> Iterator[str]:
    for name in (*_FOLDERS, *pulse_flags(FlagMark.FOLDER)):
        folder = getattr(args, name)
        if folder is not None and (fault := unwritable(Path(folder))):
            yield f"{flag_name(name)} {folder}: {fault}"


def check_world(args: argparse.Namespace, plan_digest: str) -> None:
    """Raise FlagError if any rank was started with other flags or plans otherwise (collective)."""
    import torch.distributed as dist

    own = {k: repr(v) for k, v in vars(args).items() if k not in _PER_RANK}
    gathered: list[tuple[dict[str, str], str]] = [({}, "") for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, (own, plan_digest))
    flags = [rank_flags for rank_flags, _ in gathered]
    faults = []
    for rank, theirs in enumerate(flags):
        for name in sorted({**flags[0], **theirs}):
            if theirs.get(name) != flags[0].get(name):
                faults.append(
                    f"rank {rank} was started with {flag_name(name)} {theirs.get(name)}, rank 0 "
                    f"with {flags[0].get(name)}. Start every rank with the same flags"
                )
    if not faults:
        faults = [
            f"rank {rank} makes another plan than rank 0 with the same flags (another GPU or "
            "torch version, or another file of the same name?). Use one plan: --pulse-plan FILE "
            "or --pulse-auto"
            for rank, (_, digest) in enumerate(gathered)
            if digest != gathered[0][1]
        ]
    if faults:
        raise FlagError(faults)


# Identity of a rank, and values that follow from the plan, which is compared as a whole.
_PER_RANK = {"rank", "local_rank", "num_layers", "num_virtual_stages_per_pipeline_rank"}
