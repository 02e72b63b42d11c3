"""The chain of a locked UNet and its control branch. Imports no torch until a layer builds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder
from model_specs.controlnet.config import ControlNetConfig
from model_specs.unet.chain import chain_at as unet_at

BRANCH = "controlnet."
"""Prefix of the names of the branch's layers and skips."""
TEMB = "control_temb"
"""Name of the branch's own timestep embedding."""

Build = Callable[[LayerContext], Any]


def build_backbone(name: str, config: ControlNetConfig) -> Backbone:
    """Chain of the UNet, with each encoder layer followed by the branch's copy."""
    return config.chain_of_sizes(functools.partial(_chain, name, config))


def _chain(name: str, config: ControlNetConfig, height: int, width: int) -> Backbone:
    unet, factor = unet_at(name, config, height, width), config.conditioning_factor
    shape = (config.conditioning_channels, factor * height, factor * width)
    picture = {"conditioning": TensorSpec(shape)}
    layers = tuple(_Chain(config).layers(unet.layers))
    return dataclasses.replace(unet, layers=layers, batch_fields={**unet.batch_fields, **picture})


class _Chain:
    """Builder of the combined chain; ``branch`` holds the outputs of the branch's last layer."""

    def __init__(self, config: ControlNetConfig) -> None:
        self.build = builder("model_specs.controlnet.modules", config)
        self.branch: tuple[TensorSpec, ...] = ()

    def layers(self, unet: tuple[Layer, ...]) -> list[Layer]:
        time, first, *others = unet
        encoder = list(takewhile(lambda layer: "up_blocks" not in layer.name, others))
        (temb,) = time.provides.values()
        branch_time = dataclasses.replace(time, name=f"{BRANCH}{time.name}", provides={TEMB: temb})
        done = [self._locked(time), branch_time, self._enter(first)]
        done.append(self._beside_branch(first))
        for layer in encoder:
            done += [self._beside_branch(layer), self._in_branch(layer)]
        done.append(self._join())
        return done + [self._decoder(layer) for layer in others[len(encoder) :]]

    def _locked(self, layer: Layer) -> Layer:
        return dataclasses.replace(
            layer, build=self.build("locked", build=layer.build), trained=False
        )

    def _enter(self, layer: Layer) -> Layer:
        """First layer of the branch; the noisy sample passes through to the UNet."""
        self.branch = layer.outputs
        (image,) = layer.inputs
        (hidden,) = layer.outputs
        sizes = {"in_channels": image.shape[0], "out_channels": hidden.shape[0]}
        return Layer(
            f"{BRANCH}{layer.name}",
            self.build("Enter", **sizes),
            layer.inputs,
            (image, hidden),
            pushes={f"{BRANCH}{layer.name}": 1},
            uses=("conditioning",),
            beside={0: 0},
        )

    def _beside_branch(self, layer: Layer) -> Layer:
        """Locked layer, with the branch's tensors passing through."""
        count, outputs = len(layer.inputs), len(layer.outputs)
        build = self.build("in_lane", build=layer.build, start=0, count=count, trained=False)
        return dataclasses.replace(
            layer,
            build=build,
            inputs=(*layer.inputs, *self.branch),
            outputs=(*layer.outputs, *self.branch),
            beside={outputs + i: count + i for i in range(len(self.branch))},
            trained=False,
        )

    def _in_branch(self, layer: Layer) -> Layer:
        """Branch copy of a layer, with the locked layer's results passing through."""
        passing, count = layer.outputs, len(layer.inputs)
        start = len(passing)
        names = {"temb": TEMB}
        self.branch = layer.outputs
        return dataclasses.replace(
            layer,
            name=f"{BRANCH}{layer.name}",
            build=self.build("in_lane", build=layer.build, start=start, count=count, renamed=names),
            inputs=(*passing, *layer.inputs),
            outputs=(*passing, *layer.outputs),
            pushes={f"{BRANCH}{name}": start + i for name, i in layer.pushes.items()},
            uses=tuple(names.get(name, name) for name in layer.uses),
            beside={i: i for i in range(start)},
        )

    def _join(self) -> Layer:
        """Layer that adds the branch's output to the output of the UNet's mid block."""
        (hidden,) = self.branch
        build = self.build("Join", channels=hidden.shape[0])
        return Layer(f"{BRANCH}join", build, (hidden, hidden), (hidden,))

    def _decoder(self, layer: Layer) -> Layer:
        """Locked decoder layer; a layer with a skip also takes, and trains, the branch's skip."""
        if not layer.pops:
            return self._locked(layer)
        ((skip, spec),) = layer.pops.items()
        return dataclasses.replace(
            layer,
            build=self.build("controlled", build=layer.build, skip=skip, channels=spec.shape[0]),
            pops={skip: spec, f"{BRANCH}{skip}": spec},
        )
