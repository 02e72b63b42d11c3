"""Every family's chain in a small size: what each layer takes and gives."""

import pytest
import torch

from model_specs import load_backbone
from tests.model_specs.chains import build_chain, perturb

# Few tokens: on many, torch's attention in bf16 does without what ATEN_CPU_CAPABILITY says.
FEW = {"sample_size": 8}
VARIANTS = {
    "uvit": ("uvit-tiny", {}),
    "unet": ("unet-tiny", FEW),
    "sd": ("sd-tiny", {**FEW, "transformer_depth": "0,1,1,0"}),
    "sdxl": ("sdxl-tiny", FEW),
    "hunyuan-dit-v1.2": ("hunyuan-tiny", {}),
    "hunyuan-dit-v1.1": ("hunyuan-tiny", {"style_and_size": True}),
    "dit": ("dit-tiny", {}),
    "pixart-sigma": ("pixart-tiny", {}),
    "pixart-alpha": ("pixart-tiny", {"use_additional_conditions": True}),
    "sd3": ("sd3-tiny", {}),
    "sd3.5": ("sd3-tiny", {"qk_norm": True, "dual_attention_layers": [0, 2]}),
    "flux": ("flux-tiny", {}),
    "example": ("example-tiny", {"depth": 2, "image_size": 8}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_are_as_declared(variant, one_rank):
    """Every boundary, skip, conditioning tensor and the prediction has its spec's shape and dtype;
    an embedder gives the same without an image; bf16 begins with the same draws."""
    backbone = load_backbone(*VARIANTS[variant])
    whole, half = (build_chain(backbone, dtype) for dtype in (torch.float32, torch.bfloat16))
    parameters = whole.parameters()
    for name, low in half.parameters().items():
        assert torch.equal(low, parameters[name].bfloat16()), name
    for chain in (whole, half):
        perturb(chain.parameters().values())
        for size in (1, 3):
            image, fields = chain.batch(size)
            prediction = chain(image, fields)
            assert prediction.isfinite().all() and prediction.abs().max() > 0
            for layer, module in zip(backbone.layers, chain.modules, strict=True):
                if layer.embedder:
                    used = {name: fields[name] for name in layer.uses}
                    given, alone = (module(inputs, {}, used) for inputs in ((image,), ()))
                    assert len(alone) == len(layer.provides) > 0
                    assert all(map(torch.equal, alone, given[len(layer.outputs) :]))
