"""Frozen components: chains of layers whose results the next step consumes."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pulse.errors import Faults, format_faults, unknown_name


@dataclass(frozen=True)
class FrozenLayer:
    """Forward of one layer. ``seconds[n]`` is its time for n samples at once.

    ``parameter_bytes`` are held wherever the layer runs. Per sample, ``activation_bytes`` are held
    while the layer runs, including its input and output. ``output_bytes`` are held from then until
    the next layer has run.
    """

    name: str
    seconds: Mapping[int, float]
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0

    def time_s(self, num_samples: int) -> float:
        """Seconds for ``num_samples`` at once, interpolated linearly.

        Below the smallest count of the table the time is constant, since nothing shows that fewer
        samples are faster. Above the largest count the time is proportional.
        """
        counts = sorted(self.seconds)
        at = bisect_left(counts, num_samples)
        if at == len(counts):
            return self.seconds[counts[-1]] * num_samples / counts[-1]
        if at == 0 or counts[at] == num_samples:
            return self.seconds[counts[at]]
        low, high = counts[at - 1], counts[at]
        part = (num_samples - low) / (high - low)
        return (1 - part) * self.seconds[low] + part * self.seconds[high]

    def least_s(self, num_samples: int) -> float:
        """Lower bound on the seconds for ``num_samples`` in any division."""
        known = range(1, min(num_samples, max(self.seconds)) + 1)
        return num_samples * min(self.time_s(n) / n for n in known)

    def faults(self) -> list[str]:
        """Faults in the layer's figures."""
        wrong = []
        if not self.seconds or min(self.seconds) < 1:
            wrong.append("its times need sample counts of at least 1")
        if not all(math.isfinite(s) and s > 0 for s in self.seconds.values()):
            wrong.append("its times must be finite and positive")
        for name in ("parameter_bytes", "activation_bytes", "output_bytes"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                wrong.append(f"{name} must be finite and not negative, is {value:g}")
        return wrong


@dataclass(frozen=True)
class Component:
    """Frozen part of a model: a text encoder, an autoencoder, a locked backbone.

    It depends on the results of the components named in ``after``. ``result_bytes`` per sample go
    to each device in ``consumers`` before the next step. ``devices`` may host it (None: any).
    ``counts`` are the sample counts allowed for a slice (None: any); results may depend on the
    count to the last bit. Raises Faults.
    """

    name: str
    layers: tuple[FrozenLayer, ...]
    after: tuple[str, ...] = ()
    result_bytes: float = 0.0
    consumers: tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        faults = [
            format_faults(f"layer {layer.name!r}", wrong)
            for layer in self.layers
            if (wrong := layer.faults())
        ]
        if not self.layers:
            faults.append("it has no layers")
        if self.devices is not None and not self.devices:
            faults.append("devices is empty: no device may host it")
        if not 0 <= self.result_bytes < math.inf:
            faults.append(f"result_bytes must be finite and not negative, is {self.result_bytes:g}")
        if self.counts is not None and (not self.counts or min(self.counts) < 1):
            faults.append("counts must be 1 or more")
        if faults:
            raise Faults([format_faults(f"component {self.name!r}", faults)])

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all layers' parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def chain_s(self, num_samples: int) -> float:
        """Seconds of all layers on ``num_samples`` at once."""
        return sum(layer.time_s(num_samples) for layer in self.layers)

    def least_s(self, num_samples: int) -> float:
        """Lower bound on the seconds of all layers on ``num_samples``."""
        return sum(layer.least_s(num_samples) for layer in self.layers)

    def may_run_on(self, device: int) -> bool:
        """True if ``device`` may host the component."""
        return self.devices is None or device in self.devices

    def divided(self, num_samples: int, count: int) -> list[tuple[int, int]]:
        """Split ``num_samples`` into blocks of ``count``, with a smaller last block if
        necessary."""
        edges = [*range(0, num_samples, count), num_samples]
        return list(itertools.pairwise(edges))


class Slice(NamedTuple):
    """Slice of a component: layers ``layers[0]`` to ``layers[1]``, exclusive, on a range of
    samples."""

    component: int
    layers: tuple[int, int]
    samples: tuple[int, int]

    @property
    def num_samples(self) -> int:
        """Samples that run at once."""
        return self.samples[1] - self.samples[0]

    def time_s(self, components: Sequence[Component]) -> float:
        """Planned seconds."""
        layers = components[self.component].layers[slice(*self.layers)]
        return sum(layer.time_s(self.num_samples) for layer in layers)

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[1] - 1
        one, end = self.samples[0], self.samples[1] - 1
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        samples = f"samples {one} to {end}" if end > one else f"sample {one}"
        return f"component {self.component}, {layers}, {samples}"


def levels(components: Sequence[Component]) -> list[int]:
    """Longest path to each component in the dependency graph.

    Raises Faults for unknown names and cycles.
    """
    names = [component.name for component in components]
    faults = [f"component {n!r} is defined twice" for n in sorted({*names}) if names.count(n) > 1]
    faults += [
        f"component {c.name!r}: {unknown_name('component', name, names)}"
        for c in components
        for name in c.after
        if name not in names
    ]
    if faults:
        raise Faults(faults)
    level = dict.fromkeys(names, 0)
    for _ in components:
        for c in components:
            level[c.name] = max([level[c.name], *(level[name] + 1 for name in c.after)])
    if any(value >= len(components) for value in level.values()):
        circle = [name for name in names if level[name] >= len(components)]
        raise Faults([f"components depend on each other in a cycle: {', '.join(circle)}"])
    return [level[name] for name in names]
