"""A row of the table of what messages wait for."""

from tests.benchmarks.waiting import look_at


def test_a_fold_waits_for_nothing_and_holds_about_what_is_counted() -> None:
    row = look_at("uvit-h", 4, 100, "fold", is_split=True, seconds=0.2)
    assert 0 <= row.penalty_percent < 1
    assert 0.1 < row.held_percent < 3
    assert all(0.3 < share < 1.5 for share in row.held_of_counted)
