"""Input declarations of diffusers classes with packed tokens or video; see also ``classes``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_pulse.backbone.appended_fields import (
    IMAGE_LATENT,
    INPAINT_MASK,
    KNOWN_MASK,
    KNOWN_VIDEO,
    MASKED_IMAGE,
)
from model_specs.derived.forwards import reversed_flow, scaled_guidance
from model_specs.derived.inputs import Around, Config, Declared, Input, Known, SameInput, Sizes
from model_specs.derived.references import NO_REFERENCE, repeated, shifted, with_reference
from model_specs.derived.two_times import ltx_with_given_frames, with_given_frames

THOUSANDTH = 1e-3
"""Timestep scale of classes with times from 0 to 1."""


def packed(pack: Callable[[Any], Any], unpack: Callable[[Any, Any], Any]) -> Around:
    """Wrapper of a token module's forward that takes and returns latents.

    ``unpack`` also gets the shape of the latents.
    """

    def around(module: Any) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)
        def call(hidden_states: Any, **others: Any) -> Any:
            (predicted,) = forward(hidden_states=pack(hidden_states), **others, return_dict=False)
            return unpack(predicted, hidden_states.shape)

        return call

    return around


_FLUX_PIXELS = 8 * 8
"""Pixels of a position of FLUX.1's latents."""
SIDE = 2
"""Side of the square of latents that forms one Flux token."""


def squares(size: Sizes) -> tuple[Around, int, int]:
    """Wrapper that makes one token of each 2 x 2 square of latents, and the sides in tokens."""
    height, width = size.height // SIDE, size.width // SIDE
    if (height * SIDE, width * SIDE) != (size.height, size.width):
        raise ValueError(
            f"{size.height} x {size.width} latents do not divide into squares of {SIDE}"
        )
    # [b, C, h, 2, w, 2] <-> [b, h, w, C, 2, 2]
    around = packed(
        lambda x: (
            x.unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE))
            .permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        ),
        lambda x, shape: (
            x.unflatten(2, (-1, SIDE, SIDE)).unflatten(1, (shape[2] // SIDE, -1))
            .permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        ),
    )  # fmt: skip
    return around, height, width


def _flux(config: Config, size: Sizes) -> Declared:
    """Flux: one token for each 2 x 2 square of latents; positions are constants."""
    around, height, width = squares(size)
    predicted = config.out_channels or config.in_channels
    channels, sides = predicted // SIDE**2, (size.height, size.width)
    more = (config.in_channels - predicted) // SIDE**2
    appended = list[Input]()
    if more == channels + _FLUX_PIXELS:  # FLUX.1-Fill
        appended = [
            Input(MASKED_IMAGE, (channels, *sides), appended=True),
            Input(INPAINT_MASK, (_FLUX_PIXELS, *sides), appended=True),
        ]
    elif more:
        channels += more
    inputs: list[Input | SameInput] = [
        Input("hidden_states", (channels, *sides)),
        *appended,
        Input("timestep", (), "float32"),
        Input(
            "encoder_hidden_states", (size.text_length, config.joint_attention_dim), field="context"
        ),
        Input("pooled_projections", (config.pooled_projection_dim,), field="pooled"),
        SameInput("img_ids", lambda batch: image_positions(height, width)),
        SameInput("txt_ids", lambda batch: zero_positions(size.text_length)),
    ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
    return Declared(
        "hidden_states", "timestep", tuple(inputs), THOUSANDTH, patch_size=SIDE, around=around
    )


def _qwen_image(config: Config, size: Sizes) -> Declared:
    """Qwen-Image: tokens as Flux's; positions follow from the sides."""
    around, height, width = squares(size)
    inputs: tuple[Input | SameInput, ...] = (
        Input("hidden_states", (config.in_channels // SIDE**2, size.height, size.width)),
        Input("timestep", (), "float32"),
        Input(
            "encoder_hidden_states", (size.text_length, config.joint_attention_dim), field="context"
        ),
        Input("encoder_hidden_states_mask", (size.text_length,), "bool", "context_mask"),
        SameInput("img_shapes", lambda batch: [[(1, height, width)]] * batch),
    )
    return Declared("hidden_states", "timestep", inputs, THOUSANDTH, patch_size=SIDE, around=around)


def _flux2(config: Config, size: Sizes) -> Declared:
    """Flux.2: one token for each place of latents whose channels hold 2 x 2 squares already."""
    around = packed(lambda x: x.flatten(2).mT, lambda x, shape: x.mT.unflatten(2, shape[2:]))
    inputs: list[Input | SameInput] = [
        Input("hidden_states", (config.in_channels, size.height, size.width)),
        Input("timestep", (), "float32"),
        Input(
            "encoder_hidden_states", (size.text_length, config.joint_attention_dim), field="context"
        ),
        SameInput("img_ids", lambda batch: coordinates(1, size.height, size.width, 1)),
        SameInput("txt_ids", lambda batch: coordinates(1, 1, 1, size.text_length)),
    ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
    return Declared("hidden_states", "timestep", tuple(inputs), THOUSANDTH, around=around)


def coordinates(*sides: int) -> Any:
    """Coordinates of all places of a grid: [places, axes]."""
    import torch

    return torch.cartesian_prod(*map(torch.arange, sides))


def image_positions(height: int, width: int, first: int = 0) -> Any:
    """Positions of tokens on three axes: zero, row and column, from ``first`` on."""
    import torch

    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([torch.zeros_like(rows), rows + first, columns + first], -1)
    return places.reshape(-1, 3).float()


def zero_positions(length: int) -> Any:
    """Positions of tokens without any: zeros on three axes."""
    import torch

    return torch.zeros(length, 3)


def video(config: Config, size: Sizes) -> Input:
    return Input("hidden_states", (config.in_channels, size.frames, size.height, size.width))


def with_known_frames(
    config: Config, size: Sizes, latent: str, num_mask: int, mask_first: bool
) -> list[Input]:
    """Noisy video, and a ``latent`` and a mask behind it if the config has channels for them."""
    channels, sides = config.out_channels, (size.frames, size.height, size.width)
    if config.in_channels != 2 * channels + num_mask:
        return [video(config, size)]
    behind = [
        Input(latent, (channels, *sides), appended=True),
        Input(KNOWN_MASK, (num_mask, *sides), appended=True),
    ]
    ordered = behind[::-1] if mask_first else behind
    return [Input("hidden_states", (channels, *sides)), *ordered]


def _hunyuan_video(config: Config, size: Sizes) -> Declared:
    inputs = [
        *with_known_frames(config, size, IMAGE_LATENT, 1, mask_first=False),
        Input("timestep", (), "float32"),
        Input("encoder_hidden_states", (size.text_length, config.text_embed_dim), field="context"),
        Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask"),
        Input("pooled_projections", (config.pooled_projection_dim,), field="pooled"),
    ]
    if config.guidance_embeds:
        inputs.append(Input("guidance", (), "float32"))
    around = scaled_guidance(GUIDANCE_SCALE)
    return Declared("hidden_states", "timestep", tuple(inputs), around=around)


GUIDANCE_SCALE = 1000
"""Factor that HunyuanVideo's pipelines apply to guidance, and Flux's class itself."""


_WAN_FRAMES = 4
"""Frames of a position of Wan's latents."""


def _wan(config: Config, size: Sizes) -> Declared:
    """Wan; with ``known_frames`` the first frames of the latents are given and have time 0 (5B)."""
    declared = wan(config, size)
    if not size.known_frames:
        return declared
    if len(declared.inputs) > 3:
        raise ValueError("known_frames: this config takes known frames as channels")
    require_known_frames(size, config.patch_size[0])
    image = Input(IMAGE_LATENT, (config.in_channels, size.frames, size.height, size.width))
    return replace(
        declared, inputs=(*declared.inputs, image), around=with_given_frames(size.known_frames)
    )


def require_known_frames(size: Sizes, patch: int) -> None:
    """Raise ValueError unless a part of the frames is given, in patches of ``patch``."""
    if not 0 < size.known_frames < size.frames or size.known_frames % patch:
        raise ValueError(
            f"known_frames = {size.known_frames}: give a multiple of {patch} less than frames = "
            f"{size.frames}"
        )


def wan(config: Config, size: Sizes) -> Declared:
    """Classes with Wan's inputs."""
    inputs = [
        *with_known_frames(config, size, KNOWN_VIDEO, _WAN_FRAMES, mask_first=True),
        Input("timestep", (), "float32"),
        Input("encoder_hidden_states", (size.text_length, config.text_dim), field="context"),
    ]
    if config.image_dim:
        inputs.append(Input("encoder_hidden_states_image", (257, config.image_dim)))
    return Declared("hidden_states", "timestep", tuple(inputs))


def _mochi(config: Config, size: Sizes) -> Declared:
    length = config.max_sequence_length
    inputs = (
        video(config, size),
        Input("timestep", (), "float32"),
        Input("encoder_hidden_states", (length, config.text_embed_dim), field="context"),
        Input("encoder_attention_mask", (length,), "bool", "context_mask"),
    )
    return Declared("hidden_states", "timestep", inputs, around=reversed_flow)


def _ltx(config: Config, size: Sizes) -> Declared:
    """LTX-Video: one token for each latent position; with ``known_frames`` image to video."""
    if (config.patch_size, config.patch_size_t) != (1, 1):
        raise ValueError("patch_size and patch_size_t other than 1 are unsupported")
    around = packed(lambda x: x.flatten(2).mT, lambda x, shape: x.mT.unflatten(2, shape[2:]))
    inputs: tuple[Input | SameInput, ...] = (
        video(config, size),
        Input("timestep", (), "float32"),
        Input(
            "encoder_hidden_states", (size.text_length, config.caption_channels), field="context"
        ),
        Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask"),
        SameInput("num_frames", lambda batch: size.frames),
        SameInput("height", lambda batch: size.height),
        SameInput("width", lambda batch: size.width),
        SameInput("rope_interpolation_scale", lambda batch: (8 / 25, 32.0, 32.0)),
    )
    if size.known_frames:
        require_known_frames(size, 1)
        inputs = (*inputs, replace(video(config, size), path=IMAGE_LATENT))
        around = ltx_with_given_frames(size.known_frames)
    return Declared("hidden_states", "timestep", inputs, around=around)


def _cogvideox(config: Config, size: Sizes) -> Declared:
    """CogVideoX: frames before channels. Sizes come from the config, as do the positions."""
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    frames += -frames % (config.patch_size_t or 1)
    height, width = config.sample_height, config.sample_width
    text = (config.max_text_seq_length, config.text_embed_dim)
    channels, more = config.in_channels, config.in_channels - config.out_channels
    appended = list[Input]()
    if more == config.out_channels:
        channels -= more
        appended = [Input(IMAGE_LATENT, (frames, more, height, width), appended=True)]
    inputs: list[Input | SameInput] = [
        Input("hidden_states", (frames, channels, height, width)),
        *appended,
        Input("timestep", (), "float32"),
        Input("encoder_hidden_states", text, field="context"),
    ]
    if config.ofs_embed_dim:
        inputs.append(Input("ofs", (), "float32"))
    if config.use_rotary_positional_embeddings:
        grid = height // config.patch_size, width // config.patch_size
        inputs.append(
            SameInput("image_rotary_emb", lambda b: _cogvideox_rotary(config, frames, grid))
        )
    return Declared("hidden_states", "timestep", tuple(inputs), channel_axis=2)


def _cogvideox_rotary(config: Config, frames: int, grid: tuple[int, int]) -> Any:
    """Rotary embedding of diffusers' pipeline at the config's own size."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    head = config.attention_head_dim
    if config.patch_size_t is None:
        return get_3d_rotary_pos_embed(head, ((0, 0), grid), grid, frames)
    steps = frames // config.patch_size_t
    return get_3d_rotary_pos_embed(head, None, grid, steps, grid_type="slice", max_size=grid)


TOKENS = {
    "FluxTransformer2DModel": Known(
        {"height": 128, "width": 128, "text_length": 512, **NO_REFERENCE},
        with_reference(_flux, {"img_ids": shifted(1, 0, 0)}),
    ),
    "Flux2Transformer2DModel": Known(
        {"height": 64, "width": 64, "text_length": 512, **NO_REFERENCE},
        with_reference(_flux2, {"img_ids": shifted(10, 0, 0, 0)}),
    ),
    "QwenImageTransformer2DModel": Known(
        {"height": 128, "width": 128, "text_length": 512, **NO_REFERENCE},
        with_reference(_qwen_image, {"img_shapes": repeated}),
    ),
    "HunyuanVideoTransformer3DModel": Known(
        {"frames": 33, "height": 90, "width": 160, "text_length": 256}, _hunyuan_video
    ),
    "WanTransformer3DModel": Known(
        {"frames": 21, "height": 60, "width": 104, "text_length": 512, "known_frames": 0}, _wan
    ),
    "MochiTransformer3DModel": Known({"frames": 28, "height": 60, "width": 106}, _mochi),
    "LTXVideoTransformer3DModel": Known(
        {"frames": 21, "height": 16, "width": 24, "text_length": 128, "known_frames": 0}, _ltx
    ),
    "CogVideoXTransformer3DModel": Known({}, _cogvideox),
}
