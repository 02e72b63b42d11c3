"""JSON schema of a plan file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.json_validation import (
    COUNT,
    FLAG,
    NATURAL,
    OBJECT,
    OPERATION,
    TEXT,
    faults_of,
    list_of,
    number,
    one_of,
    record,
)
from megatron_pulse.planner.bubble_fill.encoder_table import COMPONENTS
from megatron_pulse.planner.layout.placement import PLACEMENTS
from megatron_pulse.profile.roofline import ELEMENT_BYTES

FORMAT = "megatron_pulse plan 5"
"""Version of the schema and of the predictions; plans of other versions must be made anew."""

_MOST_S, _MOST_BYTES = 1e9, 1e15
_TIME = number(
    f"a number above 0, at most {_MOST_S:g}: seconds", exclusiveMinimum=0, maximum=_MOST_S
)
_SECONDS = list_of(_TIME, "seconds of each stage")
_PARTS_S = list_of(
    number(f"a number from 0 to {_MOST_S:g}: seconds", minimum=0, maximum=_MOST_S),
    "seconds of each stage",
)
_BYTES = list_of(
    number(f"a number from 0 to {_MOST_BYTES:g}: bytes", minimum=0, maximum=_MOST_BYTES), "bytes"
)
RECOMPUTE_KEYS = ("recompute_s", "recompute_bytes")
"""Columns for recomputation, in the order of the problem's fields.

Per stage: seconds of recomputation in the backward, and bytes that recomputed activations take.
"""

WGRAD_KEY = "wgrad_bytes"
"""Column for deferred weight gradients: bytes per stage in the weight-gradient queue."""

OFFLOAD_KEYS = ("offload_bytes", "offload_s")
"""Columns for activation offload: bytes per stage, and seconds of one copy."""

_MESSAGE = "[stage, stage, seconds], followed by false if no gradient returns"
_EDGE = {
    "type": "array",
    "prefixItems": [
        {"type": "integer", "description": _MESSAGE},
        {"type": "integer", "description": _MESSAGE},
        {"type": "number", "minimum": 0, "maximum": _MOST_S, "description": _MESSAGE},
        {"type": "boolean", "description": _MESSAGE},
    ],
    "minItems": 3,
    "maxItems": 4,
    "description": _MESSAGE,
}

_FIGURE = number("a number, 0 or more", minimum=-1e-9)  # rounded differences
_SLICE = "[first layer, layer after the last, first sample, sample after the last]"
_DEP = "[bubble task, slice, lag in seconds]"
_BUBBLE_TASK = record(
    "a bubble task: name, slice_seconds, devices, slices, deps, consumers",
    ["name", "slice_seconds", "devices"],
    name=TEXT,
    slice_seconds=list_of(_TIME, "seconds of each slice"),
    devices={
        "anyOf": [{"type": "null"}, list_of(NATURAL, "devices")],
        "description": "a list of devices, or null",
    },
    slices={
        "type": "array",
        "items": {**list_of(NATURAL, _SLICE, least=4), "maxItems": 4},
        "description": f"a list of {_SLICE} for each slice",
    },
    deps={
        "type": "array",
        "items": {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [
                    {**NATURAL, "description": _DEP},
                    {**NATURAL, "description": _DEP},
                    number(_DEP, minimum=0, maximum=_MOST_S),
                ],
                "minItems": 3,
                "maxItems": 3,
                "description": _DEP,
            },
            "description": f"a list of {_DEP}",
        },
        "description": f"a list for each slice of {_DEP}",
    },
    consumers=list_of(NATURAL, "devices that consume the results", least=0),
)
_STEP_S: dict[str, Any] = {
    "anyOf": [{"type": "null"}, _TIME],
    "description": "seconds of a pipeline's step, or null",
}
_POLICY = record(
    "policy of an encoder: name, policy, fill_s, before_step_s, stored_s, stored_bytes",
    name=TEXT,
    policy=one_of(["fill", "before-step"]),
    fill_s=_STEP_S,
    before_step_s=_STEP_S,
    stored_s=_STEP_S,
    stored_bytes=number("bytes of a sample", minimum=0, maximum=_MOST_BYTES),
)
_PREDICTED = (
    "step_s",
    "samples_per_s",
    "pipeline_s",
    "exposed_reduction_s",
    "optimizer_s",
    "bubble",
    "pipeline_bytes_per_sample",
    "data_bytes_per_sample",
)


def _at_least(description: str, *optional: str, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these properties; ``optional`` and additional ones may be there."""
    required = [name for name in properties if name not in optional]
    return {**record(description, required, **properties), "additionalProperties": True}


_PARTS: dict[str, Any] = dict(
    format={"const": FORMAT, "description": f"{FORMAT!r} (a plan of this version)"},
    backbone=record(
        "a backbone's record: name, family, options, train, freeze; or the table of its layers",
        [],
        name=TEXT,
        family=TEXT,
        options=OBJECT,
        train=list_of(TEXT, "patterns of trained parameters"),
        freeze=list_of(TEXT, "patterns of frozen parameters"),
        table=TEXT,
    ),
    dtype=one_of(list(ELEMENT_BYTES)),
    pipeline=COUNT,
    data=COUNT,
    tensor=COUNT,
    sequence_parallel=FLAG,
    rank_order=one_of(["tp-dp-pp", "tp-pp-dp"]),
    global_batch_size=COUNT,
    micro_batch_size=COUNT,
    activations={
        "type": "object",
        "additionalProperties": one_of(list(ActivationPolicy)),
        "description": "an object: layer name to activation policy",
    },
    distributed_optimizer=FLAG,
    ema=FLAG,
    grad_reduce_in_bf16=FLAG,
    overlap_grad_reduce=FLAG,
    placement=one_of(list(PLACEMENTS)),
    num_chunks=COUNT,
    stages=list_of(list_of(TEXT, "names of a stage's layers"), "a list for each stage"),
    schedule=record(
        "a schedule: name, placement, order, ...",
        name=TEXT,
        placement=one_of(list(PLACEMENTS)),
        device_of_stage=list_of(NATURAL, "the device of each stage"),
        num_microbatches=COUNT,
        order=list_of(list_of(OPERATION, "a device's operations"), "a list for each device"),
        bubble_tasks=list_of(_BUBBLE_TASK, "a list of bubble tasks", least=0),
    ),
    times=record(
        "times and sizes that the schedule was planned for",
        ["forward", "backward", "weight_grad", "edges", "saved_bytes", "cap_bytes"],
        forward=_SECONDS,
        backward=_SECONDS,
        weight_grad={"anyOf": [{"type": "null"}, _SECONDS], "description": "seconds, or null"},
        edges={"type": "array", "items": _EDGE, "description": "a list of messages"},
        saved_bytes=_BYTES,
        cap_bytes=_BYTES,
        **dict(zip((*RECOMPUTE_KEYS, WGRAD_KEY), (_PARTS_S, _BYTES, _BYTES), strict=True)),
        **dict(zip(OFFLOAD_KEYS, (_BYTES, _PARTS_S), strict=True)),
    ),
    predicted=_at_least("predictions", **dict.fromkeys(_PREDICTED, _FIGURE), memory_bytes=_BYTES),
    provenance=_at_least(
        "provenance",
        "search",
        profile_sha256=TEXT,
        profile=TEXT,
        cluster=OBJECT,
        schedule=_at_least(
            "certificate of the schedule",
            makespan=_TIME,
            lower_bound=_TIME,
            gap=_FIGURE,
            proved=FLAG,
            solver=TEXT,
        ),
        versions=OBJECT,
        search=_at_least(
            "certainty of the search",
            configs=COUNT,
            simulated=COUNT,
            left=NATURAL,
            lower_bound_s=_FIGURE,
        ),
    ),
    profile={**OBJECT, "description": "costs of each layer, as 'pulse profile' writes them"},
)
SCHEMA = record(
    "a plan as 'pulse tune' writes it",
    list(_PARTS),
    **_PARTS,
    encoders=COMPONENTS,
    before_step=COMPONENTS,
    policies=list_of(_POLICY, "policies of encoders"),
    optimizer_cpu_offload=FLAG,
    self_conditioning=number("a number above 0, at most 1", exclusiveMinimum=0, maximum=1),
)


def plan_faults(content: Any) -> list[str]:
    """Return every fault of a plan file's form: its position, and the allowed values."""
    return [*faults_of(SCHEMA, content), *_unnamed(content)]


def _unnamed(content: Any) -> Iterator[str]:
    """Yield required fields of a backbone's record that are missing; a table of layers needs
    none."""
    found = content.get("backbone") if isinstance(content, Mapping) else None
    if isinstance(found, Mapping) and "table" not in found:
        for name, allowed in {"name": TEXT, "options": OBJECT}.items():
            if name not in found:
                yield f"backbone.{name} is missing; allowed is {allowed['description']}"
