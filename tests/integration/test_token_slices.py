"""Slices of tokens in whole runs: whole layers' numbers, alike in every layout, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from tests.integration.runs import BASE, STEPS, TINY, Run, alone, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

SLICED = ["--pulse-token-slices", "3"]


def _assert_close(got: Run, expected: Run) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert got.validation == pytest.approx(expected.validation, rel=1e-4)


@pytest.mark.parametrize(
    ("backbone", "flags"),
    [
        ("tokens", ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"]),
        ("uvit", ["--pulse-schedule", "zb-v", "--pulse-recompute", "in_blocks.*"]),
    ],
)
def test_a_pipeline_with_slices_trains_as_whole_layers(backbone: str, flags: list[str]) -> None:
    sliced = run(1, *STEPS, *SLICED, backbone=backbone)
    _assert_close(sliced, alone(*STEPS, backbone=backbone))
    assert_same(run(2, *STEPS, *SLICED, *pipeline(2, *flags), backbone=backbone), sliced)


def test_tensor_and_sequence_parallel_ranks_slice_their_own_tokens() -> None:
    ranks = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    _assert_close(run(2, *STEPS, *ranks, *SLICED), alone(*STEPS))


@pytest.mark.parametrize("backbone", ["tokens", "uvit"])
@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "full"]])
def test_ranks_that_share_tokens_slice_their_own(backbone: str, recompute: list[str]) -> None:
    ranks = ["--context-parallel-size", "2", *recompute]
    sliced = run(2, *STEPS, *SLICED, *ranks, backbone=backbone)
    _assert_close(sliced, alone(*STEPS, backbone=backbone))
    if not recompute:
        assert_same(run(4, *STEPS, *SLICED, *pipeline(2, *ranks), backbone=backbone), sliced)


def test_bf16_trains_alike_with_reductions_in_fp32() -> None:
    whole, sliced = (run(2, *STEPS, "--bf16", *more) for more in ([], SLICED))
    assert sliced.losses == pytest.approx(whole.losses, rel=2e-3)


@pytest.mark.parametrize("backbone", ["tokens", "uvit"])
def test_a_repeated_layer_has_the_same_slices(backbone: str) -> None:
    check = ["--pulse-sdc-check-interval", "1"]
    found = run(2, *STEPS, *SLICED, *pipeline(2, *check), backbone=backbone)
    assert found.losses == run(1, *STEPS, *SLICED, backbone=backbone).losses


@pytest.mark.parametrize("backbone", ["tokens", "uvit"])
@pytest.mark.parametrize("recompute", [[], ["--recompute-granularity", "full"]])
def test_sharded_weights_are_gathered_for_slices(backbone: str, recompute: list[str]) -> None:
    sharded = ["--use-torch-fsdp2", *recompute]
    sliced = run(2, *STEPS, "--bf16", *sharded, *SLICED, backbone=backbone)
    whole = alone(*STEPS, "--bf16", backbone=backbone)
    assert sliced.losses == pytest.approx(whole.losses, rel=2e-3)
    assert sliced.grad_norms == pytest.approx(whole.grad_norms, rel=2e-2)


def test_a_tuned_run_has_the_slices_asked_for(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    auto = ["--pulse-auto", "--pulse-memory-gb", "1", *SLICED, *save]
    _assert_close(run(1, *STEPS, *auto), alone(*STEPS))
    assert load_checked(tmp_path / "plan.json").token_slices == 3


LORA = ["--pulse-adapter", "lora", "--pulse-adapter-dropout", "0.1"]
REFUSED: dict[str, tuple[str, int, list[str], str]] = {
    "UNets": ("unet", 1, [], "--pulse-token-slices 3: unet-tiny has no layer that can be sliced"),
    "dropout": ("uvit", 1, LORA, "draws a mask for whole sequences in hand-written layers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, num_ranks, flags, said = REFUSED[what]
    (fault,) = refuse(monkeypatch, num_ranks, [*SLICED, *flags], [*TINY[backbone], *BASE, *STEPS])
    assert said in fault and fault.count("--pulse-token-slices") == 1
