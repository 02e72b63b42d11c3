"""``python -m tests.benchmarks.frozen`` at a size that takes no time; its times are not asked."""

from __future__ import annotations

from megatron_pulse.profile.measurement.clock import RepetitionLimits
from tests.benchmarks.frozen import TRAINED, compare


def test_what_is_frozen_is_neither_kept_nor_counted() -> None:
    rows = {row.trained: row for row in compare(8, 1, RepetitionLimits(limit_s=0.01))}
    assert rows.keys() == TRAINED.keys()
    every, half, biases = (rows[name] for name in TRAINED)
    assert half.parameters == every.parameters // 2 and 0 < biases.parameters < half.parameters
    assert half.saved_bytes < 0.6 * every.saved_bytes
    assert biases.saved_bytes < every.saved_bytes
    assert all(row.predicted_s > 0 and row.measured_s > 0 for row in rows.values())
