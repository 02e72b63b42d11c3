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

import argparse
import json
import platform
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.jobshop import job_shop
from megatron_pulse.planner.schedule.search.synthesize import classics
from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.progress import track

PROFILES = ("equal", "random", "unet", "bal")
SHAPES = ((2, 4), (2, 8), (2, 16), (4, 8), (4, 16), (4, 32), (8, 16), (8, 64), (16, 32), (16, 128))
LINKS = (0.0, 0.1)
LEAST = 2
"""Activations that a microbatch has on a device: with room for fewer there is no schedule."""
CAPS = (2.0, 1.5)

TARGETS = {
    (4, 8): ((5.0, 5.9), (9.6, 14.4), (1.7, 3.7), (3.8, 6.7)),
    (4, 32): ((1.9, 3.7), (7.4, 17.0), (0.3, 0.7), (1.0, 1.8)),
    (8, 16): ((5.7, 8.0), (10.0, 16.2), (1.5, 3.9), (5.5, 10.2)),
    (8, 64): ((1.9, 3.4), (7.0, 16.6), (0.5, 1.1), (1.5, 2.7)),
    (16, 32): ((5.5, 8.1), (8.3, 14.0), (1.3, 3.4), (5.1, 8.7)),
    (16, 128): ((2.6, 4.7), (7.7, 17.1), (0.5, 1.1), (1.6, 2.4)),
}
"""Mean and largest gap in % that the design asks for: whole, then split, each with CAPS."""


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


def table(results: list[Result], title: str) -> str:
    """Mean / largest gap in % of every cell, the design's in brackets; Markdown."""
    caps = tuple(dict.fromkeys(r.case.cap for r in results))
    columns = tuple(product((False, True), caps))
    names = [f"{'split' if split else 'fused'} A={cap:g}P" for split, cap in columns]
    lines = [f"| {title}: P, M | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for shape in dict.fromkeys((r.case.devices, r.case.microbatches) for r in results):
        cells = []
        for index, (split, cap) in enumerate(columns):
            gaps = [
                100 * r.gap
                for r in results
                if (r.case.devices, r.case.microbatches, r.case.split, r.case.cap)
                == (*shape, split, cap)
            ]
            cell = f"{mean(gaps):.1f} / {max(gaps):.1f}" if gaps else "-"
            if gaps and shape in TARGETS and caps == CAPS:
                cell += " ({:.1f} / {:.1f})".format(*TARGETS[shape][index])
            cells.append(cell)
        if any(cell != "-" for cell in cells):
            lines.append(f"| {shape[0]}, {shape[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", metavar="P,M", help="only these sizes, e.g. 4,8 8,16")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=PROFILES)
    parser.add_argument(
        "--caps", nargs="+", type=float, default=CAPS, help="activations of a device, of P each"
    )
    parser.add_argument("--links", nargs="+", type=float, default=LINKS, help="of a mean forward")
    parser.add_argument("--seconds", type=float, default=9.5, help="budget of a problem")
    parser.add_argument("--solver", default="none", help="none, highs, glpk or auto")
    parser.add_argument(
        "--reference", type=float, metavar="SECONDS", help="CP-SAT's time to look for better"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, one problem each at a time")
    parser.add_argument("--sample", type=int, metavar="N", help="only N problems of every cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    options = parser.parse_args()
    shapes = SHAPES
    if options.cells:
        shapes = tuple(tuple(map(int, cell.split(","))) for cell in options.cells)
    every = list(grid(shapes, options.profiles, options.links, options.caps))
    cases = sampled(every, options.sample)
    job = partial(
        measure, seconds=options.seconds, solver=options.solver, reference=options.reference
    )
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(track(pool.map(job, cases), "scheduling", "problems", len(cases)))
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{len(results)} problems; gap to the lower bound in %, mean / largest (design's)\n")
    print(table(results, "all profiles"), end="\n\n")
    hardest = [r for r in results if r.case.profile == "bal" and r.case.link == 0]
    if hardest:
        print(table(hardest, "bal, no links"), end="\n\n")
    times = [r.seconds for r in results]
    print(f"seconds: mean {mean(times):.1f}, largest {max(times):.1f}")
    print(f"proved: {sum(r.proved for r in results)}")
    print(f"not valid: {sum(not r.fits for r in results)}")
    worse = [r for r in results if r.best_classic and r.makespan > r.best_classic * (1 + 1e-9)]
    print(f"longer than a classic schedule that fits: {len(worse)}")
    if options.reference:
        far = [100 * r.distance for r in results]
        print(f"above CP-SAT's shortest, in %: mean {mean(far):.2f}, largest {max(far):.2f}")
        for r in results:
            print(
                f"  {r.case}: {r.makespan:.2f} ({100 * r.distance:.2f} % above), bound "
                f"{r.bound:.2f}, CP-SAT {r.reference:.2f}, its bound {r.reference_bound}"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
