"""Diagnosis of a hung job, from the status of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_pulse.runtime.watchdog.peer_status import NoAnswer

_MOST_RANKS = 8
"""Maximum number of ranks listed by number; further ranks are counted."""
_STILL = 0.9
"""Fraction of the limit without progress from which a rank counts as hung."""


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank: position, seconds without progress, and whether it waits for others."""

    position: str
    stalled_s: float
    waits: bool


@dataclass(frozen=True)
class Diagnosis:
    """First failure of a job in one line, and the positions of all ranks."""

    reason: str
    positions: tuple[str, ...]


def seconds_until_diagnosis(
    statuses: Mapping[int, RankStatus | NoAnswer], limit_s: float
) -> float | None:
    """Seconds until ranks that still make progress can be judged.

    None if no rank makes progress, or if a rank does not answer.
    """
    if any(isinstance(one, NoAnswer) for one in statuses.values()):
        return None
    stalled = [one.stalled_s for one in statuses.values() if isinstance(one, RankStatus)]
    return None if min(stalled) >= _STILL * limit_s else limit_s - min(stalled)


def diagnose(
    statuses: Mapping[int, RankStatus | NoAnswer], processes: Mapping[int, str], limit_s: float
) -> Diagnosis:
    """Diagnose which ranks block the others when no rank makes progress::

        some do not answer      these ranks
        else, some do not wait  these ranks, in an operation or in their own code
        else                    none: all wait for each other

    ``processes`` describes each rank's process and node.
    """
    gone = [rank for rank, one in statuses.items() if one is NoAnswer.GONE]
    silent = [rank for rank, one in statuses.items() if one is NoAnswer.SILENT]
    there = {rank: one for rank, one in statuses.items() if isinstance(one, RankStatus)}
    working = [rank for rank, one in there.items() if not one.waits]
    reasons = [f"{_ranks(gone, processes)}: process exited unexpectedly (SIGKILL?)"] if gone else []
    if silent:
        reasons.append(
            f"{_ranks(silent, processes)}: no response (process stopped, or node or link down)"
        )
    if not reasons and working:
        reasons = [
            f"rank {rank}: {there[rank].position}, for {there[rank].stalled_s:.0f} s"
            for rank in working[:_MOST_RANKS]
        ]
    if not reasons:
        reasons = ["all ranks wait for each other"]
    reason = f"no progress for {limit_s:g} s (--pulse-timeout-s); {'; '.join(reasons)}"
    return Diagnosis(reason, tuple(_places(there)))


def _ranks(ranks: list[int], processes: Mapping[int, str]) -> str:
    listed = ", ".join(f"{rank} ({processes.get(rank, '?')})" for rank in ranks[:_MOST_RANKS])
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {listed}{more}"


def _places(there: Mapping[int, RankStatus]) -> list[str]:
    """Positions of ranks, one line per distinct position, with the longest time there."""
    together: defaultdict[str, list[int]] = defaultdict(list)
    for rank, one in there.items():
        together[one.position].append(rank)
    lines = []
    for position, ranks in together.items():
        named = ", ".join(map(str, ranks[:_MOST_RANKS]))
        more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
        stalled_s = max(there[rank].stalled_s for rank in ranks)
        lines.append(
            f"rank{'s' * (len(ranks) > 1)} {named}{more}: {position}, for {stalled_s:.0f} s"
        )
    shown = lines[: 2 * _MOST_RANKS]
    left = len(lines) - len(shown)
    return [*shown, *([f"and {left} more positions (see the stacks)"] if left else [])]
