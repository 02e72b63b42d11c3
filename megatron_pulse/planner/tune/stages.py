"""What a config's stages are: their cuts, their memory, and the problem to schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition, Placement, fold, sequential
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.partition.memory import (
    carried_bytes,
    frozen_share,
    in_flight,
    kept_bytes,
)
from megatron_pulse.planner.schedule.problem import ScheduleProblem, stage_problem
from megatron_pulse.planner.step.replay import Edge, edges_of, lags
from megatron_pulse.planner.tune.conditioning import (
    Copied,
    Sent,
    conditioning,
    with_copies,
)
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Costs, Unfit, UnfitError

NEAR = 0.02
"""How far above the least load one is that counts as near it, as a share."""


@dataclass(frozen=True)
class Stages:
    """A config's stages; per stage what it keeps of a microbatch, and its ``trained`` parameters on
    a rank.

    ``costs`` have what stages compute of copied embedders (``conditioning.with_copies``).
    Per device: the bytes of parameters, gradients and optimizer as ``state_bytes``, and
    ``transient_bytes`` while an operation runs and messages travel. ``copying_s`` are the
    seconds in which embedders that run on every device are copied and their gradients summed.
    """

    partition: Partition
    costs: ChainCosts
    edges: tuple[Edge, ...]
    saved_bytes: tuple[float, ...]
    trained: tuple[float, ...]
    state_bytes: tuple[float, ...]
    transient_bytes: tuple[float, ...]
    copying_s: float = 0.0

    def per_device(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Values of stages, summed over each device's."""
        sums = [0.0] * self.partition.placement.num_devices
        for device, value in zip(self.partition.placement.device_of_stage, values, strict=True):
            sums[device] += value
        return tuple(sums)


class Chain(Costs):
    """One backbone's chain on one cluster: the stages and schedule problems of configs.

    Arguments are those of ``Costs``. Where ``stages`` may be given, the default are the config's
    own.
    """

    @cached_property
    def _stages_of(self) -> Callable[[Config], Stages | UnfitError]:
        return lru_cache(maxsize=4096)(self._make_stages)

    @cached_property
    def _partition_of(
        self,
    ) -> Callable[[tuple[int, bool, int], Placement, Goal], Partition | PartitionError]:
        return lru_cache(maxsize=1024)(self._find_partition)

    def stages(self, config: Config) -> Stages:
        """The config's own: of its best cuts. Raises UnfitError.

        Schedule and room for activations do not bear on it.
        """
        found = self._stages_of(replace(config, split=False, ample=False))
        if isinstance(found, UnfitError):
            raise UnfitError(found.reason, found.detail)
        return found

    def cheap_cuts(self, config: Config) -> Partition:
        """Cuts of about the least load, whatever memory and all else; raises UnfitError for none.

        Several stages or pairs of stages of a device are cut as if each had one of its own. A stage
        for each device is cut at its best, which takes as little.
        """
        placement, goal = config.placement, self._goal(config)
        num = placement.num_stages
        spread = fold(num // 2) if placement.kind.mirrored and num > 1 else sequential(num)
        if placement.num_chunks > 1:
            goal = replace(goal, order=("load",))
        return Partition(placement, self._best_cuts(config, spread, goal).cuts)

    def level_cuts(self, config: Config) -> Partition:
        """Cuts with the least largest stage, whatever memory; raises UnfitError for none.

        Several stages of a device wait less for each other where all are alike.
        """
        goal = replace(self._goal(config), order=("stage", "load"))
        return self._best_cuts(config, config.placement, goal)

    def near_cuts(self, config: Config) -> Partition:
        """Of those with about the least load the cuts with the least largest stage."""
        goal = replace(self._goal(config), slack=NEAR)
        return self._best_cuts(config, config.placement, goal)

    def _best_cuts(self, config: Config, placement: Placement, goal: Goal) -> Partition:
        found = self._partition_of(self._costs_key(config), placement, goal)
        if isinstance(found, PartitionError):
            raise UnfitError(Unfit.PARTITION, f"{config}: {found}")
        return found

    def fits(self, stages: Stages) -> bool:
        """Whether every device has room for one microbatch."""
        least = stages.per_device(stages.saved_bytes)
        return all(self._left(stages, device) >= need for device, need in enumerate(least))

    def problem(
        self, config: Config, num_microbatches: int, stages: Stages | None = None
    ) -> ScheduleProblem:
        """The schedule to find; its memory is bytes. Raises UnfitError."""
        stages = stages or self.stages(config)
        return stage_problem(
            stages.costs,
            stages.partition,
            num_microbatches,
            lags(stages.edges, stages.partition.placement.num_stages),
            split=config.split,
            activation=stages.saved_bytes,
            cap=self._room(config, stages, num_microbatches),
            operation_s=self.cluster.operation_us / 1e6,
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

    def _costs_key(self, config: Config) -> tuple[int, bool, int]:
        return config.micro_batch_size, config.recompute, config.tensor

    def _goal(self, config: Config) -> Goal:
        home, ranks = config.placement.device_of_stage, self.ranks(config)
        goal = Goal(collocate=config.layout.collocates)
        links = {ranks.link(a, b) for a, b in zip(home, home[1:], strict=False) if a != b}
        if links:
            slowest = max(links, key=lambda link: (link.time_s(1 << 20), link.latency_s))
            goal = replace(goal, link=slowest)
        return goal

    def _make_stages(self, config: Config) -> Stages | UnfitError:
        costs, placement, goal = self.costs(config), config.placement, self._goal(config)
        found = self._partition_of(self._costs_key(config), placement, goal)
        if isinstance(found, PartitionError):
            return UnfitError(Unfit.PARTITION, f"{config}: {found}")
        stages = self.cut(config, found)
        if self.fits(stages):
            return stages
        count = config.num_microbatches(self.global_batch_size)
        rule = MemoryRule(
            self.cluster.usable_bytes,
            self.per_parameter(config),
            in_flight(placement, count),
            frozen_share(self.profile.dtype, config.distributed_optimizer, config.data),
        )
        tight = replace(goal, memory=lambda _: rule)
        try:
            return self.cut(config, find_partition(costs, placement, tight, explain=False))
        except PartitionError as error:
            return UnfitError(Unfit.ACTIVATIONS, f"{config}: {error}")

    def _find_partition(
        self, costs_key: tuple[int, bool, int], placement: Placement, goal: Goal
    ) -> Partition | PartitionError:
        """The best cut without regard to memory, or why there is none; the same for many."""
        try:
            return find_partition(self._costs_of(*costs_key), placement, goal, explain=False)
        except PartitionError as error:
            return error

    def cut(self, config: Config, partition: Partition) -> Stages:
        """The config's stages by these cuts, whether or not they fit."""
        costs, placement = self.costs(config), partition.placement
        times = self.profile.times_at(config.micro_batch_size)
        samples = self.global_batch_size // config.data
        sent, copied = conditioning(self.profile, partition, costs, samples)
        costs = with_copies(costs, partition, copied, times, config.recompute)
        layers = [
            [*partition.layers_of_stage(s), *(e.layer for e in copied if s in e.stages)]
            for s in range(placement.num_stages)
        ]
        transient = [0.0] * config.pipeline
        for stage, device in enumerate(placement.device_of_stage):
            for i in layers[stage]:
                extra = times[i].peak_bytes - (0 if config.recompute else times[i].saved_bytes)
                parts = config.tensor if self.profile.layers[i].sharded_parameters else 1
                transient[device] = max(transient[device], max(0, extra) / parts)
        link = self.ranks(config).link
        count = config.num_microbatches(self.global_batch_size)
        carried = carried_bytes(costs, partition, count)
        stages = Stages(
            partition,
            costs,
            edges_of(costs, partition, link) + self._conditioning_edges(config, placement, sent),
            kept_bytes(costs, partition),
            tuple(map(float, partition.per_stage(costs.trained_parameters))),
            (),
            tuple(map(sum, zip(transient, carried, strict=True))),
            sum(self._copying_s(config, embedder) for embedder in copied),
        )
        trained = stages.per_device(stages.trained)
        whole = stages.per_device(partition.per_stage(costs.parameters))
        copies = sum(e.parameter_bytes + e.gradient_bytes for e in copied)
        state = (self.state_bytes(config, t, w - t) for t, w in zip(trained, whole, strict=True))
        return replace(stages, state_bytes=tuple(held + copies for held in state))

    def _conditioning_edges(
        self, config: Config, placement: Placement, sent: Sequence[Sent]
    ) -> tuple[Edge, ...]:
        """Messages of conditioning; one and its gradient's, if it wants one, take their mean."""
        link, home, size = (
            self.ranks(config).link,
            placement.device_of_stage,
            config.micro_batch_size,
        )
        return tuple(
            Edge(
                message.source,
                message.destination,
                link(home[message.source], home[message.destination]).time_s(
                    size
                    * (message.forward_bytes + message.gradient_bytes)
                    / (2 if message.gradient_bytes else 1)
                ),
                message.gradient_bytes > 0,
            )
            for message in sent
        )

    def _copying_s(self, config: Config, embedder: Copied) -> float:
        """Seconds of a broadcast and a reduction, each through all devices of the pipeline."""
        others = [d for d in range(config.pipeline) if d != embedder.owner]
        links = [self.ranks(config).link(embedder.owner, d) for d in others]
        num_bytes = embedder.parameter_bytes + embedder.gradient_bytes
        slowest = max(num_bytes / link.bytes_per_s for link in links)
        return slowest + 2 * sum(link.latency_s for link in links)
