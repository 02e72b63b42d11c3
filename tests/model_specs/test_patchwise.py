"""Patch-wise training (2304.12526): families told the places of patches in whole samples."""

import pytest
import torch

from model_specs import compare_models, load_backbone, published_form
from model_specs.common.options import OptionError
from tests.model_specs.chains import build_chain

PATCHES = {"patchwise": "1/2:0.3,1/4:0.2"}
CORNERS = torch.tensor([[0, 4], [4, 2]])
FAMILIES = {
    "dit-tiny": {"sample_size": 8, "base_sample_size": 16},
    "pixart-tiny": {"sample_size": 8},
    "sd3-tiny": {"sample_size": 8},
}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_tokens_of_a_patch_equal_those_of_the_whole_sample_there(name, one_rank):
    chain = build_chain(load_backbone(name, {**FAMILIES[name], **PATCHES}), torch.float32)
    assert chain.backbone.shares == pytest.approx((0.5, 0.3, 0.2))
    (layer,) = [m for m in chain.modules if "Patch" in type(m).__name__]
    plain = build_chain(load_backbone(name, FAMILIES[name]), torch.float32)
    (without,) = [m for m in plain.modules if "Patch" in type(m).__name__]
    without.load_state_dict(layer.state_dict())
    image = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    (whole,) = without((image,), {}, {})
    (same,) = layer((image,), {}, {"patch_corner": torch.zeros(2, 2, dtype=torch.int64)})
    assert torch.equal(same, whole)
    patches = [image[i, :, t : t + 4, u : u + 4] for i, (t, u) in enumerate(CORNERS.tolist())]
    (tokens,) = layer((torch.stack(patches),), {}, {"patch_corner": CORNERS})
    grid = whole.unflatten(0, (4, 4))
    for i, (top, left) in enumerate(CORNERS.tolist()):
        expected = grid[top // 2 : top // 2 + 2, left // 2 : left // 2 + 2, i].flatten(0, 1)
        assert torch.equal(tokens[:, i], expected)


@torch.no_grad()
def test_first_convolution_of_a_unet_sees_the_coordinates_of_the_whole_sample(one_rank):
    backbone = load_backbone("unet-tiny", {"sample_size": 8, "patchwise": "1/2:0.5"})
    layer = build_chain(backbone, torch.float64).modules[1]
    image = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    (found,) = layer((image,), {}, {"patch_corner": CORNERS})
    line = torch.linspace(-1, 1, 8, dtype=torch.float64)
    whole = torch.stack(torch.meshgrid(line, line, indexing="ij"))
    places = [whole[:, top : top + 4, left : left + 4] for top, left in CORNERS.tolist()]
    expected = layer.conv(torch.cat([image, torch.stack(places)], dim=1))
    assert torch.allclose(found, expected, rtol=0, atol=1e-6)  # coordinates are fp32
    assert published_form(load_backbone("sd-tiny", {"patchwise": "1/2:0.5"})) is None
    plain = load_backbone("unet-tiny", {"sample_size": 8})
    assert "two more channels" in compare_models(plain.record, backbone.record).different[0]


@pytest.mark.parametrize("name", [*FAMILIES, "unet-tiny"])
@torch.no_grad()
def test_chain_predicts_patches_of_every_size(name, one_rank):
    sizes = {"sample_size": 8} if name == "unet-tiny" else FAMILIES[name]
    chain = build_chain(load_backbone(name, {**sizes, **PATCHES}), torch.float32)
    for shape, side in enumerate((8, 4, 2)):
        image, fields = chain.batch(2, shape=shape)
        fields["patch_corner"] = torch.tensor([[0, 0], [8 - side, 8 - side]])
        assert chain(image, fields).shape[-2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("flux-tiny", PATCHES, "patchwise: unsupported: rotary positions"),
        ("hunyuan-tiny", PATCHES, "patchwise: unsupported: rotary positions"),
        ("uvit-tiny", PATCHES, "patchwise: unsupported: positions are learned"),
        ("controlnet-tiny", PATCHES, "patchwise: a control branch copies a UNet"),
        ("diffusers:UNet2DModel", PATCHES, "patchwise: unsupported: traced modules"),
        ("dit-tiny", {"patchwise": "half"}, "'half' is not FRACTION:SHARE"),
        ("dit-tiny", {"patchwise": "1/2:0.5,2/4:0.1"}, "1/2 is repeated"),
        ("dit-tiny", {"patchwise": "3/2:0.5"}, "3/2 is not below 1"),
        ("dit-tiny", {"patchwise": "1/2:0.5,1/4:0.5"}, "add up to less than 1"),
        ("dit-tiny", {"patchwise": "1/3:0.5"}, "1/3 of 8x8 is not whole"),
        ("dit-tiny", {"patchwise": "1/8:0.5"}, "height 1 and width 1 is not"),
        ("dit-tiny", {"buckets": "8x4,4x8", **PATCHES}, "takes samples of one size"),
    ],
)
def test_refuses_patches_with_a_reason(name, options, said):
    with pytest.raises(OptionError, match=r"patchwise") as error:
        load_backbone(name, options)
    assert said in str(error.value)
