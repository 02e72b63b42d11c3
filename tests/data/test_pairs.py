"""Pairs of pictures: their lists, their split, and their microbatches."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.images.pairs import read_pairs
from megatron_pulse.data.microbatches import DiffusionLoader, Split
from megatron_pulse.data.sampler import MicrobatchSampler, PairSampler
from megatron_pulse.diffusion.loss import LossChoice
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import Objective

PROCESS = DiffusionProcess(Objective.FLOW)


def make_pictures(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        Image.new("RGB", (8, 8), (i, 3 * i, 200 - i)).save(folder / name)
    return folder


def write(folder: Path, *lines: object) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))


def names_of(folder: Path, column: str = "text") -> list[tuple[str, str]]:
    return [(path.name, caption) for path, caption in read_pairs(folder, column).pairs]


def test_a_list_names_winner_and_loser(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "a.png", "b.png", "c.png", "lone.png")
    write(
        folder,
        {"winner": "a.png", "loser": "b.png", "text": "one", "grop": "x"},
        {"winner": "c.png", "loser": "c.png", "text": "same"},
        {"winner": "c.png", "loser": "a.png", "text": " "},
    )
    found = [("a.png", "one"), ("b.png", "one"), ("c.png", ""), ("a.png", "")]
    assert names_of(folder) == found
    cautions = "\n".join(read_pairs(folder, "text").cautions)
    assert "the key 'grop', on 1 line of its lists" in cautions
    assert "1 of 3 pairs are ties: left out" in cautions
    assert "1 picture (lone.png) in no pair" in cautions and "1 picture (c.png) without" in cautions
    table = "winner;loser;says\na.png;b.png;one\n"
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(table)
    assert names_of(folder, "says") == found[:2]


def test_labels_of_pick_a_pic_order_the_pictures(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "a.png", "b.png")
    every = {"jpg_0": "a.png", "jpg_1": "b.png"}
    write(folder, *({**every, "label_0": label, "caption": str(label)} for label in (1, 0, 0.5)))
    expected = [("a.png", "1"), ("b.png", "1"), ("b.png", "0"), ("a.png", "0")]
    assert names_of(folder, "caption") == expected
    (folder / "metadata.jsonl").unlink()
    (folder / "metadata.csv").write_text(
        "jpg_0,jpg_1,label_0,caption\na.png,b.png,1.0,1\na.png,b.png,0,0\na.png,b.png,0.5,tie\n"
    )
    assert names_of(folder, "caption") == expected


def test_all_faults_of_a_list_are_told(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "a.png", "b.png")
    (folder / "c.txt").write_text("no picture")
    write(
        folder,
        {"winner": "a.png", "text": "one"},
        {"winner": "a.png", "loser": "B.png", "text": "one"},
        {"winner": "a.png", "loser": "c.txt", "text": "one"},
        {"winner": "a.png", "loser": "../b.png", "text": "one"},
        {"winner": "a.png", "loser": 3, "text": "one"},
        {"winner": "a.png", "loser": "b.png", "text": "one", "group": "x"},
        {"winner": "b.png", "loser": "a.png", "text": "two", "group": "y"},
    )
    with pytest.raises(DataError) as refused:
        read_pairs(folder, "text")
    for fault in (
        "line 1: loser is missing",
        "line 2: there is no file B.png; did you mean b.png",
        "line 3: c.txt has no suffix",
        "line 4: '../b.png' is outside",
        "line 5: winner, loser and text must be strings",
        "line 7: b.png is in two groups, x and y",
    ):
        assert fault in str(refused.value)
    write(folder, {"jpg_0": "a.png", "jpg_1": "b.png", "label_0": 2, "text": "one"})
    with pytest.raises(DataError, match="label_0 is '2'; it must be 0, 0.5 or 1"):
        read_pairs(folder, "text")
    write(folder, {"jpg_0": "a.png", "jpg_1": "b.png", "label_0": 0.5, "text": "one"})
    with pytest.raises(DataError, match="all 1 pairs are ties"):
        read_pairs(folder, "text")
    (folder / "metadata.jsonl").unlink()
    with pytest.raises(DataError, match="it lists no pairs"):
        read_pairs(folder, "text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pairs; the pictures of the first ten occur in two each, and all of a group are one."""
    count, folder = 40, tmp_path_factory.mktemp("pairs")
    make_pictures(folder, *(f"{i}.png" for i in range(2 * count)))
    pairs = [(2 * i, 2 * i + 1) for i in range(count)] + [(1, 2), (3, 4), (5, 6), (7, 8)]
    write(
        folder,
        *({"winner": f"{w}.png", "loser": f"{lo}.png", "text": f"pair {w}"} for w, lo in pairs),
    )
    return folder


def test_pairs_and_shared_pictures_are_on_one_side(folder: Path) -> None:
    train, held = open_dataset(f"pairs:{folder}", image_size=8)
    assert train.has_pairs and held.has_pairs and len(train) + len(held) == 88
    assert 4 <= len(held) <= 10
    files = [{each.describe(i) for i in range(len(each))} for each in (train, held)]
    assert not files[0] & files[1]
    for each in (train, held):
        for i in range(0, len(each), 2):
            assert each.caption(i) == each.caption(i + 1)
            assert each.caption(i) == f"pair {Path(each.describe(i)).stem}"  # the winner first


def loader(folder: Path, mbs: int, rank: int, ranks: int, start: int = 0) -> DiffusionLoader:
    fields = {"context": FieldSpec((4, 8))}
    train, _ = open_dataset(f"pairs:{folder}", wanted=WantedFields((3, 8, 8), fields))
    sampler = MicrobatchSampler(len(train) // 2, start, mbs // 2, rank, ranks, 0)
    loss = LossChoice(loss="dpo", noise_offset=0.1)
    return DiffusionLoader(train, PairSampler(sampler), PROCESS, 0, 0.5, loss=loss)


def test_members_of_a_pair_share_noise_time_and_dropping(folder: Path) -> None:
    batches = list(islice(loader(folder, 8, 0, 1), 5))
    for batch in batches:
        winners, losers = ({n: x[side::2] for n, x in batch.items()} for side in (0, 1))
        assert torch.equal(winners["index"] + 1, losers["index"])
        assert (winners["index"] % 2 == 0).all()
        for name in ("timesteps", "dropped", "context"):
            assert torch.equal(winners[name], losers[name]), name
        # Flow's target is noise minus sample, which is target + (noisy - t target) / 1.
        times = batch["timesteps"].view(-1, 1, 1, 1) / 1000
        noise = batch["noisy"] + (1 - times) * batch["target"]
        torch.testing.assert_close(noise[0::2], noise[1::2])
        assert not torch.equal(winners["noisy"], losers["noisy"])
    dropped = torch.cat([batch["dropped"] for batch in batches])
    assert dropped.any() and not dropped.all()
    assert len(torch.cat([batch["timesteps"] for batch in batches]).unique()) == 20


def test_order_is_independent_of_replicas_microbatches_and_starts(folder: Path) -> None:
    def rows(batches: list[dict[str, torch.Tensor]]) -> list[tuple[int, float, float]]:
        return [
            (int(i), float(t), float(x.sum()))
            for batch in batches
            for i, t, x in zip(batch["index"], batch["timesteps"], batch["noisy"], strict=True)
        ]

    whole = rows(list(islice(loader(folder, 8, 0, 1), 12)))
    by_two = [list(islice(loader(folder, 2, rank, 2), 24)) for rank in (0, 1)]
    assert rows([batch for both in zip(*by_two, strict=True) for batch in both]) == whole
    assert rows(list(islice(loader(folder, 4, 0, 1, start=20), 14))) == whole[40:]


def test_validation_takes_a_pair_at_one_time(folder: Path) -> None:
    _, held = open_dataset(f"pairs:{folder}", image_size=8)
    sampler = PairSampler(MicrobatchSampler(len(held) // 2, 0, 1, 0, 1, 0))
    for batch in islice(DiffusionLoader(held, sampler, PROCESS, 0, split=Split.VALIDATION), 4):
        assert batch["positions"].unique().numel() == 1 == batch["timesteps"].unique().numel()


def test_one_group_is_divided_by_pairs(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, *(f"{i}.png" for i in range(8)))
    lines = [{"winner": f"{2 * i}.png", "loser": f"{2 * i + 1}.png"} for i in range(4)]
    write(folder, *({**line, "text": "x", "group": "all"} for line in lines))
    train, held = open_dataset(f"pairs:{folder}", image_size=8, validation_fraction=0.3)
    assert (len(train), len(held)) == (6, 2)
    for each in (train, held):
        stems = [int(Path(each.describe(i)).stem) for i in range(len(each))]
        assert all(b == a + 1 for a, b in zip(stems[::2], stems[1::2], strict=True))
