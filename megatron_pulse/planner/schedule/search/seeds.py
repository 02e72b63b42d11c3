"""Initial solutions of the search: templates, and list schedules by static rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from megatron_pulse.planner.schedule.search.beam import Template, beam_templates
from megatron_pulse.planner.schedule.search.jobshop import JobShop
from megatron_pulse.planner.schedule.search.list_scheduling import list_schedule


@dataclass(frozen=True)
class PriorityRule:
    """Static priority rule: of a device's ready operations the one of the lowest rank comes first.

    rank = direction * (earliest possible start of the stage in a microbatch) + weight * microbatch
    * (largest device load), with backwards last on request. Weight gradients come last of all: they
    only fill idle time, or free memory.
    """

    direction: int
    weight: float
    backward_last: bool


RULES = (
    PriorityRule(-1, 0.0, True),
    PriorityRule(1, 0.5, False),
    PriorityRule(1, 1.0, True),
    PriorityRule(-1, 0.0, False),
    PriorityRule(1, 0.5, True),
    PriorityRule(1, 0.25, False),
    PriorityRule(1, 0.0, False),
    PriorityRule(1, 1.0, False),
)


def starts(shop: JobShop) -> Iterator[list[int]]:
    """Initial start times, templates and rules in turn, the most promising first."""
    ways = _ways(shop)
    rule, pace, burst = next(ways)
    yield _by_rule(shop, rule, pace, burst)
    for start in _by_beam(shop):
        yield start
        for rule, pace, burst in islice(ways, 2):
            yield _by_rule(shop, rule, pace, burst)
    for rule, pace, burst in ways:
        yield _by_rule(shop, rule, pace, burst)


def from_template(shop: JobShop, template: Template) -> Iterator[list[int]]:
    """The template itself, if it keeps the caps, and a list schedule with the template's dates."""
    dates = template.unrolled(shop.num_microbatches)
    if template.keeps_caps(shop):
        yield dates
    yield list_schedule(shop, dates, [0] * shop.num_microbatches)


def steady_templates(shop: JobShop, stop: Callable[[], bool]) -> Iterator[list[int]]:
    """Unrolled templates that keep the caps, the shortest first, for many microbatches.

    Longer periods are left out once there is one template and ``stop`` is true.
    """
    load = shop.most_load
    found: list[list[int]] = []
    for period in (1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.15, 1.2, 1.25, 1.3):
        if found and stop():
            break
        for template in beam_templates(shop, int(load * period))[:1]:
            if template.keeps_caps(shop):
                found.append(template.unrolled(shop.num_microbatches))
    yield from sorted(found, key=shop.makespan)


def _by_beam(shop: JobShop) -> Iterator[list[int]]:
    load = shop.most_load
    for period in (1.0, 1.05, 1.2, 1.4, 1.1, 1.3, 1.5):  # the most promising first
        for template in beam_templates(shop, int(load * period)):
            yield from from_template(shop, template)


def _ways(shop: JobShop) -> Iterator[tuple[PriorityRule, float, int]]:
    """Rules, paces and numbers of microbatches injected at once, the most promising first."""
    half = shop.placement.num_devices // 2
    paces = (0.0, 7 / 6, 13 / 12, 1.0, 1.25, 1.5, 5 / 3)  # between two microbatches; 0: no delay
    for burst in sorted({1, 2, 3, half, half + 1}):
        for pace in paces if burst == 1 else paces[1:]:
            for rule in RULES:
                yield rule, pace, max(1, burst)


def _by_rule(shop: JobShop, rule: PriorityRule, pace: float, burst: int) -> list[int]:
    """List schedule in which microbatch m is released at ``pace * load * (m - burst + 1)``."""
    num, count, heads = shop.placement.num_stages, shop.num_microbatches, shop.heads()
    load = shop.most_load
    late = 4 * (max(heads) + load * count)
    rank = [
        rule.direction * head + late * ((rule.backward_last and k >= num) + 2 * (k >= 2 * num))
        for k, head in enumerate(heads)
    ]
    release = [int(max(0, m - burst + 1) * pace * load) for m in range(count)]
    dates = [r + rule.weight * load * m for r in rank for m in range(count)]
    return list_schedule(shop, dates, release)
