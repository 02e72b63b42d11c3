"""What is wrong when nothing moves, by what all ranks say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_pulse.runtime.watch.asking import NoAnswer

_MOST_RANKS = 8
"""As many ranks are listed one by one; of others how many there are."""
_STILL = 0.9
"""Part of the limit for which a rank has not moved if it is to count as standing still."""


@dataclass(frozen=True)
class Said:
    """What a rank says of itself: where it is, for how long it has not moved, and whether it waits
    for others there."""

    words: str
    quiet_s: float
    waits: bool


@dataclass(frozen=True)
class Verdict:
    """The first failure of a job in one line, and who is where."""

    reason: str
    places: tuple[str, ...]


def moving_for(said: Mapping[int, Said | NoAnswer], limit_s: float) -> float | None:
    """Seconds until the ranks that still move can be judged; None if none moves, or if some rank
    does not answer."""
    if any(isinstance(one, NoAnswer) for one in said.values()):
        return None
    quiet = [one.quiet_s for one in said.values() if isinstance(one, Said)]
    return None if min(quiet) >= _STILL * limit_s else limit_s - min(quiet)


def judge(
    said: Mapping[int, Said | NoAnswer], processes: Mapping[int, str], limit_s: float
) -> Verdict:
    """Who keeps the others waiting, of ranks of which none moves::

        some do not answer      they
        else, some do not wait  they: in an operation, or in code of their own
        else                    nobody: all wait for each other

    ``processes`` says of each rank which process it is, and where.
    """
    gone = [rank for rank, one in said.items() if one is NoAnswer.GONE]
    silent = [rank for rank, one in said.items() if one is NoAnswer.SILENT]
    there = {rank: one for rank, one in said.items() if isinstance(one, Said)}
    working = [rank for rank, one in there.items() if not one.waits]
    reasons = [f"{_ranks(gone, processes)}: ended without a word (killed?)"] if gone else []
    if silent:
        reasons.append(
            f"{_ranks(silent, processes)}: no answer (stopped, or its node or the link to it is "
            "down)"
        )
    if not reasons and working:
        reasons = [
            f"rank {rank}: {there[rank].words}, for {there[rank].quiet_s:.0f} s"
            for rank in working[:_MOST_RANKS]
        ]
    if not reasons:
        reasons = ["all ranks wait for each other"]
    reason = f"nothing has moved for {limit_s:g} s (--pulse-timeout-s); {'; '.join(reasons)}"
    return Verdict(reason, tuple(_places(there)))


def _ranks(ranks: list[int], processes: Mapping[int, str]) -> str:
    listed = ", ".join(f"{rank} ({processes.get(rank, '?')})" for rank in ranks[:_MOST_RANKS])
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {listed}{more}"


def _places(there: Mapping[int, Said]) -> list[str]:
    """Where ranks are, a line for each place; of many at one place the first."""
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
    return [*shown, *([f"and {left} more places (see the stacks)"] if left else [])]
