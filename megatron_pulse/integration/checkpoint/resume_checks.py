"""Checks of a run against the saved one that it begins with, and changes to report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_pulse.adapters.adapter import describe as describe_adapter
from megatron_pulse.data.build import several_parts
from megatron_pulse.data.data_record import (
    DataRecord,
    describe_changes,
    moved_classes,
    recorded_data,
    recorded_provenance,
)
from megatron_pulse.data.dataset import LATENT
from megatron_pulse.data.fields import made_differently
from megatron_pulse.data.picture_choice import AUGMENTATION, BUCKETS, AugmentationChoice, ClipChoice
from megatron_pulse.dataclass_flags import flag_name
from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.diffusion.scheduler_import import read_process
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.encoders.tokens import recorded_by
from megatron_pulse.errors import format_faults, naming
from megatron_pulse.integration.checkpoint.diffusion_process import continued_process, saved_process
from megatron_pulse.integration.checkpoint.frozen_weights import FrozenWeights
from megatron_pulse.integration.checkpoint.lr_schedule import LENGTHS, SHAPE, given_schedule
from megatron_pulse.integration.checkpoint.starting_point import StartingPoint
from megatron_pulse.integration.flags.pulse_options import (
    TRAINED_FLAGS,
    FlagMark,
    PulseOptions,
    pulse_flags,
)
from megatron_pulse.profile.trainable import copies_reference, trained_part
from model_specs import compare_models, weights_folders


@dataclass(frozen=True)
class NewRun:
    """The run that is to begin; ``encoded_by`` are the files of its encoders in the loop, as data
    have them, and ``data`` the records of its datasets by chain. ``several_shapes`` is false if all
    samples have one shape."""

    arguments: argparse.Namespace
    options: PulseOptions
    record: Mapping[str, Any]
    encoded_by: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Sequence[DataRecord]] = field(default_factory=dict)
    several_shapes: bool = True

    @property
    def process(self) -> DiffusionProcess:
        """The diffusion process that it is to be trained as."""
        return saved_process(self.arguments)


def process_of(start: StartingPoint | None, options: PulseOptions) -> DiffusionProcess:
    """The diffusion process of a run that begins with ``start``: its own, or what flags say.

    Weights of a module's folder have that of the scheduler beside them. Raises ValueError for flags
    that contradict it, and where nothing says which it is.
    """
    given = [flag_name(f"pulse_{name}") for name in options.process.said]
    if start is None:
        folders = [each for each in weights_folders(options.backbone or "").values() if each]
        if folders and not options.new_process:
            found = [read_process(folder, options.process, "--pulse-")[0] for folder in folders]
            for folder, other in zip(folders, found, strict=True):
                if different := found[0].differences(other):
                    what = f"{folders[0]} and {folder} were trained with different processes"
                    raise ValueError(format_faults(what, different))
            return found[0]
        if not folders and options.new_process:
            raise ValueError("--pulse-new-process: the run has no initial weights")
        with naming(*given):
            return chosen_process(options.process)
    try:
        saved, new = start.saved.process, options.new_process
        with naming(*given):
            return continued_process(saved, options.process, continued=start.continued, new=new)
    except ValueError as error:
        raise ValueError(f"{start.given}: {error}") from error


def faults_of(start: StartingPoint, wanted: NewRun, planned: bool = True) -> list[str]:
    """Every reason why ``wanted`` cannot begin with ``start``; the same for all ways to start.

    Before the run is ``planned``, only reasons that no plan decides.
    """
    finds = [*_FAULTS, *_PLAN_FAULTS] if planned else _FAULTS
    return [f"{start.given}: {fault}" for find in finds for fault in find(start, wanted)]


def describe(start: StartingPoint, wanted: NewRun) -> str:
    """Start of the run and changes from here on, in one line."""
    saved = start.saved
    changes = [change for find in _CHANGES for change in find(start, wanted)]
    what = (
        f"continues from iteration {saved.iteration} of {saved.folder.parent}"
        if start.continued
        else f"starts with the weights in {saved.folder}"
    )
    return what + (f"; from here on: {', '.join(changes)}" if changes else "")


def _other_backbone(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    theirs, ours = start.saved.record, wanted.record
    if different := compare_models(theirs, ours).different:
        what = f"another backbone ({theirs['name']}, not {ours['name']})"
        if theirs["name"] == ours["name"]:
            what = f"another configuration of {ours['name']}"
        remedy = "" if start.named else "Name another --save for another run."
        yield format_faults(f"it holds {what}", different, remedy)


def _other_adapter(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """A continued run keeps its adapter, and the weights below it."""
    saved, args = start.saved, wanted.arguments
    parts = [trained_part(record) for record in (saved.record, wanted.record)]
    theirs, ours = (part.adapter for part in parts)
    before, now_quantized = (part.quantization for part in parts)
    if not start.continued:
        if theirs is not None:
            yield (
                f"it holds weights with an adapter ({describe_adapter(theirs)}). Merge them into "
                "a model with 'pulse export --merge', and start with that"
            )
        elif now_quantized is not None:
            yield (
                f"--pulse-quantization {now_quantized} quantises the weights of a diffusers "
                "folder, not those of a checkpoint. Export it ('pulse export'), and start with that"
            )
        return
    if before != now_quantized:
        kinds = (before, now_quantized)
        theirs_in, ours_in = (f"in {kind}" if kind else "not quantised" for kind in kinds)
        remedy = (
            f"Give --pulse-quantization {before}" if before else "Leave --pulse-quantization out"
        )
        yield (
            f"its frozen weights are {theirs_in}, and those of this run {ours_in}. {remedy}, or "
            "name another --save for another run"
        )
    if theirs != ours:
        yield _other_than(theirs, ours)
    elif saved.frozen_weights is not None:
        now = FrozenWeights.of_checkpoint(args)
        if now is None and saved.frozen_weights.imported:
            if args.pulse_train:
                yield (
                    "it leaves out the frozen weights, and --pulse-train trains some. Leave "
                    "the flag out, or begin with a merged model ('pulse export --merge')"
                )
        elif now is None or now.digest != saved.frozen_weights.digest:
            yield (
                f"its adapter was trained on the weights of {saved.frozen_weights.folder}, and "
                f"{'they have changed' if now else 'this run has others'}. Give the same weights"
            )


def _other_than(theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> str:
    return (
        f"it trains {describe_adapter(theirs)}, but this run trains {describe_adapter(ours)}. "
        "Give the same adapter, or name another --save for another run"
    )


def adapter_faults(start: StartingPoint | None, options: PulseOptions) -> list[str]:
    """Fault of continuing with another adapter, as far as flags tell, without the model."""
    if start is None or not start.continued:
        return []
    theirs = trained_part(start.saved.record).adapter
    if options.adapter.describes(theirs):
        return []
    return [f"{start.given}: {_other_than(theirs, options.adapter.record)}"]


def _other_sizes(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    yield from compare_models(start.saved.record, wanted.record).changed


def has_ema_of(start: StartingPoint, record: Mapping[str, Any]) -> bool:
    """True if it holds an EMA of all weights that a run of this record trains."""
    return start.saved.has_ema and trained_part(start.saved.record) == trained_part(record)


def has_reference_of(start: StartingPoint, record: Mapping[str, Any]) -> bool:
    """True if a run of this record that continues it finds the weights of its reference there."""
    same = trained_part(start.saved.record) == trained_part(record)
    return start.continued and same and start.saved.has_reference


def _newly_trained(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    theirs, ours = trained_part(start.saved.record), trained_part(wanted.record)
    if theirs != ours:
        yield f"trained parameters: {ours} (was {theirs})"


def _new_ema(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    if wanted.options.ema_decay and not has_ema_of(start, wanted.record):
        yield "EMA of the weights, starting with these weights (--pulse-ema-decay 0 disables it)"


def _new_reference(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    is_preference = wanted.options.training_loss.is_preference
    if not start.continued or not is_preference or not copies_reference(wanted.record):
        return
    if not has_reference_of(start, wanted.record):
        yield "dpo's reference is a copy of these weights"


_OR_NEW = "or --no-load-optim to continue with a new optimizer"


def _no_optimizer(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Only what is continued reads the optimizer's state, unless --no-load-optim says not to."""
    args, saved = wanted.arguments, start.saved
    if not start.continued or args.no_load_optim:
        return
    if not saved.has_optimizer:
        yield (
            "it was saved without optimizer state. Give --no-load-optim to continue with a new "
            f"optimizer, or start a new run with --pretrained-checkpoint {saved.folder.parent}"
        )
        return
    before = saved.arguments
    theirs, ours = trained_part(saved.record), trained_part(wanted.record)
    if theirs[:2] != ours[:2]:  # adapters are compared by themselves
        yield (
            f"its optimizer state is for training {theirs}, but this run trains {ours}. Give the "
            f"same {TRAINED_FLAGS}, {_OR_NEW}"
        )
    if before.optimizer != args.optimizer:
        yield f"it was trained with --optimizer {before.optimizer}. Give the same, {_OR_NEW}"
    elif args.optimizer == "sgd" and before.sgd_momentum != args.sgd_momentum:
        momentum = f"--sgd-momentum {before.sgd_momentum:g}"
        yield f"it was trained with {momentum}. Give the same, {_OR_NEW}"
    if _precision(before) != _precision(args):
        yield (
            f"it was trained in {_precision(before)}, but this run is in {_precision(args)}. Use "
            f"the same precision, {_OR_NEW}"
        )


def _other_sharding(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """The optimizer's state is sharded over replicas, or not."""
    args, before = wanted.arguments, start.saved.arguments
    if not start.continued or args.no_load_optim or not start.saved.has_optimizer:
        return
    if before.use_distributed_optimizer == args.use_distributed_optimizer:
        return
    name, fsdp = flag_name("use_distributed_optimizer"), "--use-torch-fsdp2"
    if getattr(before, "pulse_fsdp", False):
        other = "" if before.optimizer != "adam" else f", or {name}, which shards alike"
        yield f"it was trained with {fsdp}. Give it{other}, {_OR_NEW}"
    elif args.pulse_fsdp:
        yield f"it was trained without {name}, and {fsdp} shards alike. Leave {fsdp} out, {_OR_NEW}"
    elif before.use_distributed_optimizer:
        yield f"it was trained with {name}. Give it, {_OR_NEW}"
    else:
        yield f"it was trained without {name}. Leave it out, {_OR_NEW}"


def _other_count(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Megatron finds the samples of --override-ckpt-iteration by today's batch."""
    args, before = wanted.arguments, start.saved.arguments
    if args.override_ckpt_iteration is None:
        return
    if not start.continued:
        yield (
            "--override-ckpt-iteration is for a run continued with --load; this run starts at "
            "step 0"
        )
    elif args.global_batch_size != before.global_batch_size:
        yield (
            "--override-ckpt-iteration counts earlier samples by --global-batch-size, which must "
            f"stay {before.global_batch_size}"
        )


def _other_unit(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """A saved schedule counts steps or samples, whichever its run did."""
    args, before = wanted.arguments, start.saved.arguments
    if not start.continued or not args.use_checkpoint_opt_param_scheduler:
        return
    if (before.train_samples is None) != (args.train_samples is None):
        unit = "iters" if before.train_samples is None else "samples"
        yield (
            f"its learning-rate schedule counts --train-{unit}, and "
            f"--use-checkpoint-opt_param-scheduler keeps it. Give --train-{unit}, or leave "
            "--use-checkpoint-opt_param-scheduler out and give the schedule by flags"
        )


def _other_buckets(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Samples of several shapes come in an order that depends on how many of one are in a row."""
    args, before = wanted.arguments, start.saved.arguments
    shapes = [each.get("options", {}).get(BUCKETS) for each in (start.saved.record, wanted.record)]
    if start.continued and wanted.several_shapes and shapes[0] != shapes[1]:
        was, now = (each or "one" for each in shapes)
        yield (
            f"its samples are of the shapes {was} (height x width), those of this run {now}: they "
            f"come in another order. Give {_shapes_again(before, was)}, or {_new_run(start)}"
        )
    buckets = "," in str(shapes[0]) or several_parts(before.pulse_data)
    if not start.continued or not buckets or not wanted.several_shapes:
        return
    was, now = (each.pulse_bucket_batch or each.global_batch_size for each in (before, args))
    if was != now:
        yield (
            f"its sample order has {was} consecutive samples of one shape, this run {now}, so "
            f"some samples would come twice in an epoch. Give --pulse-bucket-batch {was}"
        )


def _shapes_again(before: argparse.Namespace, shapes: str) -> str:
    """Flags by which a run has the shapes of an earlier one."""
    names = [f"pulse_{name}" for name in ("resolution", "buckets", "bucket_step")]
    given = {name: value for name in names if (value := getattr(before, name, None)) is not None}
    if not given.keys() & {"pulse_resolution", "pulse_buckets"}:
        return f"--pulse-option {BUCKETS}={shapes}"
    return " ".join(f"{flag_name(name)} {value}" for name, value in given.items())


def _other_augmentation(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Samples are varied, captions begun and sources repeated as before, at every position."""
    args, before = wanted.arguments, start.saved.arguments
    if not start.continued:
        return
    choices: list[tuple[Any, str]] = [(AugmentationChoice(), name) for name in AUGMENTATION]
    choices += [(ClipChoice(), name) for name in vars(ClipChoice())]
    for choice, name in choices:
        flag = f"pulse_{name}"
        none = getattr(choice, name)
        was, now = (getattr(each, flag, none) or none for each in (before, args))
        if was != now and list(was if isinstance(was, tuple) else [was]) != now:
            yield (
                f"its samples were made with {flag_name(flag)} {was}, those of this run with "
                f"{now}. Give the same, or {_new_run(start)}"
            )


def _pairs(
    start: StartingPoint, wanted: NewRun
) -> Iterator[tuple[str, Sequence[DataRecord], Sequence[DataRecord]]]:
    """(chain, records of data before, and now), of chains whose checkpoint has them."""
    before = recorded_data(start.saved.arguments)
    for chain, now in wanted.data.items():
        if chain in before:
            yield chain, before[chain], now


def _of(chain: str) -> str:
    """Beginning of a text on one chain of a cascade; empty otherwise."""
    return f"{chain}: " if chain else ""


def _vae_of(chain: str) -> str:
    """Name of a chain's autoencoder in ``encoded_by``."""
    return f"{chain}.{VAE}" if chain else VAE


def _new_run(start: StartingPoint) -> str:
    folder = start.saved.folder.parent
    return f"start a new run with its weights: --pretrained-checkpoint {folder}"


def _provenance(
    start: StartingPoint, chain: str, before: Sequence[DataRecord], now: Sequence[DataRecord]
) -> tuple[dict[str, str], dict[str, str]]:
    """Provenance of latents and fields (before, now); latents may have been encoded in the loop."""
    vae = recorded_by(start.saved.arguments).get(_vae_of(chain))
    looped = {} if vae is None else {LATENT: vae}
    return looped | (recorded_provenance(before) or {}), recorded_provenance(now) or {}


def _other_provenance(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Latents of another autoencoder, or text states of another encoder, have another meaning."""
    for chain, *records in _pairs(start, wanted) if start.continued else ():
        was, now = _provenance(start, chain, *records)
        faults = [
            f"{name} was made by {was[name]}, in this run by {now[name]}"
            for name in made_differently(now, was)
        ]
        if faults:
            remedy = f"Give data of the same encoders, or {_new_run(start)}."
            yield format_faults(f"{_of(chain)}its data are of other encoders", faults, remedy)


def _moved_classes(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """A class folder that was renamed or added gives others their labels."""
    for chain, before, now in _pairs(start, wanted) if start.continued else ():
        if moved := moved_classes(before, now):
            yield (
                f"{_of(chain)}its classes have other labels in these data: {moved}. Restore the "
                "names of the class folders and the order of sources (labels follow both), or "
                f"{_new_run(start)}"
            )


def _precision(args: argparse.Namespace) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def _other_seed(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Fault if the seed differs: --save alone continues the same run, which the seed identifies."""
    before, now, folder = start.saved.arguments.seed, wanted.arguments.seed, start.saved.folder
    if not start.named and before != now:
        yield (
            f"it holds a run with --seed {before}, not {now}. Name another --save, or continue "
            f"with other random numbers on purpose: --load {folder.parent}"
        )


# What else makes the steps to come others than those that the run would have made.
_STEPS = (
    *("global_batch_size", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed"),
    *(f"pulse_{each.name}" for each in fields(LossChoice)),
)


def _other_flags(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Flags that are free to change, and change what is computed; layouts do not."""
    if not start.continued:
        return
    before, now = start.saved.arguments, wanted.arguments
    old_schedule, new_schedule = given_schedule(before), given_schedule(now)
    for name in (*LENGTHS, *SHAPE, *_STEPS, *pulse_flags(FlagMark.STEPS)):
        old = old_schedule[name] if name in old_schedule else getattr(before, name, None)
        new = new_schedule[name] if name in new_schedule else getattr(now, name, None)
        if old != new and (old or new):  # earlier versions have no empty list
            kept = name in SHAPE and now.use_checkpoint_opt_param_scheduler
            yield f"{flag_name(name)} {_text(new)} ({'still' if kept else 'was'} {_text(old)})"
    if now.override_ckpt_iteration is not None:
        yield f"steps count from {now.override_ckpt_iteration} (--override-ckpt-iteration)"
    if now.no_load_optim:
        yield "a new optimizer (--no-load-optim)"


def _other_encoders(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Files of encoders that are others than they were, also in the folder of before."""
    if not start.continued:
        return
    before = dict(recorded_by(start.saved.arguments))
    for chain, records in recorded_data(start.saved.arguments).items():
        if stored := (recorded_provenance(records) or {}).get(LATENT):
            before[_vae_of(chain)] = stored
    for name in made_differently(before, wanted.encoded_by):
        yield f"encoders: {name} {wanted.encoded_by[name]} (was {before[name]})"


def _other_data(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Data that are others than they were; of a new run only labels and encoders that weights
    know."""
    for chain, before, now in _pairs(start, wanted):
        changes = describe_changes(before, now) if start.continued else []
        if not start.continued and (moved := moved_classes(before, now)):
            changes = [f"labels: {moved}"]
        was, made_by = _provenance(start, chain, before, now)
        others = made_differently(made_by, was)
        if (
            start.continued
            and recorded_provenance(before) is not None
            and not _encodes(start, wanted)
        ):
            others += sorted(was.keys() ^ made_by.keys())
        changes += [
            f"{name} made by {made_by.get(name, _UNKNOWN)} (was {was.get(name, _UNKNOWN)})"
            for name in others
        ]
        yield from (f"{_of(chain)}{change}" for change in changes)


_UNKNOWN = "what is not known"


def _encodes(start: StartingPoint, wanted: NewRun) -> bool:
    """True if one of the runs has encoders in the loop, whose provenance no data have."""
    return bool(recorded_by(start.saved.arguments)) or wanted.options.encoders is not None


def _text(value: Any) -> str:
    return "not given" if value is None else str(value)


def _other_process(start: StartingPoint, wanted: NewRun) -> Iterator[str]:
    """Choices left to a run (see process_of); all else was refused before."""
    now, before = wanted.process, start.saved.process
    if now != before:
        yield f"{now.describe()} (was {before.describe()})"


_Comparison = Callable[[StartingPoint, NewRun], Iterator[str]]
_FAULTS: tuple[_Comparison, ...] = (
    _other_backbone,
    _other_adapter,
    _no_optimizer,
    _other_count,
    _other_unit,
    _other_buckets,
    _other_augmentation,
    _moved_classes,
    _other_provenance,
    _other_seed,
)
_PLAN_FAULTS: tuple[_Comparison, ...] = (_other_sharding,)
"""Comparisons of what a plan decides."""
_CHANGES: tuple[_Comparison, ...] = (
    _other_sizes,
    _other_process,
    _newly_trained,
    _other_flags,
    _other_encoders,
    _other_data,
    _new_ema,
    _new_reference,
)
