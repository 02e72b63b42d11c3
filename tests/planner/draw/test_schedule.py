"""Pictures and traces of timelines: well-formed, complete, and true to the times."""

from __future__ import annotations

import itertools
import json
import math
import re
from xml.etree import ElementTree

import pytest

from megatron_pulse.planner.draw.lanes import Mark, MarkStyle, copied
from megatron_pulse.planner.draw.schedule import Panel, draw_schedule
from megatron_pulse.planner.draw.trace_events import trace_events
from megatron_pulse.planner.layout.placement import (
    Placement,
    fold,
    interleaved,
    sequential,
)
from megatron_pulse.planner.schedule.check.simulate import Timeline, simulate
from megatron_pulse.planner.schedule.classic.catalog import CLASSICS, SPLIT
from megatron_pulse.planner.schedule.operations import BubbleTask, OpType
from megatron_pulse.planner.schedule.passes.insert_offload import with_offload
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from tests.planner.slices import fill

LEFT, RIGHT = 156, 150
"""Pixels beside the bars."""

CASES = {
    "gpipe": fold(4, 2),
    "1f1b": sequential(3),
    "interleaved": interleaved(3, 3),
    "zb-v": fold(2),
    "zb-h1": sequential(4),
    "hanayo": fold(3),
}


def case(name: str, placement: Placement, count: int = 4) -> tuple[ScheduleProblem, Timeline]:
    num = placement.num_stages
    problem = ScheduleProblem(
        placement,
        count,
        tuple(1.0 + 0.1 * s for s in range(num)),
        (1.5,) * num,
        (0.8,) * num if name in SPLIT else None,
        0.3,
    )
    return problem, simulate(problem, CLASSICS[name](placement, count))


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name == element.get("class")]


def said(bar: ElementTree.Element) -> str:
    title = bar.findtext("{*}title")
    assert title is not None
    return title.split(":")[0] + ":" + title.split(":")[1]


@pytest.mark.parametrize("name", CASES)
def test_every_operation_is_drawn_once_at_its_time(name: str) -> None:
    problem, timeline = case(name, CASES[name])
    svg = parse(draw_schedule(problem, timeline, "A <b> & c", lower_bound=5.0, unit="ms"))
    rows = of_class(svg, "device")
    assert len(rows) == problem.placement.num_devices
    scale = (float(svg.get("width", "")) - LEFT - RIGHT) / timeline.makespan
    for row, order in zip(rows, timeline.schedule.order, strict=True):
        bars = of_class(row, "op")
        assert [said(bar) for bar in bars] == [str(op) for op in order]
        edges = [(float(bar.get("x", "")), float(bar.get("width", ""))) for bar in bars]
        for (x, width), (following, _) in zip(edges, edges[1:], strict=False):
            assert x + width <= following + 0.02
        for op, (x, width) in zip(order, edges, strict=True):
            lasts = timeline.end[op] - timeline.start[op]
            assert width == pytest.approx(scale * lasts, abs=0.02)
            assert x - LEFT == pytest.approx(scale * timeline.start[op], abs=0.02)
    texts = ["".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text")]
    assert "A <b> & c" in texts and any(t.startswith("makespan") for t in texts)
    for device, idle in enumerate(timeline.bubble):
        assert f"device {device}" in texts and f"{100 * idle / timeline.makespan:.1f} %" in texts
    assert any("lower bound 5 ms" in text for text in texts)


@pytest.mark.parametrize("name", CASES)
def test_links_go_from_end_to_arrival(name: str) -> None:
    """One mark per message, from its send on, as long as the link time."""
    problem, timeline = case(name, CASES[name])
    svg = parse(draw_schedule(problem, timeline, "t"))
    placement = problem.placement
    hops = sum(
        placement.device_of_stage[s] != placement.device_of_stage[s + 1]
        for s in range(placement.num_stages - 1)
        for m in range(problem.num_microbatches)
    )
    links = of_class(svg, "link")
    assert len(links) == 2 * hops
    scale = float(of_class(svg, "op")[0].get("width", "")) / problem.forward[0]
    for link in links:
        x1, x2 = float(link.get("x1", "")), float(link.get("x2", ""))
        assert x2 - x1 == pytest.approx(0.3 * scale, abs=0.05)
    assert sum(link.get("stroke-dasharray") is not None for link in links) == hops


def test_many_bars_stay_inside_and_carry_no_numbers() -> None:
    problem, timeline = case("hanayo", fold(16), 128)
    svg = parse(draw_schedule(problem, timeline, "large"))
    wide, high = float(svg.get("width", "")), float(svg.get("height", ""))
    assert wide <= 2600 and not of_class(svg, "link")
    bars = of_class(svg, "op")
    assert len(bars) == 2 * 32 * 128
    assert all(float(b.get("x", "")) + float(b.get("width", "")) <= wide for b in bars)
    for row in of_class(svg, "device"):
        moved = re.fullmatch(r"translate\(0 ([\d.]+)\)", row.get("transform", ""))
        assert moved is not None and float(moved[1]) + 20 <= high
        assert not [element for element in row if element.tag.endswith("text")]


def test_looks_differ_without_colour() -> None:
    """Luminance of forward and backward, marks on weight gradients, a stripe for the way up."""
    problem, timeline = case("zb-v", fold(2))
    svg = parse(draw_schedule(problem, timeline, "t"))
    looks = {e.get("id", ""): list(e) for e in svg.iter() if e.tag.endswith("pattern")}
    assert set(looks) == {f"{kind}{chunk}" for kind in "FIW" for chunk in "01"}

    def grey(name: str) -> float:
        colour = looks[name][0].get("fill", "")
        r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.3 * r + 0.59 * g + 0.11 * b

    for chunk in "01":
        assert grey(f"F{chunk}") > grey(f"I{chunk}") + 60
        assert any(e.tag.endswith("path") for e in looks[f"W{chunk}"])
        assert not any(e.tag.endswith("path") for e in looks[f"F{chunk}"])
    for kind in "FIW":
        assert grey(f"{kind}0") > grey(f"{kind}1") + 15
        assert [e.get("height") for e in looks[f"{kind}1"]].count("4") == 1
        assert "4" not in [e.get("height") for e in looks[f"{kind}0"]]


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """Timeline stretched as on a slower machine."""
    return Timeline(
        timeline.schedule,
        {op: factor * t for op, t in timeline.start.items()},
        {op: factor * t for op, t in timeline.end.items()},
        factor * timeline.makespan,
        tuple(factor * t for t in timeline.busy),
        tuple(factor * t for t in timeline.bubble),
    )


def test_two_timelines_share_one_axis() -> None:
    problem, timeline = case("1f1b", sequential(3))
    panels = [Panel("predicted", timeline), Panel("measured", stretched(timeline, 1.5))]
    svg = parse(draw_schedule(problem, panels, "both", unit="ms", scale=1e3))
    rows = of_class(svg, "device")
    assert len(rows) == 6
    first, second = (of_class(row, "op")[-1] for row in (rows[0], rows[3]))
    assert said(first) == said(second)
    ends = [float(bar.get("x", "")) + float(bar.get("width", "")) - LEFT for bar in (first, second)]
    assert ends[1] == pytest.approx(1.5 * ends[0], abs=0.1)
    text = "".join(svg.itertext())
    assert "predicted: makespan" in text and "measured: makespan" in text and "time (ms)" in text


def test_bubble_tasks_are_drawn() -> None:
    problem, _ = case("gpipe", fold(2))
    schedule = CLASSICS["gpipe"](problem.placement, problem.num_microbatches)
    filled = fill(problem, schedule, [BubbleTask("text encoder", (0.4,) * 5)])
    timeline = simulate(problem, filled)
    svg = parse(draw_schedule(problem, timeline, "t"))
    drawn = [said(bar) for bar in of_class(svg, "op") if said(bar).startswith("X")]
    assert sorted(drawn) == [f"X0:{k}" for k in range(5)]
    assert "X0:4: bubble task, text encoder, slice 4" in "".join(svg.itertext())
    names = {e["name"] for e in trace_events(problem, timeline)["traceEvents"] if e["ph"] == "X"}
    assert {f"X0:{k}" for k in range(5)} <= names


def test_copies_to_the_host_and_back_have_a_lane_of_their_own() -> None:
    """One after the other each way, ended when an O or a backward begins; below what is sent."""
    ones = (1.0,) * 4
    problem = ScheduleProblem(
        sequential(4),
        8,
        ones,
        (2.0,) * 4,
        cap=(2.6,) * 4,
        offload_bytes=(0.8,) * 4,
        offload_s=(0.7,) * 4,
    )
    found = with_offload(problem, lambda of, _: synthesize(of, seconds=math.inf, effort=1))
    timeline = simulate(problem, found.schedule)
    marks = copied(problem, timeline)
    ends = {(m.look, m.text.removesuffix(", to the host").removesuffix(", back")): m for m in marks}
    away = [op for op in timeline.end if op.kind is OpType.OFFLOAD]
    assert away and len(marks) == len(ends) == 2 * len(away)
    for op in away:
        text = f"activations of stage {op.stage}, microbatch {op.microbatch}"
        assert ends[MarkStyle.TO_HOST, text].end <= timeline.start[op] + 1e-9
        backward = timeline.start[op._replace(kind=OpType.BACKWARD)]
        assert ends[MarkStyle.BACK, text].end <= backward + 1e-9
    for look in (MarkStyle.TO_HOST, MarkStyle.BACK):
        for device in range(4):
            own = [m for m in marks if (m.look, m.device) == (look, device)]
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(own))
    events = trace_events(problem, timeline)["traceEvents"]
    threads = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and "host" in e["args"]["name"]
    }
    assert len(threads) == len({(m.look, m.device) for m in marks})
    assert sum(e["ph"] == "X" and e["tid"] in threads for e in events) == len(marks)
    alone = of_class(parse(draw_schedule(problem, timeline, "t")), "mark")
    send = tuple(Mark(0, m, m + 0.5, MarkStyle.ACTIVATION, "sent", 1) for m in range(3))
    beside = parse(draw_schedule(problem, [Panel("", timeline, send)], "t"))
    assert len(of_class(beside, "mark")) == len(alone) + 4  # three, and one of the legend
    tops = {m.get("fill"): float(m.get("y", "")) for m in of_class(beside, "mark")[:4]}
    assert len(set(tops.values())) == 2


@pytest.mark.parametrize("name", CASES)
def test_trace_events(name: str) -> None:
    problem, timeline = case(name, CASES[name])
    panels = [Panel("predicted", timeline), Panel("measured", stretched(timeline, 2.0))]
    record = json.loads(json.dumps(trace_events(problem, panels, 10.0)))
    events = record["traceEvents"]
    for process, panel in enumerate(panels, start=1):
        mine = [event for event in events if event["pid"] == process]
        bars = {event["name"]: event for event in mine if event["ph"] == "X"}
        assert len(bars) == sum(event["ph"] == "X" for event in mine) == len(timeline.end)
        for device, order in enumerate(panel.timeline.schedule.order):
            for op in order:
                bar = bars[str(op)]
                assert bar["tid"] == device
                assert bar["ts"] == pytest.approx(10 * panel.timeline.start[op])
                assert bar["ts"] + bar["dur"] == pytest.approx(10 * panel.timeline.end[op])
        begins = {event["id"]: event for event in mine if event["ph"] == "s"}
        ends = {event["id"]: event for event in mine if event["ph"] == "f"}
        assert begins.keys() == ends.keys() and begins
        for id_, begin in begins.items():
            assert begin["ts"] <= ends[id_]["ts"] and begin["tid"] != ends[id_]["tid"]
        counters = [event for event in mine if event["ph"] == "C"]
        frees = sum(op.kind.live != 0 for op in timeline.end)
        assert len(counters) == frees
        assert counters[-1]["args"] == {"stage activations": 0.0}
    flows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(flows)) == len(flows)
    assert {event["ph"] for event in events} == {"X", "M", "s", "f", "C"}
