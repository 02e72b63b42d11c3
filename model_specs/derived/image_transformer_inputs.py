"""Input declarations of diffusers' large image transformers; see also ``classes``."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from model_specs.derived.forwards import (
    Forward,
    lumina2_forward,
    negated,
    omnigen_forward,
    then,
    z_image_forward,
)
from model_specs.derived.inputs import Config, Declared, Input, Known, SameInput, Sizes
from model_specs.derived.token_and_video_inputs import (
    SIDE,
    THOUSANDTH,
    image_positions,
    squares,
    zero_positions,
)

_LONGCAT_TEXT = 512
"""Position of LongCat-Image's first token, behind all text."""


def _context(size: Sizes, width: int, path: str = "encoder_hidden_states") -> Input:
    return Input(path, (size.text_length, width), field="context")


def _context_mask(size: Sizes, path: str = "encoder_attention_mask", dtype: str = "int64") -> Input:
    return Input(path, (size.text_length,), dtype, "context_mask")


def _image(channels: int, size: Sizes, path: str = "hidden_states") -> Input:
    return Input(path, (channels, size.height, size.width))


def _times(path: str = "timestep") -> Input:
    return Input(path, (), "float32")


def _flux_like(
    config: Config,
    size: Sizes,
    *more: Input | SameInput,
    text_ids: Any = zero_positions,
    first: int = 0,
    scale: float = THOUSANDTH,
) -> Declared:
    """Class whose tokens are Flux's; ``first`` is the row and column of the first one."""
    pack, height, width = squares(size)
    inputs: tuple[Input | SameInput, ...] = (
        _image(config.in_channels // SIDE**2, size),
        _times(),
        _context(size, config.joint_attention_dim),
        SameInput("img_ids", lambda batch: image_positions(height, width, first)),
        SameInput("txt_ids", lambda batch: text_ids(size.text_length)),
        *more,
    )
    return Declared("hidden_states", "timestep", inputs, scale, patch_size=SIDE, around=pack)


def _chroma(config: Config, size: Sizes) -> Declared:
    declared = _flux_like(config, size, _context_mask(size, "attention_mask"))
    assert declared.around is not None
    return replace(declared, around=then(_with_first_padding, declared.around))


def _with_first_padding(module: Any) -> Forward:
    """Chroma's forward, to whose scores its pipeline adds 1 up to the first padding token."""
    forward = module.forward

    @functools.wraps(forward)
    def call(hidden_states: Any, attention_mask: Any, **others: Any) -> Any:
        import torch

        count, length = attention_mask.shape
        kept = torch.arange(length, device=attention_mask.device) <= attention_mask.sum(1)[:, None]
        mask = torch.cat([kept, kept.new_ones(count, hidden_states.shape[1])], 1)
        mask = mask.to(hidden_states.dtype)
        return forward(hidden_states=hidden_states, attention_mask=mask, **others)

    return call


def _diagonal(length: int, axis: float = 0) -> Any:
    """Positions of text along the diagonal of the picture's rows and columns."""
    import torch

    places = torch.arange(length).float()
    return torch.stack([torch.full_like(places, axis), places, places], -1)


def _ovis(config: Config, size: Sizes) -> Declared:
    return _flux_like(config, size, text_ids=_diagonal)


def _longcat(config: Config, size: Sizes) -> Declared:
    declared = _flux_like(config, size, text_ids=_diagonal, first=_LONGCAT_TEXT)
    return replace(declared, inputs=tuple(map(_in_mode_1, declared.inputs)))


def _in_mode_1(given: Input | SameInput) -> Input | SameInput:
    """LongCat-Image's first axis tells pictures (1) from text (0)."""
    if not isinstance(given, SameInput) or given.path != "img_ids":
        return given
    value = given.value

    def marked(batch: int) -> Any:
        positions = value(batch)
        positions[:, 0] = 1
        return positions

    return SameInput(given.path, marked)


def _bria(config: Config, size: Sizes) -> Declared:
    return _flux_like(config, size, scale=1.0)


def _hidream(config: Config, size: Sizes) -> Declared:
    """HiDream: T5's caption, and the states of all layers of Llama."""
    t5, llama = config.caption_channels
    layers = max(config.llama_layers) + 1
    inputs = (
        _image(config.in_channels, size),
        _times("timesteps"),
        Input("encoder_hidden_states_t5", (size.text_length, t5), field="context_t5"),
        Input("encoder_hidden_states_llama3", (layers, size.text_length, llama), field="context"),
        Input("pooled_embeds", (config.text_emb_dim,), field="pooled"),
    )
    if size.height != size.width:
        raise ValueError(
            f"{size.height} x {size.width}: only square latents are supported; the class trains "
            "others with tokens up to max_resolution"
        )
    around = then(_hidream_forward, negated)
    return Declared(
        "hidden_states", "timesteps", inputs, patch_size=config.patch_size, around=around
    )


def _hidream_forward(module: Any) -> Forward:
    """HiDream's forward, whose prediction is a picture in training too, not patches."""
    forward, patch = module.forward, module.config.patch_size

    @functools.wraps(forward)
    def call(hidden_states: Any, encoder_hidden_states_llama3: Any, **others: Any) -> Any:
        states = encoder_hidden_states_llama3.unbind(1)
        (predicted,) = forward(
            hidden_states=hidden_states, encoder_hidden_states_llama3=states, **others
        )
        if predicted.shape == hidden_states.shape:
            return predicted
        width = hidden_states.shape[3] // patch
        patches = predicted.unflatten(3, (patch, patch)).unflatten(2, (-1, width))
        return patches.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)

    return call


def _cogview(config: Config, size: Sizes) -> Declared:
    """CogView 3 Plus and 4, which are told each picture's size and crop."""
    sizes = ("original_size", "target_size", "crop_coords")
    inputs = (
        _image(config.in_channels, size),
        _times(),
        _context(size, config.text_embed_dim),
        *(Input(name, (2,), "float32") for name in sizes),
    )
    return Declared("hidden_states", "timestep", inputs, patch_size=config.patch_size)


def _lumina2(config: Config, size: Sizes) -> Declared:
    inputs = (
        _image(config.in_channels, size),
        _times(),
        _context(size, config.cap_feat_dim),
        _context_mask(size),
    )
    return Declared(
        "hidden_states", "timestep", inputs, THOUSANDTH,
        patch_size=config.patch_size, around=lumina2_forward,
    )  # fmt: skip


def _z_image(config: Config, size: Sizes) -> Declared:
    if config.siglip_feat_dim:
        raise ValueError("siglip_feat_dim: the Omni variant's lists of pictures are unsupported")
    if len(config.all_patch_size) > 1:
        raise ValueError("all_patch_size: several patch sizes in one model are unsupported")
    inputs = (
        _image(config.in_channels, size, "x"),
        _times("t"),
        _context(size, config.cap_feat_dim, "cap_feats"),
        _context_mask(size, "cap_mask"),
    )
    return Declared(
        "x", "t", inputs, THOUSANDTH, patch_size=config.all_patch_size[0], around=z_image_forward
    )


def _omnigen(config: Config, size: Sizes) -> Declared:
    inputs = (
        _image(config.in_channels, size),
        _times(),
        Input("input_ids", (size.text_length,), "int64", "context"),
        _context_mask(size, "attention_mask"),
    )
    return Declared(
        "hidden_states", "timestep", inputs, THOUSANDTH,
        patch_size=config.patch_size, around=omnigen_forward,
    )  # fmt: skip


def _prx(config: Config, size: Sizes) -> Declared:
    inputs = (
        _image(config.in_channels, size),
        _times(),
        _context(size, config.context_in_dim),
        _context_mask(size, "attention_mask", "bool"),
    )
    return Declared("hidden_states", "timestep", inputs, THOUSANDTH, patch_size=config.patch_size)


def _krea2(config: Config, size: Sizes) -> Declared:
    """Krea 2: tokens as Flux's, a caption of several of the encoder's layers."""
    pack, height, width = squares(size)
    text = (size.text_length, config.num_text_layers, config.text_hidden_dim)

    def positions(batch: int) -> Any:
        import torch

        return torch.cat([zero_positions(size.text_length), image_positions(height, width)])

    inputs: tuple[Input | SameInput, ...] = (
        _image(config.in_channels // SIDE**2, size),
        _times(),
        Input("encoder_hidden_states", text, field="context"),
        _context_mask(size, dtype="bool"),
        SameInput("position_ids", positions),
    )
    return Declared("hidden_states", "timestep", inputs, THOUSANDTH, patch_size=SIDE, around=pack)


def _ernie(config: Config, size: Sizes) -> Declared:
    inputs = (
        _image(config.in_channels, size),
        _times(),
        _context(size, config.text_in_dim, "text_bth"),
        _context_mask(size, "text_mask"),
    )
    return Declared(
        "hidden_states", "timestep", inputs, patch_size=config.patch_size, around=_of_lengths
    )


def _of_lengths(module: Any) -> Forward:
    """ERNIE-Image's forward, whose captions' lengths are the sums of their masks."""
    forward = module.forward

    def call(text_mask: Any, **others: Any) -> Any:
        return forward(text_lens=text_mask.sum(1), **others, return_dict=False)[0]

    return call


_COGVIEW4_TOKENS = 256
"""Tokens of a picture at which CogView 4's pipeline shifts times by 1."""


def _cogview4(config: Config, size: Sizes) -> Declared:
    """CogView 4, whose pipeline shifts the noise of a sample and not the time that it gives."""
    declared = _cogview(config, size)
    tokens = size.height * size.width / config.patch_size**2
    shift = 0.75 * math.sqrt(tokens / _COGVIEW4_TOKENS) + 0.25
    return replace(declared, around=functools.partial(_before_shift, shift=shift))


def _before_shift(module: Any, shift: float) -> Forward:
    """Forward that gets the time of the sample's noise; the class gets that before the shift."""
    forward = module.forward

    @functools.wraps(forward)
    def call(timestep: Any, **others: Any) -> Any:
        share = timestep / 1000
        return forward(timestep=1000 * share / (share + shift * (1 - share)), **others)

    return call


_SQUARE = {"height": 128, "width": 128, "text_length": 512}
IMAGES = {
    "ChromaTransformer2DModel": Known(_SQUARE, _chroma),
    "OvisImageTransformer2DModel": Known({**_SQUARE, "text_length": 256}, _ovis),
    "LongCatImageTransformer2DModel": Known(_SQUARE, _longcat),
    "BriaTransformer2DModel": Known({**_SQUARE, "text_length": 128}, _bria),
    "HiDreamImageTransformer2DModel": Known({**_SQUARE, "text_length": 128}, _hidream),
    "CogView3PlusTransformer2DModel": Known({**_SQUARE, "text_length": 224}, _cogview),
    "CogView4Transformer2DModel": Known({**_SQUARE, "text_length": 224}, _cogview4),
    "Lumina2Transformer2DModel": Known({**_SQUARE, "text_length": 256}, _lumina2),
    "ZImageTransformer2DModel": Known(_SQUARE, _z_image),
    "OmniGenTransformer2DModel": Known({**_SQUARE, "text_length": 256}, _omnigen),
    "PRXTransformer2DModel": Known({"height": 32, "width": 32, "text_length": 256}, _prx),
    "Krea2Transformer2DModel": Known(_SQUARE, _krea2),
    "ErnieImageTransformer2DModel": Known({"height": 64, "width": 64, "text_length": 256}, _ernie),
}
