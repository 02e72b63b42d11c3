"""Classic schedules for comparison, on the same chain of stages.

Each classic schedule has its own placement. The chain is laid out anew over as many devices:

* a device of 1F1B, GPipe or ZB-H1 gets as many *neighbouring* stages as a device has here, run as
  one;
* interleaved gets the same stages in turn;
* a schedule for a fold of one wave merges neighbours if there are more stages;
* a device of Chimera gets the stages of two of 1F1B's, and the weights of both.

In Chimera even microbatches go down the devices and odd ones up. A device holds a stage of either
replica: twice the weights of 1F1B, with gradients summed over both holders. A placement has one
holder of every stage, and so has the runtime: Chimera exists only for comparison.

A boundary keeps its link's time. So every schedule does the same work, and memory is counted in the
same stage activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_pulse.planner.layout.placement import PLACEMENTS, Placement, sequential
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.check.validate import peak_memory
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.classic.hanayo import by_clock
from megatron_pulse.planner.schedule.classic.one_f_one_b import check_microbatches
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


def chimera(num_devices: int, num_microbatches: int) -> Schedule:
    """A stage on each device and direction. P = M = 4 (stage:microbatch, one column per slot)

    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====
    device 0 F0:0 F0:2 .    F3:1 B3:1 F3:3 B3:3 B0:0 .    B0:2
    device 1 .    F1:0 F2:1 F1:2 F2:3 B2:1 B1:0 B2:3 B1:2 .
    device 2 .    F1:1 F2:0 F1:3 F2:2 B2:0 B1:1 B2:2 B1:3 .
    device 3 F0:1 F0:3 .    F3:0 B3:0 F3:2 B3:2 B0:1 .    B0:3
    ======== ==== ==== ==== ==== ==== ==== ==== ==== ==== ====

    The schedule's placement is that of the even microbatches. For M = KP each device idles for
    (P/2-1)(f+b + (2K-1)|b-f|): P-2 slots with f = b at any M, which is half of 1F1B's and one pair
    less. Peak on device d: P/2 + 1 + min(d, P-1-d) activations. Source of the idea: Li and Hoefler,
    arXiv 2107.06925 (K > 1: its direct concatenation). Raises ValueError for an odd number of
    devices.
    """
    check_microbatches(num_microbatches)
    if num_devices % 2:
        raise ValueError(f"chimera needs an even number of devices; got {num_devices}")
    placement = sequential(num_devices)
    order = by_clock(placement, num_microbatches, directions=2)
    return Schedule("chimera", placement, num_microbatches, order)
