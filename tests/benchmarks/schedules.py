"""Synthesized schedules: how far above their lower bounds, and how long the search takes.

    .venv/bin/python -m tests.benchmarks.schedules --jobs 2         # 320 problems, half an hour
    .venv/bin/python -m tests.benchmarks.schedules --sample 1       # one problem of every cell
    .venv/bin/python -m tests.benchmarks.schedules --cells 4,8 8,16 --profiles bal --solver highs
    .venv/bin/python -m tests.benchmarks.schedules --cells 2,8 4,8 --sample 3 --reference 40
    .venv/bin/python -m tests.benchmarks.schedules --cells 4,6 4,8 --caps .5 .75 1 --reference 30

Problems: a fold of one wave, P devices and M microbatches; whole or split backwards; room for 2P or
1.5P activations on a device (``--caps``); links that take nothing or a tenth of a mean forward; and
times ``equal``, ``random`` (threefold, backwards with their own noise where split), ``unet``
(decreasing towards the turn, encoder cheaper than decoder), ``bal`` (device loads within 3 %,
shared between encoder and decoder 1:1 to 1:2). Every schedule is validated and compared with the
classic ones that fit.
``gap`` is makespan / lower bound - 1, so it includes what the bound misses;
``--reference`` lets CP-SAT search on from the result, to tell the two apart.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.progress import track
from tests.benchmarks.report import Flags, Report, record, table, write_json

PROFILES = ("equal", "random", "unet", "bal")
SHAPES = ((2, 4), (2, 8), (2, 16), (4, 8), (4, 16), (4, 32), (8, 16), (8, 64), (16, 32), (16, 128))
LINKS = (0.0, 0.1)
LEAST = 2
"""Activations that a microbatch has on a device: with room for fewer there is no schedule."""
CAPS = (2.0, 1.5)


@dataclass(frozen=True)
class Case:
    """One problem of the grid; ``cap`` is in units of P activations, ``link`` of a mean forward."""

    profile: str
    devices: int
    microbatches: int
    split: bool
    cap: float
    link: float

    def problem(self) -> ScheduleProblem:
        """The same every time: the case is its own seed."""
        forward = _forward(self.profile, self.devices, random.Random(repr(self)))
        chance = random.Random(f"backward {self!r}")

        def half(f: float) -> float:
            return f * (chance.uniform(0.8, 1.2) if self.profile == "random" else 1.0)

        backward = tuple(half(f) if self.split else 2 * f for f in forward)
        return ScheduleProblem(
            fold(self.devices),
            self.microbatches,
            forward,
            backward,
            tuple(map(half, forward)) if self.split else None,
            self.link * mean(forward),
            cap=(self.cap * self.devices,) * self.devices,
        )


def _forward(profile: str, devices: int, chance: random.Random) -> tuple[float, ...]:
    """Times of the forwards of all 2P stages."""
    if profile == "equal":
        return (1.0,) * (2 * devices)
    if profile == "random":
        return tuple(chance.uniform(1, 3) for _ in range(2 * devices))
    if profile == "unet":
        slope = [1 + (devices - 1 - d) / devices for d in range(devices)]
        down = [t * chance.uniform(0.9, 1.1) for t in slope]
        return (*down, *(1.5 * t * chance.uniform(0.9, 1.1) for t in reversed(slope)))
    loads = [2 * chance.uniform(0.985, 1.015) for _ in range(devices)]
    shares = [1 / (1 + chance.uniform(1, 2)) for _ in range(devices)]
    down = [load * share for load, share in zip(loads, shares, strict=True)]
    return (*down, *(load - f for load, f in zip(reversed(loads), reversed(down), strict=True)))


@dataclass(frozen=True)
class Result:
    """What came of a case."""

    case: Case
    gap: float
    seconds: float
    proved: bool
    fits: bool
    best_classic: float | None
    makespan: float
    bound: float
    path: str
    reference: float | None = None
    reference_bound: float | None = None

    @property
    def distance(self) -> float:
        """From the shortest schedule that CP-SAT knows; 0 where that is none shorter."""
        return self.makespan / min(self.makespan, self.reference or self.makespan) - 1


def classics(problem: ScheduleProblem) -> Iterator[Schedule]:
    """Classic schedules that are solutions of ``problem``."""
    for name in CLASSICS:
        with suppress(ValueError):  # of another placement, or number of microbatches
            known = make_schedule(name, problem.placement, problem.num_microbatches)
            if not faults_for(problem, known):
                yield known


def measure(case: Case, seconds: float, solver: str, reference: float | None) -> Result:
    """Search and check."""
    problem = case.problem()
    began = time.monotonic()
    found = solve(problem, seconds, solver)
    spent = time.monotonic() - began
    lengths = [simulate(problem, classic).makespan for classic in classics(problem)]
    length = found.certificate.makespan
    return Result(
        case,
        found.certificate.gap,
        spent,
        found.certificate.proved,
        not faults_for(problem, found.schedule),
        min(lengths, default=None),
        length,
        found.certificate.lower_bound,
        found.certificate.solver,
        *(_by_cp_sat(problem, found.schedule, reference) if reference else ()),
    )


def _by_cp_sat(
    problem: ScheduleProblem, start: Schedule, seconds: float
) -> tuple[float, float | None]:
    """Makespan, and bound on the grid of its ticks, of what CP-SAT makes of ``start``."""
    from megatron_pulse.planner.schedule.search.jobshop import job_shop
    from tests.planner.cp_sat import shortest_by_cp_sat  # OR-Tools, only for this

    shop = job_shop(problem)
    begin = shop.earliest(start)
    found = shortest_by_cp_sat(shop, seconds, shop.makespan(begin), start=begin)
    tick = simulate(problem, start).makespan / shop.makespan(begin)
    bound = None if found.bound is None else found.bound * tick
    if found.start is None:
        return simulate(problem, start).makespan, bound
    return simulate(problem, shop.schedule("cp-sat", found.start)).makespan, bound


def grid(
    shapes: Iterable[tuple[int, int]],
    profiles: Iterable[str],
    links: Iterable[float],
    caps: Iterable[float] = CAPS,
) -> Iterator[Case]:
    """The cases, cell by cell."""
    for (p, m), split, cap in product(shapes, (False, True), caps):
        for profile, link in product(profiles, links):
            if cap * p >= LEAST:
                yield Case(profile, p, m, split, cap, link)


def sampled(cases: list[Case], number: int | None) -> list[Case]:
    """``number`` of every cell, the same every time."""
    if number is None:
        return cases
    cells: dict[tuple[int, int, bool, float], list[Case]] = {}
    for case in cases:
        cells.setdefault((case.devices, case.microbatches, case.split, case.cap), []).append(case)
    chance = random.Random(0)
    return [c for cell in cells.values() for c in chance.sample(cell, min(number, len(cell)))]


def gaps(results: list[Result], title: str) -> list[str]:
    """Mean / largest gap in % of every cell; Markdown."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    cells: dict[tuple[tuple[int, int], str], list[float]] = {}
    for r in results:
        shape = r.case.devices, r.case.microbatches
        column = f"{'split' if r.case.split else 'whole'} A={r.case.cap:g}P"
        cells.setdefault((shape, column), []).append(100 * r.gap)
    for (shape, column), each in cells.items():
        row = rows.setdefault(shape, {f"{title}: P, M": shape})
        row[column] = f"{mean(each):.1f} / {max(each):.1f}"
    return [*table(rows.values()), ""]


def main() -> None:
    """Search and print."""
    flags = Flags(__doc__)
    flags.add("--cells", nargs="+", metavar="P,M", help="only these sizes, e.g. 4,8 8,16")
    flags.add("--profiles", PROFILES, nargs="+", choices=PROFILES)
    flags.add("--caps", CAPS, "activations of a device, of P each", nargs="+", type=float)
    flags.add("--links", LINKS, "of a mean forward", nargs="+", type=float)
    flags.add("--seconds", 9.5, "budget of a problem")
    flags.add("--solver", "none", "none, highs, glpk or auto")
    flags.add("--reference", type=float, metavar="SECONDS", help="CP-SAT's time to look for better")
    flags.add("--jobs", 1, "processes, one problem each at a time")
    flags.add("--sample", type=int, metavar="N", help="only N problems of every cell")
    args = flags.parse_args()
    given = [tuple(map(int, cell.split(","))) for cell in args.cells or ()]
    every = list(grid(given or SHAPES, args.profiles, args.links, args.caps))
    cases = sampled(every, args.sample)
    asked = {"seconds": args.seconds, "solver": args.solver, "reference": args.reference}
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = pool.map(partial(measure, **asked), cases)
        results = list(track(jobs, "scheduling", "problems", len(cases)))
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{len(results)} problems; gap to the lower bound in %, mean / largest\n")
    print("\n".join(gaps(results, "all profiles")))
    if hardest := [r for r in results if r.case.profile == "bal" and r.case.link == 0]:
        print("\n".join(gaps(hardest, "bal, no links")))
    times = [r.seconds for r in results]
    print(f"seconds: mean {mean(times):.1f}, largest {max(times):.1f}")
    print(f"proved: {sum(r.proved for r in results)}")
    print(f"not valid: {sum(not r.fits for r in results)}")
    worse = [r for r in results if r.best_classic and r.makespan > r.best_classic * (1 + 1e-9)]
    print(f"longer than a classic schedule that fits: {len(worse)}")
    if args.reference:
        far = [100 * r.distance for r in results]
        print(f"above CP-SAT's shortest, in %: mean {mean(far):.2f}, largest {max(far):.2f}\n")
        report = Report()
        for r in results:
            ours = {"ours": r.makespan, "% above": 100 * r.distance, "bound": r.bound}
            theirs = {"CP-SAT": r.reference, "its bound": r.reference_bound}
            report.add(r, {"case": r.case, **ours, **theirs})
    if args.json:
        write_json(args.json, list(map(record, results)))


if __name__ == "__main__":
    main()
