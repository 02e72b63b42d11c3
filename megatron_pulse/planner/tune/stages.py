"""Stages of a config: cuts, memory, and the schedule problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import le

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.crossing import crossings
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.partition.memory import (
    in_transit_bytes,
    kept_bytes,
    wgrad_bytes,
)
from megatron_pulse.planner.program.simulate import StageMessage, edges_along, lags
from megatron_pulse.planner.schedule.problem import ScheduleProblem, stage_problem
from megatron_pulse.planner.tune.conditioning import (
    ConditioningMessage,
    ReplicatedEmbedder,
    conditioning,
    with_copies,
)
from megatron_pulse.planner.tune.config import Config
from megatron_pulse.planner.tune.layer_costs import LayerCosts, Unfit, UnfitError


@dataclass(frozen=True)
class Stages:
    """Stages of a config, with bytes per microbatch and trained parameters per stage of a rank.

    ``costs`` include replicated embedders in the stages that compute them
    (``conditioning.with_copies``). ``embedder_copy_s`` are the seconds to broadcast the embedders
    and to sum their gradients.

    Per device: ``state_bytes`` of parameters, gradients and optimizer; ``optimizer_step_bytes`` in
    addition during the optimizer step; ``workspace_bytes`` of a running operation, with whole and
    with split backwards; ``in_transit_bytes`` of messages in transit or waiting; ``usable_bytes``
    that planning may fill.

    ``activations`` are the layers' policies. Per stage: ``offload_bytes`` may be on the host,
    and the copy takes ``offload_s`` in each direction; ``wgrad_bytes`` are held for deferred
    weight gradients. ``recompute_bytes`` are the recomputed bytes of a stage if all exist at once,
    instead of layer by layer as in ``workspace_bytes``.
    """

    partition: Partition
    costs: ChainCosts
    edges: tuple[StageMessage, ...]
    saved_bytes: tuple[float, ...]
    trained: tuple[float, ...]
    state_bytes: tuple[float, ...]
    optimizer_step_bytes: tuple[float, ...]
    workspace_bytes: tuple[tuple[float, ...], tuple[float, ...]]
    in_transit_bytes: tuple[float, ...]
    usable_bytes: tuple[float, ...]
    embedder_copy_s: float = 0.0
    activations: ActivationPolicies = ActivationPolicies()
    recompute_bytes: tuple[float, ...] | None = None
    wgrad_bytes: tuple[float, ...] = ()
    offload_bytes: tuple[float, ...] | None = None
    offload_s: tuple[float, ...] | None = None

    def kept_bytes(self, split: bool) -> tuple[float, ...]:
        """Bytes per stage reserved from forward to backward, or to the weight gradient if
        ``split``."""
        if not split:
            return self.saved_bytes
        return tuple(map(max, self.saved_bytes, self.wgrad_bytes))

    def least_bytes(self, split: bool) -> tuple[float, ...]:
        """Bytes per stage reserved with all possible activations offloaded."""
        kept = self.kept_bytes(split)
        if self.offload_bytes is None:
            return kept
        return tuple(k - o for k, o in zip(kept, self.offload_bytes, strict=True))

    def transient_bytes(self, split: bool) -> tuple[float, ...]:
        """Peak bytes per device beside state and activations."""
        return tuple(map(sum, zip(self.workspace_bytes[split], self.in_transit_bytes, strict=True)))

    @cached_property
    def stepping(self) -> tuple[float, ...]:
        """Bytes per device during the optimizer step."""
        return tuple(map(sum, zip(self.state_bytes, self.optimizer_step_bytes, strict=True)))

    def memory_bytes(self, in_use: Sequence[float]) -> tuple[float, ...]:
        """Peak bytes per device, with ``in_use`` bytes beside state and messages."""
        own = zip(self.state_bytes, self.in_transit_bytes, in_use, strict=True)
        return tuple(map(max, self.stepping, map(sum, own)))

    @cached_property
    def max_recompute_bytes(self) -> tuple[float, ...]:
        """Largest recomputed bytes of any stage, per device."""
        most = [0.0] * self.partition.placement.num_devices
        homes = self.partition.placement.device_of_stage
        for device, num_bytes in zip(homes, self.recompute_bytes or (), strict=False):
            most[device] = max(most[device], num_bytes)
        return tuple(most)

    def per_device(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Sum of per-stage values on each device."""
        sums = [0.0] * self.partition.placement.num_devices
        for device, value in zip(self.partition.placement.device_of_stage, values, strict=True):
            sums[device] += value
        return tuple(sums)

    def least_held(self, split: bool) -> tuple[float, ...]:
        """Least bytes of each device: with one microbatch, or during the optimizer step."""
        kept = zip(
            self.workspace_bytes[split], self.per_device(self.kept_bytes(split)), strict=True
        )
        return self.memory_bytes(tuple(map(sum, kept)))

    def stage_s(self, split: bool) -> tuple[float, ...]:
        """Compute seconds per stage and microbatch."""
        return self.partition.per_stage(self.costs.of_schedule(split).work_s)

    def work_s(self, split: bool) -> tuple[float, ...]:
        """Compute seconds per device and microbatch."""
        return self.per_device(self.stage_s(split))

    def busy_s(self, split: bool) -> float:
        """Seconds per microbatch of the busiest device or link. Devices send while they compute."""
        return max(*self.work_s(split), busiest_link_s(self.partition.placement, self.edges))


def busiest_link_s(placement: Placement, edges: Sequence[StageMessage]) -> float:
    """Seconds per microbatch that the busiest device sends; receiving takes as long."""
    busy = [0.0] * placement.num_devices
    for edge in edges:
        for stage in (edge.source, edge.destination):
            busy[placement.device_of_stage[stage]] += edge.seconds
    return max(busy)


class StageBuilder:
    """Stages of configs with given cuts and activation policies, and their schedule problems."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs

    def fits(self, stages: Stages, split: bool = False) -> bool:
        """True if every device has room for one microbatch, and for the optimizer step."""
        least = stages.per_device(stages.kept_bytes(split))
        return all(map(le, stages.stepping, stages.usable_bytes)) and all(
            self.left(stages, device, split) >= need for device, need in enumerate(least)
        )

    def problem(
        self, config: Config, num_microbatches: int, stages: Stages, anyhow: bool = False
    ) -> ScheduleProblem:
        """Schedule problem of the stages, with memory in bytes.

        Raises UnfitError if a device has no room for one microbatch. With ``anyhow`` devices are
        given that room.
        """
        return stage_problem(
            stages.costs,
            stages.partition,
            num_microbatches,
            lags(stages.edges, stages.partition.placement.num_stages),
            split=config.split,
            activation=stages.saved_bytes,
            cap=self._room(config, stages, num_microbatches, anyhow),
            recompute_bytes=stages.recompute_bytes,
            wgrad_bytes=stages.wgrad_bytes if config.split else None,
            operation_s=self.costs.cluster.operation_us / 1e6,
            offload_bytes=stages.offload_bytes,
            offload_s=stages.offload_s,
        )

    def _room(
        self, config: Config, stages: Stages, num_microbatches: int, anyhow: bool
    ) -> tuple[float, ...]:
        """Bytes per device for activations.

        That is the free memory, or the in-flight microbatches of 1F1B (at most P) with the
        recomputed bytes of one stage. It never exceeds the need of all microbatches, so that
        equivalent problems are equal.
        """
        room, most = [], num_microbatches
        each = zip(stages.stepping, stages.usable_bytes, strict=True)
        stepping, limit = max(each, key=lambda pair: pair[0] - pair[1])
        if stepping > limit and not anyhow:
            raise UnfitError(
                Unfit.STATE,
                f"{config}: the optimizer step needs {stepping / 1e9:.3g} GB of "
                f"{limit / 1e9:.3g} GB",
            )
        if not config.max_in_flight:
            most = min(most, config.pipeline)
        again = stages.max_recompute_bytes
        for device, least in enumerate(stages.per_device(stages.kept_bytes(config.split))):
            left = max(self.left(stages, device, config.split), least if anyhow else 0.0)
            if left < least:
                raise UnfitError(
                    Unfit.ACTIVATIONS,
                    f"{config}: one microbatch needs {least / 1e9:.3g} GB on device {device}, "
                    f"{max(0.0, left) / 1e9:.3g} GB are free",
                )
            room.append(min(left, most * least + again[device]))
        return tuple(room)

    def left(self, stages: Stages, device: int, split: bool) -> float:
        """Bytes of a device left for activations; negative if the state alone exceeds it."""
        beside = stages.workspace_bytes[split][device] + stages.in_transit_bytes[device]
        return stages.usable_bytes[device] - stages.state_bytes[device] - beside

    def build(
        self,
        config: Config,
        partition: Partition,
        activations: ActivationPolicies,
    ) -> Stages:
        """Stages of the config with these cuts and this activation policy, whether or not they
        fit."""
        costs, placement = self.costs.cut_chain(config, activations, partition), partition.placement
        times = self.costs.times_at(config)
        samples = self.costs.global_batch_size // config.data
        profile = self.costs.profile_of(config.context, config.micro_batch_size)
        sent, copied = conditioning(profile, partition, costs, samples)
        if copied:
            chains = self.costs.chains(config, activations)
            costs = with_copies(costs, partition, copied, times, activations.recompute, chains)
        works = self.costs.workspace(config, activations)
        working = [0.0] * config.pipeline, [0.0] * config.pipeline
        for stage, device in enumerate(placement.device_of_stage):
            first, end = partition.cuts[stage : stage + 2]
            spans = [(first, end), *((e.layer, e.layer + 1) for e in copied if stage in e.stages)]
            for split, most in enumerate(working):
                own = (works.beside(*span, bool(split)) for span in spans)
                most[device] = max(most[device], *own)
        link = self.costs.ranks(config).link
        count = self.costs.num_microbatches(config)
        crossed = tuple(crossings(costs, partition))
        carried = in_transit_bytes(crossed, placement, count)
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
            tuple(place.usable_bytes for place in self.costs.places(config)),
            sum(self._copying_s(config, embedder) for embedder in copied),
            activations,
            partition.per_stage(costs.recompute_bytes) if costs.recompute_bytes else None,
            wgrad_bytes(costs, partition),
        )
        if activations.offload:
            stages = self._with_host(config, stages)
        trained = stages.per_device(stages.trained)
        whole = stages.per_device(partition.per_stage(costs.stored_parameters))
        copies = sum(e.parameter_bytes + e.gradient_bytes for e in copied)
        state = (
            self.costs.state_bytes(config, t, w - t) for t, w in zip(trained, whole, strict=True)
        )
        return replace(
            stages,
            state_bytes=tuple(held + copies for held in state),
            optimizer_step_bytes=tuple(
                self.costs.optimizer_step_bytes(config, count) for count in trained
            ),
        )

    def _with_host(self, config: Config, stages: Stages) -> Stages:
        """Stages with activation offload.

        The input of a layer travels too. It only counts as freed if the layer before is in the same
        stage and offloaded, and feeds no skip: others may hold it.
        """
        cluster, offload = self.costs.cluster, stages.activations.offload
        kept = self.costs.chain(config, ActivationPolicies())
        every = self.costs.profile.all_layers(ActivationPolicy.RECOMPUTE)
        again, link = self.costs.chain(config, every), cluster.to_host
        if link is None:
            raise ValueError(f"cluster {cluster.name} has no link to the host")
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
            offload_bytes=tuple(map(min, num, stages.saved_bytes)),
            offload_s=tuple(link.time_s(n) if n else 0.0 for n in moved),
        )

    def _conditioning_edges(
        self, config: Config, placement: Placement, sent: Sequence[ConditioningMessage]
    ) -> tuple[StageMessage, ...]:
        """Messages of conditioning. A message with a gradient takes the mean time of both."""
        link, home, size = (
            self.costs.ranks(config).link,
            placement.device_of_stage,
            config.micro_batch_size,
        )
        return tuple(
            StageMessage(
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

    def _copying_s(self, config: Config, embedder: ReplicatedEmbedder) -> float:
        """Seconds of one broadcast and one reduction over all devices of the pipeline."""
        others = [d for d in range(config.pipeline) if d != embedder.owner]
        links = [self.costs.ranks(config).link(embedder.owner, d) for d in others]
        num_bytes = embedder.parameter_bytes + embedder.gradient_bytes
        slowest = max(num_bytes / link.bytes_per_s for link in links)
        return slowest + 2 * sum(link.latency_s for link in links)
