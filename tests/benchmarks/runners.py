"""A step of a contestant on this rank: what is called once a repetition."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.contestant import TIMEOUT_S, Contestant, Engine, Groups, Runner


def make_runner(contestant: Contestant, backbone: Any, groups: Groups) -> Runner:
    """The step of ``contestant`` on this rank. Collective."""
    match contestant.engine:
        case Engine.OURS:
            return ours(contestant, backbone)
        case Engine.MEGATRON_1F1B | Engine.MEGATRON_INTERLEAVED:
            from tests.benchmarks.relays import megatron

            return megatron(contestant, groups)
        case Engine.DATA_PARALLEL:
            from tests.benchmarks.data_parallel import data_parallel

            return data_parallel(contestant)
        case _:
            from tests.benchmarks.relays import torch_pipelining

            return torch_pipelining(contestant)


def ours(contestant: Contestant, backbone: Any) -> Runner:
    """The product's executor with stages that sleep."""
    from megatron_pulse.planner.layout.routes import trace_routes
    from megatron_pulse.planner.schedule.check.validate import peak_activations
    from megatron_pulse.planner.step.communication import compile_communication
    from megatron_pulse.planner.step.program import compile_program
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.failures import default_board
    from megatron_pulse.runtime.links import Links
    from megatron_pulse.runtime.settings import RunSettings
    from tests.runtime.emulated import EmulatedStage

    partition, schedule, problem = contestant.partition, contestant.schedule, contestant.problem
    assert partition is not None and schedule is not None and problem is not None
    rank, group = dist.get_rank(), dist.group.WORLD
    routes = trace_routes(backbone, partition)
    settings = RunSettings(1, torch.float32, torch.device("cpu"), lambda p, batch: p.sum())
    board = default_board()
    links = Links(group, board, TIMEOUT_S)
    own = partition.placement.stages_of_device(rank)
    executor = Executor(
        backbone,
        routes,
        schedule,
        compile_program(schedule, compile_communication(routes, schedule), rank),
        rank,
        {s: EmulatedStage(backbone, routes, s, problem, settings) for s in own},
        links,
        board,
    )
    batch = {"noisy": settings.make_empty(backbone.input_spec).zero_()}
    peak = peak_activations(schedule, contestant.saved_bytes)[rank]

    def step() -> None:
        executor.run(iter([batch] * contestant.num_microbatches), settings)

    def sent() -> int:
        return links.traffic.forward_bytes + links.traffic.gradient_bytes

    return Runner(step, sent, lambda: peak)
