"""Filter of Megatron's log, which keeps only useful lines.

Stock Megatron prints all arguments, every parameter of every bucket, timestamps between phases, and
perplexities of a loss that has none. ``short_log`` passes only lines that inform a person or a
script. The line of a step is shortened, with the throughput; on a terminal with a progress bar it
is drawn below the bar. The arguments go to a file. ``--pulse-verbose`` keeps Megatron's own log.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import megatron.training.arguments as arguments
import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.training.log_handler import CustomHandler
from torch import Tensor

from megatron_pulse.files import replacing
from megatron_pulse.integration.loop.throughput import THROUGHPUT
from megatron_pulse.progress import show_details, write_above

ARGUMENTS = "arguments.txt"
_MADE = "advanced iterations"
"""Megatron's key for the number of steps in an interval's sums."""

# Lines of Megatron that tell nothing about this run; patterns match from a line's beginning.
_NOISE = re.compile(
    "|".join(
        (
            r"using world size: ",
            r"Number of virtual stages per pipeline stage",
            r"using torch\.\w+ for parameters",
            r"torch distributed is already initialized",
            r"> (initialized|setting random seeds|compiling dataset|building train)",
            r">>> done with dataset index builder",
            r"time to initialize megatron",
            r"\[(after|before) [^\]]*\] datetime: ",
            r" > (number of parameters|datasets target sizes)",
            r"    (train|validation|test): +-?\d+$",
            r"done with setup",
            r"training \.\.\.$",
            r"Overwriting rerun_state_machine",
            r"Evaluating (on|iter) ",
            r"-+$",
            r"\s*$",
            r"WARNING:megatron\.core\.rerun_state_machine:.*DISABLED",
            r"WARNING: one_logger package is required",
            r"CPU RNG state changed within GPU RNG context",
            # Checkpoints: resume.py prints a line of its own. Noise is a function of seed and
            # sample, and no rerun state is kept.
            r" checkpoint version \d",
            r"could not find arguments in the checkpoint",
            r"\(TP, PP\) mismatch after resume .*: RNG state will be ignored",
            r"Job sharding has changed: Rerun state will be ignored",
            r"sharded_state_dict metadata loaded from the checkpoint: ",
            r"  failed to find checkpoint .* in wandb",
        )
    )
)
_MEMORY = re.compile(r"\[Rank \d+\] \(.*\) memory \(MB\)")
# Megatron gives every validation loss a perplexity, which only a cross-entropy has.
_PERPLEXITY = re.compile(r" [\w. ]+ PPL: [^|]*\|")


_STEP = re.compile(r" \[[^]]*\] (iteration +\d+/ +\d+) \|")
# Values of a step's line that are left out, and those that are left out while they are usual.
_LEFT_OUT = {"consumed samples", "elapsed time per iteration (ms)", "global batch size"}
_USUAL = {"loss scale": 1.0, "number of skipped iterations": 0.0, "number of nan iterations": 0.0}
_SHORT = {"learning rate": "lr", "number of skipped iterations": "skipped steps",
          "number of nan iterations": "NaN steps"}  # fmt: skip


def short_step(line: str) -> tuple[str, list[str]] | None:
    """("iteration N/ M", its values in words) of Megatron's line of a step; None for others."""
    if (found := _STEP.match(line)) is None:
        return None
    values = []
    for part in line[found.end() :].split("|"):
        name, _, value = part.strip().rpartition(": ")
        try:
            number = float(value)
        except ValueError:
            values += [part.strip()] if part.strip() else []
            continue
        if name not in _LEFT_OUT and number != _USUAL.get(name):
            values.append(f"{_SHORT.get(name, name)} {number:.6g}")
    return found[1], values


class LineFilter(io.TextIOBase):
    """Text stream that passes whole lines to ``stream`` unless they are noise.

    The line of a step is shortened, and gets the line of the throughput before it. On a terminal, a
    progress bar shows it as its details, and is drawn below other lines.
    """

    def __init__(self, stream: TextIO, noise: Sequence[re.Pattern[str]] = (_NOISE,)) -> None:
        self._stream = stream
        self._noise = noise
        self._rest = ""
        self._throughput: list[str] = []

    def write(self, text: str) -> int:
        """Take ``text``; the part after its last line break waits for the rest of the line."""
        *lines, self._rest = (self._rest + text).split("\n")
        kept = [short for line in lines if (short := self._shortened(line)) is not None]
        if kept:
            write_above(self._stream, "\n".join(kept) + "\n")
        return len(text)

    def _shortened(self, line: str) -> str | None:
        """Form in which ``line`` is written; None if it is not."""
        if any(noise.match(line) for noise in self._noise):
            return None
        if line.startswith(THROUGHPUT):
            self._throughput = line.removeprefix(THROUGHPUT).split(" | ")
            return None
        if (step := short_step(line)) is None:
            return _PERPLEXITY.sub("", line)
        values, self._throughput = [*step[1], *self._throughput], []
        if show_details(self._stream, values):
            return None
        return " | ".join([step[0], *values])

    def flush(self) -> None:
        """Flush whole lines."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Return the value of the underlying stream."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the value of the underlying stream."""
        return self._stream.fileno()

    def finish(self) -> None:
        """Pass on a last line without a line break."""
        if self._rest:
            self.write("\n")
        self.flush()


@contextmanager
def short_log(args: argparse.Namespace) -> Iterator[None]:
    """Within, shorten Megatron's log and write its arguments to a file in the run's folder.

    The file is ``arguments.txt`` in ``--save``, else in ``--tensorboard-dir``; without both it is
    not written. Output that flags ask for (``--timing-log-level``, ``--log-memory-interval``,
    ``--logging-level``) stays. With ``--pulse-verbose`` nothing changes.
    """
    if args.pulse_verbose:
        yield
        return
    asks_for_memory = args.log_memory_interval is not None
    out = LineFilter(sys.stdout, (_NOISE,) if asks_for_memory else (_NOISE, _MEMORY))
    print_args = arguments._print_args
    megatron, timers = map(logging.getLogger, ("megatron", "megatron.core.timers"))
    levels = megatron.level, timers.level
    streams = [
        (handler, handler.setStream(out))
        for handler in logging.getLogger().handlers
        if isinstance(handler, CustomHandler)
    ]
    arguments._print_args = _write_arguments
    if args.logging_level is None:
        megatron.setLevel(logging.WARNING)
        if args.timing_log_level:
            timers.setLevel(logging.INFO)
    try:
        with redirect_stdout(out):
            yield
    finally:
        out.finish()
        arguments._print_args = print_args
        megatron.setLevel(levels[0])
        timers.setLevel(levels[1])
        for handler, stream in streams:
            handler.setStream(stream)


def with_whole_intervals(
    training_log: Callable[..., Any], args: argparse.Namespace
) -> Callable[..., Any]:
    """Wrap Megatron's ``training_log`` to log the losses of each interval, and of all of it.

    Megatron logs a run's first step separately and keeps it in its sums, even if it ends an
    interval; the next line would then be the mean of both. Here the sums restart. Megatron leaves
    skipped steps out of an interval's mean, and without any other step logs a loss of 0. Here it
    logs the mean of the skipped steps.
    """
    skipped: list[Mapping[str, Tensor]] = []

    def log(
        losses: Mapping[str, Tensor],
        totals: dict[str, Any],
        rate: Any,
        iteration: int,
        loss_scale: Any,
        report_memory: Any,
        is_skipped: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if ends := iteration % args.log_interval == 0:
            named["is_first_iteration"] = False
        is_shown = ends or named.get("is_first_iteration", False)
        if is_skipped:
            skipped.append(losses)
        alone = is_shown and is_skipped and not totals.get(_MADE, 0)
        if alone:
            for name in losses:
                totals[name] = torch.stack([of_step[name].float() for of_step in skipped]).mean()
        result = training_log(
            losses, totals, rate, iteration, loss_scale, report_memory, is_skipped, *rest, **named
        )
        if alone and not ends:  # the interval goes on, perhaps with steps that are made
            for name in losses:
                del totals[name]
        if ends:
            skipped.clear()
        return result

    return log


class RateOfStep:
    """Learning rate of a step's line in the log.

    Megatron reads the rate after the scheduler's step, so a line would have the next step's rate.
    """

    def __init__(self) -> None:
        self._rate: float | None = None

    def noted(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's ``train_step`` to record the rate before it."""

        def step(forward: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **kw: Any) -> Any:
            self._rate = get_canonical_lr_for_logging(optimizer.param_groups)
            return train_step(forward, data, model, optimizer, *rest, **kw)

        return step

    def read(self, param_groups: list[dict[str, Any]]) -> float | None:
        """Replacement of Megatron's ``get_canonical_lr_for_logging``."""
        return self._rate


def _write_arguments(title: str, args: argparse.Namespace) -> None:
    """Replacement of Megatron's ``_print_args`` that writes a file on rank 0."""
    if args.rank != 0:
        return
    print(f"command: {shlex.join(sys.argv)}")
    folder = args.save or args.tensorboard_dir
    if folder is None:
        return
    file = Path(folder) / ARGUMENTS
    with replacing(file) as beside:
        width = max(map(len, vars(args)))
        lines = (f"{name:{width}}  {value}\n" for name, value in sorted(vars(args).items()))
        beside.write_text("".join(lines))
    print(f"{title}: {file}")
