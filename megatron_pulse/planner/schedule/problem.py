"""What is to be scheduled, and what is known about the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.faults import Faults, told, wrong_count, wrong_kinds
from megatron_pulse.planner.cluster.link import Link
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.schedule.operations import Kind, Schedule

LEAST_S = 1e-12
"""Seconds that an operation takes at the least, where costs say none."""

MOST_LINK = 1e12
"""Times the longest operation that a message may take: searches count in 64 bits."""


@dataclass(frozen=True)
class ScheduleProblem:
    """One step. Durations are of each stage on one microbatch, all in one unit.

    ``backward`` is the whole backward pass, or the input gradient alone where ``weight_grad`` is
    given: the pass is then split into two operations. ``link`` is the time of a boundary between
    two devices: one for all, or ``link[s]`` for the one between stages s and s + 1. A stage's
    forward takes ``activation`` (default 1) of its device's memory, which its backward, or its
    weight gradient, gives back; device d has ``cap[d]`` (None: enough). Of ``backward`` activations
    are computed again for ``recompute``, which needs nothing of another stage: a schedule may have
    it as an operation of its own, R, from which on ``recomputed`` (default 0) is taken until the
    backward's end. Between input and weight gradient an activation takes ``waiting`` (default: as
    before). Of a stage's activation ``offloaded`` may wait on the host (O, L), where it is
    ``copying`` as long each way; a device copies one microbatch at a time in each direction.
    Raises ValueError with every fault.
    """

    placement: Placement
    num_microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_grad: tuple[float, ...] | None = None
    link: float | tuple[float, ...] = 0.0
    activation: tuple[float, ...] | None = None
    cap: tuple[float, ...] | None = None
    recompute: tuple[float, ...] | None = None
    recomputed: tuple[float, ...] | None = None
    waiting: tuple[float, ...] | None = None
    offloaded: tuple[float, ...] | None = None
    copying: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise Faults(faults)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The operations of every stage and microbatch, in their order."""
        if self.weight_grad is None:
            return (Kind.FORWARD, Kind.BACKWARD)
        return (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)

    def chain(self, number: int) -> ScheduleProblem:
        """One chain of a cascade alone on the devices."""
        placement = self.placement
        first, last = placement.starts[number], placement.ends[number]

        def own[T](values: tuple[T, ...]) -> tuple[T, ...]:
            return values[first : last + 1]

        return replace(
            self,
            placement=Placement(
                placement.kind, placement.num_devices, own(placement.device_of_stage)
            ),
            forward=own(self.forward),
            backward=own(self.backward),
            weight_grad=None if self.weight_grad is None else own(self.weight_grad),
            link=self.link[first:last] if isinstance(self.link, tuple) else self.link,
            activation=None if self.activation is None else own(self.activation),
            recompute=None if self.recompute is None else own(self.recompute),
            recomputed=None if self.recomputed is None else own(self.recomputed),
            waiting=None if self.waiting is None else own(self.waiting),
            offloaded=None if self.offloaded is None else own(self.offloaded),
            copying=None if self.copying is None else own(self.copying),
        )

    @property
    def within_backwards(self) -> ScheduleProblem:
        """The same where all that is computed again is so within backwards."""
        return replace(self, recompute=None, recomputed=None)

    @property
    def without_recomputation(self) -> ScheduleProblem:
        """The same where nothing is computed again: no schedule of this one is shorter than its
        shortest."""
        if self.recompute is None:
            return self
        pairs = zip(self.backward, self.recompute, strict=True)
        backward = tuple(max(LEAST_S, b - r) for b, r in pairs)  # which rounding may be less than
        return replace(self.within_backwards, backward=backward)

    @property
    def holding_all(self) -> ScheduleProblem:
        """The same where an activation takes all the time what it takes at the most; its schedules
        are answers here too."""
        if self.waits_alike:
            return replace(self, waiting=None)
        most = tuple(map(self.most_of, range(self.placement.num_stages)))
        return replace(self, activation=most, waiting=None)

    @property
    def with_least_memory(self) -> ScheduleProblem:
        """The same where nothing travels, and an activation that does takes all the time what it
        takes at the least: no schedule of this one is shorter than its shortest."""
        if self.offloaded is None:
            return self
        activation = tuple(map(min, self._elsewhere, self._kept_waiting))
        return replace(self, activation=activation, waiting=None, offloaded=None, copying=None)

    def with_all_elsewhere(self, parts: Sequence[float]) -> ScheduleProblem:
        """The same where all that may wait on the host takes no memory, and no time to travel;
        activations take what is left of them, or the stage's part of what weight gradients wait
        with, all the time."""
        activation = self._elsewhere
        if self.weight_grad is not None:
            least = (part * num for part, num in zip(parts, self._kept_waiting, strict=True))
            activation = list(map(max, activation, least))
        given = tuple(activation)
        return replace(self, activation=given, waiting=None, offloaded=None, copying=None)

    @property
    def _elsewhere(self) -> list[float]:
        """What stages' activations take without what may wait on the host."""
        own = list(map(self.activation_of, range(self.placement.num_stages)))
        return (
            own
            if self.offloaded is None
            else [a - o for a, o in zip(own, self.offloaded, strict=True)]
        )

    @property
    def _kept_waiting(self) -> list[float]:
        """What they take between input and weight gradient."""
        own = map(self.activation_of, range(self.placement.num_stages))
        return list(own if self.waiting is None else self.waiting)

    def copying_of(self, stage: int) -> float:
        """Time in which what may wait on the host travels, one way; 0 where that is not known."""
        return 0.0 if self.copying is None else self.copying[stage]

    def duration(self, kind: Kind, stage: int) -> float:
        """Time of an operation; of a backward that computes activations again itself. Where it is
        not known what that takes, an R takes none of it. An O takes none, but may have to wait."""
        if kind.copies:
            return 0.0
        if kind is Kind.FORWARD:
            return self.forward[stage]
        if kind is Kind.RECOMPUTE:
            return 0.0 if self.recompute is None else self.recompute[stage]
        if kind is Kind.WEIGHT_GRAD:
            assert self.weight_grad is not None
            return self.weight_grad[stage]
        return self.backward[stage]

    def lag(self, stage: int, other: int) -> float:
        """Time of the boundary between two neighbouring stages; none on one device, nor between
        two chains."""
        home = self.placement.device_of_stage
        if home[stage] == home[other] or max(stage, other) in self.placement.starts:
            return 0.0
        return self.link[min(stage, other)] if isinstance(self.link, tuple) else self.link

    def activation_of(self, stage: int) -> float:
        """Memory that a forward of ``stage`` takes."""
        return 1.0 if self.activation is None else self.activation[stage]

    def change(self, kind: Kind, stage: int) -> float:
        """By how much an operation changes what activations take on its device; recomputation
        aside, and of what grows at its begin, of what shrinks at its end."""
        own = self.activation_of(stage)
        left = own if self.waiting is None else self.waiting[stage]
        away = 0.0 if self.offloaded is None else self.offloaded[stage]
        changes = {
            Kind.FORWARD: own,
            Kind.BACKWARD: -own,
            Kind.INPUT_GRAD: left - own,
            Kind.WEIGHT_GRAD: -left,
            Kind.OFFLOAD: -away,
            Kind.RELOAD: away,
        }
        return changes.get(kind, 0.0)

    def waiting_of(self, stage: int) -> float:
        """Memory that it takes from the input gradient to the weight gradient."""
        if self.waiting is None or self.weight_grad is None:
            return self.activation_of(stage)
        return self.waiting[stage]

    def most_of(self, stage: int) -> float:
        """Memory that it takes at the most, from the forward to the weight gradient."""
        return max(self.activation_of(stage), self.waiting_of(stage))

    @property
    def waits_alike(self) -> bool:
        """Whether activations take the same until their weight gradients."""
        if self.waiting is None or self.weight_grad is None:
            return True
        return all(w == self.activation_of(s) for s, w in enumerate(self.waiting))

    def _faults(self) -> list[str]:
        stages, devices = self.placement.num_stages, self.placement.num_devices
        faults = wrong_count("num_microbatches", self.num_microbatches)
        for name, count, least in (
            ("forward", stages, LEAST_S),
            ("backward", stages, LEAST_S),
            ("weight_grad", stages, LEAST_S),
            ("activation", stages, 0.0),
            ("cap", devices, 0.0),
            ("recompute", stages, 0.0),
            ("recomputed", stages, 0.0),
            ("waiting", stages, 0.0),
            ("offloaded", stages, 0.0),
            ("copying", stages, 0.0),
        ):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != count:
                faults.append(f"{name}: need {count} values, got {len(values)}")
            if not all(math.isfinite(v) and v >= least for v in values):
                faults.append(
                    f"{name}: values must be finite and {'positive' if least else '>= 0'}"
                )
        if self.recomputed is not None and self.recompute is None:
            faults.append("recomputed: memory without the time that it takes (recompute)")
        if self.copying is not None and self.offloaded is None:
            faults.append("copying: time without what travels in it (offloaded)")
        if self.offloaded is not None:
            if self.copying is None:
                faults.append("offloaded: memory without the time in which it travels (copying)")
            own = map(self.activation_of, range(stages))
            if not faults and any(o > a for o, a in zip(self.offloaded, own, strict=True)):
                faults.append("offloaded: is a part of each activation, and must not be more")
        if not faults and self.recompute is not None:
            pairs = zip(self.backward, self.recompute, strict=True)
            if any(again > backward - LEAST_S for backward, again in pairs):
                faults.append("recompute: is a part of each backward, and must be less")
        links = self.link if isinstance(self.link, tuple) else (self.link,) * (stages - 1)
        if len(links) != stages - 1:
            faults.append(f"link: need one value, or {stages - 1}, got {len(links)}")
        if not all(math.isfinite(time) and time >= 0 for time in links):
            faults.append(f"link: must be finite and not negative, is {self.link}")
        longest = max((*self.forward, *self.backward), default=0.0)
        if not faults and max(links, default=0.0) > MOST_LINK * longest:
            faults.append(
                f"link: {max(links):g} is more than {MOST_LINK:g} times the longest operation, "
                f"{longest:g}: give both in one unit"
            )
        if not faults and self.cap is not None:
            for device, cap in enumerate(self.cap):
                held = sum(map(self.most_of, self.placement.stages_of_device(device)))
                if held > cap * (1 + 1e-9):
                    faults.append(
                        f"device {device} holds {held:g} for one microbatch, its cap is {cap:g}"
                        + " (counting what weight gradients wait with, where that is more)"
                        * (not self.waits_alike)
                    )
        return faults


def stage_problem(
    costs: ChainCosts,
    partition: Partition,
    num_microbatches: int,
    link: float | tuple[float, ...] = 0.0,
    *,
    split: bool = False,
    activation: tuple[float, ...] | None = None,
    cap: tuple[float, ...] | None = None,
    recomputed: tuple[float, ...] | None = None,
    waiting: tuple[float, ...] | None = None,
    least_s: float = LEAST_S,
    operation_s: float = 0.0,
    offloaded: tuple[float, ...] | None = None,
    copying: tuple[float, ...] | None = None,
) -> ScheduleProblem:
    """The problem of a chain that is cut: every stage takes what its layers take, in seconds.

    With ``split`` the weight gradients are apart, and all takes what it takes then. An operation
    takes ``operation_s`` beside its layers, and ``least_s`` or more. The rest is as ScheduleProblem
    has it, and so are the errors; where what is ``recomputed`` is not known in the unit of
    ``activation``, recomputation stays within backwards.
    """

    costs = costs.of_schedule(split)

    def total(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(least_s, s + operation_s) for s in partition.per_stage(values))

    backward, weight = total(costs.backward_s), None
    if split:
        weight = total(costs.weight_grad_s)
        backward = tuple(
            max(least_s, b + operation_s - w) for b, w in zip(backward, weight, strict=True)
        )
    recompute = None
    if recomputed is not None and any(costs.recompute_s):
        again = partition.per_stage(costs.recompute_s)
        recompute = tuple(
            max(0.0, min(r, b - least_s)) for r, b in zip(again, backward, strict=True)
        )
    return ScheduleProblem(
        partition.placement,
        num_microbatches,
        total(costs.forward_s),
        backward,
        weight,
        link,
        activation,
        cap,
        recompute,
        None if recompute is None else recomputed,
        waiting,
        offloaded,
        copying,
    )


def boundary_s(costs: ChainCosts, partition: Partition, link: Link) -> tuple[float, ...]:
    """Seconds of the tensor between each stage and the next over ``link``, alone."""
    return tuple(link.time_s(costs.boundary_bytes[cut]) for cut in partition.cuts[1:-1])


def require_problem(what: str, problem: object) -> None:
    """Raise ValueError unless ``problem``, which ``what`` is given, is one."""
    remark = ", as plan.problem_of(num_microbatches) makes one"
    if faults := wrong_kinds([("problem", problem, ScheduleProblem, remark)]):
        raise ValueError(told(what, faults))


def equal_stages(
    placement: Placement, num_microbatches: int, split: bool = False, cap: float | None = None
) -> ScheduleProblem:
    """The problem where nothing is known of stages: forward 1, backward 2, in halves with
    ``split``; ``cap`` activations on a device, by default as many as there are stages."""
    num = placement.num_stages
    one = (1.0,) * num
    caps = (float(num if cap is None else cap),) * placement.num_devices
    return ScheduleProblem(
        placement,
        num_microbatches,
        one,
        one if split else (2.0,) * num,
        one if split else None,
        cap=caps,
    )


def whole(problem: ScheduleProblem) -> ScheduleProblem:
    """``problem`` with each input and weight gradient as one backward."""
    if problem.weight_grad is None:
        return problem
    both = zip(problem.backward, problem.weight_grad, strict=True)
    backward = tuple(i + w for i, w in both)
    return replace(problem, backward=backward, weight_grad=None, waiting=None)


@dataclass(frozen=True)
class Certificate:
    """What is known of a schedule: its length, a bound below which none can be, and how it was
    found.

    ``makespan`` and ``lower_bound`` are in the problem's unit of time; ``seconds`` is how long
    ``solver`` took. ``proved`` says that no schedule is shorter.
    """

    makespan: float
    lower_bound: float
    proved: bool
    solver: str
    seconds: float

    def __str__(self) -> str:
        known = "proved" if self.proved else f"at most {self.gap:.1%} above the shortest"
        return f"{self.makespan:.4g} ({known}), by {self.solver} in {self.seconds:.1f} s"

    @property
    def gap(self) -> float:
        """How far from the bound, at most, as a share."""
        return self.makespan / self.lower_bound - 1


@dataclass(frozen=True)
class Synthesis:
    """A schedule and its certificate."""

    schedule: Schedule
    certificate: Certificate
