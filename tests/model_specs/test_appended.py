"""Declared classes that take more channels than they predict: fields of the first layer alone."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from megatron_pulse.backbone.appended_fields import APPENDED
from megatron_pulse.backbone.recorded_sizes import options_at_size
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from megatron_pulse.diffusion.process_flags import FlowGrid
from megatron_pulse.diffusion.sampling import sample
from megatron_pulse.tracing.from_module import module_of, with_weights
from megatron_pulse.tracing.initial_weights.sources import from_module_itself
from model_specs import load_backbone
from model_specs.derived.classes import CLASSES
from tests.cli.small_unet import TINY
from tests.model_specs.chains import build_chain
from tests.tracing.zoo.videos import COGVIDEOX, WAN

LEVELS = {
    "sample_size": 8, "block_out_channels": (32, 32), "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "cross_attention_dim": 16, "num_attention_heads": (2, 2), "num_frames": 2,
    "projection_class_embeddings_input_dim": 24, "addition_time_embed_dim": 8,
}  # fmt: skip
FLUX = {
    "in_channels": 384, "out_channels": 64, "num_layers": 1, "num_single_layers": 1,
    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12,
    "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
HUNYUAN = {
    "in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
    "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
MASKED = ("inpaint_mask", "masked_image")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int], tuple[str, ...], int]] = {
    "sd": ("UNet2DConditionModel", {**TINY, "in_channels": 9}, {"text_length": 5}, MASKED, 1),
    "svd": (
        "UNetSpatioTemporalConditionModel",
        {**LEVELS, "in_channels": 8},
        {},
        ("image_latent",),
        2,
    ),
    "wan": (
        "WanTransformer3DModel",
        {**WAN, "num_layers": 1, "in_channels": 12},
        {"frames": 3, "height": 8, "width": 8, "text_length": 7},
        ("known_mask", "known_video"),
        1,
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        HUNYUAN,
        {"frames": 2, "height": 8, "width": 8, "text_length": 6},
        ("image_latent", "known_mask"),
        1,
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**COGVIDEOX, "num_layers": 1, "in_channels": 8},
        {},
        ("image_latent",),
        2,
    ),
}
"""Class, config, sizes, fields in the order of the pipeline's channels, axis of these."""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", CASES)
def test_appended_fields_are_read_by_one_layer_and_follow_the_sample(name: str) -> None:
    kind, config, sizes, names, axis = CASES[name]
    torch.manual_seed(0)
    given = {key: [*v] if isinstance(v, tuple) else v for key, v in config.items()}
    backbone = load_backbone(f"diffusers:{kind}", {**given, **sizes})
    assert APPENDED & {*backbone.batch_fields} == {*names}
    readers = [layer.name for layer in backbone.layers if APPENDED & {*layer.uses}]
    assert len(readers) == 1 and not backbone.takes_prediction
    assert backbone.input_spec == backbone.output_spec == backbone.sample_spec
    module = getattr(diffusers, kind)(**config).train()
    chain = build_chain(with_weights(backbone, from_module_itself(module)))
    noisy, fields = chain.batch(2)
    joined = torch.cat([noisy, *(fields[each] for each in names)], dim=axis)
    theirs = {
        "context": "encoder_hidden_states", "context_mask": "encoder_attention_mask",
        "pooled": "pooled_projections", "timesteps": "timestep",
        "image_embedding": "encoder_hidden_states",
    }  # fmt: skip
    others = {theirs.get(k, k): v for k, v in fields.items() if k not in APPENDED}
    if "guidance" in others:  # as its pipelines
        others["guidance"] = others["guidance"] * 1000
    sample = "sample" if "UNet" in kind else "hidden_states"
    with torch.no_grad():
        expected = module(**{sample: joined}, **others, return_dict=False)[0]
        assert torch.equal(chain(noisy, fields), expected)
        without = {**fields, names[-1]: torch.zeros_like(fields[names[-1]])}
        assert not torch.equal(chain(noisy, without), expected)


def test_flux_fill_takes_the_mask_s_pixels_as_channels() -> None:
    sizes = {"height": 4, "width": 6, "text_length": 5, "guidance_embeds": True}
    backbone = load_backbone("diffusers:FluxTransformer2DModel", {**FLUX, **sizes})
    shapes = {name: backbone.batch_fields[name].shape for name in MASKED}
    assert shapes == {"inpaint_mask": (64, 4, 6), "masked_image": (16, 4, 6)}
    module = module_of(backbone)
    assert module.x_embedder.in_features == 384 and backbone.input_spec.shape == (16, 4, 6)


def test_other_channels_stay_with_the_sample() -> None:
    """Twice the channels are those of self-conditioning, or of a class of nobody's pipeline."""
    unet = load_backbone("unet-tiny", {"in_channels": "2", "out_channels": "1"})
    assert unet.takes_prediction and not APPENDED & {*unet.batch_fields}
    sizes = {"frames": 1, "height": 4, "width": 4, "text_length": 7}
    wan = load_backbone(
        "diffusers:WanTransformer3DModel", {**WAN, "num_layers": 1, "in_channels": 9, **sizes}
    )
    assert wan.input_spec.shape[0] == 9 and not APPENDED & {*wan.batch_fields}


@pytest.mark.usefixtures("one_rank")
def test_a_video_of_wan_i2v_is_that_of_the_pipeline() -> None:
    """One sampled trajectory with guidance, whose two halves have the same picture."""
    kind, config, sizes, _, _ = CASES["wan"]
    torch.manual_seed(0)
    module = getattr(diffusers, kind)(**config).eval()
    vae = diffusers.AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 2.0, 1.0, 0.5],
    ).eval()  # fmt: skip
    parts = dict.fromkeys(("tokenizer", "text_encoder", "image_encoder", "image_processor"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = diffusers.WanImageToVideoPipeline(
        **parts, vae=vae, scheduler=scheduler, transformer=module
    )
    pipeline.set_progress_bar_config(disable=True)
    image = torch.rand(1, 3, 64, 64) * 2 - 1
    noise, text, null = torch.randn(1, 4, 3, 8, 8), torch.randn(1, 7, 16), torch.randn(1, 7, 16)
    _, known = pipeline.prepare_latents(
        image, 1, 4, 64, 64, 9, torch.float32, torch.device("cpu"), None, noise
    )
    theirs = pipeline(
        image=image / 2 + 0.5, height=64, width=64, num_frames=9, num_inference_steps=3,
        guidance_scale=2.0, latents=noise, prompt_embeds=text, negative_prompt_embeds=null,
        output_type="latent",
    ).frames  # fmt: skip
    given = {key: [*v] if isinstance(v, tuple) else v for key, v in config.items()}
    backbone = load_backbone(f"diffusers:{kind}", {**given, **sizes})
    chain = build_chain(with_weights(backbone, from_module_itself(module)))
    ours = sample(
        lambda x, t, fields: chain(x, {"timesteps": t, **fields}),
        DiffusionProcess(Objective.FLOW, shift=3.0),
        (4, 3, 8, 8),
        1,
        {"context": text, "known_mask": known[:, :4], "known_video": known[:, 4:]},
        num_steps=3,
        guidance_scale=2.0,
        null={"context": null[0]},
        noises=iter([noise]),
        flow_grid=FlowGrid.SCHEDULER,
        progress=False,
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_buckets_of_every_video_class_begin_with_frames() -> None:
    config = {"num_frames": 2, "sample_size": 8}
    sizes = {n: [*k.defaults(config)] for n, k in CLASSES.items() if callable(k.sizes)}
    sizes |= {n: [*k.sizes] for n, k in CLASSES.items() if not callable(k.sizes)}
    videos = {n: order for n, order in sizes.items() if "frames" in order}
    assert len(videos) >= 6
    assert all(order[:3] == ["frames", "height", "width"] for order in videos.values()), videos


def test_another_size_keeps_the_frames_of_buckets() -> None:
    record = {
        "name": "x",
        "options": {**dict.fromkeys(("height", "width", "frames")), "buckets": "5x8x8,1x8x8"},
    }
    assert options_at_size(record, 4, 6) == {"height": "4", "width": "6", "frames": "5"}
