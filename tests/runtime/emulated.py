"""Real ranks, real messages, emulated computing: a schedule is tried without a model or a GPU.

Every operation sleeps for its duration while tensors of the real shapes travel, so several ranks
can share a core, and what differs from the simulated timeline is due to the runtime and the links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.planner.layout.routes import Routes
from megatron_pulse.planner.program.communication import compile_communication
from megatron_pulse.planner.program.device_program import compile_program
from megatron_pulse.planner.schedule.operations import BubbleTask, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.trace.trace import Trace
from megatron_pulse.runtime.activations.offload import ActivationOffload
from megatron_pulse.runtime.activations.recompute import RecomputedLayer
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.failure_board import default_board
from megatron_pulse.runtime.measure.tracer import TracedRun, Tracer
from megatron_pulse.runtime.p2p.transfers import Links
from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore
from megatron_pulse.runtime.protocols import SliceFunction
from megatron_pulse.runtime.tensor_settings import RunSettings

_WAKE_UP_S = 60e-6
"""How late a sleeper usually wakes up on Linux (its timer slack)."""


def sleep_until(deadline_s: float) -> None:
    """Sleep until ``time.perf_counter()`` is about ``deadline_s``, without burning the core."""
    while (left := deadline_s - time.perf_counter()) > _WAKE_UP_S:
        time.sleep(left - _WAKE_UP_S)


def sleep_between(begin_s: float, seconds: float, calls: Sequence[Callable[[], None]]) -> float:
    """Make ``calls`` with equal parts of ``seconds`` before each; returns the time after."""
    clock = begin_s
    for call in calls:
        sleep_until(clock + seconds / len(calls))
        call()
        clock = time.perf_counter()
    return clock if calls else clock + seconds


@dataclass(frozen=True)
class StageCalls:
    """What a stage calls within a forward, a recomputation and a backward: exchanges of tokens."""

    forward: Sequence[Callable[[], None]] = ()
    recompute: Sequence[Callable[[], None]] = ()
    backward: Sequence[Callable[[], None]] = ()


class EmulatedStage(nn.Module):
    """Stage ``stage`` of ``routes``: its operations take the seconds of ``problem``.

    In the place of a Stage: outputs have the right shapes and no meaningful values. In a schedule
    that does not split backwards, one takes ``problem``'s input and weight gradient together.
    ``calls`` are made between parts of that time.
    """

    def __init__(
        self,
        backbone: Backbone,
        routes: Routes,
        stage: int,
        problem: ScheduleProblem,
        settings: RunSettings,
        calls: StageCalls = StageCalls(),
    ) -> None:
        super().__init__()
        self._settings, self.calls = settings, calls
        end = backbone.layers[routes.partition.cuts[stage + 1] - 1]
        last = routes.partition.placement.after[stage] is None
        self._outputs = end.outputs if last else routes.boundaries[stage + 1]
        self._skips = {r.name: r.spec for r in routes.skips_out_of(stage)}
        self._provides = {c.name: c.spec for c in routes.conditioning_out_of(stage)}
        self._taken = [c.name for c in routes.conditioning_into(stage)]
        self.forward_s = problem.forward[stage]
        self.backward_s = problem.backward[stage]
        self.weight_grad_s = problem.weight_grad[stage] if problem.weight_grad else 0.0
        self.recompute_s = problem.recompute_s[stage] if problem.recompute_s else 0.0
        self.weight = nn.Parameter(torch.zeros(1, device=settings.device))
        self.offloaded = ()

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        skips: Mapping[str, Tensor],
        conditioning: Mapping[str, Tensor],
        wgrad_store: WeightGradStore | None = None,
        shape_index: int = 0,
        recomputed: list[RecomputedLayer] | None = None,
        offload: ActivationOffload | None = None,
        position: int | None = None,
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor], dict[str, Tensor]]:
        """See Stage.forward."""
        crossing = (*inputs, *skips.values(), *(conditioning[name] for name in self._taken))
        redone = EmulatedAgain(self.recompute_s, self.calls.recompute)
        results = list(_Emulated.apply(self, wgrad_store, redone, self.weight, *crossing))
        if recomputed is not None:
            recomputed.append(redone)
        outputs = tuple(results.pop(0) for _ in self._outputs)
        skips_out = {name: results.pop(0) for name in self._skips}
        return outputs, skips_out, {name: results.pop(0) for name in self._provides}

    def make_results(self) -> tuple[Tensor, ...]:
        """Results of the forward, in order."""
        made = [self._settings.make_empty(s) for s in (*self._outputs, *self._skips.values())]
        return (*made, *(self._settings.make_empty(s).double() for s in self._provides.values()))


class EmulatedAgain(RecomputedLayer):
    """Takes ``seconds`` of the backward, if that has not begun."""

    def __init__(self, seconds: float, calls: Sequence[Callable[[], None]] = ()) -> None:
        self.left_s, self.calls = seconds, calls

    def compute(self) -> None:
        """Sleep for what is left."""
        sleep_until(sleep_between(time.perf_counter(), self.left_s, self.calls))
        self.left_s, self.calls = 0.0, ()


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stage: EmulatedStage,
        wgrad_store: WeightGradStore | None,
        recomputed: EmulatedAgain,
        weight: Tensor,
        *crossing: Tensor,
    ) -> tuple[Tensor, ...]:
        began = time.perf_counter()
        ctx.stage, ctx.wgrad_store, ctx.recomputed = stage, wgrad_store, recomputed
        ctx.like = [(t.shape, t.dtype, t.device) for t in crossing]
        ctx.set_materialize_grads(False)
        results = stage.make_results()
        sleep_until(sleep_between(began, stage.forward_s, stage.calls.forward))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        began, stage = time.perf_counter(), ctx.stage
        backward_s = stage.backward_s - (stage.recompute_s - ctx.recomputed.left_s)
        weight: nn.Parameter = stage.weight
        found = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted else None
            for (shape, dtype, device), wanted in zip(
                ctx.like, ctx.needs_input_grad[4:], strict=True
            )
        ]
        calls = *ctx.recomputed.calls, *stage.calls.backward
        if ctx.wgrad_store is not None:

            def weight_gradient() -> tuple[Tensor, ...]:
                sleep_until(time.perf_counter() + stage.weight_grad_s)
                return (torch.zeros_like(weight),)

            ctx.wgrad_store.add((weight,), weight_gradient)
            sleep_until(sleep_between(began, backward_s, calls))
            return (None, None, None, None, *found)
        sleep_until(sleep_between(began, backward_s + stage.weight_grad_s, calls))
        return (None, None, None, torch.zeros_like(weight), *found)


def emulated_bubble_task(task: BubbleTask) -> SliceFunction:
    """A workload whose slices take ``task``'s seconds."""
    return lambda number: sleep_until(time.perf_counter() + task.slice_seconds[number])


def run_emulated(
    backbone: Backbone,
    routes: Routes,
    schedule: Schedule,
    problem: ScheduleProblem,
    group: dist.ProcessGroup | None,
    *,
    micro_batch_size: int = 1,
    num_steps: int = 3,
    timeout_s: float = 60.0,
) -> Trace:
    """Run ``schedule`` with ``problem``'s times, in seconds, on the ranks of ``group`` (None: 1).

    Traces ``num_steps`` steps after one that warms up; all ranks begin each together. Collective.
    """
    device = group.rank() if group is not None else 0
    settings = RunSettings(micro_batch_size, torch.float32, torch.device("cpu"), _total)
    communication = compile_communication(routes, schedule, problem)
    own = routes.partition.placement.stages_of_device(device)
    links = board = None
    if group is not None:
        board = default_board()
        links = Links(group, board, timeout_s)
        links.connect(communication)
    executor = Executor(
        backbone,
        routes,
        schedule,
        compile_program(schedule, communication, device),
        device,
        {s: EmulatedStage(backbone, routes, s, problem, settings) for s in own},
        links,
        board,
        bubble_tasks=[emulated_bubble_task(task) for task in schedule.bubble_tasks],
    )
    size = group.size() if group is not None else 1
    traced = TracedRun("emulated", backbone.record, schedule, {"size": size, "pipeline": size})
    tracer = Tracer(range(2, num_steps + 2), traced, group, settings.device, timeout_s)
    for _ in range(num_steps + 1):
        if group is not None:
            dist.barrier(group)
        recorder = tracer.begin(links)
        executor.run(_batches(backbone, settings), settings, recorder=recorder)
        if recorder is not None:
            tracer.end(recorder)
    return tracer.collect()


def _batches(backbone: Backbone, settings: RunSettings) -> Iterator[dict[str, Tensor]]:
    def zeros(spec: TensorSpec) -> Tensor:
        return settings.make_empty(spec).zero_()

    fields = {name: zeros(spec) for name, spec in backbone.batch_fields.items()}
    while True:
        yield {"noisy": zeros(backbone.input_spec), **fields}


def _total(prediction: Tensor, batch: Any) -> Tensor:
    return prediction.sum()
