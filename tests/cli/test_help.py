"""Examples in help texts and in the README are commands that the parsers take."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_pulse.cli.main import make_parser

ROOT = Path(__file__).parents[2]


def parsers(
    parser: argparse.ArgumentParser, name: str = "pulse"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from parsers(inner, f"{name} {word}")


def commands(text: str) -> list[list[str]]:
    """The words of every line that calls ``pulse``, by itself or through torchrun."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in joined.splitlines():
        match = re.match(r"\s*(?:pulse|torchrun .* -m megatron_pulse\.cli) (.+)", line)
        if match and "COMMAND" not in line:
            # A comment, or what an example is for, stands behind two spaces; a pipe takes the rest.
            words = re.split(r"\s{2,}(?!-)|\s+#|\s[|>]\s", match[1])[0]
            found.append(shlex.split(words))
    return found


HELP = {name: parser.format_help() for name, parser in parsers(make_parser())}


@pytest.mark.parametrize("name", [name for name, text in HELP.items() if "\nexample" in text])
def test_examples_in_help_are_taken(name: str) -> None:
    text = HELP[name].split("\nexample", 1)[1].split("\n\n")[0].split("positional arguments")[0]
    found = commands(text)
    assert found, f"{name} --help has no example"
    for words in found:
        make_parser().parse_args(words)


def test_the_first_tour_in_help_is_taken() -> None:
    found = commands(HELP["pulse"])
    assert len(found) >= 9
    for words in found:
        make_parser().parse_args(words)


def test_every_command_has_an_example() -> None:
    leaves = [n for n in HELP if not any(other.startswith(f"{n} ") for other in HELP)]
    assert [n for n in leaves if "\nexample" not in HELP[n]] == []


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [words for block in blocks for words in commands(block)]


def test_commands_of_the_readme_are_taken() -> None:
    found = readme_commands()
    assert len(found) >= 10
    for words in found:
        make_parser().parse_args(words)


def test_what_commands_write_in_the_root_is_ignored() -> None:
    written = {"runs/tiny/x", "tour/trace.json", "checkpoints/sd15/x", "data/coco/meta.json"}
    for words in readme_commands():
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


def test_flags_of_the_readmes_trainings_are_known() -> None:
    from megatron_pulse.integration.flags.parse import Parser, unknown_flags

    parser = Parser()
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "pretrain_diffusion.py --" in line]
    assert len(lines) >= 3
    for line in lines:
        words = line.split("pretrain_diffusion.py", 1)[1].split()
        assert unknown_flags(parser, [w.strip("`,") for w in words]) == [], line
