"""Activation policy of a config: recompute or offload as few layers as the memory asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import inf

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.program.simulate import StageMessage
from megatron_pulse.planner.schedule.bound.bounds import filled
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.memory.device_policy import solve_activation_policy
from megatron_pulse.planner.tune.memory.recompute_knapsack import LayerSavings
from megatron_pulse.planner.tune.stages import StageBuilder, Stages
from megatron_pulse.profile.roofline import ELEMENT_BYTES

LEVELS = 6
"""Steps from no recomputation to full recomputation at which partitions are searched."""

FEWER = 0.7
"""Share of the full-rate in-flight microbatches that must fit unless the config has max_in_flight
memory. With split backwards the smaller share costs little time."""

TRAVELLING = 2.0
"""In-flight microbatches whose activations are on the device although offloaded: one in use and one
in transit."""

ON_LINK = 0.9
"""Share of a microbatch's time for which the host link may be busy, per direction."""


_least_work = lru_cache(maxsize=2048)(solve_activation_policy)
"""Moved cuts leave most devices unchanged, so results are reused."""


class ActivationPlanner:
    """Activation policies that recompute or offload as few layers as the memory asks for."""

    def __init__(self, stages: StageBuilder) -> None:
        self.stages, self.costs = stages, stages.costs
        self._cut_of = lru_cache(maxsize=4096)(self._make_cut)
        self._savings_of = lru_cache(maxsize=16384)(self._make_savings)

    def cut(self, config: Config, partition: Partition) -> Stages:
        """Stages of the config with these cuts, whether or not they fit.

        With recomputation as needed, as few layers as necessary are recomputed.
        """
        bears = stages_key_config(config)
        found = self._cut_of(bears, partition)
        as_needed = config.split and config.recompute.as_needed
        if as_needed and not self.stages.fits(found, split=True):
            found = self._cut_of(replace(bears, split=True), partition)  # for what waits
        return found

    def _make_cut(self, config: Config, partition: Partition) -> Stages:
        if not config.recompute.as_needed:
            return self.stages.build(config, partition, self.costs.activations(config))
        return self.stages.build(config, partition, self.policies(config, partition))

    def policies(self, config: Config, partition: Partition) -> ActivationPolicies:
        """Activation policy for these cuts, chosen device by device.

        It makes room for the in-flight microbatches of about the full rate. Where recomputing every
        layer of a device does not free enough, fewer microbatches will be in flight. If the
        recomputed activations themselves do not fit either, one microbatch must.
        """
        stages = self.stages.build(config, partition, ActivationPolicies())
        placement, flying = (
            partition.placement,
            self._flying(config, 1.0 if config.max_in_flight else FEWER),
        )
        link_s = 0.0
        if config.recompute is Recompute.HOST:
            link_s = ON_LINK * stages.busy_s(config.split)
        works = stages.workspace_bytes[True]  # with split backwards it is the more, or as much
        chosen, spent = ActivationPolicies(), dict[int, ActivationPolicies]()
        for device in range(placement.num_devices):
            own = placement.stages_of_device(device)
            need = sum(flying[s] * stages.saved_bytes[s] for s in own)
            need -= self.stages.left(stages, device, split=True)
            if need <= 0:
                continue
            every = tuple(
                each
                for s in own
                for each in self._savings_of_layers(
                    config, partition.layers_of_stage(s), flying[s], device
                )
            )
            found = _least_work(every, need, works[device], link_s)
            if found is None:
                spent[device] = found = ActivationPolicies(frozenset(each.layer for each in every))
            elif must := self._recompute_for_one(config, partition, device, every, found):
                given = tuple(_whole(each) if each.layer in must else each for each in every)
                found = _least_work(given, need, works[device], link_s) or found
                found = found.without(must) | ActivationPolicies(must)
            chosen |= found
        return (
            self._with_fewer_recomputed(config, stages, chosen, spent, link_s) if spent else chosen
        )

    def _with_fewer_recomputed(
        self,
        config: Config,
        stages: Stages,
        chosen: ActivationPolicies,
        spent: Mapping[int, ActivationPolicies],
        link_s: float,
    ) -> ActivationPolicies:
        """Redo devices that recompute every layer and still lack memory for one microbatch.

        Recomputed activations take memory too, so these devices recompute only what one microbatch
        needs.
        """
        made, found = self.stages.build(config, stages.partition, chosen), ActivationPolicies()
        lacking = [d for d in spent if self._short(config, made, d) > 0]
        for device in lacking:
            found |= self._for_one(config, stages, device, link_s) or spent[device]
        others = frozenset().union(*(spent[device].recompute for device in lacking))
        return found | chosen.without(others)

    def _recompute_for_one(
        self,
        config: Config,
        partition: Partition,
        device: int,
        layers: Iterable[LayerSavings],
        chosen: ActivationPolicies,
    ) -> frozenset[int]:
        """Further layers that need full recomputation so that one microbatch of a split backward
        fits.

        Selective recomputation does not reduce the bytes held for deferred weight gradients.
        """
        if not config.split:
            return frozenset()
        stages = self.stages.build(config, partition, chosen)
        costs = self.costs.chain(config, chosen)
        if (short := self._short(config, stages, device)) <= 0:
            return frozenset()
        may = tuple(
            replace(
                _whole(each),
                seconds=each.seconds
                - (each.selective_s if each.layer in chosen.selective else 0.0),
                num_bytes=float(max(costs.saved_bytes[each.layer], costs.wgrad_bytes[each.layer])),
            )
            for each in layers
            if each.layer not in chosen.recompute and each.seconds < inf
        )
        found = _least_work(may, short, stages.workspace_bytes[config.split][device])
        return frozenset() if found is None else found.recompute

    def _short(self, config: Config, stages: Stages, device: int) -> float:
        """Bytes missing on a device for one microbatch; negative if it fits."""
        held = stages.per_device(stages.kept_bytes(config.split))[device]
        return held - self.stages.left(stages, device, config.split)

    def _for_one(
        self, config: Config, stages: Stages, device: int, link_s: float
    ) -> ActivationPolicies | None:
        """Activation policy with which one microbatch fits on a device; None if none was found."""
        partition = stages.partition
        own = partition.placement.stages_of_device(device)
        left = self.stages.left(stages, device, config.split)
        need = sum(stages.saved_bytes[s] for s in own) - left
        every = tuple(
            each
            for s in own
            for each in self._savings_of_layers(config, partition.layers_of_stage(s), 1.0, device)
        )
        return _least_work(every, need, stages.workspace_bytes[config.split][device], link_s)

    def holds(self, config: Config, stages: Stages, share: float) -> bool:
        """True if ``share`` of the full-rate in-flight microbatches fits on every device."""
        flying = self._flying(config, share)
        away = stages.offload_bytes or (0.0,) * len(flying)
        held = stages.per_device(
            tuple(
                n * b - max(0.0, n - TRAVELLING) * o
                for n, b, o in zip(flying, stages.saved_bytes, away, strict=True)
            )
        )
        return all(
            self.stages.left(stages, device, config.split) >= need
            for device, need in enumerate(held)
        )

    def memory_bound_s(self, config: Config, stages: Stages) -> float:
        """Lower bound on the time per microbatch from activation memory (Little's law).

        Each microbatch occupies bytes for the time from its forward to its backward. The sum over a
        device, divided by the memory that whole activations can fill, bounds the period.
        """
        home, spent = stages.partition.placement, list(stages.stage_s(config.split))
        for stage, seconds in round_trips(stages.edges):
            spent[stage] += seconds
        kept, until_back = stages.least_bytes(config.split), 0.0
        taken = [0.0] * config.pipeline
        for stage in reversed(range(home.num_stages)):
            until_back += spent[stage]
            taken[home.device_of_stage[stage]] += kept[stage] * until_back
        least_s = 0.0
        for device, least in enumerate(stages.per_device(kept)):
            room = max(self.stages.left(stages, device, config.split), least)
            if not config.max_in_flight:
                room = min(room, config.pipeline * least)
            if least:
                own = [kept[stage] for stage in home.stages_of_device(device)]
                least_s = max(least_s, taken[device] / filled(room, own))
        return least_s

    def memory_rule(self, config: Config, share: float, beside: float) -> MemoryRule:
        """Memory rule of a partition: ``beside`` bytes are taken, ``share`` of the full rate is in
        flight."""
        per_parameter = self.costs.per_parameter(config)
        return self._rule(config, beside, per_parameter, self._flying(config, share))

    def _rule(
        self, config: Config, beside: float, per_parameter: float, flying: tuple[float, ...]
    ) -> MemoryRule:
        limits = [place.usable_bytes - beside for place in self.costs.places(config)]
        return MemoryRule(
            min(limits),
            per_parameter,
            flying,
            ELEMENT_BYTES[self.costs.profile.dtype] / per_parameter,
            tuple(limits) if self.costs.cluster.mixed else (),
        )

    def optimizer_rule(self, config: Config) -> MemoryRule:
        """Memory rule for the optimizer step, for partitions where activations hardly bind."""
        held, stages = self.costs.per_parameter(config), config.placement.num_stages
        each = held + self.costs.optimizer_step_bytes(config, 1.0)
        return self._rule(config, 0.0, each, (0.0,) * stages)

    def levels(self, config: Config) -> list[ActivationPolicies]:
        """Growing sets of recomputed layers, from none to all that free bytes, most bytes per
        second first."""
        every = list(self._savings_of_layers(config, range(len(self.costs.profile.layers)), 1.0))
        options = sorted(
            (option for each in every for option in each.options),
            key=lambda option: option.seconds / option.num_bytes,
        )
        total = sum(max(option.num_bytes for option in each.options) for each in every)
        levels, freed = [ActivationPolicies()], dict[int, float]()
        recomputed, selective = set[int](), set[int]()
        for option in options:
            layer = option.layer.layer
            if freed.get(layer, 0.0) >= option.num_bytes:
                continue
            freed[layer] = option.num_bytes
            selective.discard(layer)
            (selective if option.is_selective else recomputed).add(layer)
            if sum(freed.values()) >= total * len(levels) / LEVELS * (1 - 1e-9):
                levels.append(
                    ActivationPolicies(frozenset(recomputed), selective=frozenset(selective))
                )
        return levels

    def _flying(self, config: Config, share: float) -> tuple[float, ...]:
        """In-flight microbatches per stage: ``share`` of those at the full rate, at least one."""
        count = self.costs.num_microbatches(config)
        return tuple(max(1.0, share * n) for n in in_flight(config.placement, count))

    def _savings_of_layers(
        self, config: Config, layers: range, times: float, device: int | None = None
    ) -> Iterator[LayerSavings]:
        """Costs and savings of those of ``layers`` that free bytes, at ``times`` microbatches in
        flight, on one pipeline device, or on the slowest."""
        kinds = self.costs.kinds_at(config, device)
        of = config.work_of_rank, kinds, times
        found = (self._savings_of(*of, layer) for layer in layers)
        return (each for each in found if each is not None)

    def _make_savings(
        self, work: tuple[int, int, int], kinds: tuple[str, ...], times: float, layer: int
    ) -> LayerSavings | None:
        none, recomputed, selective = self._of_each(work, kinds)
        kept = none.saved_bytes[layer]
        fewer, less = (kept - costs.saved_bytes[layer] for costs in (recomputed, selective))
        if max(fewer, less) <= 0 or layer in self.costs.profile.embedders:
            return None
        size, tensor, context = work
        held = self.costs.profile_of(context, size).times_at(size)[layer]
        link = self.costs.cluster.to_host
        parts = self.costs.parts(tensor)[layer]
        return LayerSavings(
            layer,
            recomputed.backward_s[layer] - none.backward_s[layer] if fewer > 0 else inf,
            times * max(0, fewer),
            held.peak_bytes / parts,
            max(0.0, times - TRAVELLING) * max(0, fewer),
            inf if link is None else kept / link.bytes_per_s,
            selective.backward_s[layer] - none.backward_s[layer] if less > 0 else inf,
            times * max(0, less),
            (held.most_bytes(True) - held.kept_bytes(True)) / parts,
        )

    def _of_each(
        self, work: tuple[int, int, int], kinds: tuple[str, ...]
    ) -> tuple[ChainCosts, ChainCosts, ChainCosts]:
        """Costs with all activations kept, with full recomputation, and with selective
        recomputation."""
        kept, recomputed, selective = (
            self.costs.chain_at(*work, self.costs.profile.all_layers(policy), kinds)
            for policy in (
                ActivationPolicy.KEEP,
                ActivationPolicy.RECOMPUTE,
                ActivationPolicy.SELECTIVE,
            )
        )
        return kept, recomputed, selective


def _whole(layer: LayerSavings) -> LayerSavings:
    """Copy that allows full recomputation only, at no cost."""
    return replace(
        layer, seconds=0.0, selective_s=inf, selective_bytes=0.0, offload_bytes=0.0, offload_s=inf
    )


def stages_key_config(config: Config) -> Config:
    """Copy of the config with the fields that do not affect its stages reset."""
    key = replace(config, split=False)
    return key if config.recompute.as_needed else replace(key, max_in_flight=False)


def round_trips(edges: Iterable[StageMessage]) -> Iterator[tuple[int, float]]:
    """Source stage and seconds of each message to the next stage, with its gradient if there is
    one."""
    for edge in edges:
        if edge.destination == edge.source + 1:
            yield edge.source, (1 + edge.needs_grad) * edge.seconds
