"""Encoder table: components as a JSON file, so that they can be planned without the models.

::

    {"format": "megatron_pulse encoders 1",
     "made": {"backbone": "sd-v2", "options": {"sample_size": 64, ...}, "device": "A100-80GB",
              "source": "analytic", "threads": 0, "dtypes": {"text": "float16"}},
     "components": [
       {"name": "text", "after": [], "result_bytes": 157696, "consumers": "all",
        "devices": null, "counts": null,
        "layers": [{"name": "layers.0", "seconds": {"1": 0.0004, "4": 0.0011},
                    "parameter_bytes": 25190400, "activation_bytes": 946176,
                    "output_bytes": 157696}, ...]}, ...]}

``seconds`` are keyed by the number of samples that run at once. ``parameter_bytes`` are those of a
layer; all other bytes are per sample. ``consumers`` are devices, or "all", or "ends" (the devices
of the first and the last stage). ``devices`` may host the component. ``counts`` are the sample
counts that it may run at once (null: any). ``made`` names the backbone, device and dtypes of the
costs; it may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from annotated_types import Ge, Gt, Le, MinLen

from megatron_pulse.errors import Faults, UserError, format_faults, unknown_name
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json
from megatron_pulse.json_validation import (
    Count,
    Matching,
    Natural,
    OneOf,
    Some,
    Text,
    validated,
    with_current_keys,
)
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer, levels
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import ELEMENT_BYTES, known_device

FORMAT = "megatron_pulse encoders 1"

_Bytes = Annotated[float, Ge(0), Le(1e15), "bytes"]
_Samples = Annotated[str, Matching("^[1-9][0-9]{0,8}$"), "a number of samples, 1 or more"]


class _Layer(TypedDict):
    name: Text
    seconds: Annotated[
        Mapping[_Samples, Annotated[float, Gt(0), Le(1e9), "seconds"]],
        MinLen(1),
        "seconds by numbers of samples",
    ]
    parameter_bytes: _Bytes
    activation_bytes: _Bytes
    output_bytes: _Bytes


class ComponentRecord(TypedDict):
    """Component in a file or plan."""

    name: Text
    layers: Some[_Layer]
    after: Annotated[tuple[Text, ...], "names of components"]
    result_bytes: _Bytes
    consumers: Annotated[
        Literal["all", "ends"] | tuple[Natural, ...], '"all", "ends", or a list of devices'
    ]
    devices: Annotated[Some[Natural] | None, "a list of devices, or null"]
    counts: Annotated[Some[Count] | None, "a list of numbers of samples, or null"]


_FORMER_KEYS = {"readers": "consumers"}
"""Keys of components in older files, with today's names."""


@dataclass(frozen=True)
class EncoderOrigin:
    """Origin of a table's costs.

    ``backbone`` is the one that consumes the results. ``threads`` are the CPU threads of the
    measurement (0: a GPU, or not measured). ``dtypes`` are by component.
    """

    backbone: Text
    options: Mapping[str, Any]
    device: Text
    source: Annotated[str, OneOf(("measured", "analytic"))]
    threads: Natural
    dtypes: Mapping[str, Annotated[str, OneOf(tuple(ELEMENT_BYTES))]] = field(default_factory=dict)

    def cautions(self, profile: Profile) -> list[str]:
        """Warnings if a profile's costs are of another backbone, device, dtype or number of
        threads."""
        found = []
        reader, options = profile.backbone.get("name"), profile.backbone.get("options", {})
        others = [n for n, v in options.items() if n in self.options and self.options[n] != v]
        if reader is not None and self.backbone != reader:
            found.append(
                f"encoder costs are for backbone {self.backbone}, layer costs for {reader}. A run "
                "of the plan needs these encoders, and texts and images of these sizes"
            )
        elif others:
            said = (f"{n} {self.options[n]} instead of {options[n]}" for n in others)
            found.append(
                f"encoder costs are for {self.backbone} with {', '.join(said)}: texts and "
                "images may have other sizes"
            )
        if dtypes := sorted({*self.dtypes.values()} - {profile.dtype}):
            found.append(
                f"encoder costs are in {' and '.join(dtypes)}, layer costs in {profile.dtype}. "
                "Give the run the same --pulse-encoders-dtype"
            )
        if _device(self.device) != _device(profile.device):
            found.append(
                f"encoder costs are of {self.device}, layer costs of {profile.device}: their times "
                "cannot be combined"
            )
        if 0 != self.threads != profile.threads != 0:
            found.append(
                f"encoder costs were measured with {self.threads} thread(s), layer costs with "
                f"{profile.threads}: their times cannot be combined"
            )
        return [
            f"{text}; profile both in the same way (pulse profile --encoders)" for text in found
        ]


@dataclass(frozen=True)
class EncoderTable:
    """Records of components, with their origin if the file names it."""

    components: list[dict[str, Any]]
    origin: EncoderOrigin | None = None

    def record(self) -> dict[str, Any]:
        """JSON-able record of the file."""
        made = {} if self.origin is None else {"made": asdict(self.origin)}
        return {"format": FORMAT, **made, "components": self.components}


class _File(TypedDict):
    format: Annotated[str, OneOf((FORMAT,))]
    made: NotRequired[EncoderOrigin]
    components: Some[ComponentRecord]


class TableError(UserError):
    """A table of components cannot be used; the message lists every fault."""


def read_table(path: str | Path) -> EncoderTable:
    """Read a file of components and check all that can be checked without a plan.

    Raises TableError, and FileError for a file that cannot be read (see ``files.read_json``).
    """
    content = read_json(path, FileKind.ENCODERS)
    if isinstance(components := content.get("components"), list):
        content["components"] = [with_current_keys(one, _FORMER_KEYS) for one in components]
    faults: list[str] = []
    try:
        found = validated(_File, content, complete=True)
        components_of(content["components"])
    except Faults as error:
        faults = error.faults
    else:
        names = {one["name"] for one in content["components"]}
        origin = found.get("made")
        for name in sorted((origin.dtypes if origin else {}).keys() - names):
            faults.append(f"made.dtypes: {unknown_name('component', name, sorted(names))}")
    if faults:
        raise TableError(format_faults(f"{path} is not a table of encoders", faults))
    return EncoderTable(content["components"], origin)


def components_of(
    records: Sequence[Mapping[str, Any]], placement: Placement | None = None
) -> tuple[Component, ...]:
    """Components of records.

    ``placement`` resolves ``consumers`` such as "ends" (None: the consumers do not matter). Raises
    Faults.
    """
    faults: list[str] = []
    found = []
    for one in records:
        try:
            found.append(_component(one, placement))
        except Faults as error:
            faults += error.faults
    if not faults:
        levels(found)
    if faults:
        raise Faults(faults)
    return tuple(found)


def component_records(components: Sequence[Component]) -> list[dict[str, Any]]:
    """Records of ``components`` for a file."""
    return [
        {
            "name": c.name,
            "layers": [
                {
                    "name": layer.name,
                    "seconds": {str(n): s for n, s in layer.seconds.items()},
                    "parameter_bytes": layer.parameter_bytes,
                    "activation_bytes": layer.activation_bytes,
                    "output_bytes": layer.output_bytes,
                }
                for layer in c.layers
            ],
            "after": list(c.after),
            "result_bytes": c.result_bytes,
            "consumers": list(c.consumers),
            "devices": None if c.devices is None else list(c.devices),
            "counts": None if c.counts is None else list(c.counts),
        }
        for c in components
    ]


def _device(name: str) -> str:
    known = known_device(name)
    return name if known is None else known.name


def _component(one: Mapping[str, Any], placement: Placement | None) -> Component:
    consumers = one["consumers"]
    if isinstance(consumers, str):
        homes = placement.device_of_stage if placement else (0,)
        consumers = range(max(homes) + 1) if consumers == "all" else {homes[0], homes[-1]}
    return Component(
        one["name"],
        tuple(
            FrozenLayer(
                layer["name"],
                {int(n): float(s) for n, s in layer["seconds"].items()},
                layer["parameter_bytes"],
                layer["activation_bytes"],
                layer["output_bytes"],
            )
            for layer in one["layers"]
        ),
        tuple(one["after"]),
        one["result_bytes"],
        tuple(sorted(consumers)),
        None if one["devices"] is None else tuple(one["devices"]),
        None if one["counts"] is None else tuple(one["counts"]),
    )
