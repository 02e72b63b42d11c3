"""``pulse tune``: best configuration for training a backbone on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import add_layers_flags, layers_faults
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.output import add_json, print_result
from megatron_pulse.cli.plan.tuning.tune_elastic import elastic_clusters, tune_worlds
from megatron_pulse.cli.plan.tuning.tune_input import (
    AUTO,
    choices_of,
    evaluator_of,
    flags_not_applied_to_fsdp,
    given_profile,
    no_cascade,
    no_context_costs,
    no_encoders_of_one_device,
    no_half_gradients,
    no_prediction_taken,
    one_first_pass,
    unused_caution,
)
from megatron_pulse.cli.plan.tuning.tune_slices import search_with_slices
from megatron_pulse.cli.shared_flags import add_encoder_costs, add_solver, number_list_faults
from megatron_pulse.dataclass_flags import ABOVE_ZERO, SHARE, TO_MILLION
from megatron_pulse.errors import UserError, unknown_name
from megatron_pulse.planner.layout.layouts import LAYOUTS, layouts_called
from megatron_pulse.profile.roofline import ELEMENT_BYTES
from megatron_pulse.progress import ProgressLine

if TYPE_CHECKING:
    from megatron_pulse.planner.plan_file.plan_file import PlanFile
    from megatron_pulse.planner.tune.plans.encoder_policies import EncodedPlan

_DESCRIPTION = """\
Searches all of this together: pipeline, data, tensor and context degree, microbatch size, layout
(one device, sequential, interleaved, fold exact, fold soft, two waves), schedule, activation
policies, split backward, distributed optimizer, and rank order.

The time of a config is that of its own schedule, simulated with the links of the cluster, gradient
reduction and optimizer. Its memory is the peak of that schedule and Megatron's state of each
parameter. Nothing is run. Times are as good as the profile: without --profile they are estimated
from the peaks of the device, and ratios are better than seconds.

The answer comes first: plan, samples/s, memory, FSDP2 and data parallelism beside it, certainty,
and the command that trains. FSDP2 is predicted at its best, with ideal collectives. What is faster
than the plan stands in the first line. The best configs follow; --explain shows all else.

The search takes --seconds. Profiling (up to a minute) and compiling (once per machine) come before.
On a busy machine give it more seconds. A profile with costs in slices of tokens ('pulse profile
--token-slices') is searched again with each number of slices, where whole layers are short of
memory.

  P, D, T      pipeline, data and tensor degree
  K            context degree: ranks that share the tokens of a sample; they are no replicas
  b, M         samples of a microbatch, microbatches of a step
  inside       what neighbouring ranks share a node for: pipeline or replicas
  samples/s    of the whole cluster
  bubble       idle share of the pipeline's time, mean of the devices
  GB           memory of the fullest device
  MB           sent per sample, by pipelines and by replicas
  gap          distance of the schedule from its lower bound, without contention on links

examples:
  pulse tune --backbone hunyuan-dit-3b --cluster pulse-910a --global-batch-size 512 -o plan.json
  pulse tune --profile profile.json --cluster dgx-a100:4 --global-batch-size 256 --explain
  pulse tune --profile profile.json --cluster dgx-a100:4 --global-batch-size 256 \\
      --world-sizes 32,24,16 -o plans          # for a run that goes on when it has lost nodes
  pulse tune --backbone uvit-2.7b --cluster ours.yaml --global-batch-size 256 \\
      --pipeline 2,4,8 --tensor 1 --layouts 'fold exact,sequential' --no-recompute
"""
_FILL_S = 10.0
_FILLED = 3
"""Number of best configs tried with encoders; the order may change with encoders."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune``."""

    parser = add_parser(commands, "tune", "find the fastest plan for a cluster", _DESCRIPTION, run)
    add = partial(add_flag, parser)
    add_layers_flags(parser, "--profile", "what 'pulse profile' wrote")
    add(
        "--cluster NAME|FILE",
        "one of 'pulse clusters' or a file; NAME:4 or FILE:4 has 4 nodes",
        reads=True,
        type=str,
        required=True,
    )
    add(
        "--global-batch-size B",
        "global batch size in samples",
        within=TO_MILLION,
        type=int,
        required=True,
    )
    add(
        "--dtype",
        "dtype without a profile (default: bfloat16 if the device has it, else float16)",
        choices=list(ELEMENT_BYTES),
    )
    add("--pipeline P[,P...]", "pipeline degrees to try (default: all)")
    add("--tensor T[,T...]", "tensor degrees to try (default 1,2,4,8)")
    add(
        "--context-parallel K[,K...]|auto",
        "numbers of ranks to try that share the tokens of a sample; auto: all that divide a node "
        "and can share them (default: auto if --profile has their costs, else 1)",
    )
    add("--micro-batch-size N[,N...]", "microbatch sizes to try (default: all powers of two)")
    add(
        "--layouts NAME[,NAME...]",
        f"layouts to try (default: all): {', '.join(LAYOUTS)}; fold stands for all folds",
    )
    again = parser.add_mutually_exclusive_group()
    add_flag(again, "--recompute", "recompute the activations of all layers")
    add_flag(
        again,
        "--no-recompute",
        "recompute nothing (default: as few layers as needed, fully or selectively)",
    )
    add(
        "--no-offload",
        "offload no activations (default: offload if the cluster has a host link and it is faster)",
    )
    add(
        "--offload-weights PATTERN",
        "keep the frozen weights of matching layers in host memory and copy them before each use "
        "(repeatable)",
        action="append",
        default=[],
    )
    add("--no-split-backward", "no split backward")
    add("--no-fsdp", "no FSDP2 or HSDP; they are predicted for comparison only")
    add("--no-ema", "keep no EMA, 4 bytes a parameter: for --pulse-ema-decay 0")
    add(
        "--grad-reduce-in-bf16",
        "reduce gradients in bfloat16, as Megatron's flag: 2 bytes a parameter less, and less "
        "to send",
    )
    add(
        "--optimizer",
        "optimizer of the run, whose state counts: adam (default), sgd, muon or lion",
        choices=["adam", "sgd", "muon", "lion"],
        default="adam",
    )
    add(
        "--optimizer-cpu-offload",
        "keep main parameters and Adam in host memory, as Megatron's flag: 6 bytes of a "
        "bfloat16 parameter stay on the device, and a step takes longer",
    )
    add(
        "--seconds S",
        "processor time of the search (default 28); on a busy machine up to four times as "
        "long; Ctrl-C ends it with the best so far",
        within=ABOVE_ZERO,
        default=28.0,
    )
    add_solver(parser, "solver of whole schedules (default auto)")
    add_encoder_costs(parser)
    add(
        "--self-conditioning P",
        "share of steps with self-conditioning, as --pulse-self-conditioning",
        within=SHARE,
        type=float,
    )
    add(
        "--dpo",
        "every step has a pass of the reference, of which weights that are trained have a frozen "
        "copy, and microbatches hold pairs, as with --pulse-loss dpo",
    )
    add(
        "--mix-buckets",
        "steps have samples of several buckets, as with --pulse-bucket-batch: one microbatch size "
        "and schedule for all (default: those of each bucket, if the profile has several)",
    )
    add(
        "--world-sizes N[,N...]",
        "elastic plans for these numbers of devices, into the folder of -o; --pulse-plan DIR "
        "takes the one for the ranks that are there",
    )
    add("--top N", "configs to list (default 10)", within=TO_MILLION, default=10)
    add(
        "--explain",
        "also show the search, refused configs, FSDP2's settings, and why the best is the best",
    )
    add_json(parser)
    add("-o, --output JSON", "write the best plan", writes=[".json"])


def run(args: argparse.Namespace) -> None:
    """Search, then print and write."""
    require(_faults(args))
    from megatron_pulse.cli.plan.tuning.tune_report import as_json, encoding, explanation, listing
    from megatron_pulse.cli.plan.tuning.tune_summary import summary
    from megatron_pulse.planner.bubble_fill.encoder_table import EncoderTable, read_table
    from megatron_pulse.planner.cluster.cluster import cluster
    from megatron_pulse.planner.plan_file.plan_file import save_plan
    from megatron_pulse.planner.tune.estimate import no_way_to_host
    from megatron_pulse.planner.tune.plans.to_plan import plan_of
    from megatron_pulse.planner.tune.report.fewer_devices_advice import scale_down
    from megatron_pulse.planner.tune.tune import UntunableError, check_choices
    from megatron_pulse.profile.warnings import (
        device_caution,
        rank_threads,
        spread_caution,
        thread_caution,
        whole_caution,
    )
    from megatron_pulse.profile.weight_offload import offload_weights

    where = cluster(args.cluster)
    if args.no_offload:
        where = replace(where, host=None)
    parts = elastic_clusters(args, where)
    faults: list[str] = []
    for part in parts.values() or [where]:
        try:
            check_choices(part, args.global_batch_size, choices_of(args))
        except UntunableError as error:
            faults.append(f"--world-sizes {part.num_devices}: {error}" if parts else str(error))
    require(faults)
    sooner = args.profile is None and where.peaks is not None  # reported before a profile is made
    if args.optimizer_cpu_offload and sooner and where.to_host is None:
        raise no_way_to_host(where)
    with as_user_error(ValueError):
        profile = offload_weights(given_profile(args, where), args.offload_weights)
    if args.mix_buckets:
        profile = replace(profile, shapes=())
    require(
        no_cascade(profile)
        + no_encoders_of_one_device(args, profile)
        + no_half_gradients(args, profile)
        + no_prediction_taken(args, profile)
        + one_first_pass(args)
        + no_context_costs(args, profile)
    )
    warn(
        where.memory_caution,
        "" if where.mixed else device_caution(profile, where.device),
        spread_caution(profile),
        thread_caution(profile.threads, rank_threads()),
    )
    if parts:
        tune_worlds(args, profile, parts)
        return
    encoders = EncoderTable([]) if args.encoders is None else read_table(args.encoders)
    if encoders.origin is not None:
        warn(*encoders.origin.cautions(profile))
    choices = choices_of(args)
    warn(unused_caution(args, evaluator_of(args, profile, where), choices))
    found, evaluator = search_with_slices(args, profile, where, choices)
    if any(outcome.stages.activations.recomputes for outcome in found.outcomes):
        warn(whole_caution(profile))
    best = found.outcomes[0]
    fewer = None if found.stopped else scale_down(evaluator, best, choices)
    plan, rate = plan_of(best, evaluator, found), best.throughput
    lines = ["", *listing(found, evaluator)]
    made: dict[str, Any] | None = None
    if args.encoders is not None:
        plans = [
            plan_of(outcome, evaluator, found)
            for outcome in found.outcomes[:_FILLED]
            if not outcome.extrapolated
        ]
        seconds = min(args.seconds, _FILL_S)
        with ProgressLine("filling bubbles", seconds, "s", timed=True):
            encoded = best_encoded(plans, encoders.components, seconds)
        plan, rate, made = encoded.plan, encoded.samples_per_s, encoded.figures()
        lines += ["", *encoding(encoded)]
    lines = [*summary(plan, rate, found, evaluator, fewer, args.output), *lines]
    if args.explain:
        lines += ["", *explanation(found, evaluator, flags_not_applied_to_fsdp(args))]
        lines += [] if fewer is None else [fewer.beside(best.throughput)]
    if args.output is not None:
        save_plan(plan, args.output)
        lines.append(f"plan written to {args.output}")
    print_result(args, lines, partial(as_json, found, evaluator, made, fewer))


def best_encoded(
    plans: Sequence[PlanFile], encoders: Sequence[Mapping[str, Any]], seconds: float
) -> EncodedPlan:
    """Fastest plan with its encoders, each as a bubble task or before the step.

    The plan's figures are computed anew. Raises UserError if no plan fits the memory.
    """
    from megatron_pulse.planner.bubble_fill.search import FillError
    from megatron_pulse.planner.tune.plans.encoder_policies import encode_plan
    from megatron_pulse.planner.tune.plans.verify_figures import recomputed

    found, faults = [], []
    for plan in plans:
        try:
            encoded = encode_plan(plan, encoders, seconds / len(plans))
        except (FillError, ValueError) as error:
            faults.append(str(error))
        else:
            found.append(replace(encoded, plan=recomputed(encoded.plan)))
    if not found:
        raise UserError(f"--encoders: {faults[0]}")
    return max(found, key=lambda encoded: encoded.samples_per_s)


def _faults(args: argparse.Namespace) -> list[str]:
    from megatron_pulse.planner.cluster.cluster import ClusterError, cluster

    is_folder = args.world_sizes is not None
    faults = command_faults(args, without=["output"] if is_folder else [])
    lists = ["pipeline", "tensor", "micro_batch_size", "world_sizes"]
    lists += ["context_parallel"] * (args.context_parallel != AUTO)
    faults += number_list_faults(args, *lists)
    for name in (args.layouts or "").split(","):
        if args.layouts is not None and not layouts_called(name.strip()):
            faults.append(f"--layouts: {unknown_name('layout', name.strip(), LAYOUTS)}")
    if is_folder:
        if args.encoders is not None:
            faults.append("--encoders: not with --world-sizes")
        if args.output is None or args.output.suffix:
            faults.append("--world-sizes writes a folder of plans: give -o DIR")
    if args.optimizer != "adam" and args.optimizer_cpu_offload:
        faults.append(f"--optimizer-cpu-offload is for Adam, not for --optimizer {args.optimizer}")
    if args.no_offload and args.offload_weights:
        faults.append("--no-offload and --offload-weights exclude each other: give one")
    if args.no_offload and args.optimizer_cpu_offload:
        faults.append("--no-offload and --optimizer-cpu-offload exclude each other: give one")
    faults += layers_faults(args, is_file=args.profile is not None)
    if args.profile is not None and args.dtype:
        faults.append("--dtype is for --backbone; a profile has its own")
    try:
        cluster(args.cluster)
    except ClusterError as error:
        faults.append(str(error))
    return faults
