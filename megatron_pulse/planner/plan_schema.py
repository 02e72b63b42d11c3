"""What a plan file may say."""

from __future__ import annotations

from typing import Any

from megatron_pulse.planner.placement import PlacementKind
from megatron_pulse.planner.schema import COUNT, faults_of, number, record
from megatron_pulse.profile.devices import ELEMENT_BYTES

FORMAT = "megatron_pulse plan 1"
"""The version of the schema."""

_TEXT = {"type": "string", "minLength": 1, "description": "text"}
_FLAG = {"type": "boolean", "description": "true or false"}


def _list(items: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "description": description}


def _one_of(values: list[str]) -> dict[str, Any]:
    return {"enum": values, "description": f"one of {', '.join(values)}"}


_SECONDS = _list(number("a number above 0: seconds"), "seconds of each stage")
_BYTES = _list(number("a number, 0 or more: bytes", minimum=0), "bytes")
_MESSAGE = "[stage, stage, seconds]"
_EDGE = {
    "type": "array",
    "prefixItems": [
        {"type": "integer", "description": _MESSAGE},
        {"type": "integer", "description": _MESSAGE},
        {"type": "number", "minimum": 0, "description": _MESSAGE},
    ],
    "minItems": 3,
    "maxItems": 3,
    "description": _MESSAGE,
}

_ANY = {"type": "object", "description": "an object"}
_FIGURE = {"type": "number", "description": "a number"}
_STAGE = {"type": "integer", "minimum": 0, "description": "a whole number, 0 or more"}
_OPERATION = {
    "type": "string",
    "pattern": r"^[FBIWX][0-9]{1,9}:[0-9]{1,9}$",
    "description": "an operation such as F2:0",
}
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


def _at_least(description: str, **properties: Any) -> dict[str, Any]:
    """An object of these properties, and perhaps others."""
    return {**record(description, **properties), "additionalProperties": True}


SCHEMA = record(
    "a plan as 'pulse tune' writes it",
    format={"const": FORMAT, "description": f"{FORMAT!r} (a plan of this version)"},
    backbone={
        "type": "object",
        "required": ["name", "options"],
        "properties": {
            "name": _TEXT,
            "options": {"type": "object", "description": "the fields of its configuration"},
        },
        "description": "a backbone's record with name and options",
    },
    dtype=_one_of(list(ELEMENT_BYTES)),
    pipeline=COUNT,
    data=COUNT,
    tensor=COUNT,
    sequence_parallel=_FLAG,
    rank_order=_one_of(["tp-dp-pp", "tp-pp-dp"]),
    global_batch_size=COUNT,
    micro_batch_size=COUNT,
    recompute=_FLAG,
    distributed_optimizer=_FLAG,
    overlap_grad_reduce=_FLAG,
    placement=_one_of([kind.value for kind in PlacementKind]),
    num_chunks=COUNT,
    stages=_list(_list(_TEXT, "names of a stage's layers"), "a list for each stage"),
    schedule=record(
        "a schedule: name, placement, order, ...",
        name=_TEXT,
        placement=_one_of([kind.value for kind in PlacementKind]),
        device_of_stage=_list(_STAGE, "the device of each stage"),
        num_microbatches=COUNT,
        order=_list(_list(_OPERATION, "a device's operations"), "a list for each device"),
        fillers={"type": "array", "items": _ANY, "description": "a list of fillers"},
    ),
    times=record(
        "the times that the schedule was made for",
        forward=_SECONDS,
        backward=_SECONDS,
        weight_grad={"anyOf": [{"type": "null"}, _SECONDS], "description": "seconds, or null"},
        edges={"type": "array", "items": _EDGE, "description": "a list of messages"},
        saved_bytes=_BYTES,
        cap_bytes=_BYTES,
    ),
    predicted=_at_least(
        "what the tuner expects", **dict.fromkeys(_PREDICTED, _FIGURE), memory_bytes=_BYTES
    ),
    provenance=_at_least(
        "where the plan is from",
        profile_sha256=_TEXT,
        profile=_TEXT,
        cluster=_ANY,
        schedule=_at_least(
            "how good the schedule is",
            makespan=_FIGURE,
            lower_bound=_FIGURE,
            gap=_FIGURE,
            proved=_FLAG,
            solver=_TEXT,
        ),
        versions=_ANY,
    ),
)


def plan_faults(content: Any) -> list[str]:
    """Every fault of a plan file's form: where it is, and what is allowed there."""
    return faults_of(SCHEMA, content)
