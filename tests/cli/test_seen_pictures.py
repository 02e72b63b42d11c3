"""Qwen-Image-Edit: prompts that the text encoder reads beside a picture, as in its pipelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
from PIL import Image
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.data.latents.folder import LatentFolder
from megatron_pulse.diffusion.noise import start_noise
from megatron_pulse.encoders import seen_pictures
from tests.cli.test_large_prompts import CASES, NEGATIVE, STEPS, sizes

WIDTH, HEIGHT = 96, 64
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
CASE = replace(
    CASES["qwen_image"],
    latents=(4, 8, 12),
    flags=(*sizes(height=8, width=12, text_length=96, reference=1), *NEGATIVE),
)


@pytest.fixture(params=["", "Plus"])
def folder(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pipeline whose encoder sees pictures of few pixels, in 6 tokens."""
    name, area = f"QwenImageEdit{request.param}Pipeline", WIDTH * HEIGHT
    monkeypatch.setattr(seen_pictures, "_AREAS", {name: area})
    monkeypatch.setattr(edit, "calculate_dimensions", lambda *_: (WIDTH, HEIGHT, None))
    monkeypatch.setattr(plus, "calculate_dimensions", lambda *_: (WIDTH, HEIGHT))
    replace(CASE, pipeline=getattr(diffusers, name)).write(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "processor").mkdir()
    images = transformers.Qwen2VLImageProcessor(min_pixels=784, max_pixels=area)
    images.save_pretrained(tmp_path / "processor")
    place = tmp_path / "text_encoder"
    config = transformers.Qwen2_5_VLConfig.from_pretrained(place)
    config.text_config.vocab_size = len(tokenizer)
    names = ("vision_start", "image", "vision_end", "video")
    for name, mark in zip(names, MARKS, strict=True):
        setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    torch.manual_seed(2)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(place)
    return tmp_path


class Processor(transformers.Qwen2VLProcessor):  # type: ignore[misc]
    """Without films, for which transformers needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
        """Accept what is given."""


def opened(folder: Path) -> Any:
    """The pipeline of the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    images = transformers.Qwen2VLImageProcessor.from_pretrained(folder / "processor")
    (name,) = seen_pictures._AREAS
    pipeline = getattr(diffusers, name)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=diffusers.AutoencoderKLQwenImage.from_pretrained(folder / "vae"),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder / "text_encoder"
        ),
        tokenizer=tokenizer,
        processor=Processor(images, tokenizer),
        transformer=diffusers.QwenImageTransformer2DModel.from_pretrained(folder / "transformer"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(path: Path, seed: int) -> Image.Image:
    pixels = torch.randint(256, (HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(seed))
    path.parent.mkdir(exist_ok=True)
    image = Image.fromarray(pixels.byte().numpy())
    image.save(path)
    return image


def test_prompts_and_pictures_become_the_states_and_samples_of_the_pipeline(folder: Path) -> None:
    checkpoint, pipeline = folder / "checkpoint", opened(folder)
    assert main(["import", "--from", str(folder), "--to", str(checkpoint)]) == 0
    images = [picture(folder / f"photos.reference/{i}.png", i) for i in range(2)]
    texts = ("a red bird", "the old cat of a bird")
    for i, text in enumerate(texts):
        picture(folder / f"photos/{i}.png", 10 + i)
        (folder / f"photos/{i}.txt").write_text(text)
    module = ["--module", f"diffusers:{folder / 'transformer'}", *CASE.flags[4:8]]
    assert main([
        "data", "write-latents", "--from", f"captions:{folder / 'photos'}", "--buckets",
        f"{WIDTH}x{HEIGHT}", "--encoders", str(folder), *module, "--dtype", "fp32",
        "-o", str(folder / "latents"),
    ]) == 0  # fmt: skip
    (store,) = (path.parent for path in (folder / "latents").rglob("meta.json"))
    written = LatentFolder(store)
    for i, text in enumerate(texts):
        with torch.no_grad():
            (states,), mask = pipeline.encode_prompt(text, images[i], device="cpu")
        given = written.conditioning(i)
        assert mask is None and given["context_mask"].sum() == len(states)
        torch.testing.assert_close(given["context"][: len(states)], states, rtol=0, atol=1e-6)
        assert not given["context"][len(states) :].any()

    tensors = folder / "samples.safetensors"
    assert main([
        "sample", "--load", str(checkpoint), "--raw", "--prompt", texts[0], "--prompt", texts[1],
        "--per-class", "1", "--encoders", str(folder), "--steps", str(STEPS), *CASE.flags,
        *[w for i in range(2) for w in ("--image", str(folder / f"photos.reference/{i}.png"))],
        "-o", str(tensors),
    ]) == 0  # fmt: skip
    ours = load_file(tensors)["samples"]
    for i, text in enumerate(texts):
        noise = start_noise(0, range(2), CASE.latents)[i : i + 1]
        made = pipeline(
            image=images[i], prompt=text, negative_prompt="old cat", true_cfg_scale=2.0,
            num_inference_steps=STEPS, height=HEIGHT, width=WIDTH, output_type="latent",
            latents=pipeline._pack_latents(noise, 1, 4, 8, 12),
        ).images  # fmt: skip
        theirs = pipeline._unpack_latents(made, HEIGHT, WIDTH, 8).squeeze(2)[0]
        torch.testing.assert_close(ours[i], theirs, rtol=0, atol=1e-5)
