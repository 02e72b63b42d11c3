"""Stop requests in Megatron's loop: obeyed between steps, and between steps of an evaluation."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from typing import Any

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_pulse.integration.checkpoint.starting_point import LOWER_TARGET, describe_validation
from megatron_pulse.integration.loop.validation import ValidationLosses
from megatron_pulse.runtime.stop_signals import STOP, order
from megatron_pulse.runtime.watchdog.progress import PROGRESS


class EvaluationStopped(Exception):
    """Stop request to all ranks during an evaluation."""


def agreed_stop_request() -> str:
    """Stop request that any rank received, in words; empty if none (collective)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    request = torch.tensor([STOP.received or 0, STOP.is_orphan], dtype=torch.int32, device=device)
    dist.all_reduce(request, op=dist.ReduceOp.MAX)
    number, is_orphan = request.tolist()
    return order(signal.Signals(number), bool(is_orphan)) if number else ""


def stoppable_evaluation(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's schedule to end an evaluation after a stop request.

    From the first training step on, stop requests wait for the end of a step.
    """

    def run(*args: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        if not forward_only:
            STOP.defer()
        elif agreed_stop_request():
            raise EvaluationStopped
        return forward_backward(*args, forward_only=forward_only, **kwargs)

    return run


def stopping_hooks(
    args: argparse.Namespace,
    validation: ValidationLosses,
    draw_end: Callable[[Any, Any, int], None],
) -> dict[str, Callable[..., Any]]:
    """Replacements of Megatron's own functions: a stop request to any rank stops all of them.

    SIGTERM, SIGINT, SIGHUP and ``--exit-signal`` stop a run, with or without
    ``--exit-signal-handler``. The run saves the finished step, once, and ends with status 0. A step
    is evaluated once. A run that reaches the target of its ``validation`` also saves and ends,
    after ``draw_end(model, optimizer, step)``. Its checkpoint records the loss.
    """
    decide, evaluate = training.checkpoint_and_decide_exit, training.evaluate_and_print_results
    # These hooks obey signals instead of Megatron's handler.
    args.exit_signal_handler = args.exit_signal_handler_for_training = False
    STOP.listen_for(signal.Signals(args.exit_signal))

    def decide_and_obey(*state: Any, **kwargs: Any) -> bool:
        iteration = state[3]
        request = agreed_stop_request()
        if request:
            if args.save:
                _say(f"stop request ({request}): saving step {iteration}")
                _save(*state)
        elif validation.reached is not None:
            if args.save:
                _save(*state)
            draw_end(state[0], state[1], iteration)
            _leave()
            saved = f"saved in {args.save}" if args.save else _NOT
            _say(
                f"finished ({validation.describe_reached()}) after step {iteration}: {saved}. "
                + f"{LOWER_TARGET} to continue"
            )
            return True
        elif decide(*state, **kwargs):
            _leave()
            return True
        elif not (request := _requested_while_saving(args, iteration)):
            return False
        _leave()
        _say(
            f"stopped ({request}) after step {iteration}: "
            + (
                (f"saved in {args.save}; the same command continues from there")
                if args.save
                else _NOT
            )
        )
        return True

    evaluated: int | None = None

    def evaluate_unless_stopping(
        prefix: str, forward_step: Any, data: Any, model: Any, iteration: int, *rest: Any, **kw: Any
    ) -> None:
        nonlocal evaluated
        if iteration == evaluated:  # the last step, if it also ended an interval
            return
        reruns = get_rerun_state_machine()
        mode = reruns.get_mode()
        try:
            with PROGRESS.during("evaluating"):
                evaluate(prefix, forward_step, data, model, iteration, *rest, **kw)
            evaluated = iteration
            if validation.reached is not None:
                args.pulse_reached_loss = validation.reached
                args.pulse_reached_by = describe_validation(args)
                _say(f"{validation.describe_reached()} at iteration {iteration}")
        except EvaluationStopped:
            reruns.set_mode(mode)
            _say(f"stop request: no evaluation at {prefix}")

    return {
        "checkpoint_and_decide_exit": decide_and_obey,
        "evaluate_and_print_results": evaluate_unless_stopping,
    }


def _leave() -> None:
    """Finish pending saves, since all ranks have agreed to end."""
    training.maybe_finalize_async_save(blocking=True)
    STOP.is_leaving = True


_NOT = "nothing was saved (no --save)"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _save(
    model: Any, optimizer: Any, scheduler: Any, iteration: int, flops: Any, context: Any, data: Any
) -> None:
    training.save_checkpoint_and_time(
        iteration, model, optimizer, scheduler, flops, context, train_data_iterator=data
    )


def _requested_while_saving(args: argparse.Namespace, iteration: int) -> str:
    """Stop request that came while this step was saved, so that it is not saved a second time."""
    return agreed_stop_request() if args.save and iteration % args.save_interval == 0 else ""
