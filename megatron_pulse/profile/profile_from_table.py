"""Profile from a published table of a model's layers. Imports no torch.

A table is JSON with ``units`` in chain order and ``skips`` between them. All figures are per
sample: ``params``, ``flops_fwd``, ``flops_bwd``, ``saved_act_bytes`` (of 16-bit activations),
``out_shapes`` and ``out_numel``, the elements of all outgoing boundary tensors. Side inputs and
their layers are left out, since tables do not assign them to units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from annotated_types import Ge, Le

from megatron_pulse.errors import format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json
from megatron_pulse.json_validation import Some, faults_of, open_ended
from megatron_pulse.profile.layer_records import NO_SPREAD, LayerTimes, ProfiledLayer, ProfiledSkip
from megatron_pulse.profile.profile import Profile, ProfileError, Source
from megatron_pulse.profile.roofline import ELEMENT_BYTES, Kernel, Roofline

_TABLE_ELEMENT_BYTES = 2
_Number = Annotated[int, Ge(0), Le(10**18)]


@open_ended
class _Unit(TypedDict):
    name: str
    params: _Number
    flops_fwd: _Number
    flops_bwd: _Number
    saved_act_bytes: _Number
    out_numel: _Number
    out_shapes: NotRequired[tuple[tuple[_Number, ...], ...] | None]


@open_ended
class _Skip(TypedDict):
    id: NotRequired[str | int | bool]
    src: _Number
    dst: _Number
    numel: _Number


@open_ended
class _Table(TypedDict):
    name: NotRequired[str]
    units: Some[_Unit]
    skips: tuple[_Skip, ...]


def read_table(
    path: str | Path,
    roofline: Roofline,
    micro_batch_sizes: Sequence[int] = (1,),
    recompute: bool = False,
) -> Profile:
    """Profile of the table at ``path``, on a device described by ``roofline``.

    A unit's forward is one kernel that reads parameters and input, and writes saved activations and
    output. Its backward moves twice as many bytes. Half of a backward is the input gradient; all of
    it for units without parameters; nothing for the first. The first unit's input, which tables do
    not give, counts as empty. Raises ProfileError with every fault of the table.
    """
    try:
        table = read_json(path, FileKind.TABLE)
    except FileError as error:
        raise ProfileError(str(error)) from error
    if faults := list(_faults(table)):
        raise ProfileError(format_faults(f"{path} is not a sound table of layers", faults))
    element = ELEMENT_BYTES[roofline.dtype]
    units = table["units"]
    outputs = [element * unit["out_numel"] for unit in units]
    taken = [0, *outputs[:-1]]
    known = any(unit["saved_act_bytes"] for unit in units)
    return Profile(
        backbone={"table": table.get("name", Path(path).stem)},
        source=Source.TABLE,
        device=roofline.device.name,
        memory_bytes=roofline.device.memory_bytes,
        dtype=roofline.dtype,
        recompute=recompute,
        method=roofline.method + ("" if known else "; the table has no saved activations"),
        layers=tuple(
            ProfiledLayer(unit["name"], unit["params"], num_bytes)
            for unit, num_bytes in zip(units, taken, strict=True)
        ),
        times={
            size: tuple(
                _times(unit, i == 0, size, taken[i], outputs[i], roofline)
                for i, unit in enumerate(units)
            )
            for size in micro_batch_sizes
        },
        skips=tuple(
            ProfiledSkip(str(skip.get("id", i)), skip["src"], skip["dst"], element * skip["numel"])
            for i, skip in enumerate(table["skips"])
        ),
    )


def _times(
    unit: Mapping[str, Any], first: bool, size: int, taken: int, output: int, roofline: Roofline
) -> LayerTimes:
    element = ELEMENT_BYTES[roofline.dtype]
    saved = size * unit["saved_act_bytes"] * element // _TABLE_ELEMENT_BYTES
    moved = element * unit["params"] + size * (taken + output) + saved
    forward = roofline.seconds([Kernel(size * unit["flops_fwd"], moved)])
    backward = roofline.seconds([Kernel(size * unit["flops_bwd"], 2 * moved)])
    part = 0.0 if first else 0.5 if unit["params"] else 1.0
    peak = saved + 2 * size * output
    return LayerTimes(forward, part * backward, (1 - part) * backward, *NO_SPREAD, saved, peak)


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    yield from faults_of(_Table, table)
    units = table.get("units")
    for i, unit in enumerate(units if isinstance(units, list) else ()):
        if faults_of(_Unit, unit) or (shapes := unit.get("out_shapes")) is None:
            continue
        numel = sum(map(math.prod, shapes))
        if numel != unit["out_numel"]:
            told = f"out_shapes hold {numel} elements, but out_numel is {unit['out_numel']}"
            yield f"units.{i}: {told}"
