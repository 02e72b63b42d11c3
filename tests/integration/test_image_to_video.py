"""Runs of image-to-video models: known frames beside the sample, in every layout."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.dataset import FieldSpec
from megatron_pulse.data.latents.layout import LatentLayout, LatentType
from megatron_pulse.data.latents.writer import LatentWriter
from tests.encoders.test_videos import WAN, make
from tests.integration.runs import STEPS, alone, assert_same, pipeline, run
from tests.model_specs.test_pipelines import LTX_SCHEDULER
from tests.tracing.zoo.declared import TINY

SIZES = {**WAN, "num_layers": 3, "frames": 2, "height": 4, "width": 4}
RUN = ["--pulse-backbone", "diffusers:WanTransformer3DModel", "--pulse-objective", "flow"]
RUN += [w for n, v in SIZES.items() for w in ("--pulse-option", f"{n}={v}")]
SHAPE = (4, 2, 4, 4)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on stored latents, whose texts and known frames are random."""
    folder = tmp_path_factory.mktemp("run") / "latents"
    fields = {
        "context": FieldSpec((6, 8)), "known_mask": FieldSpec(SHAPE),
        "known_video": FieldSpec(SHAPE),
    }  # fmt: skip
    layout = LatentLayout(SHAPE, 1, LatentType.FLOAT32, fields, shard_size=16)
    generator = torch.Generator().manual_seed(0)
    writer = LatentWriter(folder, layout, {}, 24)
    with writer:
        for number in writer.share(0, 1):
            for _ in writer.begin(number):
                given = {n: torch.randn(s.shape, generator=generator) for n, s in fields.items()}
                writer.add(torch.randn(SHAPE, generator=generator), 0, given)
    sent = ["--pulse-conditioning", "send"]  # copies of embedders add in another order
    return [*RUN, *STEPS, *sent, "--pulse-data", f"latents:{folder}", "--pulse-ema-decay", "0.9"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_pipeline_trains_as_one_process(num_ranks: int, flags: list[str], tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "kept"), "--save-interval", "2"]
    got = run(num_ranks, *flags, *pipeline(num_ranks), *save, backbone="none", timeout_s=500)
    assert_same(got, alone(*flags, backbone="none"))
    draw = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--per-class", "1"]
    tensors = str(tmp_path / "samples.safetensors")
    assert main([*draw, "--from-data", "2", "-o", tensors]) == 0


def test_a_picture_is_continued_to_a_film(flags: list[str], tmp_path: Path) -> None:
    """By the fields that write-latents makes, which are those of the pipeline."""
    from megatron_pulse.cli.models.input_images import continued
    from megatron_pulse.data.images.inpainting import one_picture
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.encoders.first_frame import first_frame_fields
    from model_specs import load_backbone

    make("wan", tmp_path / "vae")
    pixels = torch.randint(256, (40, 32, 3), generator=torch.Generator().manual_seed(0)).byte()
    Image.fromarray(pixels.numpy()).save(tmp_path / "first.png")
    backbone = load_backbone("diffusers:WanTransformer3DModel", SIZES)
    vae = Autoencoder(tmp_path / "vae")
    rows, fields, _ = continued([tmp_path / "first.png"], backbone, ["a", "b"], 2, vae)
    clip = torch.zeros(3, 5, 32, 32)
    clip[:, 0] = one_picture(tmp_path / "first.png", 3, (32, 32))
    shapes = {"known_mask": SHAPE, "known_video": SHAPE}
    expected = first_frame_fields(shapes, clip, vae)
    assert rows == ["a", "b"]
    for name, value in expected.items():
        assert fields[name].shape == (4, *SHAPE)
        assert all(torch.equal(row, value) for row in fields[name])


def test_given_frames_are_drawn_as_by_the_pipeline(tmp_path: Path) -> None:
    """Imported LTX with its scheduler, whose shift counts the tokens of all frames."""
    module, kept = tmp_path / "ltx" / "transformer", tmp_path / "kept"
    torch.manual_seed(0)
    whole = diffusers.LTXVideoTransformer3DModel(**TINY["ltx_known"].config).eval()
    whole.save_pretrained(module)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**LTX_SCHEDULER)
    scheduler.save_pretrained(tmp_path / "ltx" / "scheduler")
    sizes = {"frames": 3, "height": 4, "width": 6, "text_length": 6, "known_frames": 1}
    assert main(["import", "--from", str(module), "--to", str(kept)]) == 0
    shape = (8, 3, 4, 6)
    fields = {"context": FieldSpec((6, 16)), "image_latent": FieldSpec(shape)}
    layout = LatentLayout(shape, 1, LatentType.FLOAT32, fields)
    given = {name: torch.randn(40, *spec.shape) for name, spec in fields.items()}
    with LatentWriter(tmp_path / "latents", layout) as writer:
        for i in range(40):
            writer.add(torch.randn(shape), 0, {name: each[i] for name, each in given.items()})
        writer.close()
    tensors = str(tmp_path / "samples.safetensors")
    draw = ["sample", "--load", str(kept), "--raw", "--from-data", "2", "--per-class", "1"]
    draw += ["--data", f"latents:{tmp_path / 'latents'}", "--steps", "3", "--guidance", "2"]
    draw += [word for name, size in sizes.items() for word in ("--option", f"{name}={size}")]
    assert main([*draw, "--noise", "diffusers", "--seed", "5", "-o", tensors]) == 0
    ours = load_file(tensors)["samples"]
    noise = torch.randn((2, *shape), generator=torch.Generator().manual_seed(5))
    first = ours[:, :, :1]
    known = given["image_latent"][:, :, :1].flatten(1)
    rows = [int((known == each.flatten()).all(1).nonzero()) for each in first]
    noise[:, :, :1] = first
    pipeline = diffusers.LTXImageToVideoPipeline(scheduler, None, None, None, whole)
    ones, text = torch.ones(2, 6, dtype=torch.int64), given["context"][rows]
    theirs = pipeline(
        height=128, width=192, num_frames=17, num_inference_steps=3, guidance_scale=2.0,
        latents=noise.flatten(2).mT, prompt_embeds=text, negative_prompt_embeds=0 * text,
        prompt_attention_mask=ones, negative_prompt_attention_mask=ones, output_type="latent",
    ).frames.mT.view(ours.shape)  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))
