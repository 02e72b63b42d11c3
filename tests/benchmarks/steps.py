"""The tuner's predictions against real training steps, over degrees, sizes and layouts.

Profiles a U-ViT and a UNet on one core, and on two at once, and probes what two ranks have; then,
for each config, with the profile of as many ranks, writes the plan that the tuner would write,
trains by it (Megatron's own ``train_step``: pipeline, collectives of replicas and of
tensor-parallel ranks, optimizer), and compares the step.
At most two ranks run at once, because two cores do.

    .venv/bin/python -m tests.benchmarks.steps --only "D=2" --steps 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, LOOP, ROW, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.profile import Profile
from model_specs import load_backbone
from tests.benchmarks.busy import BACKBONES
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
    predicted_parts: dict[str, float]

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted.whole_s / self.measured.whole_s - 1


def profile(kind: str) -> Any:
    """A measured profile in a process of its own."""
    import torch

    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad
    from megatron_pulse.profile.measurement.clock import RepetitionLimits
    from megatron_pulse.profile.measurement.measure import measure
    from megatron_pulse.runtime.measure.execution_modes import RUNNING

    torch.set_num_threads(1)
    defer_wgrad()
    name, options = BACKBONES[kind]
    return measure(
        load_backbone(name, options),
        SIZES,
        patience=RepetitionLimits(enough_s=0.2),
        once_per_kind=True,
        running=RUNNING,
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


def predict(evaluator: Evaluator, config: Config, path: Path) -> tuple[Step, dict[str, float]]:
    """The plan of ``config``, in ``path``, and its step by the tuner."""
    count = config.num_microbatches(evaluator.global_batch_size)
    found = synthesize(evaluator.problem(config, count), effort=20)
    outcome = evaluator.evaluate(config, found)
    save_plan(plan_of(outcome, evaluator), path)
    parts = {k: v for k, v in outcome.figures().items() if k.endswith("_s") and type(v) is float}
    return Step(outcome.step_s, outcome.pipeline_s, max(outcome.timeline.busy)), parts


def compare(kind: str, cluster: Cluster, num_steps: int, only: str) -> Iterator[Cell]:
    """Every case of one backbone."""
    measured: dict[int, Profile] = {
        ranks: run_ranks(ranks, profile, kind, timeout_s=600)[0] for ranks in (1, 2)
    }
    name, options = BACKBONES[kind]
    with tempfile.TemporaryDirectory() as folder:
        given = tuple(
            f"{k}={','.join(map(str, v))}" if isinstance(v, tuple) else f"{k}={v}"
            for k, v in options.items()
        )
        write_latents(Path(folder, "latents"), Family(name, options=given))
        for config, count in CASES:
            if only not in str(config):
                continue
            samples = count * config.micro_batch_size * config.data
            ranks = config.pipeline * config.data * config.tensor
            machine = Cluster(**{**vars(cluster), "devices_per_node": ranks})
            heads = load_backbone(name, options).num_heads
            of = measured[ranks], machine, samples, False, heads
            evaluator = Evaluator(*of, state=ParameterState(ema=True))
            plan = Path(folder, "plan.json")
            predicted, parts = predict(evaluator, config, plan)
            argv = ["--pulse-plan", str(plan), "--pulse-data", f"latents:{folder}/latents"]
            argv += ["--train-iters", str(num_steps + WARM_UP), "--eval-iters", "0"]
            argv += ["--lr", "1e-4", "--clip-grad", "1.0", "--log-interval", "1000"]
            argv += ["--pulse-no-progress", "--pulse-timeout-s", "60"]
            rows = run_ranks(ranks, steps, argv, timeout_s=600)
            middle = [
                Step(
                    *(
                        statistics.median(column)
                        for column in zip(*map(_times, row[WARM_UP:]), strict=True)
                    )
                )
                for row in rows
            ]
            slowest = max(middle, key=lambda step: step.busy_s)
            yield Cell(kind, str(config), count, samples, predicted, slowest, parts)


def _times(step: Step) -> tuple[float, float, float]:
    return step.whole_s, step.pipeline_s, step.busy_s


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""

    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(ranks(a), ranks(b))


def summary(cells: list[Cell]) -> dict[str, float]:
    """Errors and correlations of all cells."""
    errors = sorted(abs(cell.error) for cell in cells)
    pairs = [(cell.predicted.whole_s, cell.measured.whole_s, cell.samples) for cell in cells]
    each = [(p / n, m / n) for p, m, n in pairs]
    return {
        "configs": len(cells),
        "median_error": statistics.median(errors),
        "error_90th_percentile": errors[9 * (len(errors) - 1) // 10],
        "largest_error": errors[-1],
        "rank_correlation": rank_correlation([p for p, _, _ in pairs], [m for _, m, _ in pairs]),
        "rank_correlation_per_sample": rank_correlation([p for p, _ in each], [m for _, m in each]),
    }


def line(cell: Cell) -> str:
    """One cell as text: whole step, then its pipeline and the busiest rank's computing."""
    said, seen = _times(cell.predicted), _times(cell.measured)
    shown = ", ".join(f"{1e3 * p:.0f} / {1e3 * m:.0f}" for p, m in zip(said, seen, strict=True))
    config = f"{cell.backbone}, {cell.config}, M={cell.microbatches}"
    return f"{config}: {shown} ms ({100 * cell.error:+.1f} %)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=7, help="of each config, after two others")
    parser.add_argument("--only", default="", help="configs with this in their name")
    parser.add_argument("--json", help="a file to write all of it to, config by config")
    args = parser.parse_args()
    cluster = run_ranks(2, probed, timeout_s=300)[0]
    print(cluster)
    print("predicted / measured: step, pipeline, computing")
    cells: list[Cell] = []
    found: dict[str, float] = {}
    for kind in BACKBONES:
        for cell in compare(kind, cluster, args.steps, args.only):
            cells.append(cell)
            print(line(cell), flush=True)
            found = summary(cells) if len(cells) > 1 else {}
            if args.json:
                rows = [{**asdict(c), "error": c.error} for c in cells]
                Path(args.json).write_text(json.dumps({"cells": rows, **found}))
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")


if __name__ == "__main__":
    main()
