"""Example of a family in one file: residual convolutions with long skips at one resolution.

Only functions that build modules import torch, so listing and planning need no torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec


@dataclass(frozen=True)
class ExampleConfig:
    """Config with ``depth`` blocks of ``width`` channels per side, for square grey images."""

    width: int = 32
    depth: int = 3
    image_size: int = 28

    def faults(self) -> list[str]:
        """Inconsistencies between the fields, one text each."""
        return [f"{key}: must be at least 1" for key, value in vars(self).items() if value < 1]


CONFIGS = {"example-tiny": ExampleConfig(), "example-deep": ExampleConfig(width=128, depth=12)}


def build_backbone(name: str, config: ExampleConfig) -> Backbone:
    """Chain: ``time``, ``stem``, ``down.*`` (pushing a skip each), ``up.*`` (popping), ``head``."""
    image, hidden = (TensorSpec((c, *[config.image_size] * 2)) for c in (1, config.width))
    build = functools.partial(functools.partial, _build, config.width)
    block = functools.partial(Layer, inputs=(hidden,), outputs=(hidden,), uses=("temb",))
    time = Layer(
        "time",
        build("time", 0, 0),
        (image,),
        (image,),
        provides={"temb": TensorSpec((config.width,))},
        uses=("timesteps",),
        embedder=True,  # reads only the batch, so every device may run a copy
    )
    blocks = [
        block(f"down.{i}", build("block", config.width, config.width), pushes={f"skip.{i}": 0})
        for i in range(config.depth)
    ]
    blocks += [
        block(f"up.{i}", build("block", 2 * config.width, config.width), pops={f"skip.{i}": hidden})
        for i in reversed(range(config.depth))
    ]
    stem = Layer("stem", build("conv", 1, config.width), (image,), (hidden,))
    head = Layer("head", build("conv", config.width, 1), (hidden,), (image,))
    fields = {"timesteps": TensorSpec((), dtype="float32")}
    # Other facts of a Backbone: num_classes=, null_label=, num_heads=, patch_size=.
    return Backbone(name, (time, stem, *blocks, head), fields)


def _build(width: int, kind: str, into: int, out: int, context: LayerContext) -> Any:
    """Module of a layer, called with (inputs, skips, conditioning); returns the outputs."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            conv = functools.partial(torch.nn.Conv2d, into, out, 3, padding=1)
            self.linear = torch.nn.Linear(1, width) if kind == "time" else conv()

        def forward(self, inputs: Any, skips: Any, conditioning: Any) -> Any:
            if kind == "time":
                times = conditioning["timesteps"][:, None] / 1000
                return (*inputs, self.linear(times.to(self.linear.weight.dtype)))
            change = self.linear(torch.cat([*inputs, *skips.values()], dim=1))
            if kind == "conv":
                return (change,)
            return (inputs[0] + torch.tanh(change + conditioning["temb"][:, :, None, None]),)

    return Module().to(context.config.params_dtype)
