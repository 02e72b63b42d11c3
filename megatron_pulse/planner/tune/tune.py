"""Tuning from choices to whole schedules, for ``pulse tune`` and ``--pulse-auto``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from megatron_pulse.errors import UserError, format_faults
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.config import Choices, Config, why_none
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.report.oom_advice import oom_advice
from megatron_pulse.planner.tune.search.budget import Budget, Clock, ProcessorClock
from megatron_pulse.planner.tune.search.data_parallel import add_weight_offload
from megatron_pulse.planner.tune.search.fsdp_outcome import add_fsdp
from megatron_pulse.planner.tune.search.low_memory import search_low_memory
from megatron_pulse.planner.tune.search.refine import finish
from megatron_pulse.planner.tune.search.result import Tuning, merged
from megatron_pulse.planner.tune.search.shape_steps import plan_shapes

DECISION_S, FINISH_SHARE = 28.0, 0.35
"""Seconds of a decision, and the share of them for whole schedules of the best configs."""

SHAPES_SHARE = 0.5
"""Share of the time of whole schedules that goes to those of every sample shape."""


class UntunableError(UserError):
    """No config can run; the message says what would have to change."""


def check_choices(
    cluster: Cluster, global_batch_size: int, choices: Choices, has_skips: bool = True
) -> None:
    """Raise UntunableError if these choices allow no config, whatever the profile.

    ``has_skips`` says whether the backbone has skips.
    """
    of = cluster.num_devices, cluster.devices_per_node, global_batch_size, has_skips
    if (why := why_none(*of, choices)) is not None:
        raise UntunableError(why)


def tune(
    evaluator: Evaluator,
    choices: Choices,
    seconds: float = DECISION_S,
    finish_s: float | None = None,
    solver: str = "auto",
    keep: int = 10,
    progress: Callable[[str, Tuning], None] = lambda what, found: None,
    clock: Clock | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Tuning:
    """Tune: the ``keep`` best configs, best first, the best with whole schedules, and the FSDP2
    baseline.

    The search takes about ``seconds`` by ``clock`` (default: process time). Of these, ``finish_s``
    (default: a share) go to schedules of all microbatches by ``solver``, the rest to the search
    over configs. Compilation, once per machine, is not counted. ``progress`` is called after every
    step of the search and before later phases, with the current phase. Once ``stopped`` returns
    True, neither partitions nor FSDP2 are searched further. Raises UntunableError.

    Context degrees are tuned together in half of the time. Then each is tuned by itself, the most
    promising first, in half of the time left. Degrees whose lower bound is above the best step are
    dropped. The answer is the best of all.
    """
    clock = clock or ProcessorClock()
    began, evaluator.stopped = clock(), stopped
    finish_s = FINISH_SHARE * seconds if finish_s is None else finish_s
    candidates = evaluator.candidates(choices)
    if not candidates:
        has_skips = bool(evaluator.profile.skips)
        check_choices(evaluator.cluster, evaluator.global_batch_size, choices, has_skips)
    tuner = _Tuner(evaluator, keep, solver, progress, clock, stopped)
    left = seconds - (clock() - began)
    degrees = {config.context for config in candidates}
    found = Tuning()
    if len(degrees) > 1:
        found = _tune_degrees(tuner, choices, candidates, left, finish_s / seconds)
        left = seconds - (clock() - began)
    if not found.outcomes:  # with advice on all degrees if there are several
        found = tuner.tune(choices, candidates, left, min(finish_s, max(0.0, left)))
    return found


def _tune_degrees(
    tuner: _Tuner,
    choices: Choices,
    candidates: Sequence[Config],
    seconds: float,
    finish_share: float,
) -> Tuning:
    """Best of all context degrees of ``candidates``, those of ``choices``; empty if nothing fits.

    Counts are those of the degrees by themselves. FSDP2 is compared with all of them at once.
    """
    began, found = tuner.clock(), Tuning()
    together = tuner.tune(choices, candidates, seconds / 2, finish_share * seconds / 2, must=False)
    soonest: dict[int, float] = {}
    for outcome in (*together.near, *together.rivals.values(), *together.outcomes):
        size = outcome.config.context
        soonest[size] = min(soonest.get(size, inf), outcome.step_s)
    found.outcomes, found.stopped = together.outcomes, together.stopped
    found.seconds, found.ready_s = together.seconds, together.ready_s
    found.fsdp_baseline, found.not_sharded = together.fsdp_baseline, together.not_sharded
    found.weight_offload = together.weight_offload
    configs: dict[int, list[Config]] = {}
    for config in candidates:
        configs.setdefault(config.context, []).append(config)
    bounds = {size: tuner.least_s(own) for size, own in configs.items()}
    order = sorted(configs, key=lambda size: (soonest.get(size, inf), bounds[size], size))
    for size in order:
        best_s = found.outcomes[0].step_s if found.outcomes else inf
        if found.outcomes and (found.stopped or bounds[size] >= best_s):
            found.num_configs += len(configs[size])
            if bounds[size] >= best_s:
                found.refused[Unfit.SLOWER] += len(configs[size])
            else:
                found.num_left += len(configs[size])
                found.bound_s = min(found.bound_s, bounds[size])
            continue
        left = seconds - (tuner.clock() - began)
        own_s = max(0.0, left if size == order[-1] else left / 2)
        of = replace(choices, context=(size,)), configs[size], own_s, finish_share * own_s
        spent_s = found.seconds

        def told(what: str, now: Tuning, spent_s: float = spent_s) -> None:
            tuner.progress(what, replace(now, seconds=spent_s + now.seconds))

        own = replace(tuner, progress=told, compares=False).tune(*of, must=False)
        best: dict[Config, Outcome] = {}
        every = (*found.outcomes, *own.outcomes)
        for outcome in sorted(every, key=lambda one: (one.extrapolated, one.step_s)):
            best.setdefault(outcome.config, outcome)  # whole steps first: they can run
        found = merged(found, own, tuner.keep)
        found.outcomes = list(best.values())[: max(tuner.keep, 2)]
    return found


@dataclass(frozen=True)
class _Tuner:
    """Tuning of some configs; see ``tune``. FSDP2 is predicted beside them if ``compares``."""

    evaluator: Evaluator
    keep: int
    solver: str
    progress: Callable[[str, Tuning], None]
    clock: Clock
    stopped: Callable[[], bool]
    compares: bool = True

    def least_s(self, candidates: Sequence[Config]) -> float:
        """Lower bound on the step time of those ``candidates`` that may fit."""
        least = inf
        for config in candidates:
            with suppress(UnfitError):
                self.evaluator.refuse(config)
                least = min(least, self.evaluator.estimator.quick_bound(config))
        return least

    def tune(
        self,
        choices: Choices,
        candidates: Sequence[Config],
        seconds: float,
        finish_s: float,
        must: bool = True,
    ) -> Tuning:
        """Best of ``candidates``, those of ``choices``.

        If nothing fits, raises UntunableError, or is empty unless something ``must`` be found.
        """
        evaluator, clock, keep, progress = self.evaluator, self.clock, self.keep, self.progress
        search_s, looked = seconds - finish_s, partial(progress, "tuning")
        found = search_low_memory(
            evaluator, choices, candidates, keep, search_s, looked, finish_s, clock
        )
        finish_s = max(0.0, finish_s - max(0.0, found.seconds - search_s))
        if not found.outcomes and found.num_left < found.num_configs:  # not for want of time alone
            self.add_baseline(found, choices)
            add_fsdp(found, evaluator, choices, keep)
            add_weight_offload(found, evaluator, choices, keep)
            if found.outcomes:
                return found
        if not found.outcomes and not must:
            return found
        if not found.outcomes:
            rest = Budget(max(0.0, search_s - found.seconds) + finish_s, clock)
            advice = oom_advice(evaluator, choices, candidates, rest, found)
            raise UntunableError(advice + _largest_shape(evaluator))
        searched = clock()
        self.add_baseline(found, choices)
        progress("whole schedules", found)
        finish_s = max(0.0, finish_s - (clock() - searched))
        shapes_s = SHAPES_SHARE * finish_s if evaluator.profile.shapes else 0.0
        finish(evaluator, found, finish_s - shapes_s, self.solver, clock=clock)
        faults: list[str] = []
        if found.outcomes and evaluator.profile.shapes:
            progress("schedules of each bucket", found)
            faults = plan_shapes(evaluator, found, choices, shapes_s, self.solver, clock)
        if not found.outcomes and not must:
            return found
        if faults and not found.outcomes:
            raise UntunableError(
                format_faults("a bucket does not fit under any of the best", faults)
            )
        if not found.outcomes:
            raise UntunableError(
                "nothing fits: whole schedules of the best configs need more memory than their "
                "simulated part. Raise --seconds to try more configs, or relax the choices"
            )
        add_fsdp(found, evaluator, choices, keep)
        found.stopped = self.stopped()
        if not found.stopped:
            progress("weight offload", found)
            add_weight_offload(found, evaluator, choices, keep)
        return found

    def add_baseline(self, found: Tuning, choices: Choices) -> None:
        """Predict FSDP2 within the choices, or say why not."""
        if self.compares:
            self.progress("FSDP2 baseline", found)
            sizes, degrees = choices.micro_batch_size, choices.context
            found.not_sharded = self.evaluator.not_sharded(degrees)
            found.fsdp_baseline = self.evaluator.fsdp_baseline(sizes, degrees)


def _largest_shape(evaluator: Evaluator) -> str:
    """Line that names the bucket of most activations, if there are several."""
    profile = evaluator.profile
    if not profile.shapes:
        return ""
    size = profile.micro_batch_sizes[0]
    largest = max(profile.shapes, key=lambda one: sum(x.saved_bytes for x in one.times[size]))
    return f"\n  bytes are those of the largest bucket, {largest.name}"
