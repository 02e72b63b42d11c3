"""Lists of faults: all that a reader can use, and no more."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import megatron_pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.data.dataset import CorruptSample
from megatron_pulse.errors import (
    Faults,
    collecting,
    counted,
    describe_exception,
    format_faults,
    format_list,
)
from megatron_pulse.planner.tune.layer_costs import Unfit, UnfitError
from megatron_pulse.tracing.torch_export import DerivationError
from model_specs.common.options import OptionError


def test_a_short_list_is_whole() -> None:
    faults = [f"times[{i}] is missing" for i in range(40)]
    assert format_list(faults).splitlines() == ["", *(f"  - {fault}" for fault in faults)]


@pytest.mark.parametrize(
    "error",
    [
        Faults(["a", "b"]),
        BackboneError("uvit", ["a", "b"]),
        DerivationError("mine.py", ["a"]),
        PublishedError("weights", ["a", "b"]),
        OptionError("uvit", ["a"]),
        CorruptSample("data", ["a", "b"], "mend it"),
        UnfitError(Unfit.STATE, "P=2"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_process_gets_an_error_as_it_is(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert vars(again) == vars(error)


def test_the_same_fault_is_said_once_and_counted() -> None:
    assert format_list(["a is 1", "b is 2", "a is 1"]) == "\n  - a is 1 (2 times)\n  - b is 2"


def test_many_alike_are_counted_and_others_stay_visible() -> None:
    faults = [f"times.{i} is {'x' * (i % 3)!r}; allowed is a number" for i in range(201)]
    lines = format_list(["first", *faults, "last is -1.5e+9"]).splitlines()[1:]
    assert lines[0] == "  - first" and lines[-1] == "  - last is -1.5e+9"
    assert lines[1:4] == [f"  - {fault}" for fault in faults[:3]]
    assert lines[4] == "  - and 198 more like it" and len(lines) == 6


def test_many_unlike_end_with_their_number() -> None:
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(100)]
    lines = format_list(names).splitlines()[1:]
    assert len(lines) == 41 and lines[-1] == "  - and 60 more"


def test_every_list_of_faults_is_made_in_one_place() -> None:
    root = Path(megatron_pulse.__file__).parent
    files = [*root.rglob("*.py"), *(root.parent / "model_specs").rglob("*.py")]
    own = re.compile(r"  - \{|join\((faults|different)\)|fault\(s\)|\{len\(faults\)\}")
    makers = [p for p in files if own.search(p.read_text(encoding="utf-8"))]
    assert makers == [root / "errors.py"], "use megatron_pulse.errors.format_faults"


def test_one_fault_is_a_sentence_and_several_a_list() -> None:
    assert format_faults("a.json", ["x is 1"]) == "a.json: x is 1"
    assert format_faults("a.json", ["x is 1", "y is 2"], "Do z.") == (
        "a.json (2 faults):\n  - x is 1\n  - y is 2\nDo z."
    )


def test_nested_lists_are_indented_and_counted_once() -> None:
    inner = format_faults("options", ["x is 1", "y is 2"], "legal are:\n  x\n  y")
    outer = format_faults(
        "error", [format_faults("data", ["none"]), format_faults("the model", [inner, "z is 3"])]
    )
    assert counted([inner]) == 2
    assert outer.splitlines() == [
        "error (4 faults):",
        "  - data: none",
        "  - the model:",
        "      - options:",
        "          - x is 1",
        "          - y is 2",
        "        legal are:",
        "          x",
        "          y",
        "      - z is 3",
    ]


def test_a_fault_that_quotes_a_damaged_file_is_cut() -> None:
    said = format_list([f"beta_end is {'x' * 200_000!r}"])
    assert len(said) < 5000 and said.endswith(" ...")


def test_of_others_errors_the_first_line_is_told_and_the_next_where_it_goes_on() -> None:
    said = describe_exception(ValueError("a field:\n  must be a number\nmore"))
    assert said == "ValueError: a field: must be a number"
    assert describe_exception(ValueError("a field\nmore")) == "ValueError: a field"
    assert describe_exception(ValueError()) == "ValueError"


def test_what_errors_say_is_collected() -> None:
    faults = ["first"]
    for error in (ValueError("second"), Faults(["third", "fourth"])):
        with collecting(faults):
            raise error
    assert faults == ["first", "second", "third", "fourth"]
    with pytest.raises(OSError), collecting(faults):
        raise OSError("not of these kinds")
