"""First commands of the README: the examples of launch/ as users run them, and the tour."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.data.images.emoji import FONT, PACKAGE
from megatron_pulse.planner.trace.trace import load_trace
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.launch.sessions import ROOT, session
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        Path(sys.prefix) != ROOT / ".venv", reason="the scripts would set up another .venv"
    ),
]
LIMIT_S = 800.0  # on two idle cores half a minute each; other work may slow it down


def said_by(command: Sequence[str | Path], status: int = 0, **environment: str) -> str:
    with session(command, **environment) as run:
        ended = run.ended(LIMIT_S)
        assert ended == status, run.said()
        return run.said()


def picture(path: Path) -> Image.Image:
    """A picture that is not all of one colour."""
    image = Image.open(path)
    assert max(high - low for low, high in image.convert("RGB").getextrema()) > 100  # type: ignore[operator, misc]
    return image


def test_quickstart(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    few = {"PULSE_TRAIN_ITERS": "2", "PULSE_RANKS": "2", "PULSE_RUN_DIR": str(folder)}
    said = said_by(["bash", "launch/quickstart.sh"], **few)
    assert re.search(r"^[\d.]+% of 100 generated digits show the requested digit$", said, re.M)
    assert f"Loss curve: {folder}/loss.png\nDigits:     {folder}/digits.png" in said
    picture(folder / "loss.png")
    wide, high = picture(folder / "digits.png").size
    assert wide > 10 * 16 and high > 10 * 16
    curve = json.loads((folder / "loss.json").read_text())
    assert curve["training"]["steps"][-1] == 2


@pytest.mark.skipif(not FONT.is_file(), reason=f"needs {FONT}: install {PACKAGE}")
def test_emoji(tmp_path: Path) -> None:
    folder = tmp_path / "emoji"
    few = {"PULSE_TRAIN_ITERS": "6", "PULSE_RANKS": "1", "PULSE_RUN_DIR": str(folder)}
    said = said_by(["bash", "launch/emoji.sh"], **few)
    assert f"Emoji:      {folder}/emoji.png (one row per prompt)" in said
    for name in ("loss.png", "emoji.png"):
        picture(folder / name)


def test_emoji_without_its_font_says_what_to_install(tmp_path: Path) -> None:
    environment = {"PULSE_EMOJI_FONT": f"{tmp_path}/no.ttf", "PULSE_RUN_DIR": f"{tmp_path}/emoji"}
    said = said_by(["bash", "launch/emoji.sh"], 2, **environment)
    assert f"apt-get install {PACKAGE}" in said and "Traceback" not in said
    assert not (tmp_path / "emoji/images").exists()


@pytest.mark.parametrize("ranks", ["0", "3", "8", "two"])
def test_ranks_that_cannot_be(ranks: str, tmp_path: Path) -> None:
    environment = {"PULSE_RANKS": ranks, "PULSE_RUN_DIR": f"{tmp_path}/digits"}
    said = said_by(["bash", "launch/quickstart.sh"], 2, **environment)
    assert said == f"PULSE_RANKS must be a power of two up to 4, not {ranks}.\n"
    assert list(tmp_path.iterdir()) == []


def tour() -> list[str]:
    """The commands of the README's "Plan by hand"."""
    section = (ROOT / "README.md").read_text().split("\n## Plan by hand\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]


SHORT = {
    "profile": ["--seconds-per-layer", "0.01"],
    "tune": ["--seconds", "4"],
    "run": ["--train-iters", "8"],
}
"""What is added to commands of the tour, which so take less time."""


def follow(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """``pulse`` with each of the words, in ``folder``; the script of ``pulse run`` is this rank."""
    os.chdir(folder)
    for name, *words in commands:
        words += SHORT.get(name, [])
        if name == "run":
            script = words.index("launch/pretrain_diffusion.py")
            assert words[:script] == ["--nproc-per-node", os.environ["WORLD_SIZE"]]
            sys.argv = words[script:]
            runpy.run_path(words[script], run_name="__main__")
        else:
            assert main([name, *words]) == 0, words


def test_the_tour(tmp_path: Path) -> None:
    """Its commands on forked ranks, in a folder that has of the repository what they name."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    activate, *lines = tour()
    assert activate == "source .venv/bin/activate"
    there = said_by(["bash", "-c", f"{activate} && command -v pulse"])
    assert there == f"{ROOT}/.venv/bin/pulse\n"
    commands = [shlex.split(line) for line in lines]
    assert {first for first, *_ in commands} == {"pulse"}
    words = [rest for _, *rest in commands]
    (training,) = (i for i, (name, *_) in enumerate(words) if name == "run")
    run_ranks(1, follow, tmp_path, words[:training], timeout_s=LIMIT_S)
    run_ranks(2, follow, tmp_path, [words[training]], timeout_s=LIMIT_S)
    run_ranks(1, follow, tmp_path, words[training + 1 :], timeout_s=LIMIT_S)
    plan = load_checked(tmp_path / "plan.json")
    assert plan.backbone["options"]["depth"] == 8
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert not load_trace(tmp_path / "tour/trace.json").faults()
    assert ElementTree.parse(tmp_path / "both.svg").getroot().tag.endswith("svg")
    picture(tmp_path / "digits.png")
    assert list((tmp_path / "exported").iterdir())
