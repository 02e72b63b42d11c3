"""FSDP2 and HSDP as contestants: what they send, what they hold, and who is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.fsdp_layout import REDUCING, Gathering
from megatron_pulse.planner.tune.fsdp.layer_dp import ActivationRoom
from megatron_pulse.planner.tune.fsdp.recompute import RecomputeCosts
from megatron_pulse.planner.tune.fsdp.step import (
    ShardedUnit,
    Sharding,
    grouped,
    over,
    passes,
    peak_bytes,
    state_bytes,
    step_bytes,
    step_s,
)
from tests.benchmarks.capped import capped
from tests.benchmarks.contestant import OF_ADAPTERS, TIMEOUT_S, Contestant, Engine
from tests.benchmarks.contestants import needed_bytes
from tests.benchmarks.emulation import Emulation, emulate
from tests.benchmarks.fully_sharded import Called, called_by_torch
from tests.benchmarks.memory import of_whole_layers
from tests.benchmarks.network import unavailable
from tests.benchmarks.sharded_best import FP32_BYTES, DataParallel, elements
from tests.ranks import run_ranks

UNITS, NUM, SIZE = 6, 4, 2.0


def a_way(
    gathering: Gathering,
    once: bool = False,
    count: int = 3,
    group: int = 4,
    prefetch: int = 1,
    seconds: float = 1.0,
) -> Sharding:
    """Units of 4, 8, 12 ... elements for each device, and parameters of ``SIZE`` bytes."""
    units = tuple(
        ShardedUnit(seconds, 2 * seconds, FP32_BYTES * 4 * NUM * (u + 1), SIZE, 8 * SIZE)
        for u in range(UNITS)
    )
    return Sharding(units, NUM, count, group, gathering, once, prefetch)


@pytest.mark.parametrize("group", [4, 2])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("gathering", list(Gathering))
def test_bytes_of_a_step_are_the_formula_s(gathering: Gathering, once: bool, group: int) -> None:
    way = a_way(gathering, once, group=group)
    whole = sum(u.moved_bytes for u in way.units)
    first, last = (way.units[at].moved_bytes for at in (0, -1))
    again = (way.count - 1) * first  # kept for the next microbatch's forward
    gathered = {
        Gathering.PASS: way.count * (2 * whole - last) - again,
        Gathering.MICROBATCH: way.count * whole - again,
        Gathering.STEP: whole,
    }[gathering]
    reduced = whole if once else way.count * whole
    groups = NUM // group
    wanted = (gathered + reduced) * (group - 1) / group + 2 * (groups - 1) / groups * whole / group
    assert step_bytes(way) == wanted


MODES = [
    a_way(gathering, once, 2, group, prefetch, 0.0)
    for gathering, once, group, prefetch in (
        (Gathering.PASS, False, 4, 1),
        (Gathering.PASS, True, 2, 1),
        (Gathering.MICROBATCH, False, 2, 1),
        (Gathering.MICROBATCH, True, 4, 3),
        (Gathering.STEP, False, 4, 1),
    )
]


def called_in_all_modes() -> list[Called]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    found = [called_by_torch(way) for way in MODES]
    dist.barrier()
    return found


def test_torch_gathers_and_reduces_the_same_units_in_the_same_order() -> None:
    for way, called in zip(MODES, run_ranks(NUM, called_in_all_modes)[0], strict=True):
        program, sizes = passes(way), [elements(u) for u in way.units]
        assert called.gathered == [sizes[op.unit] for op in program if op.gathers]
        assert called.reduced == [sizes[op.unit] for op in program if op.reduces]
        summed = [sizes[op.unit] // way.group for op in program if op.last]
        assert called.summed == (summed if way.replicas > 1 else [])


@pytest.mark.parametrize(
    ("gathering", "once", "units"),
    [
        # Its own and the next one's parameters, gradients in the making and on their way.
        (Gathering.PASS, False, 2 + 1 + REDUCING),
        # Parameters of all, and as many gradients: the microbatch before may still send its own.
        (Gathering.MICROBATCH, False, UNITS + 1 + REDUCING),
        (Gathering.STEP, False, UNITS + 1 + REDUCING),
        # The first microbatch's gradients stay; the second's are sent from the last unit on.
        (Gathering.STEP, True, 2 * UNITS),
    ],
)
def test_peak_counts_gathered_units_and_gradients(
    gathering: Gathering, once: bool, units: int
) -> None:
    assert peak_bytes(a_way(gathering, once)) == units * SIZE


def test_peak_counts_activations_and_what_is_computed_again() -> None:
    way = a_way(Gathering.STEP)
    heavy = tuple(replace(u, saved_bytes=100.0, recompute_bytes=7.0) for u in way.units)
    most = UNITS * 100 + 7 + (UNITS + 1 + REDUCING) * SIZE  # when the first backward runs
    assert peak_bytes(replace(way, units=heavy)) == most
    assert state_bytes(way) == 16 * UNITS * SIZE / 2 / way.group


def test_peak_counts_reduced_gradients_from_their_first_reduction_on() -> None:
    """Beside activations of one microbatch none are there yet, with several all are."""
    for count, gathering, light in ((1, Gathering.MICROBATCH, True), (3, Gathering.PASS, False)):
        way = a_way(gathering, count=count)
        heavy = tuple(replace(u, saved_bytes=1e6, summed_bytes=4.0) for u in way.units)
        none, some = (
            peak_bytes(replace(way, units=units))
            for units in (tuple(replace(u, summed_bytes=0.0) for u in heavy), heavy)
        )
        assert some - none == (0.0 if light else 4.0 * UNITS / way.group)
    heavy = tuple(replace(u, summed_bytes=1e6) for u in way.units)
    alone = replace(way, count=1, units=heavy)
    assert peak_bytes(alone) - 1e6 * (UNITS - 1) / way.group < 20 * SIZE  # in the last backward


def test_a_step_takes_its_computing_or_its_bytes() -> None:
    for gathering in Gathering:
        for count in (1, 2, 7):
            way = a_way(gathering, count=count)
            assert step_s(way, over(Link(), way)) == pytest.approx(3 * UNITS * count)
            slow = Link(0.0, 1e-3)
            assert step_s(way, over(slow, way)) == pytest.approx(step_bytes(way) / 1e-3, rel=0.01)


def test_units_are_neighbours_of_about_as_many_parameters() -> None:
    assert grouped([4, 0, 4, 8, 1, 1], 3) == [range(0, 3), range(3, 4), range(4, 6)]
    assert [u for own in grouped([1] * 7, 3) for u in own] == list(range(7))


@pytest.fixture(scope="module")
def emulation() -> Emulation:
    return emulate("uvit-s", 0.05)


def test_as_few_layers_are_recomputed_as_fit(emulation: Emulation) -> None:
    size = emulation.micro_batch_size
    profile = of_whole_layers(emulation.profile)
    parts = {
        size: tuple(
            replace(x, selective_bytes=x.saved_bytes * 3 // 4, selective_s=0.05 * x.forward_s)
            for x in layers
        )
        for size, layers in profile.times.items()
    }
    for layers in (profile, replace(profile, times=parts)):
        recomputing = RecomputeCosts(layers, size)
        costs, whole = recomputing.costs, sum(recomputing.costs.saved_bytes)
        num, room = len(costs.parameters), 0.7 * whole
        kept, some, every = (
            recomputing.chosen((ActivationRoom(room, room),) * num) for room in (whole, room, 0.0)
        )
        assert not kept and recomputing.least_s(whole) == 0
        chain = recomputing.chain(some)
        assert sum(chain.saved_bytes) <= recomputing.needed_bytes(some) <= room
        assert len(some.recompute) < len(every.recompute)
        assert bool(some.selective) == (layers is not profile)
        more_s = sum(chain.backward_s) - sum(costs.backward_s)
        forward_s = sum(costs.forward_s[i] for i in some.recompute)
        forward_s += 0.05 * sum(costs.forward_s[i] for i in some.selective)
        assert more_s == pytest.approx(forward_s)
        assert recomputing.least_s(room) <= more_s
        assert recomputing.least_s(0.0) == math.inf


def entered_under(emulation: Emulation, share: float) -> tuple[list[Contestant], list[Contestant]]:
    """Data-parallel contestants under ``share`` of what plain DDP needs, and under all of it."""
    link, samples = emulation.link(10e9), 8 * emulation.micro_batch_size
    plain, _ = DataParallel(emulation, link, NUM, samples, 1e18).offers()
    need = needed_bytes(next(c for c in plain if c.engine is Engine.DATA_PARALLEL))
    return DataParallel(emulation, link, NUM, samples, share * need).offers()[0], plain


def test_under_a_cap_more_is_recomputed_and_everything_fits(emulation: Emulation) -> None:
    tight, plain = entered_under(emulation, 0.5)
    assert {c.engine for c in plain} == {Engine.DATA_PARALLEL, Engine.FSDP2, Engine.HSDP}
    assert all("recomputed" not in c.way for c in plain)
    most = max(map(needed_bytes, plain)) / 2
    assert tight and all(needed_bytes(c) <= most for c in tight)
    samples = 8 * emulation.micro_batch_size
    assert all(c.num_microbatches * c.micro_batch_size == samples for c in tight + plain)


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        (
            1e18,
            [
                ("Megatron DDP", "b=32", 0.2060056, 2195970284),
                (
                    "FSDP2, gathered each microbatch",
                    "b=32, gathered each microbatch, reduced once a step, 10 units",
                    0.226949550259376,
                    2106444012,
                ),
                (
                    "HSDP",
                    "b=32, gathered each microbatch, reduced once a step, 10 units, groups of 2",
                    0.23144955025937594,
                    2240761560,
                ),
            ],
        ),
        (
            1.2e9,
            [
                (
                    "Megatron DDP",
                    "b=32, 10 of 28 layers recomputed, what is cheap of 14",
                    0.2060056,
                    1194153740,
                ),
                (
                    "FSDP2, gathered each microbatch",
                    "b=32, 8 of 28 layers recomputed, what is cheap of 17, "
                    "gathered each microbatch, reduced once a step, 10 units",
                    0.22750553575442017,
                    1198085484,
                ),
                (
                    "HSDP",
                    "b=32, 11 of 28 layers recomputed, what is cheap of 12, "
                    "gathered each microbatch, reduced once a step, 10 units, groups of 2",
                    0.23311943194070464,
                    1196476104,
                ),
            ],
        ),
    ],
)
def test_predictions_stay_what_they_were(
    emulation: Emulation, usable: float, expected: list[tuple[str, str, float, float]]
) -> None:
    samples = 8 * emulation.micro_batch_size
    entered, _ = DataParallel(emulation, emulation.link(1.25e9), NUM, samples, usable).offers()
    found = [(c.name, c.way, c.predicted_s, needed_bytes(c)) for c in entered]
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2:] for row in found] == [pytest.approx(row[2:], rel=1e-9) for row in expected]


def test_what_needs_more_than_the_cap_is_refused_with_the_figure(emulation: Emulation) -> None:
    link, samples = emulation.link(10e9), 4 * emulation.micro_batch_size
    none, least = DataParallel(emulation, link, NUM, samples, 1.0).offers()
    needs = {one.engine: one.needs_bytes for one in least}
    assert not none and set(needs) == {Engine.DATA_PARALLEL, Engine.FSDP2, Engine.HSDP}
    usable = 0.99 * min(needs[Engine.HSDP], needs[Engine.DATA_PARALLEL])
    assert needs[Engine.FSDP2] < usable
    entered, refused = capped(emulation, link, NUM, samples, usable, 0.0)
    assert entered and all(needed_bytes(c) <= usable for c in entered)
    assert all(r.needs_bytes > usable for r in refused)
    every = set(Engine) - set(OF_ADAPTERS)
    assert {c.engine for c in entered} | {r.engine for r in refused} == every
    told = {r.engine: r.needs_bytes for r in refused}
    assert told[Engine.HSDP] == pytest.approx(needs[Engine.HSDP])
    assert told[Engine.DATA_PARALLEL] == pytest.approx(needs[Engine.DATA_PARALLEL])
    assert Engine.FSDP2 not in told


@pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}")
def test_ranks_send_what_the_kernel_counts(emulation: Emulation) -> None:
    from tests.benchmarks.cell import run_cell

    rate = 10e9
    entered = []
    for way in MODES:
        units = tuple(
            replace(u, forward_s=1e-3, backward_s=2e-3, moved_bytes=FP32_BYTES * 40_000)
            for u in way.units
        )
        way = replace(way, units=units)
        entered.append(
            Contestant(
                f"{way}",
                Engine.FSDP2,
                NUM * way.count,
                layers=tuple((u.forward_s, u.backward_s, elements(u)) for u in units),
                expected_bytes=NUM * step_bytes(way),
                state_bytes=(0.0,) * NUM,
                sharding=way,
            )
        )
    results = run_cell(emulation.backbone, entered, NUM, emulation.rate_mbit(rate), 1)
    for contestant, result in zip(entered, results, strict=True):
        assert contestant.sharding is not None
        assert result.sent_bytes == contestant.expected_bytes
        assert 1.0 < result.wire_bytes / result.sent_bytes < 1.1
        assert result.memory_bytes == peak_bytes(contestant.sharding)
