"""Plans for several numbers of ranks in a folder: a run takes the one for those that are left."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from megatron_pulse.faults import collecting, told
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json
from megatron_pulse.planner.plan_file.plan_file import PlanFileError

_DEGREES = ("pipeline", "data", "tensor")


def world_file(folder: Path, world_size: int) -> Path:
    """Where ``pulse tune --worlds`` writes the plan for that many ranks."""
    return folder / f"world-{world_size}.json"


def optimizer_beside(folder: Path, worlds: Collection[int]) -> bool | None:
    """Whether the plans of other numbers of ranks in ``folder`` divide the optimizer over replicas;
    None where there are none.

    Raises PlanFileError where some do and some do not: no run can go on from one to the other.
    """
    kinds: dict[bool, str] = {}
    faults: list[str] = []
    mine = {world_file(folder, world) for world in worlds}
    for file in sorted(set(folder.glob("world-*.json")) - mine):
        with collecting(faults, (FileError, KeyError)):
            kinds[bool(read_json(file, FileKind.PLAN)["distributed_optimizer"])] = file.name
    if len(kinds) > 1:
        faults.append(f"{kinds[True]} divides the optimizer over replicas, {kinds[False]} does not")
    if faults:
        raise PlanFileError(told(f"{folder}", faults, "Give a folder without these plans."))
    return next(iter(kinds), None)


def plan_for_world(path: str | Path, world_size: int) -> Path:
    """``path``, or where that is a folder, the plan in it for that many ranks.

    Raises PlanFileError where there is none, or more than one, with those that are there.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    there: dict[Path, int] = {}
    faults = []
    for file in sorted(path.glob("*.json")):
        try:
            record = read_json(file, FileKind.PLAN)
            there[file] = math.prod(int(record[name]) for name in _DEGREES)
        except (FileError, KeyError, TypeError, ValueError) as error:
            faults.append(f"{file.name}: no plan ({error})")
    fitting = [file for file, world in there.items() if world == world_size]
    if len(fitting) == 1:
        return fitting[0]
    faults += [f"{file.name} is for {world} rank(s)" for file, world in there.items()]
    several = ", ".join(file.name for file in fitting)
    what = (
        f"more than one plan for {world_size} rank(s) ({several})"
        if fitting
        else (f"no plan for {world_size} rank(s)")
    )
    raise PlanFileError(
        told(f"{path} holds {what}", faults, "'pulse tune --worlds N,N -o DIR' writes them")
    )
