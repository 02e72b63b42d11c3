"""Elastic plans: a folder of plans for several numbers of ranks, one of which a run takes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_pulse.errors import collecting, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, read_json
from megatron_pulse.planner.plan_file.consistency import num_ranks
from megatron_pulse.planner.plan_file.plan_file import PlanFileError


def world_file(folder: Path, world_size: int) -> Path:
    """Path to which ``pulse tune --world-sizes`` writes the plan for ``world_size`` ranks."""
    return folder / f"world-{world_size}.json"


def distributed_optimizer_of_folder(folder: Path, world_sizes: Collection[int]) -> bool | None:
    """True if the folder's plans for other sizes than ``world_sizes`` use the distributed
    optimizer.

    Returns None if there are no such plans. Raises PlanFileError if only some use it, because a run
    cannot go on from one kind to the other.
    """
    kinds: dict[bool, str] = {}
    faults: list[str] = []
    mine = {world_file(folder, world) for world in world_sizes}
    for file in sorted(set(folder.glob("world-*.json")) - mine):
        with collecting(faults, (FileError, KeyError)):
            kinds[bool(read_json(file, FileKind.PLAN)["distributed_optimizer"])] = file.name
    if len(kinds) > 1:
        faults.append(f"{kinds[True]} divides the optimizer over replicas, {kinds[False]} does not")
    if faults:
        raise PlanFileError(
            format_faults(f"{folder}", faults, "Give a folder without these plans.")
        )
    return next(iter(kinds), None)


def plan_for_world(path: str | Path, world_size: int) -> Path:
    """Return ``path``, or if it is a folder, the plan in it for ``world_size`` ranks.

    Raises PlanFileError, with a list of the available plans, if there is none or more than one.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    there: dict[Path, int] = {}
    faults = []
    for file in sorted(path.glob("*.json")):
        try:
            record = read_json(file, FileKind.PLAN)
            there[file] = num_ranks(record)
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
        format_faults(
            f"{path} holds {what}", faults, "'pulse tune --world-sizes N,N -o DIR' writes them"
        )
    )
