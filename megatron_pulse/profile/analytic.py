"""Analytic profile from operation and byte counts, without hardware or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.profile.flops import FlashAttention
from megatron_pulse.profile.layer_records import NO_SPREAD, LayerTimes
from megatron_pulse.profile.mean_over_shapes import over_shapes
from megatron_pulse.profile.measurement.context_rank import with_context_costs
from megatron_pulse.profile.measurement.layer_call import (
    ExecutionModes,
    LayerCall,
    describe_chain,
    layer_kind,
    make_call,
)
from megatron_pulse.profile.measurement.layer_context import (
    meta_context,
    some_process_group,
)
from megatron_pulse.profile.measurement.memory import (
    LayerMemory,
    SavedStorageRecorder,
    SavedStorages,
    forward_bytes,
    keeping_selected,
    live_bytes,
    memory_columns,
    wgrad_bytes,
)
from megatron_pulse.profile.measurement.module_check import naming_module_faults
from megatron_pulse.profile.measurement.module_sizes import (
    ModuleSizes,
    can_halve,
    module_sizes,
    sharded_time,
)
from megatron_pulse.profile.measurement.record_kernels import Kernels
from megatron_pulse.profile.profile import Profile, ProfileError, Source
from megatron_pulse.profile.roofline import Kernel, Roofline
from megatron_pulse.progress import track

_ROUNDING = 1e-9
"""Fraction of a layer's time below which a difference is rounding: equal kernels, other
sum order.
"""


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer.

    Kernels of its forward, whole backward, and input gradient alone. ``selective`` lists the
    kernels of both passes under selective recomputation (empty: unknown). ``unrepeated`` are the
    kernels of the forward after its last saved tensor. ``memory`` has the bytes.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_grad: tuple[Kernel, ...]
    selective: tuple[Kernel, ...]
    unrepeated: tuple[Kernel, ...]
    memory: LayerMemory


def analyse(
    backbone: Backbone,
    micro_batch_sizes: Sequence[int],
    roofline: Roofline,
    recompute: bool = False,
    progress: bool = False,
    running: ExecutionModes | None = None,
    token_slices: Sequence[int] = (),
    context: int = 1,
) -> Profile:
    """Profile of ``backbone`` on a device described by ``roofline``.

    Kernels run one after another, each at its roofline time (see ``devices`` and ``kernels``). With
    ``running``, the runtime's ``RUNNING``, bytes of deferred weight gradients and the effects of
    selective recomputation are included. A chain of several shapes is analysed at each (see
    ``over_shapes``). ``token_slices`` are further numbers of slices, each with its own costs. With
    ``context``, the layers are the share of one of so many context-parallel ranks, whose
    collectives take no time.

    Raises ProfileError, and BackboneError naming every layer that does not fit its specs.
    """
    if backbone.num_shapes > 1:
        return over_shapes(
            backbone,
            lambda one: analyse(
                one, micro_batch_sizes, roofline, recompute, progress, running, context=context
            ),
        )
    counts = (1, *token_slices)
    whole = meta_context(roofline.dtype, context=context)
    halved = meta_context(roofline.dtype, tensor=2)
    counted: dict[str, tuple[ModuleSizes, dict[int, list[LayerWork]], float]] = {}
    kinds = [layer_kind(backbone, i) for i in range(len(backbone.layers))]
    layers = track(kinds, "counting", "layers", silent=not progress)
    named = naming_module_faults(backbone, roofline.dtype, context)
    with named, some_process_group(), torch.device("meta"):
        for i, kind in enumerate(layers):
            if kind in counted:
                continue
            module = backbone.layers[i].build(whole)
            samples = micro_batch_sizes[0]
            call = make_call(backbone, i, module, samples, roofline.dtype, "meta")
            held = module_sizes(module, call.forward, samples)
            works: dict[int, list[LayerWork]] = {}
            for count in counts:
                if set_token_slices(module.modules(), count) or count == 1:
                    works[count] = [
                        count_work(backbone, i, module, size, roofline.dtype, running)
                        for size in micro_batch_sizes
                    ]
            share = 1.0
            if context == 1 and can_halve(backbone, held):
                half = backbone.layers[i].build(halved)
                most = max(range(len(micro_batch_sizes)), key=micro_batch_sizes.__getitem__)
                again = count_work(backbone, i, half, micro_batch_sizes[most], roofline.dtype)
                share = sharded_time(*(_whole_s(x, roofline) for x in (works[1][most], again)))
            counted[kind] = held, works, share
    sizes = [counted[kind][0] for kind in kinds]
    times = {
        count: {
            size: _times(
                backbone,
                [_in_slices(counted[kind][1], count)[at] for kind in kinds],
                roofline,
                [count > 1 and count in counted[kind][1] for kind in kinds],
            )
            for at, size in enumerate(micro_batch_sizes)
        }
        for count in counts
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
        times=times.pop(1),
        sliced=times,
        skips=skips,
        conditioning=conditioning,
        versions={"torch": torch.__version__},
    )


def analyse_context(
    profile: Profile,
    backbone: Backbone,
    roofline: Roofline,
    running: ExecutionModes | None = None,
) -> Profile:
    """``profile`` of ``analyse`` with its costs of context parallelism.

    Raises Faults if the tokens cannot be divided.
    """
    sizes, slices = [max(profile.micro_batch_sizes)], tuple(profile.sliced)

    def of_rank(part: Backbone, size: int) -> Profile:
        given = running, slices, size
        return analyse(part, sizes, roofline, False, False, *given)

    return with_context_costs(profile, backbone, of_rank)


def count_work(
    backbone: Backbone,
    index: int,
    module: Any,
    micro_batch_size: int,
    dtype: str,
    running: ExecutionModes | None = None,
) -> LayerWork:
    """Work of layer ``index`` at one microbatch size. Use under ``torch.device("meta")``."""
    call = make_call(backbone, index, module, micro_batch_size, dtype, "meta")
    kernels = Kernels()
    with torch.no_grad():
        # Computes the layer's constants, which later calls reuse.
        if misfit := call.result_mismatch(call.forward()):
            raise ProfileError(f"{backbone.layers[index].name}: {misfit}")
    saved_at = 0

    def note() -> None:
        nonlocal saved_at
        saved_at = kernels.count

    with FlashAttention(), live_bytes(call) as live, kernels:
        with kernels.record() as forward, SavedStorageRecorder(call, note) as storages:
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
        waiting = 0 if running is None else wgrad_bytes(call, running.leaving)
    again: tuple[Kernel, ...] = ()
    memory = LayerMemory(kept, live.peak, alone, waiting)
    if running is not None:
        part, peak, again = _selective(call, len(backbone.layers[index].outputs), running)
        memory = LayerMemory(kept, live.peak, alone, waiting, part, peak)
    rest = tuple(forward[saved_at:])
    return LayerWork(tuple(forward), tuple(backward), tuple(input_grad), again, rest, memory)


def _selective(
    call: LayerCall, num_outputs: int, running: ExecutionModes
) -> tuple[SavedStorages, int, tuple[Kernel, ...]]:
    """Saved bytes, peak bytes and kernels under selective recomputation."""
    kernels = Kernels()
    with FlashAttention(), live_bytes(call) as live, kernels:
        with kernels.record() as forward, keeping_selected(call, running.selecting) as storages:
            results = call.forward()
        kept = storages.count(results[:num_outputs])
        seeds = call.seeds(results)
        with kernels.record() as backward:
            call.backward(results, seeds)
    return kept, live.peak, (*forward, *backward)


def _in_slices(works: Mapping[int, list[LayerWork]], count: int) -> list[LayerWork]:
    """Work in ``count`` slices; that of the whole layer if it has no token-wise part."""
    return works.get(count, works[1])


def _whole_s(work: LayerWork, roofline: Roofline) -> float:
    return roofline.seconds(work.forward) + roofline.seconds(work.backward)


def _times(
    backbone: Backbone, work: Sequence[LayerWork], roofline: Roofline, sliced: Sequence[bool]
) -> tuple[LayerTimes, ...]:
    """Times of layers; what recomputation does not repeat counts in ``sliced`` ones, where it is
    much.
    """
    memory = memory_columns(backbone, [layer.memory for layer in work])
    times = []
    for layer, columns, in_slices in zip(work, memory, sliced, strict=True):
        forward, backward = roofline.seconds(layer.forward), roofline.seconds(layer.backward)
        input_grad = min(roofline.seconds(layer.input_grad), backward)
        weight_grad = backward - input_grad
        more_s = roofline.seconds(layer.selective) - forward - backward
        more_s = more_s if more_s > _ROUNDING * (forward + backward) else 0.0
        found = forward, input_grad, weight_grad, *NO_SPREAD
        rest_s = in_slices * roofline.seconds(layer.unrepeated)
        times.append(LayerTimes(*found, **columns, selective_s=more_s, unrepeated_s=rest_s))
    return tuple(times)
