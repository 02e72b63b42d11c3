"""``pretrain_diffusion``: Megatron's ``pretrain`` with a plan, an executor and diffusion data."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.arguments import (
    PulseOptions,
    add_pulse_arguments,
    pulse_options,
    set_model_arguments,
)
from megatron_pulse.integration.auto import plan_here
from megatron_pulse.integration.checkpoints import check_checkpoint
from megatron_pulse.integration.checks import FlagError, check_flags, check_world
from megatron_pulse.integration.compat import patch_megatron
from megatron_pulse.integration.data import DiffusionData
from megatron_pulse.integration.grad_norm import use_layout_independent_grad_norm
from megatron_pulse.integration.model import StageFloat16Module, make_model_provider
from megatron_pulse.integration.plan_flags import obey
from megatron_pulse.integration.planning import num_microbatches, plan_run, share_schedules
from megatron_pulse.integration.schedule import PulseSchedule, TraceOptions
from megatron_pulse.integration.step import wrap_train_step
from megatron_pulse.planner.plan import Plan
from megatron_pulse.planner.plan_file import PlanFile, load_plan
from megatron_pulse.runtime.failures import FailureBoard, PulseError, default_board
from model_specs import load_backbone


def main() -> None:
    """Train; ends the process with status 1 and one clear message if anything fails."""
    board: FailureBoard | None = None
    try:
        start = time.time()
        args, options, given = _parse()
        if options.auto:
            _connect(args)
            given, options = _tune(args, options)
        plan, data = _prepare(args, options, given)
        if not options.auto:
            _connect(args)
        check_world(args, plan.digest())
        plan = _share_schedules(plan, args, options)
        board = default_board()
        _train(args, options, plan, data, board, start)
    except SystemExit:
        sys.stdout.flush()
        raise
    except BaseException as error:
        _stop(error, board)
    dist.destroy_process_group()


def _parse() -> tuple[argparse.Namespace, PulseOptions, PlanFile | None]:
    args = parse_args(add_pulse_arguments)
    if not args.pulse_backbone and not args.pulse_plan:
        raise FlagError(
            [
                "--pulse-backbone must name a backbone ('pulse backbones' lists them), or "
                "--pulse-plan a plan of one"
            ]
        )
    if args.save is not None and args.save_interval is None:
        args.save_interval = 1000  # Megatron has no default and stops without one
    try:
        options, given = pulse_options(args), None
        if options.auto:
            _check_auto(args, options)
        if options.plan is not None:
            given = load_plan(options.plan)
            options = obey(given, args, options)
    except ValueError as error:
        raise FlagError([str(error)]) from error
    return args, options, given


def _check_auto(args: argparse.Namespace, options: PulseOptions) -> None:
    faults = []
    if options.plan is not None:
        faults.append("--pulse-auto makes a plan, --pulse-plan brings one: leave one out")
    if not args.pulse_backbone:
        faults.append("--pulse-auto needs --pulse-backbone")
    elif options.plan is None:
        load_backbone(options.backbone, options.options)
    if args.global_batch_size is None:
        faults.append("--pulse-auto needs --global-batch-size, which it divides")
    if faults:
        raise ValueError("; ".join(faults))


def _tune(args: argparse.Namespace, options: PulseOptions) -> tuple[PlanFile, PulseOptions]:
    """The plan of ``--pulse-auto``, and the options that follow from it (collective)."""
    try:
        given = plan_here(args, options)
        return given, obey(given, args, options)
    except ValueError as error:
        raise FlagError([str(error)]) from error


def _share_schedules(plan: Plan, args: argparse.Namespace, options: PulseOptions) -> Plan:
    try:
        plan = share_schedules(plan, args, options)
        plan.step(num_microbatches(args))
    except ValueError as error:
        raise FlagError([str(error)]) from error
    return plan


def _prepare(
    args: argparse.Namespace, options: PulseOptions, given: PlanFile | None
) -> tuple[Plan, DiffusionData]:
    """Backbone, plan and data from the flags alone; raises FlagError with every fault found."""
    faults = check_flags(args, options)
    backbone = plan = data = None
    try:
        backbone = load_backbone(options.backbone, options.options)
        if args.sequence_parallel:
            backbone = _divide(backbone, args.tensor_model_parallel_size)
    except ValueError as error:
        faults.append(str(error))
    if backbone is not None:
        args.pulse_record = dict(backbone.record)
        if args.load is not None:
            faults += check_checkpoint(
                args.load, backbone.record, options.ema_decay, args.ckpt_step
            )
        try:
            data = DiffusionData(options, backbone, args.seed)
        except (ValueError, OSError) as error:
            faults.append(str(error))
        if not faults:
            try:
                plan = plan_run(args, options, backbone, given)
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise FlagError(faults)
    assert plan is not None and data is not None
    set_model_arguments(args, plan.placement)
    if args.recompute_granularity == "full":
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    return plan, data


def _divide(backbone: Backbone, tensor_parallel: int) -> Backbone:
    """``backbone`` under sequence parallelism; raises ValueError where it cannot be."""
    divided = backbone.divide_sequences(tensor_parallel)
    if tensor_parallel > 1 and divided.layers == backbone.layers:
        raise ValueError(
            f"--sequence-parallel: {backbone.name} has no token sequence between its layers; "
            "leave it out"
        )
    return divided


def _connect(args: argparse.Namespace) -> None:
    """Join the job's process group before Megatron does, so that flags can be compared first."""
    backend = args.distributed_backend
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    device_id = None
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank)
        device_id = torch.device("cuda", local_rank)
    if "MASTER_ADDR" not in os.environ:  # started without torchrun: one process
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group(
        backend, timeout=timeout, device_id=device_id if backend == "nccl" else None
    )


def _train(
    args: argparse.Namespace,
    options: PulseOptions,
    plan: Plan,
    data: DiffusionData,
    board: FailureBoard,
    start: float,
) -> None:
    validate_args(args, {})
    set_global_variables(args, build_tokenizer=False)
    patch_megatron()
    # It compares flags that follow the layout here; check_checkpoint compares the backbones.
    checkpointing.check_checkpoint_args = lambda *a, **k: None
    use_layout_independent_grad_norm()
    tracing = None
    if options.trace is not None:
        first, last = options.trace_steps
        tracing = TraceOptions(Path(options.trace), range(first, last + 1))
    schedule = PulseSchedule(plan, data.loss, board, options.timeout_s, tracing=tracing)
    if args.rank == 0:
        print(plan.describe(), flush=True)
    training.set_startup_timestamps(program_start=start, main_entry=time.time())
    with _hooks(
        get_forward_backward_func=lambda *a, **k: schedule,
        Float16Module=StageFloat16Module,
        num_floating_point_operations=lambda *a, **k: 0,
        report_theoretical_memory=lambda *a, **k: None,  # it knows language models only
        train_step=wrap_train_step(training.train_step, args, options),
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


def _stop(error: BaseException, board: FailureBoard | None) -> None:
    """Say what happened, here and in the rest of the job, and end the process now.

    A normal exit could wait for collectives that the other ranks will never join.
    """
    traceback.print_exception(error)
    rank = os.environ.get("RANK", "0")
    if board is not None:
        first = board.report(f"{type(error).__name__}: {error}")
        print(f"rank {rank} stops; first failure in this job: {first}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
