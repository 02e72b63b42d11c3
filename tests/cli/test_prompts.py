"""Prompts to pictures with every family that reads text: those of diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from megatron_pulse.cli.main import main
from megatron_pulse.diffusion import grid
from megatron_pulse.diffusion.noise import start_noise
from tests.cli.test_data import make_vae
from tests.encoders.pipelines import LENGTH, make_pipeline

STEPS, SIDE, T5_LENGTH = 4, 4, 7
SCALED = {"clip_sample": False, "timestep_spacing": "trailing", "beta_schedule": "scaled_linear"}
DDIM = diffusers.DDIMScheduler(**SCALED)
CLIP, PROJECTED, T5, BERT = (
    ("clip", "CLIPTextModel"),
    ("projected", "CLIPTextModelWithProjection"),
    ("t5", "T5EncoderModel"),
    ("bert", "BertModel"),
)


@dataclass(frozen=True)
class Family:
    """A tiny pipeline of a class: its ``denoiser`` with settings, encoders as (kind and class,
    width, projection), how ``pulse sample`` gets the length of texts and what the pipeline is
    called with."""

    pipeline: Any
    denoiser: Any
    settings: dict[str, Any]
    encoders: tuple[tuple[Any, ...], ...]
    scheduler: Any = DDIM
    options: tuple[str, ...] = ()
    called: dict[str, Any] = field(default_factory=dict)
    latents: tuple[int, int, int] = (4, SIDE, SIDE)
    levels: int = 2
    guided: bool = True
    packed: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    close: float = 3e-6
    """To the pipeline in fp32. Where that is above 2e-7, the pipeline is as far from itself in
    float64 as we are: sums of another order."""

    @property
    def shift(self) -> float | None:
        """Of latents; pipelines of older autoencoders know none."""
        return 0.1 if "FlowMatch" in type(self.scheduler).__name__ else None

    @property
    def side(self) -> int:
        """Pixels."""
        return SIDE << self.levels - 1

    def write(self, folder: Path) -> None:
        """All of it, random."""
        model = "unet" if "UNet" in self.denoiser.__name__ else "transformer"
        index: dict[str, Any] = {
            "_class_name": self.pipeline.__name__,
            "force_zeros_for_empty_prompt": True,
            "vae": ["diffusers", "AutoencoderKL"],
            model: ["diffusers", self.denoiser.__name__],
            "scheduler": ["diffusers", type(self.scheduler).__name__],
        }
        for i, ((_, name), *_) in enumerate(self.encoders):
            suffix = f"_{i + 1}" if i else ""
            index[f"text_encoder{suffix}"] = ["transformers", name]
            index[f"tokenizer{suffix}"] = ["transformers", "PreTrainedTokenizerFast"]
        make_pipeline(folder, *((kind, *sizes) for (kind, _), *sizes in self.encoders), **index)
        make_vae(
            folder / "vae", latent_channels=self.latents[0], scaling_factor=0.5,
            shift_factor=self.shift, block_out_channels=(8,) * self.levels,
            down_block_types=("DownEncoderBlock2D",) * self.levels,
            up_block_types=("UpDecoderBlock2D",) * self.levels,
        )  # fmt: skip
        torch.manual_seed(1)
        self.denoiser(**self.settings).save_pretrained(folder / model)
        self.scheduler.save_pretrained(folder / "scheduler")


UNET = {
    "sample_size": SIDE, "block_out_channels": (8, 16), "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 2,
    "norm_num_groups": 4, "use_linear_projection": True,
}  # fmt: skip
SDXL = Family(
    diffusers.StableDiffusionXLPipeline,
    diffusers.UNet2DConditionModel,
    UNET
    | {
        "cross_attention_dim": 20, "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 10 + 6 * 8,
    },
    ((CLIP,), (PROJECTED, 12, 10)),
    options=(f"context_length={LENGTH}",),
    close=2e-7,
)  # fmt: skip
FAMILIES = {
    "sd": Family(
        diffusers.StableDiffusionPipeline,
        diffusers.UNet2DConditionModel,
        UNET | {"cross_attention_dim": 8},
        ((CLIP,),),
        options=(f"context_length={LENGTH}",),
        close=2e-7,
    ),
    "sdxl": SDXL,
    "sd3": Family(
        diffusers.StableDiffusion3Pipeline,
        diffusers.SD3Transformer2DModel,
        {
            "sample_size": SIDE, "patch_size": 2, "in_channels": 16, "out_channels": 16,
            "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2,
            "joint_attention_dim": 24, "caption_projection_dim": 8, "pooled_projection_dim": 16,
            "pos_embed_max_size": SIDE,
        },
        ((PROJECTED, 8, 6), (PROJECTED, 12, 10), (T5, 24)),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        (f"context_length={LENGTH + T5_LENGTH}",),
        {"max_sequence_length": T5_LENGTH},
        (16, SIDE, SIDE),
    ),
    "pixart": Family(
        diffusers.PixArtAlphaPipeline,
        diffusers.PixArtTransformer2DModel,
        {
            "sample_size": SIDE, "num_layers": 2, "patch_size": 2, "attention_head_dim": 4,
            "num_attention_heads": 2, "in_channels": 4, "out_channels": 8,
            "cross_attention_dim": 8, "caption_channels": 8, "use_additional_conditions": False,
        },
        ((T5,),),
        options=(f"caption_length={T5_LENGTH}",),
        called={
            "max_sequence_length": T5_LENGTH, "use_resolution_binning": False,
            "clean_caption": False,
        },
    ),
    "hunyuan": Family(
        diffusers.HunyuanDiTPipeline,
        diffusers.HunyuanDiT2DModel,
        {
            "sample_size": SIDE, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8,
            "num_attention_heads": 2, "in_channels": 4, "hidden_size": 16, "mlp_ratio": 2.0,
            "cross_attention_dim": 8, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8,
            "activation_fn": "gelu-approximate", "learn_sigma": True, "text_len": 77,
            "text_len_t5": 256,
        },
        ((BERT,), (T5, 16)),
        diffusers.DDIMScheduler(**SCALED, prediction_type="v_prediction"),
        # The pipeline says 1024 x 1024 whatever is drawn; here a picture is of its own size.
        called={"use_resolution_binning": False, "original_size": (8 * SIDE, 8 * SIDE)},
        levels=4,  # it divides sides by 8
    ),
    "flux": Family(
        diffusers.FluxPipeline,
        diffusers.FluxTransformer2DModel,
        {
            "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12,
            "pooled_projection_dim": 8, "guidance_embeds": False, "axes_dims_rope": (4, 4, 8),
        },
        ((CLIP,), (T5, 12)),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
        (f"context_length={T5_LENGTH}", f"sample_size={SIDE}"),
        {"max_sequence_length": T5_LENGTH},
        guided=False,
        packed=lambda pipeline, noise: pipeline._pack_latents(noise, len(noise), 4, SIDE, SIDE),
    ),
}  # fmt: skip


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What commands draw, before it is a file."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(grid, "save_grid", lambda images, *_: found.append(images))
    return found


def draw(family: Family, folder: Path, checkpoint: Path, *more: str) -> None:
    flags = [word for option in family.options for word in ("--option", option)]
    guided = ["--negative-prompt", "old cat", "--guidance", "2"] if family.guided else []
    assert main([
        "sample", "--load", str(checkpoint), "--raw", "--prompt", "a red bird", "--per-class", "2",
        *(guided or ["--guidance", "1"]), "--encoders", str(folder), "--steps", str(STEPS),
        *flags, *more, "-o", str(checkpoint / "birds.png"),
    ]) == 0  # fmt: skip


def one_by_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A text encoder that takes its texts one at a time, as ours: how many there are at once
    changes the last bits of states."""

    def called(ids: torch.Tensor, **named: Any) -> Any:
        tensors = {name: v for name, v in named.items() if isinstance(v, torch.Tensor)}
        each = [
            forward(ids[i : i + 1], **named | {k: v[i : i + 1] for k, v in tensors.items()})
            for i in range(len(ids))
        ]
        joined = {
            name: torch.cat([one[name] for one in each])
            if isinstance(value, torch.Tensor)
            else tuple(map(torch.cat, zip(*(one[name] for one in each), strict=True)))
            for name, value in each[0].items()
        }
        return type(each[0])(**joined)

    return called


def expected(family: Family, pipeline: Any, **more: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    for name, part in pipeline.components.items():
        if name.startswith("text_encoder") and part is not None:
            part.forward = one_by_one(part.forward)
    noise = start_noise(0, range(2), family.latents).to(pipeline.dtype)
    negative = {"negative_prompt": ["old cat"] * 2} if family.guided else {}
    pictures: torch.Tensor = pipeline(
        prompt=["a red bird"] * 2, num_inference_steps=STEPS, output_type="pt",
        guidance_scale=2.0 if family.guided else 1.0, height=family.side, width=family.side,
        latents=noise if family.packed is None else family.packed(pipeline, noise),
        **negative, **family.called, **more,
    ).images  # fmt: skip
    return pictures


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_give_the_pictures_of_the_pipeline(
    name: str, drawn: list[torch.Tensor], tmp_path: Path
) -> None:
    family, checkpoint = FAMILIES[name], tmp_path / "checkpoint"
    family.write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(checkpoint)]) == 0
    draw(family, tmp_path, checkpoint)
    unchecked: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    without = {**unchecked, "requires_safety_checker": False} if name in ("sd", "hunyuan") else {}
    theirs, exact = (
        expected(family, family.pipeline.from_pretrained(tmp_path, torch_dtype=dtype, **without))
        for dtype in (torch.float32, torch.float64)
    )
    ours = drawn[0] / 2 + 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=family.close)
    from_exact = [(pictures - exact).abs().max().item() for pictures in (ours, theirs)]
    assert from_exact[0] < max(2e-7, 2 * from_exact[1]), from_exact
    assert drawn[0].std() > 0.01


@pytest.mark.parametrize(
    ("name", "flags", "called"),
    [("sd", ["--eta", "0.5"], {"eta": 0.5}), ("sd3", [], {})],
)
def test_noise_of_diffusers_gives_the_pictures_of_a_generator(
    name: str, flags: list[str], called: dict[str, Any], drawn: list[torch.Tensor], tmp_path: Path
) -> None:
    """Two prompts of two pictures, from one seed, as a user calls the pipeline."""
    family, checkpoint = FAMILIES[name], tmp_path / "checkpoint"
    family.write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(checkpoint)]) == 0
    flags = [*flags, "--prompt", "old cat", "--noise", "diffusers", "--seed", "7"]
    draw(family, tmp_path, checkpoint, *flags)
    without = dict.fromkeys(("safety_checker", "feature_extractor")) if name == "sd" else {}
    pipeline: Any = family.pipeline.from_pretrained(tmp_path, **without)
    pipeline.set_progress_bar_config(disable=True)
    size = {"max_sequence_length": T5_LENGTH} if name == "sd3" else {}
    theirs = pipeline(
        ["a red bird", "old cat"], negative_prompt=["old cat"] * 2, num_images_per_prompt=2,
        generator=torch.Generator().manual_seed(7), num_inference_steps=STEPS, output_type="pt",
        guidance_scale=2.0, height=family.side, width=family.side, **called, **size,
    ).images  # fmt: skip
    torch.testing.assert_close(drawn[0] / 2 + 0.5, theirs, rtol=0, atol=5e-6)
    assert drawn[0].std() > 0.01


def test_control_images_give_the_pictures_of_sdxls_pipeline(
    drawn: list[torch.Tensor], tmp_path: Path
) -> None:
    SDXL.write(tmp_path)
    control = diffusers.ControlNetModel.from_unet(
        diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "unet"),
        conditioning_embedding_out_channels=(4, 8),
    )
    for parameter in control.parameters():
        if not parameter.count_nonzero():
            torch.nn.init.normal_(parameter)
    control.save_pretrained(tmp_path / "control")
    checkpoint, edges = tmp_path / "checkpoint", tmp_path / "edges.png"
    pixels = torch.randint(256, (8, 8, 3), generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.byte().numpy()).save(edges)
    taken = ["--from", str(tmp_path), "--controlnet", str(tmp_path / "control")]
    assert main(["import", *taken, "--to", str(checkpoint)]) == 0
    draw(SDXL, tmp_path, checkpoint, "--control-image", str(edges))
    pipeline = diffusers.StableDiffusionXLControlNetPipeline.from_pretrained(
        tmp_path, controlnet=control
    )
    pictures = expected(SDXL, pipeline, image=[Image.open(edges)] * 2)
    torch.testing.assert_close(drawn[0] / 2 + 0.5, pictures, rtol=0, atol=1e-6)
    without = expected(SDXL, pipeline, image=[Image.new("RGB", (8, 8))] * 2)
    assert (without - pictures).abs().max() > 0.01
