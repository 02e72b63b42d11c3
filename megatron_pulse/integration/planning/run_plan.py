"""Plan of a run, made from its flags: costs, placement, partition, embedders, schedule."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.backbone.layer_selection import matching_layers
from megatron_pulse.errors import Faults, collecting, naming, summarize
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.planning.transformer_impl import (
    require_deferrable_wgrad,
    require_same_transformer_impl,
)
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.embedder_choice import Policy, choose_embedders, provided
from megatron_pulse.planner.layout.placement import Placement
from megatron_pulse.planner.partition.evaluate import MemoryRule
from megatron_pulse.planner.partition.find import Goal, MemoryRules
from megatron_pulse.planner.partition.memory import ParameterState, bytes_per_parameter, in_flight
from megatron_pulse.planner.plan_file.compatibility import parameter_faults
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.make_plan import find_schedules, make_plan
from megatron_pulse.planner.program.plan import Plan, PlanError, ShapeSchedule, is_file
from megatron_pulse.planner.schedule.serialize import from_json, to_json
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.channels_last import format_caution, in_format_of
from megatron_pulse.profile.files import load_profile
from megatron_pulse.profile.measurement.layer_call import ExecutionModes, describe_chain
from megatron_pulse.profile.measurement.machine import device_memory
from megatron_pulse.profile.measurement.module_sizes import ModuleSizes
from megatron_pulse.profile.optimizer_state import optimizer_bytes
from megatron_pulse.profile.parameters import count_parameters, count_trained, weight_bytes
from megatron_pulse.profile.profile import Profile, ProfileError
from megatron_pulse.profile.roofline import (
    ELEMENT_BYTES,
    PRESETS,
    USABLE,
    Device,
    Roofline,
    custom_device,
    known_device,
)
from megatron_pulse.profile.token_slices import require_token_slices
from megatron_pulse.profile.trainable import (
    TrainedError,
    copies_reference,
    none_trained,
    trained_part,
)
from megatron_pulse.profile.weight_offload import frozen_layers
from megatron_pulse.runtime.collectives import broadcast_from_rank_0
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from megatron_pulse.runtime.tensor_settings import compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS
from model_specs import (
    in_dtype,
    is_module,
    load_backbone,
    load_recorded,
    trained_as,
    with_texts_of,
)


def plan_run(
    args: argparse.Namespace,
    options: PulseOptions,
    backbone: Backbone,
    given: PlanFile | None = None,
) -> Plan:
    """Make the plan that the flags ask for, or take ``given``; raises ValueError (PlanError, ...).

    Every rank makes the plan independently. Only a schedule that needs a search is left to
    ``share_schedules``. ``check_world`` compares the plans of all ranks.
    """
    if given is None:
        plan = _by_flags(args, options, backbone)
    else:
        require_same_transformer_impl(args, given.profile, "the profile in --pulse-plan")
        plan = _by_file(given, backbone)
    require_deferrable_wgrad(args, plan)
    counts = count_parameters(backbone)
    if given is not None and (faults := parameter_faults(given, backbone, counts)):
        raise PlanError(summarize(faults))
    if given is None or not given.mixed:  # else check_devices asks every rank
        _require_memory(args, plan)
    samples = num_microbatches(args) * args.micro_batch_size
    plan = _with_embedders(plan, counts, samples, compute_dtype(args), options.conditioning)
    if not plan.is_synthesized:
        plan.step(num_microbatches(args))
    return plan


def plan_of_file(given: PlanFile, backbone: Backbone, conditioning: Policy = "auto") -> Plan:
    """Plan of a run with ``given`` and no other flag; raises ValueError for another backbone."""
    plan, counts = _by_file(given, backbone), count_parameters(backbone)
    if faults := parameter_faults(given, backbone, counts):
        raise PlanError(summarize(faults))
    return _with_embedders(plan, counts, given.num_samples, given.dtype, conditioning)


def _with_embedders(
    plan: Plan, counts: Sequence[int], samples: int, dtype: str, policy: Policy
) -> Plan:
    """``plan`` with its embedders sent or replicated, for ``samples`` per pipeline and step."""
    compute_bytes = ELEMENT_BYTES[dtype]
    choices = choose_embedders(
        provided(plan.backbone, compute_bytes),
        plan.partition,
        counts,
        samples,
        compute_bytes,
        policy,
        count_trained(plan.backbone),
    )
    return replace(plan, embedders=tuple(choices.values()))


def _require_memory(args: argparse.Namespace, plan: Plan) -> None:
    """Raise PlanError if a device cannot hold its weights alone."""
    place = compute_device()
    memory = device_memory(place)
    partition, size = plan.partition, ELEMENT_BYTES[compute_dtype(args)]
    sizes = [
        4 * trained + (0 if i in plan.offloaded_weights else whole - size * trained)
        for i, (whole, trained) in enumerate(
            zip(weight_bytes(plan.backbone, size), count_trained(plan.backbone), strict=True)
        )
    ]
    held = [
        sum(sizes[i] for s in stages for i in partition.layers_of_stage(s))
        // (args.tensor_model_parallel_size * (1 if plan.fsdp is None else plan.fsdp.group))
        for stages in map(plan.placement.stages_of_device, range(plan.placement.num_devices))
    ]  # fmt: skip
    if max(held) > memory:
        raise PlanError(
            f"device {held.index(max(held))}: its weights take {max(held):,} bytes (fp32 for "
            f"trained ones), but the {place.type} has {memory:,}. Use more devices, or a smaller "
            f"{plan.backbone.name}"
        )


def share_schedules(plan: Plan, args: argparse.Namespace, options: PulseOptions) -> Plan:
    """``plan`` with the schedules that rank 0 finds for training and evaluation (collective).

    Raises ValueError on every rank if rank 0 finds none.
    """
    counts = {num_microbatches(args)}
    if args.eval_iters:
        counts.add(_num_eval_microbatches(args))
    if not plan.is_synthesized:
        return plan

    def find() -> list[Any]:
        seconds = options.solver_seconds
        with PROGRESS.during("searching for a schedule", patient=True, grants_s=seconds):
            solved, found = find_schedules(plan, counts, seconds, options.solver)
        for certificate in found:
            print(f"schedule: {certificate}", flush=True)
        return [to_json(schedule) for schedule in solved.schedules]

    return replace(plan, schedules=tuple(map(from_json, broadcast_from_rank_0(find))))


def _by_file(given: PlanFile, backbone: Backbone) -> Plan:
    """Plan of a file, for this backbone."""
    load_recorded(given.backbone)
    names = [name for stage in given.stages for name in stage]
    if names != [layer.name for layer in backbone.layers]:
        raise ValueError(
            f"--pulse-plan: the plan was made for another backbone ({given.backbone['name']}, "
            f"{len(names)} layers) than {backbone.name} ({len(backbone.layers)} layers)"
        )
    name = "wave" if given.problem.weight_grad is None else "wave-split"
    return Plan(
        backbone,
        given.partition,
        name,
        problem=given.problem,
        schedules=(given.schedule,),
        activations=given.activations,
        fsdp=given.fsdp,
        offloaded_weights=frozenset(
            i for i, layer in enumerate(given.profile.layers) if layer.offloaded
        ),
        token_slices=given.token_slices,
        shapes=tuple(
            ShapeSchedule(
                shape.name,
                shape.share,
                shape.plan.micro_batch_size,
                shape.plan.problem,
                shape.plan.schedule,
            )
            for shape in given.shapes
        ),
    )


def _memory_choices(
    args: argparse.Namespace, options: PulseOptions, backbone: Backbone
) -> tuple[ActivationPolicies, frozenset[int]]:
    """Activation policies and offloaded weights that flags ask for.

    Raises ValueError with all faults.
    """
    faults: list[str] = []
    weights: frozenset[int] = frozenset()
    with collecting(faults):
        weights = _offloaded_weights(options, backbone)
    found: dict[str, frozenset[int]] = {}
    for flag, patterns in (
        ("--pulse-recompute", options.recompute),
        ("--pulse-offload", options.offload),
        ("--pulse-recompute-selective", options.recompute_selective),
    ):
        found[flag] = frozenset()
        with collecting(faults):
            found[flag] = _keeping(flag, patterns, backbone)
    every, part = "--pulse-recompute", "--pulse-recompute-selective"
    match args.recompute_granularity:
        case "full":
            if options.recompute:
                faults.append(
                    f"--recompute-granularity full recomputes all layers, {every} only some: give "
                    "one of them"
                )
            every = "--recompute-granularity full"
            found[every] = frozenset(range(len(backbone.layers)))
        case "selective":
            if options.recompute_selective:
                faults.append(
                    f"--recompute-granularity selective applies to all layers, {part} only to "
                    "some: give one of them"
                )
    names = [layer.name for layer in backbone.layers]
    for one, other in combinations((part, "--pulse-offload", every), 2):
        if both := sorted(found[one] & found[other]):
            more = f" and {len(both) - 1} more" * (len(both) > 1)
            faults.append(
                f"{one} and {other} both match {names[both[0]]}{more}. Give each layer one "
                "activation policy"
            )
    if faults:
        raise Faults(faults)
    recompute, offload, selective = found[every], found["--pulse-offload"], found[part]
    if args.recompute_granularity == "selective":
        every_kept = _keeping("--recompute-granularity selective", ["*"], backbone)
        selective = every_kept - recompute - offload
    return ActivationPolicies(recompute, offload, selective), weights


def _offloaded_weights(options: PulseOptions, backbone: Backbone) -> frozenset[int]:
    """Layers whose frozen weights the flags leave on the host; ValueError if there are none."""
    if not options.offload_weights:
        return frozenset()
    frozen = [
        whole > trained
        for whole, trained in zip(count_parameters(backbone), count_trained(backbone), strict=True)
    ]
    with naming("--pulse-offload-weights"):
        return frozen_layers(
            [layer.name for layer in backbone.layers], options.offload_weights, frozen
        )


def _keeping(flag: str, patterns: Sequence[str], backbone: Backbone) -> frozenset[int]:
    """Layers matched by ``patterns`` that keep activations; raises ValueError if none does.

    A layer keeps none if the layer and all layers before it are frozen.
    """
    try:
        found = matching_layers([layer.name for layer in backbone.layers], patterns)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    has_backward = required_gradients(backbone).layers
    kept = frozenset(i for i in found if has_backward[i])
    if found and not kept:
        raise ValueError(
            f"{flag} {patterns[0]}: the matching layers keep no activations, since they and all "
            "earlier layers are frozen. Give other layers, or leave the flag out"
        )
    return kept


def _by_flags(args: argparse.Namespace, options: PulseOptions, backbone: Backbone) -> Plan:
    count = num_microbatches(args)
    placement = options.make_placement(args.pipeline_model_parallel_size, backbone)
    # Costs are those of the whole model; ``backbone`` may hold parts of its sequences.
    whole = replace(load_recorded(backbone.record), shares=backbone.shares)
    activations, weights = _memory_choices(args, options, backbone)
    if options.token_slices > 1:
        with naming(f"--pulse-token-slices {options.token_slices}"):
            require_token_slices(whole, options.token_slices)
    profile = _profile(args, options, whole, RUNNING if activations.selective else None)
    costs = _costs(args, profile, backbone, activations)
    on_device = [
        trained if i in weights else stored
        for i, (trained, stored) in enumerate(
            zip(costs.trained_parameters, costs.stored_parameters, strict=True)
        )
    ]
    costs = replace(costs, stored=tuple(on_device))
    plan = make_plan(
        backbone,
        costs,
        placement,
        options.schedule if placement.num_stages > 1 or is_file(options.schedule) else "auto",
        options.activation_cap,
        Goal(
            collocate=placement.kind.keeps_skips and options.partition == "exact",
            link=Link(options.link_us * 1e-6, options.link_gbs * 1e9),
            memory=_memory(args, options, backbone, count),
        ),
        activations,
    )
    sharing = _replicas(args) * args.context_parallel_size
    fsdp = options.fully_sharded.layout(len(backbone.layers), sharing)
    slices = options.token_slices
    return replace(plan, offloaded_weights=weights, token_slices=slices, fsdp=fsdp)


def num_microbatches(args: argparse.Namespace) -> int:
    """Number of microbatches of a training step on one pipeline."""
    return int(global_batch_size(args) // (args.micro_batch_size * _replicas(args)))


def global_batch_size(args: argparse.Namespace) -> int:
    """Number of samples of a training step; by default one microbatch of each replica."""
    return int(args.global_batch_size or args.micro_batch_size * _replicas(args))


def _num_eval_microbatches(args: argparse.Namespace) -> int:
    """Number of microbatches of an evaluation batch on one pipeline."""
    size = args.eval_global_batch_size or global_batch_size(args)
    return int(size // ((args.eval_micro_batch_size or args.micro_batch_size) * _replicas(args)))


def _replicas(args: argparse.Namespace) -> int:
    model = args.pipeline_model_parallel_size * args.tensor_model_parallel_size
    return int(args.world_size // (model * args.context_parallel_size))


def backbone_options(args: argparse.Namespace, options: PulseOptions) -> Mapping[str, Any]:
    """Options of the backbone of these flags, completed from other flags if not given.

    A module is exported in the run's dtype. Texts are as long as the tokenizers of
    ``--pulse-encoders`` say. Convolutions use the memory format of ``--pulse-profile``. Raises
    ValueError if options ask for another dtype.
    """
    given = options.options
    if options.profile is not None and options.profile not in PRESETS:
        with contextlib.suppress(ProfileError):  # raised when the profile is read for its costs
            given = in_format_of(load_profile(options.profile).backbone, options.backbone, given)
    if options.encoders is not None and options.plan is None:  # the plan has the lengths of texts
        given = with_texts_of(options.backbone, given, options.encoders)
    return in_dtype(options.backbone, given, compute_dtype(args))


def backbone_of_flags(args: argparse.Namespace, options: PulseOptions) -> Backbone:
    """Backbone of these flags with its trainable parameters; raises ValueError if there is none."""
    return with_trainable_params(
        load_backbone(options.backbone, backbone_options(args, options)), options
    )


def with_trainable_params(backbone: Backbone, options: PulseOptions) -> Backbone:
    """``backbone`` with the trainable parameters of the flags; raises ValueError if impossible."""
    part = options.trained_part
    given = [name for name, value in part._asdict().items() if value]
    flags = {"adapter": "adapter-target"}
    with naming(*(f"--pulse-{flags.get(name, name)}" for name in given)):
        backbone = trained_as(backbone, part, options.adapter.adapter_weights)
    if fault := none_trained(backbone):
        raise TrainedError(fault)
    return backbone


def compute_dtype(args: argparse.Namespace) -> str:
    """Dtype of parameters and matrix products, as profiles name it."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def _profile(
    args: argparse.Namespace,
    options: PulseOptions,
    backbone: Backbone,
    running: ExecutionModes | None,
) -> Profile:
    """Profile of ``--pulse-profile``: read from a file, or estimated for a named device."""
    dtype, slices = compute_dtype(args), options.token_slices

    def of_device(device: Device) -> Profile:
        """Estimate; of several shapes without slices, whose shares of time are much the same."""
        counts = [slices] if slices > 1 and backbone.num_shapes == 1 else []
        peaks, sizes = Roofline(device, dtype), [args.micro_batch_size]
        profile = analyse(backbone, sizes, peaks, running=running, token_slices=counts)
        return profile.in_slices(slices) if counts else profile

    if options.profile is not None and options.profile in PRESETS:
        return of_device(PRESETS[options.profile])
    if options.profile is not None:
        profile = load_profile(options.profile)
        require_same_transformer_impl(args, profile, f"--pulse-profile {options.profile}")
        names = tuple(layer.name for layer in profile.layers)
        if names != tuple(layer.name for layer in backbone.layers):
            kind = "module" if is_module(backbone.name) else "backbone"
            raise ValueError(
                f"--pulse-profile {options.profile} was measured for another backbone "
                f"({profile.backbone.get('name')}, {len(names)} layers). Profile this one with "
                f"'pulse profile --{kind} {backbone.name}' and the same options"
            )
        if (theirs := trained_part(profile.backbone)) != trained_part(backbone.record):
            raise ValueError(
                f"--pulse-profile {options.profile} was measured for training {theirs}. Profile "
                "what this run trains ('pulse profile --train P --freeze P', or --adapter)"
            )
        by = f"--pulse-profile {options.profile}"
        if args.rank == 0 and (said := format_caution(profile.backbone, backbone.record, by)):
            print(f"warning: {said}", flush=True)
        with naming(by):
            return profile.in_slices(slices)
    device, said = _this_device()
    if args.rank == 0 and said:
        print(f"warning: {said}", flush=True)
    return of_device(device)


_LIKE_ANY = "A100-80GB"
"""Device whose ratio of arithmetic to memory bandwidth stands in for an unknown GPU's."""


def _this_device() -> tuple[Device, str]:
    """(preset of the GPU here, warning for an unknown GPU); without a GPU roughly one CPU core."""
    if not torch.cuda.is_available():
        return custom_device(peak_tflops=0.1, bandwidth_gbs=20, memory_gb=0), ""
    name = torch.cuda.get_device_name()
    if (known := known_device(name)) is not None:
        return known, ""
    return PRESETS[_LIKE_ANY], (
        f"peak rates of {name} are unknown: layer costs are those of {_LIKE_ANY}. Measure them "
        "('pulse profile --backbone NAME -o FILE', then --pulse-profile FILE), or name a similar "
        f"device (--pulse-profile {', '.join(PRESETS)})"
    )


def _costs(
    args: argparse.Namespace,
    profile: Profile,
    backbone: Backbone,
    activations: ActivationPolicies,
) -> ChainCosts:
    """Costs at the run's microbatch size, divided over tensor- and context-parallel ranks.

    Context and sequence parallelism also divide saved activations, boundaries and skips;
    ``backbone`` has the divided sizes.
    """
    costs = profile.at(args.micro_batch_size, activations)
    context = args.context_parallel_size
    parts = args.tensor_model_parallel_size * context
    saved = parts if args.sequence_parallel else context
    sizes = [ModuleSizes(count) for count in costs.parameters]
    chain, skips, _ = describe_chain(backbone, sizes, profile.dtype)
    size = args.micro_batch_size
    return replace(
        costs,
        forward_s=tuple(t / parts for t in costs.forward_s),
        backward_s=tuple(t / parts for t in costs.backward_s),
        weight_grad_s=tuple(t / parts for t in costs.weight_grad_s),
        split_forward_s=tuple(t / parts for t in costs.split_forward_s),
        split_backward_s=tuple(t / parts for t in costs.split_backward_s),
        saved_bytes=tuple(b // saved for b in costs.saved_bytes),
        boundary_bytes=tuple(0 if layer.begins else size * layer.boundary_bytes for layer in chain),
        skips=tuple(
            SkipCost(s.source, s.destination, size * s.num_bytes, s.needs_grad) for s in skips
        ),
    )


def _memory_limit(options: PulseOptions) -> float | None:
    """``--pulse-memory-gb`` in bytes, else the usable share of a GPU's memory, else None."""
    if options.memory_gb is not None:
        return options.memory_gb * 1e9
    return USABLE * device_memory(torch.device("cuda")) if torch.cuda.is_available() else None


def parameter_state(
    args: argparse.Namespace, options: PulseOptions, backbone: Backbone
) -> ParameterState:
    """State that this run keeps for each trained parameter of ``backbone``."""
    half = args.bf16 and args.grad_reduce_in_bf16
    num_bytes = optimizer_bytes(args.optimizer, backbone, momentum=args.sgd_momentum > 0)
    copied = options.training_loss.is_preference and copies_reference(backbone.record)
    kept = options.ema_decay > 0, half, args.optimizer_cpu_offload
    return ParameterState(*kept, num_bytes, copied)


def _memory(
    args: argparse.Namespace, options: PulseOptions, backbone: Backbone, count: int
) -> MemoryRules | None:
    """Memory rule of a placement: limit, bytes per parameter, and in-flight microbatches."""
    if (limit := _memory_limit(options)) is None:
        return None
    state = parameter_state(args, options, backbone)
    how = args.use_distributed_optimizer, _replicas(args), state
    dtype = compute_dtype(args)
    per_parameter = bytes_per_parameter(dtype, *how)
    share = ELEMENT_BYTES[dtype] / per_parameter
    per_parameter /= args.tensor_model_parallel_size

    def rule(placement: Placement) -> MemoryRule:
        return MemoryRule(limit, per_parameter, in_flight(placement, count), share)

    return rule
