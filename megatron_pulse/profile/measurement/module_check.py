"""Check of layers whose modules cannot be built or called, or break their declaration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.errors import describe_exception
from megatron_pulse.profile.measurement.layer_call import make_call
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group


@contextmanager
def naming_module_faults(
    backbone: Backbone, dtype: str = "float32", context: int = 1
) -> Iterator[None]:
    """Convert errors into BackboneError with a fault per faulty module.

    Other errors pass unchanged. Free of cost without errors. ``context`` is that of
    ``meta_context``.
    """
    try:
        yield
    except Exception as error:
        if faults := module_faults(backbone, dtype, context):
            raise BackboneError(backbone.name, faults) from error
        raise


def module_faults(backbone: Backbone, dtype: str = "float32", context: int = 1) -> list[str]:
    """Faults of all layers' modules, each tried alone on meta tensors."""
    within = meta_context(dtype, context=context)
    faults = []
    with some_process_group(), torch.device("meta"), torch.no_grad():
        for i, layer in enumerate(backbone.layers):
            doing = "built"
            try:
                module = layer.build(within)
                doing = "called with the tensors that its layer declares"
                call = make_call(backbone, i, module, 2, dtype, "meta")
                if misfit := call.result_mismatch(call.forward()):
                    faults.append(f"layer {i} ({layer.name}): {misfit}")
            except Exception as error:  # custom families may raise anything
                faults.append(
                    f"layer {i} ({layer.name}): cannot be {doing}: {describe_exception(error)}"
                )
    return faults
