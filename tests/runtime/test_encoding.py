"""Frozen components in idle time and in front: the same bits, wherever their layers run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.encoders.encoder_piece import EncoderPiece, States, run_pieces
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.filled_schedule import filled_schedule
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.bubble_fill.search import fill
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.schedule.operations import OpType, Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem
from megatron_pulse.runtime.encoding.encoding import Encoded, FrozenComponent
from megatron_pulse.runtime.failure_board import PulseError
from megatron_pulse.runtime.tensor_settings import Batch
from tests.ranks import run_ranks
from tests.runtime.equality import Case, join_pipeline, make_batches, make_pipeline, plan_of
from tests.toys import nested, toy_backbone

NUM_LAYERS = {"text": 5, "image": 3}
RESULTS = {"text": ("last", "pooled"), "image": ("moments",)}


def pieces(name: str) -> tuple[EncoderPiece, ...]:
    """Layers that keep what they are given (text: ids), change dtypes, and leave several states."""
    torch.manual_seed(len(name))
    layers = [nn.Linear(6, 6).requires_grad_(False) for _ in range(NUM_LAYERS[name])]

    def layer(i: int) -> EncoderPiece:
        def run(states: States) -> States:
            if name == "image":
                hidden = torch.tanh(layers[i](states.get("hidden", states.get("pixels"))))
                return {"moments" if i == NUM_LAYERS[name] - 1 else "hidden": hidden}
            hidden = states.get("hidden", nn.functional.one_hot(states["ids"], 6).float())
            hidden = torch.tanh(layers[i](hidden)) + states["ids"][..., None]
            made = {"hidden": hidden, "odd": hidden.sum(-1) > 0}
            if i == NUM_LAYERS[name] - 1:
                made |= {"last": hidden, "pooled": (hidden * states["odd"][..., None]).mean(1)}
            return states | made

        return EncoderPiece(f"{i}", run, (layers[i],))

    return tuple(map(layer, range(NUM_LAYERS[name])))


def given(name: str, batch: Batch, row: int) -> States:
    key = {"text": "ids", "image": "pixels"}[name]
    return {key: batch[key][row : row + 1]}


def components(number: int, homes: dict[str, tuple[int, ...]]) -> list[FrozenComponent]:
    return [
        FrozenComponent(
            name,
            lambda batch, row, name=name: given(name, batch, row),
            RESULTS[name],
            where,
            pieces(name) if number in where else None,
        )
        for name, where in homes.items()
    ]


def raw(case: Case, step: int) -> list[dict[str, Tensor]]:
    """Input of a step that encodes; pictures of every second microbatch are larger."""
    generator = torch.Generator().manual_seed(step)
    size = case.micro_batch_size
    return [
        {
            "index": torch.arange(size),
            "ids": torch.randint(0, 6, (size, 3), generator=generator),
            "pixels": torch.randn(size, 1 + number % 2, 6, generator=generator),
            "noisy": torch.empty(size, 1 + number % 2, device="meta"),
        }
        for number in range(case.num_microbatches)
    ]


def wanted(case: Case, step: int) -> list[Encoded]:
    """The results of whole components, on one sample at a time."""
    found = []
    for batch in raw(case, step):
        made: Encoded = {}
        for name in NUM_LAYERS:
            rows = [
                run_pieces(pieces(name), given(name, batch, row))
                for row in range(case.micro_batch_size)
            ]
            made[name] = {key: torch.cat([row[key] for row in rows]) for key in RESULTS[name]}
        found.append(made)
    return found


def filled(case: Case, num_devices: int, seed: int) -> Schedule:
    """A random filling of the case's schedule, in which components go on on other devices."""
    rng = random.Random(seed)
    schedule = plan_of(toy_backbone(9, nested(9, 4)), case, num_devices)
    step = schedule.step(case.num_microbatches).schedule
    num = step.placement.num_stages
    split = (1.0,) * num if OpType.WEIGHT_GRAD in step.kinds else None
    problem = ScheduleProblem(
        step.placement, case.num_microbatches, (1.0,) * num, (2.0,) * num, split
    )
    times = {name: rng.choice((0.2, 0.7, 1.5)) for name in NUM_LAYERS}
    made = tuple(
        Component(
            name,
            tuple(FrozenLayer(f"{i}", {1: times[name]}) for i in range(count)),
            result_bytes=1.0,
            consumers=tuple(range(num_devices)) if name == "text" else (0,),
        )
        for name, count in NUM_LAYERS.items()
    )
    samples = case.num_microbatches * case.micro_batch_size
    found = fill(FillProblem(problem, step, made, samples, None, Link()), 0.2)
    return filled_schedule(FillProblem(problem, step, made, samples), found.filled)


@dataclass
class Seen:
    """Record of one device: results before steps and in bubbles, and bytes sent."""

    front: list[list[Encoded]]
    filled: list[list[Encoded]]
    encoded_bytes: int
    moved: int


def encode(case: Case, schedule: Schedule) -> Seen:
    config, group = join_pipeline()
    backbone = toy_backbone(9, nested(9, 4))
    pipeline = make_pipeline(backbone, replace(case, schedule=schedule), config, group)
    homes = {f.name: tuple(f.devices or ()) for f in schedule.bubble_tasks}
    encoding = pipeline.encode_with(components(pipeline.rank, homes))
    seen = Seen([], [], 0, 0)
    for step in range(case.steps):
        seen.front.append(encoding.front(raw(case, step)))
        encoding.fill(schedule, raw(case, step))
        pipeline.step(make_batches(backbone, case, step))
        seen.filled.append(encoding.filled())
    where = {op: d for d, line in enumerate(schedule.order) for op in line}
    seen.moved = sum(
        where[source] != d for op, d in where.items() for source, _ in schedule.slices_before(op)
    )
    seen.encoded_bytes = pipeline.links.traffic.encoded_bytes if pipeline.links else 0
    if group is not None:
        dist.barrier()
    return seen


def same(found: list[Encoded], expected: list[Encoded], names: set[str]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert {*ours} == names
        for name in names:
            for key in RESULTS[name]:
                assert torch.equal(ours[name][key], theirs[name][key]), (name, key)


@pytest.mark.parametrize(
    ("num_devices", "case"),
    [
        (1, Case("fold", 4, "auto", steps=2)),
        (2, Case("fold", 4, "wave", steps=2)),
        (2, Case("sequential", 4, "zb-h1", steps=2)),
        (4, Case("fold", 5, "wave", steps=2)),
    ],
    ids=["one", "fold", "split", "four"],
)
def test_filled_and_in_front_are_the_same(num_devices: int, case: Case) -> None:
    schedule = filled(case, num_devices, num_devices)
    ranks = run_ranks(num_devices, encode, case, schedule)
    for rank, seen in enumerate(ranks):
        consumers = {f.name for f in schedule.bubble_tasks if rank in f.consumers}
        for step in range(case.steps):
            same(seen.front[step], wanted(case, step), {*NUM_LAYERS})
            same(seen.filled[step], wanted(case, step), consumers)
    if num_devices > 1:
        assert sum(seen.encoded_bytes for seen in ranks) > 0
        assert ranks[0].moved, "no component went on on another device"


def test_encoding_refuses_bubble_tasks_of_other_components() -> None:
    from megatron_pulse.runtime.encoding.encoding import Encoding

    case = Case("fold", 4, "wave")
    schedule = filled(case, 2, 2)
    text = replace(
        schedule.bubble_tasks[0], slices=tuple((0, 9, 0, 7) for _ in schedule.bubble_tasks[0].deps)
    )
    other = replace(schedule.bubble_tasks[1], name="vae")
    encoding = Encoding(components(0, {"text": (0, 1)}), torch.device("cpu"))
    with pytest.raises(PulseError) as said:
        encoding.fill(replace(schedule, bubble_tasks=(text, other)), raw(case, 0))
    assert "text has 5 layers, the plan's has 9" in str(said.value)
    assert "text encodes 7 samples; a step of each pipeline has 8" in str(said.value)
    assert "'vae'" in str(said.value)
