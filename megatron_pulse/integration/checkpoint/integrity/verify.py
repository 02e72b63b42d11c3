"""Verification that a checkpoint is as it was saved, before anything of it is used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_pulse.errors import Faults, format_faults
from megatron_pulse.integration.checkpoint.folders import (
    DamagedError,
    complete_checkpoints,
    step_folder,
)
from megatron_pulse.integration.checkpoint.integrity.hashes import (
    INDEX,
    Chunk,
    FileHash,
    all_chunks,
    chunks_of,
    find_hash_faults,
    find_size_faults,
    read_hashes,
)
from megatron_pulse.integration.checkpoint.integrity.tensor_locations import Places, read_places
from megatron_pulse.integration.checkpoint.safe_unpickling import patch_reading
from megatron_pulse.runtime.collectives import gather_objects

_COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Key of the object that holds the flags of the run."""
UNHASHED = "saved without hashes"
"""Verdict on a step without hashes, which may well be undamaged."""


def require_readable(folder: Path) -> None:
    """Raise DamagedError if a size, the index or the run's flags are not as saved.

    The check reads little, so every rank makes it alone, before the process group exists.
    """
    patch_reading()
    try:
        faults = _first_faults(folder, read_hashes(folder))
    except Faults as error:
        faults = error.faults
    if faults:
        sound = next(
            (step for step in _other_steps(folder) if not _size_faults(_sibling(folder, step))),
            None,
        )
        remedy = ""
        if sound is not None:
            how = f"'pulse checkpoint verify {folder.parent}' verifies it"
            remedy = f"step {sound} there has correct file sizes ({how}): {_use(sound)}"
        raise damaged(folder, faults, remedy)


def damaged(folder: Path, faults: Sequence[str], remedy: str = "") -> DamagedError:
    """Return the error for a checkpoint with these faults."""
    more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
    text = format_faults(f"{folder} is damaged", faults, remedy)
    return DamagedError(text, f"{folder} is damaged ({faults[0]}{more})")


def require_intact(folder: Path) -> None:
    """Raise DamagedError unless every file is as it was saved.

    Collective once the process group exists: each rank reads its share of the bytes, and all ranks
    raise alike. The message names the damaged files and the newest undamaged other step. A
    checkpoint without hashes is accepted, and rank 0 prints a warning.
    """
    if not (faults := find_damage(folder)):
        return
    whole = next((step for step, _, why in verified_other_steps(folder) if not why), None)
    remedy = "no other step there is intact"
    if whole is not None:
        remedy = f"step {whole} there is intact: {_use(whole)}"
    raise damaged(folder, faults, remedy)


def find_damage(folder: Path) -> list[str]:
    """Return the faults of a checkpoint; all ranks read, each its share (collective).

    Without hashes only the index and the presence of files are checked, and rank 0 prints a
    warning.
    """
    faults = _shared_faults(folder)
    if not faults and _rank() == 0 and read_hashes(folder) is None:
        print(
            f"warning: {folder} was saved without hashes of its files: damage cannot be detected",
            flush=True,
        )
    return faults


def verified_other_steps(
    folder: Path, known: Collection[int | None] = ()
) -> Iterator[tuple[int, Path, list[str]]]:
    """Yield the steps beside ``folder`` that are not in ``known``, newest first.

    Each comes with its folder and its faults, which are empty for a step known to be intact.
    Collective at each iteration.
    """
    for step in gather_objects(_other_steps(folder))[0]:
        if step not in known:
            other = _sibling(folder, step)
            yield step, other, _judged(other)


def _use(step: int) -> str:
    return f"name it (--ckpt-step {step} beside --load in training, --iteration {step} in commands)"


def _first_faults(folder: Path, hashes: Mapping[str, FileHash] | None) -> list[str]:
    """Faults of sizes, index and flags.

    Raises Faults if the index is invalid.
    """
    if faults := list(find_size_faults(folder, hashes)):
        return faults
    if hashes is not None:
        index = [chunk for chunk in all_chunks(hashes) if chunk.name == INDEX]
        if faults := list(find_hash_faults(folder, hashes, index)):
            return faults
    places = read_places(folder, hashes)
    if hashes is None:
        return []
    return list(find_hash_faults(folder, hashes, _common_chunks(places)))


def _common_chunks(places: Places) -> list[Chunk]:
    return [
        chunk
        for index, place in places.items()
        if index.fqn == _COMMON
        for chunk in chunks_of(place.relative_path, place.offset, place.length)
    ]


def _size_faults(folder: Path) -> list[str]:
    """Faults visible without reading; a checkpoint without hashes counts as unknown."""
    try:
        hashes = read_hashes(folder)
    except Faults as error:
        return error.faults
    return [UNHASHED] if hashes is None else list(find_size_faults(folder, hashes))


def _shared_faults(folder: Path) -> list[str]:
    """Faults found by all ranks together and told to all (collective)."""
    try:
        hashes = read_hashes(folder)
        faults = list(find_size_faults(folder, hashes))
        if not faults and hashes is not None:
            share = all_chunks(hashes)[_rank() :: _world_size()]
            faults = list(find_hash_faults(folder, hashes, share))
        if not faults and _rank() == 0:
            read_places(folder, hashes)
    except Faults as error:
        faults = error.faults
    return list(dict.fromkeys(fault for part in gather_objects(faults) for fault in part))


def _judged(folder: Path) -> list[str]:
    """Reasons why a checkpoint is not known to be intact (collective)."""
    by_sizes = dict.fromkeys(
        fault for faults in gather_objects(_size_faults(folder)) for fault in faults
    )
    return list(by_sizes) or _shared_faults(folder)


def _other_steps(folder: Path) -> list[int]:
    steps = reversed(complete_checkpoints(folder.parent))
    return [step for step in steps if step_folder(step) != folder.name]


def _sibling(folder: Path, step: int) -> Path:
    return folder.parent / step_folder(step)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
