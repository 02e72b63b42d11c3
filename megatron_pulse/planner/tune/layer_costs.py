"""Layer costs of a config on one rank before partitioning, and refusals that no partition can
mend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from operator import add
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import PicklableError
from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.planner.cluster.places import Place, places_of, splits_a_kind
from megatron_pulse.planner.cluster.rank_order import RankOrder
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.partition.memory import (
    DEFAULT_STATE,
    ParameterState,
    bytes_per_parameter,
    optimizer_step_bytes,
)
from megatron_pulse.planner.tune.collectives import (
    CollectiveCall,
    backward_sums,
    collective_s,
    forward_sums,
    recomputed_sums,
)
from megatron_pulse.planner.tune.composed_costs import composed, of_any
from megatron_pulse.planner.tune.config import Config, Recompute, divisors
from megatron_pulse.planner.tune.context_rank import context_costs, of_context_rank
from megatron_pulse.planner.tune.device_orders import device_orders, most_orders
from megatron_pulse.planner.tune.memory.workspace import Workspace
from megatron_pulse.planner.tune.weight_copies import with_weight_copies
from megatron_pulse.profile.layer_records import LayerTimes, ProfiledLayer
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES

MOST_KNOWN = 256
"""Activation policies whose working memory is cached."""


class Unfit(StrEnum):
    """Reason why a config cannot run, or need not be examined."""

    STATE = "weights, gradients and optimizer state do not fit"
    ACTIVATIONS = "activations do not fit"
    PARTITION = "no legal partition"
    LONG = "too many microbatches for a schedule"
    SHARDS = "tensor or context parallelism does not divide the parameters or heads evenly"
    SLOWER = "lower bound above the step time of the listed configs"
    SAME = "equivalent to another config"
    LATE = "unexplored when the search ended"


class UnfitError(PicklableError, ValueError):
    """A config cannot run."""

    def __init__(self, reason: Unfit, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Totals:
    """Sums over a chain's layers.

    ``largest_s`` is the work of the largest layer, ``forward_share`` the smallest ratio of forward
    to work of a layer. ``trained`` and ``frozen`` are parameter counts; a quantised one counts by
    its bytes. Embedders may be replicated: their recomputation and their activations are left out.
    With recomputation as needed, times are those without, and bytes the smaller of both.

    On unlike devices, seconds are the least of any device (``weight_grad_s`` the most), so that
    bounds hold. ``speeds`` say by kinds how much of such seconds a device does in one, at most.
    """

    forward_s: float
    backward_s: float
    weight_grad_s: float
    trained: float
    frozen: float
    saved_bytes: float
    largest_s: float
    forward_share: float
    speeds: Mapping[tuple[str, ...], float]


class LayerCosts:
    """One backbone's layers on one cluster, for any degrees and microbatch size.

    ``profile`` is of whole layers on one of the cluster's devices. If they differ, it has the costs
    on each kind (``Profile.kinds``), or times are taken to be the same. ``sequence_parallel`` says
    whether boundaries can be divided with the tensors (not a UNet's). ``num_heads`` are the numbers
    of attention heads that tensor-parallel ranks share. ``state`` is the state kept per parameter.
    ``transform`` changes all chain costs, such as ``volume.relayed`` for relayed skips. Offloaded
    weights are copied before use (``with_weight_copies``).
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        global_batch_size: int,
        sequence_parallel: bool = False,
        num_heads: tuple[int, ...] = (),
        state: ParameterState = DEFAULT_STATE,
        transform: Callable[[ChainCosts], ChainCosts] | None = None,
    ) -> None:
        self.profile, self.cluster = with_weight_copies(profile, cluster), cluster
        self._given = profile
        self.global_batch_size = global_batch_size
        self.sequence_parallel = sequence_parallel
        self.num_heads, self.state, self.transform = num_heads, state, transform
        self._profile_of = lru_cache(maxsize=None)(self._make_profile)
        self._times_of = lru_cache(maxsize=None)(self._make_times)
        self._chain_of = lru_cache(maxsize=512)(self._make_chain)
        self._workspaces: dict[tuple[object, ...], Workspace] = {}
        kinds = self.profile.kinds if cluster.mixed else ()
        self._kinds = {name: self.profile.of_kind(name) for name in kinds}
        missing = {kind.name for kind in cluster.kinds} - self._kinds.keys()
        if self._kinds and missing:
            raise ClusterError(
                f"cluster {cluster.name!r} has devices of kind {', '.join(sorted(missing))}, and "
                f"costs are known of {', '.join(self._kinds)}: give a profile of each kind"
            )
        self._ranks_of = lru_cache(maxsize=None)(self._make_ranks)
        self._places_of = lru_cache(maxsize=None)(self._make_places)
        self._orders_of = lru_cache(maxsize=None)(self._make_orders)
        self._sums_of = lru_cache(maxsize=None)(self._make_sums)
        self._totals_of = lru_cache(maxsize=512)(self._make_totals)
        self._indivisible = lru_cache(maxsize=None)(self._find_indivisible)

    def num_microbatches(self, config: Config) -> int:
        """Microbatches of a step on one pipeline."""
        return config.num_microbatches(self.global_batch_size)

    def profile_of(self, context: int, micro_batch_size: int) -> Profile:
        """Costs on one of ``context`` context-parallel ranks at this size; raises ProfileError if
        unknown."""
        return self.profile if context == 1 else self._profile_of(context, micro_batch_size)

    def _make_profile(self, context: int, micro_batch_size: int) -> Profile:
        # What ranks share, and copies of weights, are of the times at this size: those of other
        # sizes do not tell them.
        profile = self._given.only(micro_batch_size)
        if context > 1:
            profile = of_context_rank(profile, self.cluster, context)
        return with_weight_copies(profile, self.cluster)

    def times_at(self, config: Config) -> tuple[LayerTimes, ...]:
        """Layer times of a rank without tensor parallelism, at the config's microbatch size."""
        return self._times_of(config.micro_batch_size, config.context)

    def _make_times(self, micro_batch_size: int, context: int) -> tuple[LayerTimes, ...]:
        if context == 1 and not self._given.offloads_weights:
            return self.profile.times_at(micro_batch_size)
        return self._profile_of(context, micro_batch_size).times_at(micro_batch_size)

    def context_degrees(self) -> tuple[int, ...]:
        """Context degrees that a search may take: 1, and the numbers of ranks that divide a node
        and can share the tokens."""
        costs, node = self._given.context, self.cluster.devices_per_node
        if costs is None or self.cluster.mixed:
            return (1,)
        return tuple(size for size in divisors(node) if not costs.refusal(size))

    def ranks(self, config: Config) -> RankOrder:
        """Rank order and links of the config."""
        return self._ranks_of(*_degrees(config))

    def places(self, config: Config) -> tuple[Place, ...]:
        """Kinds and memory of the config's pipeline devices."""
        return self._places_of(*_degrees(config))

    def orders(self, config: Config) -> Iterator[Config]:
        """Yield the config in orders of the devices that differ for it (``most_orders``).

        There are none if every order puts a tensor-parallel group on unlike devices.
        """
        if not self.cluster.mixed:
            yield config
            return
        for order in self._orders_of(*_degrees(config)[:-1]):
            yield replace(config, device_order=order)

    def _make_orders(
        self, pipeline: int, data: int, tensor: int, context: int, pp_before_dp: bool
    ) -> list[tuple[int, ...]]:
        found: dict[tuple[Place, ...], tuple[int, ...]] = {}
        for order in self._device_orders:
            of = pipeline, data, tensor, context, pp_before_dp, order
            if not splits_a_kind(self._ranks_of(*of)):
                found.setdefault(self._places_of(*of), order)
            if len(found) == most_orders(self.cluster):
                break
        return list(found.values())

    @cached_property
    def _device_orders(self) -> list[tuple[int, ...]]:
        size = self.profile.micro_batch_sizes[-1]

        def speed(kind: str) -> float:
            own = self._kinds.get(kind, self.profile)
            return 1 / max(1e-12, sum(layer.whole_s for layer in own.times_at(size)))

        return list(device_orders(self.cluster, speed))

    def _make_ranks(
        self,
        pipeline: int,
        data: int,
        tensor: int,
        context: int,
        pp_before_dp: bool,
        order: tuple[int, ...],
    ) -> RankOrder:
        cluster = self.cluster.with_order(order) if order else self.cluster
        return RankOrder(cluster, pipeline, data, tensor, pp_before_dp, context)

    def _make_places(self, *degrees: Any) -> tuple[Place, ...]:
        return places_of(self._ranks_of(*degrees))

    def speeds(self, config: Config) -> float:
        """Seconds of the least work (``Totals``) that all pipeline devices do in one, at most."""
        speeds = self.totals(config).speeds
        return sum(speeds[kinds] for kinds in self._kinds_of_places(config))

    def _kinds_of_places(self, config: Config) -> tuple[tuple[str, ...], ...]:
        """Kinds of each place; empty where their costs are not known apart."""
        return tuple(place.kinds if self._kinds else () for place in self.places(config))

    def activations(self, config: Config) -> ActivationPolicies:
        """Activation policies that hold regardless of memory."""
        return self._activations_of(config.recompute)

    def _activations_of(self, recompute: Recompute) -> ActivationPolicies:
        return self.profile.all_layers(
            {
                Recompute.ALWAYS: ActivationPolicy.RECOMPUTE,
                Recompute.SELECTIVE: ActivationPolicy.SELECTIVE,
            }.get(recompute, ActivationPolicy.KEEP)
        )

    def chain(self, config: Config, activations: ActivationPolicies | None = None) -> ChainCosts:
        """Chain costs on one tensor- and context-parallel rank, under policies (default:
        ``activations``).

        On unlike devices, these are the slowest of the config's devices for each layer.

        Layers with sharded parameters divide the shared part of their time. Under sequence
        parallelism they divide activations and boundaries too. Sums over ranks delay both passes.
        Every rank computes the rest in full.
        """
        if activations is None:
            activations = self.activations(config)
        kinds = self.kinds_at(config)
        return self.chain_at(*config.work_of_rank, activations, kinds)

    def kinds_at(self, config: Config, device: int | None = None) -> tuple[str, ...]:
        """Kinds of a pipeline device, or of all; empty where their costs are not known apart."""
        if not self._kinds:
            return ()
        if device is not None:
            return self.places(config)[device].kinds
        return tuple(sorted({name for place in self.places(config) for name in place.kinds}))

    def chain_at(
        self,
        micro_batch_size: int,
        tensor: int,
        context: int,
        activations: ActivationPolicies,
        kinds: tuple[str, ...] = (),
    ) -> ChainCosts:
        """Chain costs as in ``chain``, of any config with this ``work_of_rank``, on these ``kinds``
        of devices."""
        kinds = kinds if self._kinds else ()
        return self._chain_of(micro_batch_size, tensor, context, activations.on_device, kinds)

    def chains(
        self, config: Config, activations: ActivationPolicies | None = None
    ) -> tuple[ChainCosts, ...]:
        """Chain costs on each pipeline device, as in ``chain``."""
        if activations is None:
            activations = self.activations(config)
        of = *config.work_of_rank, activations
        return tuple(self.chain_at(*of, kinds) for kinds in self._kinds_of_places(config))

    def cut_chain(
        self, config: Config, activations: ActivationPolicies, partition: Partition
    ) -> ChainCosts:
        """Chain costs with the seconds of each layer on its device."""
        if not self._kinds:
            return self.chain(config, activations)
        chains = self.chains(config, activations)
        return composed(
            [chains[partition.device_of_layer(i)] for i in range(len(self.profile.layers))]
        )

    def workspace(self, config: Config, activations: ActivationPolicies) -> Workspace:
        """Working memory of each layer's operations."""
        key = *config.work_of_rank, activations
        if key not in self._workspaces:
            times, parts = self.times_at(config), self.parts(config.tensor)
            made = Workspace(times, parts, self.chain(config, activations), activations)
            if len(self._workspaces) >= MOST_KNOWN:
                self._workspaces.clear()
            self._workspaces[key] = made
        return self._workspaces[key]

    def parts(self, tensor: int) -> list[int]:
        """Number of ranks that divide each layer's work."""
        return [tensor if layer.sharded_parameters else 1 for layer in self.profile.layers]

    def totals(self, config: Config) -> Totals:
        """Sums over the ``chain``."""
        return self._totals_of(
            *(*config.work_of_rank, config.recompute, config.split),
            tuple(sorted(set(self._kinds_of_places(config)))),
        )

    def per_parameter(self, config: Config) -> float:
        """Bytes per parameter with its gradient and optimizer state, outside the optimizer step."""
        how = config.distributed_optimizer, config.replicas, self.state
        return bytes_per_parameter(self.profile.dtype, *how)

    def optimizer_step_bytes(self, config: Config, trained: float) -> float:
        """Additional bytes that the optimizer step needs for ``trained`` parameters."""
        how = config.distributed_optimizer, config.replicas, self.state
        return trained * optimizer_step_bytes(self.profile.dtype, *how)

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element in the reduction over replicas."""
        return self.state.gradient_bytes(self.profile.dtype)

    def state_bytes(self, config: Config, trained: float, frozen: float) -> float:
        """Bytes of parameters; for trained ones with gradients and optimizer state."""
        return trained * self.per_parameter(config) + frozen * ELEMENT_BYTES[self.profile.dtype]

    def refuse(self, config: Config) -> None:
        """Raise UnfitError for a config that no partition can make fit."""
        if said := self._indivisible(config.tensor, config.context):
            raise UnfitError(Unfit.SHARDS, said)
        num_layers = len(self.profile.layers)
        num_stages = config.pipeline * config.layout.num_chunks
        if num_stages > num_layers:
            raise UnfitError(
                Unfit.PARTITION, f"{config}: {num_layers} layers for {num_stages} stages"
            )
        totals = self.totals(config)
        state = self.state_bytes(config, totals.trained, totals.frozen) / config.pipeline
        stepping = state + self.optimizer_step_bytes(config, totals.trained) / config.pipeline
        limit = self.mean_usable_bytes(config)
        if stepping > limit:
            said = f"the mean device needs {stepping / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
            raise UnfitError(Unfit.STATE, f"{config}: {said}")
        kept = totals.saved_bytes / config.pipeline
        if state + kept > limit:
            raise UnfitError(
                Unfit.ACTIVATIONS,
                f"{config}: with one microbatch the mean device needs "
                f"{(state + kept) / 1e9:.3g} GB of {limit / 1e9:.3g} GB",
            )

    def mean_usable_bytes(self, config: Config) -> float:
        """Usable bytes of the config's mean pipeline device."""
        if not self.cluster.mixed:
            return self.cluster.usable_bytes
        return sum(place.usable_bytes for place in self.places(config)) / config.pipeline

    def _find_indivisible(self, tensor: int, context: int) -> str:
        """Reason why these degrees are impossible together; "" if they are possible."""
        if context > 1 and self.cluster.mixed:
            return f"K = {context}: ranks that share tokens are on unlike devices"
        if context > 1 and (said := context_costs(self._given).refusal(context, tensor)):
            return said
        sharded = [layer.sharded_parameters for layer in self.profile.layers]
        if tensor > 1 and (not any(sharded) or any(n % tensor for n in sharded)):
            return f"T = {tensor} does not divide the parameters of every layer"
        odd = [n for n in self.num_heads if n % tensor]
        return f"T = {tensor} does not divide {odd[0]} heads" if odd else ""

    def _make_chain(
        self,
        micro_batch_size: int,
        tensor: int,
        context: int,
        activations: ActivationPolicies,
        kinds: tuple[str, ...],
    ) -> ChainCosts:
        if len(kinds) > 1:
            of = micro_batch_size, tensor, context, activations
            return of_any([self._chain_of(*of, (kind,)) for kind in kinds], max)
        profile = self._kinds[kinds[0]] if kinds else self.profile_of(context, micro_batch_size)
        costs = profile.at(micro_batch_size, activations)
        if tensor > 1:
            costs = self._of_rank(costs, micro_batch_size, activations, tensor, profile, context)
        return costs if self.transform is None else self.transform(costs)

    def _of_rank(
        self,
        costs: ChainCosts,
        micro_batch_size: int,
        activations: ActivationPolicies,
        tensor: int,
        profile: Profile,
        context: int,
    ) -> ChainCosts:
        """Share of the chain's costs of one of several tensor-parallel ranks."""
        layers, parts = profile.layers, self.parts(tensor)
        times = profile.times_at(micro_batch_size)
        edges = parts if self.sequence_parallel else [1] * len(layers)
        forward_s, backward_s, repeated_s = self._sums_of(micro_batch_size, tensor, context)
        repeated_s = tuple(
            (i in activations.recompute) * seconds for i, seconds in enumerate(repeated_s)
        )
        backward_s = tuple(map(add, backward_s, repeated_s))

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
            recompute_bytes=share(costs.recompute_bytes),
            shared_bytes=share(costs.shared_bytes),
            wgrad_bytes=share(costs.wgrad_bytes),
            saved_bytes=share(costs.saved_bytes),
            boundary_bytes=share(costs.boundary_bytes),
            skips=tuple(
                replace(s, num_bytes=s.num_bytes // edges[s.destination]) for s in costs.skips
            ),
        )

    def _own_part(self, layer: ProfiledLayer, times: LayerTimes, tensor: int) -> float:
        """Share of a layer's time that each of ``tensor`` ranks computes (Amdahl's law).

        If one of two ranks takes less than half, because its tensors now fit the caches, larger
        degrees divide the measured time.
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
        self, micro_batch_size: int, tensor: int, context: int
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds of each layer's sums over tensor-parallel ranks: forward, backward without
        recomputation, and recomputation."""

        @cache
        def seconds(calls: tuple[CollectiveCall, ...]) -> float:
            return sum(collective_s(self.cluster, call, range(tensor)) for call in calls)

        given = micro_batch_size, self.sequence_parallel
        profile = self.profile_of(context, micro_batch_size)
        sums = [layer.shard_sums for layer in profile.layers]
        forward, backward, repeated = (
            tuple(seconds(tuple(of(x, *given))) for x in sums)
            for of in (forward_sums, backward_sums, recomputed_sums)
        )
        return forward, backward, repeated

    def _make_totals(
        self,
        micro_batch_size: int,
        tensor: int,
        context: int,
        recompute: Recompute,
        split: bool,
        places: tuple[tuple[str, ...], ...],
    ) -> Totals:
        def of(recompute: Recompute, kinds: tuple[str, ...]) -> ChainCosts:
            activations = self._activations_of(recompute)
            return self._chain_of(micro_batch_size, tensor, context, activations, kinds)

        costs = of(recompute, places[0]).of_schedule(split)
        saved = costs.saved_bytes
        if recompute.as_needed:
            saved = tuple(map(min, saved, of(Recompute.ALWAYS, places[0]).saved_bytes))
        columns = {kinds: self._passes(of(recompute, kinds), recompute, split) for kinds in places}
        forward_s, backward_s = (
            [min(own) for own in zip(*(c[k] for c in columns.values()), strict=True)]
            for k in range(2)
        )
        weight_s = zip(*(of(recompute, k).weight_grad_s for k in places), strict=True)
        layers = list(zip(forward_s, backward_s, strict=True))
        every = [pair for c in columns.values() for pair in zip(*c, strict=True)]
        return Totals(
            sum(forward_s),
            sum(backward_s),
            sum(map(max, weight_s)),
            sum(costs.trained_parameters),
            sum(costs.stored_parameters) - sum(costs.trained_parameters),
            sum(n for i, n in enumerate(saved) if i not in self.profile.embedders),
            max(f + b for f, b in layers),
            min((f / (f + b) for f, b in every if f + b > 0), default=0.0),
            {kinds: _speed(layers, zip(*c, strict=True)) for kinds, c in columns.items()},
        )

    def _passes(
        self, costs: ChainCosts, recompute: Recompute, split: bool
    ) -> tuple[list[float], list[float]]:
        """Seconds of each layer's passes, without the recomputation of copied embedders."""
        costs = costs.of_schedule(split)
        backward_s = []
        for i, (forward, backward) in enumerate(
            zip(costs.forward_s, costs.backward_s, strict=True)
        ):
            copied = backward and i in self.profile.embedders
            twice = recompute is Recompute.ALWAYS and copied
            backward_s.append(backward - (forward if twice else 0.0))
        return list(costs.forward_s), backward_s


def _speed(least: Iterable[tuple[float, float]], own: Iterable[tuple[float, float]]) -> float:
    """One over the smallest ratio of a device's layers to the least seconds of any device."""
    pairs = [(f + b, f1 + b1) for (f, b), (f1, b1) in zip(least, own, strict=True)]
    return 1 / min((mine / most for most, mine in pairs if most > 0), default=1.0)


def _degrees(config: Config) -> tuple[int, int, int, int, bool, tuple[int, ...]]:
    of = config.pipeline, config.data, config.tensor, config.context, config.pp_before_dp
    return *of, config.device_order
