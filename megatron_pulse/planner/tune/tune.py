"""Tuning from choices to whole schedules: what ``pulse tune`` and ``--pulse-auto`` both do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_pulse.faults import UserError
from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.tune.config import Choices, why_none
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.saying.nothing_fits import nothing_fits
from megatron_pulse.planner.tune.searching.budget import Budget, Clock, ProcessorClock
from megatron_pulse.planner.tune.searching.finish import finish
from megatron_pulse.planner.tune.searching.short import search_short
from megatron_pulse.planner.tune.searching.tuning import Tuning

DECISION_S, FINISH_SHARE = 28.0, 0.35
"""Seconds of a decision, and the share of them for whole schedules of the best."""


class UntunableError(UserError):
    """No config can run; the message says what would have to change."""


def check_choices(
    cluster: Cluster, global_batch_size: int, choices: Choices, has_skips: bool = True
) -> None:
    """Raises UntunableError where there are no configs of these choices whatever a profile says
    (``has_skips``: of a backbone whether it has any)."""
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
    """The ``keep`` best configs, the best of them with whole schedules, soonest first, and FSDP2.

    It takes about ``seconds`` by ``clock`` (of this process, where not said), of which ``finish_s``
    (a share, where not said) go to schedules of all microbatches by ``solver``, the others to the
    search over configs.
    ``progress`` is called after every step of the search and before what comes behind it, with what
    is being done; neither cuts nor FSDP2 are looked at any further once it is all to be
    ``stopped``. Compiling, once on a machine, is not counted. Raises UntunableError.
    """
    clock = clock or ProcessorClock()
    began, evaluator.stopped = clock(), stopped
    finish_s = FINISH_SHARE * seconds if finish_s is None else finish_s
    candidates = evaluator.candidates(choices)
    if not candidates:
        has_skips = bool(evaluator.profile.skips)
        check_choices(evaluator.cluster, evaluator.global_batch_size, choices, has_skips)
    search_s, looked = seconds - finish_s - (clock() - began), partial(progress, "tuning")
    found = search_short(evaluator, choices, candidates, keep, search_s, looked, finish_s, clock)
    finish_s = max(0.0, finish_s - max(0.0, found.seconds - search_s))
    if not found.outcomes:
        rest = Budget(max(0.0, search_s - found.seconds) + finish_s, clock)
        raise UntunableError(nothing_fits(evaluator, choices, candidates, rest, found))
    progress("what FSDP2 would come to", found)
    searched = clock()
    found.opponent = evaluator.fully_sharded()
    progress("whole schedules", found)
    finish(evaluator, found, max(0.0, finish_s - (clock() - searched)), solver, clock=clock)
    if not found.outcomes:
        raise UntunableError(
            "nothing fits: whole schedules of the best take more memory than what was simulated of "
            "them: give --seconds for more of them, or other choices"
        )
    found.stopped = stopped()
    return found
