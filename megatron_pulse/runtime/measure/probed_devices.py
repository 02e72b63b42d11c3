"""Kinds of the devices that a probe has found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count

from megatron_pulse.planner.cluster.device_kinds import DeviceFigures, DeviceKind

_MEMORY_TOLERANCE = 1.02
"""Ratio up to which memories are alike: drivers and displays keep some of a like card's."""
_SPEED_TOLERANCE = 1.25
"""Ratio up to which measured peaks are alike: like cards differ by cooling and clocks."""


@dataclass(frozen=True)
class ProbedDevice:
    """Device of a rank: name, memory in bytes, and measured peaks unless a preset has them.

    ``name`` is the preset's if ``is_preset``.
    """

    name: str
    memory_bytes: int
    figures: DeviceFigures | None
    is_preset: bool

    def is_like(self, other: ProbedDevice) -> bool:
        """True if both are of one kind.

        Peaks of CPU ranks are not compared, since ranks of one machine disturb each other. Their
        names contain the number of threads.
        """
        if self.name != other.name:
            return False
        if not _alike(self.memory_bytes, other.memory_bytes, _MEMORY_TOLERANCE):
            return False
        if self.figures is None or other.figures is None or self.is_cpu:
            return True
        return _alike(self.figures.tflops, other.figures.tflops, _SPEED_TOLERANCE) and _alike(
            self.figures.bandwidth_gbs, other.figures.bandwidth_gbs, _SPEED_TOLERANCE
        )

    @property
    def is_cpu(self) -> bool:
        """True for a rank on a CPU, by ``measured_device``."""
        return self.name.startswith("CPU (")


def _alike(one: float, other: float, tolerance: float) -> bool:
    return max(one, other) <= tolerance * min(one, other)


def kinds_of_devices(
    devices: Sequence[ProbedDevice], usable_memory: float, planned: str | None = None
) -> list[DeviceKind]:
    """Kind of each device: those of one kind have its least memory and its lowest peaks.

    ``planned`` replaces the peaks (a preset, or the file of a profile).
    """
    groups: list[list[ProbedDevice]] = []
    group_of: list[int] = []
    for device in devices:
        alike = [i for i, group in enumerate(groups) if device.is_like(group[0])]
        group_of.append(alike[0] if alike else len(groups))
        if not alike:
            groups.append([])
        groups[group_of[-1]].append(device)
    kinds: list[DeviceKind] = []
    for group in groups:
        memory_gb = rounded(min(device.memory_bytes for device in group) / 1e9, 4)
        name = _kind_name(group[0], memory_gb, {kind.name for kind in kinds})
        of_kind = planned or (group[0].name if group[0].is_preset else _lowest(group))
        kinds.append(DeviceKind(name, memory_gb, usable_memory, of_kind))
    return [kinds[number] for number in group_of]


def _lowest(group: Iterable[ProbedDevice]) -> DeviceFigures:
    measured = [device.figures for device in group if device.figures is not None]
    return DeviceFigures(
        rounded(min(figures.tflops for figures in measured)),
        rounded(min(figures.bandwidth_gbs for figures in measured)),
    )


def _kind_name(device: ProbedDevice, memory_gb: float, taken: set[str]) -> str:
    """Name of a kind in a cluster file: the device's, with its memory and a number if needed."""
    words = "cpu" if device.is_cpu else device.name.removeprefix("NVIDIA ").lower()
    name = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    if name in taken:
        name = f"{name}-{memory_gb:.3g}gb".replace(".", "-")
    return next(n for n in chain([name], (f"{name}-{i}" for i in count(2))) if n not in taken)


def rounded(value: float, digits: int = 3) -> float:
    """``value`` with ``digits`` significant digits."""
    return float(f"{value:.{digits}g}")
