"""``pretrain_diffusion``: Megatron's ``pretrain`` with a plan, an executor and diffusion data."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import validate_args
from megatron.training.global_vars import set_global_variables

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import check_dataset
from megatron_pulse.diffusion.choice import ProcessChoice
from megatron_pulse.diffusion.chosen import chosen_process
from megatron_pulse.faults import faults_in, told
from megatron_pulse.flag_fields import flag_faults
from megatron_pulse.integration.checkpoint.checkpoints import newest
from megatron_pulse.integration.checkpoint.loading import wrap_load_checkpoint
from megatron_pulse.integration.checkpoint.lock import FolderInUse, FolderLock
from megatron_pulse.integration.checkpoint.masters import with_fp32_weights, with_masters
from megatron_pulse.integration.checkpoint.resume import Wanted, describe, faults_of, process_of
from megatron_pulse.integration.checkpoint.saving import patch_saving, wrap_save
from megatron_pulse.integration.checkpoint.start import (
    Start,
    enter,
    find_start,
    finished,
    lock_for_job,
    no_step_elsewhere,
)
from megatron_pulse.integration.data import DiffusionData, can_drop
from megatron_pulse.integration.flags.arguments import (
    PREFIX,
    PulseOptions,
    pulse_options,
    set_model_arguments,
)
from megatron_pulse.integration.flags.checks import (
    FlagError,
    check_flags,
    check_layout,
    check_world,
)
from megatron_pulse.integration.flags.parse import CommandLine, parse
from megatron_pulse.integration.flags.plan_flags import contradictions, decided_by, obey
from megatron_pulse.integration.flags.together import check_megatron
from megatron_pulse.integration.loop.ending import (
    end,
    leave,
    parser_speaks_once,
    pass_over_full_disks,
    stop_at_once,
)
from megatron_pulse.integration.loop.grad_norm import use_layout_independent_grad_norm
from megatron_pulse.integration.loop.log import quiet
from megatron_pulse.integration.loop.schedule import PulseSchedule, TraceOptions
from megatron_pulse.integration.loop.step import wrap_train_step
from megatron_pulse.integration.loop.stop_hooks import cut_short, stopping_hooks
from megatron_pulse.integration.loop.throughput import ThroughputLog, describe_work
from megatron_pulse.integration.megatron.compat import patch_megatron
from megatron_pulse.integration.megatron.model import StageFloat16Module, make_model_provider
from megatron_pulse.integration.planning.auto import plan_here
from megatron_pulse.integration.planning.planning import (
    compute_dtype,
    global_batch_size,
    num_microbatches,
    plan_run,
    share_schedules,
)
from megatron_pulse.planner.plan_file.plan_file import PlanFile, load_plan
from megatron_pulse.planner.step.plan import Plan
from megatron_pulse.profile.cautions import plan_cautions
from megatron_pulse.profile.measuring.machine import num_threads
from megatron_pulse.runtime.failures import FailureBoard, PulseError
from megatron_pulse.runtime.job import Job
from megatron_pulse.runtime.stopping import STOP
from model_specs import continue_model, load_backbone


def main() -> None:
    """Train; ends the process, with one clear message of one rank if anything fails."""
    begin, job = time.time(), Job()
    args: argparse.Namespace | None = None
    lock: FolderLock | None = None
    threading.excepthook = pass_over_full_disks
    STOP.listen()
    STOP.leave_at_once(partial(stop_at_once, job))
    try:
        with parser_speaks_once(job):
            line, options, given = _parse()
        args = line.args
        found = newest(args.save)
        if options.auto:
            _connect(args, job)
            lock = _lock(args, found)
            given, options = _tune(args, options)
        plan, data, start = _prepare(line, options, given)
        if said := finished(start, args):
            if args.rank == 0:
                print(said, flush=True)
            raise SystemExit(0)
        if not options.auto:
            _connect(args, job)
            lock = _lock(args, found)
        check_world(args, plan.digest())
        if start is not None and args.rank == 0:
            print(describe(start, Wanted(args, options, args.pulse_record)), flush=True)
        if given is not None and args.rank == 0:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            for caution in plan_cautions(given.provenance, num_threads(device)):
                print(f"warning: {caution}", flush=True)
        plan = _share_schedules(plan, args, options)
        board = job.board()
        assert board is not None  # the ranks have met
        with quiet(args):
            _train(args, options, plan, data, board, start, begin)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            leave(error, job, args)
    finally:
        if lock is not None:
            lock.release()
    end(job)  # trained, helped, or stopped as all ranks agreed


def _parse() -> tuple[CommandLine, PulseOptions, PlanFile | None]:
    """The flags, and the plan that they name if they agree with it; faults are in the line."""
    line = parse()
    args = line.args
    faults = list(line.faults)
    if not args.pulse_backbone and not args.pulse_plan and not args.pulse_auto:
        if not {"--pulse-backbone", "--pulse-plan"} & set(line.unread):
            faults.append(
                "--pulse-backbone must name a backbone ('pulse backbones' lists them), or "
                "--pulse-plan a plan of one"
            )
    if args.save is not None and args.save_interval is None:
        args.save_interval = 1000  # Megatron has no default and stops without one
    given = None
    try:
        options = pulse_options(args)
    except ValueError as error:
        faults += faults_in(error)
        args.pulse_option = [text for text in args.pulse_option if "=" in text]
        options = pulse_options(args)
    if options.plan is not None:
        try:
            given = load_plan(options.plan)
        except ValueError as error:
            faults += faults_in(error)
    if given is not None:
        contrary = list(contradictions(given, args, options))
        options = obey(given, args, options)
        if contrary:
            faults, given = [*faults, *contrary], None
    line = replace(line, faults=tuple(faults))
    if options.auto and (faults := [*check_flags(line, options), *_check_auto(args, options)]):
        raise FlagError(faults)  # before anything is measured
    return line, options, given


def _check_auto(args: argparse.Namespace, options: PulseOptions) -> Iterator[str]:
    if options.plan is not None:
        yield "--pulse-auto makes a plan, --pulse-plan brings one: leave one out"
    if not args.pulse_backbone:
        yield "--pulse-auto needs --pulse-backbone"
    elif options.plan is None:
        try:
            load_backbone(options.backbone, options.options)
        except ValueError as error:
            yield str(error)
    yield from decided_by("--pulse-auto", options)
    if args.global_batch_size is None:
        yield "--pulse-auto needs --global-batch-size, which it divides"
    if args.pulse_data is None:
        yield "--pulse-auto needs --pulse-data, what to train on"
    else:
        yield from check_dataset(args.pulse_data)
    try:
        process_of(find_start(args), options)
    except ValueError as error:
        yield str(error)


def _tune(args: argparse.Namespace, options: PulseOptions) -> tuple[PlanFile, PulseOptions]:
    """The plan of ``--pulse-auto``, and the options that follow from it (collective)."""
    try:
        given = plan_here(args, options)
    except ValueError as error:
        raise FlagError(faults_in(error)) from error
    if faults := list(contradictions(given, args, options)):
        raise FlagError(faults)
    return given, obey(given, args, options)


def _share_schedules(plan: Plan, args: argparse.Namespace, options: PulseOptions) -> Plan:
    try:
        plan = share_schedules(plan, args, options)
        plan.step(num_microbatches(args))
    except ValueError as error:
        raise FlagError([str(error)]) from error
    return plan


def _prepare(
    line: CommandLine, options: PulseOptions, given: PlanFile | None
) -> tuple[Plan, DiffusionData, Start | None]:
    """Plan, data and what to begin with; raises FlagError with every fault found."""
    args = line.args
    faults = check_flags(line, options)
    can_plan = not line.unread and not any(flag_faults(options, PREFIX))
    if options.plan is not None and given is None:
        can_plan = False  # what the plan says of sizes is not known, or contradicted
    elif layout := check_layout(line, options):
        can_plan, faults = False, [*faults, *layout]
    if can_plan and args.global_batch_size is None:
        args.global_batch_size = global_batch_size(args)
    backbone = plan = data = start = None
    process = chosen_process(ProcessChoice())
    try:
        start = find_start(args)
        process = process_of(start, options)
    except ValueError as error:  # the other faults are found all the same
        faults += faults_in(error)
    try:
        there = {} if start is None else start.saved.record
        if options.backbone:
            backbone = continue_model(there, options.backbone, options.options)
        if backbone is not None and args.sequence_parallel:
            backbone = _divide(backbone, args.tensor_model_parallel_size)
    except ValueError as error:
        faults += faults_in(error)
        can_plan = False
    if backbone is None:
        faults += check_dataset(options.data)
    else:
        args.pulse_record = backbone.saved_record
        args.pulse_process = process.to_dict()
        if start is not None:
            faults += faults_of(start, Wanted(args, options, backbone.record))
        if options.class_dropout and not can_drop(backbone):
            faults.append(
                f"--pulse-class-dropout {options.class_dropout:g}: {backbone.name} has no null "
                "class that a dropped sample could get: give 0, or import with --null-class"
            )
        try:
            data = DiffusionData(options, backbone, process, args.seed)
        except (ValueError, OSError) as error:
            faults += faults_in(error)
        if can_plan:
            try:
                plan = plan_run(args, options, backbone, given)
            except ValueError as error:
                faults.append(told("no plan can be made", faults_in(error)))
    if faults := faults or no_step_elsewhere(start, args):
        raise FlagError(faults)
    assert plan is not None and data is not None
    enter(args, start)
    set_model_arguments(args, plan.placement)
    if args.recompute_granularity == "full":
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    if faults := check_megatron(args):
        raise FlagError(faults)
    return plan, data, start


def _lock(args: argparse.Namespace, found: str | None) -> FolderLock | None:
    """Hold ``--save`` against other runs while this one lives (collective)."""
    try:
        return lock_for_job(args.save, found)
    except FolderInUse as error:
        raise FlagError([str(error)]) from error


def _divide(backbone: Backbone, tensor_parallel: int) -> Backbone:
    """``backbone`` under sequence parallelism; raises ValueError where it cannot be."""
    divided = backbone.divide_sequences(tensor_parallel)
    if tensor_parallel > 1 and divided.layers == backbone.layers:
        raise ValueError(
            f"--sequence-parallel: {backbone.name} has no token sequence between its layers; "
            "leave it out"
        )
    return divided


def _connect(args: argparse.Namespace, job: Job) -> None:
    """Join the job's process group before Megatron does, so that flags can be compared first."""
    backend = args.distributed_backend
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    device_id = None
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        device_id = torch.device("cuda", local_rank)
    dist.init_process_group(
        backend,
        store=job.assemble(timeout.total_seconds()),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
        device_id=device_id if backend == "nccl" else None,
    )


def _train(
    args: argparse.Namespace,
    options: PulseOptions,
    plan: Plan,
    data: DiffusionData,
    board: FailureBoard,
    start: Start | None,
    begin: float,
) -> None:
    stopping = stopping_hooks(args)
    validate_args(args, {})
    set_global_variables(args, build_tokenizer=False)
    patch_megatron()
    patch_saving()
    # It compares flags that follow the layout here; faults_of compares the backbones.
    checkpointing.check_checkpoint_args = lambda *a, **k: None
    checkpointing.generate_state_dict = with_fp32_weights(checkpointing.generate_state_dict)
    use_layout_independent_grad_norm()
    tracing = None
    if options.trace is not None:
        first, last = options.trace_steps
        tracing = TraceOptions(Path(options.trace), range(first, last + 1))
    schedule = PulseSchedule(plan, data.loss, board, options.timeout_s, tracing=tracing)
    whole = load_backbone(plan.backbone.record["name"], plan.backbone.record["options"])
    idle = plan.idle_share(num_microbatches(args))
    work = describe_work(args, whole, compute_dtype(args), idle)
    throughput = ThroughputLog(work, lambda: schedule.step_time, lambda: data.num_corrupt)
    args.log_throughput = False  # Megatron's line; ours is always there
    if args.rank == 0:
        print(plan.describe())
        print(f"process: {data.description}", flush=True)
    training.set_startup_timestamps(program_start=begin, main_entry=time.time())
    with _hooks(
        get_forward_backward_func=lambda *a, **k: cut_short(schedule),
        Float16Module=StageFloat16Module,
        num_floating_point_operations=lambda *a, **k: 0,
        report_theoretical_memory=lambda *a, **k: None,  # it knows language models only
        train_step=throughput.timed(wrap_train_step(training.train_step, args, options), args),
        training_log=throughput.logged(training.training_log, args),
        get_megatron_optimizer=with_masters(training.get_megatron_optimizer, options.ema_decay),
        save_checkpoint=wrap_save(training.save_checkpoint),
        load_checkpoint=wrap_load_checkpoint(training.load_checkpoint, args, start),
        **stopping,
    ):
        training.pretrain(
            pretrain_cfg_container_from_args(args, None),
            _make_dataset_provider(args, plan, data),
            ModelType.encoder_or_decoder,
            _forward_step,
            model_provider=make_model_provider(plan, args),
            get_embedding_ranks=lambda ranks, *rest: [ranks[0]],
            get_position_embedding_ranks=lambda ranks, *rest: [ranks[0]],
        )
    schedule.close()


def _forward_step(*args: Any) -> None:
    """Megatron wants a forward step; the executor runs the stages itself."""
    raise PulseError("Megatron called forward_step: its own schedule is running, not the plan's")


@contextmanager
def _hooks(**replacements: Any) -> Iterator[None]:
    """Replace names that Megatron's training loop looks up in its own module."""
    originals = {name: getattr(training, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(training, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(training, name, value)


def _make_dataset_provider(
    args: argparse.Namespace, plan: Plan, data: DiffusionData
) -> Callable[..., tuple[Any, Any, Any]]:
    def provide(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        return (*data.iterators(args, plan.placement), None)

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide
