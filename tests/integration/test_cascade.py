"""Cascades in Megatron's own training loop: each chain as in a run of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import diffusers
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.data_record import recorded_data
from megatron_pulse.integration.checkpoint.folders import CheckpointError, checkpoint_folder
from megatron_pulse.recipe.examples import example_text
from tests.integration.clips import write_clips
from tests.integration.runs import STEPS, TINY, Run, alone, pipeline, run
from tests.ranks import RanksFailed, run_ranks, said_once

LORA = "pytorch_lora_weights.safetensors"
RANGES = {"high": "--pulse-min-time", "low": "--pulse-max-time"}
CLIPS = {"frames": 2, "height": 4, "width": 4, "text_length": 6}
EXPERT = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12,
    "text_dim": 8, "freq_dim": 16, "ffn_dim": 24, "num_layers": 1, "rope_max_seq_len": 16,
}  # fmt: skip
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
    odd = ["--pulse-option", "upper.sample_size=7", "--pulse-num-chunks", "2"]
    with pytest.raises(RanksFailed) as failed:
        run(2, *CASCADE, *STEPS, *pipeline(2), *odd, backbone="none")
    for part in (
        "--pulse-num-chunks 2: a device of opposite hosts 4, 6, ... stage(s), 2 or more of each",
        "options upper.*: ",
    ):
        assert said_once(failed.value, part), failed.value.outputs[0]
    flags = [*CASCADE, *STEPS, *pipeline(2), "--pulse-data", "base=digits8"]
    with pytest.raises(RanksFailed) as failed:
        run(2, *flags, *experts(0.9), "--pulse-min-time", "0.95", backbone="none")
    for part in (
        "--pulse-data base=digits8: no data for upper",
        "the boundary 0.9 of two experts is not within the times that are trained, 0.95 to 1",
        "base and upper must be experts of one model: they are uvit-tiny and unet-tiny",
    ):
        assert said_once(failed.value, part), part
    with pytest.raises(RanksFailed) as failed:
        run(1, *STEPS, *experts(0.9))
    assert said_once(failed.value, "--pulse-boundary-ratio is for two experts in one run")


def experts(boundary: float) -> list[str]:
    return ["--pulse-boundary-ratio", str(boundary)]


def test_two_experts_train_as_each_does_alone() -> None:
    """All weights of a fold, each expert at its times, on the same data."""
    named = [
        f"{chain}.{flag}" if "=" in flag else flag for chain in RANGES for flag in TINY["uvit"][2:]
    ]
    flags = ["--pulse-backbone", "cascade:high=uvit-tiny,low=uvit-tiny", *named]
    got = run(2, *flags, *STEPS, *pipeline(2), *experts(0.6), backbone="none")
    ranges = {chain: (flag, "0.6") for chain, flag in RANGES.items()}
    require_each(got, {chain: alone(*STEPS, *times) for chain, times in ranges.items()})


def test_the_recipe_of_two_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its check reads both folders and the data."""
    write_clips(tmp_path / "clips")
    for name in ("transformer", "transformer_2"):
        expert = diffusers.WanTransformer3DModel(**EXPERT | {"num_layers": 2})
        expert.save_pretrained(tmp_path / "wan22" / name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(tmp_path / "wan22/scheduler")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(example_text("wan22-a14b-lora").replace("wan22/", f"{tmp_path}/wan22/"))
    given = [f"model.options.{c}.{key}={n}" for c in ("high", "low") for key, n in CLIPS.items()]
    given += [f"data.source=latents:{tmp_path / 'clips'}", "parallel.pipeline=2"]
    given += ["training.dtype=fp32", f"output={tmp_path / 'run'}"]
    assert main(["train", str(recipe), "--print", *given]) == 0
    said = capsys.readouterr().out
    for option in ("high.frames=2", "low.text_length=6"):
        assert f"--pulse-option {option}" in said
    odd = [word.replace("low.height=4", "low.height=3") for word in given]
    assert main(["train", str(recipe), "--print", *odd]) == 2
    assert "options low.*: height = 3: patches of 2 do not divide it" in capsys.readouterr().err


def test_adapters_of_two_experts_of_wan_2_2(tmp_path: Path) -> None:
    """On the weights of a pipeline's folders, which checkpoints leave out; sampled as a pair."""
    write_clips(tmp_path / "data")
    folders = {"high": tmp_path / "wan/transformer", "low": tmp_path / "wan/transformer_2"}
    for seed, folder in enumerate(folders.values()):
        torch.manual_seed(seed)
        diffusers.WanTransformer3DModel(**EXPERT).save_pretrained(folder)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.save_pretrained(tmp_path / "wan/scheduler")
    flags = ["--global-batch-size", "4", "--train-iters", "2", "--lr", "1e-2"]
    flags += ["--pulse-adapter", "lora", "--pulse-adapter-rank", "2", "--pulse-ema-decay", "0"]
    flags += ["--pulse-data", f"latents:{tmp_path / 'data'}", "--save-interval", "2"]

    def trained(num_ranks: int, name: str, save: str, chains: Iterable[str], *more: str) -> Run:
        sizes = [f"{chain}{key}={value}" for chain in chains for key, value in CLIPS.items()]
        options = [word for size in sizes for word in ("--pulse-option", size)]
        given = ["--pulse-backbone", name, *options, *flags, "--save", str(tmp_path / save)]
        return run(num_ranks, *given, *more, backbone="none")

    one = {
        chain: trained(1, f"diffusers:{folder}", chain, [""], RANGES[chain], "0.875")
        for chain, folder in folders.items()
    }
    both = ",".join(f"{chain}=diffusers:{folder}" for chain, folder in folders.items())
    of_chains = [f"{chain}." for chain in folders]
    cascade = [2, f"cascade:{both}", "both", of_chains, *pipeline(2)]
    got = trained(*cascade, *experts(0.875), "--exit-interval", "1")
    got = trained(*cascade)
    for chain, expected in one.items():
        assert [found[chain] for found in got.losses] == expected.losses[1:]
        for name, value in expected.weights.items():
            assert torch.equal(got.weights[f"{chain}.{name}"], value), (chain, name)
    saved = checkpoint_folder(tmp_path / "both")
    held = dist_checkpointing.load_tensors_metadata(str(saved))
    assert not [name for name in held if name.endswith("to_q.weight")]

    how = ["--from-data", "1", "--per-class", "1", "--steps", "4", "--raw", "--noise", "diffusers"]
    samples = []
    for name, loads in {"both": ["both"], "two": ["high", "--low-noise", "low"]}.items():
        words = [str(tmp_path / word) if word in ("both", *folders) else word for word in loads]
        file = str(tmp_path / f"{name}.safetensors")
        assert main(["sample", "--load", *words, *how, "-o", file]) == 0
        samples.append(load_file(file)["samples"])
    assert torch.equal(*samples)
    for chain in folders:
        for load, of in (("both", ["--chain", chain]), (chain, [])):
            folder = ["--to", str(tmp_path / f"{load}-{chain}"), "--raw"]
            assert main(["export", "--load", str(tmp_path / load), *of, *folder]) == 0
        files = [tmp_path / f"{load}-{chain}" / LORA for load in ("both", chain)]
        factors, expected = map(load_file, files)
        assert factors.keys() == expected.keys()
        assert all(torch.equal(factors[name], value) for name, value in expected.items())
