"""A step of a contestant on this rank: what is called once a repetition."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.contestant import TIMEOUT_S, Contestant, Engine, Groups, Runner


def make_runner(contestant: Contestant, backbone: Any, groups: Groups) -> Runner:
    """The step of ``contestant`` on this rank, with its encoders. Collective."""
    if contestant.engine is Engine.OURS:
        return ours(contestant, contestant.backbone or backbone)
    runner = _others(contestant, groups)
    if contestant.encoders is None:
        return runner
    from tests.benchmarks.sleeping_encoders import before_step

    alone = contestant.engine in (Engine.DATA_PARALLEL, Engine.STREAMED)
    return before_step(runner, contestant.encoders, alone)


def _others(contestant: Contestant, groups: Groups) -> Runner:
    match contestant.engine:
        case Engine.MEGATRON_1F1B | Engine.MEGATRON_INTERLEAVED | Engine.DEEPSPEED_1F1B:
            from tests.benchmarks.relays import megatron

            return megatron(contestant, groups)
        case Engine.DATA_PARALLEL | Engine.STREAMED:
            from tests.benchmarks.data_parallel import data_parallel

            return data_parallel(contestant)
        case Engine.FSDP2 | Engine.HSDP:
            from tests.benchmarks.sharded import sharded

            return sharded(contestant)
        case _:
            from tests.benchmarks.relays import torch_pipelining

            return torch_pipelining(contestant)


def ours(contestant: Contestant, backbone: Any) -> Runner:
    """The product's executor with stages that sleep."""
    from megatron_pulse.backbone.shape_buckets import fields_of
    from megatron_pulse.planner.layout.routes import trace_routes
    from megatron_pulse.planner.program.communication import compile_communication
    from megatron_pulse.planner.program.device_program import compile_program
    from megatron_pulse.runtime.executor import Executor
    from megatron_pulse.runtime.failure_board import default_board
    from megatron_pulse.runtime.p2p.transfers import Links
    from megatron_pulse.runtime.tensor_settings import RunSettings
    from tests.benchmarks.token_sharing import SharingGroups
    from tests.runtime.emulated import EmulatedStage, StageCalls

    partition, schedule, problem = contestant.partition, contestant.schedule, contestant.problem
    assert partition is not None and schedule is not None and problem is not None
    rank, group = dist.get_rank(), dist.group.WORLD
    shared = None if contestant.sharing is None else SharingGroups(contestant.sharing)
    if shared is not None:
        rank, group = dist.get_rank(shared.pipeline), shared.pipeline
    routes = trace_routes(backbone, partition)
    settings = RunSettings(1, torch.float32, torch.device("cpu"), lambda p, batch: p.sum())
    board = default_board()
    links = Links(group, board, TIMEOUT_S)
    communication = compile_communication(routes, schedule, problem)
    links.connect(communication)
    own = partition.placement.stages_of_device(rank)
    exchanged = 0
    if shared is not None:
        exchanged = shared.sharing.passes(contestant.num_microbatches, own)

    def calls(stage: int) -> StageCalls:
        if shared is None:
            return StageCalls()
        every = shared.sharing.forward, shared.sharing.recompute, shared.sharing.backward
        return StageCalls(*(shared.calls(each[stage]) for each in every))

    encoded = None
    if contestant.encoders is not None:
        from tests.benchmarks.sleeping_encoders import Encoded

        encoded = Encoded(contestant.encoders, rank, links, schedule.bubble_tasks)
    executor = Executor(
        backbone,
        routes,
        schedule,
        compile_program(schedule, communication, rank),
        rank,
        {s: EmulatedStage(backbone, routes, s, problem, settings, calls(s)) for s in own},
        links,
        board,
        bubble_tasks=() if encoded is None else encoded.encoding.workloads(schedule),
        carrier=None if encoded is None else encoded.encoding,
    )
    samples = fields_of(backbone)  # there are no other fields
    batch = {name: settings.make_empty(spec).zero_() for name, spec in samples.items()}
    peak = contestant.peak_memory(schedule)[rank]

    def step() -> None:
        if encoded is not None:
            encoded.begin(schedule)
        executor.run(iter([batch] * contestant.num_microbatches), settings)
        if encoded is not None:
            encoded.end()
        if shared is not None:
            shared.sum_gradients(own)
            shared.sent_bytes += exchanged

    def sent() -> int:
        moved = links.traffic
        own_bytes = moved.forward_bytes + moved.gradient_bytes + moved.encoded_bytes
        return own_bytes + (0 if shared is None else shared.sent_bytes)

    return Runner(step, sent, lambda: peak)
