"""Standard splits below one name are not trained on together."""

from pathlib import Path

import pytest
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import DataError
from megatron_pulse.data.standard_splits import require_one_split


def pictures(root: Path, *folders: str) -> None:
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for i in range(3):
            colour = (number * 50, i * 50, 0)
            Image.new("RGB", (8, 8), colour).save(root / folder / f"{i}.png")
            (root / folder / f"{i}.txt").write_text(f"picture {i}")


@pytest.mark.parametrize("kind", ["folder", "captions"])
@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (("train", "validation"), "train, validation"),
        (("Training/cat", "Training/dog", "dev/cat", "dev/dog"), "Training, dev"),
        (("test", "val"), "test, val"),
        (("train",), ""),
        (("train", "bus"), ""),
        (("train", "training"), ""),
        (("a/train", "a/val"), ""),
    ],
)
def test_folders_of_splits_are_refused_with_the_remedy(
    tmp_path: Path, kind: str, folders: tuple[str, ...], splits: str
) -> None:
    pictures(tmp_path, *folders)
    if not splits:
        train, held = open_dataset(f"{kind}:{tmp_path}", 8)
        assert len(train) + len(held) == 3 * len(folders)
        return
    with pytest.raises(DataError) as error:
        open_dataset(f"{kind}:{tmp_path}", 8)
    assert f"it has the splits {splits}" in str(error.value)
    assert "--pulse-validation-data" in error.value.remedy
    first = tmp_path / splits.partition(",")[0]
    assert str(first) in error.value.remedy and len(open_dataset(f"{kind}:{first}", 8)[0])


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ("train-00000-of-00002.parquet train-00001.parquet test-0.parquet", True),
        ("data/train-0.tar data/val-0.tar", True),
        ("train/0.tar val/0.tar", True),
        ("train-0.tar train-1.tar", False),
        ("train-0.tar shard-1.tar", False),
        ("trainer-0.tar validated-1.tar", False),
    ],
)
def test_archives_of_splits_are_known_by_their_names(names: str, refused: bool) -> None:
    root = Path("/data")
    files = [root / name for name in names.split()]
    if not refused:
        require_one_split("it", root, files, prefixes=True)
        return
    with pytest.raises(DataError, match="it has the splits train, "):
        require_one_split("it", root, files, prefixes=True)
