"""Form of a plan file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NotRequired, TypedDict

from annotated_types import Ge, Gt, Le

from megatron_pulse.adapters.adapter import AdapterRecord
from megatron_pulse.adapters.quantization import QUANTIZATIONS
from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.json_validation import (
    Count,
    Natural,
    OneOf,
    OperationText,
    Some,
    Text,
    faults_of,
    open_ended,
)
from megatron_pulse.planner.bubble_fill.encoder_table import ComponentRecord
from megatron_pulse.planner.layout.fsdp_layout import Gathering
from megatron_pulse.planner.layout.placement import PLACEMENTS
from megatron_pulse.profile.roofline import ELEMENT_BYTES

FORMAT = "megatron_pulse plan 5"
"""Version of the form and of the predictions; plans of other versions must be made anew."""

RECOMPUTE_KEYS = ("recompute_s", "recompute_bytes")
"""Columns for recomputation, in the order of the problem's fields.

Per stage: seconds of recomputation in the backward, and bytes that recomputed activations take.
"""

WGRAD_KEY = "wgrad_bytes"
"""Column for deferred weight gradients: bytes per stage in the weight-gradient queue."""

OFFLOAD_KEYS = ("offload_bytes", "offload_s")
"""Columns for activation offload: bytes per stage, and seconds of one copy."""

_Time = Annotated[float, Gt(0), Le(1e9), "seconds"]
_PartTime = Annotated[float, Ge(0), Le(1e9), "seconds"]
_Bytes = Annotated[float, Ge(0), Le(1e15), "bytes"]
_Seconds = Annotated[Some[_Time], "seconds of each stage"]
_PartSeconds = Annotated[Some[_PartTime], "seconds of each stage"]
_StageBytes = Annotated[Some[_Bytes], "bytes of each stage"]
_DeviceBytes = Annotated[Some[_Bytes], "bytes of each device"]
_Figure = Annotated[float, Ge(-1e-9)]  # 0, or a rounded difference
_Placement = Annotated[str, OneOf(tuple(PLACEMENTS))]
_Edge = Annotated[
    tuple[int, int, _PartTime] | tuple[int, int, _PartTime, bool],
    "[stage, stage, seconds], followed by false if no gradient returns",
]
_Slice = Annotated[
    tuple[Natural, Natural, Natural, Natural],
    "[first layer, layer after the last, first sample, sample after the last]",
]
_Dependency = Annotated[tuple[Natural, Natural, _PartTime], "[bubble task, slice, lag in seconds]"]


class _Backbone(TypedDict, total=False):
    """Record of a backbone, or the ``table`` of its layers."""

    name: Text
    family: Text
    options: Mapping[str, Any]
    train: Some[Text]
    freeze: Some[Text]
    adapter: AdapterRecord
    quantization: Annotated[str, OneOf(QUANTIZATIONS)]
    table: Text


class _BubbleTask(TypedDict):
    name: Text
    slice_seconds: Annotated[Some[_Time], "seconds of each slice"]
    devices: Annotated[Some[Natural] | None, "a list of devices, or null"]
    slices: NotRequired[tuple[_Slice, ...]]
    deps: NotRequired[tuple[tuple[_Dependency, ...], ...]]
    consumers: NotRequired[tuple[Natural, ...]]


class _Schedule(TypedDict):
    name: Text
    placement: _Placement
    device_of_stage: Annotated[Some[Natural], "the device of each stage"]
    num_microbatches: Natural
    order: Some[Annotated[Some[OperationText], "a device's operations"]]
    bubble_tasks: tuple[_BubbleTask, ...]


class _Times(TypedDict):
    """Times and sizes that the schedule was planned for."""

    forward: _Seconds
    backward: _Seconds
    weight_grad: _Seconds | None
    edges: Annotated[tuple[_Edge, ...], "a list of messages"]
    saved_bytes: _StageBytes
    cap_bytes: _DeviceBytes
    recompute_s: NotRequired[_PartSeconds]
    recompute_bytes: NotRequired[_StageBytes]
    wgrad_bytes: NotRequired[_StageBytes]
    offload_bytes: NotRequired[_StageBytes]
    offload_s: NotRequired[_PartSeconds]


class _Policy(TypedDict):
    """Decision for an encoder."""

    name: Text
    policy: Annotated[str, OneOf(("fill", "before-step"))]
    fill_s: _Time | None
    before_step_s: _Time | None
    stored_s: _Time | None
    stored_bytes: _Bytes


@open_ended
class _Predicted(TypedDict):
    step_s: _Figure
    samples_per_s: _Figure
    pipeline_s: _Figure
    exposed_reduction_s: _Figure
    optimizer_s: _Figure
    bubble: _Figure
    pipeline_bytes_per_sample: _Figure
    data_bytes_per_sample: _Figure
    memory_bytes: _DeviceBytes


@open_ended
class _Certificate(TypedDict):
    makespan: _Time
    lower_bound: _Time
    gap: _Figure
    proved: bool
    solver: Text


@open_ended
class _Search(TypedDict):
    configs: Count
    simulated: Natural
    left: Natural
    lower_bound_s: _Figure


@open_ended
class _Provenance(TypedDict):
    profile_sha256: Text
    profile: Text
    cluster: Mapping[str, Any]
    schedule: _Certificate
    versions: Mapping[str, Any]
    search: NotRequired[_Search]


class _Shape(TypedDict):
    """Plan of the steps whose samples have one shape, where it differs from the whole plan."""

    name: Text
    share: Annotated[float, Gt(0), Le(1)]
    micro_batch_size: Count
    schedule: _Schedule
    times: _Times
    predicted: _Predicted
    certificate: _Certificate
    profile: Annotated[Mapping[str, Any], "costs of each layer, as 'pulse profile' writes them"]


class _Fsdp(TypedDict):
    """Units of layers by their first ones, and their collectives, under fully_shard."""

    starts: Some[Natural]
    group: Annotated[int, Ge(2)]
    gathering: Annotated[str, OneOf(tuple(map(str, Gathering)))]
    reduce_once: bool
    prefetch: Natural


class _Plan(TypedDict):
    format: Annotated[str, OneOf((FORMAT,))]
    backbone: _Backbone
    dtype: Annotated[str, OneOf(tuple(ELEMENT_BYTES))]
    pipeline: Count
    data: Count
    tensor: Count
    sequence_parallel: bool
    rank_order: Annotated[str, OneOf(("tp-dp-pp", "tp-pp-dp"))]
    global_batch_size: Count
    micro_batch_size: Count
    activations: Annotated[
        Mapping[str, ActivationPolicy], "an object: layer name to activation policy"
    ]
    distributed_optimizer: bool
    ema: bool
    grad_reduce_in_bf16: bool
    overlap_grad_reduce: bool
    placement: _Placement
    num_chunks: Count
    stages: Some[Annotated[Some[Text], "names of a stage's layers"]]
    schedule: _Schedule
    times: _Times
    predicted: _Predicted
    provenance: _Provenance
    profile: Annotated[Mapping[str, Any], "costs of each layer, as 'pulse profile' writes them"]
    encoders: NotRequired[Some[ComponentRecord]]
    before_step: NotRequired[Some[ComponentRecord]]
    policies: NotRequired[Some[_Policy]]
    optimizer_cpu_offload: NotRequired[bool]
    optimizer_bytes: NotRequired[Annotated[float, Ge(0), Le(8)]]
    self_conditioning: NotRequired[Annotated[float, Gt(0), Le(1)]]
    dpo: NotRequired[bool]
    shapes: NotRequired[Some[_Shape]]
    fsdp: NotRequired[_Fsdp]
    context: NotRequired[Count]
    device_order: NotRequired[
        Annotated[Some[Natural], "the device of the cluster for each rank, each once"]
    ]


def plan_faults(content: Any) -> list[str]:
    """Return every fault of a plan file's form: its position, and the allowed values."""
    return [*faults_of(_Plan, content), *_unnamed(content)]


def _unnamed(content: Any) -> Iterator[str]:
    """Yield required fields of a backbone's record that are missing; a table of layers needs
    none."""
    found = content.get("backbone") if isinstance(content, Mapping) else None
    if isinstance(found, Mapping) and "table" not in found:
        for name, allowed in {"name": "text", "options": "an object"}.items():
            if name not in found:
                yield f"backbone.{name} is missing; allowed is {allowed}"
