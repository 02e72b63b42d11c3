"""Which activations to compute again, or to have on the host, where they do not all fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from math import inf

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.memory import in_flight
from megatron_pulse.planner.schedule.bound.bounds import filled
from megatron_pulse.planner.step.replay import Edge
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.memory.knapsack import Spared
from megatron_pulse.planner.tune.memory.least_work import least_work
from megatron_pulse.planner.tune.memory.relief import Relief
from megatron_pulse.planner.tune.stages import Cut, Stages
from megatron_pulse.profile.devices import ELEMENT_BYTES

LEVELS = 6
"""Steps from nothing computed again to all, in which cuts are looked for."""

FEWER = 0.7
"""Share of what is in flight at full rate that there is to be room for, but for ample room: with
split backwards it costs little."""

TRAVELLING = 2.0
"""Microbatches of those in flight whose activations are not on the host: one in use, and one that
comes or goes."""

ON_LINK = 0.9
"""Share of the time of a microbatch in which the link to the host may be busy, each way."""


_least_work = lru_cache(maxsize=2048)(least_work)
"""Cuts that are moved leave most devices as they were."""


class Sparing(Cut):
    """Stages of which as few layers as are needed compute their activations again, or have them on
    the host."""

    def needed(self, config: Config, partition: Partition) -> Relief:
        """The layers to compute again with these cuts, all or what is cheap, and those whose
        activations wait on the host, so that there is room for what is in flight at about full
        rate; where all of a device do not spare enough, fewer will be, and one where what is made
        anew of all has no room."""
        stages = self.cut_with(config, partition, Relief())
        placement, flying = (
            partition.placement,
            self._flying(config, 1.0 if config.ample else FEWER),
        )
        link_s = 0.0
        if config.recompute is Recompute.HOST:
            link_s = ON_LINK * stages.busy_s(config.split)
        works = stages.working_bytes[True]  # with split backwards it is the more, or as much
        chosen, spent = Relief(), dict[int, Relief]()
        for device in range(placement.num_devices):
            own = placement.stages_of_device(device)
            need = sum(flying[s] * stages.saved_bytes[s] for s in own)
            need -= self.left(stages, device, split=True)
            if need <= 0:
                continue
            every = tuple(
                each
                for s in own
                for each in self._sparing(config, partition.layers_of_stage(s), flying[s])
            )
            found = _least_work(every, need, works[device], link_s)
            if found is None:
                spent[device] = found = Relief(frozenset(each.layer for each in every))
            elif must := self._again_for_one(config, partition, device, every, found):
                given = tuple(_whole(each) if each.layer in must else each for each in every)
                found = _least_work(given, need, works[device], link_s) or found
                found = Relief(found.again | must, found.host - must, found.selective - must)
            chosen |= found
        return self._with_fewer_made(config, stages, chosen, spent, link_s) if spent else chosen

    def _with_fewer_made(
        self,
        config: Config,
        stages: Stages,
        chosen: Relief,
        spent: Mapping[int, Relief],
        link_s: float,
    ) -> Relief:
        """The same, but where devices that compute all again have no room for what they make anew,
        with as little again as leaves room for one microbatch."""
        made, found = self.cut_with(config, stages.partition, chosen), Relief()
        lacking = [d for d in spent if self._short(config, made, d) > 0]
        for device in lacking:
            found |= self._for_one(config, stages, device, link_s) or spent[device]
        others = frozenset().union(*(spent[device].again for device in lacking))
        rest = (each - others for each in (chosen.again, chosen.host, chosen.selective))
        return found | Relief(*rest)

    def _again_for_one(
        self,
        config: Config,
        partition: Partition,
        device: int,
        layers: Iterable[Spared],
        chosen: Relief,
    ) -> frozenset[int]:
        """Which of a device's ``layers`` must be computed again whole besides, if anything helps,
        so that there is room for one microbatch whose weight gradients wait: with what is cheap
        they wait with as much as without."""
        if not config.split:
            return frozenset()
        stages, costs = self.cut_with(config, partition, chosen), self.costs(config, chosen)
        if (short := self._short(config, stages, device)) <= 0:
            return frozenset()
        may = tuple(
            replace(
                _whole(each),
                seconds=each.seconds - (each.part_s if each.layer in chosen.selective else 0.0),
                num_bytes=float(
                    max(costs.saved_bytes[each.layer], costs.waiting_bytes[each.layer])
                ),
            )
            for each in layers
            if each.layer not in chosen.again and each.seconds < inf
        )
        found = _least_work(may, short, stages.working_bytes[config.split][device])
        return frozenset() if found is None else found.again

    def _short(self, config: Config, stages: Stages, device: int) -> float:
        """Bytes that a device lacks for one microbatch."""
        held = stages.per_device(stages.kept_bytes(config.split))[device]
        return held - self.left(stages, device, config.split)

    def _for_one(self, config: Config, stages: Stages, device: int, link_s: float) -> Relief | None:
        """What a device must compute again so that there is room for one microbatch; None if it is
        not known how."""
        partition = stages.partition
        own = partition.placement.stages_of_device(device)
        need = sum(stages.saved_bytes[s] for s in own) - self.left(stages, device, config.split)
        every = tuple(
            each for s in own for each in self._sparing(config, partition.layers_of_stage(s), 1.0)
        )
        return _least_work(every, need, stages.working_bytes[config.split][device], link_s)

    def holds(self, config: Config, stages: Stages, share: float) -> bool:
        """Whether there is room for that share of what is in flight at full rate."""
        flying = self._flying(config, share)
        away = stages.offloaded_bytes or (0.0,) * len(flying)
        held = stages.per_device(
            tuple(
                n * b - max(0.0, n - TRAVELLING) * o
                for n, b, o in zip(flying, stages.saved_bytes, away, strict=True)
            )
        )
        return all(
            self.left(stages, device, config.split) >= need for device, need in enumerate(held)
        )

    def held_s(self, config: Config, stages: Stages) -> float:
        """Seconds of a microbatch that the memory for activations asks for: it cannot come and go
        sooner than what devices hold of one, times how long, fills what whole ones can of their
        room."""
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
            room = max(self.left(stages, device, config.split), least)
            if not config.ample:
                room = min(room, config.pipeline * least)
            if least:
                own = [kept[stage] for stage in home.stages_of_device(device)]
                least_s = max(least_s, taken[device] / filled(room, own))
        return least_s

    def rule(self, config: Config, share: float, beside: float) -> MemoryRule:
        """What a device may hold beside so many bytes, with that share of full rate's in flight."""
        per_parameter = self.per_parameter(config)
        return MemoryRule(
            self.cluster.usable_bytes - beside,
            per_parameter,
            self._flying(config, share),
            ELEMENT_BYTES[self.profile.dtype] / per_parameter,
        )

    def optimizer_rule(self, config: Config) -> MemoryRule:
        """What a device may hold while the optimizer works, where few activations bind."""
        held, stages = self.per_parameter(config), config.placement.num_stages
        each = held + self.stepping_bytes(config, 1.0)
        frozen = ELEMENT_BYTES[self.profile.dtype] / each
        return MemoryRule(self.cluster.usable_bytes, each, (0.0,) * stages, frozen)

    def levels(self, config: Config) -> list[Relief]:
        """More and more layers, from none to all that spare bytes, first those that spare the most
        for a second's work."""
        every = list(self._sparing(config, range(len(self.profile.layers)), 1.0))
        ways = sorted(
            (way for each in every for way in each.ways),
            key=lambda way: way.seconds / way.num_bytes,
        )
        total = sum(max(way.num_bytes for way in each.ways) for each in every)
        levels, spared = [Relief()], dict[int, float]()
        again, part = set[int](), set[int]()
        for way in ways:
            layer = way.layer.layer
            if spared.get(layer, 0.0) >= way.num_bytes:
                continue
            spared[layer] = way.num_bytes
            part.discard(layer)
            (part if way.is_part else again).add(layer)
            if sum(spared.values()) >= total * len(levels) / LEVELS * (1 - 1e-9):
                levels.append(Relief(frozenset(again), selective=frozenset(part)))
        return levels

    def _flying(self, config: Config, share: float) -> tuple[float, ...]:
        """Of each stage, that share of the microbatches in flight at full rate, at least one."""
        count = config.num_microbatches(self.global_batch_size)
        return tuple(max(1.0, share * n) for n in in_flight(config.placement, count))

    def _sparing(self, config: Config, layers: range, times: float) -> Iterator[Spared]:
        """What each of ``layers`` takes and spares ``times`` in flight, where it spares any."""
        of = config.micro_batch_size, config.tensor, times
        found = (self._spared(*of, layer) for layer in layers)
        return (each for each in found if each is not None)

    @cached_property
    def _spared(self) -> Callable[[int, int, float, int], Spared | None]:
        return lru_cache(maxsize=16384)(self._make_spared)

    def _make_spared(self, size: int, tensor: int, times: float, layer: int) -> Spared | None:
        none, again, part = self._of_each(size, tensor)
        kept = none.saved_bytes[layer]
        fewer, less = (kept - costs.saved_bytes[layer] for costs in (again, part))
        if max(fewer, less) <= 0 or layer in self.profile.embedders:
            return None
        held, link = self._times_at(size)[layer], self.cluster.to_host
        parts = self._parts(tensor, layer)
        return Spared(
            layer,
            again.backward_s[layer] - none.backward_s[layer] if fewer > 0 else inf,
            times * max(0, fewer),
            held.peak_bytes / parts,
            max(0.0, times - TRAVELLING) * max(0, fewer),
            inf if link is None else kept / link.bytes_per_s,
            part.backward_s[layer] - none.backward_s[layer] if less > 0 else inf,
            times * max(0, less),
            (held.most_bytes(True) - held.kept_bytes(True)) / parts,
        )

    def _of_each(self, size: int, tensor: int) -> tuple[ChainCosts, ChainCosts, ChainCosts]:
        """Costs where all is kept, where all is computed again, and where all that is cheap is."""
        whole, none = self.profile.recomputed(True), frozenset[int]()
        reliefs = (none, none), (whole, none), (none, whole)
        kept, again, part = (self._costs_of(size, r, tensor, s) for r, s in reliefs)
        return kept, again, part


def _whole(layer: Spared) -> Spared:
    """Computed again whole or not at all, at no cost."""
    return replace(layer, seconds=0.0, part_s=inf, part_bytes=0.0, away_bytes=0.0, copying=inf)


def round_trips(edges: Iterable[Edge]) -> Iterator[tuple[int, float]]:
    """Of each message to the next stage the stage that sends it, and seconds there and, where its
    gradient is wanted, back."""
    for edge in edges:
        if edge.destination == edge.source + 1:
            yield edge.source, (1 + edge.wants) * edge.seconds
