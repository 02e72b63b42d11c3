"""Modules that no family here has, in whole runs: imported, trained, sampled from, exported."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_pulse.cli.main import main
from model_specs.derived import user_code
from tests.integration.runs import BASE, Run, assert_same, pipeline, run
from tests.integration.test_bad_input import refuse

PROCESS = ["--objective", "v", "--noise-schedule", "scaled_linear"]
TWO = ["--global-batch-size", "8", "--train-iters", "2", "--pulse-class-dropout", "0"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a UNet with classes, and the flags that begin with what was imported of it."""
    import diffusers

    folder = tmp_path_factory.mktemp("digits")
    torch.manual_seed(0)
    module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), norm_num_groups=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1, attention_head_dim=4,
        num_class_embeds=10,
    )  # fmt: skip
    module.save_pretrained(folder / "module")
    to = ["--to", str(folder / "start")]
    assert main(["import", "--from", str(folder / "module"), *to, *PROCESS]) == 0
    begin = ["--pretrained-checkpoint", to[1], "--pulse-module", f"diffusers:{folder / 'module'}"]
    return folder, begin


def test_a_class_without_a_family_trains_alike_in_every_layout_and_as_plain_torch(
    digits: tuple[Path, list[str]], tmp_path: Path
) -> None:
    import diffusers

    folder, begin = digits
    said = ["--pulse-objective", "v", "--pulse-noise-schedule", "scaled_linear"]
    expected = run(1, *begin[2:], *said, *TWO, backbone="none")  # of the folder, not imported
    split = ["--pulse-schedule", "zb-h1", "--pulse-placement", "sequential"]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    got = run(2, *begin, *TWO, *pipeline(2, *split), *save, backbone="none")
    assert got.executed.operations == {"F", "I", "W"}
    assert_same(got, expected)
    again = ["--load", save[1], "--ckpt-step", "1", *begin[2:]]
    rest = run(2, *again, *TWO, *pipeline(2, "--recompute-granularity", "full"), backbone="none")
    assert rest.executed.placement == "fold" and rest.executed.recomputed
    end = replace(expected, losses=expected.losses[1:], grad_norms=expected.grad_norms[1:])
    assert_same(rest, end)
    code = tmp_path / "read.py"
    code.write_text(f"""
import diffusers

def build():
    return diffusers.UNet2DModel.from_pretrained({str(folder / "module")!r})
""")
    read = ["--pulse-module", f"{code}:build", *said, *TWO]
    assert_same(run(2, *read, *pipeline(2), backbone="none"), expected)
    losses, plain = _plain_torch(folder / "module", expected)
    assert expected.losses == pytest.approx(losses, rel=1e-6)
    for name, weight in plain.items():
        # No attention depends on it: Adam makes steps of what rounding leaves of its gradient.
        if not name.endswith("to_k.bias"):
            torch.testing.assert_close(expected.weights[name], weight, rtol=1e-4, atol=5e-5)

    assert main(["export", "--load", save[1], "--to", str(tmp_path / "out")]) == 0
    exported = diffusers.UNet2DModel.from_pretrained(tmp_path / "out").state_dict()
    assert exported.keys() == expected.averages.keys()
    assert all(torch.equal(expected.averages[name], exported[name]) for name in exported)
    few = ["--classes", "3", "--per-class", "2", "--steps", "2"]
    assert main(["sample", "--load", save[1], "-o", str(tmp_path / "3.png"), *few]) == 0


def _plain_torch(folder: Path, like: Run) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last weights of the module, trained as ``like`` but without any of this."""
    import diffusers

    from megatron_pulse.data.build import open_dataset
    from megatron_pulse.data.fields import WantedFields
    from megatron_pulse.data.microbatches import DiffusionLoader
    from megatron_pulse.data.sampler import MicrobatchSampler
    from megatron_pulse.diffusion.objectives import DiffusionProcess
    from megatron_pulse.diffusion.process_flags import NoiseSchedule, Objective

    module: Any = diffusers.UNet2DModel.from_pretrained(folder).train()
    process = DiffusionProcess(Objective.V, NoiseSchedule.SCALED_LINEAR)
    dataset, _ = open_dataset("digits8", wanted=WantedFields((1, 8, 8), num_classes=10))
    sampler = MicrobatchSampler(
        len(dataset), consumed_samples=0, micro_batch_size=2, data_parallel_rank=0,
        data_parallel_size=1, seed=1234, shuffle=True, period=None,
    )  # fmt: skip
    batches = iter(DiffusionLoader(dataset, sampler, process, 1234))
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=like.steps[0]["weight_decay"])
    losses = []
    for step in like.steps:
        losses.append(0.0)
        for group in optimizer.param_groups:
            group["lr"] = step["lr"]
        optimizer.zero_grad()
        for _ in range(4):
            batch = next(batches)
            found = module(batch["noisy"], batch["timesteps"], batch["labels"]).sample
            loss = process.loss(found, batch["target"]) / 4
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return losses, module.state_dict()


OWN = """
    import torch
    from torch import nn


    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(width, 2, kdim=6, vdim=6, batch_first=True)
            self.rows = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

        def forward(self, x, states, mask):
            x = x + self.attention(self.norm(x), states, states, key_padding_mask=mask == 0)[0]
            return x + self.rows[1](torch.tanh(self.rows[0](x)))


    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.begin, self.end = nn.Conv2d(4, width, 1), nn.Conv2d(width, 4, 1)
            self.when = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
            self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
            self.register_buffer("table", torch.linspace(-1, 1, 16)[:, None])

        def forward(self, x, time, states, mask):
            angle = time[:, None] / 1000
            when = self.when(torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype))
            tokens = self.begin(x).flatten(2).mT + self.table.to(x.dtype) + when[:, None]
            kept = []
            for block in self.blocks:
                if len(kept) == len(self.blocks) // 2:
                    break
                tokens = block(tokens, states, mask)
                kept.append(tokens)
            for block in self.blocks[len(kept):]:
                tokens = block(tokens + kept.pop(), states, mask)
            return self.end(tokens.mT.unflatten(2, x.shape[2:]))


    def build(width=8, depth=4):
        given = {
            "x": torch.zeros(2, 4, 4, 4),
            "time": torch.zeros(2),
            "states": torch.zeros(2, 3, 6),
            "mask": torch.ones(2, 3, dtype=torch.int64),
        }
        names = {"states": "context", "mask": "context_mask"}
        return Net(width, depth), given, {"sample": "x", "timestep": "time", "fields": names}
"""


def _write_latents(folder: Path) -> str:
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.latents.layout import LatentLayout, LatentType
    from megatron_pulse.data.latents.writer import LatentWriter

    generator = torch.Generator().manual_seed(0)
    fields = {"context": FieldSpec((3, 6)), "context_mask": FieldSpec((3,), "int64")}
    layout = LatentLayout((4, 4, 4), 1, LatentType.FLOAT32, fields)
    with LatentWriter(folder, layout) as writer:
        for i in range(24):
            text: dict[str, Tensor] = {
                "context": torch.randn(3, 6, generator=generator),
                "context_mask": torch.tensor([1, i % 2, 1]),
            }
            writer.add(torch.randn(4, 4, 4, generator=generator), 0, text)
        writer.close()
    return f"latents:{folder}"


def test_code_of_ones_own_reads_text_in_bf16_and_its_weights_come_and_go_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "mine.py").write_text(textwrap.dedent(OWN))
    name = f"{tmp_path}/mine.py:build"
    found: dict[str, Any] = {}
    exec(compile(textwrap.dedent(OWN), "mine.py", "exec"), found)
    torch.manual_seed(0)
    state = found["build"]()[0].state_dict()
    save_file(state, tmp_path / "mine.safetensors")
    save_file({**state, "table": state["table"] + 1}, tmp_path / "other.safetensors")
    source = ["import", "--from", str(tmp_path / "mine.safetensors"), "--module", name, *PROCESS]
    assert main([*source, "--to", str(tmp_path / "start")]) == 0
    assert f"--pulse-module {name}" in capsys.readouterr().out
    source[2] = str(tmp_path / "other.safetensors")
    assert main([*source, "--to", str(tmp_path / "none")]) == 2
    assert (
        "the buffer table differs from the value that the module computes"
        in capsys.readouterr().err
    )

    latents = _write_latents(tmp_path / "latents")
    flags = [
        *("--pulse-module", name, "--pulse-data", latents, "--bf16", "--global-batch-size", "8"),
        *("--train-iters", "2", "--pretrained-checkpoint", str(tmp_path / "start")),
    ]
    expected = run(1, *flags, backbone="none")
    save = ["--save", str(tmp_path / "run")]
    split = pipeline(2, "--pulse-schedule", "zb-v", "--recompute-granularity", "full")
    got = run(2, *flags, *split, *save, backbone="none")
    assert (got.executed.placement, got.executed.recomputed) == ("fold", True)
    assert_same(got, expected)
    sharded = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
    halves = run(2, *flags, *sharded, backbone="none")
    assert_same(run(2, *flags, *sharded, "--overlap-param-gather", backbone="none"), halves)
    for key, master in expected.main_params.items():
        torch.testing.assert_close(halves.main_params[key], master, rtol=1e-6, atol=5e-5)

    load = ["--load", save[1], "--module", name]
    to = str(tmp_path / "out.safetensors")
    with pytest.MonkeyPatch.context() as unnamed:
        unnamed.setattr(user_code, "_allowed", set())
        assert main(["export", *load[:2], "--to", to]) == 2
    assert (
        "runs only if named on the command line" in capsys.readouterr().err
        and not Path(to).exists()
    )
    assert main(["export", *load, "--to", to, "--raw"]) == 0
    exported = load_file(to)
    module = found["build"]()[0]
    module.load_state_dict(exported)
    assert torch.equal(exported["table"], module.table)
    assert all(torch.equal(exported[key], master) for key, master in expected.main_params.items())

    from megatron_pulse.integration.sampling import (
        Sampler,
        load_model,
        request_from_data,
        sample_images,
    )

    model = load_model(save[1], averaged=True)
    drawn = sample_images(
        model, request_from_data(model, [0, 1]), Sampler(2, 2.0, seed=0), progress=False
    )
    assert drawn.shape == (2, 4, 4, 4) and drawn.isfinite().all()


def test_what_a_module_lacks_is_refused_with_the_way_out(
    digits: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder, begin = digits
    good = [*BASE, *begin, *TWO[:-2]]
    shared = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    said = refuse(monkeypatch, 2, shared, good)
    for text in ("no token sequence", "the families of 'pulse backbones'", "no null class"):
        assert sum(text in fault for fault in said) == 1, said
    assert len(said) == 3 and not any("--null-class" in fault for fault in said)
    (said_alone,) = refuse(
        monkeypatch, 1, ["--pulse-class-dropout", "0"], [*BASE, *begin[2:], *TWO]
    )
    assert "no scheduler config beside it" in said_alone and "--pulse-objective" in said_alone
    source = ["import", "--from", str(folder / "module"), "--to", str(tmp_path / "new"), *PROCESS]
    assert main([*source, "--null-class"]) == 2
    assert "--pulse-class-dropout 0" in capsys.readouterr().err
