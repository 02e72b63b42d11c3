"""Input declarations of diffusers classes, by config and run sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_pulse.backbone.appended_fields import (
    IMAGE_EMBEDDING,
    IMAGE_LATENT,
    INPAINT_MASK,
    MASKED_IMAGE,
    inpaints,
)
from megatron_pulse.errors import Faults
from model_specs.derived.forwards import scaled_guidance
from model_specs.derived.image_transformer_inputs import IMAGES
from model_specs.derived.inputs import Config, Declared, Input, Known, SameInput, Sizes
from model_specs.derived.token_and_video_inputs import TOKENS
from model_specs.derived.video_inputs import VIDEOS

_LARGEST = 1 << 14
"""Largest side of latents, as a sanity limit on the example microbatch."""


def _image(fallback: int = 64) -> Callable[[Config], dict[str, int]]:
    """Default sizes of a class with square latents, whose config may set ``sample_size``."""

    def sizes(config: Config) -> dict[str, int]:
        side = getattr(config, "sample_size", None)
        side = fallback if side is None else side
        sides = side if isinstance(side, list | tuple) else (side, side)
        if len(sides) != 2 or not all(type(n) is int and 0 < n <= _LARGEST for n in sides):
            raise ValueError(
                f"sample_size is {side!r:.60}: must be a whole number up to {_LARGEST}, or two"
            )
        height, width = sides
        return {"height": height, "width": width}

    return sizes


def _and(sizes: Callable[[Config], dict[str, int]], **more: int) -> Callable[..., dict[str, int]]:
    return lambda config: _frames_first({**sizes(config), **more})


def _frames_first(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes in the order of ``buckets``: frames, height, width, then the text."""
    return {name: sizes[name] for name in sorted(sizes, key=lambda name: name != "frames")}


def _captioned_unet(config: Config) -> dict[str, int]:
    """Default sizes of ``UNet2DConditionModel``; Kolors reads longer texts than SDXL."""
    settings = vars(config)
    is_sized = settings.get("addition_embed_type") == "text_time"
    is_kolors = is_sized and settings.get("encoder_hid_dim") is not None
    return _and(_image(), text_length=256 if is_kolors else 77)(config)


def _times(name: str = "timestep") -> Input:
    return Input(name, (), "float32")


def _labelled(config: Config) -> tuple[tuple[Input, ...], dict[str, Any]]:
    """Additional inputs and ``Declared`` keywords of a UNet with a class embedding."""
    kind = config.class_embed_type
    if kind is None and config.num_class_embeds:
        labels = Input("class_labels", (), "int64", "labels")
        return (labels,), {"num_classes": config.num_class_embeds}
    if kind is None:
        return (), {}
    if kind == "timestep":
        return (Input("class_labels", (), "float32", "class_labels"),), {}
    width = getattr(config, "projection_class_embeddings_input_dim", None)
    if kind in ("projection", "simple_projection") and width:
        return (Input("class_labels", (width,)),), {}
    raise ValueError(f"class_embed_type {kind!r} is unsupported")


def _unet_2d(config: Config, size: Sizes) -> Declared:
    labels, said = _labelled(config)
    image = Input("sample", (config.in_channels, size.height, size.width))
    return Declared("sample", "timestep", (image, _times(), *labels), **said)


def _unet_2d_condition(config: Config, size: Sizes) -> Declared:
    width = config.encoder_hid_dim or config.cross_attention_dim
    if not isinstance(width, int):
        if len(set(width)) > 1:
            raise ValueError(
                f"cross_attention_dim {width}: only one width for all layers is supported"
            )
        width = width[0]
    labels, said = _labelled(config)
    channels, sides = config.in_channels, (size.height, size.width)
    appended = list[Input]()
    if inpaints(channels, config.out_channels):
        channels = config.out_channels
        appended = [
            Input(INPAINT_MASK, (1, *sides), appended=True),
            Input(MASKED_IMAGE, (channels, *sides), appended=True),
        ]
    inputs: list[Input | SameInput] = [
        Input("sample", (channels, *sides)),
        _times(),
        Input("encoder_hidden_states", (size.text_length, width), field="context"),
        *labels,
        *appended,
    ]
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs += [
            Input("added_cond_kwargs.text_embeds", (pooled,), field="pooled"),
            Input("added_cond_kwargs.time_ids", (6,), "float32", "time_ids"),
        ]
    elif config.addition_embed_type not in (None, "text"):
        raise ValueError(f"addition_embed_type {config.addition_embed_type!r}: unsupported")
    return Declared("sample", "timestep", tuple(inputs), **said)


def _unet_3d(config: Config, size: Sizes) -> Declared:
    return Declared(
        "sample",
        "timestep",
        (
            Input("sample", (config.in_channels, size.frames, size.height, size.width)),
            _times(),
            Input(
                "encoder_hidden_states", (size.text_length, config.cross_attention_dim),
                field="context",
            ),
        ),
        without_dropout=True,
    )  # fmt: skip


def _motion(config: Config, size: Sizes) -> Declared:
    """Declaration with the caption repeated for every frame."""
    declared = _unet_3d(config, size)
    *others, text = declared.inputs
    assert isinstance(text, Input)
    return replace(declared, inputs=(*others, replace(text, rows=size.frames)))


def _svd(config: Config, size: Sizes) -> Declared:
    ids = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    width = config.cross_attention_dim
    width = width if isinstance(width, int) else width[0]
    channels, sides = config.out_channels, (size.height, size.width)
    inputs = [
        Input("sample", (size.frames, channels, *sides)),
        _times(),
        Input("encoder_hidden_states", (1, width), field=IMAGE_EMBEDDING),
        Input("added_time_ids", (ids,), "float32"),
    ]
    if more := config.in_channels - channels:
        inputs.append(Input(IMAGE_LATENT, (size.frames, more, *sides), appended=True))
    return Declared("sample", "timestep", tuple(inputs), channel_axis=2)


def _kandinsky3(config: Config, size: Sizes) -> Declared:
    return Declared(
        "sample",
        "timestep",
        (
            Input("sample", (config.in_channels, size.height, size.width)),
            _times(),
            Input(
                "encoder_hidden_states", (size.text_length, config.encoder_hid_dim),
                field="context",
            ),
            Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask"),
        ),
    )  # fmt: skip


def _hunyuan_dit(config: Config, size: Sizes) -> Declared:
    grid = size.height // config.patch_size, size.width // config.patch_size
    inputs: list[Input | SameInput] = [
        Input("hidden_states", (config.in_channels, size.height, size.width)),
        Input("timestep", ()),  # no dtype: the embedding takes the dtype of its input
        Input("encoder_hidden_states", (config.text_len, config.cross_attention_dim),
              field="context"),
        Input("text_embedding_mask", (config.text_len,), "int64", "context_mask"),
        Input("encoder_hidden_states_t5", (config.text_len_t5, config.cross_attention_dim_t5),
              field="context_t5"),
        Input("text_embedding_mask_t5", (config.text_len_t5,), "int64", "context_t5_mask"),
        SameInput("image_rotary_emb", lambda batch: _hunyuan_rotary(config, grid)),
    ]  # fmt: skip
    if config.use_style_cond_and_image_meta_size:
        inputs += [
            Input("image_meta_size", (6,), "float32"),
            SameInput("style", _zeros),
        ]
    return Declared("hidden_states", "timestep", tuple(inputs), patch_size=config.patch_size)


def _zeros(batch: int) -> Any:
    import torch

    return torch.zeros(batch, dtype=torch.int64)


def _hunyuan_rotary(config: Config, grid: tuple[int, int]) -> Any:
    """Rotary embedding of diffusers' pipeline: 512-pixel spacing, cropped to the aspect ratio."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    base = 512 // 8 // config.patch_size
    height, width = grid
    if height >= width:
        resized = base, round(base / height * width)
    else:
        resized = round(base / width * height), base
    start = tuple(round((base - side) / 2) for side in resized)
    end = tuple(a + b for a, b in zip(start, resized, strict=True))
    head = config.attention_head_dim
    return get_2d_rotary_pos_embed(head, (start, end), grid, output_type="pt")


def _dit(config: Config, size: Sizes) -> Declared:
    classes = config.num_embeds_ada_norm
    return Declared(
        "hidden_states",
        "timestep",
        (
            Input("hidden_states", (config.in_channels, size.height, size.width)),
            _times(),
            Input("class_labels", (), "int64", "labels"),
        ),
        num_classes=classes,
        null_label=classes,
        patch_size=config.patch_size,
    )


def _text(config: Config, size: Sizes, width: int, *more: Input) -> Declared:
    """Declaration of a transformer on square latents with a caption."""
    return Declared(
        "hidden_states",
        "timestep",
        (
            Input("hidden_states", (config.in_channels, size.height, size.width)),
            _times(),
            Input("encoder_hidden_states", (size.text_length, width), field="context"),
            *more,
        ),
        patch_size=config.patch_size,
    )


def _sd3(config: Config, size: Sizes) -> Declared:
    pooled = Input("pooled_projections", (config.pooled_projection_dim,), field="pooled")
    return _text(config, size, config.joint_attention_dim, pooled)


def _pixart(config: Config, size: Sizes) -> Declared:
    sized = config.use_additional_conditions
    if sized is None:
        sized = config.sample_size == 128
    more = [Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask")]
    added = {"resolution": 2, "aspect_ratio": 1} if sized else {}
    more += [
        Input(f"added_cond_kwargs.{name}", (count,), "float32", name)
        for name, count in added.items()
    ]
    declared = _text(config, size, config.caption_channels, *more)
    if sized:
        return declared
    none = tuple(SameInput(f"added_cond_kwargs.{name}", lambda batch: None)
                 for name in ("resolution", "aspect_ratio"))  # fmt: skip
    return replace(declared, inputs=(*declared.inputs, *none))


def _sana(config: Config, size: Sizes) -> Declared:
    mask = Input("encoder_attention_mask", (size.text_length,), "int64", "context_mask")
    declared = _text(config, size, config.caption_channels, mask)
    if not config.guidance_embeds:
        return declared
    inputs = (*declared.inputs, Input("guidance", (), "float32"))
    around = scaled_guidance(config.guidance_embeds_scale)
    return replace(declared, inputs=inputs, around=around)


def _aura_flow(config: Config, size: Sizes) -> Declared:
    patch, side = config.patch_size, math.isqrt(config.pos_embed_max_size)
    if faults := [
        f"{name} = {places}: pos_embed_max_size = {config.pos_embed_max_size} has positions for "
        f"{side * patch} at most. Give a smaller {name}, or pos_embed_max_size of {needed**2}"
        for name, places in (("height", size.height), ("width", size.width))
        if (needed := -(-places // patch)) > side
    ]:
        raise Faults(faults)
    return replace(_text(config, size, config.joint_attention_dim), timestep_scale=1e-3)


def _autoencoder(config: Config, size: Sizes) -> Declared:
    image = Input("sample", (config.in_channels, size.height, size.width))
    return Declared("sample", None, (image,))


CLASSES: dict[str, Known] = {
    "UNet2DModel": Known(_image(), _unet_2d),
    "UNet2DConditionModel": Known(_captioned_unet, _unet_2d_condition),
    "UNet3DConditionModel": Known(_and(_image(32), frames=16, text_length=77), _unet_3d),
    "UNetMotionModel": Known(_and(_image(), frames=16, text_length=77), _motion),
    "UNetSpatioTemporalConditionModel": Known(
        lambda config: {"frames": config.num_frames, **_image(96)(config)}, _svd
    ),
    "Kandinsky3UNet": Known(_and(_image(128), text_length=128), _kandinsky3),
    "HunyuanDiT2DModel": Known(_image(), _hunyuan_dit),
    "DiTTransformer2DModel": Known(_image(), _dit),
    "SD3Transformer2DModel": Known(_and(_image(), text_length=333), _sd3),
    "PixArtTransformer2DModel": Known(_and(_image(), text_length=300), _pixart),
    "SanaTransformer2DModel": Known(_and(_image(), text_length=300), _sana),
    "AuraFlowTransformer2DModel": Known(_and(_image(), text_length=256), _aura_flow),
    "AutoencoderKL": Known(_image(), _autoencoder),
    **IMAGES,
    **TOKENS,
    **VIDEOS,
}
