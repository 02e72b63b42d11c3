"""Comparison of memory formats of a backbone's convolutions on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_pulse.backbone.build_context import LOCAL
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.shape_buckets import at_shape
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from megatron_pulse.profile.measurement.layer import measure_layer, measurement_key
from megatron_pulse.profile.measurement.layer_call import make_call
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.profile.measurement.machine import computing_with
from megatron_pulse.profile.measurement.measure import (
    fill,
    require_implementation,
    require_memory,
)
from megatron_pulse.profile.profile import ProfileError

_LEAST = 0.02
"""Minimum relative gain of channels_last; smaller differences are measurement noise."""
_ROUNDS = 5
"""Number of rounds. By chance one format wins all of them once in 32 times."""
_PATIENCE = RepetitionLimits(min_repetitions=3, enough_s=0.02, limit_s=2.0)


@dataclass(frozen=True)
class FormatTimes:
    """Forward and backward seconds of all layers with convolutions, in both memory formats.

    One value per round; the formats alternate within a round.
    """

    contiguous_s: tuple[float, ...]
    channels_last_s: tuple[float, ...]
    micro_batch_size: int

    @property
    def wins(self) -> int:
        """Number of rounds in which channels_last was faster."""
        pairs = zip(self.channels_last_s, self.contiguous_s, strict=True)
        return sum(last < plain for last, plain in pairs)

    @property
    def channels_last(self) -> bool:
        """True if runs should use channels_last for all convolutions (mixing would need copies).

        It must be faster in every round, so that a busy machine decides nothing.
        """
        is_less = min(self.channels_last_s) < (1 - _LEAST) * min(self.contiguous_s)
        return is_less and self.wins == len(self.contiguous_s)

    def __str__(self) -> str:
        taken = "channels_last" if self.channels_last else "contiguous"
        return (
            f"convolutions {taken}: their layers take {1e3 * min(self.channels_last_s):.2f} ms in "
            f"channels_last and {1e3 * min(self.contiguous_s):.2f} ms contiguous at microbatch "
            f"size {self.micro_batch_size}, channels_last is faster in {self.wins} of "
            f"{len(self.contiguous_s)} rounds"
        )


def compare_formats(
    contiguous: Backbone,
    channels_last: Backbone,
    micro_batch_size: int,
    device: str,
    dtype: str,
    patience: RepetitionLimits = _PATIENCE,
    threads: int | None = None,
    transformer_impl: str = LOCAL,
) -> FormatTimes | None:
    """Measure layers with convolutions in both memory formats, alternating.

    None if the chain has no convolutions. Layers with equal operators are measured once. See
    ``measure`` for arguments and errors.
    """
    place = torch.device(device)
    require_memory(contiguous, place, dtype)
    require_implementation(transformer_impl, place)
    context = meta_context(dtype, 1, transformer_impl)
    both = [at_shape(backbone, 0) for backbone in (contiguous, channels_last)]
    known: dict[str, list[list[float]]] = {}
    found: list[list[list[float]]] = []
    with computing_with(threads), some_process_group():

        def call_of(backbone: Backbone, i: int) -> Any:
            module = backbone.layers[i].build(context).to(place)
            fill(module)
            return make_call(backbone, i, module, micro_batch_size, dtype, place)

        for i, layer in enumerate(both[0].layers):
            try:
                calls = [call_of(both[0], i)]
                modules = calls[0].module.modules()
                if not any(isinstance(module, torch.nn.Conv2d) for module in modules):
                    continue
                if (kind := measurement_key(calls[0])) not in known:
                    calls.append(call_of(both[1], i))
                    known[kind] = [
                        [
                            measure_layer(call, len(layer.outputs), place, patience, None).whole_s
                            for call in calls
                        ]
                        for _ in range(_ROUNDS)
                    ]
                found.append(known[kind])
            except torch.OutOfMemoryError as error:
                raise ProfileError(
                    f"{layer.name} does not fit on {device} at microbatch size "
                    f"{micro_batch_size}; profile smaller sizes"
                ) from error
    if not found:
        return None
    plain, last = (
        tuple(sum(rounds[r][which] for rounds in found) for r in range(_ROUNDS)) for which in (0, 1)
    )
    return FormatTimes(plain, last, micro_batch_size)
