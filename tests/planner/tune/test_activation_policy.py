"""Activation policies are minimal: compared with all subsets, and with all their cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.layout.placement import Partition
from megatron_pulse.planner.tune.config import Choices, Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator, Outcome
from megatron_pulse.planner.tune.memory.config_policy import ON_LINK, TRAVELLING
from megatron_pulse.planner.tune.memory.device_policy import solve_activation_policy
from megatron_pulse.planner.tune.memory.recompute_knapsack import LayerSavings, least_seconds
from megatron_pulse.planner.tune.search.search import search
from megatron_pulse.planner.tune.stages import Stages
from tests.planner.tune.problems import cluster, profile

ONE = Choices((LAYOUTS["sequential"], LAYOUTS["fold soft"]), (2,), (1,), (1,), split=(True,))
BYTES = st.integers(10**3, 10**6)
SECONDS = st.sampled_from([0.5, 1.0, 1.0, 2.0]) | st.floats(0.01, 3.0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(SECONDS, BYTES, BYTES), min_size=1, max_size=7),
    st.integers(0, 120),
    BYTES,
)
def test_the_least_work_is_that_of_all_subsets(
    rows: list[tuple[float, int, int]], percent: int, beside: int
) -> None:
    layers = [LayerSavings(i, *row) for i, row in enumerate(rows)]
    need = percent / 100 * sum(layer.num_bytes for layer in layers)

    def enough(chosen: tuple[LayerSavings, ...]) -> bool:
        most = max([beside, *(each.transient for each in chosen)])
        return sum(each.num_bytes for each in chosen) >= (need + most - beside) * (1 - 1e-12)

    subsets = [c for n in range(len(layers) + 1) for c in combinations(layers, n)]
    sufficient = [sum(each.seconds for each in chosen) for chosen in subsets if enough(chosen)]
    found = solve_activation_policy(layers, need, beside)
    assert (found is None) == (not sufficient)
    if found is not None:
        assert enough(tuple(layers[i] for i in found.recompute)) and not found.offload
        # Bytes are rounded down to 1/4096 of the need, which may cost a layer where sums are tight.
        assert sum(layers[i].seconds for i in found.recompute) <= 1.02 * min(sufficient) + 1e-9


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(SECONDS, BYTES, BYTES, SECONDS, st.floats(0.0, 1.3), st.floats(0.0, 1.0)),
        max_size=6,
        min_size=1,
    ),
    st.integers(0, 120),
    BYTES,
)
def test_of_all_what_is_cheap_or_nothing_the_least_work_is_chosen(
    rows: list[tuple[float, int, int, float, float, float]], percent: int, beside: int
) -> None:
    """At a third of the time of all, about; it may even spare more."""
    layers = [
        LayerSavings(
            i, s, num, transient, 0.0, inf, part_s / 3, round(share * num), less * transient
        )
        for i, (s, num, transient, part_s, share, less) in enumerate(rows)
    ]
    need = percent / 100 * sum(layer.num_bytes for layer in layers)
    sufficient = []
    for ways in product(range(3), repeat=len(layers)):
        again, part = ([e for e, w in zip(layers, ways, strict=True) if w == n] for n in (1, 2))
        if all(e.selective_bytes > 0 for e in part) and enough(again, [], need, beside, part):
            sufficient.append(sum(e.seconds for e in again) + sum(e.selective_s for e in part))
    found = solve_activation_policy(layers, need, beside)
    assert (found is None) == (not sufficient)
    if found is not None:
        assert not found.recompute & found.selective and not found.offload
        again, part = ([layers[i] for i in of] for of in (found.recompute, found.selective))
        assert enough(again, [], need, beside, part)
        seconds = sum(e.seconds for e in again) + sum(e.selective_s for e in part)
        assert seconds <= 1.02 * min(sufficient) + 1e-9
        assert least_seconds(layers, need) <= min(sufficient) + 1e-9


def tight(
    seed: int, host: bool = False, dear: tuple[float, float] | None = None
) -> tuple[Evaluator, Config]:
    """A chain of few layers whose activations do not all fit on two devices."""
    rng = random.Random(seed)
    layout = LAYOUTS[rng.choice(["sequential", "fold soft"])]
    chain = profile(rng, 8, rng.choice([0, 2]), saved_mb=rng.choice([100.0, 200.0]), dear=dear)
    held = sum(layer.saved_bytes for layer in chain.times[1])
    state = 18 * sum(layer.parameters for layer in chain.layers)
    room = rng.uniform(0.5, 1.6) * held
    machine = cluster(1, 2, memory_gb=(state / 2 + room) * 1.1 / 0.92e9, intra_gbs=200.0)
    config = Config(2, 1, 1, 1, layout, split=True, max_in_flight=True, recompute=Recompute.NEEDED)
    if host:
        link = replace(machine.intra_node, bandwidth_gbs=rng.choice([10.0, 30.0, 100.0]))
        machine, config = replace(machine, host=link), replace(config, recompute=Recompute.HOST)
    return Evaluator(chain, machine, 8), config


def least_load(evaluator: Evaluator, config: Config) -> float | None:
    """Seconds of the busiest device, at the least, of all cuts and all choices of layers that leave
    room for what is in flight at full rate; None where there are none."""
    profile, placement = evaluator.profile, config.placement
    kept, again, part = (
        profile.at(1, profile.all_layers(policy))
        for policy in (
            ActivationPolicy.KEEP,
            ActivationPolicy.RECOMPUTE,
            ActivationPolicy.SELECTIVE,
        )
    )
    selects = any(layer.selective_bytes for layer in profile.times[1])
    to_host = evaluator.cluster.to_host
    in_flight = evaluator.planner.memory_rule(config, 1.0, 0.0).in_flight
    found = []
    for inner in combinations(range(1, len(kept)), placement.num_stages - 1):
        partition = Partition(placement, (0, *inner, len(kept)))
        stages = evaluator.stages.build(config, partition, ActivationPolicies())
        worst = 0.0
        for device in range(placement.num_devices):
            own = [
                (i, in_flight[s])
                for s in placement.stages_of_device(device)
                for i in partition.layers_of_stage(s)
            ]
            beside = stages.state_bytes[device] + stages.in_transit_bytes[device]
            least, link_s = inf, ON_LINK * stages.busy_s(config.split)
            ways = [0, 1, *[2] * (to_host is not None), *[3] * selects]
            for chosen in product(ways, repeat=len(own)):
                held, seconds, working, moving = beside, 0.0, 0.0, 0.0
                for (i, times), way in zip(own, chosen, strict=True):
                    costs = {1: again, 3: part}.get(way, kept)
                    peak = profile.times[1][i].peak_bytes
                    held += times * costs.saved_bytes[i]
                    seconds += costs.forward_s[i] + costs.backward_s[i]
                    working = max(working, peak - (0 if way == 1 else costs.saved_bytes[i]))
                    if way == 2 and to_host is not None:
                        fewer = kept.saved_bytes[i] - again.saved_bytes[i]
                        held -= max(0.0, times - TRAVELLING) * fewer
                        moving += kept.saved_bytes[i] / to_host.bytes_per_s
                if held + working <= evaluator.cluster.usable_bytes and moving <= link_s:
                    least = min(least, seconds)
            worst = max(worst, least)
        found.append(worst)
    return min(found) if min(found) < inf else None


def beside_the_best(evaluator: Evaluator, config: Config) -> tuple[Stages, float]:
    """The config's stages with room for the in-flight microbatches, and the excess load of the
    busiest device."""
    best = least_load(evaluator, config)
    assert best is not None
    stages = evaluator.feasible.best(config)
    assert evaluator.planner.holds(config, stages, 1.0)
    costs = stages.costs
    work = tuple(f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True))
    return stages, max(stages.per_device(stages.partition.per_stage(work))) / best - 1


def test_cuts_and_what_is_computed_again_are_about_the_best_of_all() -> None:
    over, num_recomputed = [], 0
    for seed in (5, 6, 7, 9, 11, 13, 23, 30, 47, 60, 112, 119, 1, 10, 21):
        evaluator, config = tight(seed)
        stages, above = beside_the_best(evaluator, config)
        over.append(above)
        num_recomputed += bool(stages.activations.recompute)
    assert num_recomputed >= 10
    assert min(over) > -1e-9 and max(over) < 0.02 and sum(over) / len(over) < 0.002


def test_cuts_and_of_what_layers_all_or_what_is_cheap_are_about_the_best_of_all() -> None:
    over, whole, part = [], 0, 0
    for seed in range(60):
        evaluator, config = tight(seed, dear=(0.6, 0.95))
        stages, above = beside_the_best(evaluator, config)
        over.append(above)
        whole, part = (
            whole + bool(stages.activations.recompute),
            part + bool(stages.activations.selective),
        )
        assert not stages.activations.recompute & stages.activations.selective
    assert whole >= 5 and part >= 10
    assert min(over) > -1e-9 and max(over) < 0.02 and sum(over) / len(over) < 0.002


def test_less_memory_computes_more_again_and_never_runs_slower_than_without() -> None:
    evaluator, config = tight(47)
    before: Outcome | None = None
    for memory_gb in (evaluator.cluster.memory_gb * share for share in (4.0, 1.0, 0.9, 0.85)):
        where = evaluator.on(replace(evaluator.cluster, memory_gb=memory_gb))
        choices = {
            words: search(where, where.candidates(replace(ONE, recompute=recompute)))
            for words, recompute in (("never", ONE.recompute[:1]), ("as needed", ONE.recompute))
        }
        best = choices["as needed"].outcomes[0]
        if never := choices["never"].outcomes:
            assert best.step_s <= never[0].step_s * (1 + 1e-9)
        assert max(best.memory_bytes) <= where.cluster.usable_bytes
        assert before is None or before.step_s <= best.step_s * (1 + 1e-9)
        before = best
    assert best.stages.activations.recompute


def test_what_is_kept_computed_again_and_on_the_host_is_about_the_best_of_all() -> None:
    """100 chains: all cuts, and all choices of layers, within memory and the link's time."""
    over, computed, moved = [], 0, 0
    for seed in range(100):
        evaluator, config = tight(seed, host=True)
        stages, above = beside_the_best(evaluator, config)
        over.append(above)
        assert not stages.activations.recompute & stages.activations.offload
        computed, moved = (
            computed + bool(stages.activations.recompute),
            moved + bool(stages.activations.offload),
        )
    assert computed >= 20 and moved >= 15
    assert min(over) > -1e-9 and max(over) < 0.02


def test_three_ways_are_about_the_best_of_all() -> None:
    """Layers of one device, with any part of the recomputed bytes offloaded."""
    over = []
    for seed in range(300):
        rng = random.Random(seed)
        part, link = rng.choice([0.0, 0.3, 0.5, 0.8, 1.0]), rng.choice([0.0, 0.3, 1.0])
        layers = []
        for i in range(rng.randint(2, 6)):
            size, near = rng.uniform(0.2, 1.0) * 1e6, rng.uniform(0.8, 1.2)
            transient = rng.uniform(0.0, 0.5e6)
            seconds = rng.uniform(0.1, 1.0)
            layers.append(
                LayerSavings(i, seconds, size, transient, part * size, 1e-6 * size * near)
            )
        need = rng.uniform(0.1, 1.1) * sum(layer.num_bytes for layer in layers)
        beside = rng.uniform(0.0, 0.5e6)
        link_s = link * rng.random() * sum(layer.offload_s for layer in layers)
        best = inf
        for ways in product(range(3), repeat=len(layers)):
            again, host = ([e for e, w in zip(layers, ways, strict=True) if w == n] for n in (1, 2))
            if sum(each.offload_s for each in host) <= link_s and enough(again, host, need, beside):
                best = min(best, sum(each.seconds for each in again))
        found = solve_activation_policy(layers, need, beside, link_s)
        assert (found is None) == (best == inf)
        if found is not None:
            again, host = (
                [layers[i] for i in chosen] for chosen in (found.recompute, found.offload)
            )
            assert not found.recompute & found.offload and enough(again, host, need, beside)
            assert sum(each.offload_s for each in host) <= link_s
            over.append(sum(each.seconds for each in again) / best - 1 if best else 0.0)
            assert best or not again
    assert len(over) > 200 and sum(each > 0.02 for each in over) <= 1


def test_free_copies_of_little_do_not_hide_what_is_computed_again() -> None:
    assert solve_activation_policy(
        [LayerSavings(0, 1.0, 100.0, 0.0, 50.0, 0.0)], 80.0, 0.0, 1.0
    ) == ActivationPolicies(frozenset({0}))
    two = [LayerSavings(0, 1.0, 100.0, 0.0, 50.0, 0.0), LayerSavings(1, 2.0, 100.0, 0.0, 50.0, 0.0)]
    assert solve_activation_policy(two, 140.0, 0.0, 1e-12) == ActivationPolicies(
        frozenset({0}), frozenset({1})
    )


def enough(
    again: list[LayerSavings],
    host: list[LayerSavings],
    need: float,
    beside: float,
    part: Sequence[LayerSavings] = (),
) -> bool:
    """True if these layers free the needed bytes, and those that they use themselves."""
    most = max([beside, *(e.transient for e in again), *(e.selective_transient for e in part)])
    spared = sum(each.num_bytes for each in again) + sum(each.offload_bytes for each in host)
    spared += sum(each.selective_bytes for each in part)
    return spared >= (need + most - beside) * (1 - 1e-9)
