"""Steps of every sample shape (aspect-ratio buckets) under the best configs of a search.

All samples of a step have one shape. The search works with the mean of the shapes' costs; here each
of its best configs gets a step of every shape. Degrees, cuts and activation policies are shared.
A shape k has its own schedule, and its own microbatch size b_k and number M_k::

    b_k M_k D = B        for every shape; B is the global batch size, D the data degree

As cuts are shared and steps independent, the mean step is least where each shape has the b_k of its
own shortest step. The configs are ranked by that mean, weighted by the shapes' shares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_pulse.planner.schedule.solve import solve
from megatron_pulse.planner.tune.config import Choices, Config, divisors
from megatron_pulse.planner.tune.evaluate import LARGE, Evaluator, Outcome, ShapeOutcome
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.link_contention import schedules
from megatron_pulse.planner.tune.search.budget import Budget, Clock
from megatron_pulse.planner.tune.search.refine import LARGEST, LEAST_S
from megatron_pulse.planner.tune.search.result import Tuning, simplicity, tried
from megatron_pulse.profile.profile import Profile, Source

COMPARED_SHARE = 0.5
"""Share of the time for comparing configs. The rest is for schedules of the best one's shapes."""


def plan_shapes(
    evaluator: Evaluator,
    found: Tuning,
    choices: Choices,
    seconds: float,
    solver: str = "auto",
    clock: Clock | None = None,
) -> list[str]:
    """Give the outcomes of ``found`` a step of every shape, and sort anew, in about ``seconds``.

    Outcomes without a whole schedule, those for which no time is left, and those under which a
    shape does not fit are removed; the latter's faults are returned. No lower bound on untried
    configs remains, since they may have other microbatch sizes for each shape.
    """
    budget = Budget(seconds, clock)
    shapes = _Shapes(evaluator, choices)
    faults: list[str] = []
    made: list[Outcome] = []
    for outcome in found.outcomes:
        if outcome.extrapolated or (made and budget.spent > COMPARED_SHARE * seconds):
            continue
        try:
            made.append(shapes.steps(outcome))
        except UnfitError as error:
            faults.append(str(error))
    if made:
        made.sort(key=_rank)
        alone = {tried(outcome): outcome for outcome in found.outcomes}
        better = shapes.improved(made[0], budget, solver)
        made[0] = alone[tried(made[0])].with_shapes(better)
        made.sort(key=_rank)
    known = {tried(outcome): outcome for outcome in made}
    found.outcomes, found.near, found.bound_s = made, [], 0.0
    found.rivals = {
        name: known[tried(rival)] for name, rival in found.rivals.items() if tried(rival) in known
    }
    found.seconds += budget.spent
    return faults


def _rank(outcome: Outcome) -> tuple[object, ...]:
    return outcome.step_s, simplicity(outcome.config)


class _Shapes:
    """Evaluators of each shape's costs."""

    def __init__(self, evaluator: Evaluator, choices: Choices) -> None:
        self.choices = choices
        self.shapes = evaluator.profile.shapes
        self.evaluators = [
            evaluator.on(evaluator.cluster, profile=evaluator.profile.at_shape(k))
            for k in range(len(self.shapes))
        ]

    def steps(self, outcome: Outcome) -> Outcome:
        """``outcome`` with the best quick step of every shape; raises UnfitError naming one that
        does not fit."""
        pairs = zip(self.shapes, self.evaluators, strict=True)
        return outcome.with_shapes(
            tuple(
                ShapeOutcome(shape.name, shape.share, self._best(outcome, shape.name, own), own)
                for shape, own in pairs
            )
        )

    def _best(self, outcome: Outcome, name: str, own: Evaluator) -> Outcome:
        """Shortest step of a shape, with any of its microbatch sizes."""
        best: Outcome | None = None
        refusal: UnfitError | None = None
        for size in sizes_of_shape(
            own.profile, own.global_batch_size, outcome.config, self.choices
        ):
            config = replace(outcome.config, micro_batch_size=size)
            try:
                made = _made(own, config, outcome, best)
            except UnfitError as error:
                refusal = error
            else:
                best = made or best
        if best is None:
            assert refusal is not None
            raise UnfitError(refusal.reason, f"bucket {name}: {refusal.detail}")
        return best

    def improved(self, outcome: Outcome, budget: Budget, solver: str) -> tuple[ShapeOutcome, ...]:
        """Shapes of ``outcome`` with searched and solved schedules, as far as time allows."""
        shapes = list(outcome.shapes)
        for number, shape in enumerate(outcome.shapes):
            own, old = shape.evaluator, shape.outcome
            work = own.size(old.config, whole=True)
            if work > LARGEST or not budget.left:
                continue
            new = _scheduled(own, old, own.effort if work <= LARGE else 0)
            part_s = budget.left / (len(shapes) - number)
            if part_s >= LEAST_S:
                whole = solve(new.problem, part_s, solver)
                solved = own.evaluate(new.config, whole, stages=new.stages)
                new = solved if own.has_room(solved) and solved.step_s < new.step_s else new
            shapes[number] = replace(shape, outcome=new)
        return tuple(shapes)


def sizes_of_shape(
    profile: Profile, global_batch_size: int, config: Config, choices: Choices
) -> list[int]:
    """Microbatch sizes of a shape's steps: the config's, and divisors of a replica's samples.

    Of a measured profile these are measured sizes, else sizes within the profiled range.
    """

    def is_known(size: int) -> bool:
        if profile.source is Source.MEASURED:
            return size in profile.times
        return not profile.extrapolates(size)

    given, unit = choices.micro_batch_size, 2 if choices.pairs else 1
    return [
        size
        for size in divisors(global_batch_size // config.data)
        if size == config.micro_batch_size
        or (is_known(size) and size % unit == 0 and (given is None or size in given))
    ]


def _made(own: Evaluator, config: Config, outcome: Outcome, best: Outcome | None) -> Outcome | None:
    """Quick step of a shape by the cuts and policies of ``outcome``; None if ``best`` is no
    longer. Raises UnfitError."""
    own.refuse(config)
    stages = own.stages.build(config, outcome.stages.partition, outcome.stages.activations)
    problem = own.problem(config, own.costs.num_microbatches(config), stages)
    if best is not None and own.bound(config, stages) >= best.step_s:
        return None
    make = partial(schedules, edges=stages.edges, effort=0, bounded=False)
    found = own.with_room(config, stages, problem, make)[0]
    made = own.evaluate(config, found, stages=stages)
    if not own.has_room(made):
        raise UnfitError(Unfit.ACTIVATIONS, f"{config}: its schedule needs more memory")
    return made if best is None or made.step_s < best.step_s else None


def _scheduled(own: Evaluator, old: Outcome, effort: int) -> Outcome:
    """``old`` with the schedule of a search of that effort, if that is shorter and fits."""
    make = partial(schedules, edges=old.stages.edges, effort=effort)
    found = own.with_room(old.config, old.stages, old.problem, make)[0]
    new = own.evaluate(old.config, found, stages=old.stages)
    return new if own.has_room(new) and new.step_s < old.step_s else old
