"""Frozen encoders' layers worked out from their published configurations, on an A100 in bfloat16.

===========  ================================================================================
CLIP-L       openai/clip-vit-large-patch14, text: 12 layers of 768, MLP 3072, 77 tokens
OpenCLIP-H   stabilityai/stable-diffusion-2-1, text_encoder: 23 layers of 1024, MLP 4096
OpenCLIP-bG  stabilityai/stable-diffusion-xl-base-1.0, text_encoder_2: 32 of 1280, MLP 5120
T5-XXL       google/t5-v1_1-xxl: 24 layers of 4096, 64 heads of 64, gated MLP 10240
mT5-XL       Hunyuan-DiT text_encoder_2: 24 layers of 2048, 32 heads of 64, gated MLP 5120
BERT         Hunyuan-DiT text_encoder: 24 layers of 1024, MLP 4096, 77 tokens
KL-VAE       AutoencoderKL: widths 128, 256, 512, 512, two resnets a level, attention in the middle
===========  ================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.profile.roofline import Kernel
from tests.benchmarks.setups import A100

HALF = 2
"""Bytes of an element."""
COUNTS = (1, 2, 4, 8)

type Work = Callable[[int], list[Kernel]]


def _product(rows: int, inner: int, columns: int) -> Kernel:
    """A matrix product with weights of inner x columns."""
    moved = HALF * (rows * inner + inner * columns + rows * columns)
    return Kernel(2 * rows * inner * columns, moved)


def _pointwise(elements: int, passes: int = 2) -> Kernel:
    """Reads and writes."""
    return Kernel(8 * elements, HALF * passes * elements)


def _layer(name: str, work: Work, parameters: int, elements: int, kept: int) -> FrozenLayer:
    """``elements`` are there at once per sample, ``kept`` are left."""
    return FrozenLayer(
        name,
        {n: A100.seconds(work(n)) for n in COUNTS},
        HALF * parameters,
        HALF * elements,
        HALF * kept,
    )


def transformer(
    name: str,
    layers: int,
    width: int,
    hidden: int,
    tokens: int,
    consumers: Sequence[int],
    gated: bool = False,
    attention: int | None = None,
    vocabulary: int = 49408,
    result: int | None = None,
) -> Component:
    """A text encoder whose last states are read; ``result`` elements of a sample if not those."""
    inner = attention or width
    matrices = 3 if gated else 2

    def block(n: int) -> list[Kernel]:
        rows = n * tokens
        scores = Kernel(4 * n * tokens * tokens * inner, HALF * 4 * rows * inner)
        up = [_product(rows, width, hidden)] * (matrices - 1)
        return [
            _pointwise(rows * width),
            _product(rows, width, 3 * inner),
            scores,
            _product(rows, inner, width),
            _pointwise(rows * width, 3),
            _pointwise(rows * width),
            *up,
            _pointwise(rows * hidden, matrices),
            _product(rows, hidden, width),
            _pointwise(rows * width, 3),
        ]

    kept = tokens * width
    embedding = _layer(
        "embedding", lambda n: [_pointwise(n * kept, 3)], vocabulary * width, 2 * kept, kept
    )
    parameters = 4 * width * inner + matrices * width * hidden
    blocks = [
        _layer(f"layers.{i}", block, parameters, tokens * (4 * width + 2 * hidden), kept)
        for i in range(layers)
    ]
    last = _layer("final norm", lambda n: [_pointwise(n * kept)], width, 2 * kept, kept)
    read = HALF * (kept if result is None else result)
    return Component(name, (embedding, *blocks, last), (), read, tuple(consumers))


def autoencoder(pixels: int, channels: int, consumers: Sequence[int]) -> Component:
    """The encoder of AutoencoderKL on pictures of ``pixels`` x ``pixels``."""
    widths = (128, 256, 512, 512)
    layers: list[FrozenLayer] = []

    def conv(n: int, size: int, inner: int, outer: int, kernel: int = 3) -> Kernel:
        weights = kernel * kernel * inner * outer
        moved = HALF * (n * size * size * (inner + outer) + weights)
        return Kernel(2 * n * size * size * weights, moved)

    def resnet(name: str, size: int, inner: int, outer: int) -> None:
        area = size * size

        def work(n: int) -> list[Kernel]:
            done = [
                _pointwise(n * area * inner, 4),  # group norm reads twice, then SiLU
                conv(n, size, inner, outer),
                _pointwise(n * area * outer, 4),
                conv(n, size, outer, outer),
                _pointwise(n * area * outer, 3),
            ]
            return [*done, conv(n, size, inner, outer, 1)] if inner != outer else done

        weights = 9 * (inner * outer + outer * outer) + (inner * outer if inner != outer else 0)
        layers.append(_layer(name, work, weights, 3 * area * max(inner, outer), area * outer))

    def single(name: str, size: int, inner: int, outer: int, norm: bool = False) -> None:
        def work(n: int) -> list[Kernel]:
            first = [_pointwise(n * size * size * inner, 4)] if norm else []
            return [*first, conv(n, size, inner, outer)]

        area = size * size
        layers.append(_layer(name, work, 9 * inner * outer, area * (inner + outer), area * outer))

    size = pixels
    single("conv_in", size, 3, widths[0])
    inner = widths[0]
    for level, width in enumerate(widths):
        for i in range(2):
            resnet(f"down.{level}.resnets.{i}", size, inner, width)
            inner = width
        if level < len(widths) - 1:
            size //= 2
            single(f"down.{level}.downsample", size, width, width)
    resnet("mid.resnets.0", size, inner, inner)
    rows = size * size

    def attend(n: int) -> list[Kernel]:
        return [
            _pointwise(n * rows * inner, 4),
            _product(n * rows, inner, 3 * inner),
            Kernel(4 * n * rows * rows * inner, HALF * 4 * n * rows * inner),
            _product(n * rows, inner, inner),
            _pointwise(n * rows * inner, 3),
        ]

    layers.append(
        _layer("mid.attention", attend, 4 * inner * inner, 5 * rows * inner, rows * inner)
    )
    resnet("mid.resnets.1", size, inner, inner)
    single("conv_out", size, inner, 2 * channels, norm=True)
    return Component("vae", tuple(layers), (), HALF * channels * rows, tuple(consumers))


_TEXT: dict[str, dict[str, Any]] = {
    "clip_l": {"layers": 12, "width": 768, "hidden": 3072},
    "open_clip_h": {"layers": 23, "width": 1024, "hidden": 4096},
    "open_clip_big_g": {"layers": 32, "width": 1280, "hidden": 5120},
    "t5_xxl": {"layers": 24, "width": 4096, "hidden": 10240, "gated": True, "vocabulary": 32128},
    "mt5_xl": {"layers": 24, "width": 2048, "hidden": 5120, "gated": True, "vocabulary": 250112,
               "tokens": 256},
    "bert": {"layers": 24, "width": 1024, "hidden": 4096, "vocabulary": 47020},
}  # fmt: skip


def text_encoder(name: str, consumers: Sequence[int], size: int | None = None) -> Component:
    """An encoder by name; ``size`` are T5's tokens, or elements of CLIP-L's pooled result."""
    given = {"tokens": 77, **_TEXT[name]}
    if size is not None:
        given["result" if name == "clip_l" else "tokens"] = size
    return transformer(name.replace("_", "-"), consumers=consumers, **given)
