"""``pretrain_diffusion``: Megatron's ``pretrain`` with a plan, an executor and diffusion data."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.training.determinism import apply_determinism_env

from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.record import to_saved
from megatron_pulse.integration.checkpoint.folders import CheckpointError, newest_named
from megatron_pulse.integration.checkpoint.lock import FolderInUse, FolderLock
from megatron_pulse.integration.checkpoint.resume import NewRun, describe
from megatron_pulse.integration.checkpoint.start import enter, finished, lock_for_job, whole_start
from megatron_pulse.integration.flags.arguments import PulseOptions
from megatron_pulse.integration.flags.checks import FlagError, check_world, refusing
from megatron_pulse.integration.flags.together import CONNECTIONS
from megatron_pulse.integration.loop.ending import (
    end,
    leave,
    parser_speaks_once,
    pass_over_full_disks,
    stop_at_once,
    watch_over,
)
from megatron_pulse.integration.loop.log import quiet
from megatron_pulse.integration.planning.planning import by_rank_0
from megatron_pulse.integration.preparing import (
    prepare,
    read_command_line,
    tune_here,
    with_schedules,
)
from megatron_pulse.integration.training import train
from megatron_pulse.profile.cautions import plan_thread_caution
from megatron_pulse.profile.measuring.machine import compute_as_a_rank, num_threads
from megatron_pulse.profile.memory_format import format_caution
from megatron_pulse.runtime.job import Job
from megatron_pulse.runtime.stopping import STOP
from megatron_pulse.runtime.watch.place import HERE
from model_specs import describe_weights


def main() -> None:
    """Train; ends the process, with one clear message of one rank if anything fails."""
    begin, job = time.time(), Job()
    args: argparse.Namespace | None = None
    lock: FolderLock | None = None
    found: str | None = None
    threading.excepthook = pass_over_full_disks
    leave_connections(_tensor_parallel(sys.argv))
    STOP.listen()
    STOP.leave_at_once(partial(stop_at_once, job))
    try:
        with parser_speaks_once(job):
            line, options, given = read_command_line()
        args = line.args
        if not torch.cuda.is_available():
            compute_as_a_rank()  # also where torchrun leaves a single rank all cores
        if not options.verbose and args.logging_level is None:
            logging.getLogger("megatron_pulse").setLevel(logging.WARNING)
        if args.deterministic_mode:  # read where NCCL and cuBLAS begin
            with refusing(AssertionError, where="--deterministic-mode: "):
                apply_determinism_env(os.environ)
        job.watch = watch_over(job, args, options)
        found = newest_named(args.save)
        if options.auto:
            lock = _connect(args, options, job, found)
            given, options = tune_here(line, options)
        plan, data, start = prepare(line, options, given)
        if said := finished(start, args):
            if args.rank == 0:
                print(said, flush=True)
            raise SystemExit(0)
        if not options.auto:
            lock = _connect(args, options, job, found)
        check_world(args, plan.digest())
        # One rank reads the encoders' files; flags that are saved are the same on all.
        with HERE.during("reading the files of encoders", patient=True):
            args.pulse_encoded_by = by_rank_0(lambda: data.encoded_by)
        if start is not None:
            with refusing(CheckpointError, where=f"{start.given}: "):
                start = whole_start(start, args, holds=lock is not None)
            enter(args, start)
        with HERE.during("looking at the data", patient=True):
            records = by_rank_0(lambda: data.record(whole=True))
        args.pulse_data_record = to_saved(records)
        if start is not None and args.rank == 0:
            begun = NewRun(args, options, args.pulse_record, args.pulse_encoded_by, records)
            print(describe(start, begun), flush=True)
        elif args.rank == 0 and (weights := describe_weights(options.backbone or "")):
            print(weights, flush=True)
        with HERE.during("looking at pictures", patient=True), refusing(DataError):
            looked_at = by_rank_0(data.survey)
        for told in looked_at if args.rank == 0 else ():
            print(told, flush=True)
        for caution in data.cautions if args.rank == 0 else ():
            print(f"warning: {caution}", flush=True)
        if given is not None and args.rank == 0:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if said := plan_thread_caution(given.provenance, num_threads(device)):
                print(f"warning: {said}", flush=True)  # what was measured, who measured has said
            if said := format_caution(given.backbone, plan.backbone.record, "the plan"):
                print(f"warning: {said}", flush=True)
        plan = with_schedules(plan, args, options)
        board = job.board()
        assert board is not None  # the ranks have met
        with quiet(args):
            train(args, options, plan, data, board, start, begin)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            leave(error, job, args)
    finally:
        if lock is not None:
            lock.release()
    end(job)  # trained, helped, or stopped as all ranks agreed


def _tensor_parallel(argv: Sequence[str]) -> int | None:
    """What flags say of it, before anything has looked for GPUs; None where a plan will."""
    words = [word for given in argv for word in given.split("=", 1)]
    if "--pulse-plan" in words or "--pulse-auto" in words:
        return None
    name = "--tensor-model-parallel-size"
    value = words[words.index(name) + 1] if name in words[:-1] else "1"
    return int(value) if value.isdigit() else 1


def leave_connections(tensor_parallel: int | None) -> None:
    """Say how many hardware queues CUDA has, before it starts, unless the environment does, or
    nothing is known yet.

    Megatron's tensor parallelism wants one, so that what is launched first starts first; channels
    between pipeline devices want one each, or wait for each other.
    """
    if tensor_parallel is not None:
        os.environ.setdefault(CONNECTIONS, "1" if tensor_parallel > 1 else "32")


def _connect(
    args: argparse.Namespace, options: PulseOptions, job: Job, found: str | None
) -> FolderLock | None:
    """Join the job's process group before Megatron does, so that flags can be compared first.

    From then on ``--save`` is held against other runs; ``found`` is what was seen in it.
    """
    leave_connections(args.tensor_model_parallel_size)
    backend = args.distributed_backend
    # What process groups bound is bounded by the watch before, which says who stands still.
    minutes = math.ceil(options.backstop_s / 60)
    args.distributed_timeout_minutes = max(args.distributed_timeout_minutes, minutes)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    device_id = None
    if torch.cuda.is_available():
        local_rank, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= number:
            raise FlagError(
                [f"local rank {local_rank} has no GPU: {number} are visible; start as many ranks"]
            )
        torch.cuda.set_device(local_rank)
        device_id = torch.device("cuda", local_rank)
    dist.init_process_group(
        backend,
        store=job.assemble(options.timeout_s),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=device_id if backend == "nccl" else None,
    )
    with refusing(FolderInUse):
        return lock_for_job(args.save, found)
