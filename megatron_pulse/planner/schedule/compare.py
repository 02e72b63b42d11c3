"""The classic schedules beside one's own, on the same chain of stages.

A classic schedule has a placement of its own. The chain stays as it is and is laid out anew over
as many devices: a device of 1F1B, GPipe or ZB-H1 gets as many *neighbouring* stages as a device has
here, run as one; interleaved gets the same stages in turn; a schedule for a fold of one wave merges
neighbours where there are more; a device of Chimera gets what two of 1F1B's have, and the weights
of both. A boundary keeps its link's time. So every schedule does the same work, and memory is
counted in the same stage activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement
from megatron_pulse.planner.schedule.check.simulate import Timeline, run
from megatron_pulse.planner.schedule.check.validate import held_most
from megatron_pulse.planner.schedule.chimera import chimera
from megatron_pulse.planner.schedule.classic.names import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, whole


@dataclass(frozen=True)
class Rival:
    """A classic schedule on the chain; its memory does not ask whether it fits."""

    name: str
    problem: ScheduleProblem
    schedule: Schedule
    timeline: Timeline

    @property
    def placement(self) -> str:
        """How the chain is laid out."""
        if self.name == "chimera":
            return "bidirectional"
        return self.problem.placement.kind.name

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time."""
        return self.timeline.idle_share

    @property
    def peak(self) -> tuple[float, ...]:
        """Most live stage activations of each device."""
        return held_most(self.problem, self.schedule)

    def fits(self, cap: tuple[float, ...] | None) -> bool:
        """Whether no device holds more than its cap."""
        return cap is None or all(
            held <= limit * (1 + 1e-9) for held, limit in zip(self.peak, cap, strict=True)
        )


def rivals(problem: ScheduleProblem, split: ScheduleProblem | None = None) -> list[Rival]:
    """Every classic schedule that the chain can be laid out for.

    ``split`` is the same problem with split backwards, where those are known: schedules that split
    are left out without it, and those that do not run a backward as one, also where ``problem``
    splits.
    """
    found = []
    for name in CLASSICS:
        found += list(_variants(name, problem, split or (problem if problem.weight_grad else None)))
    return [*found, *_both_ways(problem)]


def rival(name: str, problem: ScheduleProblem, split: ScheduleProblem | None = None) -> Rival:
    """The classic schedule of that name; raises ValueError where the chain cannot run it."""
    for found in _variants(name, problem, split or (problem if problem.weight_grad else None)):
        return found
    raise ValueError(
        f"{name} cannot run {problem.placement.num_stages} stages on "
        f"{problem.placement.num_devices} devices"
        + " without times of input and weight gradients"
        * (name in SPLIT and split is None)
    )


def merged(problem: ScheduleProblem, placement: Placement) -> ScheduleProblem:
    """``problem`` on another placement of as many devices; neighbouring stages become one.

    Raises ValueError unless ``placement`` has a stage for every so many of the problem's.
    """
    each, rest = divmod(problem.placement.num_stages, placement.num_stages)
    if rest or not each or placement.num_devices != problem.placement.num_devices:
        raise ValueError(
            f"{problem.placement.num_stages} stages cannot be merged evenly into "
            f"{placement.num_stages} on {placement.num_devices} devices"
        )

    def together(column: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sum(column[i : i + each]) for i in range(0, len(column), each))

    return ScheduleProblem(
        placement,
        problem.num_microbatches,
        together(problem.forward),
        together(problem.backward),
        None if problem.weight_grad is None else together(problem.weight_grad),
        problem.link[each - 1 :: each] if isinstance(problem.link, tuple) else problem.link,
        together(tuple(map(problem.activation_of, range(problem.placement.num_stages)))),
    )


def _variants(
    name: str, problem: ScheduleProblem, split: ScheduleProblem | None
) -> Iterator[Rival]:
    own = split if name in SPLIT else whole(problem)
    if own is None:
        return
    for placement in _placements(problem.placement):
        try:
            schedule = CLASSICS[name](placement, problem.num_microbatches)
            laid_out = merged(own, placement)
        except ValueError:
            continue  # a placement that the schedule is not for, or stages that do not divide
        yield Rival(name, laid_out, schedule, run(laid_out, schedule))
        return


def _both_ways(problem: ScheduleProblem) -> Iterator[Rival]:
    """Chimera, whose even microbatches see a sequential placement."""
    try:
        schedule = chimera(problem.placement.num_devices, problem.num_microbatches)
        laid_out = merged(whole(problem), schedule.placement)
    except ValueError:
        return  # an odd number of devices, or stages that do not divide
    yield Rival(schedule.name, laid_out, schedule, run(laid_out, schedule))


def _placements(placement: Placement) -> list[Placement]:
    """What the chain may be laid out as, in the order of preference.

    Stages in turn are as many as the chain has on a device; of folds, one wave comes first.
    """
    devices, found = placement.num_devices, []
    for kind in PLACEMENTS.values():
        counts = [n for n in range(1, placement.num_chunks + 1) if kind.allows(n)]
        for count in counts if kind.mirrored else reversed(counts):
            found.append(kind.place(devices, count))
    return found
