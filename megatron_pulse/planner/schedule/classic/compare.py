"""Classic schedules for comparison, on the same chain of stages.

Each classic schedule has its own placement. The chain is laid out anew over as many devices:

* a device of 1F1B, GPipe or ZB-H1 gets as many *neighbouring* stages as a device has here, run as
  one;
* interleaved gets the same stages in turn;
* a schedule for a fold of one wave merges neighbours if there are more stages;
* a device of Chimera gets the stages of two of 1F1B's, and the weights of both.

A boundary keeps its link's time. So every schedule does the same work, and memory is counted in the
same stage activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.chimera import chimera
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, with_whole_backwards


@dataclass(frozen=True)
class ClassicResult:
    """A classic schedule of the chain; it may exceed the memory."""

    name: str
    problem: ScheduleProblem
    schedule: Schedule
    timeline: Timeline

    @property
    def placement(self) -> str:
        """Name of the placement."""
        if self.name == "chimera":
            return "bidirectional"
        return self.problem.placement.kind.name

    @property
    def bubble(self) -> float:
        """Idle share of all devices' time."""
        return self.timeline.idle_share

    @property
    def peak(self) -> tuple[float, ...]:
        """Peak of live stage activations of each device."""
        return peak_memory(self.problem, self.schedule)

    def fits(self, cap: tuple[float, ...] | None) -> bool:
        """True if no device exceeds its cap."""
        return cap is None or all(
            held <= limit * (1 + 1e-9) for held, limit in zip(self.peak, cap, strict=True)
        )


def rivals(problem: ScheduleProblem, split: ScheduleProblem | None = None) -> list[ClassicResult]:
    """All classic schedules for which the chain can be laid out.

    ``split`` is the same problem with split backwards, if their times are known. Without it,
    schedules with split backwards are left out. Schedules with whole backwards merge the two parts
    if ``problem`` has split backwards.
    """
    found = []
    for name in CLASSICS:
        found += list(_variants(name, problem, split or (problem if problem.weight_grad else None)))
    return [*found, *_both_ways(problem)]


def rival(
    name: str, problem: ScheduleProblem, split: ScheduleProblem | None = None
) -> ClassicResult:
    """The classic schedule called ``name``; raises ValueError if the chain cannot run it."""
    for found in _variants(name, problem, split or (problem if problem.weight_grad else None)):
        return found
    raise ValueError(
        f"{name} cannot run {problem.placement.num_stages} stages on "
        f"{problem.placement.num_devices} devices"
        + " without times of input and weight gradients"
        * (name in SPLIT and split is None)
    )


def merged(problem: ScheduleProblem, placement: Placement) -> ScheduleProblem:
    """``problem`` on another placement of as many devices, with neighbouring stages merged.

    Raises ValueError unless the stages divide evenly over those of ``placement``.
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
) -> Iterator[ClassicResult]:
    own = split if name in SPLIT else with_whole_backwards(problem)
    if own is None:
        return
    for placement in _placements(problem.placement):
        try:
            schedule = CLASSICS[name](placement, problem.num_microbatches)
            laid_out = merged(own, placement)
        except ValueError:
            continue  # an unsupported placement, or stages that do not divide
        yield ClassicResult(name, laid_out, schedule, simulate(laid_out, schedule))
        return


def _both_ways(problem: ScheduleProblem) -> Iterator[ClassicResult]:
    """Chimera on the chain; its even microbatches have a sequential placement."""
    try:
        schedule = chimera(problem.placement.num_devices, problem.num_microbatches)
        laid_out = merged(with_whole_backwards(problem), schedule.placement)
    except ValueError:
        return  # an odd number of devices, or stages that do not divide
    yield ClassicResult(schedule.name, laid_out, schedule, simulate(laid_out, schedule))


def _placements(placement: Placement) -> list[Placement]:
    """Placements of the chain in order of preference.

    Interleaved placements have as many stages as possible up to the chain's; of folds, one wave
    comes first.
    """
    devices, found = placement.num_devices, []
    for kind in PLACEMENTS.values():
        counts = [n for n in range(1, placement.num_chunks + 1) if kind.allows(n)]
        for count in counts if kind.mirrored else reversed(counts):
            found.append(kind.place(devices, count))
    return found
