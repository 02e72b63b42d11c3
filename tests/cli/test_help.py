"""Examples in help texts are commands that the parsers take."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_pulse.cli.main import main, make_parser

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
def test_help_examples_parse(name: str) -> None:
    text = HELP[name].split("\nexample", 1)[1].split("\n\n")[0].split("positional arguments")[0]
    found = commands(text)
    assert found, f"{name} --help has no example"
    for words in found:
        make_parser().parse_args(words)


@pytest.mark.parametrize("name", [name for name in HELP if name != "pulse run"])
def test_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split()[1:], "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_help_tour_parses() -> None:
    found = commands(HELP["pulse"])
    assert len(found) >= 9
    for words in found:
        make_parser().parse_args(words)


def test_help_of_every_command_has_an_example() -> None:
    leaves = [n for n in HELP if not any(other.startswith(f"{n} ") for other in HELP)]
    assert [n for n in leaves if "\nexample" not in HELP[n]] == []
