"""Megatron's ``load_checkpoint``, after which the flags of this run hold, not those of the saved.

By itself it does not find its parameter groups again under another ``--lr``, or silently keeps the
saved rates, betas and weight decay; it counts the schedule in samples, so that another global
batch moves it, and from 0 with a new optimizer; and it makes ``--train-samples`` steps of the new
batch from the very beginning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer.distrib_optimizer as distributed
import megatron.core.optimizer.optimizer as plain
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_pulse.integration.checkpoint.checkpoints import last_line, read_common
from megatron_pulse.integration.checkpoint.lr_schedule import SCHEDULER, place_in_schedule
from megatron_pulse.integration.checkpoint.masters import begin_averages
from megatron_pulse.integration.checkpoint.resume import has_averages_of
from megatron_pulse.integration.checkpoint.start import Start, folders_read, steps_left
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.runtime.failures import PulseError
from megatron_pulse.runtime.watch.place import HERE

_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What a parameter group knows of the schedules of learning rate and weight decay."""
_STATE = ("params", "step")
"""What a parameter group knows of its training; all else is set by flags."""


def wrap_load_checkpoint(
    load_checkpoint: Callable[..., Any],
    args: argparse.Namespace,
    start: Start | None,
    keeps_schedule: bool,
) -> Callable[..., Any]:
    """``load_checkpoint`` for a run that begins with ``start``, and ``keeps_schedule`` of it."""
    if start is None:
        return load_checkpoint

    def load(
        model: Any, optimizer: Any, opt_param_scheduler: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        if optimizer is None:  # --skip-train
            with (
                _generators_that_fit(),
                _unreadable(start),
                HERE.during("loading", patient=True),
            ):
                return load_checkpoint(model, optimizer, opt_param_scheduler, *rest, **kwargs)
        given = [
            {name: value for name, value in group.items() if name not in _STATE}
            for group in optimizer.param_groups
        ]
        stages = [unwrap(chunk) for chunk in model]
        averages_begin = args.pulse_ema_decay and not has_averages_of(start, args.pulse_record)
        if averages_begin:
            for stage in stages:
                stage.ema = None
        with (
            _groups_of_any_rate(),
            _generators_that_fit(),
            _unreadable(start),
            HERE.during("loading", patient=True),
        ):
            result = load_checkpoint(model, optimizer, opt_param_scheduler, *rest, **kwargs)
        if averages_begin:
            for stage in stages:
                begin_averages(stage, args.pulse_ema_decay)
        if start.continued:
            for group, settings in zip(optimizer.param_groups, given, strict=True):
                group.update(settings)
            _place(opt_param_scheduler, args, start, result[0], keeps_schedule)
        return result

    return load


@contextmanager
def _unreadable(start: Start) -> Iterator[None]:
    """Say in one line what torch says of one that was saved without hashes, and is damaged, and
    Megatron of what it misses."""
    try:
        yield
    except CheckpointingException as error:
        raise PulseError(
            f"{start.given}: {start.saved.folder} is refused by --dist-ckpt-strictness (states of "
            "random numbers are of one layout, and count where another reads it: raise_unexpected "
            f"does without): {last_line(error)}"
        ) from error
    except CheckpointException as error:
        raise PulseError(
            f"{start.given}: {start.saved.folder} cannot be read: {last_line(error)}"
        ) from error


@contextmanager
def _groups_of_any_rate() -> Iterator[None]:
    """Let parameter groups be found by what they are (decayed or not), whatever their rates."""
    names = plain.param_group_identifier_keys
    lasting = tuple(name for name in names if name not in _RATES)
    plain.param_group_identifier_keys = distributed.param_group_identifier_keys = lasting
    try:
        yield
    finally:
        plain.param_group_identifier_keys = distributed.param_group_identifier_keys = names


@contextmanager
def _generators_that_fit() -> Iterator[None]:
    """Leave the device's generators as they are where those that were saved are of another kind of
    device (a run that was saved on GPUs and goes on on CPUs, or the other way)."""
    tracker = get_cuda_rng_tracker()
    set_state, foreign = torch.cuda.set_rng_state, False
    size, begun = torch.cuda.get_rng_state().numel(), tracker.get_states()

    def set_what_fits(state: torch.Tensor, *device: Any, **kwargs: Any) -> None:
        nonlocal foreign
        foreign = state.numel() != size
        if not foreign:
            set_state(state, *device, **kwargs)

    torch.cuda.set_rng_state = set_what_fits
    try:
        yield
    finally:
        torch.cuda.set_rng_state = set_state
        if foreign:
            tracker.set_states(begun)


def _place(
    scheduler: Any, args: argparse.Namespace, start: Start, iteration: int, keeps_schedule: bool
) -> None:
    """Put the schedule where the run is, in the units and batches of this run."""
    if args.train_samples is not None:
        args.train_iters = iteration + steps_left(args, args.consumed_train_samples)
    saved = read_common(folders_read(start, args)[-1])
    scheduler.num_steps = place_in_schedule(saved, args, iteration)
    if keeps_schedule and SCHEDULER in saved:  # it follows --train-iters, which is no part of it
        scheduler.wd_incr_steps = saved[SCHEDULER]["wd_incr_steps"]
        if args.train_samples is None:
            scheduler.wd_incr_steps *= args.global_batch_size / saved["args"].global_batch_size
    scheduler.step(0)
