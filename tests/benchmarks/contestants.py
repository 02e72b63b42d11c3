"""Who runs: each way with the partition that is best for it at a bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import (
    Partition,
    Placement,
    fold,
    interleaved,
    sequential,
)
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import wgrad_bytes
from megatron_pulse.planner.partition.volume import relayed, volume
from megatron_pulse.planner.program.simulate import edges_of, simulate_step
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, boundary_s, stage_problem
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.planner.tune.evaluate import Outcome
from megatron_pulse.planner.tune.fsdp.step import peak_bytes
from tests.benchmarks.contestant import Contestant, Engine
from tests.benchmarks.emulation import Emulation, element_count, setup_of
from tests.benchmarks.predict import CLASSIC, predict
from tests.benchmarks.sharded_best import replicated

SYNTHESIS_EFFORT = 6
"""As the tuner searches, so that a schedule is the same every time."""

SOLVER_S = 5.0

TUNED = "tuned"

LEAST_S = 1e-6


def contestants(
    emulation: Emulation,
    link: Link,
    num_devices: int,
    num_microbatches: int,
    solver_s: float = SOLVER_S,
) -> list[Contestant]:
    """All of them over links like ``link`` (emulated)."""
    plan = Planner(emulation, link, num_devices, num_microbatches, solver_s)
    return [*plan.ours(), *plan.theirs(), *plan.data_parallel()]


def tuned(
    emulation: Emulation,
    link: Link,
    outcome: Outcome,
    entered: Sequence[Contestant],
    way: str = "",
) -> Contestant:
    """What the tuner picked, by the plan's schedule: one of ``entered`` if it is the same, else
    another contestant.

    Data parallel is the one that is entered; the tuner's pipelines are the product's own.
    ``emulation`` is of the picked microbatch, ``way`` says how it is run.
    """
    if outcome.config.pipeline == 1:
        return next(c for c in entered if c.engine is Engine.DATA_PARALLEL)
    partition, problem = outcome.stages.partition, outcome.problem
    count = outcome.config.num_microbatches(outcome.global_batch_size)
    plan = Planner(emulation, link, partition.placement.num_devices, count, 0.0)
    alike = replace(plan.problem(plan.costs, partition, outcome.config.split), cap=problem.cap)
    made = outcome.synthesis
    if made.schedule.recomputed_apart:  # here it is a part of backwards
        made = synthesize(alike, float("inf"), SYNTHESIS_EFFORT)
    found = plan.scheduled(TUNED, partition, alike, made.schedule, made.certificate.solver)
    for c in entered:
        if (c.partition, c.schedule, c.way) == (partition, found.schedule, way):
            return c
    if not way:
        return found
    size, backbone = emulation.micro_batch_size, emulation.backbone
    return replace(found, way=way, micro_batch_size=size, backbone=backbone)


def needed_bytes(contestant: Contestant) -> float:
    """Real bytes that the fullest device needs: what is held at most, and parameters, gradients and
    optimizer."""
    problem, state = contestant.problem, contestant.state_bytes
    if contestant.sharding is not None:
        return max(state) + peak_bytes(contestant.sharding)
    if problem is None:
        return max(state) + sum(contestant.saved_bytes)
    order = contestant.schedule or make_schedule(
        CLASSIC[contestant.engine], problem.placement, contestant.num_microbatches
    )
    held = contestant.peak_memory(order)
    working = contestant.working_bytes or (0.0,) * len(state)
    return max(map(sum, zip(state, held, working, strict=True)))


def balanced_cuts(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Cuts into contiguous parts, none empty, whose largest sum of ``weights`` is least."""
    sums = [0, *accumulate(weights)]
    least: list[list[float]] = [[0.0] + [inf] * len(weights)]
    begins: list[list[int]] = []
    for _ in range(parts):
        row, begin = [inf] * len(sums), [0] * len(sums)
        for end in range(1, len(sums)):
            for start in range(end):
                largest = max(least[-1][start], sums[end] - sums[start])
                if largest < row[end]:
                    row[end], begin[end] = largest, start
        least.append(row)
        begins.append(begin)
    ends = [len(weights)]
    for begin in reversed(begins[1:]):
        ends.append(begin[ends[-1]])
    return (0, *reversed(ends))


class Planner:
    """Contestants of one backbone over one kind of link."""

    def __init__(
        self, emulation: Emulation, link: Link, num_devices: int, count: int, solver_s: float
    ) -> None:
        self.emulation, self.link = emulation, link
        self.num_devices, self.count, self.solver_s = num_devices, count, solver_s
        self.costs = emulation.slow
        self.relayed = relayed(self.costs)

    def ours(self) -> Iterator[Contestant]:
        folded, row = fold(self.num_devices), sequential(self.num_devices)
        seen: list[tuple[int, ...]] = []
        for name, collocate in (("fold exact", True), ("fold soft", False)):
            partition = self.cut(self.costs, folded, collocate)
            if partition is None or partition.cuts in seen:
                continue  # where the best cut breaks no skip, soft is exact
            seen.append(partition.cuts)
            yield self.synthesized(name, partition)
            if self.solver_s:
                yield self.synthesized(f"{name}, ILP", partition, solver=True)
            yield self.synthesized(f"{name}, split", partition, split=True)
        partition = self.cut(self.costs, row)
        assert partition is not None
        order = make_schedule("1f1b", row, self.count)
        problem = self.problem(self.costs, partition, False)
        yield self.scheduled("sequential direct, 1F1B", partition, problem, order)

    def theirs(self) -> Iterator[Contestant]:
        row = self.cut(self.relayed, sequential(self.num_devices))
        loop = self.cut(self.relayed, interleaved(self.num_devices))
        folded = self.cut(self.relayed, fold(self.num_devices))
        assert row is not None and loop is not None and folded is not None
        yield self.relay(Engine.MEGATRON_1F1B, row)
        shapes = (self.relay(Engine.MEGATRON_INTERLEAVED, loop, exchange=e) for e in (False, True))
        yield min(shapes, key=lambda c: c.predicted_s)
        yield self.relay(Engine.TORCH_1F1B, row)
        yield self.relay(Engine.TORCH_INTERLEAVED, loop)
        yield self.relay(Engine.TORCH_ZBV, folded)

    def deepspeed(self) -> Contestant:
        """diffusion-pipe's way: cuts balance trained parameters, as DeepSpeed counts them."""
        placement = sequential(self.num_devices)
        cuts = balanced_cuts(self.costs.trained_parameters, self.num_devices)
        return self.relay(Engine.DEEPSPEED_1F1B, Partition(placement, cuts))

    def data_parallel(self) -> Iterator[Contestant]:
        """Layers as they are; a gradient is as many bytes as the parameter, in half precision."""
        if self.count % self.num_devices:
            return
        costs, divisor = self.emulation.costs, self.emulation.byte_divisor
        layers = tuple(
            (forward, backward, element_count(2 * n, divisor))
            for forward, backward, n in zip(
                self.costs.forward_s, self.costs.backward_s, costs.trained_parameters, strict=True
            )
        )
        state = sum(self.emulation.layer_state(self.num_devices))
        yield replace(
            replicated(layers, self.link, self.num_devices, self.count),
            state_bytes=(state,) * self.num_devices,
            saved_bytes=tuple(map(float, costs.saved_bytes)),
        )

    def cut(
        self, costs: ChainCosts, placement: Placement, collocate: bool = False
    ) -> Partition | None:
        """The best for this way of moving skips."""
        try:
            return find_partition(costs, placement, Goal(collocate=collocate, link=self.link))
        except PartitionError:
            return None

    def synthesized(
        self, name: str, partition: Partition, split: bool = False, solver: bool = False
    ) -> Contestant:
        problem = self.problem(self.costs, partition, split)
        found = (
            solve(problem, self.solver_s)
            if solver
            else synthesize(problem, float("inf"), SYNTHESIS_EFFORT)
        )
        solver_of = found.certificate.solver
        return self.scheduled(name, partition, problem, found.schedule, solver_of)

    def scheduled(
        self,
        name: str,
        partition: Partition,
        problem: ScheduleProblem,
        order: Schedule,
        solver: str = "",
    ) -> Contestant:
        """Ours by this schedule."""
        made = self.make(name, Engine.OURS, self.costs, partition, problem)
        edges = edges_of(self.costs, partition, lambda a, b: self.link)
        predicted_s = simulate_step(problem, order, edges).timeline.makespan
        return replace(made, schedule=order, solver=solver, predicted_s=predicted_s)

    def relay(self, engine: Engine, partition: Partition, exchange: bool = False) -> Contestant:
        """One of the other projects' schedules; skips travel through every stage."""
        problem = self.problem(self.relayed, partition, engine is Engine.TORCH_ZBV)
        name = f"{engine}, shapes sent" if exchange else str(engine)
        made = self.make(name, engine, self.relayed, partition, problem)
        cuts, sizes = partition.cuts, self.relayed.boundary_bytes
        packed = tuple(max(1, sizes[c] // 4) for c in cuts[:-1])
        made = replace(made, packed=packed, exchange=exchange)
        return replace(made, predicted_s=predict(made, self.link))

    def make(
        self,
        name: str,
        engine: Engine,
        costs: ChainCosts,
        partition: Partition,
        problem: ScheduleProblem,
    ) -> Contestant:
        moved = volume(costs, partition).total * self.count
        # torch holds all between input gradient and weight gradient, for it keeps the graph.
        waiting = wgrad_bytes(self.emulation.costs, partition) if engine is Engine.OURS else ()
        return Contestant(
            name,
            engine,
            self.count,
            partition,
            problem,
            expected_bytes=moved,
            saved_bytes=self.saved(partition, passing=costs is self.relayed),
            wgrad_bytes=waiting,
            state_bytes=self.state(partition),
            working_bytes=self.working(partition),
        )

    def working(self, partition: Partition) -> tuple[float, ...]:
        """Real bytes that operations need beside what is held, on each device.

        For adapters alone: other tables were measured with these granted to all but the tuner.
        """
        placement, emulation = partition.placement, self.emulation
        if not setup_of(emulation.name).adapter_of:
            return (0.0,) * self.num_devices
        stages = [partition.layers_of_stage(s) for s in range(placement.num_stages)]
        beside = [emulation.workspace.beside(of.start, of.stop, split=False) for of in stages]
        return tuple(
            max(beside[s] for s in placement.stages_of_device(d)) for d in range(self.num_devices)
        )

    def state(self, partition: Partition) -> tuple[float, ...]:
        """Real bytes of parameters, gradients and optimizer on each device."""
        held, placement = self.emulation.layer_state(), partition.placement
        return tuple(
            sum(
                held[i] for s in placement.stages_of_device(d) for i in partition.layers_of_stage(s)
            )
            for d in range(self.num_devices)
        )

    def saved(self, partition: Partition, passing: bool) -> tuple[float, ...]:
        """Real bytes that each stage keeps of a microbatch.

        Where skips are relayed, those that a stage neither makes nor takes are in the tensor that
        it received, which a schedule keeps until the backward.
        """
        real = self.emulation.costs
        saved = []
        for s in range(partition.placement.num_stages):
            layers = partition.layers_of_stage(s)
            kept = sum(real.saved_bytes[i] for i in layers)
            if passing:
                kept += sum(
                    skip.num_bytes
                    for skip in real.skips
                    if skip.source < layers.start and skip.destination >= layers.stop
                )
            saved.append(float(kept))
        return tuple(saved)

    def problem(self, costs: ChainCosts, partition: Partition, split: bool) -> ScheduleProblem:
        """Emulated seconds of each stage; activations up to what 1F1B holds on the device."""
        placement = partition.placement
        saved = self.saved(partition, passing=False)
        return stage_problem(
            costs,
            partition,
            self.count,
            boundary_s(costs, partition, self.link),
            split=split,
            activation=saved,
            cap=tuple(
                self.num_devices * sum(saved[s] for s in placement.stages_of_device(d))
                for d in range(self.num_devices)
            ),
            least_s=LEAST_S,
        )
