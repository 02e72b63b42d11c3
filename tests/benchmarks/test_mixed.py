"""Plans for two unlike cards beside plans that take them as alike."""

from __future__ import annotations

import random

from tests.benchmarks.mixed import row
from tests.planner.tune.problems import profile
from tests.planner.tune.unlike import slower


def test_all_that_fit_are_beside_each_other() -> None:
    chain = profile(random.Random(0), 12, 0, parameters=60_000_000)
    own = {"large": chain, "small": slower(chain, random.Random(1), (1.5, 2.0))}
    found = row("chain", own, 8, 0.5)
    others = [found[name] for name in ("two small", "its plan here", "by parameters")]
    assert all(others) and found["large alone"] is not None
    fastest = max(*others[1:], found["large alone"])
    assert found["x fastest other"] == found["ours"] / fastest
    assert found["ours"] > others[0] and others[1] >= others[0]
    assert len(found["GB"].split(", ")) == len(found["layers on each"].split(", "))
