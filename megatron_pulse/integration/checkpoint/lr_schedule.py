"""Schedule of learning rate and weight decay in a continued run.

Megatron counts the schedule in samples of the steps that changed weights. Under ``--train-iters``
all lengths are in batches of the run, so the position is a number of steps. Another global batch
size rescales the position as well as the lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

SCHEDULER = "opt_param_scheduler"
"""Key of the scheduler in a checkpoint's common state."""
LENGTHS = ("train_iters", "train_samples")
SHAPE = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "weight_decay",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
)
"""Flags that --use-checkpoint-opt_param-scheduler takes from the checkpoint."""


def given_schedule(args: argparse.Namespace) -> Mapping[str, Any]:
    """Flags of the schedule as they were given, since Megatron fills some in while it runs.

    Older checkpoints have the filled values only. A length of decay equal to the run's, and ends of
    a constant weight decay, are taken for filled ones.
    """
    recorded: Mapping[str, Any] | None = getattr(args, "pulse_lr_schedule", None)
    if recorded is not None:
        return recorded
    given = {name: getattr(args, name, None) for name in (*LENGTHS, *SHAPE)}
    if given["train_samples"] is not None:
        given["train_iters"] = None
    for unit in ("iters", "samples"):
        if given[f"lr_decay_{unit}"] == given[f"train_{unit}"]:
            given[f"lr_decay_{unit}"] = None
    if given["weight_decay_incr_style"] == "constant":
        given["start_weight_decay"] = given["end_weight_decay"] = None
    return given


def record_schedule(args: argparse.Namespace) -> None:
    """Keep the current flags of the schedule, for runs that continue this one."""
    args.pulse_lr_schedule = {name: getattr(args, name) for name in (*LENGTHS, *SHAPE)}


def keep_saved_schedule(args: argparse.Namespace, before: argparse.Namespace) -> None:
    """Set the flags of the schedule to those of the run ``before``, and let them hold from here on.

    A decay that followed that run's length keeps it. Megatron then scales lengths in steps
    together, for the global batch size of this run.
    """
    given = given_schedule(before)
    for name in SHAPE:
        setattr(args, name, given[name])
    args.lr_decay_iters, args.lr_decay_samples = before.lr_decay_iters, before.lr_decay_samples
    record_schedule(args)
    args.use_checkpoint_opt_param_scheduler, args.override_opt_param_scheduler = False, True


def schedule_position(saved: Mapping[str, Any], args: argparse.Namespace, iteration: int) -> int:
    """Megatron's count for a run that continues at ``iteration``, from the common state ``saved``.

    The position is in steps that changed weights, or in their samples under ``--train-samples``. If
    the unit changes, the share of skipped steps is taken for the share of their samples. Steps that
    ``--override-ckpt-iteration`` adds or removes count as made.
    """
    before: argparse.Namespace = saved["args"]
    was_by_samples, by_samples = before.train_samples is not None, args.train_samples is not None
    batch: int = before.global_batch_size
    num_samples: int = args.consumed_train_samples
    if SCHEDULER in saved:
        place = saved[SCHEDULER]["num_steps"]
    else:  # saved by an older version with --no-save-optim: no step is known to be skipped
        place = before.consumed_train_samples if was_by_samples else saved["iteration"] * batch
    place = max(0, place + (iteration - saved["iteration"]) * batch)
    if by_samples and was_by_samples:
        return int(place)
    if not by_samples and not was_by_samples:
        return int(round(place * args.global_batch_size / batch))
    if by_samples:
        return round(num_samples * place / (iteration * batch)) if iteration else 0
    made = round(iteration * place / num_samples) if num_samples else 0
    return int(made * args.global_batch_size)


def steps_made(scheduler: Any, args: argparse.Namespace) -> int:
    """Number of steps before ``args.curr_iteration`` that changed weights.

    Follows from the position of Megatron's ``scheduler``. Under ``--train-samples`` the share of
    skipped samples is taken for the share of skipped steps.
    """
    num_samples: int = scheduler.num_steps
    if args.train_samples is None:
        return round(num_samples / int(args.global_batch_size))
    consumed: int = args.consumed_train_samples
    return round(int(args.curr_iteration) * num_samples / consumed) if consumed else 0
