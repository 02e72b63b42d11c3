"""The ``pulse`` group of flags beside Megatron's own, and the defaults that Megatron needs here."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from megatron_pulse.diffusion.choice import ProcessChoice, add_process_arguments, process_choice
from megatron_pulse.planner.layout.embedders import Policy
from megatron_pulse.planner.layout.placement import Placement, make_placement
from megatron_pulse.planner.schedule.classic.registry import SCHEDULES
from megatron_pulse.profile.devices import PRESETS


@dataclass(frozen=True)
class PulseOptions:
    """The ``--pulse-*`` flags as one typed value; see their help texts."""

    backbone: str
    options: Mapping[str, Any]
    plan: str | None
    auto: bool
    placement: str
    num_chunks: int
    schedule: str
    activation_cap: int | None
    conditioning: Policy
    profile: str | None
    partition: Literal["exact", "soft"]
    link_gbs: float
    link_us: float
    memory_gb: float | None
    solver: str
    solver_seconds: float
    timeout_s: float
    data: str | None
    process: ProcessChoice
    new_process: bool
    class_dropout: float
    ema_decay: float
    skip_corrupt: bool
    progress: bool
    trace: str | None
    trace_steps: tuple[int, int]

    def make_placement(self, num_devices: int) -> Placement:
        """The placement on ``num_devices`` pipeline devices."""
        return make_placement(self.placement, num_devices, self.num_chunks)


def add_pulse_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``pulse`` group to Megatron's parser and set defaults that diffusion needs."""
    group = parser.add_argument_group(
        "pulse", "Skip-aware pipeline parallelism for diffusion backbones."
    )
    group.add_argument(
        "--pulse-backbone",
        metavar="NAME",
        help="a named backbone such as uvit-s or sd-v1.5; 'pulse backbones' lists them",
    )
    group.add_argument(
        "--pulse-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override one field of the backbone's configuration, e.g. depth=8 (repeatable)",
    )
    group.add_argument(
        "--pulse-plan",
        metavar="FILE",
        help="run a plan that 'pulse tune' wrote: backbone, degrees, batch, cuts and schedule are "
        "the plan's, and flags that say otherwise are refused",
    )
    group.add_argument(
        "--pulse-auto",
        action="store_true",
        help="measure the job's links and devices, tune for --global-batch-size, and run the plan "
        "(kept as plan.json under --save, and taken again when the job is started again); degrees "
        "and microbatch size are searched unless they are given",
    )
    group.add_argument(
        "--pulse-placement",
        choices=["sequential", "interleaved", "fold"],
        default="fold",
        help="fold keeps both ends of every skip on one device (default); sequential is one "
        "stage per device; interleaved loops several stages over the devices",
    )
    group.add_argument(
        "--pulse-num-chunks",
        type=int,
        default=2,
        metavar="V",
        help="stages per device under fold and interleaved (default 2; a fold of two waves has 4)",
    )
    group.add_argument(
        "--pulse-schedule",
        type=_schedule_name,
        default="auto",
        metavar="NAME|FILE.csv",
        help=f"one of {', '.join(SCHEDULES)}, or a file with a row of operations for each device "
        "(2F0,2B0 or F2:0,B2:0). auto: the wave under fold, 1F1B under sequential, interleaved "
        "1F1B under interleaved. wave-split, zb-h1 (sequential), zb-v and dualpipe-v (fold) put "
        "weight gradients off",
    )
    group.add_argument(
        "--pulse-activation-cap",
        type=int,
        metavar="N",
        help="at most N live stage activations per device (default: what 1F1B would hold)",
    )
    group.add_argument(
        "--pulse-conditioning",
        choices=get_args(Policy),
        default="auto",
        help="embeddings of timesteps and captions: send them (and their gradients) once to each "
        "device, replicate the layers that compute them, or for each whichever moves fewer bytes "
        "in a step (auto, default); the plan says which",
    )
    group.add_argument(
        "--pulse-profile",
        metavar="FILE|DEVICE",
        help="costs of the layers, by which stages are cut: a file that 'pulse profile' wrote, or "
        f"a device to work them out for ({', '.join(PRESETS)}; default: the GPU here)",
    )
    group.add_argument(
        "--pulse-partition",
        choices=["exact", "soft"],
        default="exact",
        help="under fold: exact keeps both ends of every skip on one device (default); soft lets "
        "those travel, directly, for which that is cheaper over the given links",
    )
    group.add_argument(
        "--pulse-link-gbs",
        type=float,
        default=12.5,
        metavar="GB/S",
        help="bandwidth between pipeline devices, each way (default 12.5, 100 Gbit/s)",
    )
    group.add_argument(
        "--pulse-link-us",
        type=float,
        default=5.0,
        metavar="US",
        help="latency of a message between pipeline devices (default 5)",
    )
    group.add_argument(
        "--pulse-memory-gb",
        type=float,
        metavar="GB",
        help="what a device may hold of weights, gradients, optimizer and activations (default: "
        "the GPU's memory; without a GPU there is no limit)",
    )
    group.add_argument(
        "--pulse-solver",
        choices=["auto", "highs", "glpk", "cp-sat", "none"],
        default="auto",
        help="integer programming beside the constructive search for waves (default auto: the best "
        "that is installed)",
    )
    group.add_argument(
        "--pulse-solver-seconds",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="longest search for a schedule at the start, on rank 0; what was found is kept for "
        "later runs ('pulse cache'; default 10)",
    )
    group.add_argument(
        "--pulse-timeout-s",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a message of another device before the run stops with a message "
        "that names it (default 600)",
    )
    group.add_argument(
        "--pulse-data",
        metavar="SPEC",
        help="what to train on: mnist, digits8, folder:PATH (images), captions:PATH (images with "
        "texts), or latents:PATH (see 'pulse data')",
    )
    add_process_arguments(group, "default: as the checkpoint; flow if new", "pulse-")
    group.add_argument(
        "--pulse-new-process",
        action="store_true",
        help="train the weights of --pretrained-checkpoint (or --load --finetune) to another "
        "process, which the flags above say; without it, flags that contradict the checkpoint are "
        "refused",
    )
    group.add_argument(
        "--pulse-skip-corrupt",
        action="store_true",
        help="with folder: and captions: data, take another sample in the place of one whose image "
        "cannot be read (the same in every layout); the log counts them",
    )
    group.add_argument(
        "--pulse-class-dropout",
        type=float,
        default=0.1,
        metavar="P",
        help="share of samples that lose their label and all other conditioning, for "
        "classifier-free guidance (default 0.1)",
    )
    group.add_argument(
        "--pulse-ema-decay",
        type=float,
        default=0.9999,
        metavar="D",
        help="decay of the exponential moving average of the weights; 0 keeps none",
    )
    group.add_argument(
        "--pulse-no-progress",
        action="store_true",
        help="no progress bar (without a terminal there is none anyway)",
    )
    group.add_argument(
        "--pulse-verbose",
        action="store_true",
        help="all that Megatron says: every argument, bucket and phase (default: the arguments go "
        "to arguments.txt under --save or --tensorboard-dir, the rest is left out)",
    )
    group.add_argument(
        "--pulse-trace",
        metavar="DIR",
        help="write DIR/trace.json: when each operation of some steps ran on every device, what it "
        "waited for, and what was sent; 'pulse compare' sets it beside the plan",
    )
    group.add_argument(
        "--pulse-trace-steps",
        type=_steps,
        default=(3, 5),
        metavar="FIRST-LAST",
        help="the steps to trace, counted from 1 in this run (default 3-5: after the warm-up)",
    )
    parser.set_defaults(**_defaults())
    return parser


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


def _defaults() -> dict[str, Any]:
    """Megatron's defaults are for language models; these are what diffusion backbones need."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
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
        "transformer_impl": "transformer_engine" if has_te else "local",
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


def flag_name(name: str) -> str:
    """How the flag of an attribute of the parsed arguments is written."""
    return "--" + name.replace("_", "-")


def pulse_options(args: argparse.Namespace) -> PulseOptions:
    """The typed value of the ``--pulse-*`` flags; raises ValueError for a malformed option."""
    malformed = [text for text in args.pulse_option if "=" not in text]
    if malformed:
        raise ValueError(f"--pulse-option takes KEY=VALUE, not {', '.join(map(repr, malformed))}")
    return PulseOptions(
        backbone=args.pulse_backbone,
        options=dict(text.split("=", 1) for text in args.pulse_option),
        plan=args.pulse_plan,
        auto=args.pulse_auto,
        placement=args.pulse_placement,
        num_chunks=args.pulse_num_chunks,
        schedule=args.pulse_schedule,
        activation_cap=args.pulse_activation_cap,
        conditioning=args.pulse_conditioning,
        profile=args.pulse_profile,
        partition=args.pulse_partition,
        link_gbs=args.pulse_link_gbs,
        link_us=args.pulse_link_us,
        memory_gb=args.pulse_memory_gb,
        solver=args.pulse_solver,
        solver_seconds=args.pulse_solver_seconds,
        timeout_s=args.pulse_timeout_s,
        data=args.pulse_data,
        process=process_choice(args, "pulse-"),
        new_process=args.pulse_new_process,
        class_dropout=args.pulse_class_dropout,
        ema_decay=args.pulse_ema_decay,
        skip_corrupt=args.pulse_skip_corrupt,
        progress=not args.pulse_no_progress,
        trace=args.pulse_trace,
        trace_steps=args.pulse_trace_steps,
    )


def set_model_arguments(args: argparse.Namespace, placement: Placement) -> None:
    """Fill Megatron's model flags, which its validation wants and no backbone reads.

    The number of layers only has to divide over the virtual stages; widths come from the
    backbone's own configuration.
    """
    args.num_layers = placement.num_stages
    args.num_attention_heads = 8 * args.tensor_model_parallel_size
    args.hidden_size = 64 * args.num_attention_heads
    args.seq_length = 64
    args.max_position_embeddings = 64
    if placement.num_chunks > 1:
        args.num_virtual_stages_per_pipeline_rank = placement.num_chunks
