"""What a config's stages are: their cuts, their memory, and the problem to schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.memory import (
    carried_bytes,
    kept_bytes,
    waiting_bytes,
)
from megatron_pulse.planner.schedule.problem import ScheduleProblem, stage_problem
from megatron_pulse.planner.step.replay import Edge, edges_along, lags
from megatron_pulse.planner.tune.conditioning import (
    Copied,
    Sent,
    conditioning,
    with_copies,
)
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.costs import Costs, Unfit, UnfitError
from megatron_pulse.planner.tune.memory.relief import Relief
from megatron_pulse.planner.tune.memory.working import Working

MOST_KNOWN = 256
"""Choices of what is not kept whose work is remembered."""


@dataclass(frozen=True)
class Stages:
    """A config's stages; per stage what it keeps of a microbatch, and its ``trained`` parameters on
    a rank.

    ``costs`` have what stages compute of copied embedders (``conditioning.with_copies``).
    Per device: the bytes of parameters, gradients and optimizer as ``state_bytes``, what the
    optimizer has beside these while it works as ``stepping_bytes``, what an operation needs while
    it runs as ``working_bytes``, with whole backwards and with split ones, and ``carried_bytes`` of
    messages that travel or wait.
    ``copying_s`` are the seconds in which embedders that run on every device are copied and their
    gradients summed.
    Of the layers in ``relief`` not all is kept: per stage ``offloaded_bytes`` may wait on the host,
    which take ``host_s`` to get there, or back; ``again_bytes`` are per stage what that
    takes where it is all there at once, and not layer by layer as in ``working_bytes``;
    ``waiting_bytes`` what is held for weight gradients that wait.
    """

    partition: Partition
    costs: ChainCosts
    edges: tuple[Edge, ...]
    saved_bytes: tuple[float, ...]
    trained: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stepping_bytes: tuple[float, ...]
    working_bytes: tuple[tuple[float, ...], tuple[float, ...]]
    carried_bytes: tuple[float, ...]
    copying_s: float = 0.0
    relief: Relief = Relief()
    again_bytes: tuple[float, ...] | None = None
    waiting_bytes: tuple[float, ...] = ()
    offloaded_bytes: tuple[float, ...] | None = None
    host_s: tuple[float, ...] | None = None

    @property
    def recompute(self) -> frozenset[int]:
        """The layers that compute all their activations again."""
        return self.relief.again

    @property
    def offload(self) -> frozenset[int]:
        """The layers whose activations may wait on the host."""
        return self.relief.host

    @property
    def selective(self) -> frozenset[int]:
        """The layers that compute what is cheap again."""
        return self.relief.selective

    def kept_bytes(self, split: bool) -> tuple[float, ...]:
        """Per stage what it has room for from forward to backward, or to the weight gradient."""
        if not split:
            return self.saved_bytes
        return tuple(map(max, self.saved_bytes, self.waiting_bytes))

    def least_bytes(self, split: bool) -> tuple[float, ...]:
        """Per stage what it has room for where all that may wait on the host does."""
        kept = self.kept_bytes(split)
        if self.offloaded_bytes is None:
            return kept
        return tuple(k - o for k, o in zip(kept, self.offloaded_bytes, strict=True))

    def transient_bytes(self, split: bool) -> tuple[float, ...]:
        """What each device holds beside its state and activations, at most."""
        return tuple(map(sum, zip(self.working_bytes[split], self.carried_bytes, strict=True)))

    @cached_property
    def stepping(self) -> tuple[float, ...]:
        """What each device holds while the optimizer works."""
        return tuple(map(sum, zip(self.state_bytes, self.stepping_bytes, strict=True)))

    def memory_bytes(self, in_use: Sequence[float]) -> tuple[float, ...]:
        """What each device holds at most, with so many bytes in use beside state and messages."""
        own = zip(self.state_bytes, self.carried_bytes, in_use, strict=True)
        return tuple(map(max, self.stepping, map(sum, own)))

    @cached_property
    def most_again(self) -> tuple[float, ...]:
        """Per device the most that one of its stages computes again."""
        most = [0.0] * self.partition.placement.num_devices
        homes = self.partition.placement.device_of_stage
        for device, num_bytes in zip(homes, self.again_bytes or (), strict=False):
            most[device] = max(most[device], num_bytes)
        return tuple(most)

    def per_device(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Values of stages, summed over each device's."""
        sums = [0.0] * self.partition.placement.num_devices
        for device, value in zip(self.partition.placement.device_of_stage, values, strict=True):
            sums[device] += value
        return tuple(sums)

    def least_held(self, split: bool) -> tuple[float, ...]:
        """Bytes that each device holds at the least: with one microbatch, or while the optimizer
        works."""
        kept = zip(self.working_bytes[split], self.per_device(self.kept_bytes(split)), strict=True)
        return self.memory_bytes(tuple(map(sum, kept)))

    def stage_s(self, split: bool) -> tuple[float, ...]:
        """Seconds that each stage computes for a microbatch."""
        return self.partition.per_stage(self.costs.of_schedule(split).work_s)

    def work_s(self, split: bool) -> tuple[float, ...]:
        """The same of each device."""
        return self.per_device(self.stage_s(split))

    def busy_s(self, split: bool) -> float:
        """Seconds of a microbatch on the busiest device, which sends while it computes, or on its
        links."""
        return max(*self.work_s(split), busiest_link_s(self.partition.placement, self.edges))


def busiest_link_s(placement: Placement, edges: Sequence[Edge]) -> float:
    """Seconds of a microbatch that one device sends, which is as long as it receives."""
    busy = [0.0] * placement.num_devices
    for edge in edges:
        for stage in (edge.source, edge.destination):
            busy[placement.device_of_stage[stage]] += edge.seconds
    return max(busy)


class Cut(Costs):
    """Stages of configs by given cuts, and the schedule problems of these.

    Arguments are those of ``Costs``.
    """

    def fits(self, stages: Stages, split: bool = False) -> bool:
        """Whether every device has room for one microbatch, and for the optimizer's step."""
        least = stages.per_device(stages.kept_bytes(split))
        return max(stages.stepping) <= self.cluster.usable_bytes and all(
            self.left(stages, device, split) >= need for device, need in enumerate(least)
        )

    def problem_of(
        self, config: Config, num_microbatches: int, stages: Stages, anyhow: bool = False
    ) -> ScheduleProblem:
        """The schedule to find; its memory is bytes. Raises UnfitError where devices have none for
        one microbatch, which they are taken to have with ``anyhow``."""
        return stage_problem(
            stages.costs,
            stages.partition,
            num_microbatches,
            lags(stages.edges, stages.partition.placement.num_stages),
            split=config.split,
            activation=stages.saved_bytes,
            cap=self._room(config, stages, num_microbatches, anyhow),
            recomputed=stages.again_bytes,
            waiting=stages.waiting_bytes if config.split else None,
            operation_s=self.cluster.operation_us / 1e6,
            offloaded=stages.offloaded_bytes,
            copying=stages.host_s,
        )

    def _room(
        self, config: Config, stages: Stages, num_microbatches: int, anyhow: bool
    ) -> tuple[float, ...]:
        """Bytes for activations: what is left, or P microbatches at the most, as 1F1B holds, and
        what a stage of the device computes again.

        No more than all microbatches take, so that problems that come to the same are equal.
        """
        room, most, limit = [], num_microbatches, self.cluster.usable_bytes
        if (stepping := max(stages.stepping)) > limit and not anyhow:
            raise UnfitError(
                Unfit.STATE,
                f"{config}: {stepping / 1e9:.3g} GB of {limit / 1e9:.3g} while the optimizer works",
            )
        if not config.ample:
            most = min(most, config.pipeline)
        again = stages.most_again
        for device, least in enumerate(stages.per_device(stages.kept_bytes(config.split))):
            left = max(self.left(stages, device, config.split), least if anyhow else 0.0)
            if left < least:
                raise UnfitError(
                    Unfit.ACTIVATIONS,
                    f"{config}: device {device} has {max(0.0, left) / 1e9:.3g} GB for "
                    f"{least / 1e9:.3g} GB of one microbatch",
                )
            room.append(min(left, most * least + again[device]))
        return tuple(room)

    def left(self, stages: Stages, device: int, split: bool) -> float:
        """Bytes of a device that there are for activations; negative where state alone is more."""
        beside = stages.working_bytes[split][device] + stages.carried_bytes[device]
        return self.cluster.usable_bytes - stages.state_bytes[device] - beside

    def cut_with(
        self,
        config: Config,
        partition: Partition,
        relief: Relief,
    ) -> Stages:
        """The config's stages by these cuts, whether or not they fit, where not all is kept of
        the layers that ``relief`` says."""
        costs, placement = self.costs(config, relief), partition.placement
        times = self._times_at(config.micro_batch_size)
        samples = self.global_batch_size // config.data
        sent, copied = conditioning(self.profile, partition, costs, samples)
        costs = with_copies(costs, partition, copied, times, relief.again)
        works = self._working(config, relief)
        working = [0.0] * config.pipeline, [0.0] * config.pipeline
        for stage, device in enumerate(placement.device_of_stage):
            first, end = partition.cuts[stage : stage + 2]
            spans = [(first, end), *((e.layer, e.layer + 1) for e in copied if stage in e.stages)]
            for split, most in enumerate(working):
                own = (works.beside(*span, bool(split)) for span in spans)
                most[device] = max(most[device], *own)
        link = self.ranks(config).link
        count = config.num_microbatches(self.global_batch_size)
        crossed = tuple(crossings(costs, partition))
        carried = carried_bytes(crossed, placement, count)
        sends = edges_along(crossed, placement, link)
        stages = Stages(
            partition,
            costs,
            sends + self._conditioning_edges(config, placement, sent),
            kept_bytes(costs, partition),
            tuple(map(float, partition.per_stage(costs.trained_parameters))),
            (),
            (),
            (tuple(working[0]), tuple(working[1])),
            carried,
            sum(self._copying_s(config, embedder) for embedder in copied),
            relief,
            partition.per_stage(costs.again_bytes) if costs.again_bytes else None,
            waiting_bytes(costs, partition),
        )
        if relief.host:
            stages = self._with_host(config, stages)
        trained = stages.per_device(stages.trained)
        whole = stages.per_device(partition.per_stage(costs.parameters))
        copies = sum(e.parameter_bytes + e.gradient_bytes for e in copied)
        state = (self.state_bytes(config, t, w - t) for t, w in zip(trained, whole, strict=True))
        return replace(
            stages,
            state_bytes=tuple(held + copies for held in state),
            stepping_bytes=tuple(self.stepping_bytes(config, count) for count in trained),
        )

    def _with_host(self, config: Config, stages: Stages) -> Stages:
        """The same with what may wait on the host of its layers. What a layer takes
        travels too, but only counts as away where the one before it is, in the stage, and does not
        hand it to a skip: others may hold it."""
        link, offload = self.cluster.to_host, stages.relief.host
        kept = self.costs(config, Relief())
        again = self.costs(config, Relief(self.profile.recomputed(True)))
        if link is None:
            raise ValueError(f"cluster {self.cluster.name} has no link to the host")
        num, moved = [0.0] * len(stages.saved_bytes), [0.0] * len(stages.saved_bytes)
        first, sources = stages.partition.cuts, {skip.source for skip in kept.skips}
        for layer in offload:
            stage = stages.partition.stage_of_layer(layer)
            alone = layer - 1 in offload and layer not in first and layer - 1 not in sources
            taken = 0 if alone else again.saved_bytes[layer]
            num[stage] += max(0, kept.saved_bytes[layer] - taken)
            moved[stage] += kept.saved_bytes[layer]
        return replace(
            stages,
            offloaded_bytes=tuple(map(min, num, stages.saved_bytes)),
            host_s=tuple(link.time_s(n) if n else 0.0 for n in moved),
        )

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

    def _working(self, config: Config, relief: Relief) -> Working:
        """What operations work with beside what is held."""
        key = config.micro_batch_size, config.tensor, relief
        if key not in self._known_working:
            times = self._times_at(config.micro_batch_size)
            parts = [self.parts(config, i) for i in range(len(times))]
            made = Working(times, parts, self.costs(config, relief), relief)
            if len(self._known_working) >= MOST_KNOWN:
                self._known_working.clear()
            self._known_working[key] = made
        return self._known_working[key]

    @cached_property
    def _known_working(self) -> dict[tuple[int, int, Relief], Working]:
        return {}

    def parts(self, config: Config, layer: int) -> int:
        """Into how many parts a layer's work is divided."""
        return self._parts(config.tensor, layer)

    def _parts(self, tensor: int, layer: int) -> int:
        return tensor if self.profile.layers[layer].sharded_parameters else 1
