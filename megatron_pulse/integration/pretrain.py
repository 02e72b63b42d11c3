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
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.training.determinism import apply_determinism_env

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.data_record import to_saved
from megatron_pulse.data.dataset import DataError
from megatron_pulse.dataclass_flags import RECIPE, STARTING_RECIPE
from megatron_pulse.encoders.text_recipe import text_fields
from megatron_pulse.integration.checkpoint.folders import CheckpointError, newest_named
from megatron_pulse.integration.checkpoint.lock import FolderInUse, FolderLock
from megatron_pulse.integration.checkpoint.resume_checks import NewRun, describe
from megatron_pulse.integration.checkpoint.starting_point import (
    finished,
    lock_for_job,
    set_load_flags,
    verified_start,
)
from megatron_pulse.integration.flags.flag_constraints import CONNECTIONS
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.flags.startup_checks import FlagError, check_world, refusing
from megatron_pulse.integration.loop.log_filter import short_log
from megatron_pulse.integration.loop.sample_pictures import lacks_pictures
from megatron_pulse.integration.loop.shutdown import (
    fail,
    finish,
    ignore_full_disk_in_thread,
    obey_signal_at_once,
    print_parser_output_once,
    start_watchdog,
)
from megatron_pulse.integration.planning.device_check import check_devices
from megatron_pulse.integration.setup import (
    plan_of_auto,
    prepare,
    read_command_line,
    with_own_share,
    with_schedules,
)
from megatron_pulse.integration.training import train
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.profile.channels_last import format_caution
from megatron_pulse.profile.measurement.machine import compute_as_a_rank, num_threads
from megatron_pulse.profile.warnings import plan_thread_caution
from megatron_pulse.runtime.collectives import broadcast_from_rank_0
from megatron_pulse.runtime.rendezvous import Job
from megatron_pulse.runtime.stop_signals import STOP
from megatron_pulse.runtime.tensor_settings import compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS
from model_specs import describe_weights, published_form


def main() -> None:
    """Train, and end the process; if anything fails, one rank prints one clear message."""
    begin, job = time.time(), Job()
    args: argparse.Namespace | None = None
    lock: FolderLock | None = None
    found: str | None = None
    threading.excepthook = ignore_full_disk_in_thread
    set_cuda_connections(_tensor_parallel(sys.argv))
    STOP.listen()
    STOP.exit_on_signal(partial(obey_signal_at_once, job))
    try:
        with print_parser_output_once(job):
            line, options, given = read_command_line()
        args = line.args
        if not torch.cuda.is_available():
            compute_as_a_rank()  # also if torchrun leaves a single rank all cores
        if not options.verbose and args.logging_level is None:
            logging.getLogger("megatron_pulse").setLevel(logging.WARNING)
        if args.deterministic_mode:  # read when NCCL and cuBLAS start
            with refusing(AssertionError, where="--deterministic-mode: "):
                apply_determinism_env(os.environ)
        if given is not None:
            _take_device_order(given, job, args)
        job.watch = start_watchdog(job, args, options)
        found = newest_named(args.save)
        if options.auto:
            lock = _connect(args, options, job, found)
            given, options = plan_of_auto(line, options)
            if given.device_order is not None:
                lock = _reconnect(given, args, options, job, lock)
        plan, data, start = prepare(line, options, given)
        starting = Path(args.save or ".").parent / STARTING_RECIPE
        if said := finished(start, args):
            if args.rank == 0:
                print(said, flush=True)
                starting.unlink(missing_ok=True)
            if options.samples.sample_every is None:
                raise SystemExit(0)
        if not options.auto:
            lock = _connect(args, options, job, found)
        if given is not None:
            check_devices(given, job)
        if start is not None and said:
            step = start.saved.iteration
            if not broadcast_from_rank_0(lambda: lacks_pictures(args, options.samples, step)):
                raise SystemExit(0)
        check_world(args, plan.digest())
        # One rank reads the encoders' files, since saved flags are the same on all.
        with PROGRESS.during("loading encoders", patient=True):
            args.pulse_encoded_by = broadcast_from_rank_0(lambda: data.encoded_by)
        if start is not None:
            with refusing(CheckpointError, where=f"{start.given}: "):
                start = verified_start(start, args, holds=lock is not None)
            said = said and finished(start, args)  # an older step, if the last one is damaged
            set_load_flags(args, start)
        with PROGRESS.during("reading the data", patient=True):
            records = broadcast_from_rank_0(lambda: data.record(whole=True))
        args.pulse_data_record = to_saved(records)
        if start is not None and not said and args.rank == 0:
            begun = NewRun(args, options, args.pulse_record, args.pulse_encoded_by, records)
            print(describe(start, begun), flush=True)
        elif not said and args.rank == 0 and (weights := describe_weights(options.backbone or "")):
            print(weights, flush=True)
        with PROGRESS.during("reading picture headers", patient=True), refusing(DataError):
            looked_at = broadcast_from_rank_0(data.survey)
        for told in looked_at if args.rank == 0 else ():
            print(told, flush=True)
        for caution in data.cautions if args.rank == 0 else ():
            print(f"warning: {caution}", flush=True)
        if given is not None and args.rank == 0:
            threads = 0 if given.mixed else num_threads(compute_device())
            if said := plan_thread_caution(given.provenance, threads):
                # Measuring in this run has given its own warning.
                print(f"warning: {said}", flush=True)
            if said := format_caution(given.backbone, plan.backbone.record, "the plan"):
                print(f"warning: {said}", flush=True)
        plan = with_own_share(with_schedules(plan, args, options), args)
        board = job.board()
        assert board is not None  # the ranks have met
        if args.rank == 0 and starting.is_file():
            starting.replace(starting.with_name(RECIPE))
        with short_log(args):
            train(args, options, plan, data, board, start, begin, only_pictures=bool(said))
        if args.rank == 0 and newest_named(args.save) is not None:
            print(next_commands(Path(args.save), plan.backbone, args.pulse_encoders), flush=True)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            if lock is not None and STOP.is_leaving:  # saved and agreed; another rank left first
                lock.release()
            fail(error, job, args)
    finally:
        if lock is not None:
            lock.release()
    finish(job)  # trained, helped, or stopped as all ranks agreed


def next_commands(saved: Path, backbone: Backbone, encoders: str | None) -> str:
    """Lines on a run's weights and recipe, and the commands that use them."""
    recipe = saved.parent / RECIPE
    lines = [f"weights: {saved}"]
    lines += [f"recipe:  {recipe}"] if recipe.is_file() else []
    command = f"pulse sample --load {saved}"
    if text_fields(backbone.batch_fields):
        command += f' --prompt "a red bird" --encoders {encoders or "FOLDER"}'
    name = "samples.gif" if len(backbone.sample_spec.shape) == 4 else "samples.png"
    lines.append(f"sample:  {command} -o {name}")
    if not backbone.parts and (form := published_form(backbone)) is not None:
        suffix = "" if form.library == "diffusers" else ".safetensors"
        lines.append(f"export:  pulse export --load {saved} --to exported{suffix}")
    return "\n".join(lines)


def _tensor_parallel(argv: Sequence[str]) -> int | None:
    """Tensor-parallel size by the flags, before GPUs are looked for; None if a plan decides."""
    words = [word for given in argv for word in given.split("=", 1)]
    if "--pulse-plan" in words or "--pulse-auto" in words:
        return None
    name = "--tensor-model-parallel-size"
    value = words[words.index(name) + 1] if name in words[:-1] else "1"
    return int(value) if value.isdigit() else 1


def set_cuda_connections(tensor_parallel: int | None) -> None:
    """Set CUDA's number of hardware queues before CUDA starts, unless the environment does.

    Unknown sizes set nothing. Megatron's tensor parallelism needs one queue, so that kernels start
    in the order of their launches. Channels between pipeline devices need one each, or wait for
    each other.
    """
    if tensor_parallel is not None:
        os.environ.setdefault(CONNECTIONS, "1" if tensor_parallel > 1 else "32")


def _take_device_order(given: PlanFile, job: Job, args: argparse.Namespace) -> None:
    """Give the ranks of ``job`` the numbers that place the plan's ranks on its devices."""
    if given.device_order is None:
        return
    with refusing(ValueError, where="the plan: "):
        job.reorder(given.device_order)
    args.rank = job.rank


def _reconnect(
    given: PlanFile,
    args: argparse.Namespace,
    options: PulseOptions,
    job: Job,
    lock: FolderLock | None,
) -> FolderLock | None:
    """Form the process group again in the plan's order of devices; rank 0 locks ``--save``."""
    found = newest_named(args.save)
    if lock is not None:
        lock.release()
    _take_device_order(given, job, args)
    dist.destroy_process_group()
    return _connect(args, options, job, found)


def _connect(
    args: argparse.Namespace, options: PulseOptions, job: Job, found: str | None
) -> FolderLock | None:
    """Join the job's process group before Megatron does, so that flags can be compared first.

    From then on ``--save`` is locked against other runs; ``found`` is the checkpoint seen in it
    before.
    """
    set_cuda_connections(args.tensor_model_parallel_size)
    backend = args.distributed_backend
    # The watchdog bounds waits earlier than the process groups, and names the rank that hangs.
    minutes = math.ceil(options.backstop_timeout_s / 60)
    args.distributed_timeout_minutes = max(args.distributed_timeout_minutes, minutes)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    device_id = None
    if torch.cuda.is_available():
        local_rank, number = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= number:
            raise FlagError(
                [
                    (
                        f"local rank {local_rank} has no GPU: {number} are visible. Start as many "
                        "ranks per node as GPUs"
                    )
                ]
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
