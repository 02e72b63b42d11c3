"""The set-ups of the paper: every way is found, on a chain that is small."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.benchmarks.paper import ONE_F_ONE_B, WAYS, tuned
from tests.planner.tune.problems import cluster, profile


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_an_answer(way: str) -> None:
    chain = profile(random.Random(0), 12, 4, megabytes=1.0, parameters=1_000_000)
    chain = replace(chain, backbone={**chain.backbone, "family": "uvit"})
    found = tuned(way, chain, cluster(1, 4, memory_gb=6.0), 16, 0.5)
    assert found is not None
    best = found.outcomes[0]
    if way == ONE_F_ONE_B:  # each skip crosses every boundary between its ends
        cuts = best.stages.partition.cuts[1:-1]
        crossing = [sum(s.source < cut <= s.destination for s in chain.skips) for cut in cuts]
        assert [len(best.stages.edges), max(crossing)] == [len(cuts), 4]
        one, *_ = best.stages.edges
        link = cluster(1, 4).intra_node
        assert one.seconds > (1 + crossing[0]) * 1e6 * best.config.micro_batch_size / (
            1e9 * link.bandwidth_gbs
        )
