"""Mutated files through every command that reads them: refused in one sentence, or what they say.

Each case is a sound file of one kind with one to three mutations (of its structure, its text or its
bytes), and one command that reads it, in a process of its own with limits on time and memory. A
case is *refused* if the command ends with 1 or 2 and one error; *accepted* if it ends with 0 and an
independent check finds in what was read what the file says; everything else is a failure. Files
that begin with a hash are mutated without it, as by hand. With ``--flips`` one bit is another, the
hash is left, and of files with hashes nothing may be accepted.

    .venv/bin/python -m tests.benchmarks.mutations --cases 2000 --seed 1 --json mutations.json
    .venv/bin/python -m tests.benchmarks.mutations --seed 1 --only 17     # one case, shown
    .venv/bin/python -m tests.benchmarks.mutations --flips --cases 200 --targets plan
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_pulse.cli.main import main
from megatron_pulse.errors import format_list
from megatron_pulse.files import HASH
from megatron_pulse.progress import track
from tests.benchmarks.mutate import dump, mutate_bytes, mutate_cells, mutate_tree, tree
from tests.benchmarks.mutation_files import make
from tests.benchmarks.mutation_targets import TARGETS, obey_plan

LIMIT_S = 20.0
LIMIT_BYTES = 2 << 30
_LONGEST_ERROR = 20_000


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


def mutated(path: Path, rng: random.Random) -> tuple[bytes, str]:
    """The content of a file after one to three mutations, and what they were."""
    lines = path.read_bytes().splitlines(keepends=True)
    content = b"".join(line for line in lines if HASH.encode() not in line)
    said = []
    in_text = rng.random() < 0.3
    if not in_text and path.suffix in (".json", ".yaml"):
        plain = yaml.safe_load(content) if path.suffix == ".yaml" else json.loads(content)
        value = tree(plain)
        said = [mutate_tree(value, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        content = dump(value).encode("utf-8", "surrogatepass")
        if path.suffix == ".yaml" and rng.random() < 0.7:
            try:
                content = yaml.safe_dump(json.loads(content), sort_keys=False).encode()
            except (ValueError, RecursionError, yaml.YAMLError):
                pass  # what YAML cannot say stays JSON
    elif not in_text and path.suffix == ".csv":
        text, how = mutate_cells(content.decode(), rng)
        content, said = text.encode("utf-8", "surrogatepass"), [how]
    else:
        for _ in range(rng.choice((1, 1, 2))):
            content, how = mutate_bytes(content, rng)
            said.append(how)
    return content, ", ".join(said)


def flipped(path: Path, rng: random.Random) -> tuple[bytes, str]:
    """The content of a file with one other bit, and which."""
    content = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    return bytes(content), f"bit {bit} of byte {place} of {len(content)}"


def run_flip(number: int, seed: int, sound: Path, names: Sequence[str]) -> Case:
    """Flip a bit, run the command in a child, judge."""
    rng = random.Random(f"{seed} {number} flip")

    def damage(file: Path) -> str:
        content, how = flipped(file, rng)
        file.write_bytes(content)
        return how

    case, _ = _run(number, rng, sound, names, damage)
    unseen = case.outcome == "accepted" and TARGETS[case.target].hashed
    return replace(case, outcome="not seen") if unseen else case


def run_case(number: int, seed: int, sound: Path, names: Sequence[str]) -> Case:
    """Mutate, run the command in a child, judge."""
    rng = random.Random(f"{seed} {number}")
    name = names[number % len(names)]

    def damage(file: Path) -> str:
        content, how = mutated(file, rng)
        kind = rng.random()
        if kind < 0.01:
            file.unlink()
            return "missing"
        if kind < 0.02:
            file.unlink()
            file.mkdir()
            return "a folder"
        if kind < 0.04 and name != "events":
            others = [p for p in sound.iterdir() if p.is_file() and p.name != TARGETS[name].file]
            shutil.copy(rng.choice(others), file)
            return "another kind"
        file.write_bytes(content)
        return how

    case, left = _run(number, rng, sound, names, damage)
    if case.outcome == "refused" and left:
        return replace(case, outcome="left files", detail=f"{sorted(left)}")
    return case


def _run(
    number: int,
    rng: random.Random,
    sound: Path,
    names: Sequence[str],
    damage: Callable[[Path], str],
) -> tuple[Case, set[str]]:
    """Damage one file of a copy, run a command that reads it in a child, judge; with what files the
    command left."""
    name = names[number % len(names)]
    target = TARGETS[name]
    command = rng.choice(target.commands)
    with tempfile.TemporaryDirectory(prefix="mutation-") as place:
        folder = Path(place) / "here"
        shutil.copytree(sound, folder)
        how = damage(folder / target.file)
        before = _listing(folder)
        begin = time.perf_counter()
        outcome, detail = _judged(name, command, folder)
        seconds = time.perf_counter() - begin
        left = _listing(folder) - before
    case = Case(number, name, how, " ".join(command), outcome, round(seconds, 2), detail)
    return case, left


def _listing(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")} - {"out", "err", "verdict"}


def _judged(name: str, command: Sequence[str], folder: Path) -> tuple[str, str]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(name, command, folder)
    end = time.monotonic() + LIMIT_S
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang", f"longer than {LIMIT_S:g} s"
        time.sleep(0.002)
    err = (folder / "err").read_text(errors="replace")
    if usage.ru_maxrss << 10 > LIMIT_BYTES:
        return "memory", f"{usage.ru_maxrss >> 10} MiB"
    code = os.waitstatus_to_exitcode(status)
    verdict = folder / "verdict"
    if "Traceback (most recent call last)" in err or code not in (0, 1, 2):
        return "traceback", f"exit {code}: {err[-1500:]}"
    if code and command[0] == "checkpoint" and not err:  # its answer, damage and all
        return "refused", (folder / "out").read_text().strip()[:300]
    if code:
        if not err.strip() or len(err) > _LONGEST_ERROR or "rror:" not in err:
            return "no clear error", f"exit {code}, {len(err)} characters: {err[:1000]}"
        return "refused", err.strip().splitlines()[-1 if command[0] == "obey" else 0][:300]
    found = verdict.read_text() if verdict.exists() else "there is no verdict"
    return ("accepted", "") if found == "fine" else ("differs", found)


def _child(name: str, command: Sequence[str], folder: Path) -> None:
    """Run the command with its output in files, then the check; never returns."""
    code = 70
    try:
        os.chdir(folder)
        for stream, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            code = obey_plan(command[1]) if command[0] == "obey" else main(command)
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else 1
        if code == 0:
            try:
                found = TARGETS[name].check(Path())
                told = "fine" if not found else format_list(found, 8)
            except Exception as error:
                told = f"the check: {type(error).__name__}: {error}"
            Path("verdict").write_text(told)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def sound_cases(sound: Path, names: Sequence[str]) -> Iterator[str]:
    """What is wrong with the files before they are mutated, by command; also warms this process."""
    for name in names:
        for command in TARGETS[name].commands:
            with tempfile.TemporaryDirectory(prefix="mutation-") as place:
                folder = Path(place) / "here"
                shutil.copytree(sound, folder)
                outcome, detail = _judged(name, command, folder)
                if outcome != "accepted":
                    yield f"{name}: pulse {' '.join(command)}: {outcome}: {detail}"


def warm(names: Sequence[str]) -> None:
    """Import once what the children need."""
    import matplotlib.font_manager  # noqa: F401

    import megatron_pulse.cli.plan.plan_html  # noqa: F401
    import megatron_pulse.planner.tune.search.search  # noqa: F401
    import model_specs

    model_specs.available()
    if any(TARGETS[name].heavy for name in names):
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
    """These cases; raises ValueError where a file is refused that nobody has mutated."""
    warm(names)
    with tempfile.TemporaryDirectory(prefix="mutations-") as place:
        sound = Path(place)
        make(sound, any(TARGETS[name].heavy for name in names))
        if faults := list(sound_cases(sound, names)):
            raise ValueError("sound files:" + format_list(faults))
        numbers = track(cases, "mutating", "cases", silent=not progress)
        one = run_flip if flips else run_case
        return [one(number, seed, sound, names) for number in numbers]


def _print(results: Sequence[Case]) -> None:
    outcomes = sorted({case.outcome for case in results})
    print(f"{'file':20s}" + "".join(f"{outcome:>16s}" for outcome in outcomes))
    for name in TARGETS:
        count = Counter(case.outcome for case in results if case.target == name)
        if count:
            print(f"{name:20s}" + "".join(f"{count[outcome]:>16d}" for outcome in outcomes))
    for case in results:
        if case.failed:
            print(f"\ncase {case.number}: {case.target}, {case.how}: pulse {case.command}\n"
                  f"  {case.outcome} after {case.seconds} s: {case.detail}")  # fmt: skip
    longest = max(results, key=lambda case: case.seconds)
    failed = sum(case.failed for case in results)
    print(f"\n{len(results)} cases, {failed} failures, the longest {longest.seconds} s")


def command_line() -> int:
    """The command; 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flips", action="store_true", help="one bit in each case")
    parser.add_argument("--only", type=int, metavar="I", help="this case alone")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case")
    args = parser.parse_args()
    numbers = list(range(args.cases)) if args.only is None else [args.only]
    results = run(numbers, args.seed, args.targets, progress=True, flips=args.flips)
    _print(results)
    if args.json is not None:
        record: dict[str, Any] = {"seed": args.seed, "cases": [asdict(case) for case in results]}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.only is not None:
        print(results[0])
    return int(any(case.failed for case in results))


if __name__ == "__main__":
    sys.exit(command_line())
