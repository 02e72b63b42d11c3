"""Several sources of one shape: one pool of samples, and one label for each class name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.build import open_buckets, open_parts
from megatron_pulse.data.data_record import moved_classes, to_saved
from megatron_pulse.data.dataset import DataError, DiffusionDataset
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.microbatches import Split, make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from megatron_pulse.errors import Faults
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments, pulse_options
from megatron_pulse.integration.training_data import DiffusionData
from model_specs import load_backbone

WANTED = WantedFields((1, 8, 8), num_classes=10, class_option="num_classes")


def photos(root: Path, classes: Sequence[str], first: int, each: int = 20) -> str:
    """Pictures of ``classes``, all of other greys; without classes directly in ``root``."""
    for number, name in enumerate(classes or [""]):
        for i in range(each):
            path = root / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), first + each * number + i).save(path)
    return f"folder:{root}"


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """Two folders of two classes each, one of them in both."""
    one = photos(tmp_path / "one", ["bird", "cat"], 0)
    return f"{one},{photos(tmp_path / 'two', ['ant', 'cat'], 40)}"


def open_data(spec: str, *flags: str, seed: int = 1) -> DiffusionData:
    parser = add_pulse_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--pulse-backbone", "uvit-tiny", "--pulse-data", spec, *flags])
    backbone = load_backbone("uvit-tiny", {"in_channels": 1})
    return DiffusionData(pulse_options(args), backbone, DiffusionProcess(Objective.FLOW), seed)


def labels_by_class(data: DiffusionDataset) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for i in range(len(data)):
        found.setdefault(Path(data.describe(i)).parent.name, set()).add(data.label(i))
    return found


def test_open_buckets_gives_a_class_name_one_label_in_all_sources(
    spec: str, tmp_path: Path
) -> None:
    """Labels of the first source stay; new names of the second follow."""
    train, held_back, _ = open_buckets(spec, [WANTED])
    for side in (train, held_back):
        assert labels_by_class(side).items() <= {"bird": {0}, "cat": {1}, "ant": {2}}.items()
        assert side.num_classes == 3 and side.class_names == ["bird", "cat", "ant"]
    assert labels_by_class(train).keys() == {"bird", "cat", "ant"}
    data = open_data(spec)
    records = data.record(whole=True)
    for one in to_saved(records)[""]:
        assert one["classes"] == ["bird", "cat", "ant"]
    alone = open_data(spec.split(",")[0]).record(whole=True)
    assert not moved_classes(alone[""], records[""])
    other_order = open_data(",".join(reversed(spec.split(",")))).record(whole=True)
    assert "bird is class 2 (was 0)" in moved_classes(records[""], other_order[""])
    few = WantedFields((1, 8, 8), num_classes=2, class_option="num_classes")
    with pytest.raises(Faults, match=r"with the classes of the other sources it has 3 classes"):
        open_buckets(spec, [few])


def test_latents_keep_their_class_names_beside_a_folder(spec: str, tmp_path: Path) -> None:
    one, two = spec.split(",")
    store = tmp_path / "store"
    argv = ["data", "write-latents", "--from", two, "--image-size", "8", "--channels", "1"]
    assert main([*argv, "-o", str(store)]) == 0
    train, _, _ = open_buckets(f"{one},latents:{store}", [WANTED])
    _, stored = train.members
    labels = {stored.label(i) for i in range(len(stored))}
    assert labels == {1, 2} and stored.class_names == ["bird", "cat", "ant"]


def test_open_buckets_refuses_unnamed_classes_beside_named_ones(tmp_path: Path) -> None:
    named, flat = photos(tmp_path / "one", ["bird", "cat"], 0), photos(tmp_path / "flat", [], 40)
    with pytest.raises((DataError, Faults)) as refused:
        open_buckets(f"{named},{flat},digits8", [WANTED])
    said = str(refused.value)
    assert f"{flat} has no class names, but {named} has (bird, cat)" in said
    assert "digits8 has no class names" in said and "Give sources that all have class" in said
    without_labels = WantedFields((1, 8, 8))
    train, _, _ = open_buckets(f"{named},{flat}", [without_labels])
    assert len(train.members) == 2
    (_, first, _), *_ = open_parts(f"{named},{flat}", 8, 1)
    assert any("has no class names" in caution for caution in first.cautions)


def test_data_check_tells_the_labels_of_all_sources(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", spec, "--image-size", "8", "--channels", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["classes"] == ["bird", "cat", "ant"]


def test_sources_of_one_shape_are_mixed_within_a_step(spec: str) -> None:
    data = open_data(spec)
    assert not data.several_shapes and len(data.train) == 72
    places = {"consumed_samples": 0, "data_parallel_rank": 0, "data_parallel_size": 1}
    sampler = iter(data._sampler(Split.TRAIN, 16, micro_batch_size=12, **places))
    epoch = [[index for index, _ in next(sampler)] for _ in range(6)]
    assert all({index < 36 for index in items} == {True, False} for items in epoch)
    assert sorted(index for items in epoch for index in items) == list(range(72))
    other_batch = iter(data._sampler(Split.TRAIN, 8, micro_batch_size=4, **places))
    assert [index for index, _ in next(other_batch)] == epoch[0][:4]


def test_validation_order_is_a_shuffle_of_the_seed(spec: str) -> None:
    def order(seed: int, micro_batch_size: int = 4) -> list[tuple[int, int]]:
        sampler = iter(
            open_data("digits8", seed=seed)._sampler(
                Split.VALIDATION, 20, consumed_samples=0, micro_batch_size=micro_batch_size,
                data_parallel_rank=0, data_parallel_size=1, period=20,
            )
        )  # fmt: skip
        return [item for _ in range(40 // micro_batch_size) for item in next(sampler)]

    first = order(1)
    assert first[:20] == first[20:] and first == order(1, micro_batch_size=2)
    indices = [index for index, _ in first[:20]]
    assert indices != sorted(indices) and len(set(indices)) == 20 and max(indices) > 40
    assert order(2) != first


def test_a_note_counts_labels_without_samples(spec: str) -> None:
    told = [c for c in open_data(spec, "--pulse-bucket-batch", "4").cautions if "effect" in c]
    assert told == ["--pulse-bucket-batch has no effect: all samples have one shape"]
    (few,) = open_data(spec).cautions
    assert few == (
        "the data has 3 classes, the backbone 10 (--pulse-option num_classes=3): labels 3 to 9 "
        "are never trained"
    )
    assert not open_data("digits8").cautions


def test_posteriors_beside_exact_latents_are_each_sampled_as_they_are(tmp_path: Path) -> None:
    """A batch of both has the bits of a batch of each."""
    for name, deviates in (("exact", False), ("posterior", True)):
        layout = LatentLayout((1, 8, 8), 1, LatentType.FLOAT32, {}, deviates=deviates)
        with LatentWriter(tmp_path / name, layout) as writer:
            for i in range(20):
                mean = torch.full((1, 8, 8), float(i))
                writer.add(mean, 0, deviation=torch.ones(1, 8, 8) if deviates else None)
            writer.close()
    names = ",".join(f"latents:{tmp_path / name}" for name in ("exact", "posterior"))
    train, _, _ = open_buckets(names, [WANTED])
    items = [(2, 0), (20, 1), (3, 2)]
    process = DiffusionProcess(Objective.V)
    together = make_microbatch(train, items, process, 0)
    for row, item in enumerate(items):
        (alone,) = make_microbatch(train, [item], process, 0)["noisy"]
        assert torch.equal(together["noisy"][row], alone)
