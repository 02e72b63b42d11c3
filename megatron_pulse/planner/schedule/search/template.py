"""Modulo template: a periodic schedule that repeats one microbatch's start times every period.

Throughput and memory of a template do not depend on the number of microbatches (../README.md:
Search).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_pulse.planner.schedule.search.jobshop import JobShop


@dataclass(frozen=True)
class Template:
    """Class k starts microbatch m at ``start[k] + m * period``; all in ticks of a JobShop."""

    period: int
    start: tuple[int, ...]

    def unrolled(self, num_microbatches: int) -> list[int]:
        """Start times of every operation of a JobShop, the first at 0."""
        first = min(self.start)
        return [t - first + m * self.period for t in self.start for m in range(num_microbatches)]


def faults(shop: JobShop, template: Template) -> list[str]:
    """Return the reasons why ``template`` cannot run for ever; empty if it can.

    Data must arrive in time, operations of a device must not overlap modulo the period, and the
    steady state must keep within every cap.
    """
    if len(template.start) != shop.num_classes:
        return [f"the template has {len(template.start)} classes, the problem {shop.num_classes}"]
    return [
        *_data_faults(shop, template),
        *_overlaps(shop, template),
        *(
            f"device {d} holds {peak} in steady state, its cap is {cap}"
            for d, cap in enumerate(shop.cap)
            if (peak := steady_peak(shop, template, d)) > cap
        ),
    ]


def steady_peak(shop: JobShop, template: Template, device: int) -> int:
    """Largest memory of ``device`` in the template's steady state."""
    change = {k: shop.delta[k * shop.num_microbatches] for k in shop.classes_of(device)}
    start, period = template.start, template.period
    return max(
        (
            sum(more * ((start[now] - start[k]) // period) for k, more in change.items())
            for now, grows in change.items()
            if grows > 0
        ),
        default=0,
    )


def _data_faults(shop: JobShop, template: Template) -> list[str]:
    found, count = [], shop.num_microbatches
    for k, start in enumerate(template.start):
        for j, lag in shop.before[k * count]:
            ready = template.start[j // count] + shop.duration[j] + lag
            if start < ready:
                found.append(
                    f"{shop.operation(k * count)} starts at {start}, its data is there at {ready}"
                )
    return found


def _overlaps(shop: JobShop, template: Template) -> list[str]:
    found, count, period = [], shop.num_microbatches, template.period
    for d in range(shop.placement.num_devices):
        mine = sorted(shop.classes_of(d), key=lambda k: template.start[k] % period)
        for k, following in zip(mine, mine[1:] + mine[:1], strict=True):
            gap = (template.start[following] - template.start[k]) % period
            if len(mine) == 1 or (gap == 0 and following == mine[0] != mine[-1]):
                gap += period
            if gap < shop.duration[k * count]:
                names = f"{shop.operation(k * count)} and {shop.operation(following * count)}"
                found.append(f"{names} overlap on device {d} modulo {period}")
    return found
