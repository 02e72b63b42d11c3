"""Validators of consistency between the parts of a plan file that is well-formed by its schema."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicy
from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement
from megatron_pulse.planner.plan_file.schema import OFFLOAD_KEYS, RECOMPUTE_KEYS, WGRAD_KEY
from megatron_pulse.planner.program.simulate import StageMessage
from megatron_pulse.profile.profile import Profile

_ROUNDING = 1e-6
_COLUMNS = (
    "forward",
    "backward",
    "weight_grad",
    "saved_bytes",
    *RECOMPUTE_KEYS,
    WGRAD_KEY,
    *OFFLOAD_KEYS,
)


def sum_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield values that contradict each other."""
    batch, data, size = (record[name] for name in ("global_batch_size", "data", "micro_batch_size"))
    if batch % (data * size):
        yield (
            f"global_batch_size {batch} is not a multiple of data {data} x micro_batch_size {size}"
        )
    predicted = record["predicted"]
    rate, step_s = predicted["samples_per_s"], predicted["step_s"]
    if not math.isclose(rate * step_s, batch, rel_tol=_ROUNDING):
        yield (
            f"predicted: {rate:g} samples/s in steps of {step_s:g} s are {rate * step_s:g} a step, "
            f"but global_batch_size is {batch}"
        )
    part_s = predicted["pipeline_s"]
    if part_s > step_s * (1 + _ROUNDING):
        yield f"predicted: pipeline_s {part_s:g} is more than step_s {step_s:g}"
    if predicted["bubble"] > 1 + _ROUNDING:
        yield f"predicted.bubble is {predicted['bubble']:g}; it is a share, at most 1"
    if record.get("context", 1) > 1:
        told = ("context_s", "context_bytes_per_sample")
        yield from (f"predicted.{name} is missing" for name in told if name not in predicted)
    known = record["provenance"]["schedule"]
    if known["lower_bound"] > known["makespan"] * (1 + _ROUNDING):
        yield (
            f"provenance.schedule: lower_bound {known['lower_bound']:g} is above makespan "
            f"{known['makespan']:g}"
        )
    if record["sequence_parallel"] and record["tensor"] == 1:
        yield "sequence_parallel: requires tensor parallelism, tensor is 1"
    if record["grad_reduce_in_bf16"] and record["dtype"] != "bfloat16":
        yield f"grad_reduce_in_bf16: requires dtype bfloat16, dtype is {record['dtype']}"
    if record.get("optimizer_cpu_offload") and not record["distributed_optimizer"]:
        yield "optimizer_cpu_offload: requires distributed_optimizer, which is false"
    if (order := record.get("device_order")) is not None:
        world = num_ranks(record)
        if sorted(order) != list(range(world)):
            yield f"device_order: lists each of the devices 0 to {world - 1} once"
    names = Counter(name for stage in record["stages"] for name in stage)
    for name, count in names.items():
        if count > 1:
            yield f"stages: layer {name!r} occurs {count} times"
    given = [name in record["times"] for name in OFFLOAD_KEYS] + [
        ActivationPolicy.OFFLOAD in record["activations"].values()
    ]
    if any(given) and not all(given):
        names_of = ", ".join(f"times.{name}" for name in OFFLOAD_KEYS)
        yield (f"activations (offload), {names_of}: all of them or none, some are missing")


def num_ranks(record: Mapping[str, Any]) -> int:
    """Number of ranks of a plan's record."""
    degrees = (int(record[name]) for name in ("pipeline", "data", "tensor"))
    return math.prod(degrees) * int(record.get("context", 1))


def context_faults(record: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    """Yield reasons why the costs of ``profile`` are not those of the plan's context degree."""
    size, tensor = record.get("context", 1), record["tensor"]
    if size == 1:
        return
    if profile.context is None:
        yield f"context is {size}, but profile has no costs of context parallelism"
    elif said := profile.context.refusal(size, tensor):
        yield f"context {size}, tensor {tensor}: {said}"
    if record["rank_order"] != "tp-dp-pp":
        yield f"context is {size}, which needs rank_order tp-dp-pp, not {record['rank_order']}"
    if profile.kinds:
        yield f"context is {size}, and ranks that share tokens are on devices of one kind"


def fsdp_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield units that do not divide the layers, and groups that do not divide the ranks."""
    fsdp, sharing = record["fsdp"], record["data"] * record.get("context", 1)
    starts, num_layers = fsdp["starts"], sum(map(len, record["stages"]))
    if starts[0] != 0 or starts[-1] >= num_layers or sorted(set(starts)) != starts:
        yield f"fsdp, starts: they rise from 0 to below {num_layers}, the number of layers"
    if record["pipeline"] != 1 or len(record["stages"]) != 1:
        yield "fsdp: the plan has a pipeline, and FSDP none"
    if sharing % fsdp["group"]:
        yield f"fsdp, group: {fsdp['group']} does not divide the {sharing} replicas"


def shares_faults(shapes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield shapes of one name, and shares whose sum is not 1."""
    for name, count in Counter(shape["name"] for shape in shapes).items():
        if count > 1:
            yield f"shapes: {name} occurs {count} times"
    whole = sum(shape["share"] for shape in shapes)
    if shapes and not math.isclose(whole, 1, rel_tol=_ROUNDING):
        yield f"shapes: the sum of all shares is {whole:g}; it must be 1"


def edge_faults(placement: Placement, edges: tuple[StageMessage, ...]) -> Iterator[str]:
    """Yield messages between stages that do not exist, or that share a device."""
    num, home = placement.num_stages, placement.device_of_stage
    for edge in edges:
        if not 0 <= edge.source < edge.destination < num:
            yield f"times.edges: from stage {edge.source} to {edge.destination}; there are {num}"
        elif home[edge.source] == home[edge.destination]:
            yield (f"times.edges: stages {edge.source} and {edge.destination} are on one device")


def shape_faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield columns with another length than the number of stages, or of devices."""
    kind, chunks = PLACEMENTS[record["placement"]], record["num_chunks"]
    devices, num = record["pipeline"], len(record["stages"])
    if devices == 1 and chunks != 1:
        yield f"num_chunks: {chunks}; a pipeline of one device has one stage"
    elif devices > 1 and not kind.allows(chunks):
        yield f"num_chunks: {chunks}; a device of {kind} hosts {kind.chunks} stage(s)"
    if num != devices * chunks:
        yield f"stages: {num}, but {devices} device(s) with {chunks} each have {devices * chunks}"
    for name in _COLUMNS:
        column = record["times"].get(name)
        if column is not None and len(column) != num:
            yield f"times.{name}: {len(column)} values for {num} stages"
    for name, values in (
        ("times.cap_bytes", record["times"]["cap_bytes"]),
        ("predicted.memory_bytes", record["predicted"]["memory_bytes"]),
    ):
        if len(values) != devices:
            yield f"{name}: {len(values)} values for {devices} device(s)"
