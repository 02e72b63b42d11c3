"""``--pulse-data`` against what backbones read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_pulse.data.dataset import DataError, FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from megatron_pulse.data.microbatches import make_microbatch
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, Objective, TimeShift
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments, pulse_options
from megatron_pulse.integration.training_data import DiffusionData, described, trained_process
from model_specs import load_backbone
from tests.data.captioned import captioned_digits
from tests.tracing.zoo.declared import TINY

Options = Mapping[str, Any]
GREY = {"sample_size": 8, "in_channels": 1}
SAME = GREY | {"out_channels": 1}


def open_data(name: str, data: str, options: Options) -> DiffusionData:
    parser = add_pulse_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--pulse-backbone", name, "--pulse-data", data])
    process = DiffusionProcess(Objective.FLOW)
    return DiffusionData(pulse_options(args), load_backbone(name, options), process, seed=1)


def batch(data: DiffusionData, **options: object) -> dict[str, torch.Tensor]:
    items = [(i, i) for i in range(20)]
    return make_microbatch(data.train, items, data.process, 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sd-tiny", SAME),
        ("sdxl-tiny", SAME),
        ("sd3-tiny", SAME),
        ("flux-tiny", GREY),
        ("hunyuan-tiny", GREY | {"style_and_size": True}),
    ],
)
def test_captions_give_all_that_backbones_read(name: str, options: Options, tmp_path: Path) -> None:
    data = open_data(name, captioned_digits(tmp_path), options)
    fields = load_backbone(name, options).batch_fields
    found = batch(data)
    for field, spec in fields.items():
        assert tuple(found[field].shape) == spec.full_shape(20), field
        assert found[field].is_floating_point() == (spec.dtype != "int64"), field
    dropped = batch(data, drop_probability=1.0)
    assert not torch.equal(dropped["context"], found["context"])
    for field in {"time_ids", "guidance", "image_meta_size"} & set(fields):
        assert torch.equal(dropped[field], found[field])


def test_truncated_captions_are_counted(tmp_path: Path) -> None:
    """Captions of four words and an end token; also where they are of several folders."""
    (tmp_path / "more").mkdir()
    first, more = captioned_digits(tmp_path), captioned_digits(tmp_path / "more", 10)
    assert not open_data("sd-tiny", first, SAME | {"context_length": 5}).cautions
    data = open_data("sd-tiny", f"{first},{more}", SAME | {"context_length": 4})
    told = [caution for caution in data.cautions if "exceed the text length" in caution]
    assert [caution.split("exceed")[0] for caution in told] == [
        "of the first 36 captions 36 ", "of the first 9 captions 9 "
    ]  # fmt: skip


def test_everything_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(DataError) as error:
        open_data("sdxl-tiny", "digits8", {"sample_size": 8, "in_channels": 3, "out_channels": 3})
    faults = error.value.faults
    assert len(faults) == 3, "image size, pooled text, text states; time_ids have a default"
    for part in ("3x8x8", "reads context (77x32", "reads pooled (24 "):
        assert any(part in fault for fault in faults), part


def test_a_prediction_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match="predicts"):
        open_data("sd-tiny", "digits8", GREY | {"out_channels": 3})


def test_the_loss_counts_the_mean_only() -> None:
    data = open_data("dit-tiny", "digits8", GREY | {"out_channels": 2})
    found = batch(data, null_label=10)
    sigma = torch.full_like(found["target"], torch.nan)
    prediction = torch.cat([found["target"] + 2, sigma], dim=1)
    assert data.loss(prediction, found).item() == pytest.approx(4)


def test_frames_that_are_given_have_no_loss(tmp_path: Path) -> None:
    shape, sizes = (8, 3, 4, 6), {"frames": 3, "height": 4, "width": 6, "text_length": 6}
    fields = {"context": FieldSpec((6, 16)), "image_latent": FieldSpec(shape)}
    layout = LatentLayout(shape, 1, LatentType.FLOAT32, fields)
    with LatentWriter(tmp_path / "latents", layout) as writer:
        for _ in range(40):
            given = {name: torch.randn(spec.shape) for name, spec in fields.items()}
            writer.add(torch.randn(shape), 0, given)
        writer.close()
    options = {**TINY["ltx_known"].config, **sizes, "known_frames": 1}
    name = "diffusers:LTXVideoTransformer3DModel"
    data = open_data(name, f"latents:{tmp_path / 'latents'}", options)
    given = batch(data)
    prediction = torch.randn_like(given["target"])
    errors = (prediction - given["target"])[:, :, 1:].square()
    torch.testing.assert_close(data.loss(prediction, given), errors.mean())
    expected = errors.flatten(1).mean(1)
    torch.testing.assert_close(data.sample_losses(prediction, given), expected)


def test_cogview4_trains_with_the_shift_of_its_pipeline() -> None:
    from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift

    chain = load_backbone("diffusers:CogView4Transformer2DModel", TINY["cogview4"].config)
    shift = DynamicShift(0.25, 0.75, 256, 4096, TimeShift.LINEAR)
    process = DiffusionProcess(Objective.FLOW, shift=shift)
    expected = calculate_shift(chain.image_tokens, 256, 0.25, 0.75)
    assert trained_process(process, chain).shift == pytest.approx(expected)
    assert f"({expected:.4g} at {chain.image_tokens} tokens)" in described(process, chain)
