"""Rank and size of the job of this process, from torchrun or srun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OF_SLURM = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}


def ranks_of(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, LOCAL_RANK and WORLD_SIZE, as far as torchrun or srun give them."""
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {name: environment[name] for name in _OF_SLURM if name in environment}
    return {name: environment[key] for name, key in _OF_SLURM.items() if key in environment}


@dataclass(frozen=True)
class RankOfJob:
    """One of ``num_ranks`` ranks, the ``local_rank``-th of its node; alone without a launcher."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankOfJob:
        """Rank of a process started by torchrun or in a step of Slurm.

        A script that calls srun is in no step, although its environment has a rank.
        """
        if "RANK" not in environment and "SLURM_STEP_ID" not in environment:
            return cls()
        given = ranks_of(environment)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        rank, num_ranks, local_rank = (int(given.get(name, name == "WORLD_SIZE")) for name in names)
        return cls(rank, num_ranks, local_rank)
