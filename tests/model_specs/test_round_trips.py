"""Every family's config.json: what is written is read, and written again the same."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import model_specs
from model_specs import available, load_backbone, load_published, published_form

TINY = ["sd-tiny", "sdxl-tiny", "hunyuan-tiny", "dit-tiny", "pixart-tiny", "sd3-tiny", "flux-tiny"]


def others(value):
    """Values that could be in the place of one; many of them will not do."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, tuple):
        return st.tuples(*(others(item) for item in value))
    if isinstance(value, int):
        return st.sampled_from([value, 1, 2, 3, 2 * value, value + 1, max(1, value // 2)])
    return st.sampled_from([value, None, 1, 2, 12, 64, 128])


def written(form):
    return {"_class_name": form.class_name, **json.loads(json.dumps(dict(form.config)))}


@pytest.mark.parametrize("name", TINY)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_what_is_written_is_read_and_written_again(name, data):
    config = available()[name]
    keys = data.draw(st.sets(st.sampled_from([f.name for f in dataclasses.fields(config)])))
    options = {key: data.draw(others(getattr(config, key)), key) for key in sorted(keys)}
    try:
        backbone = load_backbone(name, options)
    except ValueError:
        return  # refused, so there is nothing to write
    if (form := published_form(backbone)) is None:
        return
    first = written(form)
    again = load_published(first)
    assert written(published_form(again)) == first
    form_of_saved = published_form(load_backbone(again.record["name"], again.record["options"]))
    assert form_of_saved.config == form.config, "through a checkpoint, too"


@pytest.mark.parametrize("scale", [None, 1, 1.5, 2])
def test_the_scale_of_positions_stays_as_it_is_written(scale):
    config = {"caption_channels": 8, "num_layers": 1, "interpolation_scale": scale,
              "_class_name": "PixArtTransformer2DModel", "sample_size": 128}  # fmt: skip
    backbone = load_published(config)
    assert published_form(backbone).config["interpolation_scale"] == scale
    later = model_specs.continue_model(backbone.saved_record, backbone.name, {"sample_size": 64})
    assert published_form(later).config["interpolation_scale"] == scale


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"_class_name": "SD3Transformer2DModel", "sample_size": 1, "caption_projection_dim": 1152},
         ["SD3Transformer2DModel", "sample_size: must be divisible by patch_size=2, is 1"]),
        ({"_class_name": "HunyuanDiT2DModel", "num_layers": 7, "hidden_size": 1408},
         ["HunyuanDiT2DModel", "num_layers: must be divisible by 2, is 7"]),
        ({"_class_name": "DiTTransformer2DModel", "dropout": False, "attention_bias": 1},
         ["dropout is False; only 0.0", "attention_bias is 1; only True"]),
    ],
)  # fmt: skip
def test_refusals_name_the_file_s_model(settings, words):
    with pytest.raises(ValueError) as error:
        load_published(settings)
    assert all(word in str(error.value) for word in words)
    assert not any(name in str(error.value) for name in available())


@pytest.mark.parametrize("name", ["sd3-tiny", "dit-tiny", "pixart-tiny"])
def test_a_base_of_no_whole_patches_is_refused(name):
    with pytest.raises(ValueError, match="base_sample_size: must be divisible by patch_size=2"):
        load_backbone(name, {"base_sample_size": 1})
