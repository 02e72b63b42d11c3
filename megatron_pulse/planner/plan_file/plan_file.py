"""Plan file: decisions of the tuner, predictions, and provenance.

The file is one JSON object. ``pulse tune`` writes it, ``pulse check`` and ``pulse show`` read it,
and a run with ``--pulse-plan`` obeys it. It holds everything that determines execution (backbone,
degrees, batch, cuts, every device's order), so that a run needs no solver. It also holds the costs
of each layer at its microbatch size, so that all predictions can be recomputed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies, name_faults, policies_of
from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.dataclass_flags import flag_value
from megatron_pulse.errors import UserError
from megatron_pulse.file_kinds import FileKind, detect_kind
from megatron_pulse.files import FileError, read_json, write_with_checksum
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.cluster.cluster import from_record as cluster_from_record
from megatron_pulse.planner.cluster.places import Place, places_of
from megatron_pulse.planner.cluster.rank_order import RankOrder
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout, Gathering
from megatron_pulse.planner.layout.layouts import layout_name
from megatron_pulse.planner.layout.placement import Partition, Placement, make_placement
from megatron_pulse.planner.partition.memory import ADAM_BYTES, ParameterState
from megatron_pulse.planner.plan_file.consistency import (
    context_faults,
    edge_faults,
    fsdp_faults,
    shape_faults,
    shares_faults,
    sum_faults,
)
from megatron_pulse.planner.plan_file.schema import (
    FORMAT,
    OFFLOAD_KEYS,
    RECOMPUTE_KEYS,
    WGRAD_KEY,
    plan_faults,
)
from megatron_pulse.planner.program.simulate import SimulatedStep, StageMessage, lags, simulate_step
from megatron_pulse.planner.schedule.check.validate import faults_for, validate
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.serialize import from_json, to_json
from megatron_pulse.profile import files as profile_files
from megatron_pulse.profile.profile import Profile, ProfileError
from megatron_pulse.profile.trainable import copies_reference


class PlanFileError(UserError):
    """A plan file that cannot be read or would not run; the message lists every fault."""


@dataclass(frozen=True)
class PlanFile:
    """Configuration of a run, its predictions, and their provenance.

    ``rank_order`` is Megatron's: tp-dp-pp or tp-pp-dp. ``stages`` are the names of each stage's
    layers. ``schedule`` solves ``problem``, in seconds and bytes; ``edges`` are the messages
    between devices. ``predicted`` and ``provenance`` are informative. They and the times follow
    from the other fields and ``profile``, which has this microbatch size alone (see
    ``tune.plans.verify_figures``).

    ``encoders`` are the frozen components (in the form of ``bubble_fill.encoder_table``) that the
    schedule's bubble tasks run. ``before_step`` are those that run before the step. ``policies``
    are the decision for each of them, with its reason (see ``plans.encoder_policies``).
    ``self_conditioning`` is the share of steps with an additional forward-only pass. With ``dpo``
    all steps have one, of the reference model.

    ``recompute``, ``selective`` and ``offload`` are layers under full recomputation, selective
    recomputation and activation offload. ``ema`` (EMA), ``grad_reduce_in_bf16`` (bf16 gradient
    reduction), ``optimizer_cpu_offload`` (optimizer offload) and ``optimizer_bytes`` are the fields
    of ``ParameterState``.

    ``shapes`` are the plans of training steps whose samples all have one of the backbone's shapes,
    in their order. Microbatch size, schedule and costs of the plan itself are for microbatches of
    any shape, as evaluations have. Its predictions are the mean of the shapes' (see
    ``Outcome.with_shapes``). ``fsdp`` shards the parameters of the only stage: the schedule is then
    that of the computation alone, and predictions include collectives.

    Rank k of the plan runs on device ``device_order[k]`` of the cluster (default: device k), if the
    cluster's devices differ. ``context`` ranks share the tokens of a sample; the profile is of
    whole tokens, and times are those of a rank.
    """

    backbone: Mapping[str, Any]
    dtype: str
    pipeline: int
    data: int
    tensor: int
    sequence_parallel: bool
    rank_order: str
    global_batch_size: int
    micro_batch_size: int
    activations: ActivationPolicies
    distributed_optimizer: bool
    ema: bool
    grad_reduce_in_bf16: bool
    overlap_grad_reduce: bool
    stages: tuple[tuple[str, ...], ...]
    schedule: Schedule
    problem: ScheduleProblem
    edges: tuple[StageMessage, ...]
    predicted: Mapping[str, Any]
    provenance: Mapping[str, Any]
    profile: Profile
    encoders: tuple[Mapping[str, Any], ...] | None = None
    before_step: tuple[Mapping[str, Any], ...] | None = None
    policies: tuple[Mapping[str, Any], ...] | None = None
    self_conditioning: float = 0.0
    optimizer_cpu_offload: bool = False
    optimizer_bytes: float = ADAM_BYTES
    dpo: bool = False
    shapes: tuple[ShapePlan, ...] = ()
    fsdp: FsdpLayout | None = None
    device_order: tuple[int, ...] | None = None
    context: int = 1

    @property
    def mixed(self) -> bool:
        """True if the plan was made for devices of several kinds."""
        return "kinds" in self.provenance["cluster"]

    @property
    def cluster(self) -> Cluster:
        """Cluster that the plan was made for, with the plan's ranks; raises ClusterError."""
        return ordered_cluster(self.provenance["cluster"], self.device_order)

    @property
    def ranks(self) -> RankOrder:
        """Ranks of the plan in its ``cluster``."""
        of = self.cluster, self.pipeline, self.data, self.tensor
        return RankOrder(*of, self.rank_order == "tp-pp-dp", self.context)

    @property
    def places(self) -> tuple[Place, ...]:
        """Kinds and usable memory of each pipeline device."""
        return places_of(self.ranks)

    @property
    def heading(self) -> str:
        """Summary of the plan in one line."""
        return (
            f"{name_of(self.backbone)} on {self.world_size} rank(s): {self.degrees}, "
            f"{self.layout} ({len(self.stages)} stage(s))"
        )

    @property
    def degrees(self) -> str:
        """Parallel degrees as text."""
        said = f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"
        return said + f" x context {self.context}" * (self.context > 1)

    @property
    def layout(self) -> str:
        """Name of the layout, as ``pulse tune --layouts`` takes it."""
        if self.fsdp is not None:
            return self.fsdp.name
        return layout_name(self.partition, self.profile.skips)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pipeline * self.data * self.tensor * self.context

    @property
    def token_slices(self) -> int:
        """Number of slices in which token-wise parts of layers run; 1 for whole layers."""
        return self.profile.token_slices

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per step and pipeline."""
        return self.global_batch_size // (self.data * self.micro_batch_size)

    @property
    def microbatches(self) -> str:
        """Number and size of a training step's microbatches as text, of each shape's."""
        if self.shapes:
            return ", ".join(f"{s.name} {s.plan.microbatches}" for s in self.shapes)
        return f"{self.num_microbatches} x {self.micro_batch_size} samples"

    @property
    def num_samples(self) -> int:
        """Number of samples per step and pipeline."""
        return self.num_microbatches * self.micro_batch_size

    @property
    def placement(self) -> Placement:
        """Placement of the stages on devices."""
        return self.problem.placement

    @property
    def partition(self) -> Partition:
        """Partition of the chain into stages."""
        return Partition(self.placement, (0, *accumulate(map(len, self.stages))))

    @property
    def state(self) -> ParameterState:
        """State kept for each trained parameter."""
        return ParameterState(
            self.ema,
            self.grad_reduce_in_bf16,
            self.optimizer_cpu_offload,
            self.optimizer_bytes,
            self.dpo and copies_reference(self.backbone),
        )

    @property
    def layer_names(self) -> list[str]:
        """Names of all layers, in chain order."""
        return [name for stage in self.stages for name in stage]

    def of_bucket(self, name: str) -> PlanFile:
        """Plan of the steps of the shape of that name; raises PlanFileError if there is none."""
        for shape in self.shapes:
            if shape.name == name:
                return shape.plan
        there = ", ".join(shape.name for shape in self.shapes)
        raise PlanFileError(
            f"the plan has no bucket {name!r}: "
            + (f"they are {there}" if there else "it has one schedule for all")
        )

    def simulate_step(self) -> SimulatedStep:
        """Predicted step of one pipeline."""
        return simulate_step(self.problem, self.schedule, self.edges)


@dataclass(frozen=True)
class ShapePlan:
    """Plan of the steps whose samples have one shape, a bucket.

    ``name`` and ``share`` are those of ``ProfiledShape``. Degrees, cuts and activation policies of
    ``plan`` are those of the whole plan. It has its own microbatch size, schedule, costs and
    predictions.
    """

    name: str
    share: float
    plan: PlanFile


def ordered_cluster(record: Mapping[str, Any], device_order: Sequence[int] | None) -> Cluster:
    """Cluster of a plan's record, with ranks in ``device_order``; raises ClusterError."""
    cluster = cluster_from_record(record, "provenance.cluster")
    return cluster if device_order is None else cluster.with_order(device_order)


def save_plan(plan: PlanFile, path: str | Path) -> None:
    """Write ``plan`` to ``path`` atomically: only a complete file replaces an existing one."""
    write_with_checksum(path, json.dumps(to_record(plan), indent=1) + "\n")


def read_plan(path: str | Path) -> tuple[dict[str, Any] | None, PlanFile | None, list[str]]:
    """Read a plan file: its JSON object, its plan, and every fault of form and of legality.

    The object is None if its form has faults. The plan is None if its numbers do not make one.
    Raises PlanFileError for a file that cannot be read at all (see ``files.read_json``).
    """
    try:
        record = read_json(path, FileKind.PLAN)
    except FileError as error:
        raise PlanFileError(str(error)) from error
    if older := _other_version(path, record):
        raise PlanFileError(older)
    if faults := plan_faults(record):
        return None, None, faults
    return record, *_from_record(record)


def _other_version(path: str | Path, record: Mapping[str, Any]) -> str:
    """Error text for a plan of another version; empty for the current version and for other
    files."""
    form = record.get("format")
    if form is None or form == FORMAT or detect_kind(record) is not FileKind.PLAN:
        return ""
    backbone = record.get("backbone")
    named = backbone if isinstance(backbone, dict) else {}
    options = named.get("options")
    model = f"--backbone {named.get('name', 'NAME')}"
    for key, value in (options if isinstance(options, dict) else {}).items():
        model += f" --option {key}={flag_value(value)}"
    return (
        f"{path} is {str(form)[:40]!r}, only {FORMAT!r} can be checked and run. Make it anew "
        f"with 'pulse tune {model} --cluster CLUSTER --global-batch-size "
        f"{record.get('global_batch_size', 'N')} -o {path}' (or --profile for --backbone)"
    )


def to_record(plan: PlanFile) -> dict[str, Any]:
    """JSON object of ``plan``."""
    problem = plan.problem
    record: dict[str, Any] = {"format": FORMAT}
    for field in fields(plan):
        match field.name:
            case "schedule":
                record["schedule"] = to_json(plan.schedule)
            case "problem":
                record["times"] = {
                    "forward": problem.forward,
                    "backward": problem.backward,
                    "weight_grad": problem.weight_grad,
                    "edges": [astuple(edge)[: 3 if edge.needs_grad else 4] for edge in plan.edges],
                    "saved_bytes": problem.activation,
                    "cap_bytes": problem.cap,
                }
                if problem.recompute_s is not None:
                    again = problem.recompute_bytes or (0.0,) * problem.placement.num_stages
                    record["times"] |= dict(
                        zip(RECOMPUTE_KEYS, (problem.recompute_s, again), strict=True)
                    )
                if problem.wgrad_bytes is not None:
                    record["times"][WGRAD_KEY] = problem.wgrad_bytes
                if problem.offload_bytes is not None:
                    moved = problem.offload_bytes, problem.offload_s
                    record["times"] |= dict(zip(OFFLOAD_KEYS, moved, strict=True))
            case "edges":
                pass
            case "context":
                if plan.context > 1:
                    record["context"] = plan.context
            case "encoders" | "before_step" | "policies" as name:
                if (given := getattr(plan, name)) is not None:
                    record[name] = list(given)
            case "activations":
                record["activations"] = plan.activations.by_name(plan.layer_names)
            case "self_conditioning" | "optimizer_cpu_offload" | "dpo" | "device_order" as name:
                if given := getattr(plan, name):
                    record[name] = given
            case "optimizer_bytes":
                if plan.optimizer_bytes != ADAM_BYTES:
                    record["optimizer_bytes"] = plan.optimizer_bytes
            case "stages":
                record["placement"] = str(plan.placement.kind)
                record["num_chunks"] = plan.placement.num_chunks
                record["stages"] = plan.stages
            case "profile":
                record["profile"] = profile_files.to_record(plan.profile)
            case "fsdp":
                if plan.fsdp is not None:
                    record["fsdp"] = asdict(plan.fsdp)
            case "shapes":
                if plan.shapes:
                    record["shapes"] = list(map(_shape_record, plan.shapes))
            case name:
                record[name] = getattr(plan, name)
    return record


_OF_SHAPE = ("micro_batch_size", "schedule", "times", "predicted", "profile")
"""Keys that a shape has of its own, beside the certificate of its schedule."""
_OF_WHOLE = ("shapes", "encoders", "before_step", "policies")
"""Keys that a shape does not have."""


def _shape_record(shape: ShapePlan) -> dict[str, Any]:
    record = to_record(shape.plan)
    return {
        "name": shape.name,
        "share": shape.share,
        "certificate": record["provenance"]["schedule"],
        **{name: record[name] for name in _OF_SHAPE},
    }


def shape_records(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """JSON objects of the shapes' plans, by name, from that of the whole plan."""
    shared = {name: value for name, value in record.items() if name not in _OF_WHOLE}
    provenance = {n: value for n, value in record["provenance"].items() if n != "search"}
    return {
        own["name"]: {
            **shared,
            **{name: own[name] for name in _OF_SHAPE},
            "provenance": {**provenance, "schedule": own["certificate"]},
        }
        for own in record.get("shapes", ())
    }


def _shapes_from(record: Mapping[str, Any]) -> tuple[tuple[ShapePlan, ...], list[str]]:
    """Plans of the shapes in a well-formed record, and all faults."""
    given = record.get("shapes", ())
    if given and record["schedule"]["bubble_tasks"]:
        return (), ["shapes: with encoders in bubbles, all shapes have one schedule"]
    faults, found = list(shares_faults(given)), list[ShapePlan]()
    for own, whole in zip(given, shape_records(record).values(), strict=False):
        plan, wrong = _from_record(whole)
        faults += [f"shapes, {own['name']}: {fault}" for fault in wrong]
        if plan is not None:
            found.append(ShapePlan(own["name"], own["share"], plan))
    return tuple(found), faults


def _from_record(record: dict[str, Any]) -> tuple[PlanFile | None, list[str]]:
    """Plan of a well-formed record, if its numbers make one, and all faults."""
    faults = list(sum_faults(record))
    try:
        profile = profile_files.from_record(record["profile"], "profile")
    except ProfileError as error:
        return None, [*faults, str(error)]
    try:
        schedule = from_json(record["schedule"])
    except (ValueError, OverflowError) as error:
        return None, [*faults, f"schedule: {error}"]
    if shape := list(shape_faults(record)):
        return None, faults + shape
    times = record["times"]
    names = [name for stage in record["stages"] for name in stage]
    if unknown := list(name_faults(record["activations"], names)):
        return None, [*faults, *unknown, *(f"schedule: {fault}" for fault in validate(schedule))]
    edges = tuple(
        StageMessage(int(a), int(b), float(s), *needs_grad)
        for a, b, s, *needs_grad in times["edges"]
    )
    placement = make_placement(record["placement"], record["pipeline"], record["num_chunks"])
    faults += edge_faults(placement, edges)
    count, rest = divmod(record["global_batch_size"], record["data"] * record["micro_batch_size"])
    if rest:
        return None, faults + [f"schedule: {fault}" for fault in validate(schedule)]
    split = times["weight_grad"]
    try:
        problem = ScheduleProblem(
            placement,
            count,
            tuple(times["forward"]),
            tuple(times["backward"]),
            None if split is None else tuple(split),
            lags(edges, placement.num_stages),
            tuple(times["saved_bytes"]),
            tuple(times["cap_bytes"]),
            *(
                tuple(times[name]) if name in times else None
                for name in (*RECOMPUTE_KEYS, WGRAD_KEY, *OFFLOAD_KEYS)
            ),
        )
    except (ValueError, OverflowError) as error:
        faults += [f"times: {error}", *(f"schedule: {fault}" for fault in validate(schedule))]
        return None, faults
    given = {field.name: record[field.name] for field in fields(PlanFile) if field.name in record}
    given["stages"] = tuple(map(tuple, record["stages"]))
    given["activations"] = policies_of(record["activations"], names)
    given["schedule"], given["profile"] = schedule, profile
    for name in ("encoders", "before_step", "policies"):
        if name in given:
            given[name] = tuple(given[name])
    if "device_order" in given:
        given["device_order"] = tuple(given["device_order"])
    given["shapes"], wrong = _shapes_from(record)
    wrong += context_faults(record, profile)
    if fsdp := record.get("fsdp"):
        layout = FsdpLayout(**{**fsdp, "starts": tuple(fsdp["starts"])})
        given["fsdp"] = replace(layout, gathering=Gathering(layout.gathering))
        wrong += fsdp_faults(record)
    plan = PlanFile(**given, problem=problem, edges=edges)
    faults += [f"schedule: {fault}" for fault in faults_for(problem, schedule)]
    return plan, faults + wrong
