import json
import multiprocessing
import os
import pickle
import signal
import time
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pulse.data.dataset import ArrayDataset, CorruptSample, DataError, FieldSpec, Subset
from megatron_pulse.data.microbatches import DiffusionLoader, Split, make_microbatch
from megatron_pulse.data.sampler import MicrobatchSampler, readable
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective, TimestepDensity
from tests.ranks import RanksFailed, run_ranks

PROCESSES = [
    DiffusionProcess(Objective.V),
    DiffusionProcess(Objective.EPSILON),
    DiffusionProcess(Objective.FLOW, density=TimestepDensity.LOGIT_NORMAL),
]


class WithText(ArrayDataset):
    fields = {
        "context": FieldSpec((2, 3)),
        "context_mask": FieldSpec((2,), "int64"),
        "guidance": FieldSpec((), "float32"),
    }

    def conditioning(self, index, variation=None):
        return {
            "context": torch.full((2, 3), float(index + 1)),
            "context_mask": torch.tensor([1, index % 2]),
            "guidance": torch.tensor(index / 2),
        }

    def null_conditioning(self):
        return {"context": torch.full((2, 3), -9.0), "context_mask": torch.tensor([1, 0])}


IMAGES = np.random.default_rng(0).uniform(-1, 1, (20, 1, 5, 5))
DATASET = WithText(IMAGES, np.arange(20) % 4, num_classes=4)
FIELDS = {
    "noisy",
    "target",
    "timesteps",
    "labels",
    "index",
    "dropped",
    "positions",
    *WithText.fields,
}


def batch(items, process=PROCESSES[0], **options):
    options = {"drop_probability": 0.3, "null_label": 4} | options
    return make_microbatch(DATASET, items, process, 42, **options)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(PROCESSES), st.sampled_from(Split))
def test_rows_do_not_depend_on_the_split_into_microbatches(data, process, split):
    items = data.draw(
        st.lists(st.tuples(st.integers(0, 19), st.integers(0, 10**6)), min_size=2, max_size=12)
    )
    cut = data.draw(st.integers(1, len(items) - 1))
    whole = batch(items, process, split=split)
    parts = [batch(part, process, split=split) for part in (items[:cut], items[cut:])]
    assert whole.keys() == FIELDS
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([part[name] for part in parts])), name


def test_a_device_without_images_sees_the_same_conditioning():
    items = [(i % 20, 100 + i) for i in range(50)]
    full, cheap = batch(items), batch(items, needs_image=False)
    assert cheap.keys() == FIELDS - {"noisy", "target"}
    assert all(torch.equal(value, full[name]) for name, value in cheap.items())


def test_types_and_shapes():
    found = batch([(0, 0), (3, 1), (2, 5)])
    assert found["noisy"].shape == found["target"].shape == (3, 1, 5, 5)
    assert found["timesteps"].dtype == torch.float32 and found["timesteps"].shape == (3,)
    assert found["labels"].dtype == found["index"].dtype == torch.int64
    for name, spec in DATASET.fields.items():
        assert found[name].shape == (3, *spec.shape) and found[name].dtype == spec.torch_dtype


def test_label_and_text_are_dropped_together():
    found = batch([(i % 20, i) for i in range(600)])
    dropped = found["labels"] == 4
    assert 0.24 < dropped.float().mean() < 0.36
    assert (found["context"][dropped] == -9).all() and (found["context"][~dropped] > 0).all()
    assert (found["context_mask"][dropped] == torch.tensor([1, 0])).all()
    assert torch.equal(found["context_mask"][~dropped][:, 1], found["index"][~dropped] % 2)
    assert torch.equal(found["guidance"], found["index"] / 2), "it has no null value"
    assert torch.equal(found["labels"][~dropped], found["index"][~dropped] % 4)


def test_labels_stay_without_a_null_label():
    found = batch([(i % 20, i) for i in range(100)], null_label=None)
    assert torch.equal(found["labels"], found["index"] % 4)
    assert (found["context"] == -9).any()


def test_another_visit_has_other_noise_but_not_in_validation():
    first, second = batch([(5, 5)]), batch([(5, 25)])
    assert not torch.equal(first["noisy"], second["noisy"])
    held = [batch([(5, position)], split=Split.VALIDATION) for position in (5, 29)]
    assert all(torch.equal(held[0][name], held[1][name]) for name in FIELDS - {"positions"})
    assert held[0]["labels"].item() == 1
    assert not torch.equal(held[0]["noisy"], first["noisy"])


def test_validation_times_are_eighths_of_the_process_by_position():
    items = [(3, position) for position in range(10)]
    flow = batch(items, DiffusionProcess(Objective.FLOW, shift=3.0), split=Split.VALIDATION)
    expected = [1000 * (i % 8) / 8 for i in range(10)]
    assert flow["timesteps"].tolist() == expected and flow["positions"].tolist() == [*range(10)]
    late = DiffusionProcess(Objective.V, min_time=0.5)
    halved = batch(items[:2], late, split=Split.VALIDATION)["timesteps"]
    assert halved.tolist() == [500, 562]


def test_the_target_belongs_to_the_image():
    found = batch([(7, 7)], PROCESSES[2])
    t = found["timesteps"] / 1000
    torch.testing.assert_close(found["noisy"] - t * found["target"], DATASET.image(7)[None])


def resume(num_workers):
    def loader(consumed, workers=0):
        sampler = MicrobatchSampler(20, consumed, 3, 0, 1, seed=1)
        return DiffusionLoader(DATASET, sampler, PROCESSES[0], 42, 0.3, 4, num_workers=workers)

    whole = list(islice(loader(0), 10))
    resumed = list(islice(pickle.loads(pickle.dumps(loader(12, num_workers))), 6))
    for expected, found in zip(whole[4:], resumed, strict=True):
        assert all(torch.equal(expected[name], found[name]) for name in FIELDS)
    damaged = Damaged(IMAGES, np.arange(20) % 4, num_classes=4)
    sampler = MicrobatchSampler(20, 0, 3, 0, 1, seed=1)
    read = DiffusionLoader(damaged, sampler, PROCESSES[0], 42, num_workers=num_workers)
    with pytest.raises(CorruptSample, match="^damaged: sample [0-9]+\nMend it.$"):
        list(islice(read, 9))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_resumes_pickled_and_with_workers(num_workers):
    """And says of a sample that cannot be used the same with them and without."""
    run_ranks(1, resume, num_workers)


def is_alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_and_be_killed(pids):
    """Write the workers' numbers to a file, and end without a word; torch itself, which looks
    every 5 s, does not look."""
    from torch.utils.data._utils import worker

    worker.MP_STATUS_CHECK_INTERVAL = 1000.0
    sampler = MicrobatchSampler(20, 0, 3, 0, 1, seed=1)
    batches = iter(DiffusionLoader(DATASET, sampler, PROCESSES[0], 42, num_workers=2))
    next(batches)
    pids.write_text(json.dumps([worker.pid for worker in multiprocessing.active_children()]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_their_rank(tmp_path):
    pids = tmp_path / "pids.json"
    with pytest.raises(RanksFailed) as killed:
        run_ranks(1, read_and_be_killed, pids)
    assert killed.value.exit_codes == [-signal.SIGKILL]
    workers = json.loads(pids.read_text())
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(is_alive, workers)):
        time.sleep(0.05)
    assert not any(map(is_alive, workers))


def read_and_kill_a_worker():
    sampler = MicrobatchSampler(20, 0, 3, 0, 1, seed=1)
    batches = iter(DiffusionLoader(DATASET, sampler, PROCESSES[0], 42, num_workers=2))
    next(batches)
    killed = multiprocessing.active_children()[0].pid
    try:
        os.kill(killed, signal.SIGKILL)
        while True:
            next(batches)
    except (DataError, RuntimeError) as error:  # torch's own, where it hears of it between two
        return killed, str(error)


def test_a_worker_that_is_killed_is_named():
    ((killed, said),) = run_ranks(1, read_and_kill_a_worker)
    assert str(killed) in said and "kill" in said.lower()
    assert "was killed by SIGKILL" in said or "DataLoader worker" in said


class Damaged(WithText):
    """Every third sample is corrupt, or all."""

    every = 3

    def image(self, index, variation=None):
        self.check(index)
        return super().image(index, variation)

    def check(self, index):
        if index % self.every == 0:
            raise CorruptSample("damaged", [f"sample {index}"], "Mend it.")


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 17), st.integers(0, 99)), min_size=2, max_size=9))
def test_corrupt_samples_are_replaced_alike_wherever_they_are_asked_for(items):
    """In any microbatch, and on devices that read no image; image, label and text go together."""
    dataset = Subset(Damaged(IMAGES, np.arange(20) % 4, num_classes=4), np.arange(1, 19))
    options = {"process": PROCESSES[0], "seed": 42, "skip_corrupt": True}
    whole = make_microbatch(dataset, items, **options)
    parts = [make_microbatch(dataset, [item], **options) for item in items]
    for name, value in whole.items():
        assert torch.equal(value, torch.cat([part[name] for part in parts])), name
    middle = make_microbatch(dataset, items, **options, needs_image=False)
    for name, value in middle.items():
        assert torch.equal(value, whole[name]), name
    assert whole["corrupt"].tolist() == [i for i, _ in items if (i + 1) % 3 == 0]
    assert whole["index"].tolist() == [i for i, _ in items]
    for label, context in zip(whole["labels"], whole["context"], strict=True):
        taken = int(context[0, 0]) - 1
        assert taken % 3 and label == taken % 4
    with pytest.raises(CorruptSample, match="sample 3"):
        make_microbatch(dataset, [(0, 0), (2, 0)], PROCESSES[0], 42)


def test_replacements_follow_the_seed_and_end():
    dataset = Damaged(IMAGES, np.arange(20) % 4, num_classes=4)
    found = [readable(dataset, 6, seed, dataset.check)[0] for seed in range(40)]
    assert len(set(found)) > 8 and all(index % 3 for index in found)
    assert found == [readable(dataset, 6, seed, dataset.check)[0] for seed in range(40)]
    dataset.every = 1
    with pytest.raises(DataError, match="sample .*\n.*64 other") as error:
        readable(dataset, 6, 0, dataset.check)
    assert not isinstance(error.value, CorruptSample)
