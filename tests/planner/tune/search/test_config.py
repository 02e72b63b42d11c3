"""Configs of a cluster and batch, and reasons for an empty list."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.planner.layout.layouts import LAYOUTS
from megatron_pulse.planner.tune.config import Choices, configs, why_none


@given(st.integers(0, 10**9))
def test_there_is_a_reason_where_there_are_none(seed: int) -> None:
    chance = random.Random(seed)
    nodes, inside = chance.choice([1, 2, 3]), chance.choice([1, 4, 6, 8])
    some = chance.sample(list(LAYOUTS.values()), chance.randint(1, 3))
    numbers = [tuple(chance.sample(range(1, 13), chance.randint(1, 2))) for _ in range(3)]
    choices = Choices(
        layouts=tuple(some),
        pipeline=chance.choice([None, numbers[0]]),
        tensor=chance.choice([(1,), numbers[1]]),
        micro_batch_size=chance.choice([None, numbers[2]]),
    )
    of = nodes * inside, inside, chance.randint(1, 48), chance.random() < 0.5, choices
    assert (why_none(*of) is None) == (next(configs(*of), None) is not None)
