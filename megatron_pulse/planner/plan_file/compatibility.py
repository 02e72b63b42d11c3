"""Validation of a plan file against a backbone and a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.planner.cluster.cluster import Cluster, ClusterError
from megatron_pulse.planner.cluster.places import Place, places_of, splits_a_kind
from megatron_pulse.planner.cluster.rank_order import RankOrder
from megatron_pulse.planner.layout.crossing import SkipCarrier
from megatron_pulse.planner.layout.embedder_choice import EmbedderChoice
from megatron_pulse.planner.plan_file.consistency import num_ranks
from megatron_pulse.planner.plan_file.plan_file import PlanFile, ordered_cluster
from megatron_pulse.planner.program.plan import Plan, PlanError
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.profile.channels_last import format_of
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from megatron_pulse.profile.trainable import trained_part


def check_backbone(
    given: PlanFile, backbone: Backbone, parameters: Sequence[int] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return every fault of the plan for this backbone, and the passed checks with their findings.

    ``parameters`` are the counts of each layer, if known. Messages are compiled and checked twice,
    with embedders sent and with embedders replicated, because a run may choose either.
    """
    if faults := list(_name_faults(given, backbone)):
        return faults, {}
    faults = [*_size_faults(given, backbone), *_tensor_faults(given, backbone)]
    if parameters is not None:
        faults += parameter_faults(given, backbone, parameters)
    count, laid = len(backbone.layers), format_of(backbone.record)
    fine = {
        "backbone": f"its {count} layers are those of {backbone.name}, in order"
        + f"; convolutions {laid}" * bool(laid)
        + f"; {sum(parameters or ()):,} parameters" * (parameters is not None)
    }
    plan = Plan(
        backbone,
        given.partition,
        problem=given.problem,
        schedules=(given.schedule,),
        activations=given.activations,
    )
    everywhere = tuple(
        EmbedderChoice(layer.name, 0, 0, True) for layer in backbone.layers if layer.embedder
    )
    sizes = []
    for choices in ((), everywhere) if everywhere else ((),):
        try:
            step = replace(plan, embedders=choices).step(given.num_microbatches)
        except PlanError as error:
            way = "on every device" if choices else "sent"
            faults.append(f"messages, with embedders {way}: {error}")
        else:
            sizes.append(f"{len(step.communication.messages)}")
    home = given.partition.placement.device_of_stage
    travelling = [r for r in plan.routes.skips if home[r.source_stage] != home[r.destination_stage]]
    direct = sum(route.carrier is SkipCarrier.DIRECT for route in travelling)
    carried = len(travelling) - direct
    fine["skips"] = (
        f"{len(backbone.skips) - len(travelling)} stay on their device, {direct} travel directly"
        + f", {carried} as the boundary" * bool(carried)
        if backbone.skips
        else "the backbone has none"
    )
    if not faults:
        counts = " or, embedders everywhere, ".join(sizes)
        fine["messages"] = f"{counts} in a step; no order of NCCL calls can block"
    return faults, fine


def parameter_faults(given: PlanFile, backbone: Backbone, counts: Sequence[int]) -> list[str]:
    """Layers whose parameter counts in the plan's profile differ from the backbone's.

    The backbone's counts are known if it can be built (``count_parameters``).
    """
    profile = given.profile
    return [
        f"profile.layers.{i}.parameters is {costs.parameters:,}; {layer.name!r} of {backbone.name} "
        f"has {count:,}"
        for i, (layer, costs, count) in enumerate(
            zip(backbone.layers, profile.layers, counts, strict=False)
        )
        if costs.parameters != count
    ]


def machine_faults(record: Mapping[str, Any]) -> list[str]:
    """Reasons why a plan file cannot run on the cluster that it was made for."""
    try:
        cluster = ordered_cluster(record["provenance"]["cluster"], record.get("device_order"))
    except ClusterError as error:
        return [str(error)]
    faults = rank_faults(record, cluster)
    if faults and cluster.mixed:
        return faults
    pipeline, data, tensor = (int(record[name]) for name in ("pipeline", "data", "tensor"))
    inside, context = record["rank_order"] == "tp-pp-dp", int(record.get("context", 1))
    ranks = RankOrder(cluster, pipeline, data, tensor, inside, context)
    held = zip(record["predicted"]["memory_bytes"], places_of(ranks), strict=False)
    if splits_a_kind(ranks):
        faults.append("tensor: a group of ranks is on unlike devices; order the devices by kind")
    return faults + [
        f"memory: device {device}{_of_kinds(place)} needs {size / 1e9:.3g} GB of "
        f"{place.usable_bytes / 1e9:.3g} GB"
        for device, (size, place) in enumerate(held)
        if size > place.usable_bytes * (1 + 1e-9)
    ]


def _of_kinds(place: Place) -> str:
    return f" ({place.name})" if place.kinds else ""


def rank_faults(record: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """Reasons why ``cluster`` cannot host the ranks of a plan file."""
    world, faults = num_ranks(record), []
    if world > cluster.num_devices:
        faults.append(f"the plan is for {world} ranks; {cluster.name} has {cluster.num_devices}")
    context = record.get("context", 1)
    if cluster.devices_per_node % (shared := record["tensor"] * context):
        names = "tensor x context" if context > 1 else "tensor"
        faults.append(
            f"{names}: {shared} ranks do not fill nodes of {cluster.devices_per_node} evenly"
        )
    return faults


def machine_summary(given: PlanFile) -> dict[str, str]:
    """Summary of the plan's ranks and memory on the cluster that it was made for."""
    cluster, held = given.cluster, given.predicted["memory_bytes"]
    peaks = peak_memory(given.problem, given.schedule)
    filled = zip(peaks, given.problem.cap or (), strict=True)
    peak, cap = max(filled, key=lambda pair: pair[0] / pair[1] if pair[1] else 0.0)
    return {
        "ranks": f"{given.world_size} ({given.degrees}); {cluster.name} has {cluster.num_devices}",
        "memory": f"activations of the schedule at their peak {peak / 1e9:.3g} GB of "
        f"{cap / 1e9:.3g} GB, on the device with least room; all in all at most "
        + _fullest(held, given.places),
    }


def _fullest(held: Sequence[float], places: Sequence[Place]) -> str:
    """Largest bytes of a device beside its usable bytes, for each kind."""
    most: dict[Place, float] = {}
    for num_bytes, place in zip(held, places, strict=True):
        most[place] = max(most.get(place, 0.0), num_bytes)
    return ", ".join(
        f"{num_bytes / 1e9:.3g} of {place.usable_bytes / 1e9:.3g} GB{_of_kinds(place)}"
        for place, num_bytes in most.items()
    )


def _size_faults(given: PlanFile, backbone: Backbone) -> Iterator[str]:
    """Yield bytes between layers that differ between the plan's costs and the backbone."""
    profile = given.profile
    element = ELEMENT_BYTES[profile.dtype]
    for i, (layer, costs) in enumerate(zip(backbone.layers, profile.layers, strict=False)):
        wanted = sum(spec.bytes_per_sample(element) for spec in layer.inputs)
        if costs.boundary_bytes != wanted:
            yield (
                f"profile.layers.{i}.boundary_bytes is {costs.boundary_bytes:,}; {layer.name!r} of "
                f"{backbone.name} takes {wanted:,} bytes of a sample in {profile.dtype}"
            )
        if costs.begins != (i > 0 and i in backbone.starts):
            yield (
                f"profile.layers.{i}.begins is {str(costs.begins).lower()}; chains of "
                f"{backbone.name} begin at {', '.join(map(str, backbone.starts))}"
            )
    yield from _gradient_faults(given, backbone)
    skips = [(s.source, s.destination, s.spec.bytes_per_sample(element)) for s in backbone.skips]
    costs_of = [(s.source, s.destination, s.num_bytes) for s in profile.skips]
    for number, (have, want) in enumerate(zip_longest(costs_of, skips)):
        if have != want:
            yield (
                f"profile.skips.{number} (source, destination, bytes) is {have}; that of "
                f"{backbone.name} is {want}"
            )
    yield from _conditioning_faults(given, backbone)


def _conditioning_faults(given: PlanFile, backbone: Backbone) -> Iterator[str]:
    """Yield conditioning that differs between the plan's costs and the backbone."""
    profile, layers = given.profile, backbone.layers
    element = ELEMENT_BYTES[profile.dtype]
    costs = [(c.source, c.consumers, c.num_bytes, c.embedder) for c in profile.conditioning]
    own = [
        (c.source, c.consumers, c.spec.bytes_per_sample(element), layers[c.source].embedder)
        for c in backbone.conditioning
    ]
    for number, (have, want) in enumerate(zip_longest(costs, own)):
        if have != want:
            yield (
                f"profile.conditioning.{number} (source, consumers, bytes, embedder) is {have}; "
                f"that of {backbone.name} is {want}"
            )


def _gradient_faults(given: PlanFile, backbone: Backbone) -> Iterator[str]:
    """Yield gradients that a step computes and the plan's costs leave out."""
    wanted, profile = required_gradients(backbone), given.profile
    taken = enumerate(zip(profile.layers, wanted.boundaries, strict=False))
    left_out = [
        *(f"layers.{i}.needs_grad" for i, (layer, needed) in taken
          if any(needed) and not layer.needs_grad),
        *(f"skips.{i}.needs_grad" for i, skip in enumerate(profile.skips)
          if not skip.needs_grad and wanted.skips.get(skip.name)),
        *(f"conditioning.{i}.needs_grad" for i, edge in enumerate(profile.conditioning)
          if not edge.needs_grad and wanted.conditioning.get(edge.name)),
    ]  # fmt: skip
    for name in left_out:
        yield f"profile.{name} is false; {backbone.name}, trained as the plan says, needs it"
    frozen = [i for i, layer in enumerate(profile.layers) if layer.frozen_parameters]
    freezes = any(trained_part(backbone.record)) or not all(la.trained for la in backbone.layers)
    if frozen and backbone.record and not freezes:
        yield (
            f"profile.layers.{frozen[0]}.frozen_parameters is "
            f"{profile.layers[frozen[0]].frozen_parameters:,}; the plan's backbone freezes nothing"
        )


def _tensor_faults(given: PlanFile, backbone: Backbone) -> Iterator[str]:
    """Yield degrees and options of tensor parallelism that the backbone does not support."""
    for heads in sorted(set(backbone.num_heads)):
        if heads % given.tensor:
            yield f"tensor: {given.tensor} ranks do not share the {heads} heads of {backbone.name}"
    if given.sequence_parallel and not backbone.divides_sequences:
        yield f"sequence_parallel: {backbone.name} has no token sequence between its layers"


def _name_faults(given: PlanFile, backbone: Backbone) -> Iterator[str]:
    placed = [(name, stage) for stage, names in enumerate(given.stages) for name in names]
    names = [layer.name for layer in backbone.layers]
    for position, (have, name) in enumerate(zip_longest(placed, names)):
        if have is None:
            yield f"stages end before layer {position}, {name!r}, of {backbone.name}"
            return
        if have[0] != name:
            wanted = "its end" if name is None else repr(name)
            yield (
                f"stages: layer {position} is {have[0]!r} (in stage {have[1]}); {backbone.name} "
                f"has {wanted} there"
            )
            return
