"""Preparation of a run from its command line: plan, data and start, or all faults at once."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.data.build import check_dataset
from megatron_pulse.data.fields import APART
from megatron_pulse.dataclass_flags import flag_faults, flag_name, marked
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.errors import UserError, collecting, faults_in, format_faults, naming
from megatron_pulse.integration.checkpoint.frozen_weights import FrozenWeights
from megatron_pulse.integration.checkpoint.lr_schedule import record_schedule
from megatron_pulse.integration.checkpoint.resume_checks import (
    NewRun,
    adapter_faults,
    faults_of,
    process_of,
)
from megatron_pulse.integration.checkpoint.starting_point import (
    StartingPoint,
    find_best,
    find_start,
    no_step_elsewhere,
    set_load_flags,
)
from megatron_pulse.integration.data_shapes import with_data_shapes
from megatron_pulse.integration.experts import BOUNDARY
from megatron_pulse.integration.flags.context_flags import context_rank
from megatron_pulse.integration.flags.flag_constraints import check_megatron
from megatron_pulse.integration.flags.parse import CommandLine, parse
from megatron_pulse.integration.flags.plan_overrides import apply_plan, contradictions, decided_by
from megatron_pulse.integration.flags.pulse_options import (
    PREFIX,
    FlagMark,
    PulseOptions,
    pulse_options,
    set_model_arguments,
)
from megatron_pulse.integration.flags.startup_checks import (
    FlagError,
    check_flags,
    check_layout,
    refusing,
)
from megatron_pulse.integration.loop.cascade_data import CascadeData
from megatron_pulse.integration.loop.sample_pictures import picture_faults
from megatron_pulse.integration.planning.auto_tune import auto_plan
from megatron_pulse.integration.planning.run_plan import (
    backbone_options,
    global_batch_size,
    num_microbatches,
    plan_run,
    share_schedules,
    with_trainable_params,
)
from megatron_pulse.integration.training_data import DiffusionData, can_drop
from megatron_pulse.planner.layout.placement import OPPOSITE
from megatron_pulse.planner.plan_file.elastic import plan_for_world
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context
from megatron_pulse.tracing.from_module import check_weights, source_of
from model_specs import allow, continue_model, is_cascade, is_module, misnamed
from model_specs.common.options import OptionError
from model_specs.derived.names import parts_of


def faults_before_ranks(argv: Sequence[str], num_ranks: int, *, has_backbone: bool) -> list[str]:
    """Faults of a start by the flags ``argv`` that one process finds, as each rank would.

    Without a backbone, which weights to be imported name, those that need none.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # ranks print the same
        try:
            line, options, given = read_command_line(argv, num_ranks, has_backbone=has_backbone)
            if not has_backbone:
                layout = [] if options.auto else check_layout(line, options)
                faults = [*check_flags(line, options), *layout]
                faults += check_dataset(options.data, line.images)
                if not faults:
                    with collecting(faults):
                        faults += adapter_faults(find_start(line.args), options)
                return faults
            if not options.auto:
                prepare(line, options, given)
        except FlagError as error:
            return error.faults
    return []


def read_command_line(
    argv: Sequence[str] | None = None, num_ranks: int | None = None, *, has_backbone: bool = True
) -> tuple[CommandLine, PulseOptions, PlanFile | None]:
    """Read the flags ``argv`` (see ``parse``), and their plan unless they contradict it.

    The returned line holds the faults.
    """
    line = parse(argv, num_ranks)
    args = line.args
    faults = [*line.faults, *find_best(args), *_name_module(args), *_lay_cascade(args, line)]
    if has_backbone and not args.pulse_backbone and not args.pulse_plan and not args.pulse_auto:
        if not {"--pulse-backbone", "--pulse-module", "--pulse-plan"} & set(line.unread):
            faults.append(
                "--pulse-backbone must name a backbone ('pulse backbones' lists them), or give "
                "--pulse-module or --pulse-plan"
            )
    if args.save is not None and args.save_interval is None:
        args.save_interval = 1000  # Megatron has no default and stops without one
    given = None
    try:
        options = pulse_options(args)
    except ValueError as error:
        faults += faults_in(error)
        args.pulse_option = [text for text in args.pulse_option if "=" in text]
        options = pulse_options(args)
    if options.plan is not None:
        with collecting(faults), naming("--pulse-plan"):
            args.pulse_plan = str(plan_for_world(options.plan, args.world_size))
            options = replace(options, plan=args.pulse_plan)
            given = load_checked(args.pulse_plan)
            if "table" in given.backbone:
                named, given = name_of(given.backbone), None
                faults.append(
                    f"--pulse-plan is of a table of layers ({named}) and has no model to run"
                )
    if given is not None:
        contrary = list(contradictions(given, line, options))
        options = apply_plan(given, args, options)
        if contrary:
            faults, given = [*faults, *contrary], None
    if has_backbone and not any(flag_faults(options, PREFIX)):
        with collecting(faults, (ValueError, OSError)):
            options = with_data_shapes(args, options, find_start(args), line.images)
    if options.epochs is not None or options.warmup_epochs is not None:
        faults += _set_steps_of_epochs(line, options)
    line = replace(line, faults=tuple(faults))
    if options.auto and has_backbone:
        faults = [*check_flags(line, options), *_check_auto(line, options)]
        start = None if faults else find_start(args)
        if faults := faults or no_step_elsewhere(start, args) + adapter_faults(start, options):
            raise FlagError(faults)  # before anything is measured
    return line, options, given


def _set_steps_of_epochs(line: CommandLine, options: PulseOptions) -> list[str]:
    """Set --train-iters and --lr-warmup-iters for passes over the training samples.

    Faults of backbone and data are left to the checks that follow, with one step until then.
    """
    args, faults = line.args, list[str]()
    if options.epochs is not None:
        if args.train_iters is not None or args.train_samples is not None:
            faults.append(
                "--pulse-epochs excludes --train-iters and --train-samples: give one of them"
            )
        else:
            args.train_iters = 1
    warmups = ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction")
    if options.warmup_epochs is not None and (given := [w for w in warmups if line.says(w)]):
        faults.append(f"--pulse-warmup-epochs excludes {' and '.join(given)}: give one of them")
    if is_cascade(options.backbone or ""):
        for name, instead in (("epochs", "--train-iters"), ("warmup_epochs", "--lr-warmup-iters")):
            if getattr(options, name) is not None:
                flag = flag_name(f"pulse_{name}")
                faults.append(f"{flag}: each chain of a cascade has its own data; give {instead}")
    if faults:
        return faults
    try:
        start = find_start(args)
        batch_size = args.global_batch_size or global_batch_size(args)
        backbone = _continued(start, args, options)
        data = open_data(line, options, backbone, process_of(start, options))
        assert isinstance(data, DiffusionData)  # a cascade was refused above
        num_samples = len(data.train)
    except (ValueError, OSError, TypeError, ZeroDivisionError):
        return []
    told = []
    if options.epochs is not None:
        args.train_iters = max(1, math.ceil(options.epochs * num_samples / batch_size))
        told.append(
            f"{options.epochs:g} epochs of {num_samples:,} samples: {args.train_iters:,} steps"
        )
    if options.warmup_epochs is not None:
        args.lr_warmup_iters = math.ceil(options.warmup_epochs * num_samples / batch_size)
        told.append(f"warm-up over {args.lr_warmup_iters:,} steps")
    if args.rank == 0:
        print(*told, sep="\n", flush=True)
    return []


def open_data(
    line: CommandLine, options: PulseOptions, backbone: Backbone, process: DiffusionProcess
) -> DiffusionData | CascadeData:
    """Data of the run, opened once: for the steps of epochs, for tuning and for training."""
    wanted = {"backbone": backbone.record, "process": process}
    if any(line.opened.get(name) != value for name, value in wanted.items()):
        opens = CascadeData if backbone.parts else DiffusionData
        data = opens(options, backbone, process, line.args.seed, line.images)
        line.opened.update(wanted, data=data)
    return line.opened["data"]  # type: ignore[no-any-return]


def _name_module(args: argparse.Namespace) -> Iterator[str]:
    """Make ``--pulse-module`` the backbone; code named on the command line may run."""
    module = args.pulse_module
    if module and args.pulse_backbone:
        yield "--pulse-backbone and --pulse-module exclude each other: leave one out"
    elif module and not is_module(module):
        yield misnamed(module) or (
            f"--pulse-module {module} is no module. Write diffusers:FOLDER, diffusers:CLASS, "
            "FILE.py:FACTORY or PACKAGE.MODULE:FACTORY; backbones by name go to --pulse-backbone"
        )
    args.pulse_backbone = args.pulse_backbone or module
    if args.pulse_backbone:
        allow(args.pulse_backbone)


def _lay_cascade(args: argparse.Namespace, line: CommandLine) -> Iterator[str]:
    """Set the placement of a cascade; yield faults of flags that a cascade does not support."""
    name = args.pulse_backbone or ""
    if not is_cascade(name):
        if args.pulse_boundary_ratio is not None:
            yield (
                f"{BOUNDARY} is for two experts in one run: --pulse-backbone "
                "cascade:high=NAME,low=NAME. One expert alone has --pulse-min-time or "
                "--pulse-max-time"
            )
        return
    try:
        chains = parts_of(name)
    except ValueError as error:
        yield str(error)
        return
    if not line.says("--pulse-placement"):
        args.pulse_placement = OPPOSITE.name
    if not line.says("--pulse-num-chunks"):
        args.pulse_num_chunks = OPPOSITE.of_chain * len(chains)
    refused = {
        "--pulse-auto": args.pulse_auto,
        "--pulse-plan": args.pulse_plan,
        "--pulse-encoder-schedule": args.pulse_encoder_schedule,
        "--pulse-self-conditioning": args.pulse_self_conditioning,
        "--pulse-loss dpo": args.pulse_loss == "dpo",
        "--pulse-keep-best": args.pulse_keep_best,
        "--pulse-validation-data": args.pulse_validation_data,
        "--pulse-validation-target": args.pulse_validation_target,
    }
    for flag, given in refused.items():
        if given:
            yield f"{flag} does not apply to a cascade: leave it out"
    if args.pipeline_model_parallel_size < 2:
        yield (
            f"{name}: the chains of a cascade fill each other's pipeline bubbles. Give "
            "--pipeline-model-parallel-size 2 or more, or train the chains one after the other"
        )


def _check_auto(line: CommandLine, options: PulseOptions) -> Iterator[str]:
    args = line.args
    backbone = process = start = None
    data: DiffusionData | CascadeData | None = None
    try:
        start = find_start(args)
        process = process_of(start, options)
    except ValueError as error:
        yield str(error)
    if options.plan is not None:
        yield "--pulse-auto and --pulse-plan exclude each other: leave one out"
    if options.auto_context and line.says("--context-parallel-size"):
        yield "--pulse-auto-context searches --context-parallel-size: give one of them"
    if not args.pulse_backbone:
        yield "--pulse-auto needs --pulse-backbone or --pulse-module"
    elif options.plan is None:
        try:
            backbone = _continued(start, args, options)
        except ValueError as error:
            yield str(error)
    yield from decided_by("--pulse-auto", line)
    if args.global_batch_size is None:
        yield "--pulse-auto needs --global-batch-size"
    if backbone is not None:
        yield from _model_faults(backbone, options)
    if process is not None:
        yield from options.training_loss.faults(process)
    if args.pulse_data is None:
        yield "--pulse-auto needs --pulse-data"
    elif backbone is None or backbone.parts or process is None:
        yield from check_dataset(args.pulse_data, line.images)
    else:
        faults: list[str] = []
        with collecting(faults, (ValueError, OSError)):
            data = open_data(line, options, backbone, process)
        yield from faults
    if backbone is not None and start is not None:
        records = {} if data is None else data.record(whole=False)
        several = data is not None and data.several_shapes
        run = NewRun(args, options, backbone.record, data=records, several_shapes=several)
        yield from faults_of(start, run, planned=False)


def _continued(
    start: StartingPoint | None, args: argparse.Namespace, options: PulseOptions
) -> Backbone:
    """The backbone of these flags, which leave open what ``start`` says of it; raises ValueError
    where there is none."""
    there = {} if start is None else start.saved.record
    given = backbone_options(args, options)
    model = naming("--pulse-module" if args.pulse_module else "--pulse-backbone", kinds=UserError)
    with model, naming("--pulse-option", kinds=OptionError):
        backbone = continue_model(there, options.backbone or "", given)
    return with_trainable_params(backbone, options)


def _model_faults(backbone: Backbone, options: PulseOptions) -> Iterator[str]:
    """Faults that prevent training ``backbone`` with these flags, under any plan."""
    if options.class_dropout and not can_drop(backbone):
        grown = "" if is_module(backbone.name) else ", or import with --null-class"
        yield (
            f"--pulse-class-dropout {options.class_dropout:g}: {backbone.name} has no null class "
            f"for dropped samples. Give 0{grown}"
        )
    if {*APART} <= backbone.batch_fields.keys() and options.class_dropout > 1 / (1 + len(APART)):
        yield (
            f"--pulse-class-dropout {options.class_dropout:g}: {backbone.name} drops "
            f"{' alone, '.join(APART)} alone, and both, each with this probability: give at most "
            "0.33"
        )
    faults: list[str] = []
    with collecting(faults):
        check_weights(backbone)
    yield from faults


def prepare(
    line: CommandLine, options: PulseOptions, given: PlanFile | None
) -> tuple[Plan, DiffusionData | CascadeData, StartingPoint | None]:
    """Make plan, data and start of a run; raises FlagError with every fault found."""
    args = line.args
    record_schedule(args)
    faults = check_flags(line, options)
    can_plan = not line.unread and not any(flag_faults(options, PREFIX))
    if options.plan is not None and given is None:
        can_plan = False  # the plan's sizes are unknown, or contradicted
    elif layout := check_layout(line, options):
        can_plan, faults = False, [*faults, *layout]
    if can_plan and args.global_batch_size is None:
        args.global_batch_size = global_batch_size(args)
    backbone = plan = start = None
    data: DiffusionData | CascadeData | None = None
    process = chosen_process(ProcessChoice())
    with collecting(faults):
        start = find_start(args)
        process = process_of(start, options)
    if start is not None and is_cascade(options.backbone or "") and options.boundary_ratio is None:
        args.pulse_boundary_ratio = getattr(start.saved.arguments, "pulse_boundary_ratio", None)
        options = replace(options, boundary_ratio=args.pulse_boundary_ratio)
    args.pulse_base = getattr(start.saved.arguments, "pulse_base", None) if start else None
    args.pulse_frozen_weights = None
    known = imported = None
    pretrained = args.pretrained_checkpoint
    if start is not None:
        known = start.saved.frozen_weights
        imported = start.saved.folder if start.saved.released else None
    with collecting(faults):
        if (frozen := FrozenWeights.of_run(options, known, imported, pretrained)) is not None:
            args.pulse_frozen_weights = frozen.to_record()
    try:
        if options.backbone:
            backbone = _continued(start, args, options)
        if backbone is not None:  # rank 0 has the largest share, which is equal on all ranks
            backbone = _own_share(args, backbone, 0, args.context_parallel_size if can_plan else 1)
    except ValueError as error:
        faults += faults_in(error)
        can_plan = False
    if backbone is None:
        faults += check_dataset(options.data, line.images)
    else:
        faults += _undivided(backbone, args.tensor_model_parallel_size)
        args.pulse_record = backbone.saved_record
        args.pulse_process = process.to_dict()
        faults += _model_faults(backbone, options)
        faults += options.training_loss.faults(process)
        faults += picture_faults(args, options.samples, backbone, process)
        with collecting(faults, (ValueError, OSError)):
            data = open_data(line, options, backbone, process)
        if isinstance(data, DiffusionData):
            backbone = replace(backbone, shares=data.shares)
            args.pulse_sample_shapes = data.shapes_digest()  # ranks compare it with the flags
        validation_cautions = []
        if data is not None and can_plan:
            validation_cautions = _set_eval_iters(line, options, data)
        if start is not None:
            records = {} if data is None else data.record(whole=False)
            several = data is not None and data.several_shapes
            begun = NewRun(args, options, backbone.record, data=records, several_shapes=several)
            faults += faults_of(start, begun)
        if can_plan:
            try:
                plan = plan_run(args, options, backbone, given)
            except ValueError as error:
                reasons, what = faults_in(error), "no plan can be made"
                given_by = ", ".join(_plan_flags(line))
                if given_by and not all(reason.startswith("--") for reason in reasons):
                    what += f" ({given_by})"
                faults.append(format_faults(what, reasons))
        if plan is not None and data is not None:
            faults += data.place_encoders(plan, given)
    if faults := faults or no_step_elsewhere(start, args):
        raise FlagError(faults)
    assert plan is not None and data is not None
    for told in validation_cautions if args.rank == 0 else ():
        print(f"warning: {told}", flush=True)
    set_load_flags(args, start)
    set_model_arguments(args, plan.placement)
    if args.recompute_granularity == "full":
        args.recompute_method, args.recompute_num_layers = "uniform", 1
    if faults := check_megatron(args):
        raise FlagError(faults)
    return plan, data, start


def _plan_flags(line: CommandLine) -> Iterator[str]:
    """Given flags that decide the plan, with their values."""
    names = ("placement", "num_chunks", *marked(PulseOptions, FlagMark.PLAN))
    for name in ("pipeline_model_parallel_size", *(f"pulse_{name}" for name in names)):
        if line.says(flag := flag_name(name)):
            yield f"{flag} {getattr(line.args, name)}"


def _set_eval_iters(
    line: CommandLine, options: PulseOptions, data: DiffusionData | CascadeData
) -> list[str]:
    """Limit --eval-iters to one pass over the validation samples, unless it was given.

    A validation set of one's own is read as a whole. Returns warnings.
    """
    args, found = line.args, data.num_validation
    most = max(found.values()) if isinstance(found, Mapping) else found
    whole = math.ceil(most / (args.eval_global_batch_size or args.global_batch_size))
    if not line.says("--eval-iters"):
        args.eval_iters = whole if options.validation_data else min(args.eval_iters, whole)
    elif args.eval_iters > whole:
        return [
            f"--eval-iters {args.eval_iters}: {whole} cover all validation samples; further ones "
            "repeat them and do not count"
        ]
    return []


def plan_of_auto(line: CommandLine, options: PulseOptions) -> tuple[PlanFile, PulseOptions]:
    """Plan of ``--pulse-auto``, and the options that follow from it (collective)."""
    with refusing(ValueError):
        given = auto_plan(line, options)
    if faults := list(contradictions(given, line, options, "--pulse-auto")):
        raise FlagError(faults)
    return given, apply_plan(given, line.args, options)


def with_schedules(plan: Plan, args: argparse.Namespace, options: PulseOptions) -> Plan:
    """``plan`` with the schedules that its steps need, equal on all ranks (collective)."""
    with refusing(ValueError):
        plan = share_schedules(plan, args, options)
        plan.step(num_microbatches(args))
        for shape_index, shape in enumerate(plan.shapes):
            plan.at_shape(shape_index).step(shape.num_microbatches)
    return plan


def with_own_share(plan: Plan, args: argparse.Namespace) -> Plan:
    """``plan`` with the sizes of this context-parallel rank's tokens."""
    size = args.context_parallel_size
    if size == 1:
        return plan
    return replace(plan, backbone=_own_share(args, plan.backbone, context_rank(args), size))


def _own_share(args: argparse.Namespace, backbone: Backbone, rank: int, size: int) -> Backbone:
    """``backbone`` of context-parallel ``rank``, its tokens divided by sequence parallelism too.

    Raises ValueError if the tokens cannot be divided.
    """
    tensor_parallel = args.tensor_model_parallel_size
    if size > 1:
        with naming(f"--context-parallel-size {size}"):
            if args.sequence_parallel:
                (backbone.whole or backbone).divide_sequences(tensor_parallel * size)  # or raise
            backbone = divide_context(backbone, rank, size)
    return _divide(backbone, tensor_parallel) if args.sequence_parallel else backbone


def _undivided(backbone: Backbone, tensor_parallel: int) -> Iterator[str]:
    """Faults of tensor parallelism of an exported module, or beyond the attention's heads."""
    chains = backbone.parts.values() or (backbone,)
    if tensor_parallel > 1 and any(source_of(chain) is not None for chain in chains):
        yield (
            f"--tensor-model-parallel-size {tensor_parallel}: a module ({backbone.name}) has no "
            "tensor parallelism; the families of 'pulse backbones' have tensor and sequence "
            "parallelism. Leave it out, or train one of those"
        )
    if odd := sorted({heads for heads in backbone.num_heads if heads % max(tensor_parallel, 1)}):
        yield (
            f"--tensor-model-parallel-size {tensor_parallel} does not divide the "
            f"{' and '.join(map(str, odd))} attention heads of {backbone.name}. Give a divisor"
        )


def _divide(backbone: Backbone, tensor_parallel: int) -> Backbone:
    """``backbone`` under sequence parallelism; raises ValueError if it has no token sequence."""
    divided = backbone.divide_sequences(tensor_parallel)
    if tensor_parallel > 1 and divided.layers == backbone.layers:
        raise ValueError(
            f"--sequence-parallel: {backbone.name} has no token sequence between its layers; "
            "leave it out"
        )
    return divided
