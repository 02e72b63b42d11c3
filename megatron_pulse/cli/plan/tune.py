"""``pulse tune``: how a backbone is best trained on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import add_layers_flags, layers_faults, trained_backbone
from megatron_pulse.cli.errors import (
    add_parser,
    check_file,
    mending,
    no_file,
    out_of,
    require,
    warn,
)
from megatron_pulse.cli.output import add_json, answer, json_faults, overwritten
from megatron_pulse.flag_fields import ABOVE_ZERO, SHARE, TO_MILLION

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone
    from megatron_pulse.planner.cluster.cluster import Cluster
    from megatron_pulse.planner.partition.memory import ParameterState
    from megatron_pulse.planner.plan_file.plan_file import PlanFile
    from megatron_pulse.planner.tune.config import Choices
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.plans.policies import EncodedPlan
    from megatron_pulse.planner.tune.searching.tuning import Tuning
    from megatron_pulse.profile.profile import Profile

_DESCRIPTION = """\
Decides together what otherwise takes a week of trying: pipeline, data and tensor degree, microbatch
size, where stages are (one device, sequential, interleaved, fold with all skips at home, fold whose
skips may travel, two waves), the schedule and how much memory it may use, recomputation, split
backwards, the distributed optimizer, and which ranks share a node.

Every config's time is that of its own schedule, simulated with these links, with the reduction of
gradients and the optimizer on top; its memory is that schedule's real peak and what Megatron keeps
for a parameter. Nothing is run. Times are as good as the profile: without --profile they are
estimated from the device's peaks, and ratios are better than seconds.

The search simulates one config of every degree and layout, then the most promising first, until
nothing that is left can be better, or for --seconds, whole schedules from a solver for the best
three among them; the profile, and compiling once on a machine, come before that. It says what is
proved of the best config: of its schedule, and among all configs; and what torch's FSDP2 would come
to at its best, with ideal collectives, so that you can take that where it is faster.

  samples/s    of the whole cluster          b, M    samples of a microbatch, microbatches of a step
  bubble       of the pipeline's time, what the mean device waits
  GB           on the fullest device         MB      sent for one sample, by pipelines and replicas
  gap          how far the schedule may be from the shortest, at most (a search's own bound), if
               no message waits for another on a shared link

examples:
  pulse tune --backbone hunyuan-dit-3b --cluster pulse-910a --global-batch-size 512 -o plan.json
  pulse tune --profile profile.json --cluster dgx-a100:4 --global-batch-size 256 --explain
  pulse tune --profile profile.json --cluster dgx-a100:4 --global-batch-size 256 \\
      --worlds 32,24,16 -o plans          # for a run that goes on when it has lost nodes
  pulse tune --backbone uvit-2.7b --cluster ours.yaml --global-batch-size 256 \\
      --pipeline 2,4,8 --tensor 1 --layouts 'fold exact,sequential' --no-recompute
"""
_PROFILED = (1, 8)
_FILL_S = 10.0
_FILLED = 3
"""Configs that encoders are tried in: the fastest without them need not be with them."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune``."""
    from megatron_pulse.planner.layout.layouts import LAYOUTS
    from megatron_pulse.planner.schedule.ilp.solvers import Solver
    from megatron_pulse.profile.devices import ELEMENT_BYTES

    parser = add_parser(
        commands, "tune", "find the best way to train on a cluster", _DESCRIPTION, run
    )
    add = parser.add_argument
    add_layers_flags(parser, "--profile", "what 'pulse profile' wrote")
    add(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help="one of 'pulse clusters' or a file; NAME:4 is NAME with 4 nodes",
    )
    add("--global-batch-size", type=int, required=True, metavar="B", help="samples of a step")
    add(
        "--dtype",
        choices=list(ELEMENT_BYTES),
        help="without a profile (default: bfloat16 if the device has it, else float16)",
    )
    add("--pipeline", metavar="P[,P...]", help="pipeline degrees to try (default: all)")
    add("--tensor", metavar="T[,T...]", help="tensor degrees to try (default 1,2,4,8)")
    add("--micro-batch-size", metavar="N[,N...]", help="to try (default: all powers of two)")
    add("--layouts", metavar="NAME[,NAME...]", help=f"to try (default: all): {', '.join(LAYOUTS)}")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--recompute", action="store_true", help="recompute all layers' activations")
    again.add_argument(
        "--no-recompute",
        action="store_true",
        help="never do (default: of as few layers as needed, all or what is cheap of them)",
    )
    add(
        "--no-offload",
        action="store_true",
        help="have no activations wait on the host (default: where the cluster has a link to it, "
        "and that is faster)",
    )
    add("--no-split", action="store_true", help="never put off weight gradients")
    add(
        "--no-averages",
        action="store_true",
        help="keep no averages of the weights, 4 bytes a parameter: for --pulse-ema-decay 0",
    )
    add(
        "--grad-reduce-in-bf16",
        action="store_true",
        help="sum gradients in bfloat16, as Megatron's flag: 2 bytes a parameter less, and less to "
        "reduce; a run of the plan does so",
    )
    add("--seconds", type=float, default=28.0, metavar="S", help="to decide (default 28)")
    add(
        "--solver",
        choices=("auto", *map(str, Solver)),
        default="auto",
        help="for whole schedules (default auto)",
    )
    add(
        "--encoders",
        type=Path,
        metavar="JSON",
        help="frozen components to run for the next batch where devices would idle: their layers' "
        "costs (form: megatron_pulse/planner/fill/README.md)",
    )
    add(
        "--self-conditioning",
        type=float,
        metavar="P",
        help="share of the steps that run all forwards once before, as --pulse-self-conditioning",
    )
    add(
        "--worlds",
        metavar="N[,N...]",
        help="a plan for each of these numbers of the cluster's devices, into the folder of -o: "
        "--pulse-plan DIR takes the one for the ranks that are there",
    )
    add("--top", type=int, default=10, metavar="N", help="configs to list (default 10)")
    add("--explain", action="store_true", help="why the best is the best, and examples of refusals")
    add_json(parser)
    add("-o", "--output", type=Path, metavar="JSON", help="write the best as a plan to run")


def run(args: argparse.Namespace) -> None:
    """Search, then print and write."""
    require(_faults(args))
    from megatron_pulse.cli.plan.tune_report import as_json, encoding, report
    from megatron_pulse.planner.cluster.cluster import cluster
    from megatron_pulse.planner.fill.table import EncoderTable, read_table
    from megatron_pulse.planner.plan_file.plan_file import save_plan
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.plans.to_plan import plan_of
    from megatron_pulse.planner.tune.searching.fewer import fewer_devices
    from megatron_pulse.planner.tune.tune import UntunableError, check_choices
    from megatron_pulse.profile.cautions import (
        device_caution,
        rank_threads,
        spread_caution,
        thread_caution,
    )

    where = cluster(args.cluster)
    if args.no_offload:
        where = replace(where, host=None)
    parts = _worlds(args, where)
    faults: list[str] = []
    for part in parts.values() or [where]:
        try:
            check_choices(part, args.global_batch_size, _choices(args))
        except UntunableError as error:
            faults.append(f"--worlds {part.num_devices}: {error}" if parts else str(error))
    require(faults)
    with mending(ValueError):
        profile = _profile(args, where)
    require(_no_cascade(profile) + _no_half_gradients(args, profile))
    if parts:
        _tune_worlds(args, profile, parts)
        return
    warn(
        device_caution(profile, where.device),
        spread_caution(profile),
        thread_caution(profile.threads, rank_threads()),
    )
    encoders = EncoderTable([]) if args.encoders is None else read_table(args.encoders)
    if encoders.origin is not None:
        warn(*encoders.origin.cautions(profile))
    choices = _choices(args)
    of = profile, where, args.global_batch_size
    backbone = _backbone_of(profile) if any(t > 1 for t in choices.tensor) else None
    divides = backbone is not None and backbone.divides_sequences
    if args.self_conditioning is not None:
        require(_no_prediction_taken(profile))
    heads = backbone.num_heads if backbone else ()
    evaluator = Evaluator(*of, divides, heads, args.self_conditioning or 0.0, _state(args))
    found = _tuned(args, evaluator, choices)
    lines = report(found, evaluator, args.explain)
    if (fewer := fewer_devices(evaluator, found.outcomes[0], choices)) is not None:
        lines.append(fewer.beside(found.outcomes[0].throughput))
    made: dict[str, Any] | None = None
    encoded: EncodedPlan | None = None
    if args.encoders is not None:
        plans = [
            plan_of(outcome, evaluator, divides)
            for outcome in found.outcomes[:_FILLED]
            if not outcome.extrapolated
        ]
        encoded = best_encoded(plans, encoders.components, min(args.seconds, _FILL_S))
        lines += ["", *encoding(encoded)]
        made = encoded.figures()
    if args.output is not None:
        plain = plan_of(found.outcomes[0], evaluator, divides)
        save_plan(encoded.plan if encoded else plain, args.output)
        lines.append(f"plan written to {args.output}")
    answer(args, lines, partial(as_json, found, evaluator, made, fewer))


def _worlds(args: argparse.Namespace, where: Cluster) -> dict[int, Cluster]:
    """The parts of the cluster that have so many devices as ``--worlds`` says, the most first."""
    worlds = sorted(_numbers(args.worlds) or (), reverse=True)
    parts = {world: where.part(world) for world in worlds}
    require(
        [
            f"--worlds {world}: {where.name} has {where.nodes} node(s) of "
            f"{where.devices_per_node} devices: give whole nodes of it, or part of one"
            for world, part in parts.items()
            if part is None
        ]
    )
    return {world: part for world, part in parts.items() if part is not None}


def _tune_worlds(args: argparse.Namespace, profile: Profile, parts: Mapping[int, Cluster]) -> None:
    """A plan for each number of devices, each searched for by itself; a folder of them.

    A run goes from one to the other with its optimizer's state, so all have that of the first, or
    of the plans that are there already, divided over the replicas or not.
    """
    from megatron_pulse.cli.plan.tune_report import as_json
    from megatron_pulse.planner.plan_file.plan_file import save_plan
    from megatron_pulse.planner.plan_file.worlds import optimizer_beside, world_file
    from megatron_pulse.planner.tune.evaluate import Evaluator
    from megatron_pulse.planner.tune.plans.to_plan import plan_of
    from megatron_pulse.planner.tune.tune import UntunableError

    choices = _choices(args)
    with mending(ValueError):
        there = optimizer_beside(args.output, list(parts))
    if there is not None:
        choices = replace(choices, distributed_optimizer=(there,))
    backbone = _backbone_of(profile)
    divides = backbone is not None and backbone.divides_sequences
    heads = backbone.num_heads if backbone else ()
    lines: list[str] = []
    records: dict[str, Any] = {}
    faults: list[str] = []
    for world, part in parts.items():
        of = profile, part, args.global_batch_size, divides, heads
        evaluator = Evaluator(*of, args.self_conditioning or 0.0, _state(args))
        try:
            found = _tuned(args, evaluator, choices)
        except UntunableError as error:
            beside = (
                f" (with the kind of optimizer of {next(iter(records))} devices)" if records else ""
            )
            faults.append(f"--worlds {world}: {error}{beside}")
            continue
        best = found.outcomes[0]
        choices = replace(choices, distributed_optimizer=(best.config.distributed_optimizer,))
        file = world_file(args.output, world)
        save_plan(plan_of(best, evaluator, divides), file)
        lines.append(f"{world} devices: {best.config}; {best.throughput:.4g} samples/s; {file}")
        if found.opponent is not None and found.opponent.throughput > best.throughput:
            lines.append(f"  {found.opponent.beside(best.throughput)}")
        records[str(world)] = as_json(found, evaluator, None)
    answer(args, lines, lambda: records)
    require(faults)


def best_encoded(
    plans: Sequence[PlanFile], encoders: Sequence[Mapping[str, Any]], seconds: float
) -> EncodedPlan:
    """The plan that is fastest with its encoders, each of them in idle time or in front, and its
    figures worked out again.

    Raises UserError where none has the memory.
    """
    from megatron_pulse.faults import UserError
    from megatron_pulse.planner.fill.search import FillError
    from megatron_pulse.planner.tune.plans.policies import encode_plan
    from megatron_pulse.planner.tune.plans.recompute import recomputed

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


def _tuned(args: argparse.Namespace, evaluator: Evaluator, choices: Choices) -> Tuning:
    """The best configs with whole schedules, beneath a bar of the time that they may take."""
    from tqdm import tqdm

    from megatron_pulse.planner.tune.tune import FINISH_SHARE, tune

    total, finish_s = round(args.seconds), FINISH_SHARE * args.seconds
    with tqdm(total=total, unit="s", delay=2, leave=False, disable=None) as bar:

        def progress(what: str, now: Tuning) -> None:
            bar.set_description(what, refresh=False)
            bar.update(min(round(now.seconds), total) - bar.n)
            if now.outcomes:
                bar.set_postfix_str(f"{now.outcomes[0].throughput:.4g} samples/s", refresh=False)

        return tune(
            evaluator, choices, args.seconds - finish_s, finish_s, args.solver, args.top, progress
        )


def _profile(args: argparse.Namespace, where: Cluster) -> Profile:
    """The given profile, or an analytic one on the cluster's device."""
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
    from megatron_pulse.cli.megatron import prepare_profiling
    from megatron_pulse.profile.devices import Roofline

    prepare_profiling()
    from megatron_pulse.profile.analytic import analyse
    from megatron_pulse.runtime.measure.running import RUNNING

    roofline = Roofline(device, args.dtype or device.half_dtype)
    backbone = trained_backbone(args, roofline.dtype)
    return analyse(backbone, _PROFILED, roofline, progress=True, running=RUNNING)


def _backbone_of(profile: Profile) -> Backbone | None:
    """What was profiled, which says how tensor parallelism can divide it; None if not known."""
    from model_specs import load_recorded

    try:
        return load_recorded(profile.backbone)
    except (KeyError, ValueError):
        return None


def _no_cascade(profile: Profile) -> list[str]:
    if len(profile.at(profile.micro_batch_sizes[0]).starts) == 1:
        return []
    return [
        f"{profile.backbone['name']}: cascades are not searched for; 'pulse partition' and 'pulse "
        "schedule' lay one over P devices, and it trains with --pipeline-model-parallel-size P"
    ]


def _no_half_gradients(args: argparse.Namespace, profile: Profile) -> list[str]:
    if not args.grad_reduce_in_bf16 or profile.dtype == "bfloat16":
        return []
    return [f"--grad-reduce-in-bf16: for bfloat16, and the profile is of {profile.dtype}"]


def _no_prediction_taken(profile: Profile) -> list[str]:
    backbone = _backbone_of(profile)
    if backbone is None or backbone.takes_prediction:
        return []
    takes, predicts = backbone.input_spec.shape[0], backbone.output_spec.shape[0]
    return [
        f"--self-conditioning: {backbone.name} takes {takes} channels and predicts {predicts}; who "
        "conditions itself takes twice as many as it predicts (--option in_channels=8)"
    ]


def _state(args: argparse.Namespace) -> ParameterState:
    from megatron_pulse.planner.partition.memory import ParameterState

    return ParameterState(not args.no_averages, args.grad_reduce_in_bf16)


def _choices(args: argparse.Namespace) -> Choices:
    from megatron_pulse.planner.layout.layouts import LAYOUTS
    from megatron_pulse.planner.tune.config import Choices, Recompute

    choices = Choices()
    layouts = choices.layouts
    if args.layouts is not None:
        layouts = tuple(LAYOUTS[name.strip()] for name in args.layouts.split(","))
    recompute = choices.recompute
    if args.recompute or args.no_recompute:
        recompute = (Recompute.ALWAYS if args.recompute else Recompute.NEVER,)
    return Choices(
        layouts,
        _numbers(args.pipeline),
        _numbers(args.tensor) or choices.tensor,
        _numbers(args.micro_batch_size),
        (False,) if args.no_split else choices.split,
        choices.ample,
        recompute,
    )


def _numbers(text: str | None) -> tuple[int, ...] | None:
    """Distinct numbers above 0, ascending; raises ValueError for other text."""
    if text is None:
        return None
    numbers = sorted({int(word) for word in text.split(",")})
    if numbers[0] < 1:
        raise ValueError(text)
    return tuple(numbers)


def _faults(args: argparse.Namespace) -> list[str]:
    from megatron_pulse.planner.layout.layouts import LAYOUTS

    faults = out_of(TO_MILLION, args, "global_batch_size", "top")
    for name in ("pipeline", "tensor", "micro_batch_size", "worlds"):
        try:
            _numbers(getattr(args, name))
        except ValueError:
            flag = f"--{name.replace('_', '-')}"
            faults.append(f"{flag} {getattr(args, name)}: write whole numbers above 0 as 1,2,4")
    for name in (args.layouts or "").split(","):
        if args.layouts is not None and name.strip() not in LAYOUTS:
            faults.append(f"--layouts: {name.strip()!r} is none of: {', '.join(LAYOUTS)}")
    if args.worlds is not None:
        faults += [
            f"{flag}: not with --worlds" for flag in ("--encoders",) if args.encoders is not None
        ]
        if args.output is None or args.output.suffix:
            faults.append("--worlds writes a plan for each into a folder: give -o DIR")
    faults += out_of(ABOVE_ZERO, args, "seconds")
    faults += out_of(SHARE, args, "self_conditioning")
    faults += layers_faults(args, profile=args.profile)
    if args.profile is not None and args.dtype:
        faults.append("--dtype is for --backbone; a profile has its own")
    if args.encoders is not None:
        faults += no_file(encoders=args.encoders)
    if args.worlds is None:
        faults += check_file(args.output, "--output", ".json")
    faults += json_faults(args)
    written = {"--output": args.output, "--json": args.json}
    return faults + overwritten(written, args.profile, args.cluster, args.encoders)
