"""What a config's stages are: their costs under tensor parallelism, their cuts, their memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from operator import add

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import bytes_per_parameter, in_flight
from megatron_pulse.planner.schedule.problem import ScheduleProblem, stage_problem
from megatron_pulse.planner.step.replay import Edge, edges_of, lags
from megatron_pulse.planner.tune.collectives import (
    Collective,
    backward_sums,
    collective_s,
    forward_sums,
)
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.ranks import Ranks
from megatron_pulse.profile.profile import Profile


class Unfit(StrEnum):
    """Why a config cannot run, or need not be looked at."""

    STATE = "weights, gradients and optimizer state do not fit"
    ACTIVATIONS = "activations do not fit"
    PARTITION = "no legal partition"
    SHARDS = "tensor parallelism divides nothing, or not evenly"
    SLOWER = "slower than those listed, by its lower bound"
    SAME = "comes to the same as one listed"


class UnfitError(ValueError):
    """A config that cannot run."""

    def __init__(self, reason: Unfit, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Stages:
    """A config's stages; per stage what it keeps of a microbatch, and its parameters on a rank.

    Per device: ``held`` parameters, their bytes with gradients and optimizer as ``state_bytes``,
    and ``transient_bytes`` while an operation runs and messages travel.
    """

    partition: Partition
    costs: ChainCosts
    edges: tuple[Edge, ...]
    saved_bytes: tuple[float, ...]
    parameters: tuple[float, ...]
    state_bytes: tuple[float, ...]
    transient_bytes: tuple[float, ...]

    def per_device(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Values of stages, summed over each device's."""
        sums = [0.0] * self.partition.placement.num_devices
        for device, value in zip(self.partition.placement.device_of_stage, values, strict=True):
            sums[device] += value
        return tuple(sums)


class Chain:
    """One backbone's chain on one cluster: the stages and schedule problems of configs.

    ``profile`` is of whole layers on one of the cluster's devices. ``sequence_parallel`` says
    whether the backbone's boundaries can be divided with its tensors (not a UNet's), ``num_heads``
    are the numbers of attention heads that tensor-parallel ranks share.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        global_batch_size: int,
        sequence_parallel: bool = False,
        num_heads: tuple[int, ...] = (),
    ) -> None:
        self.profile, self.cluster = profile, cluster
        self.global_batch_size = global_batch_size
        self.sequence_parallel = sequence_parallel
        self.num_heads = num_heads
        self._costs_of = lru_cache(maxsize=512)(self._make_costs)
        self._stages_of = lru_cache(maxsize=4096)(self._make_stages)
        self._partition_of = lru_cache(maxsize=1024)(self._find_partition)
        self._ranks_of = lru_cache(maxsize=None)(partial(Ranks, cluster))
        self._spreads: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._reductions: dict[tuple[object, ...], float] = {}
        self._bounds: dict[Config, float] = {}

    def ranks(self, config: Config) -> Ranks:
        """Where the config's ranks are."""
        return self._ranks_of(config.pipeline, config.data, config.tensor, config.pipeline_inside)

    def costs(self, config: Config) -> ChainCosts:
        """Costs of the chain on one tensor-parallel rank.

        What has sharded parameters is divided, with its activations and boundaries where these are
        sequence parallel; the sums over ranks delay both passes. Every rank computes all the rest.
        """
        return self._costs_of(config.micro_batch_size, config.recompute, config.tensor)

    def stages(self, config: Config) -> Stages:
        """The best cut; raises UnfitError. Schedule and room for activations do not bear on it."""
        return self._stages_of(replace(config, split=False, ample=False))

    def per_parameter(self, config: Config) -> float:
        """Bytes of a parameter with its gradient and optimizer state."""
        return bytes_per_parameter(self.profile.dtype, config.distributed_optimizer, config.data)

    def refuse(self, config: Config) -> None:
        """Raises UnfitError for what no partition can mend."""
        sharded = [layer.sharded_parameters for layer in self.profile.layers]
        if config.tensor > 1 and (not any(sharded) or any(n % config.tensor for n in sharded)):
            raise UnfitError(Unfit.SHARDS, f"T = {config.tensor} divides no or not all parameters")
        if odd := [n for n in self.num_heads if n % config.tensor]:
            raise UnfitError(Unfit.SHARDS, f"T = {config.tensor} does not divide {odd[0]} heads")
        num_stages = config.pipeline * config.layout.num_chunks
        if num_stages > len(sharded):
            raise UnfitError(
                Unfit.PARTITION, f"{config}: {len(sharded)} layers for {num_stages} stages"
            )
        held = sum(self.costs(config).parameters) / config.pipeline
        state, limit = held * self.per_parameter(config), self.cluster.usable_bytes
        if state > limit:
            raise UnfitError(
                Unfit.STATE,
                f"{config}: {state / 1e9:.3g} GB on the mean device, which has {limit / 1e9:.3g}",
            )
        kept = sum(self.costs(config).saved_bytes) / config.pipeline
        if state + kept > limit:
            raise UnfitError(
                Unfit.ACTIVATIONS,
                f"{config}: {(state + kept) / 1e9:.3g} GB with one microbatch on the mean device, "
                f"which has {limit / 1e9:.3g}",
            )

    def problem(self, config: Config, num_microbatches: int) -> ScheduleProblem:
        """The schedule to find; its memory is bytes. Raises UnfitError."""
        stages = self.stages(config)
        return stage_problem(
            stages.costs,
            stages.partition,
            num_microbatches,
            lags(stages.edges, stages.partition.placement.num_stages),
            split=config.split,
            activation=stages.saved_bytes,
            cap=self._room(config, stages, num_microbatches),
        )

    def _room(self, config: Config, stages: Stages, num_microbatches: int) -> tuple[float, ...]:
        """Bytes for activations: what is left, or P microbatches at the most, as 1F1B holds.

        No more than all microbatches take, so that problems that come to the same are equal.
        """
        room, most = [], num_microbatches
        if not config.ample:
            most = min(most, config.pipeline)
        for device, least in enumerate(stages.per_device(stages.saved_bytes)):
            left = self._left(stages, device)
            if left < least:
                raise UnfitError(
                    Unfit.ACTIVATIONS,
                    f"{config}: device {device} has {max(0.0, left) / 1e9:.3g} GB for "
                    f"{least / 1e9:.3g} GB of one microbatch",
                )
            room.append(min(left, most * least))
        return tuple(room)

    def _left(self, stages: Stages, device: int) -> float:
        taken = stages.state_bytes[device] + stages.transient_bytes[device]
        return self.cluster.usable_bytes - taken

    def _make_costs(self, micro_batch_size: int, recompute: bool, tensor: int) -> ChainCosts:
        costs = self.profile.at(micro_batch_size, recompute)
        if tensor == 1:
            return costs
        layers = self.profile.layers
        parts = [tensor if layer.sharded_parameters else 1 for layer in layers]
        edges = parts if self.sequence_parallel else [1] * len(layers)
        forward_s, backward_s = self._sums_s(micro_batch_size, recompute, range(tensor))

        def divide(values: tuple[float, ...]) -> list[float]:
            return [value / n for value, n in zip(values, parts, strict=True)]

        def share(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value // n for value, n in zip(values, edges, strict=True))

        return replace(
            costs,
            forward_s=tuple(map(add, divide(costs.forward_s), forward_s)),
            backward_s=tuple(map(add, divide(costs.backward_s), backward_s)),
            weight_grad_s=tuple(divide(costs.weight_grad_s)),
            parameters=tuple(
                x.parameters - x.sharded_parameters + math.ceil(x.sharded_parameters / tensor)
                for x in layers
            ),
            saved_bytes=share(costs.saved_bytes),
            boundary_bytes=share(costs.boundary_bytes),
            skips=tuple(
                SkipCost(s.source, s.destination, s.num_bytes // edges[s.destination])
                for s in costs.skips
            ),
        )

    def _sums_s(
        self, micro_batch_size: int, recompute: bool, ranks: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Seconds in which each layer's forward and backward sum over tensor-parallel ranks."""

        def seconds(calls: Iterable[Collective]) -> float:
            return sum(collective_s(self.cluster, call, ranks) for call in calls)

        given = micro_batch_size, self.sequence_parallel
        sums = [layer.shard_sums for layer in self.profile.layers]
        forward = [seconds(forward_sums(x, *given)) for x in sums]
        backward = [seconds(backward_sums(x, *given)) for x in sums]
        if recompute:
            backward = list(map(add, backward, forward))
        return forward, backward

    def _make_stages(self, config: Config) -> Stages:
        costs, ranks, placement = self.costs(config), self.ranks(config), config.placement
        costs_key = (config.micro_batch_size, config.recompute, config.tensor)
        home = placement.device_of_stage
        goal = Goal(collocate=config.layout.collocates)
        links = [ranks.link(a, b) for a, b in zip(home, home[1:], strict=False) if a != b]
        if links:
            goal = replace(goal, link=max(links, key=lambda link: link.time_s(1 << 20)))
        found = self._partition_of(costs_key, placement, goal)
        if isinstance(found, PartitionError):
            raise UnfitError(Unfit.PARTITION, f"{config}: {found}")
        try:
            stages = self._cut(config, found)
            least = stages.per_device(stages.saved_bytes)
            if any(self._left(stages, d) < need for d, need in enumerate(least)):
                count = config.num_microbatches(self.global_batch_size)
                rule = MemoryRule(
                    self.cluster.usable_bytes,
                    self.per_parameter(config),
                    in_flight(placement, count),
                )
                tight = replace(goal, memory=lambda _: rule)
                stages = self._cut(config, find_partition(costs, placement, tight, explain=False))
        except PartitionError as error:
            raise UnfitError(Unfit.ACTIVATIONS, f"{config}: {error}") from error
        return stages

    def _find_partition(
        self, costs_key: tuple[int, bool, int], placement: Placement, goal: Goal
    ) -> Partition | PartitionError:
        """The best cut without regard to memory, or why there is none; the same for many."""
        try:
            return find_partition(self._costs_of(*costs_key), placement, goal, explain=False)
        except PartitionError as error:
            return error

    def _cut(self, config: Config, partition: Partition) -> Stages:
        costs, placement = self.costs(config), partition.placement
        layers = [partition.layers_of_stage(s) for s in range(placement.num_stages)]
        times = self.profile.times_at(config.micro_batch_size)
        transient = [0.0] * config.pipeline
        for stage, device in enumerate(placement.device_of_stage):
            for i in layers[stage]:
                extra = times[i].peak_bytes - (0 if config.recompute else times[i].saved_bytes)
                parts = config.tensor if self.profile.layers[i].sharded_parameters else 1
                transient[device] = max(transient[device], max(0, extra) / parts)
        travelling = 2 * max(costs.boundary_bytes) if config.pipeline > 1 else 0
        stages = Stages(
            partition,
            costs,
            edges_of(costs, partition, self.ranks(config).link),
            tuple(map(float, partition.per_stage(costs.saved_bytes))),
            tuple(map(float, partition.per_stage(costs.parameters))),
            (),
            tuple(most + travelling for most in transient),
        )
        held, each = stages.per_device(stages.parameters), self.per_parameter(config)
        return replace(stages, state_bytes=tuple(count * each for count in held))
