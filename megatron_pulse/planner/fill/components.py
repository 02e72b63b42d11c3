"""What frozen components are: chains of layers whose results the next step reads."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pulse.faults import Faults, told, unknown


@dataclass(frozen=True)
class FrozenLayer:
    """One layer's forward. ``seconds[n]`` is its time on n samples at once.

    ``parameter_bytes`` are there wherever it runs; per sample, ``activation_bytes`` while it runs,
    its input and output among them, and ``output_bytes`` from then until the next layer has run.
    """

    name: str
    seconds: Mapping[int, float]
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0
    output_bytes: float = 0.0

    def time_s(self, num_samples: int) -> float:
        """Seconds for ``num_samples`` at once.

        Between two counts of the table on the line that joins them; below the least as long as
        there, since nothing says that fewer are faster; above the largest as many times longer.
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
        """No way to divide ``num_samples`` takes less than this in all."""
        known = range(1, min(num_samples, max(self.seconds)) + 1)
        return num_samples * min(self.time_s(n) / n for n in known)

    def faults(self) -> list[str]:
        """What is wrong with its figures."""
        wrong = []
        if not self.seconds or min(self.seconds) < 1:
            wrong.append("its times must be of 1 sample or more")
        if not all(math.isfinite(s) and s > 0 for s in self.seconds.values()):
            wrong.append("its times must be finite and positive")
        for name in ("parameter_bytes", "activation_bytes", "output_bytes"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                wrong.append(f"{name} must be finite and not negative, is {value:g}")
        return wrong


@dataclass(frozen=True)
class Component:
    """A frozen part: a text encoder, an autoencoder, a locked backbone.

    It takes the results of ``after`` (names of components). ``result_bytes`` of every sample go to
    each of ``readers`` (devices) before the next step. ``devices`` may host it (None: any).
    ``counts`` are the numbers of samples that a piece may have (None: any); results may depend on
    them to the last bit. Raises Faults.
    """

    name: str
    layers: tuple[FrozenLayer, ...]
    after: tuple[str, ...] = ()
    result_bytes: float = 0.0
    readers: tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        faults = [
            told(f"layer {layer.name!r}", wrong)
            for layer in self.layers
            if (wrong := layer.faults())
        ]
        if not self.layers:
            faults.append("it has no layers")
        if self.devices is not None and not self.devices:
            faults.append("there is no device that may host it")
        if not 0 <= self.result_bytes < math.inf:
            faults.append(f"result_bytes must be finite and not negative, is {self.result_bytes:g}")
        if self.counts is not None and (not self.counts or min(self.counts) < 1):
            faults.append("counts must be 1 or more")
        if faults:
            raise Faults([told(f"component {self.name!r}", faults)])

    @property
    def parameter_bytes(self) -> float:
        """Of all layers."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def chain_s(self, num_samples: int) -> float:
        """Seconds of all layers on ``num_samples`` at once."""
        return sum(layer.time_s(num_samples) for layer in self.layers)

    def least_s(self, num_samples: int) -> float:
        """Seconds of all layers on ``num_samples``, at the least."""
        return sum(layer.least_s(num_samples) for layer in self.layers)

    def may_run_on(self, device: int) -> bool:
        """Whether ``device`` may host it."""
        return self.devices is None or device in self.devices

    def divided(self, num_samples: int, count: int) -> list[tuple[int, int]]:
        """``num_samples`` in blocks of ``count``, and a smaller one at the end where need be."""
        edges = [*range(0, num_samples, count), num_samples]
        return list(itertools.pairwise(edges))


class Piece(NamedTuple):
    """Layers ``layers[0]`` up to, not including, ``layers[1]`` of a component on such samples."""

    component: int
    layers: tuple[int, int]
    samples: tuple[int, int]

    @property
    def num_samples(self) -> int:
        """How many samples it takes at once."""
        return self.samples[1] - self.samples[0]

    def time_s(self, components: Sequence[Component]) -> float:
        """Seconds as planned."""
        layers = components[self.component].layers[slice(*self.layers)]
        return sum(layer.time_s(self.num_samples) for layer in layers)

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[1] - 1
        one, end = self.samples[0], self.samples[1] - 1
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        samples = f"samples {one} to {end}" if end > one else f"sample {one}"
        return f"component {self.component}, {layers}, {samples}"


def levels(components: Sequence[Component]) -> list[int]:
    """Per component the length of the longest way to it; Faults for unknown names and circles."""
    names = [component.name for component in components]
    faults = [f"the component {n!r} is there twice" for n in sorted({*names}) if names.count(n) > 1]
    faults += [
        f"component {c.name!r}: {unknown('component', name, names)}"
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
        raise Faults([f"components wait for each other in a circle: {', '.join(circle)}"])
    return [level[name] for name in names]
