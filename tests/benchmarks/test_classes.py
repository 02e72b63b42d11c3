"""Table of diffusers' classes in the README, beside the command that makes it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from model_specs.derived.classes import CLASSES
from model_specs.derived.diffusers_modules import defaults_of
from tests.benchmarks.classes import MODELS, Row, line, row

PAGE = Path(__file__).parents[2] / "model_specs/README.md"
PUBLISHED = Path(__file__).parent / "results/classes.csv"


def rows_of_readme() -> list[str]:
    """Rows of models, each beginning with a name."""
    lines = PAGE.read_text().splitlines()
    return [each for each in lines if each.split("|")[1:2] and each.split("|")[1] in MODELS]


@pytest.mark.parametrize("name", ["PRX", "Wan 2.1 1.3B"])
def test_rows_of_the_readme_are_those_of_the_command(name: str) -> None:
    rows = rows_of_readme()
    assert len(rows) >= 10
    assert line(row(name)) in rows


def test_published_rows_are_of_these_models_and_have_those_of_the_readme() -> None:
    with PUBLISHED.open() as file:
        found = {each["model"]: each for each in csv.DictReader(file)}
    assert list(found) == list(MODELS)
    for name, each in found.items():
        assert each["kind"] == MODELS[name].kind
        for way in ("full", "LoRA", "CP"):
            assert way in each["trains"] or f"{way}: " in each["refused"], name
    lines = [
        line(Row(name, each["kind"], float(each["B"]), int(each["links"]), float(each["MB"]),
                 int(each["skips"]), each["trains"], each["refused"]))
        for name, each in found.items()
    ]  # fmt: skip
    assert set(rows_of_readme()) <= set(lines)


def test_models_are_of_declared_classes_with_known_options() -> None:
    for name, model in MODELS.items():
        settings = defaults_of(model.kind)
        sizes = CLASSES[model.kind].defaults({**settings, "num_frames": 1})
        assert model.options.keys() <= {*settings, *sizes}, name
