from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.data.buckets import Buckets, BucketSampler
from megatron_pulse.data.dataset import ArrayDataset
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective
from tests.ranks import run_ranks


def take(count, mbs, dp, sizes, consumed=0, group=None, **options):
    """The first microbatches, those of all ranks in order."""
    options["group_size"] = group or mbs
    ranks = [iter(BucketSampler(sizes, consumed, mbs, r, dp, 11, **options)) for r in range(dp)]
    return [next(ranks[i % dp]) for i in range(count)]


def part(sizes, index):
    return int(np.searchsorted(np.cumsum(sizes), index, side="right"))


sizes_of = st.lists(st.integers(1, 12), min_size=2, max_size=4)


@given(sizes_of, st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_microbatches_are_of_one_part_and_no_sample_is_dropped(sizes, mbs, dp, shuffle):
    n = sum(sizes)
    found = take(n * 2, mbs, dp, sizes, shuffle=shuffle)  # mbs * 2 epochs
    assert [p for items in found for _, p in items] == list(range(n * 2 * mbs))
    assert all(len({part(sizes, i) for i, _ in items}) == 1 for items in found)
    seen = Counter(i for items in found for i, _ in items)
    assert set(seen.values()) == {2 * mbs} and len(seen) == n


@given(sizes_of, st.integers(1, 4), st.integers(0, 9))
def test_goes_on_where_it_stopped_whatever_the_layout(sizes, mbs, done):
    whole = take(done + 6, mbs, 1, sizes)
    for dp in (1, 2, 3):
        assert take(6, mbs, dp, sizes, consumed=done * mbs) == whole[done:]


def test_parts_are_mixed_within_an_epoch_and_validation_repeats():
    parts = [part([8, 8], items[0][0]) for items in take(8, 2, 1, [8, 8])]
    assert sorted(parts) == [0] * 4 + [1] * 4 and parts != sorted(parts)
    again = take(8, 2, 1, [8, 8], shuffle=False, period=8)
    assert [[i for i, _ in items] for items in again[:4]] == [
        [i for i, _ in items] for items in again[4:]
    ]
    with pytest.raises(
        ValueError, match=r"3 consumed samples are not a multiple.* size 2"
    ) as error:
        BucketSampler([4, 4], 3, 2, 0, 1, 1, group_size=5)
    assert "5 consecutive samples of one shape are not a multiple" in str(error.value)


def test_a_change_of_layout_in_mid_epoch_leaves_every_sample_once() -> None:
    """98 samples in groups of 14; microbatch size and data-parallel degree change twice."""
    sizes, group = [56, 42], 14
    whole = [item for items in take(14, 14, 1, sizes, group=group) for item in items]
    found, layouts = [], [(7, 1, 28), (1, 2, 14), (2, 7, 56), (14, 1, 98)]
    for mbs, dp, count in layouts:
        items = take(count // mbs, mbs, dp, sizes, consumed=len(found), group=group)
        assert all(len({part(sizes, i) for i, _ in each}) == 1 for each in items)
        found += [item for each in items for item in each]
    assert found == whole
    for epoch in range(2):
        assert sorted(i for i, _ in found[98 * epoch : 98 * (epoch + 1)]) == list(range(98))


def arrays(*shapes):
    made = np.random.default_rng(0)
    return [
        ArrayDataset(made.uniform(-1, 1, (10, *shape)), np.arange(10) % 2, 2) for shape in shapes
    ]


def same_everywhere():
    """A device in the middle, whose microbatches a worker makes, beside one that needs images."""
    parts = arrays((1, 4, 6), (1, 6, 4))
    both = Buckets(parts)
    assert len(both) == 20 and torch.equal(both.image(13), parts[1].image(3))
    process = DiffusionProcess(Objective.V)

    def batches(needs_image, workers=0):
        sampler = BucketSampler([10, 10], 0, 3, 0, 1, 5, group_size=3)
        loader = DiffusionLoader(
            both, sampler, process, 5, split=Split.TRAIN, needs_image=needs_image,
            num_workers=workers, other_processes=(process,),
        )  # fmt: skip
        return list(islice(iter(loader), 6))

    whole, middle = batches(True), batches(False, workers=1)
    assert {tuple(batch["noisy"].shape[1:]) for batch in whole} == {(1, 4, 6), (1, 6, 4)}
    for a, b in zip(whole, middle, strict=True):
        assert b["noisy"].is_meta and a["noisy"].shape == b["noisy"].shape
        assert torch.equal(a["index"], b["index"]) and torch.equal(a["timesteps"], b["timesteps"])
        assert len({int(i) // 10 for i in a["index"]}) == 1
        labels = torch.tensor([both.label(int(i)) for i in a["index"]])
        assert torch.equal(a["labels"], labels) and torch.equal(b["labels"], labels)


def test_a_microbatch_says_its_shape_on_every_device():
    run_ranks(1, same_everywhere)


def test_what_is_there_for_its_shape_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without workers, as where there is a GPU; torch cannot pin it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    from megatron_pulse.data import microbatches
    from megatron_pulse.data.dataset import DataError

    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor, *device: object) -> torch.Tensor:
        assert not tensor.is_meta
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    made = {"noisy": torch.empty(2, 3, device="meta"), "labels": torch.ones(2)}
    found = microbatches._pinned(made)
    by_workers = microbatches._microbatch(pin_memory(microbatches._Made(made)))
    assert found["noisy"].is_meta and by_workers["noisy"].is_meta
    assert len(pinned) == 2 and torch.equal(by_workers["labels"], found["labels"])
    fault = DataError("folder", ["damaged"], "mend it")
    with pytest.raises(DataError):
        microbatches._microbatch(pin_memory(microbatches._Made(fault)))
