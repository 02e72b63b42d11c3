"""A chain of the smallest layers, whose memory and operations are known by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec

WIDTH = 8
ROW = TensorSpec((WIDTH,))


class Plain(nn.Module):
    """A function of the boundary tensor, and of the skip or conditioning if there is one."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        others = (*skips.values(), *conditioning.values())
        return (self.function(self.parts, inputs[0], *others),)


class Embedder(nn.Module):
    """Doubles the batch's vector with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        return (*inputs, self.linear(conditioning["vector"]))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def small_backbone() -> Backbone:
    """embedder, linear, tanh, gelu and linear, times conditioning, plus skip."""

    def layer(name: str, build: Callable[[], nn.Module], **more: Any) -> Layer:
        return Layer(
            name, lambda context: build().to(context.config.params_dtype), (ROW,), (ROW,), **more
        )

    return Backbone(
        "small",
        (
            layer("embed", Embedder, provides={"c": ROW}, uses=("vector",), embedder=True),
            layer("first", lambda: Plain(lambda p, x: p["l"](x), l=linear())),
            layer("tanh", lambda: Plain(lambda p, x: torch.tanh(x))),
            layer(
                "mlp",
                lambda: Plain(lambda p, x: p["l"](nn.functional.gelu(x)), l=linear()),
                pushes={"s": 0},
            ),
            layer("scale", lambda: Plain(lambda p, x, c: x * c), uses=("c",)),
            layer("add", lambda: Plain(lambda p, x, s: x + s), pops={"s": ROW}),
        ),
        {"vector": ROW},
        {"name": "small", "options": {}},
    )
