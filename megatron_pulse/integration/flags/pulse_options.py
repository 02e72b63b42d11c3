"""The ``pulse`` group of flags beside Megatron's own, and Megatron's defaults changed for it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from megatron_pulse.adapters.choice import AdapterChoice
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import several_parts
from megatron_pulse.data.opened_images import ARCHIVES, IMAGES
from megatron_pulse.data.picture_choice import RANDOM, AugmentationChoice, ClipChoice, ShapeChoice
from megatron_pulse.dataclass_flags import (
    ABOVE_ZERO,
    BELOW_ONE,
    FROM_ONE,
    FROM_ZERO,
    FROM_ZERO_TO_ONE,
    NONE_OR_FROM_ONE,
    SHARE,
    add_flags,
    flag,
    flags_of,
    key_values,
    marked,
    read_flags,
)
from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.objectives import VALIDATION_TIMES
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.encoders.text_recipe import folder_name
from megatron_pulse.integration.flags.fsdp_flags import FsdpChoice
from megatron_pulse.integration.flags.sample_flags import SampleChoice
from megatron_pulse.planner.layout.embedder_choice import Policy
from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement, make_placement
from megatron_pulse.planner.partition.find import DefaultPlacement, default_placement
from megatron_pulse.planner.schedule.ilp.solvers import Solver, read_solver
from megatron_pulse.planner.schedule.registry import SCHEDULES
from megatron_pulse.profile.roofline import PRESETS
from megatron_pulse.profile.trainable import TrainedPart
from megatron_pulse.runtime.watchdog.call_with_timeout import backstop_timeout_s
from model_specs import text_recipe

PREFIX = "pulse-"
TRAINED_FLAGS = "--pulse-train, --pulse-freeze, --pulse-adapter and --pulse-quantization"
_TEXT_ENCODER = re.compile("text_encoder(_[23])?")
ENCODER_SCHEDULES = ("auto", "store", "fill", "before-step")
"""When an encoder runs (see the flag)."""


class FlagMark(Enum):
    """Further property of a flag."""

    PLAN = "decided by a plan file: refused together with one"
    AUTO = "input of the search of --pulse-auto"
    STEPS = "changes the steps of a continued run"
    FOLDER = "output folder"


def _schedule_name(text: str) -> str:
    if text not in SCHEDULES and not text.endswith(".csv"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a schedule ({', '.join(SCHEDULES)}) nor a .csv file"
        )
    return text


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        steps = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST-LAST, for example 3-5") from None
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: steps count from 1, the first before the last")
    return steps


def _num_chunks(options: PulseOptions) -> str | None:
    kind, chunks = PLACEMENTS.get(options.placement or ""), options.num_chunks
    if chunks is not None and kind is not None and not kind.allows(chunks):
        fault = f"{chunks}: a device of {kind} hosts {kind.chunks} stage(s)"
        of_chains = f", {kind.of_chain} or more of each chain of a cascade. Leave it out, or give "
        least = f"{2 * kind.of_chain} for two chains"
        return fault + of_chains + least if kind.of_chain > 1 else fault
    return None


def _skip_corrupt(options: PulseOptions) -> str | None:
    kinds = tuple(f"{kind}:" for kind in ("folder", "captions", "videos", *ARCHIVES))
    if options.skip_corrupt and not (options.data or "").startswith(kinds):
        return f"is for image files: --pulse-data {'PATH, '.join(kinds)}PATH"
    return None


def _bucket_batch(options: PulseOptions) -> str | None:
    shapes = options.shapes.buckets is not None or "," in str(options.options.get("buckets", ""))
    stored = several_parts(options.data) or (options.data or "").startswith("latents:")
    if options.bucket_batch is not None and not shapes and not stored:
        return "is for data of several shapes: --pulse-buckets, or latents:A,latents:B"
    return None


def _inpaint_masks(options: PulseOptions) -> str | None:
    if options.inpaint_masks == RANDOM:
        return None
    if several_parts(options.data) or not (options.data or "").startswith(("folder:", "captions:")):
        return (
            f"is for one folder of pictures, not {options.data}: give --pulse-data folder:PATH or "
            "captions:PATH. Latents have the masks with which they were written"
        )
    return None


def _masks(options: PulseOptions) -> str | None:
    if options.masks is None:
        return None
    if options.training_loss.learned_sigma:
        return "excludes --pulse-learned-sigma, whose bound is of whole samples"
    if several_parts(options.data) or "=" in (options.data or "").partition(":")[0]:
        return "is for one folder of pictures: --pulse-data names several datasets"
    if not (options.data or "").startswith(("folder:", "captions:")):
        return (
            f"is for image files, not {options.data}: give --pulse-data folder:PATH or "
            "captions:PATH (encode in the loop with --pulse-encoders)"
        )
    return None


def _validation_times(options: PulseOptions) -> str | None:
    if options.validation_times not in (1, VALIDATION_TIMES):
        return f"{options.validation_times}: give 1 or {VALIDATION_TIMES}"
    return None


def _default_caption(options: PulseOptions) -> str | None:
    files = any(f"{kind}:" in (options.data or "") for kind in IMAGES)
    if options.default_caption and not files:
        return f"is for image files: --pulse-data {':PATH, '.join(IMAGES)}:PATH"
    return None


def _encoder_dropout(options: PulseOptions) -> str | None:
    for name, text in options.encoder_dropout.items():
        if not _TEXT_ENCODER.fullmatch(name):
            return f"{name}={text}: write text_encoder, text_encoder_2 or text_encoder_3"
        try:
            FROM_ZERO_TO_ONE.read(text)
        except argparse.ArgumentTypeError as error:
            return f"{name}={text}: {error}"
    return None


def _self_conditioning(options: PulseOptions) -> str | None:
    if options.self_conditioning is not None and options.training_loss.is_preference:
        return "excludes --pulse-loss dpo: the first pass of a step is that of the reference"
    return None


def _encode(options: PulseOptions) -> str | None:
    if options.encoder_schedule and options.encoders is None:
        return "is for --pulse-encoders DIR"
    for text in options.encoder_schedule:
        if text.rpartition("=")[2] not in ENCODER_SCHEDULES:
            return f"{text}: write {', '.join(ENCODER_SCHEDULES)}, or NAME= and one of these"
    return None


def _encoders_dtype(options: PulseOptions) -> str | None:
    if options.encoders_dtype and options.encoders is None:
        return "is for --pulse-encoders DIR"
    return None


@dataclass(frozen=True)
class PulseOptions:
    """Typed value of the ``--pulse-*`` flags; every field is a flag, and every flag a field."""

    backbone: str = flag(
        "backbone by name, e.g. uvit-s or sd-v1.5 ('pulse backbones' lists them), or a cascade of "
        "backbones in one pipeline, each with its own data: cascade:base=NAME,upper=NAME",
        metavar="NAME",
    )
    module: str | None = flag(
        "torch module, or chain of your own, in place of --pulse-backbone: diffusers:FOLDER, "
        "diffusers:CLASS, FILE.py:FACTORY or PACKAGE.MODULE:FACTORY (see 'pulse module --help')",
        metavar="NAME",
    )
    options: Mapping[str, Any] = flag(
        "override one field of the backbone's configuration, e.g. depth=8 (repeatable)",
        {},
        name="option",
    )
    train: tuple[str, ...] = flag(
        "train only the parameters whose names match, e.g. down_blocks.0.* or *.bias (repeatable; "
        "default: all)",
        (),
        metavar="PATTERN",
    )
    freeze: tuple[str, ...] = flag(
        "freeze the parameters whose names match (repeatable). These have no gradient "
        "and no optimizer state; layers before the first trainable one skip backward",
        (),
        metavar="PATTERN",
    )
    adapter: AdapterChoice = flags_of(AdapterChoice)
    recompute: tuple[str, ...] = flag(
        "full activation recomputation in the layers whose names match, e.g. blocks.* "
        "(repeatable; for all layers: --recompute-granularity full)",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    recompute_selective: tuple[str, ...] = flag(
        "selective activation recomputation in the layers whose names match, e.g. blocks.* "
        "(repeatable): recompute norms, activation functions, sums and products, for half of the "
        "memory (for all layers: --recompute-granularity selective)",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    offload: tuple[str, ...] = flag(
        "activation offload in the layers whose names match, e.g. blocks.* (repeatable): keep "
        "activations in pinned host memory between forward and backward",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    offload_weights: tuple[str, ...] = flag(
        "weight offload in the layers whose names match, e.g. blocks.* (repeatable): keep frozen "
        "weights in pinned host memory and copy them to the device before each use",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN, FlagMark.AUTO],
    )
    token_slices: int = flag(
        "compute MLPs, norms, modulation and projections in N slices of the tokens, each of which "
        "backward recomputes by itself: layers of long sequences need less memory (default 1: "
        "whole)",
        1,
        metavar="N",
        within=FROM_ONE,
        marks=[FlagMark.PLAN, FlagMark.AUTO],
    )
    plan: str | None = flag(
        "run a plan that 'pulse tune' wrote. The plan sets backbone, parallel degrees, batch "
        "sizes, partition and schedule; contradicting flags are refused. From a folder ('pulse "
        "tune --world-sizes'), use the plan for this number of ranks",
        metavar="FILE|DIR",
    )
    auto: bool = flag(
        "measure the job's links and devices, tune for --global-batch-size, and run the plan. It "
        "is stored as plan.json under --save and reused when the job restarts. Parallel degrees "
        "and microbatch size are searched unless given",
        False,
    )
    auto_context: bool = flag(
        "with --pulse-auto: measure and search --context-parallel-size too",
        False,
    )
    fully_sharded: FsdpChoice = flags_of(FsdpChoice)
    placement: str | None = flag(
        "; ".join(f"{kind}: {kind.help}" for kind in PLACEMENTS.values())
        + " (default: fold if the backbone has skips to keep on one device, else sequential)",
        choices=list(PLACEMENTS),
    )
    num_chunks: int | None = flag(
        "stages per device for placements with several (default 2; opposite has 4)",
        metavar="V",
        check=_num_chunks,
    )
    schedule: str = flag(
        f"pipeline schedule: one of {', '.join(SCHEDULES)}, or a CSV file with one row of "
        "operations per device (2F0,2B0 or F2:0,B2:0). auto: wave under fold, 1F1B under "
        "sequential, interleaved 1F1B under interleaved. wave-split, zb-h1 (sequential), zb-v and "
        "dualpipe-v (fold) split the backward and defer weight gradients",
        "auto",
        metavar="NAME|FILE.csv",
        read=_schedule_name,
        marks=[FlagMark.PLAN],
    )
    activation_cap: int | None = flag(
        "at most N in-flight microbatches per device, summed over its stages (default: as in 1F1B)",
        metavar="N",
        within=FROM_ONE,
        marks=[FlagMark.PLAN],
    )
    conditioning: Policy = flag(
        "conditioning (timestep and caption embeddings): send it and its gradients once to each "
        "device, replicate the layers that compute it, or auto: whichever moves fewer bytes per "
        "step (default auto)",
        "auto",
    )
    profile: str | None = flag(
        "layer costs for the partition: a file that 'pulse profile' wrote, or a device for "
        f"analytic costs ({', '.join(PRESETS)}; default: the GPU of this machine)",
        metavar="FILE|DEVICE",
        marks=[FlagMark.PLAN],
    )
    partition: Literal["exact", "soft"] = flag(
        "under fold: exact collocates every skip (default); soft routes a skip directly between "
        "two devices where that is cheaper over the given links",
        "exact",
        marks=[FlagMark.PLAN],
    )
    link_gbs: float = flag(
        "link bandwidth between pipeline devices, each direction (default 12.5, 100 Gbit/s)",
        12.5,
        metavar="GB/S",
        within=ABOVE_ZERO,
        marks=[FlagMark.PLAN],
    )
    link_us: float = flag(
        "link latency between pipeline devices (default 5)",
        5.0,
        metavar="US",
        within=FROM_ZERO,
        marks=[FlagMark.PLAN],
    )
    memory_gb: float | None = flag(
        "memory limit per device for weights, gradients, optimizer state and activations "
        "(default: 0.9 of the GPU's memory; unlimited on a CPU; under --pulse-auto smaller devices "
        "keep their own)",
        metavar="GB",
        within=ABOVE_ZERO,
        marks=[FlagMark.PLAN, FlagMark.AUTO],
    )
    solver: str = flag(
        "integer-programming solver for wave schedules (default auto: the best installed)",
        "auto",
        choices=["auto", *map(str, Solver)],
        read=read_solver,
    )
    solver_seconds: float = flag(
        "time limit of the schedule search at startup, on rank 0; the result is cached for later "
        "runs (default 10)",
        10.0,
        metavar="SECONDS",
        within=ABOVE_ZERO,
    )
    timeout_s: float = flag(
        "watchdog: stop the run after so long without progress, and report the hung rank and all "
        "positions. Must exceed the longest operation (default 600)",
        600.0,
        metavar="SECONDS",
        within=FROM_ONE,
    )
    straggler_threshold: float = flag(
        "warn of a straggler: a rank slower than the median rank by this factor, relative to "
        "planned times (--pulse-plan, --pulse-profile) or its own first steps (default 1.5; 0: "
        "never)",
        1.5,
        metavar="RATIO",
        within=NONE_OR_FROM_ONE,
    )
    sdc_check_interval: int = flag(
        "silent data corruption (SDC) check: every so many steps, another rank recomputes one "
        "layer and compares the bits (default 0: never)",
        0,
        metavar="STEPS",
        within=FROM_ZERO,
    )
    max_skipped_steps: int = flag(
        "with --fp16, stop after so many consecutive overflows at the minimum (or a fixed) loss "
        "scale, and report the cause (default 5)",
        5,
        metavar="STEPS",
        within=FROM_ONE,
    )
    data: str | None = flag(
        "training data: mnist, digits8, or KIND:PATH, of the kinds folder, captions, pairs, "
        "webdataset, parquet, datasets (images), videos and latents (see 'pulse data'); for a "
        "cascade base=SPEC,upper=SPEC",
        metavar="SPEC",
        marks=[FlagMark.STEPS],
    )
    epochs: float | None = flag(
        "passes over the training samples, in place of --train-iters: the steps follow from the "
        "number of samples and --global-batch-size",
        metavar="N",
        within=ABOVE_ZERO,
    )
    warmup_epochs: float | None = flag(
        "warm-up of the learning rate in passes over the training samples, in place of "
        "--lr-warmup-iters",
        metavar="N",
        within=ABOVE_ZERO,
    )
    masks: str | None = flag(
        "folder of masks, grey pictures with the names of those of --pulse-data folder:PATH or "
        "captions:PATH: the training loss counts white, ignores black",
        metavar="DIR",
        marks=[FlagMark.STEPS],
        check=_masks,
    )
    inpaint_masks: str = flag(
        "masks of pictures, white where an inpainting model draws anew: random (by seed and "
        "sample), or a folder of grey pictures named as those of --pulse-data. "
        "--pulse-validation-data has random ones (default random)",
        RANDOM,
        metavar="random|DIR",
        marks=[FlagMark.STEPS],
        check=_inpaint_masks,
    )
    validation_data: str | None = flag(
        "validation set of one's own, as for --pulse-data, which is then trained on as a whole "
        "(default: a tenth of --pulse-data is held back). Without --eval-iters each evaluation "
        "covers all of it",
        metavar="SPEC",
        marks=[FlagMark.STEPS],
    )
    validation_times: int = flag(
        "times at which a validation sample is evaluated, with one fixed noise: 1 (time i/8 for "
        "sample i mod 8) or 8 (all). The loss is the mean of the 8 means by time (default 1)",
        1,
        metavar="1|8",
        check=_validation_times,
    )
    validation_target: float | None = flag(
        "validation loss at which the run saves and ends",
        metavar="LOSS",
        within=ABOVE_ZERO,
    )
    bucket_batch: int | None = flag(
        "consecutive samples of one shape, for data of several shapes (default: the global batch "
        "size)",
        metavar="N",
        within=FROM_ONE,
        check=_bucket_batch,
    )
    shapes: ShapeChoice = flags_of(ShapeChoice)
    augmented: AugmentationChoice = flags_of(AugmentationChoice)
    clips: ClipChoice = flags_of(ClipChoice)
    encoders: str | None = flag(
        "diffusers pipeline folder whose vae/ and text_encoder*/ encode the pictures and captions "
        "of --pulse-data in the loop. Latents and text states stored in latents:PATH are read "
        "instead. For a cascade: DIR for all chains, or base=DIR for single ones",
        metavar="DIR|hf:ID",
        marks=[FlagMark.STEPS],
    )
    encoder_schedule: tuple[str, ...] = flag(
        "when encoders run: fill (in pipeline bubbles of the previous step, as planned), "
        "before-step, store (never: the data has the results), or auto (default: store if the "
        "data has them, fill if the plan does, else before-step). For one encoder: "
        "vae=before-step, text=fill or text_encoder_2=before-step (repeatable)",
        (),
        metavar="[NAME=]SCHEDULE",
        check=_encode,
    )
    encoders_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        "dtype of the encoders (default: the folder's for text, fp32 for the autoencoder; fp32 on "
        "a CPU). With fp16, an autoencoder stays in fp32 unless its force_upcast is false",
        marks=[FlagMark.STEPS],
        check=_encoders_dtype,
    )
    process: ProcessChoice = flags_of(
        ProcessChoice, unsaid="default: as the checkpoint; flow if new"
    )
    boundary_ratio: float | None = flag(
        "two experts as the chains of a cascade: the first trains times from this share on, the "
        "second below",
        metavar="T",
        within=SHARE,
        marks=[FlagMark.STEPS],
    )
    new_process: bool = flag(
        "train the weights of --pretrained-checkpoint (or --load --finetune) for the process of "
        "the flags above; otherwise contradicting flags are refused",
        False,
    )
    training_loss: LossChoice = flags_of(LossChoice)
    skip_corrupt: bool = flag(
        "replace unreadable images by other samples, the same in every layout; the log counts them",
        False,
        check=_skip_corrupt,
    )
    default_caption: str = flag(
        "caption of pictures that have none",
        "",
        metavar="TEXT",
        marks=[FlagMark.STEPS],
        check=_default_caption,
    )
    class_dropout: float = flag(
        "probability of dropping a sample's label and conditioning, for guidance (default 0.1)",
        0.1,
        metavar="P",
        within=BELOW_ONE,
        marks=[FlagMark.STEPS],
    )
    encoder_dropout: Mapping[str, str] = flag(
        "probability of dropping the text of one encoder alone: text_encoder_2=0.1 (repeatable)",
        {},
        marks=[FlagMark.STEPS],
        check=_encoder_dropout,
    )
    self_conditioning: float | None = flag(
        "self-conditioning: probability of a first forward pass whose prediction is concatenated "
        "to the noisy sample (else zeros). For backbones with twice as many input as output "
        "channels (default: the plan's, else none)",
        metavar="P",
        within=SHARE,
        marks=[FlagMark.STEPS],
        check=_self_conditioning,
    )
    ema_decay: float = flag(
        "decay of the EMA of the weights; lower in the first steps, 0 disables it. Samples and "
        "exports use the EMA unless --raw is given (default 0.9999)",
        0.9999,
        metavar="D",
        within=BELOW_ONE,
        marks=[FlagMark.STEPS],
    )
    keep_last: int | None = flag(
        "remove older checkpoints than the last N, except multiples of --save-retain-interval "
        "(default: keep all, or the last and these multiples)",
        metavar="N",
        within=FROM_ONE,
    )
    keep_best: bool = flag(
        "keep and record the checkpoint with the lowest validation loss: 'best' in place of a step",
        False,
    )
    no_progress: bool = flag("disable the progress bar (shown on a terminal only)", False)
    verbose: bool = flag(
        "print all output of Megatron (default: arguments go to arguments.txt under --save or "
        "--tensorboard-dir, the rest is dropped)",
        False,
    )
    samples: SampleChoice = flags_of(SampleChoice)
    trace: str | None = flag(
        "write DIR/trace.json: operations, waits and messages of every device in some steps; "
        "'pulse compare' compares them with the plan",
        metavar="DIR",
        marks=[FlagMark.FOLDER],
    )
    trace_steps: tuple[int, int] = flag(
        "steps to trace, from 1 in each run (default 3-5)",
        (3, 5),
        metavar="FIRST-LAST",
        read=_steps,
    )

    @property
    def trained_part(self) -> TrainedPart:
        """Part of the model that these flags train."""
        adapter = self.adapter
        return TrainedPart(self.train, self.freeze, adapter.record, adapter.quantization)

    def make_placement(self, num_devices: int, backbone: Backbone) -> Placement:
        """Placement of ``backbone`` on ``num_devices`` pipeline devices.

        Raises ValueError if the default placement cannot have ``num_chunks`` stages per device.
        """
        chunks = 2 if self.num_chunks is None else self.num_chunks
        if self.placement is not None:
            return make_placement(self.placement, num_devices, chunks)
        default = self.default_placement(backbone)
        if self.num_chunks is not None and not default.kind.allows(chunks):
            raise ValueError(
                f"--pulse-num-chunks {chunks}: a device of {default.kind} hosts "
                f"{default.kind.chunks} stage(s), and it is the default placement here "
                f"({default.why}). Leave it out, or give --pulse-placement"
            )
        return make_placement(default.kind.name, num_devices, chunks)

    def default_placement(self, backbone: Backbone) -> DefaultPlacement:
        """Default ``placement`` of ``backbone``."""
        return default_placement(
            len(backbone.layers), backbone.skips, collocate=self.partition == "exact"
        )

    @property
    def backstop_timeout_s(self) -> float:
        """Limit of other waits in seconds; the watchdog (``timeout_s``) reports earlier and
        more.
        """
        return backstop_timeout_s(self.timeout_s)


def pulse_flags(mark: FlagMark) -> list[str]:
    """Names in the parsed arguments of the ``--pulse-*`` flags with this mark."""
    return [f"pulse_{name}" for name in marked(PulseOptions, mark)]


def add_pulse_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``pulse`` group to Megatron's parser, and set the defaults that diffusion needs."""
    group = parser.add_argument_group(
        "pulse", "Skip-aware pipeline parallelism for diffusion backbones."
    )
    add_flags(PulseOptions, group, PREFIX)
    parser.set_defaults(**_defaults())
    return parser


def _defaults() -> dict[str, Any]:
    """Defaults for diffusion backbones; Megatron's own are for language models."""
    defaults: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "no_persist_layer_norm": True,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "dataloader_type": "external",
        "dist_ckpt_optim_fully_reshardable": True,
        "lr_decay_style": "constant",
        # Other settings would depend on the tensor parallelism, or on sizes of language models.
        "muon_tp_mode": "duplicated",
        "muon_split_qkv": False,
        "eval_interval": 1000,
        "eval_iters": 10,
        "rerun_mode": "disabled",
        "num_workers": 0,
    }
    if not torch.cuda.is_available():
        defaults["distributed_backend"] = "gloo"
    return defaults


def drops_captions(args: argparse.Namespace, backbone: Backbone) -> bool:
    """True if runs of these flags drop captions or classes as a whole, so that guidance works.

    Each text encoder may drop its own text. Unknown flags count as such.
    """
    if getattr(args, "pulse_class_dropout", None) != 0:
        return True
    rates = key_values(getattr(args, "pulse_encoder_dropout", None) or (), "")
    recipe = None
    with suppress(ValueError):  # the family's text recipe is unknown
        recipe = text_recipe(backbone.name, backbone)
    return recipe is not None and all(
        float(rates.get(folder_name("text_encoder", place), 0)) > 0 for place in recipe.kinds
    )


def pulse_options(args: argparse.Namespace) -> PulseOptions:
    """Typed value of the ``--pulse-*`` flags; raises Faults for malformed options."""
    return read_flags(PulseOptions, args, PREFIX)


def set_model_arguments(args: argparse.Namespace, placement: Placement) -> None:
    """Fill Megatron's model flags, which its validation demands and no backbone reads.

    The number of layers only has to be divisible by the virtual stages. Widths come from the
    backbone's own configuration.
    """
    args.num_layers = placement.num_stages
    args.num_attention_heads = 8 * args.tensor_model_parallel_size
    args.hidden_size = 64 * args.num_attention_heads
    args.seq_length = 64 * args.context_parallel_size
    args.max_position_embeddings = args.seq_length
    if placement.num_chunks > 1:
        args.num_virtual_stages_per_pipeline_rank = placement.num_chunks
