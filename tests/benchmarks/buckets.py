"""Steps of five buckets, as a plan predicts them and as they are.

Profiles a UNet at each bucket's shape on two cores at once, and probes what two ranks have. A plan
of two pipeline devices is tuned and trained by, and the steps of each bucket are compared. Then the
same with one microbatch size for all buckets, by the same cuts: the gain of sizes of their own.
A machine's speed may drift between a profile and a run. Profiles and runs therefore alternate. The
prediction is the median of the plan's steps by each profile, the measurement the mean of all steps,
without their extreme tenths. The drift is the range of the predictions.

    .venv/bin/python -m tests.benchmarks.buckets --rounds 3 --json buckets.json
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_pulse.planner.layout.layouts import FOLD_EXACT
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.search.shape_steps import plan_shapes
from megatron_pulse.planner.tune.tune import tune
from megatron_pulse.profile.measurement.clock import mean_and_spread
from megatron_pulse.profile.profile import Profile
from tests.benchmarks.report import Flags, Report, count, some_of
from tests.benchmarks.steps import probed
from tests.ranks import run_ranks

BUCKETS = "32x32,24x40,40x24,16x32,48x32"
"""Height and width of the samples."""
OPTIONS: dict[str, Any] = {
    "sample_size": 32, "block_out_channels": [64, 128], "norm_num_groups": 16,
    "layers_per_block": 1, "transformer_depth": [0, 0], "mid_transformer_depth": 0,
    "buckets": BUCKETS,
}  # fmt: skip
PLANS = ("own", "one")
"""Plans whose buckets have microbatch sizes of their own, or one for all."""
SIZES, BATCH, STORED, WARM_UP = (1, 2, 4, 8), 16, 72, 2
"""Measured microbatch sizes, samples of a step, of a store, and untimed steps of a bucket."""


@dataclass(frozen=True)
class Cell:
    """Steps of one bucket, in seconds: predicted by each profile, and each as it was."""

    sizes: str
    bucket: str
    microbatches: int
    micro_batch_size: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        """Median of the predictions: a profile may have been disturbed."""
        return statistics.median(self.predicted)

    @property
    def measured_s(self) -> float:
        """Mean of the steps, as the profile takes means."""
        return mean_and_spread(self.measured)[0]

    @property
    def error(self) -> float:
        """Error of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def drift(self) -> float:
        """Range of the predictions, as a share of their median."""
        return (max(self.predicted) - min(self.predicted)) / self.predicted_s

    def cells(self) -> dict[str, Any]:
        """Columns, in milliseconds."""
        return {
            "sizes": self.sizes,
            "bucket": self.bucket,
            "M x b": f"{self.microbatches} x {self.micro_batch_size}",
            "steps": len(self.measured),
            "predicted": f"{1e3 * self.predicted_s:.0f}",
            "measured": f"{1e3 * self.measured_s:.0f}",
            "fastest": f"{1e3 * min(self.measured):.0f}",
            "drift, %": 100 * self.drift,
            "error, %": 100 * self.error,
        }


def measured_profile(sizes: tuple[int, ...]) -> Profile:
    """Profile of the UNet at all of its shapes and ``sizes``, in a process of its own."""
    from megatron_pulse.cli.import_megatron import prepare_profiling

    prepare_profiling()
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
    from megatron_pulse.profile.measurement.clock import RepetitionLimits
    from megatron_pulse.profile.measurement.measure import measure
    from megatron_pulse.runtime.measure.execution_modes import RUNNING
    from model_specs import load_backbone

    defer_wgrad()
    limits = RepetitionLimits(enough_s=0.1, limit_s=1.0)
    backbone = load_backbone("unet-tiny", OPTIONS)
    return measure(backbone, sizes, patience=limits, once_per_kind=True, threads=1, running=RUNNING)


def write_stores(folder: Path) -> str:
    """Latents of every shape, as --pulse-data names them."""
    import torch

    from megatron_pulse.data.latents.layout import LatentLayout, LatentType
    from megatron_pulse.data.latents.writer import LatentWriter

    names = []
    for text in BUCKETS.split(","):
        shape = (1, *map(int, text.split("x")))
        with LatentWriter(folder / text, LatentLayout(shape, 1, LatentType.FLOAT32, {})) as writer:
            for _ in range(STORED):
                writer.add(torch.randn(shape), 0, {})
            writer.close()
        names.append(f"latents:{folder / text}")
    return ",".join(names)


def steps_of_buckets(argv: list[str]) -> list[tuple[str, float]]:
    """A training run: the bucket of each step, and its seconds on this rank."""
    import megatron.training.training as training
    import torch

    from megatron_pulse.integration.loop.forward_backward import PulseSchedule
    from tests.integration.runs import train

    original, run = training.train_step, PulseSchedule.__call__
    found: list[tuple[str, float]] = []
    buckets: list[str] = []

    def call(self: PulseSchedule, **given: Any) -> Any:
        result = run(self, **given)
        assert self._last is not None
        buckets.append(self._last.bucket)
        return result

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        found.append((buckets[-1], time.perf_counter() - began))
        return result

    training.train_step, PulseSchedule.__call__ = timed, call  # type: ignore[method-assign]
    torch.utils.deterministic.fill_uninitialized_memory = False  # as users' runs have it
    train(argv)
    return found


def outcomes(evaluator: Evaluator, seconds: float) -> dict[str, Outcome]:
    """The tuner's pick, and the same cuts with one microbatch size."""
    choices = Choices((FOLD_EXACT,), (2,), (1,), SIZES)
    found = tune(evaluator, choices, seconds)
    best = found.outcomes[0]
    one = Tuning([evaluator.evaluate(best.config, best.synthesis, stages=best.stages)])
    same = replace(choices, micro_batch_size=(best.config.micro_batch_size,))
    plan_shapes(evaluator, one, same, seconds / 4)
    return dict(zip(PLANS, (best, one.outcomes[0]), strict=True))


def step_s(shape: ShapeOutcome, evaluator: Evaluator) -> float:
    """Seconds of a shape's step by the layer times of ``evaluator``, which is of that shape."""
    config, old = shape.outcome.config, shape.outcome.stages
    stages = evaluator.stages.build(config, old.partition, old.activations)
    return evaluator.evaluate(config, shape.outcome.synthesis, stages=stages).step_s


def compare(
    name: str, outcome: Outcome, evaluator: Evaluator, data: str, folder: Path, args: Any
) -> list[Cell]:
    """Cells of all buckets by the plan of ``outcome``."""
    plan = plan_of(outcome, evaluator)
    save_plan(plan, folder / "plan.json")
    steps = len(plan.shapes) * (args.steps + WARM_UP + 1)
    argv = [
        "--pulse-plan", str(folder / "plan.json"), "--pulse-data", data,
        "--train-iters", str(steps), "--eval-iters", "0", "--lr", "1e-4", "--clip-grad", "1.0",
        "--log-interval", "1000", "--pulse-no-progress", "--pulse-timeout-s", "60",
        "--pulse-class-dropout", "0.1",
    ]  # fmt: skip
    sizes = tuple(sorted({shape.plan.micro_batch_size for shape in plan.shapes}))
    predicted: dict[str, list[float]] = defaultdict(list)
    measured: dict[str, list[float]] = defaultdict(list)
    for number in range(args.rounds + 1):
        profile = run_ranks(2, measured_profile, sizes, timeout_s=1800)[0]
        for index, (shape, found) in enumerate(zip(plan.shapes, outcome.shapes, strict=True)):
            at = evaluator.on(evaluator.cluster, profile=profile.at_shape(index))
            predicted[shape.name].append(step_s(found, at))
        if number == args.rounds:
            break
        took: dict[str, list[float]] = defaultdict(list)
        for each in zip(*run_ranks(2, steps_of_buckets, argv, timeout_s=900), strict=True):
            took[each[0][0]].append(max(seconds for _, seconds in each))
        for bucket, seconds in took.items():
            measured[bucket] += seconds[WARM_UP:]
    return [
        Cell(
            name,
            shape.name,
            shape.plan.num_microbatches,
            shape.plan.micro_batch_size,
            tuple(predicted[shape.name]),
            tuple(measured[shape.name]),
        )
        for shape in plan.shapes
    ]


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--steps", 7, "of each bucket in a run, in the mean, after two others")
    flags.add("--rounds", 3, "runs, with a profile before each and one after the last", type=count)
    flags.add("--plans", list(PLANS), "with commas between", type=some_of(PLANS))
    flags.add("--seconds", 12.0, "of the tuner")
    args = flags.parse_args()
    cluster = run_ranks(2, probed, timeout_s=300)[0]
    profile = run_ranks(2, measured_profile, SIZES, timeout_s=1800)[0]
    evaluator = Evaluator(profile, cluster, BATCH, state=ParameterState(ema=True))
    report = Report(args.json)
    found = outcomes(evaluator, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        data = write_stores(Path(folder))
        for name in args.plans:
            outcome = found[name]
            cells = compare(name, outcome, evaluator, data, Path(folder), args)
            for cell in cells:
                report.add(cell, cell.cells())
            worst = max(abs(cell.error) for cell in cells)
            shares = [
                (shape.share, cell) for shape, cell in zip(outcome.shapes, cells, strict=True)
            ]
            mean = sum(share * cell.measured_s for share, cell in shares)
            by_plan = sum(share * cell.predicted_s for share, cell in shares)
            print(f"{name}: largest error {worst:.1%}; mean step {1e3 * mean:.0f} ms, predicted "
                  f"{1e3 * by_plan:.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
