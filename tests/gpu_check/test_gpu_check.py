"""The script on a CPU, and what becomes of checks that do not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks.report import table
from tests.gpu_check import runner
from tests.gpu_check.__main__ import main
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Check, Machine, Need
from tests.gpu_check.checks import CHECKS, numbers, ranks
from tests.launch.sessions import ROOT, session
from tests.runtime.equality import Outcome

BROKEN = "tests.gpu_check.broken"


def broken(name: str, need: Need = Need.NOTHING, limit_s: float = 30.0) -> Check:
    return Check(name, f"{BROKEN}:{name}", f"it {name}", need, limit_s)


def read(out: Path) -> dict[str, dict[str, Any]]:
    record = json.loads((out / "report.json").read_text())
    assert record["waiting"] == []
    return {check["name"]: check for check in record["checks"]}


def sleeping() -> list[str]:
    said = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in said.stdout.splitlines() if line == "sleep 1000.25"]


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="would set up another .venv")
def test_the_script_on_a_cpu(tmp_path: Path) -> None:
    """What needs a GPU is skipped and says so; the rest is run."""
    names = ["losses", "versions", "synchronisations"]
    command = ["bash", "launch/gpu_check.sh", "--out", str(tmp_path), "--only", *names]
    with session(command, CUDA_VISIBLE_DEVICES="") as run:
        assert run.ended() == 0, run.said()
    found = read(tmp_path)
    assert list(found) == ["versions", "losses", "synchronisations"]
    assert found["versions"]["verdict"] == "passed" and found["versions"]["figures"]["torch"]
    for name in ("losses", "synchronisations"):
        assert found[name]["verdict"] == "skipped"
        assert found[name]["reason"] == "needs a GPU, and torch finds none"
    page = (tmp_path / "report.md").read_text()
    assert "1 passed, 2 skipped." in page and "| losses | skipped |" in page
    assert f"report: {tmp_path}/report.md" in run.said() and "[3/3]" in run.said()


def test_what_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure says what and shows its output; what hangs, or is left, is ended as a whole."""
    monkeypatch.setattr(runner, "_LET_GO_S", 0.2)
    monkeypatch.setattr("tests.gpu_check.__main__.ask", lambda: Machine())
    checks = [
        broken("fails"), broken("dies"), broken("hangs", limit_s=5.0), broken("leaves"),
        broken("declines"), broken("none", Need.GPU),
    ]  # fmt: skip
    before = sleeping()
    assert main(["--out", str(tmp_path)], checks) == 1
    assert sleeping() == before
    found = read(tmp_path)
    assert {name: check["verdict"] for name, check in found.items()} == {
        "fails": "FAILED", "dies": "FAILED", "hangs": "timed out", "leaves": "FAILED",
        "declines": "skipped", "none": "skipped",
    }  # fmt: skip
    failed = found["fails"]
    assert failed["figures"] == {"found": 41.5} and "ended with status 3, not 0" in failed["reason"]
    assert "as | said" in failed["output"]
    assert "its last words: as | said" in failed["reason"]
    assert found["dies"]["reason"] == "its process ended with status -9"
    assert found["hangs"]["reason"] == "was ended after its limit of 5 s"
    assert 5 <= found["hangs"]["seconds"] < 20
    assert "sleeps" in found["hangs"]["output"]
    assert found["leaves"]["reason"] == "left 1 processes running, which were ended"
    assert found["declines"]["reason"] == "needs a Tuesday"
    page = (tmp_path / "report.md").read_text()
    assert "3 FAILED, 1 timed out, 2 skipped." in page and "\nas | said\n" in page
    assert "its last words: as \\| said |" in page  # in a cell of the table


def test_a_report_of_what_was_done_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there after each check, and names those that are to come."""
    monkeypatch.setattr("tests.gpu_check.__main__.ask", lambda: Machine())

    def stopped(*args: Any) -> Any:
        yield from runner.run_checks([broken("declines")], *args[1:])
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.gpu_check.__main__.run_checks", stopped)
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(tmp_path)], [broken("declines"), broken("hangs")])
    record = json.loads((tmp_path / "report.json").read_text())
    assert [check["name"] for check in record["checks"]] == ["declines"]
    assert record["waiting"] == ["hangs"] and record["counts"] == {"skipped": 1}
    assert "Not run yet: hangs." in (tmp_path / "report.md").read_text()


def test_what_an_earlier_run_wrote_is_not_taken_for_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are gone; those of others stay, and are not written beside."""
    monkeypatch.setattr("tests.gpu_check.__main__.ask", lambda: Machine())
    (tmp_path / "mine").write_text("")
    for _ in range(2):
        assert main(["--out", str(tmp_path)], [broken("writes")]) == 0
        assert read(tmp_path)["writes"]["figures"] == {"there": []}
    assert (tmp_path / "writes/made").exists() and (tmp_path / "mine").exists()
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails/mine").write_text("")
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path)], [broken("fails"), broken("writes")])
    assert end.value.code == 2
    assert f"{tmp_path}/fails holds other files" in capsys.readouterr().err
    assert (tmp_path / "fails/mine").exists() and (tmp_path / "writes/made").exists()
    assert main(["--out", str(tmp_path)], [broken("declines")]) == 0
    assert {n: c["earlier"] for n, c in read(tmp_path).items()} == {
        "writes": True, "declines": False,
    }  # fmt: skip
    assert "| writes | passed, earlier |" in (tmp_path / "report.md").read_text()


def test_options_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    bad = ["--only", "no", "--seconds-scale", "0", "--out", str(tmp_path / "file")]
    with pytest.raises(SystemExit) as end:
        main(bad)
    said = capsys.readouterr().err
    assert end.value.code == 2
    for part in ("'no'", "there are: versions, ", "must be a number above 0, is 0", "is a file"):
        assert part in said


@pytest.mark.parametrize(
    ("machine", "need", "words"),
    [
        (Machine(), Need.TWO_RANKS, ""),
        (Machine(), Need.TWO_RANKS_ON_GPUS, "torch finds none"),
        (Machine(("H200",), versions={"nccl": "2.29.7"}), Need.TWO_RANKS, "and NCCL 2.29.7"),
        (Machine(("H200",), shares_gpu=True), Need.TWO_RANKS_ON_GPUS, ""),
        (Machine(("H200", "H200")), Need.TWO_RANKS_ON_GPUS, ""),
        (Machine(("H200",)), Need.GPU, ""),
    ],
)
def test_what_a_machine_lacks(machine: Machine, need: Need, words: str) -> None:
    lacks = machine.lacks(need)
    assert words in lacks and bool(lacks) == bool(words)


class Pretended(Bench):
    """Trainings that say what they are told to have found."""

    found: Iterator[tuple[Any, list[dict[str, Any]]]]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        run, self.last_seen = next(self.found)
        return run


def pretended(folder: Path, *found: tuple[Any, list[dict[str, Any]]]) -> Pretended:
    bench = Pretended(folder, Machine())
    bench.found = iter(found)
    return bench


def test_a_wait_for_each_microbatch_is_a_failure(tmp_path: Path) -> None:
    few, many = Counter({"a.py:1": 3}), Counter({"a.py:1": 3, "b.py:2": 6})
    bench = pretended(tmp_path, (None, [{"syncs": few}]), (None, [{"syncs": few}]))
    assert numbers.synchronisations(bench)["waits that a microbatch adds"] == 0
    bench = pretended(tmp_path, (None, [{"syncs": few}]), (None, [{"syncs": many}]))
    with pytest.raises(AssertionError, match="every microbatch, at b.py:2"):
        numbers.synchronisations(bench)
    assert bench.figures["waits that a microbatch adds"] == 1.5


def test_ranks_that_share_nothing_are_a_failure(tmp_path: Path) -> None:
    """Though their numbers are right."""
    run = SimpleNamespace(losses=[1.0], grad_norms=[2.0])

    def seen(count: int) -> dict[str, Any]:
        return {"weights": [("w", (count,), 0, torch.zeros(count))]}

    bench = pretended(tmp_path, (run, [seen(8)]), (run, [seen(4)] * 2))
    assert ranks.tensor_parallel(bench)["relative difference of losses"] == 0
    bench = pretended(tmp_path, (run, [seen(8)]), (run, [seen(8)] * 2))
    with pytest.raises(AssertionError, match="nothing is shared"):
        ranks.tensor_parallel(bench)
    far = SimpleNamespace(losses=[1.01], grad_norms=[2.0])
    bench = pretended(tmp_path, (run, [seen(8)]), (far, [seen(4)] * 2))
    with pytest.raises(AssertionError, match="losses differ by 1.0e-02"):
        ranks.tensor_parallel(bench)


def test_other_bits_are_a_failure(tmp_path: Path) -> None:
    """All cases that differ are named, with what differs."""
    one = Outcome([1.0], {"w": torch.ones(1)}, {"w": torch.ones(1)})
    other = Outcome([1.0], {"w": torch.ones(1) * 2}, {"w": torch.ones(1)})
    bench = pretended(tmp_path)
    with pytest.raises(AssertionError, match="1 of 2 cases differ: unet whole"):
        numbers.compared(bench, [("uvit", "whole"), ("unet", "whole")], [one, other], [one, one])
    assert [row["differ"] for row in bench.figures["cases"]] == ["nothing", "weights"]
    with pytest.raises(AssertionError, match="0 weight gradients apart"):
        numbers.compared(bench, [("uvit", "split")], [one], [one])


def test_every_check_is_there() -> None:
    """Each has a function, a name of its own, a reason and a limit."""
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= 30
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(bench: Bench) -> Figures:" in source, check.name
        assert check.why and check.limit_s > 0


def test_a_table_has_the_columns_of_all_rows() -> None:
    rows = [{"a": 1.23456, "b": "x|y"}, {"c": "two\nlines"}]
    assert table(rows) == [
        "| a | b | c |", "|---|---|---|", "| 1.235 | x\\|y |  |", "|  |  | two lines |",
    ]  # fmt: skip
