"""What the machinery itself costs: planning and simulating by P and M, and running an operation.

    .venv/bin/python -m tests.benchmarks.micro [--json FILE]

Planning: CPU milliseconds for hunyuan-dit-3b (118 units, 18 skips) on a fold. An operation: a step
of two ranks whose operations take no time, over all its operations on a rank, transfers included;
Megatron's 1F1B and torch's on the same stages beside ours. CPU time of the host is that of the
threads that run steps, on both ranks. A split backward: CPU microseconds of a small layer's
forward, input gradient and weight gradient above its forward and whole backward. Needs no
namespaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.planner.partition.find import Goal, find_partition
from megatron_pulse.planner.program.communication import compile_communication
from megatron_pulse.planner.program.device_program import compile_program
from megatron_pulse.planner.program.simulate import edges_of, simulate_step
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.problem import stage_problem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.benchmarks.contestant import Contestant, Engine, Groups
from tests.benchmarks.contestants import SYNTHESIS_EFFORT, contestants
from tests.benchmarks.emulation import Emulation, emulate
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.runners import make_runner
from tests.ranks import run_ranks

SHAPES = ((2, 8), (4, 8), (4, 16), (4, 32), (8, 16), (8, 32), (16, 32), (16, 64))
LINK = Link(1e-5, 10e9)
COUNT = 32


@dataclass(frozen=True)
class Planning:
    """CPU milliseconds to plan a step of M microbatches over P devices."""

    devices: int
    microbatches: int
    partition: float
    synthesize: float
    simulate: float
    simulate_step: float
    compile: float


def planning(emulation: Emulation, devices: int, count: int) -> Planning:
    """Each once; synthesis as the tuner does it."""
    costs, placement = emulation.costs, fold(devices)

    def timed(function: Callable[[], Any]) -> tuple[Any, float]:
        began = time.process_time()
        result = function()
        return result, 1e3 * (time.process_time() - began)

    cut, partition_ms = timed(lambda: find_partition(costs, placement, Goal(link=LINK)))
    problem = stage_problem(costs, cut, count, cap=(2.0 * devices,) * devices)
    found, synthesize_ms = timed(lambda: synthesize(problem, float("inf"), SYNTHESIS_EFFORT))
    schedule = found.schedule
    _, simulate_ms = timed(lambda: simulate(problem, schedule))
    edges = edges_of(costs, cut, lambda a, b: LINK)
    _, replay_ms = timed(lambda: simulate_step(problem, schedule, edges))
    routes = trace_routes(emulation.backbone, cut)

    def compile_step() -> None:
        communication = compile_communication(routes, schedule, problem)
        for device in range(devices):
            compile_program(schedule, communication, device)

    _, compile_ms = timed(compile_step)
    return Planning(devices, count, partition_ms, synthesize_ms, simulate_ms, replay_ms, compile_ms)


@dataclass(frozen=True)
class Overhead:
    """Microseconds of an operation that itself takes none, over Megatron's in the same repetition;
    CPU time of the thread that runs it, the mean of both ranks, and over Megatron's."""

    contestant: str
    operation_us: float
    of_megatron: float
    host_us: float
    host_of_megatron: float


def overheads(repetitions: int = 20) -> list[Overhead]:
    """Two ranks, one stage on each, a backbone without skips."""
    emulation = emulate("dit-xl-2", 1e-4)
    engines = (Engine.OURS, Engine.MEGATRON_1F1B, Engine.TORCH_1F1B)
    entered = [
        c
        for c in contestants(emulation, Link(), 2, COUNT, solver_s=0.0)
        if c.engine in engines and "fold" not in c.name
    ]
    ranks = run_ranks(2, _time_steps, emulation.backbone, entered, repetitions, timeout_s=300)
    steps = [[whole for whole, _ in own] for own in ranks[0]]
    hosts = [
        [(a + b) / 2 for (_, a), (_, b) in zip(*both, strict=True)]
        for both in zip(*ranks, strict=True)
    ]
    megatron = next(i for i, c in enumerate(entered) if c.engine is Engine.MEGATRON_1F1B)

    def each(times: Sequence[float]) -> float:
        return 1e6 * median(times) / (2 * COUNT)

    def over(times: Sequence[float], theirs: Sequence[float]) -> float:
        return median(a / b for a, b in zip(times, theirs, strict=True))

    return [
        Overhead(c.name, each(own), over(own, steps[megatron]), each(h), over(h, hosts[megatron]))
        for c, own, h in zip(entered, steps, hosts, strict=True)
    ]


@dataclass(frozen=True)
class Splitting:
    """CPU microseconds of a layer: whole, and what leaving its weight gradient adds."""

    layer: str
    whole_us: float
    added_us: float


def splitting(number: int = 20, repetitions: int = 50) -> list[Splitting]:
    """Layers so small that calling them is what takes time; the least of several measurements."""
    import torch
    from torch import Tensor, nn

    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
    from megatron_pulse.runtime.parameters.split_backward import deferring
    from megatron_pulse.runtime.parameters.wgrad_queue import WeightGradStore

    torch.set_num_threads(1)
    defer_wgrad()
    from megatron.core.tensor_parallel import layers as megatron

    def fused(weight: nn.Parameter, bias: nn.Parameter) -> Callable[[Tensor], Tensor]:
        product = megatron.linear_with_grad_accumulation_and_async_allreduce
        return lambda x: product(x, weight, bias, False, False, False)

    linears = [nn.Linear(8, 8) for _ in range(number)]
    kinds: dict[str, tuple[list[Callable[[Tensor], Tensor]], Tensor]] = {
        "linear": (list(linears), torch.randn(4, 2, 8)),
        "Megatron's linear": ([fused(a.weight, a.bias) for a in linears], torch.randn(4, 2, 8)),
        "convolution": (
            [nn.Conv2d(4, 4, 3, padding=1) for _ in range(number)],
            torch.randn(1, 4, 4, 4),
        ),
    }

    def microseconds(calls: list[Callable[[Tensor], Tensor]], given: Tensor, split: bool) -> float:
        began = time.process_time()
        for _ in range(repetitions):
            wgrad_store = WeightGradStore() if split else None
            result = given
            with deferring(wgrad_store):
                for call in calls:
                    result = call(result)
            torch.autograd.backward(result, torch.ones_like(result))
            if wgrad_store is not None:
                wgrad_store.compute()
        return 1e6 * (time.process_time() - began) / repetitions / number

    found = []
    for name, (calls, given) in kinds.items():
        given.requires_grad_()
        whole, split = (
            min(microseconds(calls, given, way) for _ in range(7)) for way in (False, True)
        )
        found.append(Splitting(name, whole, split - whole))
    return found


def _time_steps(
    backbone: Any, entered: list[Contestant], repetitions: int
) -> list[list[tuple[float, float]]]:
    """On a rank: of each contestant, in turn, seconds of a step and CPU seconds of its thread."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    groups = Groups.join()
    runners = [make_runner(c, backbone, groups) for c in entered]
    taken: list[list[tuple[float, float]]] = [[] for _ in runners]
    for _ in range(-2, repetitions):
        for runner, found in zip(runners, taken, strict=True):
            dist.barrier()
            began, cpu = time.perf_counter(), time.thread_time()
            runner.step()
            host = time.thread_time() - cpu
            dist.barrier()
            found.append((time.perf_counter() - began, host))
    return [found[2:] for found in taken]


def main() -> None:
    """Measure and print."""
    args = Flags(__doc__).parse_args()
    report, emulation = Report(args.json), emulate("hunyuan-dit-3b")
    for devices, number in SHAPES:
        report.add(planning(emulation, devices, number))
    print(f"\nAn operation that takes no time, 2 ranks, {COUNT} microbatches")
    for row in (*overheads(), *splitting()):
        report.add(row)


if __name__ == "__main__":
    main()
