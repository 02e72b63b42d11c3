"""Samples of declared classes are those of diffusers' pipelines, from the same noise and states.

Parts of a pipeline that encode are replaced by what they would give; tests of encoders compare
those. Pictures and videos stay latents.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from PIL import Image
from torch import Tensor

from megatron_pulse.diffusion.process_flags import Objective
from megatron_pulse.diffusion.sampling import sample
from megatron_pulse.diffusion.sampling_rules import NO_RULES, SampleSize
from megatron_pulse.diffusion.scheduler_import import process_of_scheduler
from model_specs.common.sampling_rules import BY_CLASS
from model_specs.derived.classes import CLASSES
from model_specs.derived.inputs import Input, nested
from tests.cli.small_unet import TINY as UNET
from tests.encoders.test_videos import MADE
from tests.tracing.zoo.declared import PICTURE, TINY, VIDEO

type Given = Mapping[str, Tensor]
type Pair = tuple[Tensor, Tensor]

STEPS, SCALE = 3, 2.0
LTX_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1,
    "base_image_seq_len": 1024, "max_image_seq_len": 4096,
}  # fmt: skip
LTX = TINY["ltx_known"].config
COG = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "time_embed_dim": 16, "text_embed_dim": 16, "num_layers": 2, "sample_width": 8,
    "sample_height": 6, "sample_frames": 9, "max_text_seq_length": 6,
    "use_rotary_positional_embeddings": True,
}  # fmt: skip
randn = torch.randn


@dataclass(frozen=True)
class Ours:
    """A class with the inputs that are declared for it, and its scheduler's process."""

    module: Any
    scheduler: Any
    sizes: Mapping[str, int]

    def draw(
        self,
        noise: Tensor,
        fields: Given,
        null: Given,
        num_steps: int = STEPS,
        apart: bool = False,
        inverted: bool = False,
    ) -> Tensor:
        """Samples from ``noise``, guided away from ``null``; ``apart``: in passes of one row."""
        kind = type(self.module).__name__
        said = CLASSES[kind].declared(self.module.config, self.sizes)
        module = said.wrap(copy.deepcopy(self.module))
        rules = BY_CLASS.get(kind, NO_RULES)

        def predict(x: Tensor, timesteps: Tensor, given: Given) -> Tensor:
            if apart and len(x) > 1:
                rows = [slice(i, i + 1) for i in range(len(x))]
                parts = [
                    predict(x[i], timesteps[i], {n: v[i] for n, v in given.items()}) for i in rows
                ]
                return torch.cat(parts)
            known = {said.sample: x, said.timestep: timesteps * said.timestep_scale}
            pairs = [
                (i.path, i.value(len(x)) if not isinstance(i, Input) else known[i.path]
                 if i.path in known else given[i.field or i.path])
                for i in said.inputs
            ]  # fmt: skip
            found = module(**nested(pairs))
            return found if isinstance(found, Tensor) else found[0]

        config = {**self.scheduler.config, "_class_name": type(self.scheduler).__name__}
        process, shape = process_of_scheduler(config, inverted=inverted), tuple(noise.shape[1:])
        *frames, height, width = shape[1:]
        places = (height // said.patch_size) * (width // said.patch_size)
        size = SampleSize(shape, math.prod(frames) * places, num_steps)
        is_flow = process.objective == Objective.FLOW
        return sample(
            predict, rules.shifted(process, size), shape, len(noise), fields, num_steps,
            guidance_scale=SCALE, null=null, noises=iter([noise]), progress=False, rules=rules,
            known_frames=self.sizes.get("known_frames", 0),
            **({"flow_grid": rules.flow_grid} if is_flow else {}),
        )  # fmt: skip


def ours_of(
    name: str, scheduler: Any, sizes: Mapping[str, int] = VIDEO, **changes: Any
) -> tuple[Ours, Any]:
    """A tiny class (a name in ``TINY``, or a class's own), and the module itself."""
    tiny = TINY.get(name)
    kind, config = (name, {}) if tiny is None else (tiny.kind, tiny.config)
    module = getattr(diffusers, kind)(**{**config, **changes}).eval()
    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return Ours(module, scheduler, sizes), module


def flow(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**settings)


def made(kind: Any, parts: Mapping[str, Any], **stand_ins: Any) -> Any:
    """A pipeline of ``parts``, None for all others; ``stand_ins`` are attributes set on it."""
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    pipeline = kind(**{**{n: None for n in names if n not in ("args", "kwargs")}, **parts})
    pipeline.set_progress_bar_config(disable=True)
    for name, value in stand_ins.items():
        setattr(pipeline, name, value)
    return pipeline


def asked(side: int = 64, width: int | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of most pipelines' calls."""
    return {
        "height": side, "width": width or side, "num_inference_steps": STEPS,
        "guidance_scale": SCALE, "output_type": "latent", **more,
    }  # fmt: skip


def texts(width: int = 16, length: int = 6) -> Pair:
    return randn(1, length, width), randn(1, length, width)


def embeds(text: Tensor, null: Tensor, name: str = "prompt_embeds") -> dict[str, Tensor]:
    return {name: text, f"negative_{name}": null}


def masked(ones: int, length: int = 6) -> Tensor:
    return (torch.arange(length)[None] < ones).long()


def wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(**MADE["wan"][1]).eval()


def first_frame(latent: Tensor, frames: int) -> Tensor:
    """``image_latent``: the first frame's, then zeros."""
    count, channels, _, *sides = latent.shape
    return torch.cat([latent, latent.new_zeros(count, channels, frames - 1, *sides)], 2)


def skyreels() -> Pair:
    ours, module = ours_of("skyreels", flow(shift=8.0), inject_sample_info=False)
    noise, (text, null) = randn(1, 4, 3, 8, 8), texts()
    pipeline = made(
        diffusers.SkyReelsV2Pipeline, {"transformer": module, "scheduler": ours.scheduler}
    )
    theirs = pipeline(**asked(num_frames=9, latents=noise, **embeds(text, null))).frames
    return theirs, ours.draw(noise, {"context": text}, {"context": null})


def skyreels_image() -> Pair:
    more = {"inject_sample_info": False, "in_channels": 12, "image_dim": 8, "added_kv_proj_dim": 24}
    ours, module = ours_of("skyreels", flow(shift=5.0), **more)
    noise, (text, null), states = randn(1, 4, 3, 8, 8), texts(), randn(1, 257, 8)
    pipeline = made(
        diffusers.SkyReelsV2ImageToVideoPipeline,
        {"transformer": module, "scheduler": ours.scheduler, "vae": wan_vae()},
        encode_image=lambda *given: states,
    )
    picture = torch.rand(1, 3, 64, 64)
    device = torch.device("cpu")
    _, known = pipeline.prepare_latents(
        2 * picture - 1, 1, 4, 64, 64, 9, torch.float32, device, None, noise
    )
    call = asked(num_frames=9, latents=noise, **embeds(text, null))
    fields = {
        "context": text, "encoder_hidden_states_image": states,
        "known_mask": known[:, :4], "known_video": known[:, 4:],
    }  # fmt: skip
    return pipeline(image=picture, **call).frames, ours.draw(noise, fields, {"context": null})


def vace() -> Pair:
    ours, module = ours_of("vace", flow(shift=3.0), vace_in_channels=2 * 4 + 64)
    noise, (text, null) = randn(1, 4, 3, 8, 8), texts()
    parts = {"transformer": module, "scheduler": ours.scheduler, "vae": wan_vae()}
    pipeline = made(diffusers.WanVACEPipeline, parts)
    given = pipeline.preprocess_conditions(None, None, None, 1, 64, 64, 9, torch.float32, "cpu")
    videos = pipeline.prepare_video_latents(*given, None, "cpu")
    control = torch.cat([videos, pipeline.prepare_masks(*given[1:], None)], 1)
    theirs = pipeline(**asked(num_frames=9, latents=noise, **embeds(text, null))).frames
    fields = {"context": text, "control_hidden_states": control}
    return theirs, ours.draw(noise, fields, {"context": null})


def wan_5b() -> Pair:
    ours, module = ours_of("wan_5b", flow(shift=5.0))
    noise, (text, null) = randn(1, 4, 3, 8, 8), texts()
    parts = {"transformer": module, "scheduler": ours.scheduler, "expand_timesteps": True}
    pipeline = made(diffusers.WanPipeline, parts)
    theirs = pipeline(**asked(num_frames=9, latents=noise, **embeds(text, null))).frames
    return theirs, ours.draw(noise, {"context": text}, {"context": null})


def wan_5b_image() -> Pair:
    ours, module = ours_of("wan_5b", flow(shift=5.0), {**VIDEO, "known_frames": 1})
    noise, (text, null) = randn(1, 4, 3, 8, 8), texts()
    parts = {"transformer": module, "scheduler": ours.scheduler, "vae": wan_vae()}
    pipeline = made(diffusers.WanImageToVideoPipeline, {**parts, "expand_timesteps": True})
    picture = torch.rand(1, 3, 64, 64)
    device = torch.device("cpu")
    _, known, _ = pipeline.prepare_latents(
        2 * picture - 1, 1, 4, 64, 64, 9, torch.float32, device, None, noise
    )
    call = asked(num_frames=9, latents=noise, **embeds(text, null))
    fields = {"context": text, "image_latent": first_frame(known, 3)}
    return pipeline(image=picture, **call).frames, ours.draw(noise, fields, {"context": null})


def glyphed(
    num_glyph_tokens: int, null_has_glyphs: bool = False
) -> tuple[dict[str, Tensor], Given, Given]:
    """Arguments of HunyuanVideo 1.5 and HunyuanImage, and our fields and null values."""
    given, found = dict[str, Tensor](), []
    for prefix, kept, glyphs in (("", 5, 9), ("negative_", 3, 9 * null_has_glyphs)):
        text, states = randn(1, 6, 16), randn(1, num_glyph_tokens, 12)
        masks = masked(kept), masked(glyphs, num_glyph_tokens)
        given |= {
            f"{prefix}prompt_embeds": text, f"{prefix}prompt_embeds_mask": masks[0],
            f"{prefix}prompt_embeds_2": states, f"{prefix}prompt_embeds_mask_2": masks[1],
        }  # fmt: skip
        found.append(
            {
                "context": text, "context_mask": masks[0],
                "context_byt5": states, "context_byt5_mask": masks[1],
            }
        )  # fmt: skip
    return given, found[0], found[1]


class Rates:
    """Rates of an autoencoder that pipelines read, in place of one."""

    temporal_compression_ratio, spatial_compression_ratio = 4, 16
    dtype, latents_mean, latents_std = torch.float32, torch.zeros(8), torch.ones(8)
    config = SimpleNamespace(
        latent_channels=4, scaling_factor=1.0, mel_bins=4, temporal_compression_ratio=4
    )


def hunyuan_video15(task: str) -> Pair:
    ours, module = ours_of("hunyuan_video15", flow(shift=7.0), task_type=task)
    noise, (given, fields, null) = randn(1, 4, 3, 8, 8), glyphed(256)
    guider = diffusers.guiders.ClassifierFreeGuidance(guidance_scale=SCALE)
    parts = {"transformer": module, "scheduler": ours.scheduler, "vae": Rates(), "guider": guider}
    call = asked(128, num_frames=9, latents=noise, **given)
    del call["guidance_scale"]
    if task == "t2v":
        pipeline = made(diffusers.HunyuanVideo15Pipeline, parts)
        return pipeline(**call).frames, ours.draw(noise, fields, null)
    del call["height"], call["width"]
    states, latent = randn(1, 729, 12), randn(1, 4, 1, 8, 8)
    pipeline = made(
        diffusers.HunyuanVideo15ImageToVideoPipeline, parts,
        encode_image=lambda **given: states, _get_image_latents=lambda **given: latent,
    )  # fmt: skip
    mask = first_frame(torch.ones(1, 1, 1, 8, 8), 3)
    more = {"image_embeds": states, "image_latent": first_frame(latent, 3), "known_mask": mask}
    theirs = pipeline(image=Image.new("RGB", (128, 128)), **call).frames
    return theirs, ours.draw(noise, {**fields, **more}, null)


def ltx2() -> Pair:
    """Without sound: the pipeline's call isolates modalities here, which it does not itself."""
    sizes = {**VIDEO, "height": 2, "width": 2}
    ours, module = ours_of("ltx2", flow(**LTX_SCHEDULER), sizes)
    noise, (text, null), mask = randn(1, 8, 3, 2, 2), texts(), masked(4)
    whole = module.forward
    pipeline = made(
        diffusers.LTX2Pipeline,
        {"transformer": module, "scheduler": ours.scheduler},
        vae=Rates(),
        audio_vae=Rates(),
        connectors=lambda states, mask, padding_side: (states, states, mask),
    )
    alone = dict.fromkeys(("stg_scale", "guidance_rescale", "audio_stg_scale"), 0.0)
    alone |= dict.fromkeys(("modality_scale", "audio_modality_scale"), 1.0)
    call = asked(
        num_frames=17, latents=noise.flatten(2).mT, audio_latents=randn(1, 18, 8), **alone,
        audio_guidance_rescale=0.0, **embeds(text, null),
        **embeds(mask, mask, "prompt_attention_mask"),
    )  # fmt: skip
    isolated = {"isolate_modalities": True}
    with patch.object(module, "forward", lambda **given: whole(**{**given, **isolated})):
        theirs = pipeline(**call).frames
    fields = {"context": text, "context_mask": mask}
    return theirs.view(noise.shape), ours.draw(noise, fields, {"context": null})


def ltx(known: int) -> Pair:
    sizes = {**VIDEO, "height": 4, "width": 6, "known_frames": known}
    ours, module = ours_of("ltx_known", flow(**LTX_SCHEDULER), sizes)
    noise, (text, null), mask = randn(1, 8, 3, 4, 6), texts(), masked(4)
    kind = diffusers.LTXImageToVideoPipeline if known else diffusers.LTXPipeline
    pipeline = made(kind, {"transformer": module, "scheduler": ours.scheduler})
    call = asked(
        128, 192, num_frames=17, latents=noise.flatten(2).mT, **embeds(text, null),
        **embeds(mask, mask, "prompt_attention_mask"),
    )  # fmt: skip
    fields = {"context": text, "context_mask": mask}
    if known:
        call["image"], fields["image_latent"] = None, first_frame(noise[:, :, :1], 3)
        noise = torch.cat([randn(1, 8, 1, 4, 6), noise[:, :, 1:]], 2)
    return pipeline(**call).frames.mT.view(noise.shape), ours.draw(noise, fields, {"context": null})


def cogvideox(snr_shift: float, from_image: bool, **changes: Any) -> Pair:
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing",
        snr_shift_scale=snr_shift,
    )  # fmt: skip
    channels = {"in_channels": 8} if from_image else {}
    ours, module = ours_of(
        "CogVideoXTransformer3DModel", scheduler, {}, **{**COG, **changes, **channels}
    )
    frames = 4 if "patch_size_t" in changes else 3
    noise, (text, null) = randn(1, frames, 4, 6, 8), texts()
    vae = diffusers.AutoencoderKLCogVideoX(**MADE["cogvideox"][1], invert_scale_latents=True).eval()
    kind = diffusers.CogVideoXPipeline
    fields, call = {"context": text}, asked(48, num_frames=9, latents=noise, **embeds(text, null))
    if from_image:
        kind = diffusers.CogVideoXImageToVideoPipeline
        call |= {"image": torch.rand(1, 3, 48, 64), "generator": torch.Generator().manual_seed(1)}
        fields["ofs"] = torch.full((1,), 2.0)
    pipeline = made(kind, {"transformer": module, "scheduler": scheduler, "vae": vae})
    call["width"] = 64
    if from_image:
        generator, num_pixels = torch.Generator().manual_seed(1), 4 * frames - 3
        _, fields["image_latent"] = pipeline.prepare_latents(
            2 * call["image"] - 1, 1, 4, num_pixels, 48, 64, torch.float32, "cpu", generator, noise
        )
    return pipeline(**call).frames, ours.draw(noise, fields, {"context": null})


def kandinsky5(known: int) -> Pair:
    """In passes of one row, as the class rounds queries and keys to bf16."""
    sizes = {**VIDEO, "frames": 8, "known_frames": known}
    ours, module = ours_of("kandinsky5", flow(shift=5.0), sizes)
    noise, latent = randn(1, 4, 8, 8, 8), randn(1, 4, 1, 8, 8)
    (text, null), pooled = texts(), (randn(1, 8), randn(1, 8))
    kind = diffusers.Kandinsky5I2VPipeline if known else diffusers.Kandinsky5T2VPipeline
    pipeline = made(kind, {"transformer": module, "scheduler": ours.scheduler})
    lengths = torch.tensor([0, 6], dtype=torch.int32)
    noisy = torch.cat([latent, noise[:, :, 1:]], 2) if known else noise
    image = first_frame(latent, 8) * known
    mask = first_frame(torch.full((1, 1, 1, 8, 8), float(known)), 8)
    call = asked(
        num_frames=29, latents=torch.cat([noisy, image, mask], 1).permute(0, 2, 3, 4, 1),
        **embeds(text, null, "prompt_embeds_qwen"), **embeds(*pooled, "prompt_embeds_clip"),
        **embeds(lengths, lengths, "prompt_cu_seqlens"),
    )  # fmt: skip
    if known:
        call["image"] = Image.new("RGB", (64, 64))
    theirs = pipeline(**call).frames.permute(0, 4, 1, 2, 3)
    fields = {"context": text, "pooled": pooled[0], "image_latent": image}
    nulls = {"context": null, "pooled": pooled[1]}
    return theirs, ours.draw(noise, fields, nulls, apart=True)


def hidream() -> Pair:
    ours, module = ours_of("hidream", flow(shift=3.0), PICTURE)
    noise, t5, pooled = randn(1, 4, 8, 8), texts(), (randn(1, 8), randn(1, 8))
    llama = randn(3, 1, 6, 12), randn(3, 1, 6, 12)
    parts = {"transformer": module, "scheduler": ours.scheduler}
    pipeline = made(diffusers.HiDreamImagePipeline, parts, default_sample_size=8)
    call = asked(
        latents=noise, **embeds(*t5, "prompt_embeds_t5"), **embeds(*llama, "prompt_embeds_llama3"),
        **embeds(*pooled, "pooled_prompt_embeds"),
    )  # fmt: skip
    fields, null = (
        {"context_t5": t5[i], "context": llama[i].transpose(0, 1), "pooled": pooled[i]}
        for i in (0, 1)
    )
    return pipeline(**call).images, ours.draw(noise, fields, null)


def kolors() -> Pair:
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.014, steps_offset=1,
        num_train_timesteps=1100, clip_sample=False,
    )  # fmt: skip
    ours, module = ours_of(
        "UNet2DConditionModel", scheduler, PICTURE, **UNET, encoder_hid_dim=12,
        encoder_hid_dim_type="text_proj", addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 10,
    )  # fmt: skip
    noise, (text, null) = randn(1, module.config.in_channels, 8, 8), texts(12)
    pooled = randn(1, 10), randn(1, 10)
    pipeline = made(
        diffusers.KolorsPipeline,
        {"unet": module, "scheduler": scheduler, "force_zeros_for_empty_prompt": False},
        text_encoder=SimpleNamespace(config=SimpleNamespace(hidden_size=10)),
    )
    call = asked(
        latents=noise, **embeds(text, null), **embeds(*pooled, "pooled_prompt_embeds")
    )  # fmt: skip
    ids = torch.tensor([[64.0, 64, 0, 0, 64, 64]])
    fields = {"context": text, "pooled": pooled[0], "time_ids": ids}
    return pipeline(**call).images, ours.draw(noise, fields, {"context": null, "pooled": pooled[1]})


def framepack(scheduler: Any) -> Pair:
    """A section behind a first frame."""
    ours, module = ours_of("framepack", scheduler)
    noise, latent, states = randn(1, 4, 3, 8, 8), randn(1, 4, 1, 8, 8), randn(1, 729, 12)
    (text, null), pooled, mask = texts(), (randn(1, 8), randn(1, 8)), masked(4)
    pipeline = made(
        diffusers.HunyuanVideoFramepackPipeline,
        {"transformer": module, "scheduler": scheduler, "vae": Rates()},
        vae_scale_factor_spatial=8,
        encode_image=lambda *given, **more: states,
        prepare_latents=lambda *given, **more: noise,
        prepare_image_latents=lambda *given, **more: latent,
    )
    call = asked(
        num_frames=9, latent_window_size=3, true_cfg_scale=SCALE, sampling_type="vanilla",
        image=Image.new("RGB", (64, 64)), **embeds(text, null),
        **embeds(*pooled, "pooled_prompt_embeds"), **embeds(mask, mask, "prompt_attention_mask"),
    )  # fmt: skip
    theirs = pipeline(**{**call, "guidance_scale": 6.0}).frames[-1]
    fields = {
        "context": text, "context_mask": mask, "pooled": pooled[0], "image_embeds": states,
        "guidance": torch.full((1,), 6.0), "latents_clean": torch.cat([latent, latent], 2),
        "latents_history_2x": torch.zeros(1, 4, 2, 8, 8),
        "latents_history_4x": torch.zeros(1, 4, 16, 8, 8),
    }  # fmt: skip
    found = ours.draw(noise, fields, {"context": null, "pooled": pooled[1]})
    return theirs[None, :, -3:] if theirs.dim() == 4 else theirs[:, :, -3:], found


def cosmos2() -> Pair:
    """With a stand-in for torchvision and for the check of prompts, which are not installed."""
    from diffusers.models.transformers import transformer_cosmos

    ours, module = ours_of("cosmos", flow(use_karras_sigmas=True), {**VIDEO, "frames": 1})
    noise, (text, null) = randn(1, 4, 1, 8, 8), texts()
    checker = type("Checker", (), {"to": lambda self, device: self})()
    pipelines = importlib.import_module("diffusers.pipelines.cosmos.pipeline_cosmos2_text2image")
    functional = SimpleNamespace(resize=lambda mask, size, interpolation: mask[..., :8, :8])
    vision = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST=None))
    parts = {"transformer": module, "scheduler": ours.scheduler, "safety_checker": checker}
    parts |= dict.fromkeys(("text_encoder", "tokenizer", "vae"))
    with (
        patch.object(pipelines, "CosmosSafetyChecker", object),
        patch.object(transformer_cosmos, "transforms", vision, create=True),
    ):
        pipeline = made(diffusers.Cosmos2TextToImagePipeline, parts)
        theirs = pipeline(**asked(latents=noise, **embeds(text, null))).images
    return theirs, ours.draw(noise, {"context": text}, {"context": null})[:, :, 0]


def omnigen() -> Pair:
    """With a stand-in for its processor, whose tokenizer and torchvision are not there."""
    from diffusers.pipelines.omnigen.processor_omnigen import OmniGenCollator

    tiny = TINY["omnigen"]
    scheduler = flow(invert_sigmas=True, num_train_timesteps=1)
    ours, module = ours_of("omnigen", scheduler, tiny.sizes)
    noise, collator, tokens = randn(1, 4, 8, 8), OmniGenCollator(), [16, 16]
    mask = torch.stack([torch.ones(6), torch.arange(6) >= 2]).long()
    ids = torch.randint(1, 30, (2, 6)) * mask
    processed = {
        "input_ids": ids, "attention_mask": collator.create_mask(mask, tokens)[0],
        "position_ids": collator.create_position(mask, tokens), "input_pixel_values": [],
        "input_image_sizes": {},
    }  # fmt: skip
    processor = type(
        "Processor", (), {"max_image_size": 1024, "__call__": lambda *given, **more: {**processed}}
    )
    pipelines = importlib.import_module("diffusers.pipelines.omnigen.pipeline_omnigen")
    with patch.object(
        pipelines, "OmniGenMultiModalProcessor", lambda *given, **more: processor(), create=True
    ):
        pipeline = made(
            diffusers.OmniGenPipeline,
            {"transformer": module, "scheduler": scheduler},
            encode_input_images=lambda *given, **more: [],
        )
    theirs = pipeline(prompt=["a bird"], **asked(latents=noise)).images
    fields, null = ({"context": ids[i : i + 1], "context_mask": mask[i : i + 1]} for i in (0, 1))
    return theirs, ours.draw(noise, fields, null, inverted=True)


def cogview4() -> Pair:
    scheduler = flow(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    ours, module = ours_of("cogview4", scheduler, {**PICTURE, "width": 12, "text_length": 16})
    noise, (text, null) = randn(1, 4, 8, 12), texts(16, 16)
    parts = {"transformer": module, "scheduler": scheduler}
    pipeline = made(diffusers.CogView4Pipeline, parts)
    theirs = pipeline(**asked(64, 96, latents=noise, **embeds(text, null))).images
    size = torch.tensor([[64.0, 96.0]])
    fields = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(1, 2)}
    return theirs, ours.draw(noise, {"context": text, **fields}, {"context": null})


def hunyuan_image() -> Pair:
    """In 8 steps, of which the last two are projected."""
    ours, module = ours_of("hunyuan_image", flow(shift=5.0), PICTURE, guidance_embeds=False)
    noise, (given, fields, null) = randn(1, 4, 8, 8), glyphed(128)
    mixed = importlib.import_module("diffusers.guiders.adaptive_projected_guidance_mix")
    guider = mixed.AdaptiveProjectedMixGuidance(guidance_scale=SCALE)
    parts = {"transformer": module, "scheduler": ours.scheduler, "guider": guider}
    pipeline = made(diffusers.HunyuanImagePipeline, parts)
    call = {**asked(256, latents=noise, **given), "num_inference_steps": 8}
    del call["guidance_scale"]
    return pipeline(**call).images, ours.draw(noise, fields, null, num_steps=8)


def lumina2() -> Pair:
    """A picture that is not square, whose shift its pipeline takes from its channels."""
    scheduler = flow(use_dynamic_shifting=True)
    ours, module = ours_of("lumina2", scheduler, {**PICTURE, "width": 12})
    noise, (text, null), mask = randn(1, 4, 8, 12), texts(), masked(4)
    pipeline = made(diffusers.Lumina2Pipeline, {"transformer": module, "scheduler": scheduler})
    call = asked(
        64, 96, latents=noise, **embeds(text, null), **embeds(mask, mask, "prompt_attention_mask")
    )
    fields = {"context": text, "context_mask": mask}
    return pipeline(**call).images, ours.draw(noise, fields, {"context": null})


_PATCHED = {"patch_size_t": 2, "patch_bias": False}
PAIRS: dict[str, Callable[[], Pair]] = {
    "skyreels": skyreels,
    "skyreels from an image": skyreels_image,
    "vace": vace,
    "wan 5b": wan_5b,
    "wan 5b from an image": wan_5b_image,
    "hunyuan video 1.5": lambda: hunyuan_video15("t2v"),
    "hunyuan video 1.5 from an image": lambda: hunyuan_video15("i2v"),
    "ltx": lambda: ltx(0),
    "ltx from an image": lambda: ltx(1),
    "ltx2": ltx2,
    "cogvideox 2b": lambda: cogvideox(3.0, False),
    "cogvideox 1.5": lambda: cogvideox(1.0, False, **_PATCHED),
    "cogvideox 1.5 from an image": lambda: cogvideox(1.0, True, ofs_embed_dim=16, **_PATCHED),
    "kandinsky5": lambda: kandinsky5(0),
    "kandinsky5 from an image": lambda: kandinsky5(1),
    "hidream": hidream,
    "kolors": kolors,
    "framepack": lambda: framepack(flow(shift=7.0)),
    "framepack, shift at its bound": lambda: framepack(
        flow(use_dynamic_shifting=True, base_shift=3.0, max_shift=4.0)
    ),
    "cosmos2": cosmos2,
    "omnigen": omnigen,
    "cogview4": cogview4,
    "hunyuan image": hunyuan_image,
    "lumina2": lumina2,
}


@pytest.mark.parametrize("name", PAIRS)
def test_samples_are_those_of_the_pipeline(name: str) -> None:
    torch.manual_seed(1)
    theirs, ours = PAIRS[name]()
    assert theirs.shape == ours.shape
    assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())
