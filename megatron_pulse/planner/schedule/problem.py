"""Scheduling problem of a step, and certificate of a solution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_pulse.backbone.costs import ChainCosts
from megatron_pulse.errors import Faults, format_faults, wrong_count, wrong_kinds
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import Partition, Placement
from megatron_pulse.planner.schedule.operations import OpType, Schedule

LEAST_S = 1e-12
"""Least duration of an operation in seconds, if costs are 0."""

MOST_LINK = 1e12
"""Largest ratio of a message's time to the longest operation: searches count in 64 bits."""


@dataclass(frozen=True)
class ScheduleProblem:
    """Scheduling problem of one step. Durations are by stage for one microbatch, all in one unit.

    ``backward`` is the whole backward pass, or with ``weight_grad`` the input gradient alone: the
    pass is then split into two operations. ``link`` is the time of a boundary between two devices:
    one for all, or ``link[s]`` for the boundary between stages s and s + 1.

    A stage's forward takes ``activation`` (default 1) of its device's memory. Its backward, or its
    weight gradient, frees that memory. Device d has ``cap[d]`` (None: unlimited). Between input and
    weight gradient an activation takes ``wgrad_bytes`` (default: unchanged).

    ``recompute_s`` is the part of ``backward`` for recomputation, which depends on no other stage.
    A schedule may run the recomputation as a separate operation R. Then ``recompute_bytes``
    (default 0) is taken from R until the backward's end. ``offload_bytes`` is the part of an
    activation that may be on the host (O, L), and ``offload_s`` the time of its copy each way. A
    device copies one microbatch at a time in each direction.

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
    recompute_s: tuple[float, ...] | None = None
    recompute_bytes: tuple[float, ...] | None = None
    wgrad_bytes: tuple[float, ...] | None = None
    offload_bytes: tuple[float, ...] | None = None
    offload_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise Faults(faults)

    @property
    def kinds(self) -> tuple[OpType, ...]:
        """Operation types of every stage and microbatch, in their order."""
        if self.weight_grad is None:
            return (OpType.FORWARD, OpType.BACKWARD)
        return (OpType.FORWARD, OpType.INPUT_GRAD, OpType.WEIGHT_GRAD)

    def chain(self, number: int) -> ScheduleProblem:
        """Problem of one chain of a cascade alone on the devices."""
        placement = self.placement
        first, last = placement.starts[number], placement.ends[number]
        home = placement.device_of_stage[first : last + 1]
        own = {name: values[first : last + 1] for name, values in self._columns() if name != "cap"}
        return replace(
            self,
            placement=Placement(placement.kind, placement.num_devices, home),
            link=self.link[first:last] if isinstance(self.link, tuple) else self.link,
            **own,
        )

    def _columns(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the fields that have a value by stage, and of ``cap``."""
        for field in fields(self):
            values = getattr(self, field.name)
            if field.name not in ("placement", "num_microbatches", "link") and values is not None:
                yield field.name, values

    @property
    def within_backwards(self) -> ScheduleProblem:
        """The same problem with all recomputation within backwards."""
        return replace(self, recompute_s=None, recompute_bytes=None)

    @property
    def without_recomputation(self) -> ScheduleProblem:
        """The same problem without recomputation: its optimum is a lower bound of this one's."""
        if self.recompute_s is None:
            return self
        pairs = zip(self.backward, self.recompute_s, strict=True)
        backward = tuple(max(LEAST_S, b - r) for b, r in pairs)  # rounding can leave less
        return replace(self.within_backwards, backward=backward)

    @property
    def with_least_memory(self) -> ScheduleProblem:
        """The same problem without copies, with offload activations at their least size throughout.

        Its optimum is a lower bound of this one's.
        """
        if self.offload_bytes is None:
            return self
        activation = tuple(map(min, self._without_offloaded, self._wgrad_bytes))
        return replace(
            self, activation=activation, wgrad_bytes=None, offload_bytes=None, offload_s=None
        )

    def with_all_offloaded(self, parts: Sequence[float]) -> ScheduleProblem:
        """The same problem with all offload activations absent, and without copies.

        Activations keep their rest throughout, or the stage's part in ``parts`` of their
        weight-gradient queue bytes if that is more.
        """
        activation = self._without_offloaded
        if self.weight_grad is not None:
            least = (part * num for part, num in zip(parts, self._wgrad_bytes, strict=True))
            activation = list(map(max, activation, least))
        given = tuple(activation)
        return replace(self, activation=given, wgrad_bytes=None, offload_bytes=None, offload_s=None)

    @property
    def _without_offloaded(self) -> list[float]:
        """Activation sizes without their offloaded part."""
        own = list(map(self.activation_of, range(self.placement.num_stages)))
        return (
            own
            if self.offload_bytes is None
            else [a - o for a, o in zip(own, self.offload_bytes, strict=True)]
        )

    @property
    def _wgrad_bytes(self) -> list[float]:
        """Activation sizes between input and weight gradient."""
        own = map(self.activation_of, range(self.placement.num_stages))
        return list(own if self.wgrad_bytes is None else self.wgrad_bytes)

    def offload_s_of(self, stage: int) -> float:
        """Time of one offload copy, one way; 0 if unknown."""
        return 0.0 if self.offload_s is None else self.offload_s[stage]

    def duration(self, kind: OpType, stage: int) -> float:
        """Duration of an operation; a backward includes its recomputation.

        An R takes no time if the time of recomputation is unknown. O and L take none, but may have
        to wait.
        """
        if kind.copies:
            return 0.0
        if kind is OpType.FORWARD:
            return self.forward[stage]
        if kind is OpType.RECOMPUTE:
            return 0.0 if self.recompute_s is None else self.recompute_s[stage]
        if kind is OpType.WEIGHT_GRAD:
            assert self.weight_grad is not None
            return self.weight_grad[stage]
        return self.backward[stage]

    def lag(self, stage: int, other: int) -> float:
        """Time of the boundary between two neighbouring stages; 0 on one device, and between two
        chains."""
        home = self.placement.device_of_stage
        if home[stage] == home[other] or max(stage, other) in self.placement.starts:
            return 0.0
        return self.link[min(stage, other)] if isinstance(self.link, tuple) else self.link

    def activation_of(self, stage: int) -> float:
        """Memory that a forward of ``stage`` takes."""
        return 1.0 if self.activation is None else self.activation[stage]

    def change(self, kind: OpType, stage: int) -> float:
        """Change of activation memory on the device by an operation, without recomputation.

        Growth counts at its begin, shrinkage at its end.
        """
        own = self.activation_of(stage)
        left = own if self.wgrad_bytes is None else self.wgrad_bytes[stage]
        away = 0.0 if self.offload_bytes is None else self.offload_bytes[stage]
        changes = {
            OpType.FORWARD: own,
            OpType.BACKWARD: -own,
            OpType.INPUT_GRAD: left - own,
            OpType.WEIGHT_GRAD: -left,
            OpType.OFFLOAD: -away,
            OpType.RELOAD: away,
        }
        return changes.get(kind, 0.0)

    def wgrad_bytes_of(self, stage: int) -> float:
        """Activation memory of ``stage`` between input and weight gradient."""
        if self.wgrad_bytes is None or self.weight_grad is None:
            return self.activation_of(stage)
        return self.wgrad_bytes[stage]

    def peak_bytes_of(self, stage: int) -> float:
        """Largest activation memory of ``stage``, from forward to weight gradient."""
        return max(self.activation_of(stage), self.wgrad_bytes_of(stage))

    @property
    def wgrad_holds_all(self) -> bool:
        """True if activations keep their size until their weight gradients."""
        if self.wgrad_bytes is None or self.weight_grad is None:
            return True
        return all(w == self.activation_of(s) for s, w in enumerate(self.wgrad_bytes))

    def _faults(self) -> list[str]:
        stages, devices = self.placement.num_stages, self.placement.num_devices
        faults = wrong_count("num_microbatches", self.num_microbatches)
        for name, values in self._columns():
            count = devices if name == "cap" else stages
            least = LEAST_S if name in ("forward", "backward", "weight_grad") else 0.0
            if len(values) != count:
                faults.append(f"{name}: need {count} values, got {len(values)}")
            if not all(math.isfinite(v) and v >= least for v in values):
                faults.append(
                    f"{name}: values must be finite and {'positive' if least else '>= 0'}"
                )
        if self.recompute_bytes is not None and self.recompute_s is None:
            faults.append("recompute_bytes: given without recompute_s, the recomputation time")
        if self.offload_s is not None and self.offload_bytes is None:
            faults.append("offload_s: given without offload_bytes, the bytes copied")
        if self.offload_bytes is not None:
            if self.offload_s is None:
                faults.append("offload_bytes: given without offload_s, the time of the copy")
            own = map(self.activation_of, range(stages))
            if not faults and any(o > a for o, a in zip(self.offload_bytes, own, strict=True)):
                faults.append("offload_bytes: must not exceed the activation of its stage")
        if not faults and self.recompute_s is not None:
            pairs = zip(self.backward, self.recompute_s, strict=True)
            if any(again > backward - LEAST_S for backward, again in pairs):
                faults.append(
                    "recompute_s: must be less than the backward of its stage, which includes it"
                )
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
                held = sum(map(self.peak_bytes_of, self.placement.stages_of_device(device)))
                if held > cap * (1 + 1e-9):
                    faults.append(
                        f"device {device} holds {held:g} for one microbatch, its cap is {cap:g}"
                        + " (counting the bytes in the weight-gradient queue where they are more)"
                        * (not self.wgrad_holds_all)
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
    recompute_bytes: tuple[float, ...] | None = None,
    wgrad_bytes: tuple[float, ...] | None = None,
    least_s: float = LEAST_S,
    operation_s: float = 0.0,
    offload_bytes: tuple[float, ...] | None = None,
    offload_s: tuple[float, ...] | None = None,
) -> ScheduleProblem:
    """Scheduling problem of a partitioned chain, in seconds: a stage takes the sum of its layers.

    With ``split`` weight gradients are separate, and layers take their times of split backwards.
    Each operation takes ``operation_s`` more than its layers, and ``least_s`` at least. The other
    arguments and the errors are those of ScheduleProblem. Recomputation stays within backwards
    unless ``recompute_bytes``, in the unit of ``activation``, is given.
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
    if recompute_bytes is not None and any(costs.recompute_s):
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
        None if recompute is None else recompute_bytes,
        wgrad_bytes,
        offload_bytes,
        offload_s,
    )


def boundary_s(costs: ChainCosts, partition: Partition, link: Link) -> tuple[float, ...]:
    """Seconds of the boundary tensor between each stage and the next over ``link``, alone."""
    return tuple(link.time_s(costs.boundary_bytes[cut]) for cut in partition.cuts[1:-1])


def require_problem(what: str, problem: object) -> None:
    """Raise ValueError unless ``problem``, which ``what`` is given, is one."""
    remark = ", as plan.problem_of(num_microbatches) makes one"
    if faults := wrong_kinds([("problem", problem, ScheduleProblem, remark)]):
        raise ValueError(format_faults(what, faults))


def equal_stages(
    placement: Placement, num_microbatches: int, split: bool = False, cap: float | None = None
) -> ScheduleProblem:
    """Problem with nominal stage times: forward 1, backward 2 (with ``split``: 1 and 1).

    ``cap`` is the number of activations on a device, by default the number of stages.
    """
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


def with_whole_backwards(problem: ScheduleProblem) -> ScheduleProblem:
    """``problem`` with each input and weight gradient joined to one backward."""
    if problem.weight_grad is None:
        return problem
    both = zip(problem.backward, problem.weight_grad, strict=True)
    backward = tuple(i + w for i, w in both)
    return replace(problem, backward=backward, weight_grad=None, wgrad_bytes=None)


@dataclass(frozen=True)
class Certificate:
    """Certificate of a schedule: its length, a lower bound, and the solver.

    ``makespan`` and ``lower_bound`` are in the problem's unit of time. ``seconds`` is the time that
    ``solver`` took. ``proved`` means that no schedule is shorter.
    """

    makespan: float
    lower_bound: float
    proved: bool
    solver: str
    seconds: float

    def __str__(self) -> str:
        known = "proved" if self.proved else f"at most {self.gap:.1%} above the lower bound"
        return f"{self.makespan:.4g} ({known}), by {self.solver} in {self.seconds:.1f} s"

    @property
    def gap(self) -> float:
        """Relative gap between makespan and lower bound."""
        return self.makespan / self.lower_bound - 1


@dataclass(frozen=True)
class Synthesis:
    """A schedule and its certificate."""

    schedule: Schedule
    certificate: Certificate
