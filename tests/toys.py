"""Small backbones that have every feature the runtime must handle, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec

WIDTH = 6
TOKENS = TensorSpec((4, WIDTH), batch_dim=1)
SIDE = TensorSpec((3,), batch_dim=0)


class ToyLayer(nn.Module):
    """A residual layer that may pop skips, read conditioning, carry a second stream, provide."""

    num_calls = 0  # of all, in training

    def __init__(self, num_pops: int, num_uses: int, provides: bool, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH * (1 + num_pops), WIDTH)
        self.side = nn.Linear(3, 3)
        self.condition = nn.Linear(2, WIDTH) if num_uses else None
        self.provide = nn.Linear(1, 2) if provides else None
        self.fails = fails

    def forward(
        self, inputs: tuple[Tensor, ...], skips: Mapping[str, Tensor], conditioning: Any
    ) -> tuple[Tensor, ...]:
        ToyLayer.num_calls += torch.is_grad_enabled()
        tokens, side = inputs if len(inputs) == 2 else (inputs[0], inputs[0].mean((0, 2))[:, None])
        if side.shape[1] == 1:
            side = side.repeat(1, 3)
        if self.fails:
            raise ValueError("this layer fails on purpose")
        change = self.linear(torch.cat([tokens, *skips.values()], -1))
        if self.condition is not None:
            change = change + self.condition(conditioning["temb"])
        tokens = tokens + torch.tanh(change) + side.mean(1)[None, :, None]
        outputs = (tokens, torch.tanh(self.side(side)) + side)
        if self.provide is not None:
            outputs = (*outputs, self.provide(conditioning["timesteps"][:, None].to(tokens.dtype)))
        return outputs


class ToyEmbedder(nn.Module):
    """Provides a conditioning of width 2 from the timesteps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        times = conditioning["timesteps"][:, None].to(self.linear.weight.dtype)
        return (*inputs, self.linear(times / 1000))


class ToyHead(nn.Module):
    """Joins the two streams into the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        return (self.linear(inputs[0]) * inputs[1].mean(1)[None, :, None],)


def toy_backbone(
    num_layers: int,
    skips: list[tuple[int, int]],
    conditioned: tuple[int, ...] = (),
    failing: int | None = None,
    embedder: bool = False,
) -> Backbone:
    """``num_layers`` two-stream layers and a head; ``skips`` are (source, destination).

    The ``conditioned`` layers use what an ``embedder`` at the front provides, or layer 0.
    """

    def build(index: int, num_pops: int) -> Callable[[Any], nn.Module]:
        return lambda context: ToyLayer(
            num_pops,
            int(index in conditioned),
            provides=provides(index),
            fails=index == failing,
        )

    def provides(index: int) -> bool:
        return bool(conditioned) and index == 0 and not embedder

    temb = {"temb": TensorSpec((2,))}
    layers = []
    if embedder:
        layers.append(
            Layer(
                "embed",
                lambda context: ToyEmbedder(),
                (TOKENS,),
                (TOKENS,),
                provides=temb,
                uses=("timesteps",),
                embedder=True,
            )
        )
    for i in range(num_layers):
        pops = {f"s{a}-{b}": TOKENS for a, b in skips if b == i}
        uses = (("timesteps",) if provides(i) else ()) + (("temb",) if i in conditioned else ())
        layers.append(
            Layer(
                name=f"blocks.{i}",
                build=build(i, len(pops)),
                inputs=(TOKENS, SIDE) if i else (TOKENS,),
                outputs=(TOKENS, SIDE),
                pushes={f"s{a}-{b}": 0 for a, b in skips if a == i},
                pops=pops,
                provides=temb if provides(i) else {},
                uses=uses,
            )
        )
    layers.append(
        Layer("head", lambda context: ToyHead(), inputs=(TOKENS, SIDE), outputs=(TOKENS,))
    )
    return Backbone(
        "toy",
        tuple(layers),
        {"timesteps": TensorSpec((), dtype="float32")} if conditioned else {},
        {"name": "toy", "options": {}},
    )


def nested(num_layers: int, num_skips: int) -> list[tuple[int, int]]:
    """``num_skips`` nested skips over ``num_layers`` layers."""
    return [(i, num_layers - 1 - i) for i in range(num_skips)]
