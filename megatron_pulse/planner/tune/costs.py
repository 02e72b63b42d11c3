"""What a config's layers cost on one rank, before they are cut; what no cut can mend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache, partial
from operator import add

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.faults import Carried
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.partition.memory import (
    DEFAULT_STATE,
    ParameterState,
    bytes_per_parameter,
    stepping_bytes,
)
from megatron_pulse.planner.tune.collectives import (
    CollectiveCall,
    backward_sums,
    collective_s,
    forward_sums,
    recomputed_sums,
)
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.memory.relief import Relief
from megatron_pulse.planner.tune.ranks import Ranks
from megatron_pulse.profile.devices import ELEMENT_BYTES
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.record.layers import ProfiledLayer
from megatron_pulse.profile.record.times import LayerTimes


class Unfit(StrEnum):
    """Why a config cannot run, or need not be looked at."""

    STATE = "weights, gradients and optimizer state do not fit"
    ACTIVATIONS = "activations do not fit"
    PARTITION = "no legal partition"
    LONG = "too many microbatches for a schedule"
    SHARDS = "tensor parallelism divides nothing, or not evenly"
    SLOWER = "slower than those listed, by its lower bound"
    SAME = "comes to the same as another config"
    LATE = "left when the search ended"


class UnfitError(Carried, ValueError):
    """A config that cannot run."""

    def __init__(self, reason: Unfit, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Totals:
    """Sums over a chain's layers; ``largest_s`` is the work of the largest layer, and
    ``forward_share`` the least that the forward is of a layer's work. ``trained`` and ``frozen``
    are parameters. Embedders may run as copies: they are counted as one that is not recomputed, and
    whose activations are nowhere. Where recomputation is as needed, times are those without and
    bytes the least of both."""

    forward_s: float
    backward_s: float
    weight_grad_s: float
    trained: float
    frozen: float
    saved_bytes: float
    largest_s: float
    forward_share: float


class Costs:
    """One backbone's layers on one cluster, for any degrees and microbatch size.

    ``profile`` is of whole layers on one of the cluster's devices. ``sequence_parallel`` says
    whether the backbone's boundaries can be divided with its tensors (not a UNet's), ``num_heads``
    are the numbers of attention heads that tensor-parallel ranks share, ``state`` is what a run
    keeps of a parameter.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        global_batch_size: int,
        sequence_parallel: bool = False,
        num_heads: tuple[int, ...] = (),
        state: ParameterState = DEFAULT_STATE,
    ) -> None:
        self.profile, self.cluster = profile, cluster
        self.global_batch_size = global_batch_size
        self.sequence_parallel = sequence_parallel
        self.num_heads, self.state = num_heads, state
        self._times_at = lru_cache(maxsize=None)(profile.times_at)
        self._costs_of = lru_cache(maxsize=512)(self._make_costs)
        self._ranks_of = lru_cache(maxsize=None)(partial(Ranks, cluster))
        self._sums_of = lru_cache(maxsize=None)(self._make_sums)
        self._totals_of = lru_cache(maxsize=512)(self._make_totals)
        self._indivisible = lru_cache(maxsize=None)(self._find_indivisible)

    def ranks(self, config: Config) -> Ranks:
        """Where the config's ranks are."""
        return self._ranks_of(config.pipeline, config.data, config.tensor, config.pipeline_inside)

    def relief(self, config: Config) -> Relief:
        """What is not kept whatever memory there is."""
        return self._relief_of(config.recompute)

    def _relief_of(self, recompute: Recompute) -> Relief:
        every = self.profile.recomputed(True)
        if recompute is Recompute.ALWAYS:
            return Relief(every)
        return Relief(selective=every) if recompute is Recompute.SELECTIVE else Relief()

    def costs(self, config: Config, relief: Relief | None = None) -> ChainCosts:
        """Costs of the chain on one tensor-parallel rank, that keeps not all of these layers
        (default: those of ``relief``).

        Of what has sharded parameters the shared time is divided, and its activations and
        boundaries where these are sequence parallel; the sums over ranks delay both passes. Every
        rank computes all the rest.
        """
        if relief is None:
            relief = self.relief(config)
        key = config.micro_batch_size, relief.again, config.tensor, relief.selective
        return self._costs_of(*key)

    def totals(self, config: Config) -> Totals:
        """Sums over ``costs``."""
        return self._totals_of(
            config.micro_batch_size, config.recompute, config.tensor, config.split
        )

    def per_parameter(self, config: Config) -> float:
        """Bytes of a parameter with its gradient and optimizer state, while a step computes."""
        how = config.distributed_optimizer, config.data, self.state
        return bytes_per_parameter(self.profile.dtype, *how)

    def stepping_bytes(self, config: Config, trained: float) -> float:
        """Bytes of so many trained parameters that the optimizer has beside while it works."""
        how = config.distributed_optimizer, config.data, self.state
        return trained * stepping_bytes(self.profile.dtype, *how)

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient as it is summed over replicas."""
        return self.state.gradient_bytes(self.profile.dtype)

    def state_bytes(self, config: Config, trained: float, frozen: float) -> float:
        """Bytes of so many parameters, those of the trained ones with all that goes with them."""
        return trained * self.per_parameter(config) + frozen * ELEMENT_BYTES[self.profile.dtype]

    def refuse(self, config: Config) -> None:
        """Raises UnfitError for what no partition can mend."""
        if said := self._indivisible(config.tensor):
            raise UnfitError(Unfit.SHARDS, said)
        num_layers = len(self.profile.layers)
        num_stages = config.pipeline * config.layout.num_chunks
        if num_stages > num_layers:
            raise UnfitError(
                Unfit.PARTITION, f"{config}: {num_layers} layers for {num_stages} stages"
            )
        totals = self.totals(config)
        state = self.state_bytes(config, totals.trained, totals.frozen) / config.pipeline
        stepping = state + self.stepping_bytes(config, totals.trained) / config.pipeline
        limit = self.cluster.usable_bytes
        if stepping > limit:
            said = f"{stepping / 1e9:.3g} GB on the mean device, which has {limit / 1e9:.3g}"
            raise UnfitError(Unfit.STATE, f"{config}: {said}")
        kept = totals.saved_bytes / config.pipeline
        if state + kept > limit:
            raise UnfitError(
                Unfit.ACTIVATIONS,
                f"{config}: {(state + kept) / 1e9:.3g} GB with one microbatch on the mean device, "
                f"which has {limit / 1e9:.3g}",
            )

    def _find_indivisible(self, tensor: int) -> str:
        """What tensor parallelism of that degree does not divide; "" if there is nothing."""
        sharded = [layer.sharded_parameters for layer in self.profile.layers]
        if tensor > 1 and (not any(sharded) or any(n % tensor for n in sharded)):
            return f"T = {tensor} divides no or not all parameters"
        odd = [n for n in self.num_heads if n % tensor]
        return f"T = {tensor} does not divide {odd[0]} heads" if odd else ""

    def _make_costs(
        self,
        micro_batch_size: int,
        recompute: frozenset[int],
        tensor: int,
        selective: frozenset[int],
    ) -> ChainCosts:
        costs = self.profile.at(micro_batch_size, recompute, selective)
        if tensor == 1:
            return costs
        layers = self.profile.layers
        parts = [tensor if layer.sharded_parameters else 1 for layer in layers]
        edges = parts if self.sequence_parallel else [1] * len(layers)
        forward_s, backward_s, repeated_s = self._sums_of(micro_batch_size, tensor)
        repeated_s = tuple((i in recompute) * seconds for i, seconds in enumerate(repeated_s))
        backward_s = tuple(map(add, backward_s, repeated_s))

        times = self._times_at(micro_batch_size)
        own = [self._own_part(*of, tensor) for of in zip(layers, times, strict=True)]
        counts = [layer.of_rank(tensor) for layer in layers]

        def divide(values: tuple[float, ...]) -> list[float]:
            return [value * part for value, part in zip(values, own, strict=True)]

        def share(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(value // n for value, n in zip(values, edges, strict=True))

        return replace(
            costs,
            forward_s=tuple(map(add, divide(costs.forward_s), forward_s)),
            backward_s=tuple(map(add, divide(costs.backward_s), backward_s)),
            weight_grad_s=tuple(divide(costs.weight_grad_s)),
            split_forward_s=tuple(map(add, divide(costs.split_forward_s), forward_s)),
            split_backward_s=tuple(map(add, divide(costs.split_backward_s), backward_s)),
            parameters=tuple(count for count, _ in counts),
            trained=tuple(trained for _, trained in counts),
            recompute_s=tuple(map(add, divide(costs.recompute_s), repeated_s)),
            again_bytes=share(costs.again_bytes),
            shared_bytes=share(costs.shared_bytes),
            waiting_bytes=share(costs.waiting_bytes),
            saved_bytes=share(costs.saved_bytes),
            boundary_bytes=share(costs.boundary_bytes),
            skips=tuple(
                replace(s, num_bytes=s.num_bytes // edges[s.destination]) for s in costs.skips
            ),
        )

    def _own_part(self, layer: ProfiledLayer, times: LayerTimes, tensor: int) -> float:
        """The part of a layer's time that each of ``tensor`` ranks computes (Amdahl's law).

        Where one of two ranks took less than half, as tensors came to fit its caches, more ranks
        divide what that one took.
        """
        if not layer.sharded_parameters:
            return 1.0
        share = layer.sharded_time
        if times.halved_s and times.whole_s:
            share = 2 * max(0.0, 1 - times.halved_s / times.whole_s)
        if self.sequence_parallel:  # which divides norms and residuals too
            share = max(1.0, share)
        return 1 - share + share / tensor if share <= 1 else (2 - share) / tensor

    def _make_sums(
        self, micro_batch_size: int, tensor: int
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds in which each layer sums over tensor-parallel ranks: in a forward, in a backward
        where nothing is computed again, and in computing it again."""

        @cache
        def seconds(calls: tuple[CollectiveCall, ...]) -> float:
            return sum(collective_s(self.cluster, call, range(tensor)) for call in calls)

        given = micro_batch_size, self.sequence_parallel
        sums = [layer.shard_sums for layer in self.profile.layers]
        forward, backward, repeated = (
            tuple(seconds(tuple(of(x, *given))) for x in sums)
            for of in (forward_sums, backward_sums, recomputed_sums)
        )
        return forward, backward, repeated

    def _make_totals(
        self, micro_batch_size: int, recompute: Recompute, tensor: int, split: bool
    ) -> Totals:
        def of(recompute: Recompute) -> ChainCosts:
            relief = self._relief_of(recompute)
            return self._costs_of(micro_batch_size, relief.again, tensor, relief.selective)

        costs = of(recompute).of_schedule(split)
        saved = costs.saved_bytes
        if recompute.as_needed:
            saved = tuple(map(min, saved, of(Recompute.ALWAYS).saved_bytes))
        backward_s = []
        for i, (forward, backward) in enumerate(
            zip(costs.forward_s, costs.backward_s, strict=True)
        ):
            copied = backward and i in self.profile.embedders
            twice = recompute is Recompute.ALWAYS and copied
            backward_s.append(backward - (forward if twice else 0.0))
        layers = list(zip(costs.forward_s, backward_s, strict=True))
        return Totals(
            sum(costs.forward_s),
            sum(backward_s),
            sum(costs.weight_grad_s),
            sum(costs.trained_parameters),
            sum(costs.parameters) - sum(costs.trained_parameters),
            sum(n for i, n in enumerate(saved) if i not in self.profile.embedders),
            max(f + b for f, b in layers),
            min((f / (f + b) for f, b in layers if f + b > 0), default=0.0),
        )
