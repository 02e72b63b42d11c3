"""Recomputation for the FSDP baseline, where one device has all layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import accumulate

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.planner.tune.fsdp.layer_dp import (
    ActivationRoom,
    LayerPolicy,
    cheapest_recompute,
)
from megatron_pulse.planner.tune.memory.recompute_knapsack import LayerSavings, least_seconds
from megatron_pulse.profile.profile import Profile


class RecomputeCosts:
    """Costs and savings of recomputing each layer, for microbatches of ``size`` samples.

    ``costs`` are those of ``profile`` without recomputation.
    """

    def __init__(self, profile: Profile, size: int) -> None:
        self._profile, self._size = profile, size
        every = range(len(profile.layers))
        self.costs = costs = profile.at(size, ActivationPolicies())
        whole, part = (
            profile.at(size, profile.all_layers(policy))
            for policy in (ActivationPolicy.RECOMPUTE, ActivationPolicy.SELECTIVE)
        )
        self._policies = [self._policies_of(i, whole, part) for i in every]
        self._savings = [
            LayerSavings(
                i,
                whole.backward_s[i] - costs.backward_s[i],
                costs.saved_bytes[i] - whole.saved_bytes[i],
                0.0,
                selective_s=part.backward_s[i] - costs.backward_s[i],
                selective_bytes=costs.saved_bytes[i] - part.saved_bytes[i],
            )
            for i in every
        ]
        self.chain = lru_cache(maxsize=16)(self._chain)  # the units of one configuration share it
        self.chosen = cache(self._chosen)
        self.least_s = cache(self._least_s)

    def _chain(self, activations: ActivationPolicies) -> ChainCosts:
        """Chain costs with these layers recomputed."""
        return self._profile.at(self._size, activations)

    def made_bytes(self, layers: Iterable[int], activations: ActivationPolicies) -> float:
        """Peak bytes that neighbouring ``layers`` recompute in their backward, beyond what is held
        for them.

        Later layers have freed their activations by then.
        """
        chain, most, gone = self.chain(activations), 0.0, 0.0
        for i in reversed(list(layers)):
            policy = int(i in activations.selective) or 2 * (i in activations.recompute)
            most = max(most, self._policies[i][policy].made - gone)
            gone += chain.saved_bytes[i]
        return most

    def needed_bytes(self, activations: ActivationPolicies) -> float:
        """Peak activation bytes of one microbatch."""
        every = range(len(self._policies))
        return float(sum(self.chain(activations).saved_bytes)) + self.made_bytes(every, activations)

    def may_fit(self, rooms: Iterable[ActivationRoom]) -> bool:
        """Necessary condition to fit: each layer in turn takes the smallest policy that its room
        allows."""
        held = 0.0
        for policies, room in zip(self._policies, rooms, strict=True):
            sums = [(held + policy.held - policy.shared, policy.made) for policy in policies]
            fits = [now for now, made in sums if now <= room.held and now + made <= room.making]
            if not fits:
                return False
            held = min(fits)
        return True

    def _policies_of(self, i: int, whole: ChainCosts, part: ChainCosts) -> tuple[LayerPolicy, ...]:
        """Policies of a layer: keep, selective recomputation, full recomputation."""
        saved, shared = float(self.costs.saved_bytes[i]), float(whole.shared_bytes[i])
        back_s, held = self.costs.backward_s[i], float(part.saved_bytes[i])
        return (
            LayerPolicy(0.0, saved),
            LayerPolicy(part.backward_s[i] - back_s, held, saved - held),
            LayerPolicy(
                whole.backward_s[i] - back_s,
                whole.saved_bytes[i] + shared,
                float(whole.recompute_bytes[i]),
                True,
                shared,
            ),
        )

    def _chosen(self, rooms: tuple[ActivationRoom, ...]) -> ActivationPolicies:
        """Policies that fit each layer's room in about the fewest seconds.

        If none fits, the policies that hold the least.
        """
        sums = accumulate(policies[0].held for policies in self._policies)
        if all(held <= min(room) for held, room in zip(sums, rooms, strict=True)):
            return ActivationPolicies()
        found = cheapest_recompute(self._policies, rooms)
        if found is None:
            found = [
                min(range(3), key=lambda w: (policies[w].held, w)) for policies in self._policies
            ]
        part, whole = (
            frozenset(i for i, number in enumerate(found) if number == policy) for policy in (1, 2)
        )
        return ActivationPolicies(recompute=whole, selective=part)

    def _least_s(self, room: float) -> float:
        """Lower bound on the recomputation time with which activations fit ``room`` bytes.

        Infinite if they cannot fit.
        """
        return least_seconds(self._savings, sum(self.costs.saved_bytes) - room)
