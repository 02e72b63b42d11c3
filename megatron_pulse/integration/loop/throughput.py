"""How fast a run is: a line per ``--log-interval``, the same in TensorBoard and W&B.

Megatron's own figure (``--log-throughput``) counts the operations of language models. Ours counts
the backbone's, and says how much of the devices' time is idle beside what the plan expects.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.integration.loop.stragglers import Stragglers
from megatron_pulse.profile.devices import known_device
from megatron_pulse.profile.flops import model_flops
from megatron_pulse.runtime.measure.busy import StepTime


@dataclass(frozen=True)
class WorkOfStep:
    """What a run's speed is measured by.

    ``flops_per_sample`` of the model's forward and backward, and ``peak_flops`` of a device per
    second; None where it is not known. ``planned_idle`` is the share of device time that the plan
    leaves idle. ``num_replicas`` of the model see data of their own.
    """

    flops_per_sample: int | None
    peak_flops: float | None
    planned_idle: float
    num_devices: int
    num_replicas: int = 1


@dataclass(frozen=True)
class TimedStep:
    """One training step on one rank; ``time`` is None where the step was traced instead."""

    num_samples: int
    seconds: float
    time: StepTime | None


@dataclass(frozen=True)
class Figures:
    """Speed over an interval; None is what is not known."""

    samples_per_s: float
    tflops_per_device: float | None
    mfu: float | None
    idle: float | None
    planned_idle: float
    peak_gb: float
    memory: str
    seconds_left: float
    num_corrupt: int = 0

    def line(self) -> str:
        """For people."""
        return " | ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield f" throughput: {self.samples_per_s:.4g} samples/s"
        if self.tflops_per_device is not None:
            yield f"{self.tflops_per_device:.3g} TFLOP/s per device"
        if self.mfu is not None:
            yield f"MFU {100 * self.mfu:.1f} %"
        if self.idle is not None:
            yield f"bubble {100 * self.idle:.1f} % (plan {100 * max(0.0, self.planned_idle):.1f} %)"
        yield f"peak {self.peak_gb:.3g} GB ({self.memory})"
        yield f"{timedelta(seconds=round(self.seconds_left))} left"
        if self.num_corrupt:
            yield f"corrupt files passed over: {self.num_corrupt}"

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and W&B: tags and values."""
        values = {
            "samples-per-second": self.samples_per_s,
            "tflops-per-device": self.tflops_per_device,
            "mfu": self.mfu,
            "bubble": self.idle,
            "bubble-planned": self.planned_idle,
            "peak-memory-gb": self.peak_gb,
            "seconds-left": self.seconds_left,
        }
        if self.num_corrupt:
            values["corrupt-files"] = self.num_corrupt
        return {tag: value for tag, value in values.items() if value is not None}


@dataclass(frozen=True)
class Sums:
    """An interval on one rank: seconds of its steps, of computing and of the schedule; memory."""

    step_s: float
    busy_s: float
    window_s: float
    peak_bytes: float
    num_corrupt: float = 0


def sum_up(steps: Sequence[TimedStep], peak_bytes: int, num_corrupt: int = 0) -> Sums:
    """The interval that ``steps`` were; ``num_corrupt`` is of the run until its end."""
    times = [step.time for step in steps if step.time is not None]
    return Sums(
        sum(step.seconds for step in steps),
        sum(t.busy_s for t in times),
        sum(t.window_s for t in times),
        peak_bytes,
        num_corrupt,
    )


def figures(
    work: WorkOfStep,
    steps: Sequence[TimedStep],
    ranks: Sequence[Sums],
    steps_left: int,
    memory: str,
) -> Figures:
    """What ``steps``, of which every rank had as many samples, say of the run.

    All wait for the slowest rank; memory is of the rank that took most.
    """
    seconds = max(rank.step_s for rank in ranks)
    window = max(rank.window_s for rank in ranks)
    speed = sum(step.num_samples for step in steps) / seconds
    tflops = mfu = None
    if work.flops_per_sample is not None:
        per_device = speed * work.flops_per_sample / work.num_devices
        tflops = per_device / 1e12
        mfu = None if work.peak_flops is None else per_device / work.peak_flops
    return Figures(
        speed,
        tflops,
        mfu,
        1 - sum(rank.busy_s for rank in ranks) / (len(ranks) * window) if window else None,
        work.planned_idle,
        max(rank.peak_bytes for rank in ranks) / 1e9,
        memory,
        steps_left * seconds / len(steps),
        round(max(rank.num_corrupt for rank in ranks)),
    )


def describe_work(
    args: argparse.Namespace, backbone: Backbone, dtype: str, planned_idle: float
) -> WorkOfStep:
    """What the last rank, which logs, needs to know of the run; it alone counts operations.

    ``backbone`` is the whole one. A layer that cannot be counted leaves that unknown.
    """
    flops = None
    if args.rank == args.world_size - 1:
        try:
            flops = model_flops(backbone)
        except Exception as error:  # whatever a layer of one's own does on the meta device
            print(f"no TFLOP/s in the log: operations cannot be counted ({error})", flush=True)
    device = known_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    peak = None if device is None else device.peak_flops.get(dtype)
    return WorkOfStep(flops, peak, planned_idle, args.world_size, args.data_parallel_size)


class ThroughputLog:
    """Times training steps and says how fast they were where Megatron logs.

    ``step_time`` gives the computing time of the step that was made last, ``num_corrupt`` how many
    corrupt files all ranks have met (collective); ``stragglers`` looks at each interval for slow
    ranks. A few small gathers per interval are all that it sends. The first step of a run, which
    opens connections and warms up, counts only where it is alone.
    """

    def __init__(
        self,
        work: WorkOfStep,
        step_time: Callable[[], StepTime | None],
        num_corrupt: Callable[[], int] = lambda: 0,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._stragglers = stragglers
        self._work = work
        self._step_time = step_time
        self._num_corrupt = num_corrupt
        self._steps: list[TimedStep] = []
        self._warm = False

    def timed(self, train_step: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
        """``train_step``, timed."""

        def step(*given: Any, **named: Any) -> Any:
            count = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            began = time.perf_counter()
            result = train_step(*given, **named)
            self._steps.append(TimedStep(count, time.perf_counter() - began, self._step_time()))
            if self._stragglers is not None:
                self._stragglers.note(self._steps[-1].time)
            return result

        return step

    def logged(
        self, training_log: Callable[..., Any], args: argparse.Namespace
    ) -> Callable[..., Any]:
        """``training_log``, followed by our line at every interval's end."""

        def log(
            losses: Any, totals: Any, rate: Any, iteration: int, *rest: Any, **named: Any
        ) -> Any:
            result = training_log(losses, totals, rate, iteration, *rest, **named)
            if iteration % args.log_interval == 0 and self._steps:
                self._say(iteration, max(args.train_iters - iteration, 0))
            return result

        return log

    def _say(self, iteration: int, steps_left: int) -> None:
        steps = self._steps if self._warm or len(self._steps) == 1 else self._steps[1:]
        peak_bytes, memory = peak_memory()
        ranks = _gather(sum_up(steps, peak_bytes, self._num_corrupt()))
        if dist.get_rank() == dist.get_world_size() - 1:
            found = figures(self._work, steps, ranks, steps_left, memory)
            print(found.line(), flush=True)
            if (writer := get_tensorboard_writer()) is not None:
                for tag, value in found.scalars().items():
                    writer.add_scalar(tag, value, iteration)
            if (wandb := get_wandb_writer()) is not None:
                wandb.log(found.scalars(), iteration)
        self._steps, self._warm = [], True
        if self._stragglers is not None and (warning := self._stragglers.look()):
            print(warning, flush=True)


def _gather(own: Sums) -> list[Sums]:
    """Those of all ranks (collective)."""
    return [Sums(*numbers) for numbers in gather_numbers(*astuple(own))]


def gather_numbers(*own: float) -> list[list[float]]:
    """The numbers of all ranks (collective)."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [tensor.tolist() for tensor in every]


def peak_memory() -> tuple[int, str]:
    """The most bytes that this process has had on its GPU, or in RAM without one; and which."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "CUDA"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1]), "RSS"
    return 0, "RSS"
