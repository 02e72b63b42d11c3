"""The ``pulse`` group of flags beside Megatron's own, and Megatron's defaults changed for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.data.build import several_parts
from megatron_pulse.diffusion.choice import ProcessChoice
from megatron_pulse.flags import (
    ABOVE_ZERO,
    BELOW_ONE,
    FROM_ONE,
    FROM_ZERO,
    NONE_OR_FROM_ONE,
    SHARE,
    add_flags,
    flag,
    flags_of,
    marked,
    read_flags,
)
from megatron_pulse.planner.layout.embedder_choice import Policy
from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement, make_placement
from megatron_pulse.planner.partition.find import DefaultPlacement, default_placement
from megatron_pulse.planner.schedule.registry import SCHEDULES
from megatron_pulse.profile.roofline import PRESETS
from megatron_pulse.runtime.watchdog.timeout import backstop_timeout_s

PREFIX = "pulse-"
ENCODER_SCHEDULES = ("auto", "store", "fill", "before-step")
"""When an encoder runs (see the flag)."""


class FlagMark(Enum):
    """Further property of a flag."""

    PLAN = "a plan file decides it: given beside one it is refused"
    AUTO = "what --pulse-auto goes by in making its plan"
    STEPS = "it makes the steps to come others than those that a continued run would have made"
    FOLDER = "a folder that is written to"


def _schedule_name(text: str) -> str:
    if text not in SCHEDULES and not text.endswith(".csv"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SCHEDULES)}, nor a .csv")
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
        return f"{chunks}: a device of {kind} hosts {kind.chunks} stage(s)"
    return None


def _skip_corrupt(options: PulseOptions) -> str | None:
    if options.skip_corrupt and not (options.data or "").startswith(("folder:", "captions:")):
        return "is for image files: --pulse-data folder:PATH or captions:PATH"
    return None


def _bucket_batch(options: PulseOptions) -> str | None:
    if options.bucket_batch is not None and not several_parts(options.data):
        return "is for --pulse-data with several stores: latents:A,latents:B"
    return None


def _default_caption(options: PulseOptions) -> str | None:
    files = any(f"{kind}:" in (options.data or "") for kind in ("folder", "captions"))
    if options.default_caption and not files:
        return "is for image files: --pulse-data folder:PATH or captions:PATH"
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
        "a named backbone such as uvit-s or sd-v1.5 ('pulse backbones' lists them), or several in "
        "one pipeline, each with its own data: cascade:base=NAME,upper=NAME",
        metavar="NAME",
    )
    module: str | None = flag(
        "in place of --pulse-backbone: a torch module as it is, or a chain of your own: "
        "diffusers:FOLDER, diffusers:CLASS, FILE.py:FACTORY or PACKAGE.MODULE:FACTORY "
        "('pulse module --help' has more)",
        metavar="NAME",
    )
    options: Mapping[str, Any] = flag(
        "override one field of the backbone's configuration, e.g. depth=8 (repeatable)",
        {},
        name="option",
    )
    train: tuple[str, ...] = flag(
        "train the parameters whose names match, as down_blocks.0.* or *.bias, and freeze all "
        "others (repeatable; default: train all)",
        (),
        metavar="PATTERN",
    )
    freeze: tuple[str, ...] = flag(
        "freeze the parameters whose names match (repeatable): they have no gradient and no "
        "optimizer state, and layers before all that is trained no backward pass",
        (),
        metavar="PATTERN",
    )
    recompute: tuple[str, ...] = flag(
        "layers whose activations the backward pass computes again instead of keeping them, by "
        "their names, as blocks.* (repeatable; all of them: --recompute-granularity full)",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    recompute_selective: tuple[str, ...] = flag(
        "layers of which the backward pass computes again what is cheap (norms, activation "
        "functions, sums and products of elements) and keeps the rest, by their names, as blocks.* "
        "(repeatable): a half of what they save, for some percent of their time (all of them: "
        "--recompute-granularity selective)",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    offload: tuple[str, ...] = flag(
        "layers whose activations wait in pinned host memory from their forward to their backward, "
        "by their names, as blocks.* (repeatable); copies are made beside computing. A plan says "
        "that itself, and counts on it",
        (),
        metavar="PATTERN",
        marks=[FlagMark.PLAN],
    )
    plan: str | None = flag(
        "run a plan that 'pulse tune' wrote: backbone, degrees, batch, cuts and schedule are the "
        "plan's, and flags that say otherwise are refused; of a folder ('pulse tune "
        "--world-sizes') the one for as many ranks as there are",
        metavar="FILE|DIR",
    )
    auto: bool = flag(
        "measure the job's links and devices, tune for --global-batch-size, and run the plan (kept "
        "as plan.json under --save, and taken again when the job is started again); degrees and "
        "microbatch size are searched unless they are given",
        False,
    )
    placement: str | None = flag(
        "; ".join(f"{kind}: {kind.help}" for kind in PLACEMENTS.values())
        + " (default: fold where the backbone has skips that it keeps on their devices, else "
        "sequential; the log says which, and why)",
        choices=list(PLACEMENTS),
    )
    num_chunks: int | None = flag(
        "stages on a device, where it hosts several (default 2; a fold of two waves has 4)",
        metavar="V",
        check=_num_chunks,
    )
    schedule: str = flag(
        f"one of {', '.join(SCHEDULES)}, or a file with a row of operations for each device "
        "(2F0,2B0 or F2:0,B2:0). auto: the wave under fold, 1F1B under sequential, interleaved "
        "1F1B under interleaved. wave-split, zb-h1 (sequential), zb-v and dualpipe-v (fold) put "
        "weight gradients off",
        "auto",
        metavar="NAME|FILE.csv",
        read=_schedule_name,
        marks=[FlagMark.PLAN],
    )
    activation_cap: int | None = flag(
        "at most N live stage activations per device (default: what 1F1B would hold)",
        metavar="N",
        within=FROM_ONE,
        marks=[FlagMark.PLAN],
    )
    conditioning: Policy = flag(
        "embeddings of timesteps and captions: send them (and their gradients) once to each "
        "device, replicate the layers that compute them, or for each whichever moves fewer bytes "
        "in a step (auto, default); the plan says which",
        "auto",
    )
    profile: str | None = flag(
        "costs of the layers, by which stages are cut: a file that 'pulse profile' wrote, or a "
        f"device to work them out for ({', '.join(PRESETS)}; default: the GPU here)",
        metavar="FILE|DEVICE",
        marks=[FlagMark.PLAN],
    )
    partition: Literal["exact", "soft"] = flag(
        "under fold: exact keeps both ends of every skip on one device (default); soft lets those "
        "travel, directly, for which that is cheaper over the given links",
        "exact",
        marks=[FlagMark.PLAN],
    )
    link_gbs: float = flag(
        "bandwidth between pipeline devices, each way (default 12.5, 100 Gbit/s)",
        12.5,
        metavar="GB/S",
        within=ABOVE_ZERO,
        marks=[FlagMark.PLAN],
    )
    link_us: float = flag(
        "latency of a message between pipeline devices (default 5)",
        5.0,
        metavar="US",
        within=FROM_ZERO,
        marks=[FlagMark.PLAN],
    )
    memory_gb: float | None = flag(
        "what a device may hold of weights, gradients, optimizer and activations (default: 0.9 of "
        "the GPU's memory; without a GPU there is no limit)",
        metavar="GB",
        within=ABOVE_ZERO,
        marks=[FlagMark.PLAN, FlagMark.AUTO],
    )
    solver: str = flag(
        "integer programming beside the constructive search for waves (default auto: the best "
        "that is installed)",
        "auto",
        choices=["auto", "highs", "glpk", "cp-sat", "none"],
    )
    solver_seconds: float = flag(
        "longest search for a schedule at the start, on rank 0; what was found is kept for later "
        "runs (default 10)",
        10.0,
        metavar="SECONDS",
        within=ABOVE_ZERO,
    )
    timeout_s: float = flag(
        "longest time for which nothing may move (messages, Megatron's collectives, saving, "
        "loading, the start) before the run stops and says which rank stands still, and where each "
        "other is; longer than the longest operation (default 600)",
        600.0,
        metavar="SECONDS",
        within=FROM_ONE,
    )
    straggler_threshold: float = flag(
        "warn of a rank whose operations take so many times longer than those of the median rank, "
        "each beside the plan's times (with --pulse-plan or --pulse-profile) or its own first "
        "steps (default 1.5; 0: never)",
        1.5,
        metavar="RATIO",
        within=NONE_OR_FROM_ONE,
    )
    sdc_check_interval: int = flag(
        "every so many steps, another rank computes a layer again, bit for bit (default 0: never)",
        0,
        metavar="STEPS",
        within=FROM_ZERO,
    )
    max_skipped_steps: int = flag(
        "with --fp16, end the run after so many steps in a row that overflow at the least loss "
        "scale, or a fixed one, and say why (default 5)",
        5,
        metavar="STEPS",
        within=FROM_ONE,
    )
    data: str | None = flag(
        "what to train on: mnist, digits8, folder:PATH (images), captions:PATH (images with "
        "texts), or latents:PATH (see 'pulse data'); of a cascade base=SPEC,upper=SPEC",
        metavar="SPEC",
        marks=[FlagMark.STEPS],
    )
    bucket_batch: int | None = flag(
        "samples in a row that are of one shape, of data of several (default: the global batch)",
        metavar="N",
        within=FROM_ONE,
        check=_bucket_batch,
    )
    encoders: str | None = flag(
        "a diffusers pipeline folder whose vae/ and text_encoder*/ make latents and text states in "
        "the loop, of the pictures and captions of --pulse-data; what latents:PATH has is not made "
        "again; of a cascade for all chains, or base=DIR for those that need them",
        metavar="DIR|hf:ID",
        marks=[FlagMark.STEPS],
    )
    encoder_schedule: tuple[str, ...] = flag(
        "when an encoder runs: fill (in bubbles of the step before, where the plan has it), "
        "before-step, store (not at all: the data must have it), or auto (default: store if the "
        "data has it, fill if the plan does, else before-step); for one encoder as "
        "vae=before-step, text=fill or text_encoder_2=before-step (repeatable)",
        (),
        metavar="[NAME=]SCHEDULE",
        check=_encode,
    )
    encoders_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        "of the encoders (default: the folder's for text and fp32 for the autoencoder; fp32 on a "
        "CPU); with fp16 an autoencoder keeps fp32 unless its force_upcast is false",
        marks=[FlagMark.STEPS],
        check=_encoders_dtype,
    )
    process: ProcessChoice = flags_of(
        ProcessChoice, unsaid="default: as the checkpoint; flow if new"
    )
    new_process: bool = flag(
        "train the weights of --pretrained-checkpoint (or --load --finetune) to another process, "
        "which the flags above say; without it, flags that contradict the checkpoint are refused",
        False,
    )
    skip_corrupt: bool = flag(
        "take another sample in the place of one whose image cannot be read, the same in every "
        "layout; the log counts files",
        False,
        check=_skip_corrupt,
    )
    default_caption: str = flag(
        "of pictures without a caption of their own (default: none)",
        "",
        metavar="TEXT",
        marks=[FlagMark.STEPS],
        check=_default_caption,
    )
    class_dropout: float = flag(
        "share of samples that lose label and conditioning, for classifier-free guidance (default "
        "0.1)",
        0.1,
        metavar="P",
        within=BELOW_ONE,
        marks=[FlagMark.STEPS],
    )
    self_conditioning: float | None = flag(
        "share of the steps in which the backbone is given its own prediction behind the noisy "
        "sample, of a forward pass before (elsewhere zeros): for those whose first layer takes "
        "twice the channels that they predict (default: what the plan was made for, else none)",
        metavar="P",
        within=SHARE,
        marks=[FlagMark.STEPS],
    )
    ema_decay: float = flag(
        "decay of the exponential moving average of the weights, of which samples and exports are "
        "unless they say --raw; lower in the first steps, 0 keeps none",
        0.9999,
        metavar="D",
        within=BELOW_ONE,
        marks=[FlagMark.STEPS],
    )
    no_progress: bool = flag("no progress bar (without a terminal there is none anyway)", False)
    verbose: bool = flag(
        "all that Megatron says: every argument, bucket and phase (default: the arguments go to "
        "arguments.txt under --save or --tensorboard-dir, the rest is left out)",
        False,
    )
    trace: str | None = flag(
        "write DIR/trace.json: when each operation of some steps ran on every device, what it "
        "waited for, and what was sent; 'pulse compare' sets it beside the plan",
        metavar="DIR",
        marks=[FlagMark.FOLDER],
    )
    trace_steps: tuple[int, int] = flag(
        "the steps to trace, counted from 1 in this run, also where it goes on with another "
        "(default 3-5: after the warm-up)",
        (3, 5),
        metavar="FIRST-LAST",
        read=_steps,
    )

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
                f"{default.kind.chunks} stage(s), and that is the default here ({default.why}): "
                "leave it out, or give --pulse-placement"
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
        "eval_interval": 1000,
        "eval_iters": 10,
        "rerun_mode": "disabled",
        "num_workers": 0,
    }
    if not torch.cuda.is_available():
        defaults["distributed_backend"] = "gloo"
    return defaults


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
    args.seq_length = 64
    args.max_position_embeddings = 64
    if placement.num_chunks > 1:
        args.num_virtual_stages_per_pipeline_rank = placement.num_chunks
