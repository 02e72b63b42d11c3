"""``--pulse-auto``: measure this job's links and devices, tune, and run the plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.dataclass_flags import flag_name
from megatron_pulse.errors import naming
from megatron_pulse.integration.flags.fsdp_flags import excluding
from megatron_pulse.integration.flags.parse import CommandLine
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.loop_encoders import LoopEncoders, loop_encoders
from megatron_pulse.integration.planning.encoder_costs import encoder_costs
from megatron_pulse.integration.planning.memory_format import measured_format
from megatron_pulse.integration.planning.profile_cache import cached_profile
from megatron_pulse.integration.planning.run_plan import (
    backbone_of_flags,
    compute_dtype,
    parameter_state,
)
from megatron_pulse.integration.planning.transformer_impl import can_split_backward
from megatron_pulse.integration.training_data import DiffusionData
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.encoder_policies import Policy, encode_plan
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.plans.verify_figures import load_checked, recomputed
from megatron_pulse.planner.tune.tune import DECISION_S, UntunableError, check_choices, tune
from megatron_pulse.profile.channels_last import in_format_of, in_given_format
from megatron_pulse.profile.measurement.context_rank import with_context_costs
from megatron_pulse.profile.measurement.measure import measure
from megatron_pulse.profile.profile import Profile, ProfileError
from megatron_pulse.profile.token_slices import require_token_slices
from megatron_pulse.profile.unlike_devices import combine
from megatron_pulse.profile.warnings import spread_caution
from megatron_pulse.profile.weight_offload import offload_weights
from megatron_pulse.runtime.collectives import broadcast_from_rank_0, gather_objects
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from megatron_pulse.runtime.measure.probe import ProbeSettings, probe, probe_device
from megatron_pulse.runtime.tensor_settings import compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS
from model_specs import load_recorded

FILLING_S = 4.0
"""Time limit of the search for bubble filling."""
SIZES = (1, 4)
"""Microbatch sizes that are measured; others are interpolated."""


def auto_plan(line: CommandLine, options: PulseOptions) -> PlanFile:
    """Plan of this job, the same on all ranks (collective); rank 0 writes it to a file.

    A plan that an earlier start of the job left in ``--save`` is reused. Raises ValueError on every
    rank if nothing fits, or if the existing plan is of another job.
    """
    args = line.args
    path = Path(args.save or ".") / "plan.json"
    if (plan := broadcast_from_rank_0(partial(_kept, path, args, options))) is not None:
        return plan
    probed = _cluster(args, options)
    cluster = broadcast_from_rank_0(lambda: _limited(probed, options))
    if cluster.mixed and (flag := _context_flag(args, options)):
        raise ValueError(
            f"{flag}: with --pulse-auto, ranks that share tokens must be alike, and this job's "
            "devices differ. Leave it out"
        )
    profile = _profile_of_kinds(line, options, cluster) if cluster.mixed else None
    return broadcast_from_rank_0(partial(_tune, line, options, cluster, profile, path))


def _context_flag(args: argparse.Namespace, options: PulseOptions) -> str:
    """Flag by which ranks share tokens, or may; empty without one."""
    if args.context_parallel_size > 1:
        return f"--context-parallel-size {args.context_parallel_size}"
    return "--pulse-auto-context" * options.auto_context


def _kept(path: Path, args: argparse.Namespace, options: PulseOptions) -> PlanFile | None:
    if not path.exists():
        return None
    plan = load_checked(path)
    given = options.options
    same = in_format_of(plan.backbone, options.backbone, given)
    backbone = backbone_of_flags(args, replace(options, options=same))
    planned = load_recorded(in_given_format(plan.backbone, given))
    if plan.world_size != args.world_size or planned.record != backbone.record:
        raise ValueError(
            f"--pulse-auto: {path} was made for another job ({plan.backbone['name']} on "
            f"{plan.world_size} ranks). Move the file, or use another --save"
        )
    fault = _other_encoders(plan, options, backbone)
    if plan.token_slices != options.token_slices:
        fault = f"has {plan.token_slices} slices of tokens, but this run {options.token_slices}"
    if fault:
        raise ValueError(f"--pulse-auto: {path} {fault}. Move the file, or use another --save")
    print(f"plan: {path}, reused from an earlier start", flush=True)
    return plan


def _other_encoders(plan: PlanFile, options: PulseOptions, backbone: Backbone) -> str:
    """Mismatch between a plan and the encoders that this run applies itself; empty if none."""
    tuned = sorted(policy["name"] for policy in plan.policies or ())
    decided = sorted(_decided(loop_encoders(options, backbone)))
    if not tuned or tuned == decided:
        return ""
    here = ", ".join(decided) or "nothing"
    return f"was tuned for {', '.join(tuned)} in the loop, but this run leaves {here} to the plan"


def _decided(loop: LoopEncoders | None) -> list[str]:
    """Encoders whose schedule the plan decides."""
    return [] if loop is None else [n for n, p in loop.policies.items() if p != Policy.BEFORE_STEP]


def _cluster(args: argparse.Namespace, options: PulseOptions) -> Cluster | None:
    """Cluster measured from the ranks' links and devices, on rank 0 (collective)."""
    device = compute_device()
    timeout_s = timedelta(minutes=args.distributed_timeout_minutes).total_seconds()
    shared = bool(_context_flag(args, options))
    settings = ProbeSettings("this job", device, timeout_s=timeout_s, all_to_alls=shared)
    if dist.get_world_size() > 1:
        probed = probe(settings)
        return None if probed is None else probed.cluster
    alone = ClusterLink("loopback", 1.0, 0.0, BandwidthScope.DEVICE)  # one device sends nothing
    one = probe_device(settings)
    usable = one.usable_memory
    return Cluster(settings.name, 1, 1, one.memory_gb, one.device, alone, usable_memory=usable)


def _limited(cluster: Cluster | None, options: PulseOptions) -> Cluster:
    """``cluster`` within ``--pulse-memory-gb``; smaller kinds of unlike devices keep their own."""
    assert cluster is not None
    limit = options.memory_gb
    if limit is None:
        return cluster
    if not cluster.mixed:
        return replace(cluster, memory_gb=limit, usable_memory=1.0)
    return cluster.of_kinds(
        [
            replace(kind, memory_gb=min(limit, kind.usable_bytes / 1e9), usable_memory=1.0)
            for kind in map(cluster.kind_of, range(cluster.num_devices))
        ]
    )


def _profile_of_kinds(
    line: CommandLine, options: PulseOptions, cluster: Cluster
) -> Profile | ValueError:
    """Profile on all kinds of devices, measured on the first rank of each (collective).

    What a rank raises is returned, to be raised on all.
    """
    first = {cluster.kind_of(rank).name: rank for rank in reversed(range(cluster.num_devices))}
    mine: Profile | ValueError | None = None
    if dist.get_rank() in first.values():
        try:
            mine = _measure(line.args, options, _backbone(line, options))
        except ValueError as error:
            mine = error
    found = gather_objects(mine)
    profiles: dict[str, Profile] = {}
    for name in dict.fromkeys(kind.name for kind in cluster.kinds):
        of_kind = found[first[name]]
        if not isinstance(of_kind, Profile):
            return ValueError(f"--pulse-auto: rank {first[name]} ({name}): {of_kind}")
        profiles[name] = of_kind
    try:
        return combine(profiles)
    except ValueError as error:
        return error


def _backbone(line: CommandLine, options: PulseOptions) -> Backbone:
    """Backbone of the flags, with the shapes of the data."""
    backbone = backbone_of_flags(line.args, options)
    if isinstance(data := line.opened.get("data"), DiffusionData):
        return replace(backbone, shares=data.shares)
    return backbone


def _tune(
    line: CommandLine,
    options: PulseOptions,
    cluster: Cluster,
    profile: Profile | ValueError | None,
    path: Path,
) -> PlanFile:
    """Search and write the plan, by ``profile`` or by what this rank's device measures."""
    args = line.args
    if isinstance(profile, ValueError):
        raise profile
    dpo = options.training_loss.is_preference
    backbone, choices = _backbone(line, options), _choices(line, options, pairs=dpo)
    with _refusing(backbone):
        check_choices(cluster, args.global_batch_size, choices)
    print(f"measuring {backbone.name} and tuning for {cluster.num_devices} ranks", flush=True)
    if profile is None:
        profile = _measure(args, options, backbone)
    if said := spread_caution(profile):
        print(f"warning: {said}", flush=True)
    profile = offload_weights(profile, options.offload_weights)
    if options.bucket_batch not in (None, args.global_batch_size):
        profile = replace(profile, shapes=())  # steps mix buckets
    divided = backbone.divides_sequences
    of = profile, cluster, args.global_batch_size
    own, state = options.self_conditioning or 0.0, parameter_state(args, options, backbone)
    evaluator = Evaluator(*of, divided, backbone.num_heads, own, state, dpo=dpo)
    seconds = options.solver_seconds
    with _refusing(backbone), PROGRESS.during("tuning", patient=True, grants_s=seconds):
        found = tune(evaluator, choices, DECISION_S + seconds, seconds, options.solver)
    best = found.outcomes[0]
    plan = _filled(plan_of(best, evaluator, found), options, backbone)
    save_plan(plan, path)
    rate = plan.predicted["samples_per_s"]
    print(f"plan: {best.config}; {rate:.4g} samples/s expected; written to {path}", flush=True)
    if plan.shapes:
        print(f"plan: microbatches by bucket: {plan.microbatches}", flush=True)
    if found.fsdp_baseline is not None and best.config.fsdp is None:
        print(
            f"{found.fsdp_baseline.beside(best.throughput)} ({found.fsdp_baseline.facts})",
            flush=True,
        )
    return plan


@contextmanager
def _refusing(backbone: Backbone) -> Iterator[None]:
    """Turn the refusal to tune into a fault of the flag."""
    try:
        yield
    except UntunableError as error:
        raise ValueError(f"--pulse-auto: {backbone.name}: {error}") from error


def _filled(plan: PlanFile, options: PulseOptions, backbone: Backbone) -> PlanFile:
    """``plan`` with each encoder in the loop as a bubble task, if faster than before the step.

    A flag can also demand the bubble.
    """
    loop = loop_encoders(options, backbone)
    wanted = _decided(loop)
    if loop is None or not wanted:
        return plan
    costs = encoder_costs(loop.folder, options.backbone, backbone, loop.dtype, wanted=wanted)
    fixed = {name: p for name, p in loop.policies.items() if p == Policy.FILL}
    found = encode_plan(plan, costs.components, FILLING_S, fixed)
    print("\n".join(map(str, found.choices)), flush=True)
    return recomputed(found.plan)


def _choices(line: CommandLine, options: PulseOptions, pairs: bool) -> Choices:
    """Search space without the dimensions that flags fix; raises ValueError."""
    if line.args.recompute_granularity == "selective":
        raise ValueError(
            "--recompute-granularity selective: with --pulse-auto, the plan chooses the layers of "
            "selective recomputation. Leave the flag out"
        )
    choices, args = Choices(), line.args
    pipeline, tensor, size, context = (
        (getattr(args, name),) if line.says(flag_name(name)) else None
        for name in (
            "pipeline_model_parallel_size",
            "tensor_model_parallel_size",
            "micro_batch_size",
            "context_parallel_size",
        )
    )
    return Choices(
        pipeline=pipeline,
        tensor=tensor or choices.tensor,
        micro_batch_size=size,
        recompute=(Recompute.ALWAYS,)
        if args.recompute_granularity == "full"
        else choices.recompute,
        split=choices.split if can_split_backward(args) else (False,),
        distributed_optimizer=choices.distributed_optimizer
        if args.optimizer == "adam"
        else (False,),
        pairs=pairs,
        fsdp=not excluding(args),
        context=None if options.auto_context else context or (1,),
    )


def _measure(args: argparse.Namespace, options: PulseOptions, backbone: Backbone) -> Profile:
    dtype = compute_dtype(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES if args.micro_batch_size is None else (args.micro_batch_size,)
    slices = [options.token_slices] if options.token_slices > 1 else []
    if slices:
        with naming(f"--pulse-token-slices {options.token_slices}"):
            require_token_slices(backbone, options.token_slices)
            if backbone.num_shapes > 1:
                raise ValueError("--pulse-auto measures slices of one shape: give no buckets")

    def of_layers(layers: Backbone, sizes: tuple[int, ...], context: int = 1) -> Profile:
        return measure(
            layers,
            sizes,
            device,
            dtype,
            once_per_kind=True,
            running=RUNNING,
            transformer_impl=args.transformer_impl,
            token_slices=slices,
            context=context,
        )

    def measured(sizes: tuple[int, ...]) -> Profile:
        chosen, times = measured_format(
            backbone, options.options, sizes[-1], device, dtype, None, args.transformer_impl
        )
        profile = of_layers(chosen, sizes)
        if flag := _context_flag(args, options):
            with naming(flag):
                profile = with_context_costs(
                    profile, chosen, lambda part, size: of_layers(part, sizes[-1:], size)
                )
        return profile if times is None else replace(profile, method=f"{profile.method}; {times}")

    def of_fitting_sizes() -> Profile:
        try:
            return measured(sizes)
        except ProfileError:
            if len(sizes) == 1:
                raise
        # The error has released the memory of the failed attempt only here.
        if device == "cuda":
            torch.cuda.empty_cache()
        return measured(sizes[:1])

    given = sorted(options.options.items())
    shared = ["context"] if _context_flag(args, options) else []
    settings = dtype, sizes, args.transformer_impl, given, backbone.shares, slices, *shared
    profile, kept = cached_profile(backbone, torch.device(device), settings, of_fitting_sizes)
    if kept is not None:
        print(f"profile: {kept}, of an earlier start; remove it to measure again", flush=True)
    return profile.in_slices(options.token_slices)
