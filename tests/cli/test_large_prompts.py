"""Prompts to samples with classes of video and of large pictures: those of diffusers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.noise import start_noise
from tests.cli.test_prompts import SCALED
from tests.encoders.pipelines import make_pipeline
from tests.encoders.test_videos import MADE

STEPS = 3
HEADS = {"num_attention_heads": 2, "num_layers": 1}
SCHEDULER = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


@dataclass(frozen=True)
class Case:
    """A tiny pipeline: ``denoiser`` with settings, an autoencoder (name in ``MADE``, or class and
    settings), text encoders with their classes, flags of ``pulse sample``, and what the pipeline is
    called with."""

    pipeline: Any
    denoiser: Any
    settings: dict[str, Any]
    vae: str | tuple[Any, dict[str, Any]]
    encoders: tuple[tuple[Any, str], ...]
    latents: tuple[int, ...]
    flags: tuple[str, ...]
    called: dict[str, Any] = field(default_factory=dict)
    packed: Callable[[Any, torch.Tensor], torch.Tensor] = lambda pipeline, noise: noise
    unpacked: Callable[[Any, Any], Any] = lambda pipeline, made: made
    scheduler: Any = SCHEDULER
    atol: float = 2e-6

    def write(self, folder: Path) -> None:
        index: dict[str, Any] = {
            "_class_name": self.pipeline.__name__,
            "transformer": ["diffusers", self.denoiser.__name__],
            "scheduler": ["diffusers", type(self.scheduler).__name__],
        }
        kind, settings = MADE[self.vae] if isinstance(self.vae, str) else self.vae
        index["vae"] = ["diffusers", kind]
        for i, (_, name) in enumerate(self.encoders):
            suffix = f"_{i + 1}" if i else ""
            index[f"text_encoder{suffix}"] = ["transformers", name]
            index[f"tokenizer{suffix}"] = ["transformers", "PreTrainedTokenizerFast"]
        make_pipeline(folder, *(encoder for encoder, _ in self.encoders), **index)
        torch.manual_seed(1)
        getattr(diffusers, kind)(**settings).save_pretrained(folder / "vae")
        self.denoiser(**self.settings).save_pretrained(folder / "transformer")
        self.scheduler.save_pretrained(folder / "scheduler")


def sizes(**given: int) -> tuple[str, ...]:
    return tuple(w for name, size in given.items() for w in ("--option", f"{name}={size}"))


def guided(scale: float, side: int, length: int) -> dict[str, Any]:
    """Arguments of a pipeline's call for square pictures, guided away from a prompt."""
    return {
        "negative_prompt": ["old cat"] * 2, "guidance_scale": scale, "height": side, "width": side,
        "max_sequence_length": length,
    }  # fmt: skip


KL = (
    "AutoencoderKL",
    {
        "norm_num_groups": 4, "block_out_channels": (8, 8), "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "scaling_factor": 0.5,
        "up_block_types": ("UpDecoderBlock2D",) * 2, "shift_factor": 0.1,
    },
)  # fmt: skip
DC: dict[str, Any] = {
    "latent_channels": 4, "attention_head_dim": 2,
    "encoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
    "decoder_block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
    "encoder_block_out_channels": (8, 8, 8), "decoder_block_out_channels": (8, 8, 8),
    "encoder_layers_per_block": (1, 1, 1), "decoder_layers_per_block": (1, 1, 1),
    "encoder_qkv_multiscales": ((), (), (5,)), "decoder_qkv_multiscales": ((), (), (5,)),
    "decoder_norm_types": "rms_norm", "decoder_act_fns": "silu", "scaling_factor": 0.41407,
}  # fmt: skip
NEGATIVE = ("--negative-prompt", "old cat", "--guidance", "2")
CASES = {
    "wan": Case(
        diffusers.WanPipeline,
        diffusers.WanTransformer3DModel,
        {
            **HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 8,
            "freq_dim": 16, "ffn_dim": 24, "rope_max_seq_len": 128,
        },
        "wan",
        (("umt5", "UMT5EncoderModel"),),
        (4, 2, 4, 4),
        (*sizes(frames=2, height=4, width=4, text_length=7), *NEGATIVE),
        {
            "negative_prompt": "old cat", "guidance_scale": 2.0, "num_frames": 5,
            "max_sequence_length": 7, "height": 32, "width": 32,
        },
    ),
    "hunyuan_video": Case(
        diffusers.HunyuanVideoPipeline,
        diffusers.HunyuanVideoTransformer3DModel,
        {
            **HEADS, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1,
            "text_embed_dim": 8, "pooled_projection_dim": 12, "rope_axes_dim": (4, 6, 6),
        },
        "hunyuan",
        ((("llama", 8, 8, 4), "LlamaModel"), (("clip", 12, 8, 3, 77), "CLIPTextModel")),
        (4, 2, 4, 4),
        (*sizes(frames=2, height=4, width=4, text_length=40), "--guidance", "1"),
        {"guidance_scale": 3.5, "num_frames": 5, "max_sequence_length": 40, "height": 32,
         "width": 32},
    ),
    "ltx": Case(
        diffusers.LTXPipeline,
        diffusers.LTXVideoTransformer3DModel,
        {
            **HEADS, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "cross_attention_dim": 32, "caption_channels": 8,
        },
        "ltx",
        (("t5", "T5EncoderModel"),),
        (4, 2, 2, 3),
        (*sizes(frames=2, height=2, width=3, text_length=7), *NEGATIVE),
        {
            "negative_prompt": ["old cat"] * 2, "guidance_scale": 2.0, "num_frames": 9,
            "max_sequence_length": 7, "height": 64, "width": 96,
        },
        packed=lambda pipeline, noise: noise.flatten(2).mT,
        unpacked=lambda pipeline, made: made.mT.unflatten(2, (2, 2, 3)),
    ),
    "cogvideox": Case(
        diffusers.CogVideoXPipeline,
        diffusers.CogVideoXTransformer3DModel,
        {
            **HEADS, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
            "time_embed_dim": 8, "text_embed_dim": 8, "sample_width": 6, "sample_height": 4,
            "sample_frames": 5, "patch_size": 2, "max_text_seq_length": 7,
        },
        "cogvideox",
        (("t5", "T5EncoderModel"),),
        (2, 4, 4, 6),
        NEGATIVE,
        {
            "negative_prompt": ["old cat"] * 2, "guidance_scale": 2.0, "num_frames": 5,
            "max_sequence_length": 7, "height": 32, "width": 48,
        },
        scheduler=diffusers.DDIMScheduler(**SCALED, prediction_type="v_prediction"),
    ),
    "flux2": Case(
        diffusers.Flux2Pipeline,
        diffusers.Flux2Transformer2DModel,
        {
            **HEADS, "attention_head_dim": 16, "in_channels": 16, "num_single_layers": 1,
            "joint_attention_dim": 24, "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        (
            "AutoencoderKLFlux2",
            {
                "norm_num_groups": 4, "block_out_channels": (8, 12), "layers_per_block": 1,
                "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
            },
        ),
        ((("mistral", 8, 8, 31), "Mistral3ForConditionalGeneration"),),
        (16, 2, 3),
        (*sizes(height=2, width=3, text_length=60), "--guidance", "1"),
        {"guidance_scale": 3.5, "max_sequence_length": 60, "height": 8, "width": 12},
        unpacked=lambda pipeline, made: made.mT.unflatten(2, (2, 3)),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    ),
    "qwen_image": Case(
        diffusers.QwenImagePipeline,
        diffusers.QwenImageTransformer2DModel,
        {
            **HEADS, "attention_head_dim": 16, "in_channels": 16, "out_channels": 4,
            "joint_attention_dim": 8, "axes_dims_rope": (4, 6, 6),
        },
        (
            "AutoencoderKLQwenImage",
            {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
             "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
        ),
        (("qwen_vl", "Qwen2_5_VLForConditionalGeneration"),),
        (4, 4, 6),
        (*sizes(height=4, width=6, text_length=80), *NEGATIVE),
        {
            "negative_prompt": ["old cat"] * 2, "true_cfg_scale": 2.0, "height": 32, "width": 48,
        },
        packed=lambda pipeline, noise: pipeline._pack_latents(noise, 2, 4, 4, 6),
        unpacked=lambda pipeline, made: pipeline._unpack_latents(made, 32, 48, 8).squeeze(2),
    ),
    "chroma": Case(
        diffusers.ChromaPipeline,
        diffusers.ChromaTransformer2DModel,
        {
            "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8,
            "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8,
            "approximator_hidden_dim": 16, "approximator_layers": 1,
        },
        KL,
        (("t5", "T5EncoderModel"),),
        (4, 8, 8),
        (*sizes(height=8, width=8, text_length=7), *NEGATIVE),
        guided(2.0, 16, 7),
        packed=lambda pipeline, noise: pipeline._pack_latents(noise, 2, 4, 8, 8),
        unpacked=lambda pipeline, made: pipeline._unpack_latents(made, 16, 16, 2),
        atol=2e-5,  # its thousandfold times, once divided and once multiplied
    ),
    "aura_flow": Case(
        diffusers.AuraFlowPipeline,
        diffusers.AuraFlowTransformer2DModel,
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
            "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
            "joint_attention_dim": 8, "caption_projection_dim": 16, "out_channels": 4,
            "pos_embed_max_size": 16,
        },
        KL,
        (("umt5", "UMT5EncoderModel"),),
        (4, 8, 8),
        (*sizes(height=8, width=8, text_length=7), *NEGATIVE),
        guided(2.0, 16, 7),
    ),
    "mochi": Case(
        diffusers.MochiPipeline,
        diffusers.MochiTransformer3DModel,
        {
            **HEADS, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4,
            "pooled_projection_dim": 16, "text_embed_dim": 8, "time_embed_dim": 8,
            "max_sequence_length": 7, "patch_size": 2,
        },
        "mochi",
        (("t5", "T5EncoderModel"),),
        (4, 2, 4, 6),
        (*sizes(frames=2, height=4, width=6), *NEGATIVE),
        {
            "negative_prompt": ["old cat"] * 2, "guidance_scale": 2.0, "num_frames": 7,
            "max_sequence_length": 7, "height": 32, "width": 48,
        },
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    ),
    "lumina2": Case(
        diffusers.Lumina2Pipeline,
        diffusers.Lumina2Transformer2DModel,
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1,
            "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2,
            "multiple_of": 16, "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 16, 16),
            "cap_feat_dim": 8,
        },
        KL,
        (("gemma2", "Gemma2Model"),),
        (4, 8, 8),
        (*sizes(height=8, width=8, text_length=40), *NEGATIVE),
        guided(2.0, 16, 40),
    ),
    "z_image": Case(
        diffusers.ZImagePipeline,
        diffusers.ZImageTransformer2DModel,
        {
            "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2,
            "n_kv_heads": 2, "cap_feat_dim": 8, "axes_dims": [4, 6, 6], "axes_lens": [80, 16, 16],
        },
        KL,
        (("qwen3", "Qwen3Model"),),
        (4, 8, 8),
        # The pipeline adds the difference of the predictions to the conditional one.
        (*sizes(height=8, width=8, text_length=40), *NEGATIVE[:2], "--guidance", "2.5"),
        guided(1.5, 16, 40),
        atol=1e-5,
    ),
    "sana": Case(
        diffusers.SanaPipeline,
        diffusers.SanaTransformer2DModel,
        {
            "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_attention_heads": 2, "attention_head_dim": 4, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 8,
            "sample_size": 8,
        },
        ("AutoencoderDC", DC),
        (("gemma2", "Gemma2Model"),),
        (4, 8, 8),
        (*sizes(height=8, width=8, text_length=20), *NEGATIVE),
        {
            "negative_prompt": ["old cat"] * 2, "guidance_scale": 2.0, "height": 32, "width": 32,
            "max_sequence_length": 20, "use_resolution_binning": False, "clean_caption": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prompts_give_the_samples_of_the_pipeline(name: str, tmp_path: Path) -> None:
    case, checkpoint = CASES[name], tmp_path / "checkpoint"
    case.write(tmp_path)
    assert main(["import", "--from", str(tmp_path), "--to", str(checkpoint)]) == 0
    tensors = tmp_path / "samples.safetensors"
    assert main([
        "sample", "--load", str(checkpoint), "--raw", "--prompt", "a red bird", "--per-class", "2",
        "--encoders", str(tmp_path), "--steps", str(STEPS), *case.flags, "-o", str(tensors),
    ]) == 0  # fmt: skip
    ours = load_file(tensors)["samples"]
    pipeline = case.pipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    noise = start_noise(0, range(2), case.latents)
    made = pipeline(
        prompt=["a red bird"] * 2, num_inference_steps=STEPS, output_type="latent",
        latents=case.packed(pipeline, noise), **case.called,
    )  # fmt: skip
    theirs = case.unpacked(pipeline, getattr(made, "frames", getattr(made, "images", None)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=case.atol)
    assert ours.std() > 0.1
