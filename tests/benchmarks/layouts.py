"""Random layouts against one process: losses, gradients and weights to the last bit.

    .venv/bin/python -m tests.benchmarks.layouts --cases 300 --seed 1 --jobs 2
    .venv/bin/python -m tests.benchmarks.layouts --seed 1 --only 17      # that case again

A case is a family, a placement on 1 to 4 devices with random cuts, 1 to 9 microbatches, a schedule
by name or a random legal order, whole or split backwards, fp32 or bf16, with or without
recomputation, with all of it trained, or some layers, or biases. It depends on the seed and its
number alone. The exit status is 1 if any differs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import batched

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import (
    FOLD,
    INTERLEAVED,
    SEQUENTIAL,
    Partition,
    Placement,
    make_placement,
)
from megatron_pulse.planner.partition.find import Goal, PartitionError, find_partition
from megatron_pulse.planner.program.plan import Plan, PlanError
from megatron_pulse.planner.schedule.check.simulate import dependency
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.planner.schedule.registry import WAVES
from tests.benchmarks.report import Flags, Report
from tests.ranks import RanksFailed, run_ranks
from tests.runtime.equality import (
    Case,
    Outcome,
    away_anywhere,
    computed_apart,
    differences,
    merge,
    references,
    split,
)
from tests.runtime.tiny import FAMILIES, backbone, run_cases

STEPS = 2
BATCH = 12
"""Cases that one group of ranks runs, one after the other."""
NAMES = (*CLASSICS, *WAVES)
COUNTED = (
    *("family", "P", "placement", "schedule", "backwards", "dtype"),
    *("recomputed", "offloaded", "selective"),
)
"""Features that are counted over all cases."""


@dataclass(frozen=True)
class Layout:
    """Case ``number`` of a seed: ``family`` on ``num_devices``, laid out as ``case`` says."""

    number: int
    family: str
    num_devices: int
    case: Case

    @property
    def schedule(self) -> Schedule:
        """The order that every device keeps to."""
        assert isinstance(self.case.schedule, Schedule)
        return self.case.schedule

    @property
    def is_split(self) -> bool:
        """Whether weight gradients are computed apart."""
        return OpType.WEIGHT_GRAD in self.schedule.kinds

    def cells(self) -> dict[str, object]:
        """Features of the case."""
        case, placement = self.case, self.schedule.placement
        return {
            "case": self.number,
            "family": self.family,
            "P": self.num_devices,
            "M": case.num_microbatches,
            "b": case.micro_batch_size,
            "placement": placement.kind.name,
            "stages": placement.num_stages,
            "schedule": self.schedule.name,
            "backwards": "split" if self.is_split else "whole",
            "dtype": case.dtype,
            "recomputed": case.recompute,
            "offloaded": case.offload,
            "selective": case.selective,
            "trained": " ".join(case.train),
            "frozen": " ".join(case.freeze),
        }


@dataclass(frozen=True)
class Verdict:
    """What became of a layout: its faults (none: equal to the last bit)."""

    layout: Layout
    faults: tuple[str, ...]


def draw_layout(seed: int, number: int) -> Layout:
    """Case ``number`` of ``seed``."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choice(list(FAMILIES))
    num_devices, num_microbatches = rng.randint(1, 4), rng.randint(1, 9)
    chain = backbone(family)
    while True:
        kind = rng.choice([FOLD, SEQUENTIAL, INTERLEAVED])
        num_chunks = rng.choice([2, 3] if kind == INTERLEAVED else [2, 2, 4])
        placement = make_placement(kind.name, num_devices, num_chunks)
        if placement.num_stages > len(chain.layers):
            continue
        try:
            plan = Plan(chain, _draw_partition(rng, chain, placement))
            schedule = _draw_schedule(rng, plan, num_microbatches)
            replace(plan, schedules=(schedule,)).step(num_microbatches)
        except (PartitionError, PlanError, ValueError):
            continue
        dtype = rng.choice(["float32", "bfloat16"])
        recompute, cuts = rng.choice((0, 0, 0, 1, 2, 3)), plan.partition.cuts
        of = kind.name, num_microbatches, schedule, num_chunks, dtype, recompute, STEPS, cuts
        case = Case(*of, rng.randint(1, 3))
        case = replace(case, **_draw_trained(random.Random(f"{seed}/{number}/trained"), chain))
        chance = random.Random(f"{seed}/{number}/apart")
        apart = computed_apart(schedule, plan.partition, case.recompute, chance)
        offload = random.Random(f"{seed}/{number}/offload").choice((0, 0, 0, 1, 2))
        part = random.Random(f"{seed}/{number}/selective").choice((0, 0, 1, 2))
        case = replace(case, schedule=apart, offload=offload, selective=part)
        chance = random.Random(f"{seed}/{number}/away")
        if chance.random() < 0.7:  # else wherever it can
            case = replace(case, schedule=away_anywhere(apart, plan.partition, case, chance))
        return Layout(number, family, num_devices, case)


def _draw_trained(rng: random.Random, chain: Backbone) -> dict[str, tuple[str, ...]]:
    """Patterns that train everything, biases, what is behind a layer, or some layers."""
    patterns = [f"{layer.prefix}*" for layer in chain.layers]
    drawn = rng.random()
    if drawn < 0.5:
        return {}
    if drawn < 0.6:
        return {"train": ("*bias",)}
    # The last layers have parameters in every family.
    if drawn < 0.8:
        return {"freeze": tuple(patterns[: rng.randint(1, len(patterns) - 2)])}
    return {"freeze": tuple(p for p in patterns[:-1] if rng.random() < 0.6) or (patterns[0],)}


def _draw_partition(rng: random.Random, chain: Backbone, placement: Placement) -> Partition:
    """Balanced for random costs, every skip at home; or cut anywhere."""
    num = len(chain.layers)
    if placement.kind.mirrored and rng.random() < 0.5:
        costs = weighted_costs(chain, [rng.uniform(0.5, 4) for _ in range(num)])
        return find_partition(costs, placement, Goal(collocate=True))
    cuts = sorted(rng.sample(range(1, num), placement.num_stages - 1))
    return Partition(placement, (0, *cuts, num))


def _draw_schedule(rng: random.Random, plan: Plan, num_microbatches: int) -> Schedule:
    """By name, perhaps split afterwards, or a random legal order; ValueError where none is."""
    if rng.random() < 0.5:
        return random_order(rng, plan.placement, num_microbatches, rng.random() < 0.6)
    schedule = replace(plan, schedule_name=rng.choice(NAMES)).step(num_microbatches).schedule
    if OpType.BACKWARD in schedule.kinds and rng.random() < 0.5:
        return split(schedule, rng.randint(0, 6))
    return schedule


def random_order(
    rng: random.Random, placement: Placement, num_microbatches: int, is_split: bool
) -> Schedule:
    """A random legal order: again and again any operation that nothing keeps from running.

    Each kind has a random weight, so that some orders hurry forward and some put weights off.
    """
    split_kinds = (OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)
    kinds = split_kinds if is_split else (OpType.FORWARD, OpType.BACKWARD)
    weights = {kind: rng.choice([0.1, 1.0, 10.0]) for kind in kinds}
    line = [Operation(kind, stage, 0) for kind in kinds for stage in range(placement.num_stages)]
    done: set[Operation] = set()
    order: list[list[Operation]] = [[] for _ in range(placement.num_devices)]
    while line:
        ready = [
            i
            for i, op in enumerate(line)
            if (needed := dependency(op, placement)) is None or needed in done
        ]
        (i,) = rng.choices(ready, [weights[line[i].kind] for i in ready])
        op = line[i]
        done.add(op)
        order[placement.device_of_stage[op.stage]].append(op)
        line[i] = op._replace(microbatch=op.microbatch + 1)
        if line[i].microbatch == num_microbatches:
            del line[i]
    return Schedule("random order", placement, num_microbatches, tuple(map(tuple, order)))


def compare(layout: Layout, got: Outcome, expected: Outcome) -> Verdict:
    """Every way in which a layout's numbers are not those of one process."""
    case, faults = layout.case, []
    apart = layout.schedule.placement.num_stages * case.num_microbatches * STEPS
    if got.num_weight_gradients != apart * layout.is_split:
        faults.append(f"{got.num_weight_gradients} weight gradients were computed apart")
    if got.losses != expected.losses:
        faults.append(f"losses {got.losses} instead of {expected.losses}")
    for what in ("gradients", "parameters"):
        mine, theirs = getattr(got, what), getattr(expected, what)
        found = differences(mine, theirs) if mine.keys() == theirs.keys() else {"names": 1.0}
        if found:
            worst = max(found, key=found.__getitem__)
            faults.append(
                f"{len(found)} of {len(theirs)} {what} differ, {worst} most, by {found[worst]:.1e}"
            )
    return Verdict(layout, tuple(faults))


def run_batch(layouts: Sequence[Layout]) -> list[Verdict]:
    """Verdicts of layouts of one number of devices; where ranks fail, each is tried alone."""
    cases = [(layout.family, layout.case) for layout in layouts]
    alone = [(family, case.alone) for family, case in cases]
    timeout_s = 120.0 + 30.0 * len(layouts)
    try:
        expected = references(run_cases, alone, timeout_s)
        ranks = run_ranks(layouts[0].num_devices, run_cases, cases, timeout_s=timeout_s)
    except RanksFailed as failure:
        if len(layouts) == 1:
            return [Verdict(layouts[0], (str(failure),))]
        return [verdict for layout in layouts for verdict in run_batch([layout])]
    return [
        compare(layout, merge([rank[i] for rank in ranks]), expected[i])
        for i, layout in enumerate(layouts)
    ]


def run_layouts(layouts: Iterable[Layout], jobs: int = 1) -> Iterator[Verdict]:
    """Verdicts as they come, ``jobs`` groups of ranks at a time."""
    by_devices: dict[int, list[Layout]] = {}
    for layout in layouts:
        by_devices.setdefault(layout.num_devices, []).append(layout)
    batches = [batch for same in by_devices.values() for batch in batched(same, BATCH)]
    with ThreadPoolExecutor(jobs) as pool:
        for verdicts in pool.map(run_batch, batches):
            yield from verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    flags = Flags(__doc__)
    flags.add("--cases", 300)
    flags.add("--seed", 1, type=int)
    flags.add("--only", type=int, action="append", help="the number of a case to run")
    flags.add("--jobs", 1, "groups of ranks at a time")
    args = flags.parse_args(argv)
    start, report = time.monotonic(), Report(args.json)
    drawn = (draw_layout(args.seed, n) for n in args.only or range(args.cases))
    for verdict in run_layouts(drawn, args.jobs):
        report.add(verdict.layout.cells() | {"is": "; ".join(verdict.faults) or "equal"})
    print()
    for what in COUNTED:
        numbers = Counter(row[what] for row in report.rows)
        print(f"{what}: " + ", ".join(f"{name} {n}" for name, n in sorted(numbers.items())))
    differ = sum(row["is"] != "equal" for row in report.rows)
    seconds = time.monotonic() - start
    print(f"{len(report.rows)} layouts in {seconds:.0f} s, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
