from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.data.sampler import MicrobatchSampler


def take(num_batches, global_batch, dp, mbs, n, consumed=0, **options):
    """The items of each global batch, put in order from what every rank yields."""
    ranks = [
        iter(MicrobatchSampler(n, consumed, mbs, rank, dp, seed=11, **options))
        for rank in range(dp)
    ]
    return [
        [item for _ in range(global_batch // (dp * mbs)) for rank in ranks for item in next(rank)]
        for _ in range(num_batches)
    ]


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 50))


@given(sizes, st.booleans())
def test_global_batches_do_not_depend_on_the_layout(size, shuffle):
    dp, mbs, m, n = size
    batch = dp * mbs * m
    expected = take(4, batch, 1, batch, n, shuffle=shuffle)
    assert take(4, batch, dp, mbs, n, shuffle=shuffle) == expected
    assert [p for items in expected for _, p in items] == list(range(4 * batch))


@given(sizes, st.integers(0, 5))
def test_resumes_exactly(size, done):
    dp, mbs, m, n = size
    batch = dp * mbs * m
    whole = take(done + 3, batch, dp, mbs, n)
    # Also in another layout than the one that ran before.
    assert take(3, batch, 1, batch, n, consumed=done * batch) == whole[done:]


@given(st.integers(1, 60), st.integers(1, 7))
def test_every_epoch_holds_every_sample_once(n, batch):
    items = [i for items in take(-(-3 * n // batch), batch, 1, batch, n) for i, _ in items]
    for epoch in range(3):
        assert sorted(items[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_shuffle_differently():
    def order(seed, epoch):
        items = islice(MicrobatchSampler(50, epoch * 50, 50, 0, 1, seed), 1)
        return [i for i, _ in next(items)]

    orders = [order(seed, epoch) for seed in range(2) for epoch in range(2)]
    assert len({tuple(o) for o in orders}) == 4 and list(range(50)) not in orders
    assert order(0, 0)[:5] == [40, 20, 27, 49, 19]  # pinned: a resumed run needs this order


def test_period_repeats_for_validation():
    sampler = MicrobatchSampler(10, 0, 2, 1, 2, seed=0, shuffle=False, period=8)
    found = list(islice(sampler, 4))
    assert found == [[(2, 2), (3, 3)], [(6, 6), (7, 7)]] * 2


def test_faults_are_listed():
    with pytest.raises(ValueError) as error:
        MicrobatchSampler(0, -1, 2, 3, 2, seed=0, period=5)
    for part in ("num_samples", "consumed_samples", "data_parallel_rank", "period"):
        assert part in str(error.value)
