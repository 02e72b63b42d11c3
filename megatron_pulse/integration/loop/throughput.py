"""Throughput log: a line per ``--log-interval``, with the same values in TensorBoard and W&B.

Megatron's own figure (``--log-throughput``) counts the operations of language models. This log
counts the backbone's operations, and compares the measured bubble with the plan's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.loop.stragglers import Stragglers
from megatron_pulse.profile.flops import model_flops
from megatron_pulse.profile.roofline import known_device
from megatron_pulse.runtime.collectives import gather_objects
from megatron_pulse.runtime.measure.recorder import StepTime

_SHOWN_WAITING, _MOST_WAITING = 0.01, 0.1
"""Shares of the time spent on waiting for data from which the log tells it, and warns."""
THROUGHPUT = " throughput: "
"""Begin of the throughput's line in Megatron's log."""


@dataclass(frozen=True)
class ThroughputConstants:
    """Constants from which a run's throughput is computed.

    ``flops_per_sample`` counts the model's forward and backward, and ``peak_flops`` is a device's
    rate per second; None if unknown. ``planned_idle`` is the share of device time idle by the plan.
    """

    flops_per_sample: int | None
    peak_flops: float | None
    planned_idle: float
    num_devices: int


@dataclass(frozen=True)
class TimedStep:
    """Training step on one rank; ``time`` is None if the step was traced instead.

    It waited ``waited_s`` of its ``seconds`` for microbatches.
    """

    num_samples: int
    seconds: float
    time: StepTime | None
    waited_s: float = 0.0


@dataclass(frozen=True)
class Throughput:
    """Throughput over an interval; unknown values are None."""

    samples_per_s: float
    tflops_per_device: float | None
    mfu: float | None
    idle: float | None
    planned_idle: float
    peak_gb: float
    memory: str
    seconds_left: float
    num_corrupt: int = 0
    waiting: float = 0.0
    """Share of the time in which the rank that waits longest for its microbatches does so."""

    def line(self) -> str:
        """Line of the log."""
        return THROUGHPUT + " | ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield f"{self.samples_per_s:.4g} samples/s"
        if self.tflops_per_device is not None:
            yield f"{self.tflops_per_device:.3g} TFLOP/s per device"
        if self.mfu is not None:
            yield f"MFU {100 * self.mfu:.1f} %"
        if self.idle is not None:
            yield f"bubble {100 * self.idle:.1f} % (plan {100 * max(0.0, self.planned_idle):.1f} %)"
        yield f"peak {self.peak_gb:.3g} GB ({self.memory})"
        yield f"{timedelta(seconds=round(self.seconds_left))} left"
        if self.waiting >= _SHOWN_WAITING:
            yield f"waiting for data {100 * self.waiting:.0f} %"
        if self.num_corrupt:
            yield f"corrupt files skipped: {self.num_corrupt}"

    def starved(self, num_workers: int) -> str:
        """Warning of steps that wait for their data, with its remedy; empty if few do."""
        if self.waiting <= _MOST_WAITING:
            return ""
        needed = self.samples_per_s / max(1 - self.waiting, 1e-3)
        return (
            f"warning: steps wait for data {100 * self.waiting:.0f} % of the time: "
            f"{self.samples_per_s:.4g} samples/s are loaded, and {needed:.4g} could be trained on. "
            f"Use more --num-workers (now {num_workers} a rank), faster storage, or latents "
            "('pulse data write-latents')"
        )

    def scalars(self) -> dict[str, float]:
        """Tags and values for TensorBoard and W&B."""
        values = {
            "samples-per-second": self.samples_per_s,
            "tflops-per-device": self.tflops_per_device,
            "mfu": self.mfu,
            "bubble": self.idle,
            "bubble-planned": self.planned_idle,
            "peak-memory-gb": self.peak_gb,
            "seconds-left": self.seconds_left,
            "waiting-for-data": self.waiting,
        }
        if self.num_corrupt:
            values["corrupt-files"] = self.num_corrupt
        return {tag: value for tag, value in values.items() if value is not None}


@dataclass(frozen=True)
class IntervalSums:
    """Sums of an interval on one rank: seconds of steps, computing, schedule and waiting for
    microbatches; peak memory.
    """

    step_s: float
    busy_s: float
    window_s: float
    peak_bytes: float
    num_corrupt: int = 0
    waited_s: float = 0.0


def interval_sums(
    steps: Sequence[TimedStep], peak_bytes: int, num_corrupt: int = 0
) -> IntervalSums:
    """Sums of ``steps``; ``num_corrupt`` counts the run's corrupt files until their end."""
    times = [step.time for step in steps if step.time is not None]
    return IntervalSums(
        sum(step.seconds for step in steps),
        sum(t.busy_s for t in times),
        sum(t.window_s for t in times),
        peak_bytes,
        num_corrupt,
        sum(step.waited_s for step in steps),
    )


def throughput_of(
    work: ThroughputConstants,
    steps: Sequence[TimedStep],
    ranks: Sequence[IntervalSums],
    steps_left: int,
    memory: str,
) -> Throughput:
    """Throughput over ``steps``, in which every rank had the same number of samples.

    All ranks wait for the slowest. Memory is that of the rank with the highest peak.
    """
    seconds = max(rank.step_s for rank in ranks)
    window = max(rank.window_s for rank in ranks)
    speed = sum(step.num_samples for step in steps) / seconds
    tflops = mfu = None
    if work.flops_per_sample is not None:
        per_device = speed * work.flops_per_sample / work.num_devices
        tflops = per_device / 1e12
        mfu = None if work.peak_flops is None else per_device / work.peak_flops
    return Throughput(
        speed,
        tflops,
        mfu,
        1 - sum(rank.busy_s for rank in ranks) / (len(ranks) * window) if window else None,
        work.planned_idle,
        max(rank.peak_bytes for rank in ranks) / 1e9,
        memory,
        steps_left * seconds / len(steps),
        max(rank.num_corrupt for rank in ranks),
        max(rank.waited_s for rank in ranks) / seconds,
    )


def describe_work(
    args: argparse.Namespace, backbone: Backbone, dtype: str, planned_idle: float
) -> ThroughputConstants:
    """Constants of the throughput log; only the last rank, which logs, counts operations.

    Collective: the peak is the mean of all devices.

    ``backbone`` is the whole one. A layer that cannot be counted leaves the operations unknown.
    """
    flops = None
    if args.rank == args.world_size - 1:
        try:
            flops = model_flops(backbone)
        except Exception as error:  # a user's own layer may fail in any way on the meta device
            print(f"the log will have no TFLOP/s: FLOPs cannot be counted ({error})", flush=True)
    device = known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    peaks = gather_objects(None if device is None else device.peak_flops.get(dtype))
    known = [peak for peak in peaks if peak is not None]
    peak = sum(known) / len(known) if len(known) == len(peaks) else None
    return ThroughputConstants(flops, peak, planned_idle, args.world_size)


class ThroughputLog:
    """Timer of training steps, which logs the throughput when Megatron logs.

    ``step_time`` returns the computing time of the last step. ``num_corrupt`` returns the number of
    corrupt files on all ranks (collective), ``waited_s`` the seconds for which this process has
    waited for microbatches so far. ``stragglers`` checks each interval for slow ranks.
    Communication is a few small gathers per interval. The first step of a run opens connections and
    warms up, so it counts only if it is the only one.
    """

    def __init__(
        self,
        work: ThroughputConstants,
        step_time: Callable[[], StepTime | None],
        num_corrupt: Callable[[], int] = lambda: 0,
        stragglers: Stragglers | None = None,
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._waited_s = waited_s
        self._stragglers = stragglers
        self._work = work
        self._step_time = step_time
        self._num_corrupt = num_corrupt
        self._steps: list[TimedStep] = []
        self._warm = False

    def timed(self, train_step: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
        """Wrap ``train_step`` to time it."""

        def step(*given: Any, **named: Any) -> Any:
            count = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            began, waited_s = time.perf_counter(), self._waited_s()
            result = train_step(*given, **named)
            seconds, waited_s = time.perf_counter() - began, self._waited_s() - waited_s
            self._steps.append(TimedStep(count, seconds, self._step_time(), waited_s))
            if self._stragglers is not None:
                self._stragglers.note(self._steps[-1].time)
            return result

        return step

    def logged(
        self, training_log: Callable[..., Any], args: argparse.Namespace
    ) -> Callable[..., Any]:
        """Wrap ``training_log`` to print the throughput before it at every interval's end."""

        def log(
            losses: Any, totals: Any, rate: Any, iteration: int, *rest: Any, **named: Any
        ) -> Any:
            warning = ""
            if iteration % args.log_interval == 0 and self._steps:
                warning = self._say(iteration, max(args.train_iters - iteration, 0), args)
            result = training_log(losses, totals, rate, iteration, *rest, **named)
            if warning:
                print(warning, flush=True)
            return result

        return log

    def _say(self, iteration: int, steps_left: int, args: argparse.Namespace) -> str:
        """Print the interval's throughput; returns the warning of a slow rank, or nothing."""
        steps = self._steps if self._warm or len(self._steps) == 1 else self._steps[1:]
        peak_bytes, memory = peak_memory()
        ranks = gather_objects(interval_sums(steps, peak_bytes, self._num_corrupt()))
        if dist.get_rank() == dist.get_world_size() - 1:
            found = throughput_of(self._work, steps, ranks, steps_left, memory)
            print(found.line(), flush=True)
            if starved := found.starved(args.num_workers):
                print(starved, flush=True)
            if (writer := get_tensorboard_writer()) is not None:
                for tag, value in found.scalars().items():
                    writer.add_scalar(tag, value, iteration)
            if (wandb := get_wandb_writer()) is not None:
                wandb.log(found.scalars(), iteration)
        self._steps, self._warm = [], True
        return "" if self._stragglers is None else self._stragglers.look()


def peak_memory() -> tuple[int, str]:
    """(peak bytes of this process on its GPU, or in RAM without one; kind of memory)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "CUDA"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1]), "RSS"
    return 0, "RSS"
