"""Output of commands in one form each: tables, JSON and drawings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_pulse.cli.flag_checks import PRINT, add_flag
from megatron_pulse.files import replacing

if TYPE_CHECKING:
    from megatron_pulse.planner.draw.schedule import Panel
    from megatron_pulse.planner.schedule.check.simulate import Timeline
    from megatron_pulse.planner.schedule.problem import ScheduleProblem

DRAWINGS = (".svg", ".html", ".json")
"""Suffixes of a picture, a self-contained page, and events for ui.perfetto.dev."""

_WIDEST = 1_000_000


def table(
    rows: Sequence[Sequence[str]], left: Sequence[int] = (), titles: bool = True, indent: int = 0
) -> list[str]:
    """Lines of a table for standard output; with ``titles`` the first row has them.

    Columns ``left`` are flush left, others right. Negative columns count from the end. On a
    terminal titles are bold, and columns that are flush left fold to its width.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.measure import Measurement
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2), pad_edge=False)
    flush = {column % len(rows[0]) for column in left}
    for column, cells in enumerate(zip(*rows, strict=True)):
        is_text = column in flush
        justify: Literal["left", "right"] = "left" if is_text else "right"
        least = max(map(cell_len, " ".join(cells).split()), default=0)
        grid.add_column(justify=justify, no_wrap=not is_text, min_width=least)
    for number, row in enumerate(rows):
        grid.add_row(*map(Text, row), style="bold" if titles and not number else "")
    padded = Padding(grid, (0, 0, 0, indent), expand=False)
    console = Console(force_terminal=sys.stdout.isatty())
    own = console.width if console.is_terminal else _WIDEST
    needs = Measurement.get(console, console.options.update(width=_WIDEST), padded)
    console.width = max(needs.minimum, min(own, needs.maximum))
    with console.capture() as text:
        console.print(padded)
    return [line.rstrip() for line in text.get().splitlines()]


def first_and_last_layer(layers: Sequence[int], names: Sequence[str]) -> str:
    """First and last of a stage's ``layers``, by their ``names`` and numbers."""
    first, last = layers[0], layers[-1]
    if first == last:
        return f"{names[first]} (layer {first})"
    return f"{names[first]} ... {names[last]} (layers {first}-{last})"


def name_value_lines(
    pairs: Sequence[tuple[str, str]], width: int = 10, indent: int = 2
) -> list[str]:
    """Line for each name with its value."""
    return [f"{'':{indent}s}{name:{width}s}{value}" for name, value in pairs]


def add_json(parser: argparse.ArgumentParser, to_file: bool = True) -> None:
    """Add ``--json``, which takes a FILE unless the command takes other words."""
    if to_file:
        add_flag(
            parser,
            "--json FILE",
            "write the result as JSON; without FILE, or as '-', print it instead",
            writes=[".json"],
            nargs="?",
            const=PRINT,
        )
    else:
        add_flag(parser, "--json", "print JSON", action="store_const", const=PRINT)


def print_result(args: argparse.Namespace, lines: Sequence[str], record: Callable[[], Any]) -> None:
    """Print ``lines``, or with ``--json`` the record.

    With a FILE, the record is written there, and the lines say so.
    """
    if args.json is None:
        print("\n".join(lines))
        return
    text = json.dumps(record(), indent=1, allow_nan=False)
    if args.json == PRINT:
        print(text)
        return
    write(args.json, text + "\n")
    print("\n".join([*lines, f"written to {args.json}"]))


def write(path: Path, text: str) -> None:
    """Write ``path`` as a whole or not at all."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


def draw_timeline(
    path: Path,
    problem: ScheduleProblem,
    timeline: Timeline | Sequence[Panel],
    title: str,
    page: Callable[[str], str],
    *,
    lower_bound: float | None = None,
    unit: str = "ms",
    in_bytes: bool = False,
) -> str:
    """Draw a picture, a ``page`` with it, or events, by the suffix; return the line to print.

    Times are seconds and shown in ms. Without a unit they are shown as they are, and a unit is a
    millisecond of the events.
    """
    from megatron_pulse.planner.draw.schedule import draw_schedule
    from megatron_pulse.planner.draw.trace_events import trace_events

    scale = 1e3 if unit else 1.0
    if path.suffix.lower() == ".json":
        text = json.dumps(trace_events(problem, timeline, 1e3 * scale, in_bytes))
    else:
        text = draw_schedule(
            problem,
            timeline,
            title,
            lower_bound=lower_bound,
            unit=unit,
            scale=scale,
            in_bytes=in_bytes,
        )
        if path.suffix.lower() == ".html":
            text = page(text)
    write(path, text)
    return f"drawn to {path}"
