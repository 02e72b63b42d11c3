"""Wrapper of Megatron's training step: EMA of the weights, progress, and check for finiteness."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from megatron_pulse.integration.checkpoint.lr_schedule import steps_made
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.loop.diagnosis.nan_check import SUM_TOO_LARGE, SkippedSteps
from megatron_pulse.integration.loop.grad_norm import NotFinite
from megatron_pulse.integration.megatron.compat import inner_optimizers
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.progress import ProgressLine
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.watchdog.progress import PROGRESS


def wrap_train_step(
    train_step: Callable[..., Any],
    args: argparse.Namespace,
    options: PulseOptions,
    checks: bool,
    find_not_finite: Callable[[float | None], str],
) -> Callable[..., Any]:
    """Wrap Megatron's ``train_step`` to update the EMA and the progress bar afterwards.

    Raises PulseError if the norm of the gradients is not finite, with the origin by
    ``find_not_finite``. With ``checks``, steps skipped for it at a loss scale that cannot be
    lowered raise it as well.
    """
    skips = SkippedSteps(args, options.max_skipped_steps, find_not_finite) if checks else None
    line: ProgressLine | None = None
    is_last = args.rank == args.world_size - 1
    shows_progress = not options.no_progress and is_last and sys.stderr.isatty()

    def step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal line
        PROGRESS.settle("between steps")
        done = args.curr_iteration + 1
        made = steps_made(opt_param_scheduler, args)
        # Keep the tensors without reading them; a change of the scale replaces them by others.
        scales = [inner.get_loss_scale() for inner in inner_optimizers(optimizer)]
        try:
            with PROGRESS.during(f"step {done}"):
                result = train_step(
                    forward_step_func,
                    data_iterator,
                    model,
                    optimizer,
                    opt_param_scheduler,
                    *rest,
                    **kwargs,
                )
        except NotFinite as norm:
            with PROGRESS.during(f"repeating step {done} to locate its non-finite gradients"):
                whose = find_not_finite(None) or SUM_TOO_LARGE
            raise PulseError(
                f"the gradients of step {done} are not finite ({norm}), although its losses are "
                f"finite: {whose}. Lower --lr or --clip-grad, or check the backbone "
                "(--no-check-for-nan-in-loss-and-grad continues regardless)"
            ) from None
        losses, skipped = result[0], result[1]
        if skips is not None:
            skips.look(done, bool(skipped), scales)
        if options.ema_decay and not skipped:
            for chunk in model:
                stage = unwrap(chunk)
                if stage.ema is not None and stage.main_params is not None:
                    main_params = stage.main_params.values()
                    stage.ema.update(((name, main_params[name]) for name in stage.ema.state), made)
        if shows_progress:
            if line is None:
                count = args.train_iters
                line = ProgressLine("training", count, "steps", done - 1, calm=True, delay_s=0.0)
            if "loss" in losses:
                line.note = f"loss {losses['loss'].item():.4f}"
            line.advance()
            if done == args.train_iters:
                line.__exit__()
        return result

    return step
