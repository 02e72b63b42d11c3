"""Out-of-memory advice: changes with which a config would fit, each tried before it is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import ceil, floor, log10

from megatron_pulse.planner.cluster.cluster import Cluster
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.planner.tune.search.budget import Budget
from megatron_pulse.planner.tune.search.grouping import rank_key
from megatron_pulse.planner.tune.search.result import Tuning
from megatron_pulse.planner.tune.stages import Stages

MOST_NODES = 64
"""Maximum multiple of the node count that is tried."""

CLOSEST, REFINED = 24, 3
"""Configs that are partitioned to measure their memory, least on the mean device first. Of these,
the configs whose need is refined by bisection."""

NEAR = 0.01
"""Relative precision of the least memory."""


def oom_advice(
    evaluator: Evaluator,
    choices: Choices,
    candidates: Iterable[Config],
    budget: Budget | None = None,
    found: Tuning | None = None,
) -> str:
    """Message for a search without result: the reason, and changes that were tried and fit.

    ``candidates`` are the configs searched, ``found`` the search result, ``budget`` the time for
    trials.
    """
    budget = budget or Budget(float("inf"))
    cluster, candidates = evaluator.cluster, list(candidates)
    said = [*_unseen(found)] or ["nothing fits"]
    said[0] += f": {_has(cluster)}"
    looking = budget.part(0.5)  # the rest is for remedies
    need = _least_memory(evaluator, candidates, looking)
    if not _by_need(evaluator, candidates):
        said = [f"nothing can run: {_reasons(evaluator, candidates)}"]
    elif need is not None:
        looked = (
            "the smallest config found needs about"
            if looking.left
            else "the smallest config found in this time needs"
        )
        said.append(f"{looked} {_of_device(cluster, need[0])}: {need[1]}")
        if need[0] <= cluster.usable_bytes and not (found and found.num_left):
            said.append("all simulated schedules exceed it")
    remedies: list[str] = []
    if (offloading := evaluator.offloading_weights) is not None:
        words = "frozen weights in host memory (--offload-weights '*')"
        remedies += _remedy(words, offloading, offloading.candidates(choices), budget)
    for words, state in _smaller_states(evaluator):
        lighter = evaluator.on(cluster, state)
        remedies += _remedy(words, lighter, lighter.candidates(choices), budget)
    for words, relaxed in _relaxations(choices):
        if remedies and relaxed == Choices():
            break  # one change is enough
        remedies += _remedy(words, evaluator, evaluator.candidates(relaxed), budget)
    nodes = cluster.nodes
    most = MOST_NODES * cluster.nodes * cluster.alike_nodes
    while not remedies and cluster.inter_node and nodes < most and budget.left:
        nodes *= 2
        larger = cluster.with_nodes(nodes)
        words, grown = f"{larger.num_devices} devices ({nodes} nodes)", evaluator.on(larger)
        remedies += _remedy(words, grown, grown.candidates(choices), budget)
    sharded = list(_sharded(evaluator, bool(remedies)))
    if not remedies:
        remedies.append(_no_remedy(cluster) if budget.left else _NO_TIME)
    return "\n  ".join(("; ".join(said), *remedies, *sharded))


def _unseen(found: Tuning | None) -> Iterator[str]:
    if found is not None and found.num_left:
        yield (
            f"no config was simulated in {found.seconds:.1f} s, {found.num_left:,} are unexplored. "
            "Raise --seconds, or restrict the choices; possibly nothing fits"
        )


def _remedy(
    words: str, evaluator: Evaluator, candidates: Iterable[Config], budget: Budget
) -> Iterator[str]:
    """Line on the first config that fits after the change ``words``, with its quick throughput
    estimate."""
    if not budget.left or (fits := _first_fit(evaluator, candidates, budget)) is None:
        return
    rate = ""
    if budget.left:
        with suppress(UnfitError):
            outcome = evaluator.evaluate(fits, quick=True)
            if evaluator.has_room(outcome):
                rate = f", at least about {outcome.throughput:.3g} samples/s"
    yield f"with {words}: {fits} fits{rate}"


def _has(cluster: Cluster) -> str:
    """Usable memory of the devices as text."""
    if not cluster.mixed:
        return f"each device has {_of_device(cluster, cluster.usable_bytes)}"
    return ", ".join(f"{k.name} has {_up(k.usable_bytes / 1e9)} GB" for k in cluster.kinds)


def _of_device(cluster: Cluster, num_bytes: float) -> str:
    """Usable bytes of a device as text, with the ``memory_gb`` that a cluster file would need."""
    gb = num_bytes / 1e9
    if cluster.usable_memory == 1 or cluster.mixed:
        return f"{_up(gb)} GB"
    return f"{gb:.3g} GB (memory_gb: {_up(gb / cluster.usable_memory)})"


def _up(number: float) -> str:
    """Number rounded up to four significant digits."""
    step = 10.0 ** (floor(log10(number)) - 3)
    return f"{ceil(number / step * (1 - 1e-9)) * step:.4g}"


def _sharded(evaluator: Evaluator, others: bool) -> Iterator[str]:
    """Line on FSDP2 or HSDP, if predicted. ``others`` says that pipeline configs have a remedy."""
    if evaluator.cluster.num_devices == 1 or evaluator.not_sharded():
        return
    if (found := evaluator.fsdp_baseline()) is None:
        yield "FSDP2 does not fit either"
    else:
        rate = f"{found.throughput:.4g} samples/s predicted"
        advice = " unchanged" if others else "", "; the flags given exclude it"
        yield f"{found.name} fits{advice[0]}: {rate} ({found.facts}){advice[1]}"


_NO_TIME = "no time was left to try changes: raise --seconds"


def _no_remedy(cluster: Cluster) -> str:
    tried = "other degrees, microbatch sizes and recomputation do not fit either"
    if cluster.inter_node and not cluster.alike_nodes:
        return f"{tried}; more nodes were not tried: nodes have unlike devices"
    if cluster.inter_node:
        return f"{tried}, nor do they on {MOST_NODES} times the nodes"
    return f"{tried}; more nodes were not tried: the cluster file has no links.inter_node"


def _reasons(evaluator: Evaluator, candidates: Iterable[Config]) -> str:
    """Counts of the refusals that more memory would not mend, each with an example."""
    counts, examples = Counter[Unfit](), dict[Unfit, str]()
    for config in candidates:
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            counts[error.reason] += 1
            examples.setdefault(error.reason, error.detail)
    told = (f"{n} x {why} (for example {examples[why]})" for why, n in counts.most_common())
    return ", ".join(told) or "no config of these choices divides the devices and the batch"


def _smaller_states(evaluator: Evaluator) -> Iterator[tuple[str, ParameterState]]:
    """Changes that shrink the state kept per parameter: the text and the changed state."""
    state = evaluator.state
    if state.ema:
        yield "no EMA (--no-ema)", replace(state, ema=False)
    if evaluator.profile.dtype == "bfloat16" and not state.grad_reduce_in_bf16:
        words = "bf16 gradient reduction (--grad-reduce-in-bf16)"
        yield words, replace(state, grad_reduce_in_bf16=True)
    if evaluator.cluster.host is not None and not state.optimizer_cpu_offload:
        words = "optimizer offload (--optimizer-cpu-offload)"
        yield words, replace(state, optimizer_cpu_offload=True)


_EACH = (
    ("recomputation", "recompute"),
    ("other microbatch sizes", "micro_batch_size"),
    ("other pipeline degrees", "pipeline"),
    ("other tensor degrees", "tensor"),
    ("other context degrees", "context"),
    ("other layouts", "layouts"),
)


def _relaxations(choices: Choices) -> list[tuple[str, Choices]]:
    """``choices`` with one restriction lifted, for each restriction, and with all lifted."""
    free = Choices()
    each = [
        (words, replace(choices, **{name: getattr(free, name)}))
        for words, name in _EACH
        if getattr(choices, name) != getattr(free, name)
    ]
    return [*each, ("any choice", free)] if each else []


def _by_need(evaluator: Evaluator, candidates: Iterable[Config]) -> list[Config]:
    """Configs by the memory of the mean device, least first, without those that no memory would
    mend."""
    needs = []
    for config in candidates:
        try:
            evaluator.refuse(config)
        except UnfitError as error:
            if error.reason not in (Unfit.STATE, Unfit.ACTIVATIONS):
                continue
        totals = evaluator.costs.totals(config)
        beside = max(
            totals.saved_bytes, evaluator.costs.optimizer_step_bytes(config, totals.trained)
        )
        held = evaluator.costs.state_bytes(config, totals.trained, totals.frozen) + beside
        needs.append((held / config.pipeline, config))
    return [config for _, config in sorted(needs)]


def _least_memory(
    evaluator: Evaluator, candidates: Iterable[Config], budget: Budget
) -> tuple[float, Config] | None:
    """Least memory per device with which one of the closest configs fits, and that config.

    One microbatch at a time and the optimizer step must fit. The need of the closest few is refined
    by bisection, with a new partition for each limit, to within ``NEAR``.
    """
    max_in_flight = evaluator.on(evaluator.cluster.with_memory_gb(1e6))
    found: list[tuple[float, Config]] = []
    closest: dict[object, Config] = {}
    for config in _by_need(max_in_flight, candidates):
        if config.recompute.as_needed:
            config = replace(config, recompute=Recompute.ALWAYS)
        closest.setdefault((rank_key(config), config.distributed_optimizer), config)
    for config in list(closest.values())[:CLOSEST]:
        if found and not budget.left:
            break
        with suppress(UnfitError):
            found.append((_fullest(max_in_flight.feasible.best(config), config.split), config))
    for need, config in sorted(found)[:REFINED]:
        high, low = need, evaluator.cluster.usable_bytes
        while budget.left and high > (1 + NEAR) * low:
            middle = (low + high) / 2
            memory_gb = middle / 1e9 / evaluator.cluster.usable_memory
            smaller = evaluator.on(evaluator.cluster.with_memory_gb(memory_gb))
            try:
                high = min(middle, _fullest(smaller.feasible.best(config), config.split))
            except UnfitError:
                low = middle
        found.append((high, config))
    return min(found, default=None)


def _fullest(stages: Stages, split: bool) -> float:
    """Bytes of the fullest device, with one microbatch or during the optimizer step."""
    kept = stages.per_device(stages.kept_bytes(split))
    columns = zip(stages.state_bytes, stages.transient_bytes(split), kept, strict=True)
    return max(*stages.stepping, *map(sum, columns))


def _first_fit(evaluator: Evaluator, candidates: Iterable[Config], budget: Budget) -> Config | None:
    """First of the closest configs that fits; None if none fits, or the time is up."""
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
