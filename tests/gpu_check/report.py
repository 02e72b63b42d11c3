"""The report of checks: JSON for programs, Markdown for people, both written whole each time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_pulse.files import replacing
from tests.benchmarks.report import table, write_json
from tests.gpu_check.check import Machine, Result, Verdict

FORM = "megatron_pulse gpu check 1"


def write_report(
    out: Path, machine: Machine, results: Sequence[Result], waiting: Sequence[str]
) -> None:
    """Write ``report.json`` and ``report.md`` into ``out``; ``waiting`` have not been run yet."""
    record = {
        "form": FORM,
        "machine": asdict(machine),
        "counts": counts(results),
        "checks": list(map(asdict, results)),
        "waiting": list(waiting),
    }
    write_json(out / "report.json", record)
    with replacing(out / "report.md") as beside:
        beside.write_text("\n".join(_pages(machine, results, waiting)) + "\n")


def read_earlier(out: Path, machine: Machine, but: Collection[str]) -> list[Result]:
    """What a report in ``out`` says of the same GPUs, but for these checks; nothing of one that is
    none."""
    try:
        record = json.loads((out / "report.json").read_text())
        if record["form"] != FORM or tuple(record["machine"]["gpus"]) != machine.gpus:
            return []
        found = [Result(**{**check, "earlier": True}) for check in record["checks"]]
        found = [replace(each, verdict=Verdict(each.verdict)) for each in found]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [each for each in found if each.name not in but]


def counts(results: Sequence[Result]) -> dict[str, int]:
    """How many checks have which verdict."""
    return dict(Counter(str(result.verdict) for result in results))


def in_words(results: Sequence[Result]) -> str:
    """Their counts."""
    return ", ".join(f"{number} {verdict}" for verdict, number in counts(results).items())


def _pages(machine: Machine, results: Sequence[Result], waiting: Sequence[str]) -> list[str]:
    where = ", ".join(machine.gpus) or "CPU (torch finds no GPU)"
    lines = [f"# GPU check: {where}", "", f"{in_words(results) or 'nothing run yet'}."]
    if waiting:
        lines += ["", f"Not run yet: {', '.join(waiting)}."]
    rows = [
        {"check": r.name, "verdict": f"{r.verdict}{', earlier' * r.earlier}", "s": r.seconds,
         "what": r.why, "reason": r.reason}
        for r in results
    ]  # fmt: skip
    lines += ["", *table(rows), "", "## Machine", ""]
    lines += table([{"what": k, "is": v} for k, v in machine.versions.items()])
    for result in results:
        if result.figures or result.output:
            lines += ["", f"## {result.name}: {result.verdict}", "", f"{result.why}."]
        if result.reason and (result.figures or result.output):
            lines += ["", f"{result.verdict}: {result.reason}"]
        lines += _figures(result.figures)
        if result.output and result.verdict is not Verdict.PASSED:
            fence = "````"
            lines += ["", "How its output ends:", "", fence, *result.output, fence]
    return lines


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """Tables of what has rows, then all the rest as one."""
    lines: list[str] = []
    single = {name: value for name, value in figures.items() if not _is_rows(value)}
    if single:
        lines += ["", *table([{"figure": k, "is": v} for k, v in single.items()])]
    for name, value in figures.items():
        if _is_rows(value):
            lines += ["", f"{name}:", "", *table(value)]
    return lines


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
