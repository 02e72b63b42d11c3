"""The picture of a partition: well-formed, complete, and at home in any placement."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megatron_pulse.backbone.costs import ChainCosts, SkipCost
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.draw.partition import draw_partition
from megatron_pulse.planner.layout.placement import (
    Partition,
    Placement,
    fold,
    interleaved,
    make_placement,
    sequential,
)
from megatron_pulse.planner.partition.evaluate import evaluate
from megatron_pulse.planner.partition.find import Goal, find_partition

NUM = 24


def costs(zero: bool = False) -> ChainCosts:
    """Mirrored skips, and names that XML must escape."""
    time = tuple(0.0 if zero else 1e-3 * (1 + i % 5) for i in range(NUM))
    return ChainCosts(
        tuple(f"<layer&{i}>" for i in range(NUM)),
        time,
        tuple(2 * t for t in time),
        (10,) * NUM,
        (10,) * NUM,
        (1000,) * NUM,
        tuple(SkipCost(i, NUM - 1 - i, 1000) for i in range(NUM // 2 - 1)),
    )


def picture(chain: ChainCosts, partition: Partition) -> ElementTree.Element:
    found = evaluate(chain, partition, Link(1e-6, 1e9))
    return ElementTree.fromstring(
        draw_partition(chain, partition, found, "A <title>", "more & more")
    )


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name in element.get("class", "").split()]


@pytest.mark.parametrize(
    "placement", [fold(4), fold(2, 2), sequential(5), interleaved(3), make_placement("fold", 1)]
)
def test_every_unit_and_skip_is_drawn(placement: Placement) -> None:
    chain = costs()
    partition = find_partition(chain, placement, Goal())
    svg = picture(chain, partition)
    bars, arcs = of_class(svg, "unit"), of_class(svg, "skip")
    assert len(bars) == NUM and len(arcs) == len(chain.skips)
    homes = [partition.device_of_layer(i) for i in range(NUM)]
    rows = sorted({float(bar.get("y", "")) for bar in bars})
    assert [rows.index(float(bar.get("y", ""))) for bar in bars] == homes
    for bar, name in zip(bars, chain.names, strict=True):
        title = bar.findtext("{*}title")
        assert title is not None and title.startswith(f"{name}: forward ")
    travelling = sum(homes[s.source] != homes[s.destination] for s in chain.skips)
    assert len(of_class(svg, "travels")) == travelling
    assert len(of_class(svg, "home")) == len(chain.skips) - travelling
    texts = [element.text or "" for element in svg.iter() if element.tag.endswith("text")]
    assert "A <title>" in texts and "more & more" in texts
    for device in range(placement.num_devices):
        assert f"device {device}" in texts
    for stage in range(placement.num_stages):
        assert any(re.match(rf"stage {stage}\b", text) for text in texts)


def test_bars_follow_each_other_and_are_as_wide_as_their_time() -> None:
    chain = costs()
    bars = of_class(picture(chain, find_partition(chain, fold(3))), "unit")
    left = [float(bar.get("x", "")) for bar in bars]
    width = [float(bar.get("width", "")) for bar in bars]
    for i in range(NUM - 1):
        assert left[i] + width[i] == pytest.approx(left[i + 1], abs=0.02)
    assert width[4] - 1 == pytest.approx(5 * (width[0] - 1), rel=0.01)


def test_a_fold_that_keeps_skips_has_none_that_travel() -> None:
    chain = costs()
    svg = picture(chain, find_partition(chain, fold(4), Goal(collocate=True)))
    assert not of_class(svg, "travels")


def test_units_without_time_are_seen() -> None:
    chain = costs(zero=True)
    bars = of_class(picture(chain, Partition(sequential(2), (0, 3, NUM))), "unit")
    assert all(float(bar.get("width", "")) >= 1 for bar in bars)


def test_many_units_and_devices_stay_inside_the_picture() -> None:
    names = tuple(f"a_rather_long_name_of_a_layer.{i}" for i in range(200))
    ones = (1.0,) * 200
    none = (0,) * 200
    chain = ChainCosts(names, ones, ones, none, none, none)
    svg = picture(chain, find_partition(chain, fold(16)))
    wide, high = float(svg.get("width", "")), float(svg.get("height", ""))
    for element in svg.iter():
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x and x + float(element.get("width", 0)) <= wide
        assert 0 <= y and y + float(element.get("height", 0)) <= high
