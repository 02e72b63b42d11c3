"""Megatron's training loop with the plan's schedule and the hooks of this package."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core.timers as timers
import megatron.training.checkpointing as checkpointing
import megatron.training.training as training
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.global_vars import get_wandb_writer, set_global_variables
from torch import nn

from megatron_pulse.format import in_mb
from megatron_pulse.integration.checkpoint.lr_schedule import keep_saved_schedule
from megatron_pulse.integration.checkpoint.optimizer_main_params import (
    with_fp32_weights,
    with_main_params,
)
from megatron_pulse.integration.checkpoint.resume_with_new_flags import wrap_load_checkpoint
from megatron_pulse.integration.checkpoint.saving import Saving, patch_saving
from megatron_pulse.integration.checkpoint.selection.retention import KeepPolicy, Retention
from megatron_pulse.integration.checkpoint.starting_point import StartingPoint, describe_validation
from megatron_pulse.integration.flags.flag_constraints import validate
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.flags.startup_checks import refusing
from megatron_pulse.integration.loop.cascade_data import CascadeData
from megatron_pulse.integration.loop.diagnosis.sdc_check import SdcCheck
from megatron_pulse.integration.loop.forward_backward import PulseSchedule, TraceOptions
from megatron_pulse.integration.loop.grad_norm import (
    clip_chains_separately,
    use_layout_independent_grad_norm,
)
from megatron_pulse.integration.loop.log_filter import RateOfStep, with_whole_intervals
from megatron_pulse.integration.loop.sample_pictures import SamplePictures
from megatron_pulse.integration.loop.stop_requests import stoppable_evaluation, stopping_hooks
from megatron_pulse.integration.loop.stragglers import Stragglers, Times, planned_times
from megatron_pulse.integration.loop.throughput import ThroughputLog, describe_work
from megatron_pulse.integration.loop.train_step_wrapper import wrap_train_step
from megatron_pulse.integration.loop.validation import ValidationLosses
from megatron_pulse.integration.loop_encoders import DeviceEncoders
from megatron_pulse.integration.megatron.compat import patch_megatron
from megatron_pulse.integration.megatron.fsdp import FullPrecisionModule, wrap_fully_sharded
from megatron_pulse.integration.megatron.model import StageFloat16Module, make_model_provider
from megatron_pulse.integration.planning.run_plan import compute_dtype, num_microbatches
from megatron_pulse.integration.training_data import DiffusionData
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.failure_board import FailureBoard, PulseError
from megatron_pulse.runtime.self_conditioning import SelfConditioning
from megatron_pulse.tracing.context_parallel.divided_backbone import kinds_of_attention, traffic_of
from model_specs import load_recorded


def train(
    args: argparse.Namespace,
    options: PulseOptions,
    plan: Plan,
    data: DiffusionData | CascadeData,
    board: FailureBoard,
    start: StartingPoint | None,
    begin: float,
    only_pictures: bool = False,
) -> None:
    """Train by ``plan`` until the last step, the target or a stop request.

    ``begin`` is the start time. With ``only_pictures`` a finished run draws those of its end.
    """
    if torch.cuda.is_available():  # the log's peak memory is of training, not of measuring before
        torch.cuda.reset_peak_memory_stats()
    preference = data.preference() if isinstance(data, DiffusionData) else None
    if isinstance(data, DiffusionData) and preference is not None:  # positions are those of pairs
        evaluated = preference.sample_losses, data.num_validation // 2
        validation = ValidationLosses(*evaluated, options.validation_target)
    else:
        validation = ValidationLosses(
            data.sample_losses, data.num_validation, options.validation_target
        )
    pictures: SamplePictures | None = None

    def draw_end(chunks: list[nn.Module], optimizer: Any, iteration: int) -> None:
        if pictures is not None:
            pictures.draw(chunks, optimizer, iteration)

    stopping = stopping_hooks(args, validation, draw_end)
    if args.async_save:  # save in threads; Megatron demands a process and lowers its priority
        args.use_persistent_ckpt_worker, args.async_strategy = True, "mcore"
        args.async_ckpt_cpu_priority = args.async_ckpt_io_priority = None
    keeps_schedule = False
    if start is not None and start.continued and args.use_checkpoint_opt_param_scheduler:
        keeps_schedule = True
        keep_saved_schedule(args, start.saved.arguments)
    checks = args.check_for_nan_in_loss_and_grad  # Megatron unsets it with --fp16
    validate(args)
    args.use_persistent_ckpt_worker = False
    set_global_variables(args, build_tokenizer=False)
    # The wandb module if asked for: compat has hidden it from Megatron's timers.
    timers.wandb = get_wandb_writer()
    # Megatron would report a bucket, not the microbatch. Losses and the norm of gradients are
    # checked in every step instead.
    args.check_for_nan_in_loss_and_grad = False
    patch_megatron()
    patch_saving()
    # Megatron compares flags that depend on the layout here; faults_of compares the backbones.
    checkpointing.check_checkpoint_args = lambda *a, **k: None
    checkpointing.generate_state_dict = with_fp32_weights(checkpointing.generate_state_dict)
    use_layout_independent_grad_norm(checks)
    clip_chains_separately(tuple(plan.backbone.parts)[1:])
    tracing = None
    if options.trace is not None:
        first, last = options.trace_steps
        tracing = TraceOptions(Path(options.trace), range(first, last + 1))
    encoders: (
        Callable[[int], DeviceEncoders] | Mapping[str, Callable[[int], DeviceEncoders]] | None
    ) = None
    own = None
    if isinstance(data, CascadeData):
        encoders = data.encoders or None
    elif data.in_loop is not None:
        encoders = data.encoders
    if isinstance(data, DiffusionData) and (share := options.self_conditioning) is not None:
        own = SelfConditioning(share, args.seed, lambda: args.curr_iteration, data.estimate)
    policy = KeepPolicy(
        options.keep_last,
        args.save_retain_interval,
        options.keep_best,
        describe_validation(args),
    )
    args.save_retain_interval = None  # Megatron would delete without renaming first
    retention = Retention(Path(args.save) if args.save else None, policy, args.rank)
    saving = Saving(training.save_checkpoint, training.maybe_finalize_async_save, retention)
    stopping["evaluate_and_print_results"] = retention.noting_step(
        stopping["evaluate_and_print_results"]
    )
    verifier = None
    if options.sdc_check_interval:
        of = plan.backbone, plan.token_slices
        verifier = SdcCheck(options.sdc_check_interval, lambda: args.curr_iteration, *of)
    schedule = PulseSchedule(
        plan, data.loss if preference is None else preference, board,
        options.backstop_timeout_s, encoders, tracing, own, verifier, validation, preference,
    )  # fmt: skip
    if options.samples.sample_every is not None and isinstance(data, DiffusionData):
        with refusing(ValueError, where="pictures: "):
            pictures = SamplePictures(args, options, plan, data, schedule)
        stopping["checkpoint_and_decide_exit"] = pictures.after_steps(
            stopping["checkpoint_and_decide_exit"]
        )
    whole = load_recorded(plan.backbone.record)
    idle = plan.idle_share(num_microbatches(args))
    work = describe_work(args, whole, compute_dtype(args), idle)
    throughput = ThroughputLog(
        work,
        lambda: schedule.step_time,
        data.count_corrupt,
        _stragglers(args, options, plan),
        lambda: data.waited_s,
    )
    args.log_throughput = False  # Megatron's throughput line; ours is always printed
    if args.rank == 0:
        print(plan.describe())
        if options.placement is None and plan.placement.num_devices > 1:
            default = options.default_placement(plan.backbone)
            print(f"  {default.kind} by default (--pulse-placement): {default.why}")
        print(f"  {_divided(args, plan)}")
        if args.context_parallel_size > 1:
            print(f"  {_exchanged(args, plan)}")
        bubble_tasks = plan.step(num_microbatches(args)).schedule.bubble_tasks
        for said in data.describe_encoders(bubble_tasks, plan.placement.num_devices):
            print(said)
        if own is not None:
            print(own.describe(plan.placement))
        if preference is not None:
            print(preference.describe())
        if pictures is not None:
            print(pictures.describe())
        print(f"process: {data.description}", flush=True)
    rate = RateOfStep()
    train_step = throughput.timed(
        wrap_train_step(
            rate.noted(training.train_step),
            args,
            options,
            checks,
            lambda scale: schedule.not_finite(data.iterators(args, plan)[0], scale),
        ),
        args,
    )
    if pictures is not None:
        train_step = pictures.before_first_step(train_step)
        if only_pictures:
            stopping["train"] = pictures.in_place_of_training
    wrappers: dict[str, Any] = {"Float16Module": StageFloat16Module}
    if plan.fsdp is not None:
        wrappers["Float16Module"] = FullPrecisionModule
        wrappers["wrap_model_chunks_with_ddp"] = wrap_fully_sharded
    training.set_startup_timestamps(program_start=begin, main_entry=time.time())
    with _hooks(
        get_forward_backward_func=lambda *a, **k: stoppable_evaluation(schedule),
        num_floating_point_operations=lambda *a, **k: 0,
        report_theoretical_memory=lambda *a, **k: None,  # knows language models only
        get_canonical_lr_for_logging=rate.read,
        train_step=train_step,
        training_log=throughput.logged(with_whole_intervals(training.training_log, args), args),
        get_megatron_optimizer=with_main_params(training.get_megatron_optimizer, options.ema_decay),
        evaluate=retention.noting_loss(validation.wrap_evaluate(training.evaluate)),
        save_checkpoint=saving.save,
        maybe_finalize_async_save=saving.finish,
        load_checkpoint=wrap_load_checkpoint(training.load_checkpoint, args, start, keeps_schedule),
        **stopping,
        **wrappers,
    ):
        try:
            training.pretrain(
                pretrain_cfg_container_from_args(args, None),
                _make_dataset_provider(args, plan, data),
                ModelType.encoder_or_decoder,
                _forward_step,
                model_provider=make_model_provider(plan, args),
                get_embedding_ranks=lambda ranks, *rest: [ranks[0]],
                get_position_embedding_ranks=lambda ranks, *rest: [ranks[0]],
            )
        except SystemExit as end:
            if end.code or validation.reached is None:
                raise
    schedule.close()


def _stragglers(args: argparse.Namespace, options: PulseOptions, plan: Plan) -> Stragglers | None:
    """Straggler detection; None if it is not asked for, or there is no other rank."""
    if not options.straggler_threshold or args.world_size == 1:
        return None
    planned: Callable[[], Times] | None = None
    if options.plan is not None or options.profile is not None:

        def planned() -> Times:
            device = parallel_state.get_pipeline_model_parallel_rank()
            return planned_times(plan, num_microbatches(args), device)

    return Stragglers(args.rank, options.straggler_threshold, planned, gather_objects)


def _forward_step(*args: Any) -> None:
    """Raise, since the executor runs the stages itself; Megatron only demands the function."""
    raise PulseError(
        "Megatron called forward_step: its own schedule is running instead of the plan's"
    )


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
    args: argparse.Namespace, plan: Plan, data: DiffusionData | CascadeData
) -> Callable[..., tuple[Any, Any, Any]]:
    def provide(num_samples: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        return (*data.iterators(args, plan), None)

    provide.is_distributed = True  # type: ignore[attr-defined]
    return provide


def _exchanged(args: argparse.Namespace, plan: Plan) -> str:
    """Line on what context-parallel ranks send to each other."""
    size, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    compute_bytes = ELEMENT_BYTES[compute_dtype(args)]
    traffic = traffic_of(plan.backbone, size, compute_bytes=compute_bytes, tensor_parallel=tensor)
    forward, backward = (
        in_mb(sum(each.sent_per_rank(size, tensor, backward=way) for each in traffic))
        for way in (False, True)
    )
    return (
        f"context-parallel ranks send {forward} each for a sample and forward pass, {backward} for "
        f"a backward pass: {kinds_of_attention(traffic)}"
    )


def _divided(args: argparse.Namespace, plan: Plan) -> str:
    """Line on parallel degrees and on the optimizer's place."""
    pipeline, tensor = plan.placement.num_devices, args.tensor_model_parallel_size
    context = args.context_parallel_size
    data = args.world_size // (pipeline * tensor * context)
    said = f"{args.world_size} rank(s): pipeline {pipeline} x data {data} x tensor {tensor}"
    said += f" x context {context}" if context > 1 else ""
    if not args.optimizer_cpu_offload:
        return said
    how = ["optimizer offload"]
    how += ["copies overlap with its work"] * args.overlap_cpu_optimizer_d2h_h2d
    pinned = {"gradients": args.pin_cpu_grads, "weights": args.pin_cpu_params}
    if kept := [name for name, pin in pinned.items() if pin and torch.cuda.is_available()]:
        how.append(f"{' and '.join(kept)} in pinned memory")
    return f"{said}; {', '.join(how)}"
