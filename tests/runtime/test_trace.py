"""Traces of real steps: every event on one clock, and clocks compared by messages."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_pulse.planner.layout.placement import Partition, fold
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.schedule.operations import OpType
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.trace.trace import Trace, load_trace, save_trace
from megatron_pulse.runtime.measure.shared_clock import SharedClock, compare_clocks, share_clock
from megatron_pulse.runtime.measure.tracer import TracedRun, Tracer
from tests.planner.schedules import wave
from tests.plans import small_plan
from tests.ranks import run_ranks
from tests.toys import TOKENS, nested, toy_backbone

P, M, BATCH = 2, 3, 2


def trace_fold() -> Trace:
    from tests.runtime.emulated import run_emulated

    dist.init_process_group("gloo")
    placement = fold(P)
    num = placement.num_stages
    backbone = toy_backbone(num - 2, nested(num - 2, 1), conditioned=(0,), embedder=True)
    problem = ScheduleProblem(placement, M, (0.002,) * num, (0.004,) * num)
    return run_emulated(
        backbone,
        trace_routes(backbone, Partition(placement, tuple(range(num + 1)))),
        wave(placement, M),
        problem,
        dist.group.WORLD,
        micro_batch_size=BATCH,
        num_steps=2,
    )


def test_a_trace_of_real_steps(tmp_path: Path) -> None:
    trace, other = run_ranks(P, trace_fold)
    assert trace == other and not trace.faults()
    assert [step.step for step in trace.steps] == [2, 3]
    assert trace.clock == "one machine" and trace.clock_accuracy_s < 1e-6
    tokens, side, embedding = (n * BATCH * 4 for n in (TOKENS.numel_per_sample, 3, 2))
    for step in trace.steps:
        ends = {t.operation: t.end_s for t in step.operations}
        starts = {t.operation: t.start_s for t in step.operations}
        assert len(starts) == 2 * 2 * P * M and min(starts.values()) == 0
        for wait in step.waits:
            # What is waited for is produced before, and taken after, on the same clock.
            assert ends[wait.message.producer] < wait.end_s <= starts[wait.message.consumer]
        # Tokens and the embedding into stage 1, tokens and side into stage 3, gradients back but
        # of the tokens that stage 0 only passes on.
        assert len(step.waits) == (4 + 3) * M
        first = M * (tokens + embedding + (tokens + side))
        second = M * (tokens + side + 2 * embedding)  # its gradient is in fp64
        assert [t.sent_bytes for t in step.traffic] == [first, second]
        assert [t.received_bytes for t in step.traffic] == [second, first]
        assert [t.num_messages for t in step.traffic] == [4 * M, 3 * M]
        took = [ends[op] - starts[op] for op in starts if op.kind is OpType.FORWARD]
        assert min(took) >= 0.0019
    file = tmp_path / "trace.json"
    save_trace(trace, file)
    assert load_trace(file) == trace


def test_steps_that_do_not_come_are_told_of(tmp_path: Path) -> None:
    traced = TracedRun("digest", {}, small_plan("fold", True, 2).schedule, {})
    for first, count, missed in ((2, 2, False), (3, 2, True)):
        tracer = Tracer(range(first, 9), traced, None, torch.device("cpu"), 30.0, tmp_path)
        for _ in range(count):
            if (recorder := tracer.begin(None)) is not None:
                tracer.end(recorder)
        assert bool(tracer.missed) is missed
    tracer.close()
    assert not list(tmp_path.iterdir())
    assert "the run made 2 step(s); steps 3 to 8" in tracer.missed


def compare_skewed(skew_s: float) -> tuple[SharedClock, SharedClock, SharedClock]:
    dist.init_process_group("gloo")
    device, late = torch.device("cpu"), dist.get_rank() * skew_s
    skewed = compare_clocks(dist.group.WORLD, device, 30.0, lambda: time.perf_counter() + late)
    return skewed, share_clock(dist.group.WORLD, device, 30.0), share_clock(None, device, 30.0)


def test_clocks_are_compared_by_messages() -> None:
    skew_s = 5.0
    for rank, (skewed, shared, alone) in enumerate(run_ranks(3, compare_skewed, skew_s)):
        assert 0 < skewed.accuracy_s < skew_s / 10
        assert abs(skewed.offset_s + rank * skew_s) <= skewed.accuracy_s
        assert shared.method == "one machine" and shared.offset_s == 0
        assert alone == SharedClock(0.0, 0.0, "one process")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_timed_by_its_own_events() -> None:
    from megatron_pulse.planner.program.device_program import Run
    from megatron_pulse.planner.schedule.operations import Operation
    from megatron_pulse.runtime.measure.recorder import StepRecorder

    device = torch.device("cuda", 0)
    large = torch.randn(4096, 4096, device=device)
    large @ large
    recorder = StepRecorder(0, device)
    host = time.perf_counter()
    for m in range(4):
        recorder.begin(Run(Operation(OpType.FORWARD, 0, m)))
        for _ in range(10):
            large @ large
        recorder.end(Run(Operation(OpType.FORWARD, 0, m)))
    host = time.perf_counter() - host
    step = recorder.finish()
    took = [op.end_s - op.start_s for op in step.operations]
    assert sum(took) > 2 * host  # the host only enqueued
    for before, after in itertools.pairwise(step.operations):
        assert after.start_s >= before.end_s - 1e-6
