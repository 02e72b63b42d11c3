"""What tests of the commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.planner.plan_file.plan_file import save_plan
from megatron_pulse.profile.files import save_profile
from tests.plans import small_plan, small_profile

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Calls a command that must end with 2 and one error that says all of the words, nothing on
    standard output, and every file as it was (but for Python's own caches of imported modules);
    returns what it said."""

    def files() -> dict[Path, bytes | None]:
        found = (path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)
        return {path: path.read_bytes() if path.is_file() else None for path in found}

    def check(argv: list[str], *words: str) -> str:
        before = files()
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("pulse ") and "Traceback" not in err, (out, err)
        assert err.split("\n")[0].split(":")[1] == " error"
        assert [word for word in words if word not in err] == [], err
        assert files() == before
        return err

    return check


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a folder with a plan and its profile."""
    monkeypatch.chdir(tmp_path)
    save_plan(small_plan(), "plan.json")
    save_profile(small_profile(), "profile.json")
    return tmp_path


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Elements of an SVG picture."""
    return [element for element in svg.iter() if element.get("class") == name]
