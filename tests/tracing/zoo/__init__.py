"""The study's classes in sizes that are exported in seconds, with random weights.

``make(name)`` gives the module and what it is called with for a microbatch size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.tracing.zoo import declared, images, texts, unets, videos
from tests.tracing.zoo.draw import Given, Made

STUDY: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        *(unets.sd, unets.sdxl, unets.svd, unets.motion),
        *(images.hunyuan, videos.hunyuan_video, videos.wan, videos.wan_i2v),
        *(videos.cogvideox_2b, videos.cogvideox_5b, videos.ltx, videos.mochi),
        *(images.flux, images.sd3, images.pixart_alpha, images.pixart_sigma, images.autoencoder),
        *(texts.clip, texts.t5),
    )
}
SMALL: dict[str, Callable[[], Made]] = {
    made.__name__: made for made in (unets.small_unet, unets.small_svd, unets.small_motion)
}
FOUR_HEADS: dict[str, Callable[[], Made]] = {
    f"{made.__name__}_of_4_heads": functools.partial(made, 4)
    for made in (images.flux, videos.hunyuan_video, videos.wan, videos.cogvideox_2b, videos.ltx)
}
ZOO = {**STUDY, **SMALL, **FOUR_HEADS, **declared.makers()}
SKIPS = {"sd": 12, "sdxl": 9, "svd": 12, "motion": 12, "hunyuan": 2, "small_unet": 4,
         "small_svd": 4}  # fmt: skip
"""Published: of a UNet one a level, block and resampling, of Hunyuan-DiT n / 2 - 1 of n blocks."""
OUTPUT = {"clip": 0}
"""Which of several results is compared."""
_NATIVE = ("svd", "small_svd")
_KEPT = ("timestep", "image_rotary_emb", "img_ids", "txt_ids")
"""Inputs that pipelines keep in fp32 in a bf16 run; Hunyuan-DiT computes in its times' dtype."""


def make(name: str, dtype: torch.dtype = torch.float32) -> Made:
    """A class in training mode, no parameter all equal: zeros would hide what is behind them."""
    torch.manual_seed(3)
    module, given = ZOO[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.train().to(dtype), _in(dtype, given, _KEPT[name == "hunyuan" :])


def kernels_of(name: str) -> AbstractContextManager[None]:
    """Within, a class has kernels that give the same bits again: torch's own for convolutions of
    videos, whose weight gradients in bf16 oneDNN computes from memory that nobody filled (torch
    2.13, AVX-512): other numbers in every call, nan among them."""
    on = torch.backends.mkldnn.enabled and name.partition("/")[0] not in _NATIVE
    return torch.backends.mkldnn.flags(enabled=on)  # type: ignore[no-any-return]


def _in(dtype: torch.dtype, given: Given, kept: tuple[str, ...]) -> Given:
    def converted(size: int) -> Mapping[str, Any]:
        def convert(path: Any, leaf: Any) -> Any:
            floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floats and path[0].key not in kept else leaf

        torch.manual_seed(size)
        return dict(pytree.tree_map_with_path(convert, dict(given(size))))

    return converted
