"""Other shapes of the zoo's microbatches: heights and widths, frames, lengths of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.tracing.zoo.draw import TEXT, Given

type Sizes = Mapping[str, tuple[int, tuple[int, ...]]]
"""By the name of an input: how many rows a sample has of it, and their shape."""

SHAPES: dict[str, list[Sizes]] = {
    "small_unet": [
        {"sample": (1, (4, 6, 12))},
        {"sample": (1, (4, 16, 4)), "encoder_hidden_states": (1, (TEXT + 2, 6))},
    ],
    "small_svd": [{"sample": (1, (2, 8, 4, 10))}, {"sample": (1, (3, 8, 8, 4))}],
    "sd": [{"sample": (1, (4, 8, 16))}, {"sample": (1, (4, 24, 8))}],
    "motion": [
        {"sample": (1, (4, 3, 8, 16))},
        {"sample": (1, (4, 2, 16, 8)), "encoder_hidden_states": (2, (TEXT, 16))},
    ],
    "sd3": [{"hidden_states": (1, (4, 8, 24))}, {"hidden_states": (1, (4, 12, 4))}],
    "wan": [{"hidden_states": (1, (4, 2, 8, 12))}, {"hidden_states": (1, (4, 5, 4, 4))}],
    "hunyuan_video": [{"hidden_states": (1, (4, 2, 8, 12))}],
    "mochi": [{"hidden_states": (1, (4, 1, 8, 12))}],
    "autoencoder": [{"sample": (1, (3, 8, 24))}],
    "dense": [{"image": (1, (3, 2, 6))}, {"image": (1, (3, 8, 4))}],
}


def resized(given: Given, sizes: Sizes) -> Given:
    """``given`` where these inputs have other sizes."""

    def make(size: int) -> Mapping[str, Any]:
        torch.manual_seed(size)
        found = dict(given(size))
        for name, (rows, shape) in sizes.items():
            found[name] = torch.randn(size * rows, *shape).to(found[name].dtype)
        return found

    return make
