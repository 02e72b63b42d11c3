"""Disk cache of solved scheduling problems.

There is a file for each problem, named by a digest of the properties that make problems alike.
These are stages over devices, microbatches, whole or split backwards, and stage times in ratio to
the longest (to 1 %). Further are links in hundredths of the longest, activations and caps in ratio,
the requested solver, and the code that solves. A stored order is only a candidate: it is validated
and timed against the problem at hand.

The folder is that of ``files.cache_folder``. The cache never causes an error. An unreadable file
counts as missing and is overwritten, and a folder that is not writable is left alone. Processes may
share the folder, and its removal costs only time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import add_checksum, cache_folder, digest_of_sources, read_json
from megatron_pulse.planner.schedule.bound.bounds import lower_bound
from megatron_pulse.planner.schedule.check.simulate import simulate
from megatron_pulse.planner.schedule.check.validate import faults_for
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import Certificate, ScheduleProblem, Synthesis
from megatron_pulse.planner.schedule.serialize import from_json, to_json

type Find = Callable[[ScheduleProblem, float, str], Synthesis]
"""Function from a problem, a time limit in seconds, and a solver's name to a solution."""

_FORMAT = "megatron_pulse schedule 1"


@dataclass(frozen=True)
class Entry:
    """A stored solution; ``offered_s`` is the time limit that the solver had."""

    schedule: Schedule
    certificate: Certificate
    problem: str
    offered_s: float


def cached(problem: ScheduleProblem, seconds: float, solver: str, find: Find) -> Synthesis:
    """Return the stored solution if ``find`` is unlikely to improve it, else the better of both.

    The result is stored. ``find`` is not called if it had ``seconds`` or more before, or if the
    stored solution is proved for this very problem. Makespan and bound are in ``problem``'s own
    times. Raises only the exceptions of ``find``.
    """
    began = time.monotonic()
    seconds = min(seconds, 1e12)  # a number that JSON has
    path = cache_folder() / f"{key(problem, solver)}.json"
    entry = _read(path)
    known = None if entry is None else _answer(problem, entry)
    if entry is not None and known is not None:
        if known.certificate.proved or entry.offered_s >= seconds:
            spent = time.monotonic() - began
            return _said(replace(known, certificate=replace(known.certificate, seconds=spent)))
    found, is_stored = find(problem, seconds, solver), False
    entry = _read(path)  # again: another process may have been faster
    known = None if entry is None else _answer(problem, entry)
    if entry is not None and known is not None:
        seconds = max(seconds, entry.offered_s)
        if known.certificate.makespan < found.certificate.makespan:
            found = replace(known, certificate=_tightened(known.certificate, found.certificate))
            is_stored = True
    _write(path, Entry(found.schedule, found.certificate, exact(problem), seconds))
    return _said(found) if is_stored else found


def _said(stored: Synthesis) -> Synthesis:
    """``stored``, whose certificate says where it is from."""
    made = stored.certificate
    return replace(stored, certificate=replace(made, solver=f"cache ({made.solver})"))


def key(problem: ScheduleProblem, solver: str) -> str:
    """Digest that is equal for problems that are alike (see the module), and only for them."""
    columns = [problem.forward, problem.backward, problem.weight_grad or ()]
    recompute, again = problem.recompute_s or (), problem.recompute_bytes or ()
    longest = max(max(column) for column in columns if column)
    links = [problem.lag(s, s + 1) for s in range(problem.placement.num_stages - 1)]
    held = [problem.activation_of(s) for s in range(problem.placement.num_stages)]
    most = max(held) or 1.0
    what = [
        _FORMAT,
        _code(),
        solver,
        problem.placement.kind.name,
        problem.placement.device_of_stage,
        problem.placement.starts,
        problem.num_microbatches,
        [[round(math.log(t / longest) / math.log(1.01)) for t in column] for column in columns],
        [round(100 * link / longest) for link in links],
        [f"{h / most:.9e}" for h in held],
        None if problem.cap is None else [f"{cap / most:.9e}" for cap in problem.cap],
        [round(100 * seconds / longest) for seconds in recompute],
        [f"{num / most:.9e}" for num in again],
        [f"{num / most:.9e}" for num in problem.offload_bytes or ()],
        [round(100 * seconds / longest) for seconds in problem.offload_s or ()],
        [f"{num / most:.9e}" for num in problem.wgrad_bytes or ()],
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40]


def exact(problem: ScheduleProblem) -> str:
    """Digest of all fields of ``problem``; a proof holds for no other problem."""
    return hashlib.sha256(repr(problem).encode()).hexdigest()[:40]


@lru_cache
def _code() -> str:
    """Digest of the scheduling code, because other code may find other solutions."""
    return digest_of_sources(Path(__file__).parent)


def _answer(problem: ScheduleProblem, entry: Entry) -> Synthesis | None:
    """The stored order as a solution of ``problem``; None if it is not valid."""
    if faults_for(problem, entry.schedule):
        return None
    made, length = entry.certificate, simulate(problem, entry.schedule).makespan
    if entry.problem == exact(problem) and made.lower_bound <= length * (1 + 1e-9):
        bound = max(lower_bound(problem, work=0.0), made.lower_bound)
    else:
        bound = lower_bound(problem)
    proved = length <= bound * (1 + 1e-9)
    return Synthesis(
        entry.schedule, replace(made, makespan=length, lower_bound=bound, proved=proved)
    )


def _tightened(known: Certificate, found: Certificate) -> Certificate:
    """``known`` with the better of both bounds, for the same problem."""
    bound = min(max(known.lower_bound, found.lower_bound), known.makespan)
    proved = known.makespan <= bound * (1 + 1e-9)
    return replace(known, lower_bound=bound, proved=proved, seconds=found.seconds)


def _read(path: Path) -> Entry | None:
    """Entry of a file; None if the file is missing or invalid."""
    try:
        record = read_json(path, FileKind.SCHEDULE)
        if record["format"] != _FORMAT:
            return None
        made = {name: record["certificate"][name] for name in Certificate.__dataclass_fields__}
        numbers = [made["makespan"], made["lower_bound"], made["seconds"], record["offered_s"]]
        if not all(type(n) in (int, float) and n >= 0 for n in numbers) or made["makespan"] <= 0:
            return None
        if made["lower_bound"] <= 0 or not all(
            type(value) is kind for value, kind in ((made["proved"], bool), (made["solver"], str))
        ):
            return None
        return Entry(
            from_json(record["schedule"]),
            Certificate(**made),
            str(record["problem"]),
            float(record["offered_s"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(path: Path, entry: Entry) -> None:
    """Write an entry atomically; failures are ignored."""
    record: dict[str, Any] = {
        "format": _FORMAT,
        "problem": entry.problem,
        "offered_s": entry.offered_s,
        "certificate": asdict(entry.certificate),
        "schedule": to_json(entry.schedule),
    }
    text = add_checksum(json.dumps(record))
    # A random name: processes in several containers may share the folder and a process id.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(".part", "pulse.", path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
