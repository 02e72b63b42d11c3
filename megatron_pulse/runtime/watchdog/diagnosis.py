"""Diagnosis of a job that stands still, from the status of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_pulse.runtime.watchdog.peer_status import NoAnswer

_MOST_RANKS = 8
"""Maximum number of ranks listed by number; further ranks are counted."""
_STILL = 0.9
"""Fraction of the limit without progress from which a rank counts as standing still."""


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank: position, seconds without progress, and whether it waits for others."""

    words: str
    quiet_s: float
    waits: bool


@dataclass(frozen=True)
class Diagnosis:
    """First failure of a job in one line, and the positions of all ranks."""

    reason: str
    places: tuple[str, ...]


def moving_for(said: Mapping[int, RankStatus | NoAnswer], limit_s: float) -> float | None:
    """Seconds until ranks that still make progress can be judged.

    None if no rank makes progress, or if a rank does not answer.
    """
    if any(isinstance(one, NoAnswer) for one in said.values()):
        return None
    quiet = [one.quiet_s for one in said.values() if isinstance(one, RankStatus)]
    return None if min(quiet) >= _STILL * limit_s else limit_s - min(quiet)


def diagnose(
    said: Mapping[int, RankStatus | NoAnswer], processes: Mapping[int, str], limit_s: float
) -> Diagnosis:
    """Diagnose which ranks block the others when no rank makes progress::

        some do not answer      these ranks
        else, some do not wait  these ranks, in an operation or in their own code
        else                    none: all wait for each other

    ``processes`` describes each rank's process and node.
    """
    gone = [rank for rank, one in said.items() if one is NoAnswer.GONE]
    silent = [rank for rank, one in said.items() if one is NoAnswer.SILENT]
    there = {rank: one for rank, one in said.items() if isinstance(one, RankStatus)}
    working = [rank for rank, one in there.items() if not one.waits]
    reasons = [f"{_ranks(gone, processes)}: process exited unexpectedly (SIGKILL?)"] if gone else []
    if silent:
        reasons.append(
            f"{_ranks(silent, processes)}: no response (process stopped, or node or link down)"
        )
    if not reasons and working:
        reasons = [
            f"rank {rank}: {there[rank].words}, for {there[rank].quiet_s:.0f} s"
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
        together[one.words].append(rank)
    lines = []
    for words, ranks in together.items():
        named = ", ".join(map(str, ranks[:_MOST_RANKS]))
        more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
        quiet_s = max(there[rank].quiet_s for rank in ranks)
        lines.append(f"rank{'s' * (len(ranks) > 1)} {named}{more}: {words}, for {quiet_s:.0f} s")
    shown = lines[: 2 * _MOST_RANKS]
    left = len(lines) - len(shown)
    return [*shown, *([f"and {left} more positions (see the stacks)"] if left else [])]
