"""A sample of disturbed runs; ``python -m tests.chaos`` makes as many as one has time for."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from tests.chaos.__main__ import figures
from tests.chaos.faults import FILES, KINDS, SIGNALS
from tests.chaos.runs import Undisturbed
from tests.chaos.trial import Outcome, Trial, draw_trial, run_trial

SEED = 11


def test_trials_depend_on_seed_number_and_kinds_alone() -> None:
    drawn = [draw_trial(SEED, number, KINDS) for number in range(5 * len(KINDS))]
    assert drawn == [draw_trial(SEED, number, KINDS) for number in range(5 * len(KINDS))]
    assert {trial.kind for trial in drawn} == set(KINDS)
    assert all(trial.rank < trial.layout.num_ranks for trial in drawn)
    assert {trial.moment for trial in drawn if trial.kind in SIGNALS} >= {"starting", "a step"}
    assert all(trial.other.data == trial.layout.data for trial in drawn)
    assert drawn != [draw_trial(SEED + 1, number, KINDS) for number in range(5 * len(KINDS))]


def small(kind: str) -> Trial:
    """The first trial of that kind with two ranks, in steps."""
    drawn = (draw_trial(SEED, number, (kind,)) for number in count())
    return next(
        trial
        for trial in drawn
        if trial.layout.num_ranks == 2 >= trial.other.num_ranks
        and trial.moment == "a step"
        and not (trial.kind in FILES and trial.step < 5)
    )


def test_a_disturbed_run_goes_on(tmp_path: Path) -> None:
    """Killed, its newest checkpoint damaged, it ends with the numbers of one process."""
    outcome = run_trial(SEED, small("bits flipped"), Undisturbed(tmp_path), tmp_path / "trial")
    assert not outcome.faults, outcome
    assert outcome.orphans == 0


def test_what_is_counted() -> None:
    outcomes = [
        Outcome(0, "killed", "a", 2.0, happened=True, named=True),
        Outcome(1, "killed", "b", 3.5, happened=True, named=False, faults=["rank 1 was not named"]),
        Outcome(2, "clock steps", "c", 9.0, happened=True),
        Outcome(3, "killed", "d", 99.0),
    ]
    assert figures(outcomes)[2:] == [
        "| clock steps | 1 | 1 | 1 | - | 9.0 | 0 |",
        "| killed | 3 | 2 | 2 | 1 of 2 | 3.5 | 0 |",
        "| all | 4 | 3 | 3 | 1 of 2 | 9.0 | 0 |",
    ]
