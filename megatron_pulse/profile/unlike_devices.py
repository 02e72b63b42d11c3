"""One profile of a backbone on unlike devices, from a profile on each kind. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_pulse.errors import format_faults
from megatron_pulse.profile.layer_records import BYTE_FIELDS, KindTimes, LayerTimes, ProfiledLayer
from megatron_pulse.profile.profile import Profile, ProfileError, Source

_WORKING = ("peak_bytes", "forward_bytes", "selective_peak_bytes")
"""Bytes of a running operation, which libraries choose per device: the largest count."""

_COMMON = ("dtype", "transformer_impl", "recompute", "skips", "conditioning")
"""Fields that are equal on all devices."""


def combine(profiles: Mapping[str, Profile]) -> Profile:
    """Profile of a backbone on several kinds of devices, by name.

    Its ``kinds`` have the seconds on each; seconds elsewhere, and all bytes, are the largest of any
    kind. Names and parameters of layers must be equal, and bytes that are kept too, unless only
    some of the profiles were measured. Raises ProfileError with every fault.
    """
    name, first = next(iter(profiles.items()))
    faults = [
        f"{other}, beside {name}: {fault}"
        for other, profile in profiles.items()
        for fault in _differences(first, profile)
    ]
    faults += [f"{kind}: it has several sample shapes" for kind, p in profiles.items() if p.shapes]
    if faults:
        advice = "Measure one backbone in one way on all kinds of devices"
        raise ProfileError(format_faults("the profiles do not match", faults, advice))
    every = list(profiles.values())
    known = {profile.source for profile in every}
    seconds = zip(*(_optimizer_s(profile) for profile in every), strict=True)
    times = {
        size: tuple(map(_largest, zip(*(p.times[size] for p in every), strict=True)))
        for size in first.micro_batch_sizes
    }
    return replace(
        first,
        source=known.pop() if len(known) == 1 else Source.ANALYTIC,
        device=" and ".join(dict.fromkeys(profile.device for profile in every)),
        memory_bytes=min(profile.memory_bytes for profile in every),
        threads=first.threads if len({profile.threads for profile in every}) == 1 else 0,
        method="; ".join(dict.fromkeys(profile.method for profile in every)),
        layers=tuple(
            replace(layer, optimizer_s=max(own))
            for layer, own in zip(first.layers, seconds, strict=True)
        ),
        times=times,
        sliced={},
        sliced_context={},
        kinds={
            kind: KindTimes(profile.device, _with_bytes(profile, times), _optimizer_s(profile))
            for kind, profile in profiles.items()
        },
    )


def _with_bytes(
    profile: Profile, times: Mapping[int, Sequence[LayerTimes]]
) -> dict[int, tuple[LayerTimes, ...]]:
    """Seconds of ``profile`` with the bytes of ``times``."""
    return {
        size: tuple(
            replace(own, **{name: getattr(largest, name) for name in BYTE_FIELDS})
            for own, largest in zip(rows, times[size], strict=True)
        )
        for size, rows in profile.times.items()
    }


def _optimizer_s(profile: Profile) -> tuple[float, ...]:
    return tuple(layer.optimizer_s for layer in profile.layers)


def _largest(rows: Sequence[LayerTimes]) -> LayerTimes:
    """Largest value of each field."""
    return LayerTimes(
        **{
            field.name: max(getattr(row, field.name) for row in rows)
            for field in fields(LayerTimes)
        }
    )


def _differences(one: Profile, other: Profile) -> Iterator[str]:
    """Yield what two profiles of one backbone on two devices must share, and do not."""
    if dict(one.backbone) != dict(other.backbone):
        yield f"the backbone is {dict(other.backbone)!r:.80}, not {dict(one.backbone)!r:.80}"
    for name in _COMMON:
        if getattr(one, name) != getattr(other, name):
            yield f"{name} is {getattr(other, name)!r:.60}, not {getattr(one, name)!r:.60}"
    names = [[layer.name for layer in profile.layers] for profile in (one, other)]
    if names[0] != names[1]:
        yield f"the names of the layers differ: {_first_apart(*names)}"
        return
    for mine, its in zip(one.layers, other.layers, strict=True):
        yield from _apart(f"layer {mine.name!r}", _fixed(mine), _fixed(its))
    if one.micro_batch_sizes != other.micro_batch_sizes:
        sizes = (", ".join(map(str, p.micro_batch_sizes)) for p in (other, one))
        yield "microbatch sizes are {}, not {}".format(*sizes)
        return
    if one.source != other.source:
        return  # estimated bytes differ from measured ones by some alignment
    for size in one.micro_batch_sizes:
        for layer, row, beside in zip(one.layers, one.times[size], other.times[size], strict=True):
            yield from _apart(f"layer {layer.name!r} at {size}", _kept(row), _kept(beside))


def _fixed(layer: ProfiledLayer) -> dict[str, Any]:
    """Values of a layer that no device changes."""
    own = vars(replace(layer, optimizer_s=0.0, sharded_time=0.0))
    return dict(own)


def _kept(row: LayerTimes) -> dict[str, Any]:
    """Bytes of a layer that outlast an operation."""
    return {
        name: value
        for name, value in vars(row).items()
        if name in BYTE_FIELDS and name not in _WORKING
    }


def _apart(where: str, mine: Mapping[str, Any], its: Mapping[str, Any]) -> Iterator[str]:
    for name, value in mine.items():
        if its[name] != value:
            yield f"{where}: {name} is {its[name]!r:.40}, not {value!r:.40}"


def _first_apart(mine: Sequence[str], its: Sequence[str]) -> str:
    for i, (a, b) in enumerate(zip(mine, its, strict=False)):
        if a != b:
            return f"layer {i} is {b!r}, not {a!r}"
    return f"there are {len(its)}, not {len(mine)}"
