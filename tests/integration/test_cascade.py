"""Cascades in Megatron's own training loop: each chain as in a run of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_pulse.data.data_record import recorded_data
from megatron_pulse.integration.checkpoint.folders import CheckpointError
from tests.integration.runs import STEPS, TINY, Run, alone, pipeline, run
from tests.ranks import RanksFailed, run_ranks, said_once

CHAINS = {"base": "uvit", "upper": "unet"}


def options(chain: str, backbone: str) -> list[str]:
    """The options of a chain's backbone, by its name."""
    flags = TINY[backbone]
    return [f"{chain}.{flag}" if "=" in flag else flag for flag in flags[2:]]


NAMED = ",".join(f"{chain}={TINY[backbone][1]}" for chain, backbone in CHAINS.items())
CASCADE = [
    "--pulse-backbone", f"cascade:{NAMED}",
    *(flag for chain, backbone in CHAINS.items() for flag in options(chain, backbone)),
    "--pulse-data", "base=digits8,upper=digits8",
]  # fmt: skip


def require_each(got: Run, alone_of: Mapping[str, Run]) -> None:
    """Losses, validation, weights, masters and averages of every chain; the first one's norms."""
    for chain, expected in alone_of.items():
        assert [found[chain] for found in got.losses] == expected.losses
        assert [found[chain] for found in got.validation] == expected.validation
        for kind in ("weights", "main_params", "averages"):
            mine = getattr(got, kind)
            for name, value in getattr(expected, kind).items():
                assert torch.equal(mine[f"{chain}.{name}"], value), (chain, kind, name)
    assert got.grad_norms == next(iter(alone_of.values())).grad_norms


def test_each_chain_trains_as_it_does_alone() -> None:
    got = run(2, *CASCADE, *STEPS, *pipeline(2), backbone="none")
    assert got.executed.placement == "opposite"
    require_each(got, {chain: alone(*STEPS, backbone=name) for chain, name in CHAINS.items()})


def _chains_of(folder: str) -> dict[str, torch.Tensor]:
    """Masters of a checkpoint's chains, each read as a model of its own."""
    from megatron_pulse.integration.checkpoint.published_weights import load_whole, weights_of
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    found = {}
    for chain in CHAINS:
        saved = read_saved_run(folder).of_chain(chain)
        assert saved.arguments.pulse_data == "digits8"
        ((one,),) = recorded_data(saved.arguments).values()
        assert (one.num_train, one.num_validation) == (1617, 180)
        _, stage = load_whole(saved, averaged=False)
        found |= {f"{chain}.{name}": value for name, value in weights_of(stage).items()}
    with pytest.raises(
        CheckpointError, match=r"a cascade. Name one of its chains: --chain \(base, upper\)"
    ):
        read_saved_run(folder).of_chain(None)
    with pytest.raises(CheckpointError, match="has no chain 'other': base, upper"):
        read_saved_run(folder).of_chain("other")
    return found


def test_a_cascade_goes_on_elsewhere_and_its_chains_are_models(tmp_path: Path) -> None:
    """In bf16, over two devices and then four, where the optimizer's state is shared out."""
    flags = ["--bf16", "--save", str(tmp_path), "--use-distributed-optimizer"]
    shared = [*CASCADE, *STEPS, *flags]
    run(2, *shared, *pipeline(2), "--exit-interval", "1", backbone="none")
    got = run(4, *shared, "--load", str(tmp_path), *pipeline(4), backbone="none")
    expected = {chain: alone(*STEPS, "--bf16", backbone=name) for chain, name in CHAINS.items()}
    assert [got.losses[-1][chain] for chain in CHAINS] == [
        one.losses[-1] for one in expected.values()
    ]
    (saved,) = run_ranks(1, _chains_of, str(tmp_path))
    for chain, one in expected.items():
        for name, value in one.main_params.items():
            assert torch.equal(got.main_params[f"{chain}.{name}"], value), (chain, name)
            assert torch.equal(saved[f"{chain}.{name}"], value), (chain, name)


def test_what_a_cascade_cannot_be_is_told_at_once() -> None:
    flags = [*CASCADE, *STEPS, "--pulse-data", "base=digits8", "--pulse-option", "depth=2"]
    with pytest.raises(RanksFailed) as failed:
        run(1, *flags, "--pulse-self-conditioning", "0.5", backbone="none")
    said = failed.value.outputs[0]
    for part in (
        "--pulse-self-conditioning does not apply to a cascade",
        "Give --pipeline-model-parallel-size 2 or more",
        "options must begin with a chain name, e.g. base.depth; faulty: depth",
    ):
        assert part in said, said
    with pytest.raises(RanksFailed) as failed:
        run(2, *CASCADE, *STEPS, *pipeline(2), "--pulse-data", "base=digits8", backbone="none")
    assert said_once(failed.value, "--pulse-data base=digits8: no data for upper")
