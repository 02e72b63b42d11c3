"""Every class of the zoo that has an embedder, in whole runs: copied to all devices, and sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from model_specs.derived.classes import CLASSES
from model_specs.derived.inputs import Input
from tests.integration.runs import assert_equal_to_rounding, pipeline, run
from tests.tracing.zoo import make

SIZES = {"height": 8, "width": 8, "frames": 2, "text_length": 5}
NAMES = (
    *("small_unet", "small_svd", "small_motion", "hunyuan", "hunyuan_video", "wan", "ltx"),
    *("cogvideox_2b", "flux", "sd3", "pixart_alpha"),
)
"""One of each class. Mochi's number of tokens depends on its mask, of which no plan can be made; an
autoencoder and encoders of text are not trained by diffusion."""
PROCESS = ["--pulse-objective", "v", "--pulse-noise-schedule", "scaled_linear"]


def write_latents(folder: Path, module: Any) -> list[str]:
    """Random latents with what the class reads, and the options that say their sizes."""
    known, config = CLASSES[type(module).__name__], dict(module.config)
    chosen = {name: SIZES[name] for name in known.defaults(config) if name not in config}
    declared = known.declared(config, chosen)
    read = [each for each in declared.inputs if isinstance(each, Input)]
    (shape,) = (each.shape for each in read if each.path == declared.sample)
    fields = {
        each.field or each.path.replace(".", "_"): FieldSpec(
            (each.rows, *each.shape) if each.rows > 1 else each.shape,
            "int64" if each.dtype in ("int64", "bool") else "float32",
        )
        for each in read
        if each.path not in (declared.sample, declared.timestep)
    }
    generator = torch.Generator().manual_seed(0)
    with LatentWriter(folder, LatentLayout(shape, 1, LatentType.FLOAT32, fields)) as writer:
        for _ in range(8):
            values = {
                name: torch.ones(spec.shape, dtype=torch.int64)
                if spec.dtype == "int64"
                else torch.randn(spec.shape, generator=generator)
                for name, spec in fields.items()
            }
            writer.add(torch.randn(shape, generator=generator), 0, values)
        writer.close()
    return [word for name in chosen for word in ("--pulse-option", f"{name}={chosen[name]}")]


@pytest.mark.parametrize("name", NAMES)
def test_a_class_with_an_embedder_trains_alike_with_copies_and_without(
    name: str, tmp_path: Path
) -> None:
    module, _ = make(name)
    if name == "small_svd":  # without the picture beside the noise
        module = type(module).from_config({**module.config, "in_channels": 4})
    module.save_pretrained(tmp_path / "module")
    options = write_latents(tmp_path / "latents", module)
    flags = [
        *("--pulse-module", f"diffusers:{tmp_path / 'module'}", *options, *PROCESS, *pipeline(2)),
        *("--pulse-data", f"latents:{tmp_path / 'latents'}"),
        *("--global-batch-size", "4", "--train-iters", "2", "--eval-iters", "0"),
    ]
    save = ["--save", str(tmp_path / "run"), "--save-interval", "1"]
    load = ["--load", save[1], "--ckpt-step", "1"]
    copied = run(2, *flags, *save, "--pulse-conditioning", "replicate", backbone="none")
    sent = run(2, *flags, *load, "--pulse-conditioning", "send", backbone="none")
    assert copied.executed.replicated and not sent.executed.replicated
    end = replace(copied, losses=copied.losses[1:], grad_norms=copied.grad_norms[1:])
    assert_equal_to_rounding(sent, end)

    assert main(["export", "--load", save[1], "--to", str(tmp_path / "out")]) == 0
    exported = type(module).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, exported[key]) for key, value in copied.averages.items())
