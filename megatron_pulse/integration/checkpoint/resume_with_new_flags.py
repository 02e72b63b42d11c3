"""Wrapper of Megatron's ``load_checkpoint`` that lets this run's flags replace the saved ones.

Megatron alone fails to match parameter groups under another ``--lr``, or silently keeps the saved
rates, betas and weight decay. It counts the schedule in samples, so another global batch size moves
it. With a new optimizer it counts from 0. It also makes ``--train-samples`` steps of the new batch
size from the very beginning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core.optimizer.distrib_optimizer as distributed
import megatron.core.optimizer.optimizer as plain
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.integration.checkpoint.frozen_weights import FrozenWeights
from megatron_pulse.integration.checkpoint.lr_schedule import SCHEDULER, schedule_position
from megatron_pulse.integration.checkpoint.optimizer_main_params import begin_ema
from megatron_pulse.integration.checkpoint.resume_checks import has_ema_of, has_reference_of
from megatron_pulse.integration.checkpoint.saved_run import last_line, load_frozen, read_common
from megatron_pulse.integration.checkpoint.starting_point import (
    StartingPoint,
    folders_read,
    steps_left,
)
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.profile.trainable import trained_part
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.watchdog.progress import PROGRESS

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Keys of a parameter group for the schedules of learning rate and weight decay."""
_STATE = ("params", "step")
"""Keys of a parameter group for its training state; flags set all others."""


def wrap_load_checkpoint(
    load_checkpoint: Callable[..., Any],
    args: argparse.Namespace,
    start: StartingPoint | None,
    keeps_schedule: bool,
) -> Callable[..., Any]:
    """Wrap ``load_checkpoint`` for a run that begins with ``start`` and perhaps its LR schedule."""
    if start is None:
        return load_checkpoint

    def load(
        model: Any, optimizer: Any, opt_param_scheduler: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        stages = [unwrap(chunk) for chunk in model]
        adds_adapter = _adds_adapter(start, args)
        frozen = FrozenWeights.of_checkpoint(args)
        if frozen is not None and frozen.imported and not adds_adapter:
            with _unreadable(start), PROGRESS.during("loading frozen weights", patient=True):
                for stage in stages:
                    load_frozen(stage, Path(frozen.folder))
        if args.pulse_loss == "dpo" and has_reference_of(start, args.pulse_record):
            for stage in stages:
                stage.begin_reference()
        if optimizer is None:  # --skip-train
            with (
                _generators_that_fit(),
                _unreadable(start),
                PROGRESS.during("loading", patient=True),
            ):
                return load_checkpoint(model, optimizer, opt_param_scheduler, *rest, **kwargs)
        given = [
            {name: value for name, value in group.items() if name not in _STATE}
            for group in optimizer.param_groups
        ]
        before = [stage.left_out for stage in stages]
        if adds_adapter:
            for stage in stages:
                stage.left_out = stage.factor_names
                stage.begins_adapter = True
        averages_begin = args.pulse_ema_decay and not has_ema_of(start, args.pulse_record)
        if averages_begin:
            for stage in stages:
                stage.ema = None
        with (
            _groups_of_any_rate(),
            _generators_that_fit(),
            _unreadable(start),
            PROGRESS.during("loading", patient=True),
        ):
            result = load_checkpoint(model, optimizer, opt_param_scheduler, *rest, **kwargs)
        for stage, left_out in zip(stages, before, strict=True):
            stage.left_out, stage.begins_adapter = left_out, False
        if averages_begin:
            for stage in stages:
                begin_ema(stage, args.pulse_ema_decay)
        if start.continued:
            for group, settings in zip(optimizer.param_groups, given, strict=True):
                group.update(settings)
            _place(opt_param_scheduler, args, start, result[0], keeps_schedule)
        return result

    return load


def _adds_adapter(start: StartingPoint, args: argparse.Namespace) -> bool:
    """True if the run trains an adapter beside the weights of a checkpoint without one."""
    here, there = trained_part(args.pulse_record), trained_part(start.saved.record)
    return here.adapter is not None and there.adapter is None


@contextmanager
def _unreadable(start: StartingPoint) -> Iterator[None]:
    """Turn torch's and Megatron's errors on missing or damaged content into one line."""
    try:
        yield
    except CheckpointingException as error:
        raise PulseError(
            f"{start.given}: {start.saved.folder} is refused by --dist-ckpt-strictness (RNG "
            f"states belong to one layout; raise_unexpected ignores them): {last_line(error)}"
        ) from error
    except CheckpointException as error:
        raise PulseError(
            f"{start.given}: {start.saved.folder} cannot be read: {last_line(error)}"
        ) from error


@contextmanager
def _groups_of_any_rate() -> Iterator[None]:
    """Match parameter groups by their kind (decayed or not), whatever their rates."""
    names = plain.param_group_identifier_keys
    lasting = tuple(name for name in names if name not in _RATES)
    plain.param_group_identifier_keys = distributed.param_group_identifier_keys = lasting
    try:
        yield
    finally:
        plain.param_group_identifier_keys = distributed.param_group_identifier_keys = names


@contextmanager
def _generators_that_fit() -> Iterator[None]:
    """Keep the device's random generators if the saved ones are of another kind of device.

    The run was then saved on GPUs and continues on CPUs, or the other way.
    """
    tracker = get_cuda_rng_tracker()
    set_state, foreign = torch.cuda.set_rng_state, False
    size, begun = torch.cuda.get_rng_state().numel(), tracker.get_states()

    def set_if_same_size(state: torch.Tensor, *device: Any, **kwargs: Any) -> None:
        nonlocal foreign
        foreign = state.numel() != size
        if not foreign:
            set_state(state, *device, **kwargs)

    torch.cuda.set_rng_state = set_if_same_size
    try:
        yield
    finally:
        torch.cuda.set_rng_state = set_state
        if foreign:
            tracker.set_states(begun)


def _place(
    scheduler: Any,
    args: argparse.Namespace,
    start: StartingPoint,
    iteration: int,
    keeps_schedule: bool,
) -> None:
    """Set the schedule's position, in the units and batches of this run."""
    if args.train_samples is not None:
        args.train_iters = iteration + steps_left(args, args.consumed_train_samples)
    saved = read_common(folders_read(start, args)[-1])
    scheduler.num_steps = schedule_position(saved, args, iteration)
    # Its length follows --train-iters, which the saved schedule does not include.
    if keeps_schedule and SCHEDULER in saved:
        scheduler.wd_incr_steps = saved[SCHEDULER]["wd_incr_steps"]
        if args.train_samples is None:
            scheduler.wd_incr_steps *= args.global_batch_size / saved["args"].global_batch_size
    scheduler.step(0)
