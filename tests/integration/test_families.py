"""Every family through whole runs on a store of latents of each size: alone, and over a pipeline
with tensor parallelism beside it; its trained weights then compute the same in the library that
publishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.backbone.shape_buckets import at_shape
from model_specs import load_backbone
from tests.integration.runs import pipeline, run
from tests.model_specs.chains import relative_error
from tests.model_specs.twins import call

NUM_SAMPLES = 24
SMALL_UNET = ("sample_size=8", "block_out_channels=16,32", "layers_per_block=1")


@dataclass(frozen=True)
class Family:
    """A tiny configuration, how it is laid over devices by default, and who publishes it.

    ``reference`` is diffusers' class, and ``buckets`` are the sizes of microbatches.
    ``replicated``: by default its text embedder runs on every device.
    """

    backbone: str
    placement: str = "fold"
    sequence_parallel: bool = True
    options: tuple[str, ...] = ()
    reference: str = ""
    replicated: bool = False
    buckets: str = "8x4,4x8"

    @property
    def every_option(self) -> tuple[str, ...]:
        return (*self.options, f"buckets={self.buckets}") if self.buckets else self.options


FAMILIES = {
    "uvit": Family("uvit-tiny", buckets=""),
    "sd": Family(
        "sd-tiny",
        "fold",
        sequence_parallel=False,
        options=(*SMALL_UNET, "transformer_depth=1,0"),
        reference="UNet2DConditionModel",
    ),
    "sdxl": Family(
        "sdxl-tiny",
        "fold",
        sequence_parallel=False,
        options=(*SMALL_UNET, "transformer_depth=0,1", "mid_transformer_depth=1", "num_heads=2,4"),
        reference="UNet2DConditionModel",
    ),
    "hunyuan": Family("hunyuan-tiny", reference="HunyuanDiT2DModel", replicated=True),
    "dit": Family("dit-tiny", "sequential", reference="DiTTransformer2DModel", buckets="4x16,16x4"),
    "pixart": Family(
        "pixart-tiny",
        "sequential",
        reference="PixArtTransformer2DModel",
        replicated=True,
    ),
    "sd3": Family("sd3-tiny", "sequential", reference="SD3Transformer2DModel"),
    "flux": Family("flux-tiny", "sequential", reference="FluxTransformer2DModel"),
    "suv": Family("suv-tiny", buckets="2x8x4,3x4x8"),
}


def draw(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    if spec.dtype == "int64":
        return torch.randint(0, 2, spec.shape, generator=generator)
    return torch.randn(spec.shape, generator=generator)


def write_latents(folder: Path, family: Family) -> None:
    """Random square latents with every field that the backbone reads."""
    _write_store(folder, _backbone(family.backbone, family.options))


def write_buckets(folder: Path, family: Family) -> str:
    """The same of each of the family's sizes, each below ``folder``; their names as data."""
    several = _backbone(family.backbone, family.every_option)
    stores = [folder / str(shape_index) for shape_index in range(several.num_shapes)]
    for shape_index, store in enumerate(stores):
        _write_store(store, at_shape(several, shape_index))
    return ",".join(f"latents:{store}" for store in stores)


def _backbone(name: str, options: Sequence[str]) -> Backbone:
    return load_backbone(name, dict(option.split("=", 1) for option in options))


def _write_store(folder: Path, chain: Backbone) -> None:
    from megatron_pulse.data.dataset import FieldSpec
    from megatron_pulse.data.latents.layout import LatentLayout, LatentType
    from megatron_pulse.data.latents.writer import LatentWriter

    generator = torch.Generator().manual_seed(0)
    specs = {k: v for k, v in chain.batch_fields.items() if k not in ("timesteps", "labels")}
    fields = {name: FieldSpec(spec.shape, spec.dtype) for name, spec in specs.items()}
    layout = LatentLayout(chain.sample_spec.shape, 3, LatentType.FLOAT32, fields)
    with LatentWriter(folder, layout) as writer:
        for i in range(NUM_SAMPLES):
            values = {name: draw(spec, generator) for name, spec in specs.items()}
            writer.add(draw(chain.sample_spec, generator), i % 3, values)
        writer.close()


def flags_of(family: Family, folder: Path) -> list[str]:
    """Flags of a run of two steps on latents of the family's sizes, which are written."""
    data = write_buckets(folder / "latents", family)
    flags = [
        *("--pulse-backbone", family.backbone, "--pulse-data", data),
        *("--global-batch-size", "8", "--train-iters", "2"),
    ]
    if family.buckets:
        flags += ["--pulse-bucket-batch", "4"]
    for option in family.every_option:
        flags += ["--pulse-option", option]
    return flags


@pytest.mark.parametrize("name", FAMILIES)
def test_trains_alike_over_pipeline_and_tensors_and_leaves_to_diffusers(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    flags = flags_of(family, tmp_path)
    save = ["--save", str(tmp_path / "run"), "--save-interval", "2"]
    alone = run(1, *flags, backbone="none")
    assert len(alone.losses) == 2 and alone.losses[-1] != alone.losses[0]
    tensor_parallel = ["--tensor-model-parallel-size", "2"]
    if family.sequence_parallel:
        tensor_parallel.append("--sequence-parallel")
    both = run(4, *flags, *pipeline(2), *tensor_parallel, *save, backbone="none")
    assert both.executed.placement == family.placement
    assert bool(both.executed.replicated) == family.replicated
    assert both.losses == pytest.approx(alone.losses, rel=1e-5)
    assert both.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
    assert both.validation == pytest.approx(alone.validation, rel=1e-5)
    if family.reference:
        same_in_diffusers(tmp_path / "run", tmp_path / "exported", family)


def same_in_diffusers(checkpoint: Path, exported: Path, family: Family) -> None:
    """Exports the averaged weights and compares the predictions of both."""
    import diffusers

    from megatron_pulse.cli.main import main
    from megatron_pulse.integration.checkpoint.published_weights import load_whole
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run

    assert main(["export", "--load", str(checkpoint), "--to", str(exported)]) == 0
    theirs = getattr(diffusers, family.reference).from_pretrained(exported).eval()
    backbone, stage = load_whole(read_saved_run(checkpoint), averaged=True)
    stage.eval()
    generator = torch.Generator().manual_seed(1)
    for shape_index in range(backbone.num_shapes):
        chain = at_shape(backbone, shape_index)
        fields = {
            name: torch.stack([draw(spec, generator) for _ in range(2)])
            for name, spec in chain.batch_fields.items()
        } | {"timesteps": torch.tensor([100.0, 700.0])}
        image = torch.stack([draw(chain.input_spec, generator) for _ in range(2)])
        with torch.no_grad():
            ours = stage((image,), {}, fields, shape_index=shape_index)[0][0]
            expected = call(theirs, image, fields)
        assert relative_error(ours, expected) < 1e-5
