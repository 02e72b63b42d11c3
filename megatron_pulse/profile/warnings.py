"""Warnings about predictions from a profile. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_pulse.profile.layer_records import SPREAD
from megatron_pulse.profile.profile import Profile, Source
from megatron_pulse.profile.roofline import FIGURES, PRESETS, known_device, peaks_name


def configured_threads() -> int | None:
    """Number of threads set by OMP_NUM_THREADS; None if not set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def rank_threads() -> int:
    """Number of threads of a rank on a CPU: OMP_NUM_THREADS, or one."""
    return configured_threads() or 1


def spread_caution(profile: Profile, micro_batch_size: int | None = None) -> str:
    """Warning that repetitions of a measurement varied; empty otherwise."""
    sizes = [s for s in profile.micro_batch_sizes if micro_batch_size in (None, s)]
    if profile.source is not Source.MEASURED or not (found := profile.unsteady(micro_batch_size)):
        return ""
    size, layer, spread = found[0]
    names = {(s, name) for s, name, _ in found}
    part = sum(
        times.whole_s
        for s in sizes
        for layer_, times in zip(profile.layers, profile.times[s], strict=True)
        if (s, layer_.name) in names
    )
    whole = sum(times.whole_s for s in sizes for times in profile.times[s])
    count = len(sizes) * len(profile.layers)
    return (
        f"{len(found)} of {count} measurements, {part / whole:.0%} of the time, spread over more "
        f"than {SPREAD:.0%} (most: {layer} at microbatch size {size}, {spread:.0%}). Another "
        "process ran at the same time; measure again on an idle machine"
    )


def thread_caution(measured: int, run: int) -> str:
    """Warning that a run has other threads than its profile; empty if equal or unknown."""
    if not measured or not run or measured == run:
        return ""
    return (
        f"costs were measured with {measured} thread(s), ranks run with {run}: times will differ. "
        f"Profile with --threads {run}, or start ranks with pulse run --threads {measured}"
    )


def device_caution(profile: Profile, device: object) -> str:
    """Warning that costs are of another device than the cluster's; empty if they may be its own.

    ``device`` is the cluster's device: a preset's name, a profile's path, or figures
    (``DeviceFigures``). Figures may be of the measured device.
    """
    theirs = device if isinstance(device, str) else "those of its own figures"
    name = profile.device
    if profile.source is Source.MEASURED:
        name = known.name if (known := known_device(name)) is not None else name
        differs = device in PRESETS and name != device
    elif not isinstance(device, str) and FIGURES in name:
        theirs = peaks_name(**vars(device))
        differs = not name.startswith(theirs)
    else:
        differs = name in PRESETS and name != device
    if not differs:
        return ""
    return (
        f"costs are of {profile.device}, the cluster's devices are {theirs}: times will differ. "
        "Give --backbone instead of --profile, or a profile of that device"
    )


def whole_caution(profile: Profile) -> str:
    """Warning that recomputation is full, because costs lack selective recomputation;
    else empty.
    """
    if profile.selects:
        return ""
    return (
        "the profile has no costs of selective recomputation: layers are recomputed in full. "
        "Profile again to use selective recomputation"
    )


def plan_thread_caution(provenance: Mapping[str, Any], threads: int) -> str:
    """``thread_caution`` of a plan's provenance, for ``threads`` per rank (0: unknown)."""
    measured = provenance.get("threads")
    return thread_caution(measured if isinstance(measured, int) else 0, threads)


def plan_cautions(provenance: Mapping[str, Any], threads: int) -> list[str]:
    """Warnings from a plan's provenance, for ``threads`` per rank (0: unknown)."""
    said = [str(provenance.get("unsteady") or ""), plan_thread_caution(provenance, threads)]
    return [text for text in said if text]
