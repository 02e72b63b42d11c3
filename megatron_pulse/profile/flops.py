"""Floating-point operations of each layer, counted on meta tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_pulse.backbone.chain import COMPUTE, Backbone, Layer, TensorSpec
from megatron_pulse.backbone.dataflow import required_gradients
from megatron_pulse.backbone.shape_buckets import at_shape, shares_of
from megatron_pulse.profile.measurement.layer_call import layer_kind
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one layer for one microbatch; multiplication and addition count as two.

    ``backward`` is that of flash attention, which recomputes attention scores. It includes the
    input gradient of every layer with a backward pass, needed or not, as in published figures.
    """

    forward: int
    backward: int


class FlashAttention(TorchFunctionMode):
    """Replaces attention by the flash operator.

    On the meta device torch would choose plain matrix products, whose backward has fewer operations
    than the kernels on a GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        return func(*args, **(kwargs or {}))


def count_flops(
    backbone: Backbone, micro_batch_size: int = 1, *, flash: bool = True
) -> tuple[LayerFlops, ...]:
    """Operations of each layer of the whole model (tensor-parallel size 1).

    Without ``flash``, attention scores are counted once, as usual for a model's operations.
    """
    context = meta_context()
    kinds = [layer_kind(backbone, i) for i in range(len(backbone.layers))]
    counted: dict[str, LayerFlops] = {}
    wanted = required_gradients(backbone)
    with some_process_group(), torch.device("meta"):
        for kind, layer, runs in zip(kinds, backbone.layers, wanted.layers, strict=True):
            if kind not in counted:
                module = layer.build(context)
                counted[kind] = _count(backbone, layer, module, micro_batch_size, flash, runs)
    return tuple(counted[kind] for kind in kinds)


def model_flops(backbone: Backbone) -> int:
    """Operations of a model's forward and backward for one sample, without recomputation.

    The basis of MFU (PaLM, arXiv:2204.02311, appendix B). The mean over shapes, if there are
    several.
    """
    return round(
        sum(
            share * (layer.forward + layer.backward)
            for which, share in enumerate(shares_of(backbone))
            for layer in count_flops(at_shape(backbone, which), flash=False)
        )
    )


def _count(
    backbone: Backbone, layer: Layer, module: Any, micro_batch_size: int, flash: bool, runs: bool
) -> LayerFlops:
    """Operations of one layer; ``runs`` is true if it has a backward pass."""
    compute = next(
        (p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32
    )  # derived chains may have any dtype

    def make(spec: TensorSpec, trained: bool = runs) -> torch.Tensor:
        dtype = compute if spec.dtype == COMPUTE else getattr(torch, spec.dtype)
        tensor = torch.empty(spec.full_shape(micro_batch_size), dtype=dtype)
        return tensor.requires_grad_(trained and spec.dtype == COMPUTE)

    inputs = tuple(map(make, layer.inputs))
    skips = {layer.own(name): make(spec) for name, spec in layer.pops.items()}
    conditioning = {edge.name: make(edge.spec) for edge in backbone.conditioning}
    conditioning |= {name: make(spec, False) for name, spec in backbone.batch_fields.items()}
    used = {layer.own(name): conditioning[name] for name in layer.uses}
    attention = FlashAttention() if flash else nullcontext()
    with attention, FlopCounterMode(display=False) as counter:
        results = module(inputs, skips, used)
        forward = counter.get_total_flops()
        if trained := [tensor for tensor in results if tensor.requires_grad]:
            torch.autograd.backward(trained, [torch.empty_like(t) for t in trained])
    return LayerFlops(forward, counter.get_total_flops() - forward)
