"""Names the layers whose modules cannot be built, called, or return other than they declare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.faults import raised
from megatron_pulse.profile.measuring.building import meta_context, some_process_group
from megatron_pulse.profile.measuring.layer_call import make_call


@contextmanager
def naming_module_faults(backbone: Backbone, dtype: str = "float32") -> Iterator[None]:
    """What is raised within becomes BackboneError with a fault for every module that has one.

    Other errors stay as they are. Costs nothing where nothing is raised.
    """
    try:
        yield
    except Exception as error:
        if faults := module_faults(backbone, dtype):
            raise BackboneError(backbone.name, faults) from error
        raise


def module_faults(backbone: Backbone, dtype: str = "float32") -> list[str]:
    """Every layer whose module is faulty, tried alone on tensors without memory."""
    context = meta_context(dtype)
    faults = []
    with some_process_group(), torch.device("meta"), torch.no_grad():
        for i, layer in enumerate(backbone.layers):
            doing = "built"
            try:
                module = layer.build(context)
                doing = "called with the tensors that its layer declares"
                call = make_call(backbone, i, module, 2, dtype, "meta")
                if misfit := call.misfit(call.forward()):
                    faults.append(f"layer {i} ({layer.name}): {misfit}")
            except Exception as error:  # a family of one's own may raise anything
                faults.append(f"layer {i} ({layer.name}): cannot be {doing}: {raised(error)}")
    return faults
