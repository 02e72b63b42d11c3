"""The tuner's predictions against real training steps, over degrees, sizes and layouts.

Profiles a U-ViT, a UNet and a module of tokens on one core, and on two at once, and probes what two
ranks have; then, for each config, with the profile of as many ranks, writes the plan that the tuner
would write, trains by it (Megatron's own ``train_step``: pipeline, collectives of replicas and of
tensor- and context-parallel ranks, optimizer), and compares the step.
At most two ranks run at once, because two cores do.

    .venv/bin/python -m tests.benchmarks.steps --only "D=2" --steps 5
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout, Gathering
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LOOP, ROW, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.fsdp_outcome import fsdp_outcome
from megatron_pulse.profile.profile import Profile
from model_specs import allow, load_backbone
from tests.benchmarks.busy import BACKBONES, profile
from tests.benchmarks.report import Flags, Report
from tests.integration import tiny_tokens
from tests.integration.test_families import Family, write_latents
from tests.ranks import run_ranks

SIZES = (1, 2, 4)
WARM_UP = 2
CASES: tuple[tuple[Config, int], ...] = (
    (Config(1, 1, 1, 2, WHOLE), 4),
    (Config(1, 1, 1, 4, WHOLE), 4),
    (Config(2, 1, 1, 1, FOLD_EXACT), 8),
    (Config(2, 1, 1, 2, FOLD_EXACT), 2),
    (Config(2, 1, 1, 2, FOLD_EXACT), 8),
    (Config(2, 1, 1, 4, FOLD_EXACT), 4),
    (Config(2, 1, 1, 2, FOLD_EXACT, split=True), 8),
    (Config(2, 1, 1, 2, ROW), 4),
    (Config(2, 1, 1, 4, ROW), 8),
    (Config(2, 1, 1, 2, LOOP), 8),
    (Config(1, 2, 1, 1, WHOLE), 2),
    (Config(1, 2, 1, 4, WHOLE), 2),
    (Config(1, 2, 1, 2, WHOLE, distributed_optimizer=True), 2),
    (Config(1, 2, 1, 4, WHOLE, distributed_optimizer=True), 1),
    (Config(1, 1, 2, 2, WHOLE), 4),
    (Config(1, 1, 2, 4, WHOLE), 2),
    (Config(1, 1, 2, 2, WHOLE, recompute=Recompute.ALWAYS), 4),
)
"""Config and microbatches of a step on one pipeline."""
TOKENS = "tokens"
"""A transformer without a family, of 1,024 tokens, that two ranks share."""
MODULE: tuple[str, dict[str, Any]] = (
    f"{tiny_tokens.__file__}:build",
    {"width": 256, "heads": 8, "side": 64},
)
OF_TOKENS: tuple[tuple[Config, int], ...] = (
    (Config(1, 1, 1, 1, WHOLE), 4),
    (Config(1, 1, 1, 1, WHOLE, context=2), 4),
    (Config(1, 1, 1, 2, WHOLE, context=2), 4),
    (Config(1, 1, 1, 1, WHOLE, recompute=Recompute.ALWAYS, context=2), 4),
)
SHARDED: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (2, 4, 1, {}),
    (2, 4, 4, {"gathering": Gathering.MICROBATCH}),
    (4, 2, 2, {"prefetch": 2}),
    (1, 4, 2, {"gathering": Gathering.STEP, "reduce_once": True}),
)
"""FSDP over two ranks: microbatch size, number, layers of a unit, and the rest of its layout."""


@dataclass(frozen=True)
class Step:
    """Seconds of one step: all of it, in forwards and backwards, and computing."""

    whole_s: float
    pipeline_s: float
    busy_s: float


@dataclass(frozen=True)
class Cell:
    """A step as predicted, and as measured on the rank that computes longest; medians."""

    backbone: str
    config: str
    microbatches: int
    samples: int
    predicted: Step
    measured: Step
    error: float
    """Of the prediction, as a share of what was measured."""

    def cells(self) -> dict[str, Any]:
        """Milliseconds: whole step, then its pipeline and the busiest rank's computing."""
        pairs = zip(astuple(self.predicted), astuple(self.measured), strict=True)
        names = ("step", "pipeline", "computing")
        shown = {
            n: f"{1e3 * p:.0f} / {1e3 * m:.0f}" for n, (p, m) in zip(names, pairs, strict=True)
        }
        where = {"backbone": self.backbone, "config": self.config, "M": self.microbatches}
        return {**where, **shown, "error, %": 100 * self.error}


def measured_profile(kind: str) -> Any:
    """A measured profile in a process of its own, as runs have their layers."""
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
    from megatron_pulse.profile.measurement.clock import RepetitionLimits
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    defer_wgrad()
    limits = RepetitionLimits(enough_s=0.2)
    how = {"patience": limits, "once_per_kind": True, "running": RUNNING}
    if kind != TOKENS:
        return profile(kind, SIZES, **how)
    import torch

    from megatron_pulse.profile.measurement.context_rank import with_context_costs
    from megatron_pulse.profile.measurement.measure import measure

    torch.set_num_threads(1)
    allow(MODULE[0])
    backbone = load_backbone(*MODULE)
    whole = measure(backbone, SIZES, **how)
    return with_context_costs(
        whole, backbone, lambda part, size: measure(part, SIZES[-1:], context=size, **how)
    )


def probed() -> Cluster | None:
    """What two ranks have, on rank 0."""
    import torch
    import torch.distributed as dist

    from megatron_pulse.runtime.measure.probe import ProbeSettings, probe

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = probe(ProbeSettings("this machine", torch.device("cpu")))
    return None if found is None else found.cluster


def steps(argv: list[str]) -> list[Step]:
    """A training run; how long each step was on this rank."""
    import megatron.training.training as training
    import torch

    from megatron_pulse.integration.loop.forward_backward import PulseSchedule
    from tests.integration.runs import train

    original, run = training.train_step, PulseSchedule.__call__
    found: list[Step] = []
    schedules: list[PulseSchedule] = []

    def call(self: PulseSchedule, **given: Any) -> Any:
        schedules[:] = [self]
        return run(self, **given)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        seconds = time.perf_counter() - began
        inside = schedules[0].step_time
        assert inside is not None
        found.append(Step(seconds, inside.window_s, inside.busy_s))
        return result

    training.train_step, PulseSchedule.__call__ = timed, call  # type: ignore[method-assign]
    # Tests fill what is not initialised, users' runs do not.
    torch.utils.deterministic.fill_uninitialized_memory = False
    train(argv)
    return found


def predict(evaluator: Evaluator, config: Config, path: Path) -> Step:
    """The plan of ``config``, in ``path``, and its step by the tuner."""
    count = config.num_microbatches(evaluator.global_batch_size)
    if config.fsdp is not None:
        of = config.fsdp, config.micro_batch_size, ActivationPolicies()
        outcome = fsdp_outcome(evaluator, *of)
        save_plan(plan_of(outcome, evaluator), path)
        return Step(outcome.step_s, outcome.pipeline_s, max(outcome.timeline.busy))
    found = synthesize(evaluator.problem(config, count), effort=20)
    outcome = evaluator.evaluate(config, found)
    save_plan(plan_of(outcome, evaluator), path)
    return Step(outcome.step_s, outcome.pipeline_s, max(outcome.timeline.busy))


def compare(kind: str, cluster: Cluster, num_steps: int, only: str) -> Iterator[Cell]:
    """Every case of one backbone."""
    measured: dict[int, Profile] = {
        ranks: run_ranks(ranks, measured_profile, kind, timeout_s=600)[0] for ranks in (1, 2)
    }
    name, options = MODULE if kind == TOKENS else BACKBONES[kind]
    if kind == TOKENS:
        allow(name)
    with tempfile.TemporaryDirectory() as folder:
        words = {k: v if isinstance(v, tuple) else (v,) for k, v in options.items()}
        given = tuple(f"{k}={','.join(map(str, v))}" for k, v in words.items())
        write_latents(Path(folder, "latents"), Family(name, options=given))
        num_layers = len(measured[1].layers)
        sharded = [
            (Config(1, 2, 1, b, WHOLE, fsdp=FsdpLayout.of_size(num_layers, n, group=2, **rest)), m)
            for b, m, n, rest in SHARDED
        ]
        cases = OF_TOKENS if kind == TOKENS else (*CASES, *sharded)
        for config, count in cases:
            if only not in str(config):
                continue
            samples = count * config.micro_batch_size * config.data
            ranks = config.pipeline * config.replicas * config.tensor
            machine = Cluster(**{**vars(cluster), "devices_per_node": ranks})
            heads = load_backbone(name, options).num_heads
            of = measured[ranks], machine, samples, False, heads
            evaluator = Evaluator(*of, state=ParameterState(ema=True))
            plan = Path(folder, "plan.json")
            predicted = predict(evaluator, config, plan)
            argv = [
                "--pulse-plan", str(plan), "--pulse-data", f"latents:{folder}/latents",
                "--train-iters", str(num_steps + WARM_UP), "--eval-iters", "0", "--lr", "1e-4",
                "--clip-grad", "1.0", "--log-interval", "1000", "--pulse-no-progress",
                "--pulse-timeout-s", "60",
            ]  # fmt: skip
            if kind == TOKENS:
                argv += ["--pulse-module", name, "--pulse-objective", "v"]
                argv += ["--pulse-class-dropout", "0"]
                argv += [w for each in given for w in ("--pulse-option", each)]
            rows = run_ranks(ranks, steps, argv, timeout_s=600)
            middle = [
                Step(*map(statistics.median, zip(*map(astuple, row[WARM_UP:]), strict=True)))
                for row in rows
            ]
            slowest = max(middle, key=lambda step: step.busy_s)
            error = predicted.whole_s / slowest.whole_s - 1
            yield Cell(kind, str(config), count, samples, predicted, slowest, error)


def summary(cells: list[Cell]) -> dict[str, float]:
    """Errors and correlations of all cells."""
    errors = sorted(abs(cell.error) for cell in cells)
    pairs = [(cell.predicted.whole_s, cell.measured.whole_s, cell.samples) for cell in cells]
    each = [(p / n, m / n) for p, m, n in pairs]
    ranked = partial(statistics.correlation, method="ranked")
    return {
        "configs": len(cells),
        "median_error": statistics.median(errors),
        "error_90th_percentile": errors[9 * (len(errors) - 1) // 10],
        "largest_error": errors[-1],
        "rank_correlation": ranked([p for p, _, _ in pairs], [m for _, m, _ in pairs]),
        "rank_correlation_per_sample": ranked([p for p, _ in each], [m for _, m in each]),
    }


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--steps", 7, "of each config, after two others")
    flags.add("--only", "", "configs with this in their name")
    flags.add("--backbone", None, "one of them alone", choices=[*BACKBONES, TOKENS])
    args = flags.parse_args()
    cluster = run_ranks(2, probed, timeout_s=300)[0]
    print(f"{cluster}\npredicted / measured, ms")
    report = Report(args.json)
    for kind in (*BACKBONES, TOKENS):
        if args.backbone not in (None, kind):
            continue
        for cell in compare(kind, cluster, args.steps, args.only):
            report.add(cell, cell.cells())
    if len(report.rows) > 1:
        for name, value in summary(report.rows).items():
            print(f"{name.replace('_', ' ')}: {value:.3f}")


if __name__ == "__main__":
    main()
