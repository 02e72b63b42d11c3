"""Faulty weight files are refused in every family, with all names at once."""

import pytest
import torch

import model_specs
from megatron_pulse.backbone.published_weights import PublishedError, adopted, to_published

TINY = [
    "uvit-tiny", "sd-tiny", "sdxl-tiny", "hunyuan-tiny", "dit-tiny", "pixart-tiny", "sd3-tiny",
    "flux-tiny",
]  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_every_tensor_that_is_no_weight_is_named(name):
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    backbone = model_specs.load_backbone(name)
    ours = weights_of(whole_stage(backbone, initialise=True))
    form = model_specs.published_form(backbone)
    theirs = to_published(form, ours)
    assert dict(adopted(form, ours, theirs, name)).keys() == ours.keys()
    names = sorted(theirs)[:5]
    kinds = [torch.int32, torch.bool, torch.complex64]
    changed = {key: theirs[key].to(kind) for key, kind in zip(names, kinds, strict=False)}
    for key, value in zip(names[3:], (torch.nan, -torch.inf), strict=True):
        changed[key] = theirs[key].clone()
        changed[key].view(-1)[-1] = value
    with pytest.raises(PublishedError) as caught:
        list(adopted(form, ours, {**theirs, **changed}, name))
    assert len(caught.value.faults) == 5
    for key in names:
        assert sum(fault.startswith(f"{key} ") for fault in caught.value.faults) == 1
