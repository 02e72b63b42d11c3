"""FSDP configurations of a chain under a memory limit.

Choices: microbatch size, frequency of gathering and reduction, units, prefetching. As few layers as
necessary use full or selective recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout, Gathering
from megatron_pulse.planner.partition.memory import ADAM_BYTES
from megatron_pulse.planner.tune.fsdp.layer_dp import ActivationRoom
from megatron_pulse.planner.tune.fsdp.recompute import RecomputeCosts
from megatron_pulse.planner.tune.fsdp.step import (
    AVERAGE_BYTES,
    MAIN_BYTES,
    STEADY,
    SUMMED_BYTES,
    ShardedUnit,
    Sharding,
    grouped,
    held_bytes,
    peak_bytes,
    state_bytes,
)
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES

UNITS = (12, 32, 96)
"""Approximate numbers of units. Small units take little memory, large ones few collectives."""

PREFETCH = (1, 3, 6)
"""Units that are gathered ahead."""


class FsdpConfig(NamedTuple):
    """FSDP configuration without its costs."""

    micro_batch_size: int
    layout: FsdpLayout

    @property
    def rank(self) -> tuple[object, ...]:
        """Order among configurations of equal bounds."""
        own = self.layout
        how = str(own.gathering), own.reduce_once, own.prefetch
        return own.group, self.micro_batch_size, len(own.starts), *how


@dataclass(frozen=True)
class FittedFsdpConfig:
    """FSDP configuration with as little recomputation as fits.

    ``layers`` are the layers of each unit. ``needs_bytes`` per device exceed the device if nothing
    fits.
    """

    config: FsdpConfig
    activations: ActivationPolicies
    layers: tuple[range, ...]
    sharding: Sharding
    needs_bytes: float


class FsdpConfigs:
    """FSDP configurations of ``profile`` on ``num_devices`` with ``usable`` bytes each.

    A step has ``samples`` in microbatches of one of ``sizes``. ``context`` devices share the tokens
    of a sample, and ``profile`` has the costs of one of them. ``moved`` maps a number of
    parameters to bytes in transit (default: their dtype). ``time_scale`` multiplies every second of
    an emulation. ``ema`` adds an EMA of the trained parameters. Gradients are reduced in their
    dtype, or in fp32 with ``reduces_fp32``. ``exchanging`` maps a layer and a microbatch's samples
    to the seconds of its exchanges of tokens in a forward and in a backward. Costs include them.
    """

    def __init__(
        self,
        profile: Profile,
        num_devices: int,
        samples: int,
        usable: float,
        sizes: Sequence[int],
        moved: Callable[[int], int] | None = None,
        time_scale: float = 1.0,
        ema: bool = False,
        reduces_fp32: bool = False,
        context: int = 1,
        optimizer_bytes: float = ADAM_BYTES,
        exchanging: Callable[[int, int], tuple[float, float]] | None = None,
    ) -> None:
        self.widened = 4 / ELEMENT_BYTES[profile.dtype] if reduces_fp32 else 1.0
        self.profile, self.num_devices, self.samples = profile, num_devices, samples
        self.context, self.exchanging = context, exchanging
        self.usable, self.sizes, self.time_scale = usable, sizes, time_scale
        self.element_bytes = ELEMENT_BYTES[profile.dtype]
        self.trained_bytes = MAIN_BYTES + optimizer_bytes + (AVERAGE_BYTES if ema else 0)
        self.moved = moved or (lambda count: self.element_bytes * count)
        self.recomputing = cache(partial(RecomputeCosts, profile))
        self.bare = cache(self._bare)
        self._room = cache(self._room_of)
        self.starts = cache(self._starts)

    def configs(self, group: int) -> Iterator[FsdpConfig]:
        """Configurations with groups of ``group`` devices, without duplicates."""
        for size, about, gathering, once, prefetch in product(
            self.sizes, UNITS, Gathering, (False, True), PREFETCH
        ):
            if self.count(size) == 1 and (once or gathering is Gathering.STEP):
                continue  # the same as others
            layout = FsdpLayout(self.starts(about), group, gathering, once, prefetch)
            yield FsdpConfig(size, layout)

    def count(self, size: int) -> int:
        """Microbatches of a device per step."""
        return self.samples * self.context // (self.num_devices * size)

    def fit(self, config: FsdpConfig) -> FittedFsdpConfig:
        """The configuration with its costs and the cheapest recomputation that fits."""
        return self.costed(
            config, self.recomputing(config.micro_batch_size).chosen(self._rooms(config))
        )

    def costed(self, config: FsdpConfig, activations: ActivationPolicies) -> FittedFsdpConfig:
        """The configuration with its costs if these layers are recomputed."""
        recomputing, layers = self.recomputing(config.micro_batch_size), self._layers(config.layout)
        chain = recomputing.chain(activations)
        size = config.micro_batch_size
        exchanges = [self._exchange_s(own, size, activations) for own in layers]
        units = tuple(
            replace(
                bare,
                forward_s=self.time_scale * sum(chain.forward_s[i] for i in own),
                backward_s=self.time_scale * sum(chain.backward_s[i] for i in own),
                saved_bytes=float(sum(chain.saved_bytes[i] for i in own)),
                recompute_bytes=recomputing.made_bytes(own, activations),
                forward_exchange_s=exchanged[0],
                backward_exchange_s=exchanged[1],
            )
            for bare, own, exchanged in zip(
                self.bare(config.layout.starts), layers, exchanges, strict=True
            )
        )
        sharding = self._sharding(config, units, self.count(config.micro_batch_size))
        needs_bytes = state_bytes(sharding) + peak_bytes(sharding)
        return FittedFsdpConfig(config, activations, layers, sharding, needs_bytes)

    def _exchange_s(
        self, own: Sequence[int], samples: int, activations: ActivationPolicies
    ) -> tuple[float, float]:
        """Seconds of a unit's exchanges in a forward and in a backward; a recomputed layer repeats
        those of its forward."""
        forward_s = backward_s = 0.0
        if self.exchanging is None:
            return forward_s, backward_s
        for i in own:
            ahead_s, back_s = self.exchanging(i, samples)
            again = self.profile.has_backward[i] and i in activations.recompute
            forward_s += ahead_s
            backward_s += back_s + ahead_s * again
        return self.time_scale * forward_s, self.time_scale * backward_s

    def _starts(self, about: int) -> tuple[int, ...]:
        """First layers of about so many units."""
        return tuple(own.start for own in grouped(self.profile.stored_parameters, about))

    def _layers(self, layout: FsdpLayout) -> tuple[range, ...]:
        return tuple(layout.units(len(self.profile.layers)))

    def _bare(self, starts: tuple[int, ...]) -> tuple[ShardedUnit, ...]:
        """Units with parameters but without times and activations."""
        found = []
        for own in FsdpLayout(starts, 1).units(len(self.profile.layers)):
            layers = [self.profile.layers[i] for i in own]
            count = sum(layer.stored_parameters(self.element_bytes) for layer in layers)
            trained = sum(layer.trained_parameters for layer in layers)
            size = float(self.element_bytes)
            state = float(self.trained_bytes * trained + self.element_bytes * (count - trained))
            share = trained / count if count else 1.0
            found.append(
                ShardedUnit(
                    *(0.0, 0.0, self.moved(count), size * count, state),
                    trained=share,
                    summed_bytes=float(SUMMED_BYTES * trained),
                )
            )
        return tuple(found)

    def bare_sharding(self, config: FsdpConfig) -> Sharding:
        """Sharding with layers that take no time and save no activations."""
        units = self.bare(config.layout.starts)
        return self._sharding(config, units, self.count(config.micro_batch_size))

    def computed_s(self, config: FsdpConfig) -> float:
        """Lower bound on a device's compute time in a step; infinite if nothing fits."""
        recomputing = self.recomputing(config.micro_batch_size)
        costs, recompute_s = recomputing.costs, recomputing.least_s(self._rooms(config)[-1].held)
        each = sum(costs.forward_s) + sum(costs.backward_s) + recompute_s
        return self.time_scale * each * self.count(config.micro_batch_size)

    def cannot_fit(self, config: FsdpConfig) -> bool:
        """True if the configuration cannot fit."""
        return not self.recomputing(config.micro_batch_size).may_fit(self._rooms(config))

    def _sharding(self, config: FsdpConfig, units: tuple[ShardedUnit, ...], count: int) -> Sharding:
        how = config.layout
        of = how.group, how.gathering, how.reduce_once, how.prefetch
        return Sharding(units, self.num_devices, count, *of, self.widened)

    def _rooms(self, config: FsdpConfig) -> tuple[ActivationRoom, ...]:
        """Bytes available to each layer for activations, beside parameters and gradients."""
        # A microbatch bears on them by how many there are alone.
        alike = config._replace(micro_batch_size=0)
        return self._room(alike, min(STEADY, self.count(config.micro_batch_size)))

    def _room_of(self, config: FsdpConfig, count: int) -> tuple[ActivationRoom, ...]:
        bare, layers = (
            self._sharding(config, self.bare(config.layout.starts), count),
            self._layers(config.layout),
        )
        left = self.usable - state_bytes(bare) - 1  # byte, for rounding
        return tuple(
            ActivationRoom(left - max(forward, backward), left - backward)
            for own, (forward, backward) in zip(layers, held_bytes(bare), strict=True)
            for _ in own
        )
