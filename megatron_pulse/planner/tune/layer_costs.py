"""Layer costs of a config on one rank before partitioning, and refusals that no partition can
mend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache, partial
from operator import add

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import PicklableError
from megatron_pulse.planner.cluster.cluster import Cluster
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
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.memory.workspace import Workspace
from megatron_pulse.planner.tune.rank_order import RankOrder
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
    SHARDS = "tensor parallelism does not divide the parameters or heads evenly"
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
    """

    forward_s: float
    backward_s: float
    weight_grad_s: float
    trained: float
    frozen: float
    saved_bytes: float
    largest_s: float
    forward_share: float


class LayerCosts:
    """One backbone's layers on one cluster, for any degrees and microbatch size.

    ``profile`` is of whole layers on one of the cluster's devices. ``sequence_parallel`` says
    whether boundaries can be divided with the tensors (not a UNet's). ``num_heads`` are the numbers
    of attention heads that tensor-parallel ranks share. ``state`` is the state kept per parameter.
    ``transform`` changes all chain costs, such as ``volume.relayed`` for relayed skips.
    ``times_at`` are cached layer times of a microbatch size.
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
        self.profile, self.cluster = profile, cluster
        self.global_batch_size = global_batch_size
        self.sequence_parallel = sequence_parallel
        self.num_heads, self.state, self.transform = num_heads, state, transform
        self.times_at = lru_cache(maxsize=None)(profile.times_at)
        self._chain_of = lru_cache(maxsize=512)(self._make_chain)
        self._workspaces: dict[tuple[int, int, ActivationPolicies], Workspace] = {}
        self._ranks_of = lru_cache(maxsize=None)(partial(RankOrder, cluster))
        self._sums_of = lru_cache(maxsize=None)(self._make_sums)
        self._totals_of = lru_cache(maxsize=512)(self._make_totals)
        self._indivisible = lru_cache(maxsize=None)(self._find_indivisible)

    def num_microbatches(self, config: Config) -> int:
        """Microbatches of a step on one pipeline."""
        return config.num_microbatches(self.global_batch_size)

    def ranks(self, config: Config) -> RankOrder:
        """Rank order and links of the config."""
        return self._ranks_of(config.pipeline, config.data, config.tensor, config.pp_before_dp)

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
        """Chain costs on one tensor-parallel rank, under policies (default: ``activations``).

        Layers with sharded parameters divide the shared part of their time. Under sequence
        parallelism they divide activations and boundaries too. Sums over ranks delay both passes.
        Every rank computes the rest in full.
        """
        if activations is None:
            activations = self.activations(config)
        return self.chain_at(config.micro_batch_size, activations, config.tensor)

    def chain_at(
        self, micro_batch_size: int, activations: ActivationPolicies, tensor: int
    ) -> ChainCosts:
        """Chain costs as in ``chain``, of any config with this microbatch size and tensor
        degree."""
        return self._chain_of(micro_batch_size, activations.on_device, tensor)

    def workspace(self, config: Config, activations: ActivationPolicies) -> Workspace:
        """Working memory of each layer's operations."""
        key = config.micro_batch_size, config.tensor, activations
        if key not in self._workspaces:
            times, parts = self.times_at(config.micro_batch_size), self.parts(config.tensor)
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
            config.micro_batch_size, config.recompute, config.tensor, config.split
        )

    def per_parameter(self, config: Config) -> float:
        """Bytes per parameter with its gradient and optimizer state, outside the optimizer step."""
        how = config.distributed_optimizer, config.data, self.state
        return bytes_per_parameter(self.profile.dtype, *how)

    def optimizer_step_bytes(self, config: Config, trained: float) -> float:
        """Additional bytes that the optimizer step needs for ``trained`` parameters."""
        how = config.distributed_optimizer, config.data, self.state
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
        stepping = state + self.optimizer_step_bytes(config, totals.trained) / config.pipeline
        limit = self.cluster.usable_bytes
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

    def _find_indivisible(self, tensor: int) -> str:
        """Reason why tensor parallelism of that degree is impossible; "" if it is possible."""
        sharded = [layer.sharded_parameters for layer in self.profile.layers]
        if tensor > 1 and (not any(sharded) or any(n % tensor for n in sharded)):
            return f"T = {tensor} does not divide the parameters of every layer"
        odd = [n for n in self.num_heads if n % tensor]
        return f"T = {tensor} does not divide {odd[0]} heads" if odd else ""

    def _make_chain(
        self, micro_batch_size: int, activations: ActivationPolicies, tensor: int
    ) -> ChainCosts:
        costs = self.profile.at(micro_batch_size, activations)
        if tensor > 1:
            costs = self._of_rank(costs, micro_batch_size, activations, tensor)
        return costs if self.transform is None else self.transform(costs)

    def _of_rank(
        self,
        costs: ChainCosts,
        micro_batch_size: int,
        activations: ActivationPolicies,
        tensor: int,
    ) -> ChainCosts:
        """Share of the chain's costs of one of several tensor-parallel ranks."""
        layers, parts = self.profile.layers, self.parts(tensor)
        edges = parts if self.sequence_parallel else [1] * len(layers)
        forward_s, backward_s, repeated_s = self._sums_of(micro_batch_size, tensor)
        repeated_s = tuple(
            (i in activations.recompute) * seconds for i, seconds in enumerate(repeated_s)
        )
        backward_s = tuple(map(add, backward_s, repeated_s))

        times = self.times_at(micro_batch_size)
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
        self, micro_batch_size: int, tensor: int
    ) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Seconds of each layer's sums over tensor-parallel ranks: forward, backward without
        recomputation, and recomputation."""

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
            return self._chain_of(micro_batch_size, self._activations_of(recompute), tensor)

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
            sum(costs.stored_parameters) - sum(costs.trained_parameters),
            sum(n for i, n in enumerate(saved) if i not in self.profile.embedders),
            max(f + b for f, b in layers),
            min((f / (f + b) for f, b in layers if f + b > 0), default=0.0),
        )
