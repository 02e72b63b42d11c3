"""Requirements on layers' modules so that results do not depend on the partition.

Faults name the layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Layer
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.tracing.checks.module_state import complex_parameters


def built_elsewhere(layers: Iterable[Layer], context: Any) -> Iterator[tuple[str, nn.Module]]:
    """Build layers of other processes on the meta device, by name.

    Layers that fail to build are skipped. Tensors already held by their factories keep their
    memory.
    """
    with generators_kept(), torch.device("meta"):
        for layer in layers:
            try:
                yield layer.name, layer.build(context)
            except Exception:  # the layer's own process reports the error
                continue


@contextmanager
def buffers_kept(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the modules' buffers on exit, whether modified or replaced."""
    found = [
        (part, name, buffer, None if buffer is None else buffer.clone())
        for root in roots
        for part in root.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in found:
                part._buffers[name] = buffer
                if buffer is not None and value is not None and not _is_expanded(buffer):
                    buffer.copy_(value)


@contextmanager
def attributes_kept(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Restore attributes of the modules and their parts on exit; in-place changes remain."""
    found = [(vars(part), dict(vars(part))) for root in roots for part in root.modules()]
    try:
        yield
    finally:
        for attributes, values in found:
            attributes.clear()
            attributes.update(values)


def _is_expanded(tensor: Tensor) -> bool:
    """True if elements share memory; torch refuses writes into such a tensor."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in sides)


def unsound(modules: Sequence[tuple[str, nn.Module]], frozen: Collection[str] = ()) -> list[str]:
    """Faults that make results of layers depend on the number of processes.

    ``frozen`` names the layers that are declared as not trained.
    """
    return [
        *(fault for name, module in modules for fault in _random(name, module)),
        *(f"{name}: {fault}" for name, module in modules for fault in complex_parameters(module)),
        *(fault for name, module in modules if name in frozen for fault in _trained(name, module)),
        *_shared(modules),
    ]


def _random(layer: str, module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        if part.training and (what := _draws(part)):
            inside = f" ({name})" if name else ""
            yield (
                f"{layer}: {type(part).__name__}{inside} draws {what}, which differ between "
                "layouts. Remove it, or set its probability to 0"
            )


def _trained(layer: str, module: nn.Module) -> Iterator[str]:
    if trained := [name for name, p in module.named_parameters() if p.requires_grad]:
        yield (
            f"{layer}: declared with trained=False, but its parameter {trained[0]} requires a "
            "gradient. Call requires_grad_(False) on the module that it builds"
        )


def _draws(part: nn.Module) -> str:
    """Description of a module's random draws in training; empty without draws."""
    match part:
        case nn.modules.dropout._DropoutNd():
            return f"with p = {part.p:g}" if part.p else ""
        case nn.RNNBase() | nn.MultiheadAttention():
            return f"with dropout = {part.dropout:g}" if part.dropout else ""
        case nn.RReLU():
            return "slopes"  # even with a single slope to draw
        case nn.FractionalMaxPool2d() | nn.FractionalMaxPool3d():
            return "regions"
    return ""


def shared_buffers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, dict[str, str]]:
    """Buffers that layers share, by layer and name, each with another layer that has it."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for layer, module in modules:
        for name, buffer in module.named_buffers():
            owners.setdefault(id(buffer), []).append((layer, name))
    found: dict[str, dict[str, str]] = {}
    for places in owners.values():
        for layer, name in places:
            if others := [other for other, _ in places if other != layer]:
                found.setdefault(layer, {})[name] = others[0]
    return found


def _shared(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[str]:
    first: dict[int, tuple[str, str]] = {}
    told: set[tuple[str, str]] = set()
    for layer, module in modules:
        for name, parameter in module.named_parameters():
            before, as_name = first.setdefault(id(parameter), (layer, name))
            if before == layer or (before, layer) in told:
                continue
            told.add((before, layer))
            yield shared_parameter_fault(layer, name, before, as_name)


def shared_parameter_fault(layer: str, name: str, before: str, as_name: str) -> str:
    """Fault of a parameter that an earlier layer has too."""
    return (
        f"{layer}: its parameter {name} is also {before}'s {as_name}. Layers cannot share "
        "parameters, since they may run in different processes. Make a new one in each"
    )
