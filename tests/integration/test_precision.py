"""Under bf16 and fp16 all that is kept of a model is fp32: starts, averages, checkpoints.

The steps here are far smaller than bf16's rounding of the weights, which drowns them wherever a
rounded copy takes the place of a master.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import model_specs
from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.published import read_state_dict, write_state_dict
from tests.integration.runs import Run, assert_same, pipeline, run

OPTIONS = {"depth": "2", "embed_dim": "32", "in_channels": "1"}
STEPS = 4
LR = 1e-5
FLAGS = [
    *("--pulse-backbone", "uvit-tiny", "--pulse-data", "digits8", "--pulse-objective", "epsilon"),
    *(text for key, value in OPTIONS.items() for text in ("--pulse-option", f"{key}={value}")),
    *("--global-batch-size", "8", "--lr", str(LR), "--weight-decay", "0"),
    *("--pulse-ema-decay", "0.5"),
]
SHARED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]


def train(num_ranks: int, *flags: str, steps: int = STEPS) -> Run:
    return run(num_ranks, *FLAGS, "--train-iters", str(steps), *flags, backbone="none")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that others trained, of which bf16 holds none exactly, and their import."""
    from megatron_pulse.backbone.published_weights import to_published
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    folder = tmp_path_factory.mktemp("published")
    backbone = model_specs.load_backbone("uvit-tiny", OPTIONS)
    stage = whole_stage(backbone, initialise=True)
    generator = torch.Generator().manual_seed(1)
    state = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in weights_of(stage).items()
    }
    form = model_specs.published_form(backbone)
    assert form is not None
    write_state_dict(folder / "model.safetensors", to_published(form, state))
    flags = [text for key, value in OPTIONS.items() for text in ("--option", f"{key}={value}")]
    source = ["--from", str(folder / "model.safetensors")]
    source += ["--objective", "epsilon", "--noise-schedule", "scaled_linear"]
    target = ["--to", str(folder / "imported")]
    assert main(["import", *source, *target, "--backbone", "uvit-tiny", *flags]) == 0
    return folder


def exported(checkpoint: Path, *flags: str) -> dict[str, torch.Tensor]:
    """Export of a checkpoint by ``pulse export``."""
    target = checkpoint / f"exported{''.join(flags)}.safetensors"
    assert main(["export", "--load", str(checkpoint), "--to", str(target), *flags]) == 0
    return read_state_dict(target)


@pytest.fixture(scope="module")
def reference(published: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Changes of weights by fine-tuning in fp32, raw and averaged."""
    save = published / "fp32"
    train(1, "--load", str(published / "imported"), "--save", str(save))
    return updates(save, published)


def updates(save: Path, published: Path) -> dict[str, dict[str, torch.Tensor]]:
    before = read_state_dict(published / "model.safetensors")
    return {
        kind: {name: value - before[name] for name, value in exported(save, *flags).items()}
        for kind, flags in {"raw": ("--raw",), "averaged": ()}.items()
    }


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    def norm(tensors: dict[str, torch.Tensor]) -> float:
        return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5

    return norm({name: found[name] - value for name, value in expected.items()}) / norm(expected)


@pytest.mark.parametrize(
    ("num_ranks", "flags", "door"),
    [
        (1, ["--bf16"], "--pretrained-checkpoint"),
        (1, ["--bf16", "--use-distributed-optimizer"], "--load"),
        (2, pipeline(2, "--fp16", "--initial-loss-scale", "1024"), "--load"),
        (4, pipeline(2, "--bf16", *SHARED, "--overlap-param-gather"), "--pretrained-checkpoint"),
    ],
    ids=["plain", "distributed", "fp16-pipeline", "pipeline-distributed"],
)
def test_small_steps_of_an_imported_model_are_not_drowned(
    published: Path,
    reference: dict[str, dict[str, torch.Tensor]],
    tmp_path: Path,
    num_ranks: int,
    flags: list[str],
    door: str,
) -> None:
    """Gradients in half precision move the weights as fp32's do, to some percent."""
    train(num_ranks, *flags, door, str(published / "imported"), "--save", str(tmp_path))
    for kind, found in updates(tmp_path, published).items():
        assert relative_error(found, reference[kind]) < 0.06, kind


def test_weights_start_as_they_are_drawn_and_resume_to_the_bit(tmp_path: Path) -> None:
    """In fp32; and masters that were shared out over replicas go on at another layout."""
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    shared = train(4, *pipeline(2, "--bf16", *SHARED, *saving))
    start = train(1, "--lr", "1e-12", steps=1)
    for name, master in shared.main_params.items():
        assert (master - start.weights[name]).abs().max() < 1.01 * STEPS * LR, name
        assert torch.equal(shared.weights[name], master.bfloat16().float()), name
    resumed = train(2, "--bf16", *SHARED, "--load", str(tmp_path), "--ckpt-step", "2")
    rest = {"losses": shared.losses[2:], "grad_norms": shared.grad_norms[2:]}
    assert_same(resumed, replace(shared, **rest))


@pytest.mark.parametrize("shared", [[], ["--use-distributed-optimizer"]], ids=["whole", "shared"])
def test_skipped_steps_leave_averages_alone(shared: list[str], tmp_path: Path) -> None:
    """A loss scale that overflows everything: nothing moves, and the average does not warm up.

    What is saved then has an optimizer that has made no step, and goes on with its first, of which
    the average takes the share of a first step.
    """
    flags = ["--fp16", *shared, "--pulse-ema-decay", "0.9999"]
    too_large = ["--initial-loss-scale", str(2**60), "--hysteresis", "1"]
    still = train(1, *flags, *too_large, "--save", str(tmp_path), steps=2)
    further = train(1, *flags, "--loss-scale", "1024", "--load", str(tmp_path), steps=3)
    assert len(further.losses) == 1
    start = train(1, "--lr", "1e-12", steps=1)
    for name, average in still.averages.items():
        assert torch.equal(average, still.main_params[name]), name
        assert (average - start.weights[name]).abs().max() < 1e-9, name
        moved = torch.lerp(average, further.main_params[name], 0.9)
        torch.testing.assert_close(further.averages[name], moved, rtol=0, atol=1e-8)
