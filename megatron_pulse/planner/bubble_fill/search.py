"""Search for a filled step within a time budget: drafts, improved by local moves.

A draft sets the division of samples, the priority of jobs, the margin of each bubble, and the
devices that may host each component (``decode``). The first drafts have even margins. The best one
is changed at random; changes that are no worse are kept. After many unsuccessful changes the search
restarts from another draft. The last part of the time removes components from devices that need not
host them.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_pulse.errors import Faults
from megatron_pulse.planner.bubble_fill.bound import fits, lower_bound
from megatron_pulse.planner.bubble_fill.check import peak_bytes, sent_bytes
from megatron_pulse.planner.bubble_fill.components import Component
from megatron_pulse.planner.bubble_fill.decoder import FURTHEST, Decoder, Draft, num_jobs
from megatron_pulse.planner.bubble_fill.problem import FillCertificate, FilledOrder, FillProblem
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation, FilledTimeline

FACTORS = (0.85, 1.15)
"""Ratios of actual to planned component time that a filled step should tolerate."""
ALLOWED, FRAGILE = 0.03, 3.0
"""Tolerated excess over the bound at these ratios, and the weight of any further excess."""
MOVED, MOST_MOVED = 0.2, 0.01
"""Weight and limit of the cost of transfers between devices.

The weight applies to transfer seconds over the seconds of all devices. Transfers disturb the step's
own messages, and the simulation does not see that. The limit bounds the total cost. No step longer
by that share is preferred because it sends less.
"""
LOOKED_S, SIMULATED_S, DRAFT_S = 0.6e-6, 2.7e-6, 0.2e-3
"""Seconds per examined job or layer, per simulated item, and per draft, on a core of an AMD EPYC.

The search measures its budget by these instead of a clock, so that busy machines give the same
answer.
"""
LATE, LATE_S = 10.0, 10.0
"""Wall-clock limit: a multiple of the budget, and seconds in addition. The certificate names a
search that was cut off."""
TAIL = 16
"""Seeds of a list schedule, so that its choices can change one at a time."""
MARGINS = (0.0, 0.05, 0.15)
OVERFULL, OVERFULL_FROM = (-0.03, -0.06, -0.1), 0.5
"""Negative margins for components that do not fit, and the share of the time before they are tried.

An overfull bubble delays later operations. The step ends with slices anyway, so it is hardly
longer. Fewer slices remain for its end, where they gain nothing if components are faster than
planned. Negative margins are tried only if the best draft so far is not robust.
"""
SHIFTED, SHIFT = 0.2, 0.03
"""Share of the margin changes that shift all margins by the same amount, and the maximum shift."""
PATIENCE = 40
"""Unsuccessful changes before a restart."""
NEAR = 1.0005
HOMES_SHARE, HOMES_COST = 0.2, 1.001
"""Share of the time for removing hosts, and the factor by which the step may become longer."""
EFFICIENT = 1.02

log = logging.getLogger(__name__)


class FillError(ValueError):
    """Components cannot run on these devices."""


@dataclass(frozen=True)
class Filling:
    """Filled step with its certificate."""

    filled: FilledOrder
    certificate: FillCertificate


@dataclass(frozen=True)
class _Tried:
    """Simulated draft.

    ``cost`` is its makespan over the bound, with penalties for fragility and for transfers.
    """

    draft: Draft
    step: FilledSimulation
    cost: float
    spread: dict[float, float]
    timeline: FilledTimeline


def fill(
    problem: FillProblem,
    seconds: float = 5.0,
    seed: int = 0,
    factors: Sequence[float] = FACTORS,
) -> Filling:
    """Shortest filled step found in ``seconds``, measured in work of an idle core of an AMD EPYC.

    The answer is the same on every machine that needs at most ``LATE`` times as long. A slower
    machine returns its best step by then, and the certificate says so. Preferred are steps within
    ``ALLOWED`` of the bound even if components take ``factors`` times as long as planned. Some idle
    time then stays free where it is needed, or bubbles are overfull if components do not fit.
    Raises FillError if no device has the memory, or links cannot carry what components send.
    """
    return _FillSearch(problem, seconds, random.Random(seed), factors).run()


def possible_hosts(problem: FillProblem) -> tuple[frozenset[int], ...]:
    """Devices that may host each component, within the memory of each device.

    Components with much work per byte come first. Raises FillError for a component without a
    device.
    """
    components = problem.components
    homes: list[frozenset[int]] = [frozenset()] * len(components)
    room = [math.inf] * problem.num_devices
    if problem.free_bytes is not None:
        room = [free - problem.results_on(device) for device, free in enumerate(problem.free_bytes)]
    faults = [
        f"device {device} lacks {-left:.3g} bytes for the results that it consumes"
        for device, left in enumerate(room)
        if left < 0
    ]

    def work(c: int) -> float:
        return components[c].least_s(problem.num_samples) / (components[c].parameter_bytes + 1)

    def least(component: Component) -> float:
        count = min(component.counts or (1,))
        most = max(layer.activation_bytes + layer.output_bytes for layer in component.layers)
        return component.parameter_bytes + count * most

    # One device each, largest need first; then as many more as memory allows.
    for c in sorted(range(len(components)), key=lambda c: -least(components[c])):
        can = [d for d in range(problem.num_devices) if components[c].may_run_on(d)]
        device = max(can, key=room.__getitem__)
        if room[device] < least(components[c]):
            faults.append(
                f"component {components[c].name!r} needs {least(components[c]):.3g} bytes; the "
                f"most that a device has left for it is {max(room[device], 0):.3g}"
            )
            continue
        homes[c] = frozenset({device})
        room[device] -= components[c].parameter_bytes
    if faults:
        raise FillError(str(Faults(faults)))
    for c in sorted(range(len(components)), key=work, reverse=True):
        for device in range(problem.num_devices):
            allowed = components[c].may_run_on(device) and device not in homes[c]
            if allowed and room[device] >= least(components[c]):
                homes[c] |= {device}
                room[device] -= components[c].parameter_bytes
    return tuple(homes)


def sample_counts(component: Component, num_samples: int) -> list[int]:
    """Sample counts at which a component may run, best first."""
    known = {n for n in (1, 2, 4, 8, *component.layers[0].seconds) if n <= num_samples}
    counts = sorted(component.counts or known)
    each = {n: component.chain_s(n) / n for n in counts}
    best = min(each.values())
    good = [n for n in counts if each[n] <= EFFICIENT * best]
    return [*good, *sorted((n for n in counts if n not in good), key=each.__getitem__)]


class _FillSearch:
    def __init__(
        self,
        problem: FillProblem,
        seconds: float,
        chance: random.Random,
        factors: Sequence[float],
    ) -> None:
        self.problem, self.chance = problem, chance
        self.began = time.monotonic()
        self.seconds = seconds
        self.bound = lower_bound(problem)
        self.bounds = {factor: lower_bound(problem, factor) for factor in factors}
        self.decoder = Decoder(problem)
        self.homes = possible_hosts(problem)
        self.margins: tuple[float, ...] = MARGINS
        self.counts = [sample_counts(c, problem.num_samples) for c in problem.components]
        self.tried = 0
        self.late = False
        self.faults: list[str] = []

    def run(self) -> Filling:
        best = self._drafted()
        if self.faults and best is None:
            raise FillError(str(Faults(self.faults[:5])))
        assert best is not None
        best = self._fewer_hosts(best)
        bound, made = self.bound, best.timeline.makespan
        filled = best.step.filled
        work = sum(p.time_s(self.problem.components) for _, p in filled.slices)
        without = self.problem.timeline.makespan
        spilled = sum(max(0.0, best.timeline.end[p] - max(without, best.timeline.start[p]))
                      for _, p in filled.slices)  # fmt: skip
        certificate = FillCertificate(
            made,
            bound,
            without,
            spilled / work,
            best.spread,
            f"{self.tried} drafts" + (", stopped at the time limit" if self.late else ""),
            time.monotonic() - self.began,
        )
        log.info("filled: %s", certificate)
        return Filling(filled, certificate)

    def _over(self, part: float = 1.0) -> bool:
        """True once this part of the budget is used, or the same part of the wall-clock limit."""
        decoder = self.decoder
        spent = LOOKED_S * decoder.looked + SIMULATED_S * decoder.simulated + DRAFT_S * self.tried
        if spent >= part * self.seconds:
            return True
        late = time.monotonic() - self.began >= part * (LATE * self.seconds + LATE_S)
        self.late |= late
        return late

    def _drafted(self) -> _Tried | None:
        """Best draft after starts and moves. Overfull bubbles are tried if no other draft is
        robust."""
        part = 1 - HOMES_SHARE
        best: _Tried | None = None
        for draft in self._starts():
            best = self._better(best, draft)
            if best is not None and self._over(part):
                return best
        if best is None:
            return None
        if self.bounds and not fits(self.problem):
            best = self._improved(best, OVERFULL_FROM * part)
            if max(best.spread.values()) > 1 + ALLOWED:
                self.margins = (*MARGINS, *OVERFULL)
                for margin in OVERFULL:
                    margins = (margin,) * len(self.decoder.closed)
                    best = self._better(best, replace(best.draft, margin=margins)) or best
        return self._improved(best, part)

    def _improved(self, best: _Tried, part: float) -> _Tried:
        now, vain = best, 0
        while not self._over(part) and best.cost > NEAR:
            found = self._try(self._changed(now.draft))
            vain += 1
            if found is not None and found.cost <= now.cost:
                vain = 0 if found.cost < now.cost else vain
                now = found
            if now.cost < best.cost:
                best = now
            if vain > PATIENCE:
                fresh = self._try(self._random())
                now, vain = fresh or best, 0
        return best

    def _better(self, best: _Tried | None, draft: Draft) -> _Tried | None:
        found = self._try(draft)
        return found if found and (best is None or found.cost < best.cost) else best

    def _try(self, draft: Draft) -> _Tried | None:
        """Simulated draft; None if memory or links do not suffice."""
        self.tried += 1
        try:
            filled = self.decoder.fill(draft)
            step = FilledSimulation(self.problem, filled)
            self.decoder.simulated += sum(map(len, filled.order)) * (1 + len(self.bounds))
            timeline = step.run()
        except ValueError as error:
            self.faults.append(str(error))
            return None
        if self.problem.free_bytes is not None:
            peaks = peak_bytes(step, timeline)
            short = [
                f"device {d} would need {peak:.4g} bytes of {free:.4g}"
                for d, (peak, free) in enumerate(zip(peaks, self.problem.free_bytes, strict=True))
                if peak > free
            ]
            if short:
                self.faults += short
                return None
        makespan = timeline.makespan
        if max(sent_bytes(step)) > makespan * self.problem.link.bytes_per_s:
            self.faults.append("links are too slow for the messages of the components")
            return None
        over = makespan / self.bound
        spread = {f: step.run(f).makespan / bound for f, bound in self.bounds.items()}
        fragile = max(0.0, max(spread.values(), default=0.0) - max(over, 1 + ALLOWED))
        moved = sum(lag for deps in step.deps.values() for _, lag in deps)
        moved /= self.problem.num_devices * makespan
        moving = MOST_MOVED * -math.expm1(-MOVED * moved / MOST_MOVED)
        cost = over + FRAGILE * fragile + moving
        return _Tried(draft, step, cost, spread, timeline)

    def _draft(self, counts: Sequence[int], margin: float, moving: bool) -> Draft:
        jobs = num_jobs(self.problem, tuple(counts))
        return Draft(
            tuple(counts),
            tuple(self.chance.random() for _ in range(jobs)),
            (margin,) * len(self.decoder.closed),
            (0,) * len(self.decoder.closed),
            (),
            self.homes,
            moving,
        )

    def _starts(self) -> Iterator[Draft]:
        usual = [counts[0] for counts in self.counts]
        for margin in MARGINS:
            yield self._draft(usual, margin, True)
        yield self._furthest(usual)
        least = [min(counts) for counts in self.counts]
        yield self._draft(least, MARGINS[0], True)
        yield self._furthest(least)
        # Infinite margins: no slice in a bubble, all after the flush.
        yield self._draft(least, math.inf, False)

    def _furthest(self, counts: Sequence[int]) -> Draft:
        draft = self._draft(counts, MARGINS[0], True)
        return replace(draft, shuffle=(FURTHEST,) * len(draft.shuffle))

    def _random(self) -> Draft:
        counts = [self.chance.choice(counts[:3]) for counts in self.counts]
        draft = self._draft(counts, self.chance.choice(self.margins), self.chance.random() < 0.8)
        if self.chance.random() < 0.3:
            draft = self._furthest(counts)
        if self.chance.random() < 0.5:
            draft = self._elsewhere(draft)
        return draft if self.chance.random() < 0.5 else replace(draft, tail=self._seeds())

    def _elsewhere(self, draft: Draft) -> Draft:
        """Draft with one more or one fewer device that may host a component."""
        c = self.chance.randrange(len(self.homes))
        others = draft.homes[c] ^ {self.chance.choice(sorted(self.homes[c]))}
        homes = (*draft.homes[:c], others or self.homes[c], *draft.homes[c + 1 :])
        return replace(draft, homes=homes)

    def _changed(self, draft: Draft) -> Draft:
        chance = self.chance
        if draft.tail and chance.random() < 0.5:
            seeds = [*draft.tail]
            for _ in range(chance.choice((1, 1, 2, 4, TAIL))):
                seeds[chance.randrange(TAIL)] = chance.getrandbits(16)
            return replace(draft, tail=tuple(seeds))
        kind = chance.random()
        if kind < 0.1:
            return self._elsewhere(draft)
        if kind < 0.35:
            keys = list(draft.priority)
            for _ in range(chance.choice((1, 2, 4))):
                keys[chance.randrange(len(keys))] = chance.random()
            return replace(draft, priority=tuple(keys))
        if kind < 0.6 and draft.shuffle:
            seeds = list(draft.shuffle)
            for _ in range(chance.choice((1, 1, 2, 4))):
                seeds[chance.randrange(len(seeds))] = chance.choice(
                    (0, FURTHEST, chance.getrandbits(16))
                )
            return replace(draft, shuffle=tuple(seeds))
        if kind < 0.85 and draft.margin:
            margins = list(draft.margin)
            if self.margins != MARGINS and chance.random() < SHIFTED:
                by = chance.uniform(-SHIFT, SHIFT)
                return replace(draft, margin=tuple(m + by for m in margins))
            for _ in range(chance.choice((1, 2, 4))):
                margins[chance.randrange(len(margins))] = chance.choice(
                    (*self.margins, 0.1, 0.3, 1e9)
                )
            return replace(draft, margin=tuple(margins))
        if kind < 0.92:
            c = chance.randrange(len(self.counts))
            counts = list(draft.counts)
            counts[c] = chance.choice(self.counts[c][:4])
            keys = list(draft.priority)
            jobs = num_jobs(self.problem, tuple(counts))
            keys = [*keys, *(chance.random() for _ in range(jobs - len(keys)))][:jobs]
            return replace(draft, counts=tuple(counts), priority=tuple(keys))
        if kind < 0.94:
            return replace(draft, moving=not draft.moving)
        return replace(draft, tail=() if draft.tail else self._seeds())

    def _seeds(self) -> tuple[int, ...]:
        return tuple(self.chance.getrandbits(16) for _ in range(TAIL))

    def _fewer_hosts(self, best: _Tried) -> _Tried:
        """Remove components from devices as long as the step hardly becomes longer."""
        limit = HOMES_COST * best.cost
        components = self.problem.components
        used = best.step.filled.homes
        homes = tuple(frozenset(used.get(c, ())) & home for c, home in enumerate(best.draft.homes))
        order = sorted(range(len(components)), key=lambda c: -components[c].parameter_bytes)
        for c, device in itertools.product(order, range(self.problem.num_devices)):
            if self._over():
                break
            if device not in homes[c] or len(homes[c]) == 1:
                continue
            fewer = (*homes[:c], homes[c] - {device}, *homes[c + 1 :])
            found = self._try(replace(best.draft, homes=fewer))
            if found is not None and found.cost <= limit:
                best, homes = found, fewer
        return best
