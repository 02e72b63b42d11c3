"""Input of ``pulse tune``: its choices and its profile, from the arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from megatron_pulse.cli.backbone_flags import trained_backbone
from megatron_pulse.cli.flag_checks import require, warn
from megatron_pulse.cli.import_megatron import prepare_profiling
from megatron_pulse.cli.shared_flags import numbers
from megatron_pulse.errors import Faults, UserError, format_faults
from megatron_pulse.planner.layout.layouts import layouts_called
from megatron_pulse.profile.roofline import Device, Roofline
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.planner.cluster.cluster import Cluster
    from megatron_pulse.planner.partition.memory import ParameterState
    from megatron_pulse.planner.tune.config import Choices
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.search.result import Tuning
    from megatron_pulse.profile.profile import Profile

AUTO = "auto"
"""All context degrees that a profile allows."""
_PROFILED = (1, 8)
"""Microbatch sizes of an analytic profile."""


def given_profile(args: argparse.Namespace, where: Cluster) -> Profile:
    """Profile of ``--profile``, or an analytic one for the cluster's device.

    If devices differ, the profile has costs on each kind (``profile_of_kinds``).
    """
    if where.mixed:
        return profile_of_kinds(args, where)
    if args.profile is not None:
        from megatron_pulse.profile.files import load_profile

        return load_profile(args.profile)
    if where.peaks is None:
        from megatron_pulse.profile.files import load_profile

        known = load_profile(str(where.device))
        require(
            [
                f"cluster {where.name!r} has a measured device ({known.device}): measure the "
                f"backbone there with 'pulse profile --backbone {args.backbone} -o profile.json' "
                "and give --profile profile.json"
            ]
        )
    device = where.peaks
    assert device is not None
    require(device.dtype_faults("--dtype", args.dtype))
    return _analytic(args, device, args.dtype or device.half_dtype, _PROFILED)


def profile_of_kinds(args: argparse.Namespace, where: Cluster) -> Profile:
    """Profile for a cluster of unlike devices: a kind's own file, or an analytic one, for each.

    If the kinds differ in memory alone, one profile serves them all, which may be ``--profile``.
    """
    from megatron_pulse.profile.files import load_profile
    from megatron_pulse.profile.unlike_devices import combine

    kinds, faults = where.kinds, list[str]()
    alike = len({kind.device for kind in kinds}) == 1
    if args.profile is not None:
        if not alike:
            faults.append(
                f"--profile is of one device, and {where.name} has {len(kinds)} kinds: name a "
                "profile of each in its file ('device: NAME.json'), and give --backbone"
            )
        require(faults)
        return load_profile(args.profile)
    devices = {kind.name: kind.peaks for kind in kinds}
    found = {k.name: load_profile(str(k.device)) for k in kinds if devices[k.name] is None}
    dtype = args.dtype or next((one.dtype for one in found.values()), None)
    if dtype is None:
        halves = {device.half_dtype for device in devices.values() if device is not None}
        dtype = "bfloat16" if halves == {"bfloat16"} else "float16"
    for name, profile in found.items():
        if profile.dtype != dtype:
            faults.append(f"kinds.{name}: its profile is of {profile.dtype}, not of {dtype}")
    for device in devices.values():
        faults += [] if device is None else device.dtype_faults("--dtype", dtype)
    require(faults)
    if found:
        record = dict(trained_backbone(args, dtype).record)
        require(
            [
                f"kinds.{name}: its profile is of {profile.backbone.get('name')} with other "
                "options or trained parameters than those given: measure this one with 'pulse "
                "profile'"
                for name, profile in found.items()
                if dict(profile.backbone) != record
            ]
        )
    sizes = next((profile.micro_batch_sizes for profile in found.values()), _PROFILED)
    for kind in kinds[:1] if alike else kinds:
        if (device := devices[kind.name]) is not None:
            found[kind.name] = _analytic(args, device, dtype, sizes)
    if args.mix_buckets:
        found = {name: replace(profile, shapes=()) for name, profile in found.items()}
    elif any(profile.shapes for profile in found.values()):
        require([f"{where.name} has unlike devices: give --mix-buckets for several buckets"])
    return next(iter(found.values())) if alike else combine(found)


def _analytic(
    args: argparse.Namespace, device: Device, dtype: str, sizes: Sequence[int]
) -> Profile:
    """Profile of the backbone flags at microbatch ``sizes``, estimated from a device's peaks."""
    prepare_profiling()
    from megatron_pulse.profile.analytic import analyse, analyse_context
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    roofline = Roofline(device, dtype)
    backbone = trained_backbone(args, roofline.dtype)
    profile = analyse(backbone, sizes, roofline, progress=True, running=RUNNING)
    if context_degrees(args) == (1,):
        return profile
    try:
        return analyse_context(profile, backbone, roofline, running=RUNNING)
    except Faults as error:  # no chain whose tokens can be divided
        title = f"--context-parallel {args.context_parallel}"
        raise UserError(format_faults(title, error.faults)) from error


def context_degrees(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Context degrees of ``--context-parallel``; None for all that the profile allows."""
    if args.context_parallel is None:
        return (1,) if args.profile is None else None
    return None if args.context_parallel == AUTO else numbers(args.context_parallel)


def backbone_of(profile: Profile) -> Backbone | None:
    """Profiled backbone, which limits tensor parallelism; None if unknown."""
    from model_specs import load_recorded

    try:
        return load_recorded(profile.backbone)
    except (KeyError, ValueError):
        return None


def evaluator_of(args: argparse.Namespace, profile: Profile, where: Cluster) -> Evaluator:
    """Evaluator of configs on this cluster, or on a part of one."""
    from megatron_pulse.planner.tune.evaluate import Evaluator

    backbone = backbone_of(profile) if any(t > 1 for t in choices_of(args).tensor) else None
    return Evaluator(
        profile,
        where,
        args.global_batch_size,
        backbone is not None and backbone.divides_sequences,
        backbone.num_heads if backbone else (),
        args.self_conditioning or 0.0,
        state(args, profile),
        dpo=args.dpo,
    )


def no_cascade(profile: Profile) -> list[str]:
    if len(profile.at(profile.micro_batch_sizes[0]).starts) == 1:
        return []
    return [
        f"{profile.backbone['name']}: cascades are not tuned; use 'pulse partition' and 'pulse "
        "schedule', and train with --pipeline-model-parallel-size P"
    ]


def no_encoders_of_one_device(args: argparse.Namespace, profile: Profile) -> list[str]:
    if args.encoders is None or not profile.kinds:
        return []
    return [
        "--encoders: their times are of one device, and the cluster's devices differ in speed: "
        "leave it out, and encode before the step"
    ]


def no_half_gradients(args: argparse.Namespace, profile: Profile) -> list[str]:
    if not args.grad_reduce_in_bf16 or profile.dtype == "bfloat16":
        return []
    return [f"--grad-reduce-in-bf16 is for bfloat16, and the profile is of {profile.dtype}"]


def no_prediction_taken(args: argparse.Namespace, profile: Profile) -> list[str]:
    if args.self_conditioning is None:
        return []
    backbone = backbone_of(profile)
    if backbone is None or backbone.takes_prediction:
        return []
    takes, predicts = backbone.input_spec.shape[0], backbone.output_spec.shape[0]
    of = "a profile with" if args.profile is not None else "give"
    return [
        f"--self-conditioning: {backbone.name} takes {takes} channels and predicts {predicts}; it "
        f"must take twice as many as it predicts ({of} --option in_channels=8)"
    ]


def no_context_costs(args: argparse.Namespace, profile: Profile) -> list[str]:
    from megatron_pulse.planner.tune.context_rank import context_costs
    from megatron_pulse.profile.profile import ProfileError

    if args.context_parallel is None or (degrees := context_degrees(args)) == (1,):
        return []
    given = f"--context-parallel {args.context_parallel}"
    if profile.kinds:
        return [f"{given}: ranks that share tokens must be alike, and the cluster's devices differ"]
    try:
        costs = context_costs(profile)
    except ProfileError as error:
        return [f"{given}: {error}"]
    return [f"{given}: {said}" for size in degrees or () if (said := costs.refusal(size))]


def one_first_pass(args: argparse.Namespace) -> list[str]:
    if not args.dpo or args.self_conditioning is None:
        return []
    return ["--dpo and --self-conditioning exclude each other: leave one out"]


def state(args: argparse.Namespace, profile: Profile) -> ParameterState:
    from megatron_pulse.planner.partition.memory import ADAM_BYTES, ParameterState
    from megatron_pulse.profile.optimizer_state import optimizer_bytes
    from megatron_pulse.profile.trainable import copies_reference

    num_bytes = ADAM_BYTES
    if args.optimizer != "adam":
        num_bytes = optimizer_bytes(args.optimizer, backbone_of(profile))
    return ParameterState(
        not args.no_ema,
        args.grad_reduce_in_bf16,
        args.optimizer_cpu_offload,
        num_bytes,
        args.dpo and copies_reference(profile.backbone),
    )


def choices_of(args: argparse.Namespace) -> Choices:
    from megatron_pulse.planner.tune.config import Choices, Recompute

    choices = Choices()
    layouts = choices.layouts
    if args.layouts is not None:
        named = [layouts_called(name.strip()) for name in args.layouts.split(",")]
        layouts = tuple(dict.fromkeys(chain.from_iterable(named)))
    recompute = choices.recompute
    if args.recompute or args.no_recompute:
        recompute = (Recompute.ALWAYS if args.recompute else Recompute.NEVER,)
    return Choices(
        layouts,
        numbers(args.pipeline),
        numbers(args.tensor) or choices.tensor,
        numbers(args.micro_batch_size),
        (False,) if args.no_split_backward else choices.split,
        choices.max_in_flight,
        recompute,
        choices.distributed_optimizer if args.optimizer == "adam" else (False,),
        pairs=args.dpo,
        fsdp=not args.no_fsdp,
        context=context_degrees(args),
    )


def flags_not_applied_to_fsdp(args: argparse.Namespace) -> list[str]:
    """Flags given that restrict plans' computation, and would restrict FSDP2's as well."""
    given = {
        "--no-recompute": args.no_recompute,
        "--recompute": args.recompute,
    }
    return [flag for flag, is_given in given.items() if is_given]


def unused_caution(args: argparse.Namespace, evaluator: Evaluator, choices: Choices) -> str:
    """Warning on choices that occur in no config; empty if there are none."""
    from megatron_pulse.planner.tune.config import unused

    missing = unused(evaluator.candidates(choices), choices)
    if not missing:
        return ""
    said = (f"--{name.replace('_', '-')} {', '.join(map(str, missing[name]))}" for name in missing)
    unlike = evaluator.cluster.mixed and "tensor" in missing
    return (
        f"{'; '.join(said)}: left out, no config of {evaluator.cluster.num_devices} devices and a "
        f"batch of {args.global_batch_size} has it with the other choices"
        f"{'. Tensor-parallel ranks are neighbours of one kind' if unlike else ''}"
    )


def run_search(args: argparse.Namespace, evaluator: Evaluator, choices: Choices) -> Tuning:
    """Search for the best configs with whole schedules, with a progress line of the time allowed.

    Ctrl-C ends the search if there is a result. A first one without a result, or a second one, ends
    the command.
    """
    from megatron_pulse.cli.plan.tuning.interruptible_clock import InterruptibleClock
    from megatron_pulse.planner.tune.search.budget import LATE
    from megatron_pulse.planner.tune.tune import tune

    until = InterruptibleClock(args.seconds)
    with until, ProgressLine("tuning", args.seconds, "s") as line:

        def progress(what: str, now: Tuning) -> None:
            line.what, line.done = what, min(now.seconds, args.seconds)
            if now.outcomes:
                until.found, best = True, now.outcomes[0]
                line.note = f"best {best.throughput:.4g} samples/s, {best.config}"

        of = evaluator, choices, args.seconds, None, args.solver, args.top
        found = tune(*of, progress, until.clock, until.stopped)
    if until.is_late:
        warn(
            f"this process had less than 1/{LATE:g} of a core: the wall clock ended the search, "
            "and another run may find another plan. Give more --seconds"
        )
    if until.took_s is not None:
        found.seconds = until.took_s - found.ready_s
    return found
