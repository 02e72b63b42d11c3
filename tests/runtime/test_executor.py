"""The executor against the one-process run, on real processes: bit for bit."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.planner.layout.placement import fold
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.runtime.pipeline import Pipeline
from tests.ranks import RanksFailed, run_ranks
from tests.runtime.equality import (
    Case,
    Outcome,
    differences,
    make_batches,
    make_pipeline,
    mean_squared_error,
    merge,
    references,
    train,
)
from tests.solved import integer_programmed
from tests.toys import SIDE, TOKENS, ToyLayer, nested, toy_backbone

CHAIN = {
    "nested": lambda: toy_backbone(9, nested(9, 4)),
    "uneven": lambda: toy_backbone(11, [(0, 10), (1, 8), (3, 7)]),
    "crossing": lambda: toy_backbone(9, [(0, 5), (1, 8), (2, 6)]),
    "conditioned": lambda: toy_backbone(9, nested(9, 4), conditioned=(1, 3, 4, 7, 8)),
    "no skips": lambda: toy_backbone(8, []),
}


def _config() -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def run_cases(cases: list[tuple[str, Case]]) -> list[Outcome]:
    """Several cases in one group of ranks: starting processes is what takes time."""
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    outcomes = [train(CHAIN[chain](), case, _config(), group) for chain, case in cases]
    dist.barrier()
    return outcomes


def _all_cases(num_devices: int) -> list[tuple[str, Case]]:
    """Every chain under every placement, with fewer and more microbatches than devices; without
    skips, more only.

    One chain also runs with as many microbatches as devices, under GPipe, and with a second step
    after the first.
    """
    cases: list[tuple[str, Case]] = []
    fewer, more = num_devices - 1, num_devices + 1
    for chain in CHAIN:
        # Sums of conditioning are in fp64 and rounded once, which shows in fp32.
        dtype = "float32" if chain == "conditioned" else "float64"
        named = [("fold", "wave"), ("sequential", "1f1b"), ("interleaved", "interleaved")]
        if chain == "crossing":
            del named[0]  # crossing skips cannot all be at home
        first = chain == "nested"
        for placement, schedule in [*named, *[("fold", "gpipe"), ("sequential", "gpipe")] * first]:
            others = schedule == "gpipe" or chain == "no skips"
            for m in (more,) if others else (fewer, *(num_devices,) * first, more):
                cases.append((chain, Case(placement, m, schedule, steps=1 + first, dtype=dtype)))
    for split in (False, True):
        schedule = integer_programmed(num_devices, 4, split)
        cases.append(("nested", Case("fold", 4, schedule, steps=2)))
    return cases


@pytest.mark.parametrize("num_devices", [2, 4])
def test_every_placement_equals_one_process(num_devices: int) -> None:
    cases = _all_cases(num_devices)
    expected = references(run_cases, [(chain, case.alone) for chain, case in cases])
    ranks = run_ranks(num_devices, run_cases, cases)
    for i, (chain, case) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        name = f"{chain} {case}"
        assert got.losses == expected[i].losses, name
        different = differences(got.parameters, expected[i].parameters)
        assert not different, f"{name}: {different}"


def run_counted(cases: list[tuple[str, Case]]) -> tuple[list[Outcome], list[int]]:
    """The outcomes, and how often layers were called in each."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    outcomes, calls = [], []
    for chain, case in cases:
        before = ToyLayer.num_calls
        outcomes.append(train(CHAIN[chain](), case, _config(), dist.group.WORLD))
        calls.append(ToyLayer.num_calls - before)
    return outcomes, calls


def test_recomputation_changes_nothing() -> None:
    cases = [("conditioned", Case("fold", 4, recompute=r, dtype="float32")) for r in (0, 1, 2)]
    for (kept, *others), (once, twice, between) in run_ranks(2, run_counted, cases):
        assert twice == 2 * once > between > once > 0
        for recomputed in others:
            assert kept.losses == recomputed.losses
            assert not differences(kept.parameters, recomputed.parameters)


def test_bytes_are_the_formula() -> None:
    """Fold: 2(P-1) boundaries and no skip; sequential: P-1 boundaries and every skip once."""
    m, steps, b = 3, 2, 2
    boundary = (TOKENS.numel_per_sample + SIDE.numel_per_sample) * b * 8
    skip = TOKENS.numel_per_sample * b * 8
    for num_devices in (2, 4):
        cases = [
            ("nested", Case("fold", m, steps=steps)),
            ("nested", Case("sequential", m, steps=steps)),
        ]
        ranks = run_ranks(num_devices, run_cases, cases)
        fold, sequential = (merge([r[i] for r in ranks]) for i in range(2))
        assert fold.forward_bytes == 2 * (num_devices - 1) * boundary * m * steps
        assert fold.gradient_bytes == fold.forward_bytes
        assert fold.skip_bytes == 0
        crossing = _direct_skips(num_devices)
        assert crossing > 0
        expected = ((num_devices - 1) * boundary + crossing * skip) * m * steps
        assert sequential.forward_bytes == expected
        assert sequential.skip_bytes == 2 * crossing * skip * m * steps


def _direct_skips(num_devices: int) -> int:
    from megatron_pulse.planner.layout.crossing import SkipCarrier
    from megatron_pulse.planner.layout.placement import sequential
    from megatron_pulse.planner.program.make_plan import make_plan

    backbone = CHAIN["nested"]()
    plan = make_plan(
        backbone, weighted_costs(backbone, [1.0] * len(backbone.layers)), sequential(num_devices)
    )
    return sum(route.carrier is SkipCarrier.DIRECT for route in plan.routes.skips)


def run_failing() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    backbone = toy_backbone(9, nested(9, 4), failing=6)
    train(backbone, Case("fold", 4), _config(), dist.group.WORLD)


def test_an_exception_in_a_stage_reaches_every_rank() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(4, run_failing)
    # None had to be killed for waiting too long.
    assert all(code == 1 for code in failure.value.exit_codes)
    for output in failure.value.outputs:
        assert "this layer fails on purpose" in output, output


def run_dying(victim: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    backbone = toy_backbone(9, nested(9, 4))
    case = Case("fold", 4, steps=1)
    pipeline = make_pipeline(backbone, case, _config(), dist.group.WORLD)
    pipeline.step(make_batches(backbone, case, 0))
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    pipeline.step(make_batches(backbone, case, 1))


def test_a_rank_that_dies_is_named_by_all_others() -> None:
    victim = 2
    with pytest.raises(RanksFailed) as failure:
        run_ranks(4, run_dying, victim)
    assert failure.value.exit_codes == [1, 1, -signal.SIGKILL, 1]
    for rank, output in enumerate(failure.value.outputs):
        if rank != victim:
            assert f"rank {victim} closed the connection" in output, (rank, output)


def run_silent(victim: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    backbone = toy_backbone(9, nested(9, 4))
    case = Case("fold", 4, steps=1)
    pipeline = make_pipeline(backbone, case, _config(), dist.group.WORLD, timeout_s=3.0)
    pipeline.step(make_batches(backbone, case, 0))
    if dist.get_rank() == victim:
        time.sleep(8)
        return
    pipeline.step(make_batches(backbone, case, 1))


def test_a_silent_rank_is_a_timeout_that_names_it() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, run_silent, 1)
    output = failure.value.outputs[0]
    assert "no response within 3 s" in output
    assert "pipeline device 1 (rank 1)" in output
    assert "stage" in output and "microbatch" in output


# Cuts of folds that leave some skips on two devices, which then travel directly.
SOFT = {
    "nested": {2: (0, 2, 4, 8, 10), 4: (0, 1, 3, 4, 5, 6, 7, 9, 10)},
    "crossing": {2: (0, 3, 5, 6, 10), 4: (0, 1, 2, 3, 4, 6, 7, 8, 10)},
    "conditioned": {2: (0, 2, 3, 9, 10), 4: (0, 2, 3, 4, 5, 6, 7, 8, 10)},
}


@pytest.mark.parametrize("num_devices", [2, 4])
def test_skips_that_travel_under_a_fold_equal_one_process(num_devices: int) -> None:
    cases = [
        (name, Case("fold", m, "wave", dtype="float32", steps=1, cuts=cuts[num_devices]))
        for name, cuts in SOFT.items()
        for m in (num_devices - 1, num_devices, num_devices + 1)
    ]
    expected = references(run_cases, [(chain, case.alone) for chain, case in cases])
    ranks = run_ranks(num_devices, run_cases, cases)
    for i, (name, case) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.skip_bytes > 0, name
        assert got.losses == expected[i].losses, f"{name} {case}"
        different = differences(got.parameters, expected[i].parameters)
        assert not different, f"{name} {case}: {different}"


def test_a_field_that_several_stages_read_is_copied_once() -> None:
    """To a device, and for each microbatch: the fields here are read by both of its stages."""
    made = [
        Layer(f"layer.{i}", lambda context: _Reader(), (PAIR,), (PAIR,), uses=("shift", "scale"))
        for i in range(2)
    ]
    fields = {"shift": PAIR, "scale": PAIR}
    backbone = Backbone("readers", tuple(made), fields)
    plan = make_plan(backbone, weighted_costs(backbone, [1.0, 1.0]), fold(1))
    pipeline = Pipeline(plan, mean_squared_error, 2)
    executor = pipeline.executor(3)
    copied: list[TensorSpec] = []
    cast = executor._cast
    executor._cast = lambda tensor, spec: (copied.append(spec), cast(tensor, spec))[1]  # type: ignore[method-assign]
    pipeline.step(make_batches(backbone, Case("fold", 3, dtype="float32"), 0))
    assert len(copied) == 3 * (1 + len(fields))


PAIR = TensorSpec((2,))


class _Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(
        self, inputs: tuple[torch.Tensor], skips: Any, given: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor]:
        return (inputs[0] * self.weight * given["scale"] + given["shift"],)
