"""What the READMEs say is there, is taken, and runs."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main, make_parser
from megatron_pulse.recipe.examples import example_text
from model_specs.derived import user_code
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[1]
READMES = sorted(
    path
    for folder in (".", "launch", "megatron_pulse", "model_specs", "tests")
    for path in (ROOT / folder).glob("README.md" if folder == "." else "**/README.md")
)
NAMES = [str(path.relative_to(ROOT)) for path in READMES]
every_readme = pytest.mark.parametrize("path", READMES, ids=NAMES)
QUESTIONS = (
    "`fold`, `wave`, `offload`, `in-flight microbatches`",
    "a backbone, a schedule, a flag",
    "resume",
    "read a plan",
    "memory does not suffice",
    "FSDP2 better",
    "on a hang",
)
"""Parts of the questions that a reader has first."""


def blocks(language: str, text: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def lines(text: str) -> Iterator[str]:
    """The commands of all bash blocks, continued ones as one line, without comments."""
    for block in blocks("bash", text):
        yield from (line.split(" #")[0].strip() for line in block.replace("\\\n", " ").splitlines())


def anchors(path: Path) -> set[str]:
    """How links call the headings of a file."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def num_prose_words(path: Path) -> int:
    """Words of a page outside its code blocks and tables."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    return len(" ".join(prose).split())


@every_readme
def test_pages_are_short(path: Path) -> None:
    assert num_prose_words(path) <= (900 if path.parent == ROOT else 800)


def test_all_pages_together_are_short() -> None:
    assert len(NAMES) >= 20
    assert sum(len(path.read_text().split()) for path in READMES) <= 20_000


def test_front_page_has_the_recipe_of_the_digits() -> None:
    assert f"```toml\n{example_text('digits')}```" in (ROOT / "README.md").read_text()


def test_pages_of_rooms_have_a_picture() -> None:
    """A drawing in a block without a language, or an image."""
    for path in READMES:
        text = path.read_text()
        languages = re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL)
        assert "" in languages or "mermaid" in languages or "![" in text, path


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_front_page_answers(question: str) -> None:
    """A row of its table names the page, and the heading, that has the answer."""
    (row,) = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("| ") and question in line
    ]
    assert re.search(r"\]\([^)]+README\.md[^)]*\) \|$", row)


@every_readme
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists() and found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


@every_readme
def test_paths_in_the_text_are_there(path: Path) -> None:
    """Those with a folder in them, from the root or from where the text is."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    made = (
        "runs/",
        "checkpoints/",
        "imported/",
        "samples/",
        "tensorboard/",
        "data/coco",
        "failures/",
        "scheduler/",
        "classic/",
    )
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text):
        if name.startswith(made):
            continue
        bases = (ROOT, path.parent, ROOT / "megatron_pulse")
        assert any((base / name).exists() for base in bases), name


@every_readme
def test_every_page_is_reached_from_the_front(path: Path) -> None:
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)#]+README\.md)[^)]*\)", page.read_text()):
            left.append((page.parent / target).resolve())
    assert path in seen


def pulse_commands() -> list[tuple[str, list[str]]]:
    """(page, words after ``pulse``) of every call in the pages' blocks."""
    found = []
    for name, path in zip(NAMES, READMES, strict=True):
        for line in lines(path.read_text()):
            if line.startswith("pulse "):
                found.append((name, shlex.split(line.partition(" > ")[0])[1:]))
    return found


def test_pulse_commands_are_taken() -> None:
    found = pulse_commands()
    assert len(found) >= 18
    for name, words in found:
        try:
            make_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"{name}: pulse {shlex.join(words)}")


@every_readme
def test_other_commands_name_what_is_there(path: Path) -> None:
    for line in lines(path.read_text()):
        words = shlex.split(line)
        known = ("pulse", "bash", "source", "sbatch", "srun", "torchrun", "pip", ".venv/bin/python")
        assert not words or words[0] in known, line
        for word in words:
            if re.fullmatch(r"(launch|tests)/[\w/]+\.(py|sh|sbatch)|tests/\w+", word):
                assert (ROOT / word).exists(), line
        if words[1:2] == ["-m"] and words[2] != "pytest":
            spec = importlib.util.find_spec(words[2])
            if spec is not None and spec.submodule_search_locations:  # a package
                spec = importlib.util.find_spec(f"{words[2]}.__main__")
            assert spec is not None and spec.origin is not None, line
            source = Path(spec.origin).read_text()
            if "Flags(" in source:  # a benchmark: what all have is there too
                source += (ROOT / "tests/benchmarks/report.py").read_text()
            for word in words[3:]:
                assert not word.startswith("--") or f'"{word}"' in source, line


def test_flags_of_trainings_are_known() -> None:
    from megatron_pulse.integration.flags.parse import Parser, unknown_flags

    parser, found = Parser(), 0
    for path in READMES:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            for given in re.findall(r"pretrain(?:_diffusion\.py|\.sbatch) +(--[^#]*)", line):
                flags = [word.strip("`,") for word in given.split()]
                assert unknown_flags(parser, flags) == [], f"{path}: {line}"
                found += 1
    assert found >= 6


def test_flags_that_tables_explain_are_there() -> None:
    from megatron_pulse.integration.flags.parse import Parser, unknown_flags

    text = (ROOT / "launch/README.md").read_text()
    flags = set(re.findall(r"--pulse-[a-z-]+[a-z]", text))
    assert len(flags) >= 36
    assert unknown_flags(Parser(), sorted(flags)) == []


def test_what_commands_write_in_the_root_is_ignored() -> None:
    written = {"runs/tiny/x", "tour/trace.json", "checkpoints/sd15/x", "data/coco/meta.json"}
    for _, words in pulse_commands():
        for flag in ("-o", "--output", "--draw", "--to", "--write-profile", "--json"):
            if flag in words:
                written.add(words[words.index(flag) + 1])
    assert {
        "profile.json",
        "plan.html",
        "digits.png",
        "exported/uvit.safetensors",
        "sd.svg",
    } <= written
    in_git = subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode == 0
    if not in_git:
        pytest.skip("not a git repository")

    def git(*words: str) -> list[str]:
        result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return result.stdout.splitlines()

    folders = {f"{name}/x" if "." not in Path(name).name else name for name in written}
    assert set(git("check-ignore", "--no-index", *sorted(folders))) == folders
    assert git("ls-files", "-ci", "--exclude-standard") == []


def test_documents_that_docstrings_cite_are_there() -> None:
    """A page, from the file or the package; and a heading of it, after a colon or a comma."""
    cited = 0
    for path in [*(ROOT / "megatron_pulse").rglob("*.py"), *(ROOT / "model_specs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = " ".join((ast.get_docstring(node) or "").split())
            for page, heading in re.findall(
                r"([\w./]+\.md)(?:\W+beside this)?(?:: ([A-Z][\w ]*))?", text
            ):
                if "/" not in page and page != "README.md":
                    assert page in ("report.md",), f"{path}: {page}"
                    continue
                found = (path.parent / page).resolve()
                assert found.is_file(), f"{path}: {page}"
                anchor = heading.strip().lower().replace(" ", "-")
                assert not anchor or anchor in anchors(found), f"{path}: {heading}"
                cited += 1
    assert cited >= 10


def test_the_maps_counts_are_of_the_files_it_names() -> None:
    text = (ROOT / "megatron_pulse/README.md").read_text().split("## To add", 1)[1]
    rows = re.findall(r"^\| (an? .*?) \| (\d) \| (.*) \|$", text, re.MULTILINE)
    assert {"a backbone", "a placement", "a command", "a flag"} <= {what for what, _, _ in rows}
    for what, files, touch in rows:
        named = re.findall(r"\]\([^)]+\.py\)", touch)
        assert len(named) == int(files) or "a file" in touch or "a module" in touch, what


def drawn_schedules() -> list[tuple[str, list[list[str]]]]:
    """(title, cells of every device) of the schedules drawn on the map and on their own page."""
    found = []
    for page in ("megatron_pulse", "megatron_pulse/planner/schedule"):
        text = (ROOT / page / "README.md").read_text()
        text = re.sub(r"```\w+\n.*?```", "", text, flags=re.DOTALL)
        for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
            for part in block.strip().split("\n\n"):
                title, *rows = part.splitlines() or [""]
                if re.search(r"\d+ slots", title) and "".join(rows[:1]).startswith("device 0 "):
                    found.append((title, [row.split()[2:] for row in rows]))
    return found


@pytest.mark.parametrize(("title", "rows"), drawn_schedules(), ids=["map", "1f1b", "split"])
def test_drawn_schedules_are_what_they_say(title: str, rows: list[list[str]]) -> None:
    from megatron_pulse.planner.layout.placement import fold, sequential
    from megatron_pulse.planner.schedule.bound.bounds import lower_bound
    from megatron_pulse.planner.schedule.check.simulate import simulate
    from megatron_pulse.planner.schedule.check.validate import faults_for
    from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
    from megatron_pulse.planner.schedule.problem import ScheduleProblem

    placement = sequential(2) if "1F1B" in title else fold(2)
    count = 2 if "M = 2" in title else 3
    each = 2.0 if "1F1B" in title else 1.0  # two stages of the others as one
    split = (each,) * placement.num_stages if "W0a" in " ".join(rows[0]) else None
    problem = ScheduleProblem(
        placement,
        count,
        (each,) * placement.num_stages,
        (2 * each if split is None else each,) * placement.num_stages,
        split,
    )

    def operation(cell: str) -> Operation:
        return Operation(OpType(cell[0]), int(cell[1]), "abc".index(cell[2]))

    starts = {
        operation(cell): slot for row in rows for slot, cell in enumerate(row) if cell[0] in "FBIW"
    }
    order = tuple(tuple(operation(cell) for cell in row if cell[0] in "FBIW") for row in rows)
    schedule = Schedule("drawn", placement, count, order)
    assert faults_for(problem, schedule) == []
    timeline = simulate(problem, schedule)
    assert dict(timeline.start) == starts
    slots = int(re.search(r"(\d+) slots", title).group(1))  # type: ignore[union-attr]
    assert timeline.makespan == slots == max(map(len, rows))
    if "proved" in title:
        assert lower_bound(problem) == slots


def own_layers() -> str:
    """The program on the runtime's page."""
    (block,) = blocks("python", (ROOT / "megatron_pulse/runtime/README.md").read_text())
    return block


def test_the_modules_of_the_page_of_backbones_are_taken_by_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "model_specs/README.md").read_text()
    (block,) = blocks("python", text)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(block)
    page = text[text.index(block) :]
    for line in list(lines(page))[:3]:
        words = shlex.split(line)[1:]
        if words[0] == "profile":
            words += ["--seconds-per-layer", "0.001", "--micro-batch-size", "2"]
        if words[0] == "tune":
            words += ["--seconds", "2"]
        assert main(words) == 0, line
    (skips,) = re.findall(r"# its .* (\d+ skips)", page)
    assert skips in capsys.readouterr().out
    assert main(["check", "plan.json"]) == 0
    monkeypatch.setattr(user_code, "_allowed", set())
    assert main(["check", "plan.json"]) == 2
    assert main(["check", "plan.json", "--module", "mine.py:build"]) == 0


def run_own_layers() -> dict[str, Any]:
    """The program on this rank: losses of its last step, its parameters and their gradients."""
    names: dict[str, Any] = {"__name__": "mine"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(compile(own_layers(), "README.md", "exec"), names)
    parameters = dict(names["pipeline"].named_parameters())
    return {
        "losses": [loss.item() for loss in names["losses"]],
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
    }


def plain_loop() -> dict[str, Any]:
    """The same training as a torch loop over the layers, which begin as ``Pipeline``'s do."""
    import torch
    from torch import nn

    from megatron_pulse.runtime.stage import layer_seed

    names: dict[str, Any] = {}
    tree = ast.parse(own_layers())
    tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.ClassDef)]
    exec(compile(tree, "README.md", "exec"), names)
    layers = nn.ModuleList()
    for i in range(8):
        torch.manual_seed(layer_seed(0, f"layers.{i}"))
        layers.append(names["Block"]())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    for step in range(3):
        data = torch.randn(8, 4, 16, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses = []
        for x in data:
            given, outputs = x, []
            for i, layer in enumerate(layers):
                skip = {7: 0, 6: 1, 5: 2}.get(i)
                given = layer(given) if skip is None else layer(given, outputs[skip])
                outputs.append(given)
            loss = (given - x.roll(1, -1)).square().mean()
            (loss / len(data)).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
    parameters = {f"layers.{name}": p for name, p in layers.named_parameters()}
    return {
        "losses": losses,
        "parameters": {name: p.detach() for name, p in parameters.items()},
        "gradients": {name: p.grad for name, p in parameters.items()},
    }


def run_alone() -> tuple[dict[str, Any], dict[str, Any]]:
    """The program on one process, and the plain loop."""
    return run_own_layers(), plain_loop()


def test_own_layers_train_as_on_one_process() -> None:
    import torch

    ((whole, plain),) = run_ranks(1, run_alone)
    pair = run_ranks(2, run_own_layers)
    assert whole["losses"] == pair[0]["losses"] == pair[1]["losses"]
    torch.testing.assert_close(whole["losses"], plain["losses"], rtol=1e-5, atol=0)
    for kind in ("parameters", "gradients"):
        both = {**pair[0][kind], **pair[1][kind]}
        assert len(both) == len(pair[0][kind]) + len(pair[1][kind])
        assert both.keys() == whole[kind].keys() == plain[kind].keys()
        for name, value in both.items():
            assert torch.equal(value, whole[kind][name]), name
            torch.testing.assert_close(value, plain[kind][name], rtol=1e-4, atol=1e-6)
