"""Where nothing fits: what would have to change, each tried before it is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, floor, log10

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.costs import Unfit, UnfitError
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.searching.budget import Budget
from megatron_pulse.planner.tune.searching.kinds import ranks_of
from megatron_pulse.planner.tune.searching.tuning import Tuning
from megatron_pulse.planner.tune.stages import Stages

MOST_NODES = 64
"""Times as many nodes as there are, up to which it is tried whether something fits."""

CLOSEST, REFINED = 24, 3
"""Configs that are cut to see what memory they need: those with the least on the mean device; and
of these, with the least in all, that are cut again and again for less."""

NEAR = 0.01
"""Share to which the least memory is found."""


def nothing_fits(
    evaluator: Evaluator,
    choices: Choices,
    candidates: Iterable[Config],
    budget: Budget | None = None,
    found: Tuning | None = None,
) -> str:
    """Why none of ``candidates`` can run, or none was ``found`` in time, and what would have to
    change; each remedy is one that was tried and fits, in time."""
    budget = budget or Budget(float("inf"))
    cluster, candidates = evaluator.cluster, list(candidates)
    said = [*_unseen(found)] or ["nothing fits"]
    said[0] += f": each device has {_of_device(cluster, cluster.usable_bytes)} to use"
    looking = budget.part(0.5)  # the rest is for remedies
    need = _least_memory(evaluator, candidates, looking)
    if not _by_need(evaluator, candidates):
        said = [f"nothing can run: {_reasons(evaluator, candidates)}"]
    elif need is not None:
        looked = (
            "the least that any config was found to need is about"
            if looking.left
            else "the least that was found in this time needs"
        )
        said.append(f"{looked} {_of_device(cluster, need[0])}, by {need[1]}")
        if need[0] <= cluster.usable_bytes and not (found and found.num_left):
            said.append("but all schedules that were simulated hold more at once")
    remedies: list[str] = []
    for words, state in _smaller_states(evaluator):
        lighter = evaluator.on(cluster, state)
        remedies += _remedy(words, lighter, lighter.candidates(choices), budget)
    for words, relaxed in _relaxations(choices):
        if remedies and relaxed == Choices():
            break  # one change is enough
        remedies += _remedy(words, evaluator, evaluator.candidates(relaxed), budget)
    nodes = cluster.nodes
    most = MOST_NODES * cluster.nodes
    while not remedies and cluster.inter_node and nodes < most and budget.left:
        nodes *= 2
        larger = replace(cluster, nodes=nodes)
        words, grown = f"{larger.num_devices} devices ({nodes} nodes)", evaluator.on(larger)
        remedies += _remedy(words, grown, grown.candidates(choices), budget)
    sharded = list(_sharded(evaluator, bool(remedies)))
    if not remedies:
        remedies.append(_no_remedy(cluster) if budget.left else _NO_TIME)
    return "\n  ".join(("; ".join(said), *remedies, *sharded))


def _unseen(found: Tuning | None) -> Iterator[str]:
    """That there was no time for some, if so."""
    if found is not None and found.num_left:
        yield (
            f"no config was simulated in {found.seconds:.1f} s, {found.num_left:,} were left: give "
            "it more seconds, or fewer choices; it may be that nothing fits"
        )


def _remedy(
    words: str, evaluator: Evaluator, candidates: Iterable[Config], budget: Budget
) -> Iterator[str]:
    """What fits ``with`` that, and how fast it is by a schedule that is found at once."""
    if not budget.left or (fits := _first_fit(evaluator, candidates, budget)) is None:
        return
    rate = ""
    if budget.left:
        with suppress(UnfitError):
            outcome = evaluator.evaluate(fits, quick=True)
            if evaluator.has_room(outcome):
                rate = f", about {outcome.throughput:.3g} samples/s or more"
    yield f"with {words}: {fits} fits{rate}"


def _of_device(cluster: Cluster, num_bytes: float) -> str:
    """So many usable bytes of a device, and how a cluster's file says that."""
    gb = num_bytes / 1e9
    if cluster.usable_memory == 1:
        return f"{_up(gb)} GB"
    return f"{gb:.3g} GB (memory_gb: {_up(gb / cluster.usable_memory)})"


def _up(number: float) -> str:
    """To four digits, not below it but for rounding."""
    step = 10.0 ** (floor(log10(number)) - 3)
    return f"{ceil(number / step * (1 - 1e-9)) * step:.4g}"


def _sharded(evaluator: Evaluator, others: bool) -> Iterator[str]:
    """Whether FSDP2 or HSDP would fit, where that is known; others would if something changed."""
    if evaluator.cluster.num_devices == 1 or evaluator.not_sharded:
        return
    if (found := evaluator.fully_sharded()) is None:
        yield "nor would torch's fully_shard (FSDP2, HSDP) fit"
    else:
        rate = f"{found.throughput:.4g} samples/s predicted"
        advice = " as it is" if others else "", "" if others else "; use it here"
        yield f"{found.name} fits{advice[0]}: {rate} ({found.facts}){advice[1]}"


_NO_TIME = "with more --seconds it is said what would fit: there was no time to try"


def _no_remedy(cluster: Cluster) -> str:
    tried = "other degrees, microbatch sizes and recomputation were tried, and none fits"
    if cluster.inter_node:
        return f"{tried}, nor on {MOST_NODES} times the nodes"
    return f"{tried}; more nodes were not, for the cluster's file names no link between nodes"


def _reasons(evaluator: Evaluator, candidates: Iterable[Config]) -> str:
    """How many are refused for what, whatever the memory, each with an example."""
    counts, examples = Counter[Unfit](), dict[Unfit, str]()
    for config in candidates:
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            counts[error.reason] += 1
            examples.setdefault(error.reason, error.detail)
    told = (f"{n} x {why} (for example {examples[why]})" for why, n in counts.most_common())
    return ", ".join(told)


def _smaller_states(evaluator: Evaluator) -> Iterator[tuple[str, ParameterState]]:
    """What a run may keep less of each parameter."""
    state = evaluator.state
    if state.averages:
        yield "no averages of weights (--no-averages)", replace(state, averages=False)
    if evaluator.profile.dtype == "bfloat16" and not state.half_gradients:
        words = "gradients summed in bfloat16 (--grad-reduce-in-bf16)"
        yield words, replace(state, half_gradients=True)
    if evaluator.cluster.host is not None and not state.host_optimizer:
        words = "the optimizer in the nodes' memory (--optimizer-cpu-offload)"
        yield words, replace(state, host_optimizer=True)


_EACH = (
    ("recomputation", "recompute"),
    ("other microbatch sizes", "micro_batch_size"),
    ("other pipeline degrees", "pipeline"),
    ("other tensor degrees", "tensor"),
    ("other layouts", "layouts"),
)


def _relaxations(choices: Choices) -> list[tuple[str, Choices]]:
    """``choices`` with one restriction less, for each that there is, and with none."""
    free = Choices()
    each = [
        (words, replace(choices, **{name: getattr(free, name)}))
        for words, name in _EACH
        if getattr(choices, name) != getattr(free, name)
    ]
    return [*each, ("any choice", free)] if each else []


def _by_need(evaluator: Evaluator, candidates: Iterable[Config]) -> list[Config]:
    """The least memory on the mean device first, without what no memory could mend."""
    needs = []
    for config in candidates:
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            if error.reason not in (Unfit.STATE, Unfit.ACTIVATIONS):
                continue
        totals = evaluator.totals(config)
        beside = max(totals.saved_bytes, evaluator.stepping_bytes(config, totals.trained))
        held = evaluator.state_bytes(config, totals.trained, totals.frozen) + beside
        needs.append((held / config.pipeline, config))
    return [config for _, config in sorted(needs)]


def _least_memory(
    evaluator: Evaluator, candidates: Iterable[Config], budget: Budget
) -> tuple[float, Config] | None:
    """The least that the fullest device of one of the closest configs of different degrees and
    layouts would need, for one microbatch at a time and for the optimizer; of the closest few, cut
    for so little, to ``NEAR`` of it."""
    ample = evaluator.on(replace(evaluator.cluster, memory_gb=1e6))
    found: list[tuple[float, Config]] = []
    closest: dict[object, Config] = {}
    for config in _by_need(ample, candidates):
        if config.recompute.as_needed:
            config = replace(config, recompute=Recompute.ALWAYS)
        closest.setdefault((ranks_of(config), config.distributed_optimizer), config)
    for config in list(closest.values())[:CLOSEST]:
        if found and not budget.left:
            break
        with suppress(UnfitError):
            found.append((_fullest(ample.stages(config), config.split), config))
    for need, config in sorted(found)[:REFINED]:
        high, low = need, evaluator.cluster.usable_bytes
        while budget.left and high > (1 + NEAR) * low:
            middle = (low + high) / 2
            memory_gb = middle / 1e9 / evaluator.cluster.usable_memory
            smaller = evaluator.on(replace(evaluator.cluster, memory_gb=memory_gb))
            try:
                high = min(middle, _fullest(smaller.stages(config), config.split))
            except UnfitError:
                low = middle
        found.append((high, config))
    return min(found, default=None)


def _fullest(stages: Stages, split: bool) -> float:
    """Bytes of the fullest device with one microbatch, or while the optimizer works."""
    kept = stages.per_device(stages.kept_bytes(split))
    columns = zip(stages.state_bytes, stages.transient_bytes(split), kept, strict=True)
    return max(*stages.stepping, *map(sum, columns))


def _first_fit(evaluator: Evaluator, candidates: Iterable[Config], budget: Budget) -> Config | None:
    """One of the closest configs that fits; None if none does, or the time is up."""
    for config in _by_need(evaluator, candidates)[:CLOSEST]:
        all_again = [replace(config, recompute=Recompute.ALWAYS)] * config.recompute.as_needed
        for each in (config, *all_again):
            if not budget.left:
                return None
            with suppress(UnfitError):
                evaluator.refuse(each)
                evaluator.problem(each, 1)
                return each
    return None
