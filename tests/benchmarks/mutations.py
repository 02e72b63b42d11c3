"""Damaged files through every command that reads them: refused in one sentence, or what they say.

Each case is a sound file with one to three damages (of its structure, its text or its bytes), and
one command that reads it, in a process of its own with limits on time and memory. A case is
*refused* if the command ends with 1 or 2 and one error; *accepted* if it ends with 0 and what was
read is what the file says, by an independent check. Everything else is a failure. A checksum is
taken out before damage, as by hand. With ``--flips`` one bit is another, the checksum stays, and of
files with checksums nothing may be accepted.

    .venv/bin/python -m tests.benchmarks.mutations --cases 2000 --seed 1 --json mutations.json
    .venv/bin/python -m tests.benchmarks.mutations --seed 1 --only 17     # one case, shown
    .venv/bin/python -m tests.benchmarks.mutations --flips --cases 200 --targets plan
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_pulse.cli.main import main as pulse
from megatron_pulse.errors import format_list
from megatron_pulse.files import HASH
from megatron_pulse.progress import track
from tests.benchmarks.mutated_files import TARGETS, Target, difference, make
from tests.benchmarks.report import Flags, Report, record, write_json

LIMIT_S = 60.0
LIMIT_BYTES = 2 << 30
LONGEST_ERROR = 20_000

VALUES: tuple[Any, ...] = (
    1e308, -1e308, 1e-308, 1e300, float("nan"), float("inf"), -1, 0, 1, 2, 3, 0.5, 1.0, 10**30,
    2**63, 2**31, -(2**63), 99_999_999, 999_999_999, 10**400, True, None, "", " ", "x" * 200_000,
    "\ud800", "\x00", "\x1b[2J", "日本語", "🙂", "مرحبا", "../../etc/passwd",
    "<script>alert(1)</script>",
    "%s%n", "nan", "1e308", "NaN", "F0:0", "F999999999:0", "B0:999999999", "X0:0", "fold",
    "sequential", "bidirectional", [], {}, [[]], [1e308], {"a": 1}, "null", "true", "uvit-s",
    "ring", "cuda", "float16", "megatron_pulse plan 1", "megatron_pulse profile 1",
)  # fmt: skip
CELLS = (
    "0F999999999", "99999999999F0", "999999999B0", "٣F0", "-1F0", "0Q0", "0F", "F0:0", "0f0",
    "0F0 ", "1F1", "0I0", "0W0", "0X0", "=1+1", "\x00", "🙂", "0" * 131_073, "0F" + "1" * 131_073,
    "1" * 5000 + "F0", '"0F0', '0F0""', '"0F0\n', "", " ", "0F0,0F0",
)  # fmt: skip
JUNK = (b"\xff\xfe", b"\0", b"{", b"]", b'"', b",", b"\n", b"NaN", b"&a *a ", b"- ", b"\0" * 1000)
DEEP = (b"[" * 100_000, b'{"a":' * 100_000, b"- " * 50_000)
WHOLES = (b"", b"\n", b"{}", b"[]", b"null", b"1", *DEEP)


@dataclass(frozen=True)
class Case:
    """What was done to which file, and what a command made of it."""

    number: int
    target: str
    how: str
    command: str
    outcome: str
    seconds: float
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether this must not happen."""
        return self.outcome not in ("accepted", "refused")


def change(value: Any, rng: random.Random) -> str:
    """Change a tree of lists and dictionaries at one place; how."""
    spots: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        part = todo.pop()
        keys = list(part if isinstance(part, dict) else range(len(part)))
        spots += [(part, key) for key in keys]
        todo += [part[key] for key in keys if isinstance(part[key], dict | list)]
    if not spots:
        return "nothing"
    # Top-level fields as often as the many items of long lists.
    shallow = [spot for spot in spots if spot[0] is value]
    held, key = rng.choice(shallow if rng.random() < 0.3 else spots)
    now = held[key]
    other, its = rng.choice(spots)
    alike: list[Any] = [[now], {"value": now}, [[[[now]]]], str(now), None, bool(now), 7]
    if isinstance(now, bool):
        alike += [not now] * 5
    elif isinstance(now, int | float):
        alike += [now + 1, now - 1, now * 2, now * 1000, now // 2, -now]
    elif isinstance(now, str):
        alike += [now[:-1], now + "x", now.upper(), now + " ", now[::-1]]
    elif isinstance(now, list):
        alike += [now[::-1], rng.sample(now, len(now)), now[:-1], now + now[-1:], now[1:]]
    how = rng.choice(("lost", "value", "value", "alike", "alike", "other", "added", "renamed"))
    new = copy.deepcopy({"value": rng.choice(VALUES), "alike": rng.choice(alike)}.get(how, now))
    if how in ("lost", "renamed"):
        del held[key]
    if how in ("renamed", "added"):
        name = rng.choice([f"{key}s", f"{key}".upper(), f"{key}"[:-1], "x", "", "surprise"])
        if isinstance(held, dict):
            held[name] = now
        else:
            held.insert(key, rng.choice(VALUES))
    if how == "other":
        held[key], other[its] = other[its], copy.deepcopy(now)
    elif how in ("value", "alike"):
        held[key] = new
    return how


def _digit(content: bytes, at: int, rng: random.Random) -> bytes:
    digits = [match.start() for match in re.finditer(rb"\d", content)] or [len(content)]
    i = rng.choice(digits)
    return content[:i] + bytes([rng.randrange(48, 58)]) + content[i + 1 :]


def _flip(content: bytes, at: int, rng: random.Random) -> bytes:
    at = min(at, len(content) - 1)
    flipped = [byte ^ 1 << rng.randrange(8) for byte in content[at : at + 1]]
    return content[:at] + bytes(flipped) + content[at + 1 :] if content else content


def _key_twice(content: bytes, at: int, rng: random.Random) -> bytes:
    keys = re.findall(rb'"\w+":', content) or [b""]
    key = rng.choice(keys)
    return content.replace(key, key + b" 1, " + key, 1)


BYTES: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "cut short": lambda content, at, rng: content[:at],
    "a bit": _flip,
    "a digit": _digit,
    "a key twice": _key_twice,
    "inserted": lambda content, at, rng: content[:at] + rng.choice(JUNK) + content[at:],
    "a piece lost": lambda content, at, rng: content[:at] + content[at + rng.randint(1, 200) :],
    "twice": lambda content, at, rng: content + content,
    "another": lambda content, at, rng: rng.choice(WHOLES),
    "nested": lambda content, at, rng: b"[" + content,
    "utf-16": lambda content, at, rng: content.decode("utf-8", "replace").encode("utf-16"),
    "latin-1": lambda content, at, rng: content + b"\xe9",
    "bom": lambda content, at, rng: b"\xef\xbb\xbf" + content,
    "crlf": lambda content, at, rng: content.replace(b"\n", b"\r\n"),
}


def change_cells(content: bytes, rng: random.Random) -> bytes:
    """A CSV file with another cell, row, or order of them."""
    rows = [each.split(",") for each in content.decode().splitlines()]
    row = rng.choice(rows)
    i = rng.randrange(len(row))
    how = rng.randrange(6)
    if how == 0:
        rng.shuffle(rows)
    elif how == 1:
        rows.remove(row)
    elif how == 2:
        del row[i]
    else:
        row[i] = rng.choice([*CELLS, row[i] + "," + row[i], rng.choice(rng.choice(rows) or [""])])
    return "".join(",".join(cells) + "\n" for cells in rows).encode("utf-8", "surrogatepass")


def damaged(path: Path, rng: random.Random) -> tuple[bytes, str]:
    """The content of a file after one to three damages, and what they were."""
    lines = path.read_bytes().splitlines(keepends=True)
    content = b"".join(each for each in lines if HASH.encode() not in each)
    said, structured = [], rng.random() < 0.7
    if structured and path.suffix == ".csv":
        return change_cells(content, rng), "cells"
    if structured and path.suffix in (".json", ".yaml"):
        value = yaml.safe_load(content) if path.suffix == ".yaml" else json.loads(content)
        said = [change(value, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        content = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if path.suffix == ".yaml" and rng.random() < 0.7:
            with suppress(ValueError, RecursionError, yaml.YAMLError):  # else it stays JSON
                content = yaml.safe_dump(value, sort_keys=False).encode()
    for how in rng.choices(list(BYTES), k=rng.choice((0, 0, 1) if said else (1, 1, 2))):
        content = BYTES[how](content, rng.randrange(len(content) + 1), rng)
        said.append(how)
    return content, ", ".join(said)


def damage(file: Path, sound: Path, rng: random.Random) -> str:
    """Damage a file, or put something else in its place; how."""
    kind = rng.random()
    if kind < 0.02:
        file.unlink()
        if kind < 0.01:
            return "missing"
        file.mkdir()
        return "a folder"
    if kind < 0.04 and file.suffix != ".0":  # TensorBoard's files may be anything
        others = [path for path in sound.iterdir() if path.is_file() and path.name != file.name]
        shutil.copy(rng.choice(others), file)
        return "another kind"
    content, how = damaged(file, rng)
    file.write_bytes(content)
    return how


def flip(file: Path, sound: Path, rng: random.Random) -> str:
    """Flip one bit of a file; which."""
    content = file.read_bytes()
    at = rng.randrange(len(content))
    file.write_bytes(_flip(content, at, rng))
    return f"a bit of byte {at} of {len(content)}"


def run_case(number: int, seed: int, sound: Path, names: Sequence[str], flips: bool) -> Case:
    """Damage one file of a copy, run a command that reads it in a child, judge."""
    rng, name = random.Random(f"{seed} {number} {flips}"), names[number % len(names)]
    target = TARGETS[name]
    command = rng.choice(target.commands)
    with tempfile.TemporaryDirectory(prefix="mutation-") as place:
        folder = Path(place) / "here"
        shutil.copytree(sound, folder)
        how = (flip if flips else damage)(folder / target.file, sound, rng)
        before, begin = _listing(folder), time.perf_counter()
        outcome, detail = judge(target, command, folder)
        seconds, left = time.perf_counter() - begin, _listing(folder) - before
    case = Case(number, name, how, command, outcome, round(seconds, 2), detail)
    if flips and target.hashed and outcome == "accepted":
        return replace(case, outcome="not seen")
    if not flips and outcome == "refused" and left:
        return replace(case, outcome="left files", detail=f"{sorted(left)}")
    return case


def _listing(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")} - {"out", "err", "verdict"}


def judge(target: Target, command: str, folder: Path) -> tuple[str, str]:
    """Outcome of a command in ``folder``, with its reason."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(target, command.split(), folder)
    end, done = time.monotonic() + LIMIT_S, 0
    while not done:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if not done and time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang", f"longer than {LIMIT_S:g} s"
        time.sleep(0.002)
    code, err = os.waitstatus_to_exitcode(status), (folder / "err").read_text(errors="replace")
    kind = command.split()[0]
    if usage.ru_maxrss << 10 > LIMIT_BYTES:
        return "memory", f"{usage.ru_maxrss >> 10} MiB"
    if "Traceback (most recent call last)" in err or code not in (0, 1, 2):
        return "traceback", f"exit {code}: {err[-1500:]}"
    if code and kind == "checkpoint" and not err:  # its answer, damage and all
        return "refused", (folder / "out").read_text().strip()[:300]
    if code and "rror:" in err and len(err) <= LONGEST_ERROR:
        return "refused", err.strip().splitlines()[-1 if kind == "obey" else 0][:300]
    if code:
        return "no clear error", f"exit {code}, {len(err)} characters: {err[:1000]}"
    found = (folder / "verdict").read_text()
    return ("differs", found) if found else ("accepted", "")


def _child(target: Target, command: Sequence[str], folder: Path) -> None:
    """Run the command with its output in files, then the check; never returns."""
    code = 70
    try:
        os.chdir(folder)
        for stream, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            code = obey_plan(command[1]) if command[0] == "obey" else pulse(command)
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else 1
        if code == 0:
            try:
                pairs = target.check(Path(target.file))
                found = [said for pair in pairs if (said := difference(*pair))]
            except Exception as error:
                found = [f"the check: {type(error).__name__}: {error}"]
            Path("verdict").write_text(format_list(found, 8) if found else "")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def obey_plan(path: str) -> int:
    """What a rank does with ``--pulse-plan`` before it builds anything."""
    from megatron_pulse.integration.flags.startup_checks import FlagError
    from megatron_pulse.integration.planning.run_plan import num_microbatches, plan_run
    from megatron_pulse.integration.setup import read_command_line
    from model_specs import load_backbone

    os.environ |= {"WORLD_SIZE": "4", "RANK": "0"}
    flags = ("--pulse-data", "digits8", "--train-iters", "1", "--lr", "1e-3")
    sys.argv = ["pretrain_diffusion.py", "--pulse-plan", path, *flags]
    line, options, given = read_command_line()
    args = line.args
    if line.faults:
        raise FlagError([*line.faults])
    try:
        backbone = load_backbone(options.backbone, options.options)
        plan_run(args, options, backbone, given).step(num_microbatches(args))
    except ValueError as error:
        raise FlagError([str(error)]) from error  # as the run does
    return 0


def warm(heavy: bool) -> None:
    """Import once what the children need."""
    import matplotlib.font_manager  # noqa: F401

    import megatron_pulse.cli.plan.plan_html  # noqa: F401
    import megatron_pulse.planner.tune.tune  # noqa: F401
    import model_specs

    model_specs.available()
    if heavy:
        import torch

        from megatron_pulse.cli.import_megatron import prepare_megatron

        torch.set_num_threads(1)
        prepare_megatron()
        import tensorboard.backend.event_processing.event_accumulator  # noqa: F401

        import megatron_pulse.data.build
        import megatron_pulse.diffusion.published
        import megatron_pulse.integration.checkpoint.published_weights  # noqa: F401


def run(
    cases: Sequence[int],
    seed: int,
    names: Sequence[str],
    progress: bool = False,
    flips: bool = False,
) -> list[Case]:
    """These cases; raises ValueError where a sound file is refused."""
    heavy = any(TARGETS[name].heavy for name in names)
    warm(heavy)
    with tempfile.TemporaryDirectory(prefix="mutations-") as place:
        sound = Path(place) / "sound"
        sound.mkdir()
        make(sound, heavy)
        for name, command in ((n, c) for n in names for c in TARGETS[n].commands):
            shutil.copytree(sound, folder := Path(place) / "copy")
            outcome, detail = judge(TARGETS[name], command, folder)
            shutil.rmtree(folder)
            if outcome != "accepted":
                raise ValueError(f"sound {name}: pulse {command}: {outcome}: {detail}")
        numbers = track(cases, "damaging", "cases", silent=not progress)
        return [run_case(number, seed, sound, names, flips) for number in numbers]


def main() -> int:
    """The command; 1 where a case failed."""
    flags = Flags(__doc__)
    flags.add("--cases", 2000)
    flags.add("--seed", 1, type=int)
    flags.add("--flips", False, "one bit in each case")
    flags.add("--only", type=int, metavar="I", help="this case alone")
    flags.add("--targets", list(TARGETS), nargs="*", choices=list(TARGETS), help="kinds of files")
    args = flags.parse_args()
    numbers = list(range(args.cases)) if args.only is None else [args.only]
    cases = run(numbers, args.seed, args.targets, progress=True, flips=args.flips)
    outcomes = sorted({case.outcome for case in cases})
    counts = Report()
    for name in dict.fromkeys(case.target for case in cases):
        count = Counter(case.outcome for case in cases if case.target == name)
        counts.add({"file": name, **{outcome: count[outcome] for outcome in outcomes}})
    for case in cases:
        if case.failed or args.only is not None:
            print(f"\n{case}")
    if args.json is not None:
        write_json(args.json, list(map(record, cases)))
    longest, failed = max(case.seconds for case in cases), sum(case.failed for case in cases)
    print(f"\n{len(cases)} cases, {failed} failures, the longest {longest} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
