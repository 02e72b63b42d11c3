"""Input declarations of further diffusers video classes; see also ``token_and_video_inputs``."""

from __future__ import annotations

import functools
from typing import Any

from megatron_pulse.backbone.appended_fields import IMAGE_LATENT, KNOWN_MASK, KNOWN_VIDEO
from model_specs.derived.forwards import (
    Forward,
    cosmos_forward,
    framepack_forward,
    hunyuan_image_forward,
    hunyuan_video15_forward,
    scaled_guidance,
    then,
)
from model_specs.derived.inputs import COMPUTE, Config, Declared, Input, Known, SameInput, Sizes
from model_specs.derived.token_and_video_inputs import (
    GUIDANCE_SCALE,
    THOUSANDTH,
    require_known_frames,
    video,
    wan,
    with_known_frames,
)

_SIGLIP_TOKENS = 729
"""Tokens of a picture of SigLIP at 384 pixels."""
_BYT5_TOKENS = 256
"""Tokens of the glyph encoder's text in HunyuanVideo 1.5."""


def _times(dtype: str = "float32") -> Input:
    return Input("timestep", (), dtype)


def _context(size: Sizes, width: int) -> Input:
    return Input("encoder_hidden_states", (size.text_length, width), field="context")


def _context_mask(size: Sizes) -> Input:
    return Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask")


def _vace(config: Config, size: Sizes) -> Declared:
    """VACE: a second input of masked videos and masks, whose blocks send skips to the others."""
    declared = wan(config, size)
    control = (config.vace_in_channels, size.frames, size.height, size.width)
    inputs = (*declared.inputs, Input("control_hidden_states", control))
    return Declared("hidden_states", "timestep", inputs)


def _skyreels(config: Config, size: Sizes) -> Declared:
    """SkyReels-V2, with one time for all frames; 24 frames a second, where it is told."""
    declared = wan(config, size)
    if not config.inject_sample_info:
        return declared
    fps = SameInput("fps", lambda batch: [1] * batch)
    return Declared("hidden_states", "timestep", (*declared.inputs, fps))


def _hunyuan_video15(config: Config, size: Sizes) -> Declared:
    if config.use_meanflow:
        raise ValueError("use_meanflow: distillation with a second time is unsupported")
    byt5 = (_BYT5_TOKENS, config.text_embed_2_dim)
    frames = with_known_frames(config, size, IMAGE_LATENT, 1, mask_first=False)
    inputs = [
        *(frames if config.task_type == "i2v" else frames[:1]),
        _times(COMPUTE),
        _context(size, config.text_embed_dim),
        _context_mask(size),
        Input("encoder_hidden_states_2", byt5, field="context_byt5"),
        Input("encoder_attention_mask_2", byt5[:1], "int64", "context_byt5_mask"),
    ]
    if config.task_type == "i2v":
        inputs.append(Input("image_embeds", (_SIGLIP_TOKENS, config.image_embed_dim)))
    return Declared("hidden_states", "timestep", tuple(inputs), around=hunyuan_video15_forward)


def _hunyuan_image(config: Config, size: Sizes) -> Declared:
    if config.use_meanflow:
        raise ValueError("use_meanflow: distillation with a second time is unsupported")
    inputs = [
        Input("hidden_states", (config.in_channels, size.height, size.width)),
        _times(COMPUTE),
        _context(size, config.text_embed_dim),
        _context_mask(size),
    ]
    if config.text_embed_2_dim:
        byt5 = (128, config.text_embed_2_dim)
        inputs += [
            Input("encoder_hidden_states_2", byt5, field="context_byt5"),
            Input("encoder_attention_mask_2", byt5[:1], "int64", "context_byt5_mask"),
        ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
    return Declared(
        "hidden_states", "timestep", tuple(inputs),
        patch_size=config.patch_size[0],
        around=then(hunyuan_image_forward, scaled_guidance(GUIDANCE_SCALE)),
    )  # fmt: skip


def _framepack(config: Config, size: Sizes) -> Declared:
    """Framepack: frames behind a first one and 19 earlier ones, in the order of its F1 sampling."""
    needed = ("has_image_proj", "has_clean_x_embedder")
    if missing := [name for name in needed if not getattr(config, name)]:
        raise ValueError(f"{' and '.join(missing)}: set to True, as in published weights")
    sides = (size.height, size.width)
    counts = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
    inputs: list[Input | SameInput] = [
        video(config, size),
        _times(),
        _context(size, config.text_embed_dim),
        _context_mask(size),
        Input("pooled_projections", (config.pooled_projection_dim,), field="pooled"),
        Input("image_embeds", (_SIGLIP_TOKENS, config.image_proj_dim)),
        *(Input(name, (config.in_channels, count, *sides)) for name, count in counts.items()),
    ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
    return Declared(
        "hidden_states", "timestep", tuple(inputs),
        patch_size=config.patch_size,
        around=then(framepack_forward, scaled_guidance(GUIDANCE_SCALE)),
    )  # fmt: skip


def _kandinsky5(config: Config, size: Sizes) -> Declared:
    """Kandinsky 5; with ``known_frames`` the first frames of the latents are given."""
    if config.attention_type != "regular":
        raise ValueError(f"attention_type {config.attention_type!r}: only 'regular' is supported")
    channels, sides = config.in_visual_dim, (size.frames, size.height, size.width)
    inputs: list[Input | SameInput] = [
        Input("hidden_states", (channels, *sides)),
        _times(COMPUTE),
        _context(size, config.in_text_dim),
        Input("pooled_projections", (config.in_text_dim2,), field="pooled"),
    ]
    if size.known_frames:
        if not config.visual_cond:
            raise ValueError("known_frames: visual_cond is false, so the class takes none")
        require_known_frames(size, config.patch_size[0])
        inputs.append(Input(IMAGE_LATENT, (channels, *sides)))
    around = functools.partial(_kandinsky5_forward, num_known=size.known_frames)
    return Declared("hidden_states", "timestep", tuple(inputs), around=around)


def _kandinsky5_forward(module: Any, num_known: int) -> Forward:
    """Kandinsky 5's forward on videos with channels first; positions follow from the sides.

    The first ``num_known`` frames are those of ``image_latent``, without noise, and follow once
    more beside a mask of them. Without any, zeros follow. Their loss has no gradient. The class
    gives its embedding of times fp32 whatever the dtype of the weights.
    """
    forward, embedding = module.forward, module.time_embeddings.in_layer
    embed = embedding.forward
    embedding.forward = lambda times: embed(times.to(embedding.weight.dtype))
    _, down, across = module.config.patch_size

    def call(
        hidden_states: Any, encoder_hidden_states: Any, image_latent: Any = None, **others: Any
    ) -> Any:
        import torch

        _, _, frames, height, width = hidden_states.shape
        noisy = hidden_states[:, :, num_known:]
        if module.config.visual_cond:
            zeros, mask = torch.zeros_like(noisy), torch.zeros_like(hidden_states[:, :1])
            if num_known:
                known, ones = (x[:, :, :num_known] for x in (image_latent, torch.ones_like(mask)))
                hidden_states = torch.cat([known, noisy], 2)
                zeros = torch.cat([known, zeros], 2)
                mask = torch.cat([ones, mask[:, :, num_known:]], 2)
            hidden_states = torch.cat([hidden_states, zeros, mask], 1)
        is_480p = all(480 <= 8 * side <= 854 for side in (height, width))
        predicted = forward(
            hidden_states=hidden_states.permute(0, 2, 3, 4, 1),
            encoder_hidden_states=encoder_hidden_states,
            visual_rope_pos=[torch.arange(n) for n in (frames, height // down, width // across)],
            text_rope_pos=torch.arange(encoder_hidden_states.shape[1]),
            scale_factor=(1.0, 2.0, 2.0) if is_480p else (1.0, 3.16, 3.16),
            return_dict=False,
            **others,
        )
        predicted = predicted.permute(0, 4, 1, 2, 3)
        if not num_known:
            return predicted
        return torch.cat([predicted[:, :, :num_known].detach(), predicted[:, :, num_known:]], 2)

    return call


def _ltx2(config: Config, size: Sizes) -> Declared:
    """LTX-2's video alone: without sound, as with its pipeline's ``isolate_modalities``."""
    if (config.patch_size, config.patch_size_t) != (1, 1):
        raise ValueError("patch_size and patch_size_t other than 1 are unsupported")
    width = config.caption_channels if config.use_prompt_embeddings else config.cross_attention_dim
    inputs = (video(config, size), _times(), _context(size, width), _context_mask(size))
    return Declared("hidden_states", "timestep", inputs, around=_ltx2_forward)


def _ltx2_forward(module: Any) -> Forward:
    """LTX-2's forward on latents, with one silent token that no result depends on."""
    forward, config = module.forward, module.config

    def call(hidden_states: Any, timestep: Any, encoder_hidden_states: Any, **others: Any) -> Any:
        count, _, frames, height, width = hidden_states.shape
        wide = config.use_prompt_embeddings
        of_sound = config.caption_channels if wide else config.audio_cross_attention_dim
        predicted, _ = forward(
            hidden_states=hidden_states.flatten(2).mT,
            audio_hidden_states=hidden_states.new_zeros(count, 1, config.audio_in_channels),
            encoder_hidden_states=encoder_hidden_states,
            audio_encoder_hidden_states=hidden_states.new_zeros(count, 1, of_sound),
            timestep=timestep,
            sigma=timestep,
            num_frames=frames,
            height=height,
            width=width,
            audio_num_frames=1,
            isolate_modalities=True,
            return_dict=False,
            **others,
        )
        return predicted.mT.unflatten(2, (frames, height, width))

    return call


def _sana_video(config: Config, size: Sizes) -> Declared:
    inputs = [
        video(config, size),
        _times(),
        _context(size, config.caption_channels),
        _context_mask(size),
    ]
    around = None
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
        around = scaled_guidance(config.guidance_embeds_scale)
    return Declared("hidden_states", "timestep", tuple(inputs), around=around)


def _allegro(config: Config, size: Sizes) -> Declared:
    def rotary(batch: int) -> Any:
        import torch
        from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

        sides = size.height // config.patch_size, size.width // config.patch_size
        scales = (getattr(config, f"interpolation_scale_{axis}") for axis in "thw")
        *tables, t, h, w = get_3d_rotary_pos_embed_allegro(
            config.attention_head_dim, ((0, 0), sides), sides, size.frames, tuple(scales)
        )
        places = torch.cartesian_prod(t.long(), h.long(), w.long())
        return tuple(tables), tuple(places.T.reshape(3, 1, -1).contiguous())

    inputs = (
        video(config, size),
        _times(),
        _context(size, config.caption_channels),
        _context_mask(size),
        SameInput("image_rotary_emb", rotary),
    )
    return Declared("hidden_states", "timestep", inputs)


def _latte(config: Config, size: Sizes) -> Declared:
    inputs = (video(config, size), _times(), _context(size, config.caption_channels))
    return Declared("hidden_states", "timestep", inputs, patch_size=config.patch_size)


def _easy_animate(config: Config, size: Sizes) -> Declared:
    channels, sides = config.out_channels, (size.frames, size.height, size.width)
    inputs = [
        Input("hidden_states", (channels, *sides)),
        _times(),
        _context(size, config.text_embed_dim),
    ]
    if config.in_channels == 2 * channels + 1:
        inputs += [Input(KNOWN_MASK, (1, *sides)), Input(KNOWN_VIDEO, (channels, *sides))]
    elif config.in_channels != channels:
        raise ValueError(
            f"in_channels {config.in_channels}: only {channels} and {2 * channels + 1} "
            "(inpainting) are supported"
        )
    if config.text_embed_dim_t5:
        t5 = (size.text_length, config.text_embed_dim_t5)
        inputs.append(Input("encoder_hidden_states_t5", t5, field="context_t5"))
    return Declared(
        "hidden_states", "timestep", tuple(inputs),
        patch_size=config.patch_size, around=_easy_animate_forward,
    )  # fmt: skip


def _easy_animate_forward(module: Any) -> Forward:
    """EasyAnimate's forward with known frames as two fields."""
    forward = module.forward

    def call(*, known_mask: Any = None, known_video: Any = None, **others: Any) -> Any:
        import torch

        if known_mask is not None:
            others["inpaint_latents"] = torch.cat([known_mask, known_video], 1)
        return forward(**others, return_dict=False)[0]

    return call


def _cosmos(config: Config, size: Sizes) -> Declared:
    """Cosmos 2 from text; times are its preconditioning's, from 0 to 1."""
    if config.extra_pos_embed_type is not None:
        raise ValueError(
            f"extra_pos_embed_type {config.extra_pos_embed_type!r} is Cosmos 1, whose pipelines "
            "give logarithms of sigma as times: only Cosmos 2 is supported, with None"
        )
    if config.in_channels != config.out_channels or config.img_context_dim_in:
        raise ValueError(
            "classes with known frames (a time for every frame) or pictures' states are unsupported"
        )
    width = config.text_embed_dim
    if config.use_crossattn_projection:
        width = config.crossattn_proj_in_channels
    inputs: list[Input | SameInput] = [video(config, size), _times(), _context(size, width)]
    if size.frames > 1:
        inputs.append(SameInput("fps", lambda batch: 16))
    return Declared("hidden_states", "timestep", tuple(inputs), THOUSANDTH, around=cosmos_forward)


def _motif(config: Config, size: Sizes) -> Declared:
    if config.image_embed_dim:
        raise ValueError("image_embed_dim: a picture's states are unsupported")
    inputs = (
        *with_known_frames(config, size, IMAGE_LATENT, 1, mask_first=False),
        _times(COMPUTE),
        _context(size, config.text_embed_dim),
        _context_mask(size),
    )
    return Declared("hidden_states", "timestep", inputs)


def _i2vgen(config: Config, size: Sizes) -> Declared:
    width, sides = config.cross_attention_dim, (size.frames, size.height, size.width)
    inputs = (
        Input("sample", (config.in_channels, *sides)),
        _times(),
        Input("fps", (), "int64"),
        Input(IMAGE_LATENT, (config.in_channels, *sides)),
        Input("image_embeddings", (width,)),
        _context(size, width),
    )
    return Declared("sample", "timestep", inputs, around=_i2vgen_forward, without_dropout=True)


def _i2vgen_forward(module: Any) -> Forward:
    """I2VGen-XL's forward with the first frame's latents under their field's name."""
    forward = module.forward

    def call(*, image_latent: Any, **others: Any) -> Any:
        return forward(image_latents=image_latent, **others, return_dict=False)[0]

    return call


VIDEOS = {
    "WanVACETransformer3DModel": Known(
        {"frames": 21, "height": 60, "width": 104, "text_length": 512}, _vace
    ),
    "ChronoEditTransformer3DModel": Known(
        {"frames": 2, "height": 90, "width": 160, "text_length": 512}, wan
    ),
    "SkyReelsV2Transformer3DModel": Known(
        {"frames": 25, "height": 68, "width": 120, "text_length": 512}, _skyreels
    ),
    "HunyuanVideo15Transformer3DModel": Known(
        {"frames": 31, "height": 30, "width": 53, "text_length": 1000}, _hunyuan_video15
    ),
    "HunyuanVideoFramepackTransformer3DModel": Known(
        {"frames": 9, "height": 60, "width": 104, "text_length": 256}, _framepack
    ),
    "HunyuanImageTransformer2DModel": Known(
        {"height": 64, "width": 64, "text_length": 1000}, _hunyuan_image
    ),
    "Kandinsky5Transformer3DModel": Known(
        {"frames": 31, "height": 64, "width": 96, "text_length": 256, "known_frames": 0},
        _kandinsky5,
    ),
    "LTX2VideoTransformer3DModel": Known(
        {"frames": 16, "height": 16, "width": 24, "text_length": 1024}, _ltx2
    ),
    "SanaVideoTransformer3DModel": Known(
        {"frames": 21, "height": 60, "width": 104, "text_length": 300}, _sana_video
    ),
    "AllegroTransformer3DModel": Known(
        {"frames": 22, "height": 90, "width": 160, "text_length": 512}, _allegro
    ),
    "LatteTransformer3DModel": Known(
        {"frames": 16, "height": 64, "width": 64, "text_length": 120}, _latte
    ),
    "EasyAnimateTransformer3DModel": Known(
        {"frames": 13, "height": 48, "width": 84, "text_length": 256}, _easy_animate
    ),
    "CosmosTransformer3DModel": Known(
        {"frames": 16, "height": 88, "width": 160, "text_length": 512}, _cosmos
    ),
    "MotifVideoTransformer3DModel": Known(
        {"frames": 31, "height": 92, "width": 160, "text_length": 512}, _motif
    ),
    "I2VGenXLUNet": Known({"frames": 16, "height": 88, "width": 160, "text_length": 77}, _i2vgen),
}
