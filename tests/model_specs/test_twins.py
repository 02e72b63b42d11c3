"""Families beside the chains that are derived of the modules that published them."""

from __future__ import annotations

import pytest
import torch

import model_specs
from megatron_pulse.backbone.published_weights import to_published
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import gradient_of
from tests.model_specs.twins import Twin
from tests.runtime.tiny import FAMILIES

SAME = ("unet-text", "hunyuan", "dit", "pixart", "sd3", "flux")
NAME, OPTIONS = FAMILIES["sdxl"]
PUBLISHED = {
    **{name: FAMILIES[name] for name in SAME},
    "sdxl": (NAME, {**OPTIONS, "mid_transformer_depth": 1}),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_family_is_the_chain_that_is_derived(family, one_rank):
    """The same skips, and with the same weights the same prediction and gradients, to rounding."""
    ours = build_chain(model_specs.load_backbone(*PUBLISHED[family]))
    twin = Twin(ours.backbone, torch.float32)
    perturb(ours.parameters().values())
    twin.module.load_state_dict(to_published(twin.published, ours.state()))
    image, fields = ours.batch(2)
    derived = twin.derive(image, fields)
    theirs = build_chain(derived)
    skips = [
        [(skip.spec.numel_per_sample, rank) for rank, skip in enumerate(by_end(chain.backbone))]
        for chain in (ours, theirs)
    ]
    assert skips[0] == skips[1]

    found = ours(image, fields)
    expected = twin.unpacked(theirs(*twin.batch(image, fields)), image)
    assert relative_error(found, expected) < 1e-5
    factors = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    for prediction in (found, expected):
        (prediction * factors).sum().backward()
    gradients = {name: gradient_of(p) for name, p in ours.parameters().items()}
    converted = to_published(twin.published, gradients)
    parameters = theirs.parameters()
    assert parameters.keys() <= converted.keys()
    largest = max(gradient_of(p).abs().max().item() for p in parameters.values())
    for name, gradient in converted.items():
        if name not in parameters:  # nothing of the prediction depends on it
            assert not gradient.any(), name
            continue
        wanted = gradient_of(parameters[name])
        scale = max(wanted.abs().max().item(), 1e-3 * largest)
        assert (gradient - wanted).abs().max().item() < 1e-4 * scale, name


def by_end(backbone):
    return sorted(backbone.skips, key=lambda skip: skip.destination)
