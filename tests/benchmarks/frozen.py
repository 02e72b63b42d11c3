"""What freezing a part of a model saves: steps as predicted from a profile, and as they run.

    .venv/bin/python -m tests.benchmarks.frozen --repetitions 9

On one process: profiles a chain of eight MLPs with three skips of which all, the second half, or
the biases are trained, and runs steps of each in turn, so that whatever else the machine does falls
on all alike. The optimizer is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from tests.benchmarks.report import Flags, Report
from tests.runtime.equality import mean_squared_error

NUM_MICROBATCHES, SIZE, TOKENS = 4, 2, 256
TRAINED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all": ((), ()),
    "second half": ((), ("layers.[0-3].*",)),
    "biases": (("*.bias",), ()),
}
"""``train`` and ``freeze`` of each."""


@dataclass(frozen=True)
class Row:
    """Seconds of a step's forwards and backwards, bytes kept of a microbatch, and parameters."""

    trained: str
    predicted_s: float
    measured_s: float
    saved_bytes: int
    parameters: int


class Block(nn.Module):
    """An MLP that adds to what it takes, and to a skip where one ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, skip: Tensor | float = 0.0) -> Tensor:
        x = x + skip
        result: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return result


def compare(width: int, repetitions: int, patience: RepetitionLimits) -> list[Row]:
    """A row for each of ``TRAINED``; medians of ``repetitions`` steps in turn."""
    torch.set_num_threads(1)
    spec = pulse.TensorSpec((TOKENS, width))
    whole = pulse.chain([lambda: Block(width)] * 8, spec, skips=[(0, 7), (1, 6), (2, 5)])
    x = torch.randn(NUM_MICROBATCHES, SIZE, TOKENS, width)
    batches = [{"noisy": m, "target": m.roll(1, -1)} for m in x]
    costs, pipelines = {}, {}
    for name, patterns in TRAINED.items():
        chain = pulse.choose_trained(whole, *patterns)
        costs[name] = pulse.measure(chain, [SIZE], patience=patience, threads=1).at(SIZE)
        plan = pulse.make_plan(chain, costs[name], pulse.sequential(1))
        pipelines[name] = pulse.Pipeline(plan, mean_squared_error, SIZE)
    seconds: dict[str, list[float]] = {name: [] for name in TRAINED}
    for _ in range(repetitions + 1):
        for name, pipeline in pipelines.items():
            begin = time.perf_counter()
            pipeline.step(batches)
            seconds[name].append(time.perf_counter() - begin)
    return [
        Row(
            name,
            NUM_MICROBATCHES * (sum(cost.forward_s) + sum(cost.backward_s)),
            statistics.median(seconds[name][1:]),  # the first warms up
            sum(cost.saved_bytes),
            sum(cost.trained_parameters),
        )
        for name, cost in costs.items()
    ]


def main() -> None:
    """Print a row for each, beside the first."""
    flags = Flags(__doc__)
    flags.add("--width", 256)
    flags.add("--repetitions", 9)
    args = flags.parse_args()
    rows = compare(args.width, args.repetitions, RepetitionLimits())
    report, first = Report(args.json), rows[0]
    for row in rows:
        cells = {
            "trained": row.trained,
            "parameters": row.parameters,
            "predicted ms": 1e3 * row.predicted_s,
            "of all": row.predicted_s / first.predicted_s,
            "measured ms": 1e3 * row.measured_s,
            "of all's": row.measured_s / first.measured_s,
            "MB kept": row.saved_bytes / 1e6,
        }
        report.add(row, cells)


if __name__ == "__main__":
    main()
