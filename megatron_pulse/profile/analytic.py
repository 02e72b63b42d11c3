"""A profile worked out from operations and bytes; no hardware, no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.profile.devices import Kernel, Roofline
from megatron_pulse.profile.flops import FlashAttention
from megatron_pulse.profile.measuring.building import (
    meta_context,
    some_process_group,
)
from megatron_pulse.profile.measuring.kernels import Kernels
from megatron_pulse.profile.measuring.layer_call import (
    LayerCall,
    Running,
    describe_chain,
    layer_kind,
    make_call,
)
from megatron_pulse.profile.measuring.memory import (
    Kept,
    KeptStorages,
    LayerMemory,
    forward_bytes,
    keeping_selected,
    live_bytes,
    memory_columns,
    waiting_bytes,
)
from megatron_pulse.profile.measuring.module_check import naming_module_faults
from megatron_pulse.profile.measuring.sizes import (
    ModuleSizes,
    can_halve,
    module_sizes,
    sharded_time,
)
from megatron_pulse.profile.profile import Profile, ProfileError, Source
from megatron_pulse.profile.record.times import NO_SPREAD, LayerTimes
from megatron_pulse.profile.shapes import over_shapes

_ROUNDING = 1e-9
"""Share of a layer's time that is none: the same kernels, summed in another order."""


@dataclass(frozen=True)
class LayerWork:
    """The kernels of one layer's forward, whole backward, and input gradient alone, and of both
    passes where what is cheap is computed again (none: not known); memory."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    selective: tuple[Kernel, ...]
    memory: LayerMemory


def analyse(
    backbone: Backbone,
    micro_batch_sizes: Sequence[int],
    roofline: Roofline,
    recompute: bool = False,
    progress: bool = False,
    running: Running | None = None,
) -> Profile:
    """The profile of ``backbone`` on a device that ``roofline`` describes.

    Every kernel takes as its roofline says (see ``devices`` and ``kernels``), one after another.
    With ``running``, the runtime's ``RUNNING``, what waiting weight gradients hold is found too,
    and what is kept and computed where what is cheap is computed again. A chain of several shapes
    is analysed at each (see ``over_shapes``).
    Raises ProfileError, and BackboneError that names every layer which does not fit its specs.
    """
    if backbone.num_shapes > 1:
        return over_shapes(
            backbone,
            lambda one: analyse(one, micro_batch_sizes, roofline, recompute, progress, running),
        )
    context, halved = meta_context(roofline.dtype), meta_context(roofline.dtype, tensor=2)
    counted: dict[str, tuple[ModuleSizes, list[LayerWork], float]] = {}
    kinds = [layer_kind(backbone, i) for i in range(len(backbone.layers))]
    layers = tqdm(
        kinds, "counting", unit="layer", delay=2, leave=False, disable=not progress or None
    )
    named = naming_module_faults(backbone, roofline.dtype)
    with named, some_process_group(), torch.device("meta"):
        for i, kind in enumerate(layers):
            if kind in counted:
                continue
            module = backbone.layers[i].build(context)
            samples = micro_batch_sizes[0]
            call = make_call(backbone, i, module, samples, roofline.dtype, "meta")
            held = module_sizes(module, call.forward, samples)
            work_of = [
                count_work(backbone, i, module, size, roofline.dtype, running)
                for size in micro_batch_sizes
            ]
            share = 1.0
            if can_halve(backbone, held):
                half = backbone.layers[i].build(halved)
                most = max(range(len(micro_batch_sizes)), key=micro_batch_sizes.__getitem__)
                again = count_work(backbone, i, half, micro_batch_sizes[most], roofline.dtype)
                share = sharded_time(*(_whole_s(x, roofline) for x in (work_of[most], again)))
            counted[kind] = held, work_of, share
    sizes = [counted[kind][0] for kind in kinds]
    work = {
        size: [counted[kind][1][at] for kind in kinds] for at, size in enumerate(micro_batch_sizes)
    }
    chain, skips, conditioning = describe_chain(backbone, sizes, roofline.dtype)
    chain = tuple(
        replace(layer, sharded_time=counted[kind][2])
        for layer, kind in zip(chain, kinds, strict=True)
    )
    return Profile(
        backbone=backbone.record,
        source=Source.ANALYTIC,
        device=roofline.device.name,
        memory_bytes=roofline.device.memory_bytes,
        dtype=roofline.dtype,
        recompute=recompute,
        method=roofline.method,
        layers=chain,
        times={size: _times(backbone, work[size], roofline) for size in micro_batch_sizes},
        skips=skips,
        conditioning=conditioning,
        versions={"torch": torch.__version__},
    )


def count_work(
    backbone: Backbone,
    index: int,
    module: Any,
    micro_batch_size: int,
    dtype: str,
    running: Running | None = None,
) -> LayerWork:
    """What layer ``index`` does at one microbatch size. Use under ``torch.device("meta")``."""
    call = make_call(backbone, index, module, micro_batch_size, dtype, "meta")
    kernels = Kernels()
    with torch.no_grad():
        # Makes the layer's constants, which later calls find.
        if misfit := call.misfit(call.forward()):
            raise ProfileError(f"{backbone.layers[index].name}: {misfit}")
    with FlashAttention(), live_bytes(call) as live, kernels:
        with kernels.record() as forward, KeptStorages(call) as storages:
            results = call.forward()
        kept = storages.count(results[: len(backbone.layers[index].outputs)])
        seeds = call.seeds(results)
        with kernels.record() as backward:
            call.backward(results, seeds)
    del results, seeds
    with FlashAttention(), call.frozen():
        results = call.forward()
        seeds = call.seeds(results)
        with kernels, kernels.record() as input_grad:
            call.input_gradients(results, seeds)
    with FlashAttention():
        alone = forward_bytes(call)
        waiting = 0 if running is None else waiting_bytes(call, running.leaving)
    again: tuple[Kernel, ...] = ()
    memory = LayerMemory(kept, live.peak, alone, waiting)
    if running is not None:
        part, peak, again = _selective(call, len(backbone.layers[index].outputs), running)
        memory = LayerMemory(kept, live.peak, alone, waiting, part, peak)
    return LayerWork(tuple(forward), tuple(backward), tuple(input_grad), again, memory)


def _selective(
    call: LayerCall, num_outputs: int, running: Running
) -> tuple[Kept, int, tuple[Kernel, ...]]:
    """What is kept where what is cheap is computed again, the most in use, and the kernels."""
    kernels = Kernels()
    with FlashAttention(), live_bytes(call) as live, kernels:
        with kernels.record() as forward, keeping_selected(call, running.selecting) as storages:
            results = call.forward()
        kept = storages.count(results[:num_outputs])
        seeds = call.seeds(results)
        with kernels.record() as backward:
            call.backward(results, seeds)
    return kept, live.peak, (*forward, *backward)


def _whole_s(work: LayerWork, roofline: Roofline) -> float:
    return roofline.seconds(work.forward) + roofline.seconds(work.backward)


def _times(
    backbone: Backbone, work: Sequence[LayerWork], roofline: Roofline
) -> tuple[LayerTimes, ...]:
    memory = memory_columns(backbone, [layer.memory for layer in work])
    times = []
    for layer, columns in zip(work, memory, strict=True):
        forward, backward = roofline.seconds(layer.forward), roofline.seconds(layer.backward)
        input_grad = min(roofline.seconds(layer.input_grad), backward)
        weight_grad = backward - input_grad
        more_s = roofline.seconds(layer.selective) - forward - backward
        more_s = more_s if more_s > _ROUNDING * (forward + backward) else 0.0
        found = forward, input_grad, weight_grad, *NO_SPREAD
        times.append(LayerTimes(*found, **columns, selective_s=more_s))
    return tuple(times)
