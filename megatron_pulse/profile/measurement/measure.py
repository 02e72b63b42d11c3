"""Measurement of a profile on a device, one layer at a time."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_pulse.backbone.build_context import LOCAL, LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import require_valid
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.errors import format_faults
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.mean_over_shapes import over_shapes
from megatron_pulse.profile.measurement.clock import RepetitionLimits, mean_and_spread, repeat
from megatron_pulse.profile.measurement.layer import LayerMeasure, measure_layer, measurement_key
from megatron_pulse.profile.measurement.layer_call import (
    ExecutionModes,
    describe_chain,
    make_call,
)
from megatron_pulse.profile.measurement.layer_context import (
    meta_context,
    some_process_group,
)
from megatron_pulse.profile.measurement.machine import (
    computing_with,
    device_memory,
    driver,
    measured_device,
    num_threads,
)
from megatron_pulse.profile.measurement.memory import memory_columns
from megatron_pulse.profile.measurement.module_check import naming_module_faults
from megatron_pulse.profile.measurement.module_sizes import (
    ModuleSizes,
    can_halve,
    module_sizes,
    sharded_time,
)
from megatron_pulse.profile.parameters import weight_bytes
from megatron_pulse.profile.profile import Profile, ProfileError, Source
from megatron_pulse.progress import track

_DEFAULT_PATIENCE = RepetitionLimits()


def measure(
    backbone: Backbone,
    micro_batch_sizes: Sequence[int],
    device: str = "cpu",
    dtype: str = "float32",
    recompute: bool = False,
    patience: RepetitionLimits = _DEFAULT_PATIENCE,
    once_per_kind: bool = False,
    progress: bool = False,
    threads: int | None = None,
    running: ExecutionModes | None = None,
    transformer_impl: str = LOCAL,
    token_slices: Sequence[int] = (),
    context: int = 1,
) -> Profile:
    """Profile of ``backbone`` on this machine's ``device``, "cpu" or "cuda".

    Each layer is built alone, whole, with random parameters of ``dtype``, and measured with random
    inputs. Only one layer is on the device at a time. Layers that two tensor-parallel ranks can
    share are also measured as one of these ranks.

    - ``once_per_kind``: measure layers with equal operators and tensors once (see
    ``measurement_key``).
    - ``running``: the runtime's ``RUNNING``. With it, split backwards and selective recomputation
      are measured as well.
    - ``transformer_impl``: implementation of the layers; Megatron's local ones by default.
    - ``threads``: number of threads on a CPU (default: those of this process).
    - ``token_slices``: further numbers of slices of tokens, each with its own costs.
    - ``context``: the layers are the share of one of so many context-parallel ranks, whose
      collectives take no time.

    A chain of several shapes is measured at each (see ``over_shapes``). Raises ProfileError if a
    layer does not fit into the device's memory, or if Transformer Engine cannot run.
    """
    require_valid(backbone)
    if (
        not isinstance(micro_batch_sizes, Sequence)
        or not micro_batch_sizes
        or not all(type(size) is int and size > 0 for size in micro_batch_sizes)
    ):
        raise ProfileError(
            "micro_batch_sizes must be a list of whole numbers from 1 on, as in [1, 2, 4]; is "
            f"{micro_batch_sizes!r:.60}"
        )
    if backbone.num_shapes > 1:
        return over_shapes(
            backbone,
            lambda one: measure(
                one, micro_batch_sizes, device, dtype, recompute, patience, once_per_kind,
                progress, threads, running, transformer_impl, context=context,
            ),
        )  # fmt: skip
    place = torch.device(device)
    require_memory(backbone, place, dtype)
    require_implementation(transformer_impl, place)
    whole = meta_context(dtype, 1, transformer_impl, context)
    halved = meta_context(dtype, 2, transformer_impl)
    sizes: list[ModuleSizes] = []
    measured: dict[int, list[LayerMeasure]] = {size: [] for size in micro_batch_sizes}
    known: dict[str, LayerMeasure] = {}
    sliced: dict[int, dict[int, list[LayerMeasure]]] = {
        count: {size: [] for size in micro_batch_sizes} for count in token_slices
    }
    adams: dict[str, float] = {}
    optimizer_s: list[float] = []
    halved_s: dict[int, list[float]] = {size: [] for size in micro_batch_sizes}
    everything, silent = range(len(backbone.layers)), not progress
    layers = track(everything, "measuring", "layers", silent=silent, calm=True)
    checked = naming_module_faults(backbone, dtype, context)
    with computing_with(threads), checked, some_process_group():
        used_threads = num_threads(place)

        def timed(i: int, module: Any, size: int, of: str = "whole") -> LayerMeasure:
            layer = backbone.layers[i]
            try:
                call = make_call(backbone, i, module, size, dtype, place)
                if len(sizes) == i:
                    sizes.append(module_sizes(module, call.forward, size))
                key = f"{of}/{measurement_key(call) if once_per_kind else f'{i}/{size}'}"
                if key not in known:
                    known[key] = measure_layer(
                        call,
                        len(layer.outputs),
                        place,
                        patience,
                        None if of == "half" else running,
                    )
            except torch.OutOfMemoryError as error:
                raise ProfileError(
                    f"{layer.name} does not fit on {device} at microbatch size {size}; "
                    "profile smaller sizes"
                ) from error
            return known[key]

        def built(i: int, within: LayerContext) -> Any:
            module = backbone.layers[i].build(within).to(place)
            fill(module)
            return module

        for i in layers:
            module = built(i, whole)
            for size in micro_batch_sizes:
                measured[size].append(timed(i, module, size))
            for count, of_slices in sliced.items():
                of = f"{count} slices" if set_token_slices(module.modules(), count) else "whole"
                for size in micro_batch_sizes:
                    of_slices[size].append(timed(i, module, size, of))
            halves = context == 1 and can_halve(backbone, sizes[i])
            half = built(i, halved) if halves else None
            for size in micro_batch_sizes:
                seconds = 0.0 if half is None else timed(i, half, size, "half").whole_s
                halved_s[size].append(seconds)
            del half
            adam = str([tuple(p.shape) for p in module.parameters() if p.requires_grad])
            if adam not in adams:
                adams[adam] = optimizer_seconds(module.parameters(), place, patience)
            optimizer_s.append(adams[adam])
            del module
    chain, skips, conditioning = describe_chain(backbone, sizes, dtype)
    most = max(micro_batch_sizes)
    chain = tuple(
        replace(
            layer,
            optimizer_s=seconds,
            sharded_time=sharded_time(alone.whole_s, half_s) if half_s else 1.0,
        )
        for layer, seconds, alone, half_s in zip(
            chain, optimizer_s, measured[most], halved_s[most], strict=True
        )
    )
    return Profile(
        backbone=backbone.record,
        source=Source.MEASURED,
        device=measured_device(place, used_threads),
        memory_bytes=device_memory(place),
        dtype=dtype,
        recompute=recompute,
        method=_method(patience, once_per_kind, running is not None),
        layers=chain,
        times={
            size: _times(backbone, measured[size], halved_s[size]) for size in micro_batch_sizes
        },
        sliced={
            count: {
                size: _times(backbone, of_slices[size], halved_s[size])
                for size in micro_batch_sizes
            }
            for count, of_slices in sliced.items()
        },
        skips=skips,
        conditioning=conditioning,
        versions=_versions(place),
        threads=used_threads,
        transformer_impl=transformer_impl,
    )


def require_implementation(transformer_impl: str, place: torch.device) -> None:
    """Raise ProfileError if layers of ``transformer_impl`` cannot run on ``place``."""
    if transformer_impl == LOCAL:
        return
    if place.type != "cuda":
        raise ProfileError(f"Transformer Engine runs on GPUs alone: measure {LOCAL} layers")
    if importlib.util.find_spec("transformer_engine") is None:
        raise ProfileError(
            "Transformer Engine is not installed: pip install 'transformer-engine[pytorch]', or "
            f"measure {LOCAL} layers"
        )


def require_memory(backbone: Backbone, place: torch.device, dtype: str) -> None:
    """Raise ProfileError listing the layers whose weights and gradients exceed memory."""
    memory, each = device_memory(place), 2 * getattr(torch, dtype).itemsize
    faults = [
        f"{layer.name}: weights and their gradients are {size:,} bytes"
        for layer, size in zip(backbone.layers, weight_bytes(backbone, each), strict=True)
        if size > memory
    ]
    if faults:
        raise ProfileError(
            format_faults(
                f"the {place.type} has {memory:,} bytes of memory; of {backbone.name} do not fit",
                faults,
            )
        )


@torch.no_grad()
def fill(module: Any) -> None:
    """Fill every parameter with finite values, random or zero; times do not depend on them."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.normal_(0, 0.02)
        else:
            parameter.zero_()


def _times(
    backbone: Backbone, measured: Sequence[LayerMeasure], halved_s: Sequence[float]
) -> tuple[LayerTimes, ...]:
    memory = memory_columns(backbone, [layer.memory for layer in measured])
    found = []
    for layer, columns in zip(measured, memory, strict=True):
        forward, input_grad, weight_grad = layer.split
        found.append(
            LayerTimes(
                *layer.times,
                *layer.spreads,
                **columns,
                split_forward_s=forward,
                split_input_grad_s=input_grad,
                split_weight_grad_s=weight_grad,
                selective_s=layer.selective_s,
            )
        )
    return tuple(found)


def _method(patience: RepetitionLimits, once_per_kind: bool, split: bool) -> str:
    each = "each kind of layer" if once_per_kind else "each layer"
    how = ", with whole and with split backwards" if split else ""
    return (
        f"{each} at each size{how}: means of at least "
        f"{patience.min_repetitions} repetitions in at least {patience.enough_s:g} s, within "
        f"{patience.limit_s:g} s"
    )


def _versions(device: torch.device) -> dict[str, str]:
    versions = {
        "torch": str(torch.__version__),
        "megatron-core": importlib.metadata.version("megatron-core"),
    }
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["driver"] = driver()
    return versions


def optimizer_seconds(
    parameters: Iterable[torch.nn.Parameter], device: torch.device, patience: RepetitionLimits
) -> float:
    """Seconds of an optimizer step on fp32 main parameters of ``parameters``.

    Includes training's Adam, gradient norm, clipping, zeroing, and rounding to the parameters.
    """
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, Adam

    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return 0.0
    masters = [torch.nn.Parameter(p.detach().float().clone()) for p in trained]
    for master in masters:
        master.grad = torch.full_like(master, 1e-3)
    # Where Adam is torch's own, training uses its fused form on GPUs.
    fused = {"fused": True} if USING_PYTORCH_OPTIMIZER and device.type == "cuda" else {}
    adam = Adam(masters, lr=1e-9, **fused)
    rounded = [(p, m) for p, m in zip(trained, masters, strict=True) if p.dtype != m.dtype]

    def work(mark: Callable[[], None]) -> None:
        mark()
        torch.nn.utils.clip_grad_norm_(masters, 1e9)
        adam.step()
        with torch.no_grad():
            for parameter, master in rounded:
                parameter.copy_(master)
        for master in masters:
            assert master.grad is not None
            master.grad.zero_()
        mark()

    return mean_and_spread([row[0] for row in repeat(work, device, patience)])[0]
