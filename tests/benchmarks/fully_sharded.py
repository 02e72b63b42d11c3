"""torch's ``fully_shard`` itself beside the contestant that has its communication.

    .venv/bin/python -m tests.benchmarks.fully_sharded [--backbone uvit-2.7b] [--rate 10]  # as root

On a CPU it has no streams: what it takes here is no figure of FSDP2 (see ``sharded``). That both
gather and reduce the same in the same order is tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.tune.fsdp.step import Sharding
from megatron_pulse.runtime.parameters.fsdp import ShardedUnits
from tests.benchmarks.cell import compute_s, join_urgently, require_network
from tests.benchmarks.contestant import Contestant, Engine
from tests.benchmarks.data_parallel import SleepingLayer
from tests.benchmarks.emulation import emulate
from tests.benchmarks.network import Node, namespaces, sent_bytes
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import USABLE
from tests.benchmarks.sharded import sharded
from tests.benchmarks.sharded_best import DataParallel, elements
from tests.ranks import run_ranks


@dataclass
class Called:
    """Elements of what was gathered and reduced over a group, and of shards summed over groups."""

    gathered: list[int] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)


def fully_sharded(way: Sharding, called: Called | None = None) -> Callable[[], None]:
    """A step of ``way`` by torch, noting what is ``called``. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )

    shape = (way.num_devices,) if way.replicas == 1 else (way.replicas, way.group)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    layers = [SleepingLayer(u.forward_s, u.backward_s, elements(u)) for u in way.units]
    layout = FsdpLayout.of_size(
        len(layers), 1, group=way.group,
        gathering=way.gathering, reduce_once=way.reduce_once, prefetch=way.prefetch,
    )  # fmt: skip
    model = nn.Sequential(*layers)
    units = ShardedUnits(layout, len(layers), mesh)
    for number, layer in enumerate(layers):
        units.add(str(number), layer)
    units.finish(model)
    if called is not None:
        log = called

        class Gather(DefaultAllGather):  # type: ignore[misc]
            def __call__(self, output_tensor: Any, *rest: Any, **more: Any) -> Any:
                log.gathered.append(output_tensor.numel())
                return super().__call__(output_tensor, *rest, **more)

        class Reduce(DefaultReduceScatter):  # type: ignore[misc]
            def __call__(self, output_tensor: Any, input_tensor: Any, *a: Any, **more: Any) -> Any:
                log.reduced.append(input_tensor.numel())
                return super().__call__(output_tensor, input_tensor, *a, **more)

        for unit in units.units:
            unit.set_custom_all_gather(Gather())
            unit.set_custom_reduce_scatter(Reduce())
            if way.replicas > 1:
                unit.set_all_reduce_hook(lambda shard: log.summed.append(shard.numel()))
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        for microbatch in range(way.count):
            units.set_last(microbatch + 1 == way.count)
            model(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def called_by_torch(way: Sharding) -> Called:
    """On a rank: what a step of torch's calls, the second as every other. Collective."""
    called = Called()
    step = fully_sharded(way, called)
    step()
    for calls in (called.gathered, called.reduced, called.summed):
        calls.clear()
    step()
    return called


def _measure(nodes: list[Node], contestants: list[Contestant]) -> list[tuple[float, int]]:
    """On a rank: seconds and bytes sent of torch's and of our step of each, in turn."""
    join_urgently(nodes)
    found = []
    for contestant in contestants:
        assert contestant.sharding is not None
        for step in (fully_sharded(contestant.sharding), sharded(contestant).step):
            step()
            dist.barrier()
            sent = sent_bytes()
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            found.append((time.perf_counter() - start, sent_bytes() - sent))
    return found


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--backbone", "uvit-2.7b")
    flags.add("--rate", 10.0, "GB/s of a real V100's link")
    flags.add("--memory-gb", 32.0)
    args = flags.parse_args()
    require_network()
    emulation, ranks, report = emulate(args.backbone), 4, Report(args.json)
    samples = 2 * ranks * emulation.micro_batch_size
    given = emulation.link(args.rate * 1e9), ranks, samples, USABLE * 1e9 * args.memory_gb
    entered = [c for c in DataParallel(emulation, *given).offers()[0] if c.engine is Engine.FSDP2]
    with namespaces(ranks, emulation.rate_mbit(args.rate * 1e9)) as nodes:
        measured = run_ranks(ranks, _measure, nodes, entered)
    for at, contestant in enumerate(entered):
        for who, column in (("torch's fully_shard", 2 * at), ("the contestant", 2 * at + 1)):
            row = {"way": contestant.way, "computing s": compute_s(contestant) / ranks, "who": who}
            row["step s"] = max(rank[column][0] for rank in measured)
            row["MB sent"] = sum(rank[column][1] for rank in measured) / 1e6
            report.add(row)


if __name__ == "__main__":
    main()
