"""UNets by diffusers' config.json: the published ones, and what is refused."""

import inspect

import pytest

import model_specs
from megatron_pulse.backbone.check import check_backbone
from model_specs.unet.published_weights import config_from_published

# What is in the config.json files of the published folders; older ones lack what was added since.
COMMON = {
    "_class_name": "UNet2DConditionModel",
    "act_fn": "silu", "center_input_sample": False, "downsample_padding": 1,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4,
}  # fmt: skip
SD = {
    **COMMON,
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
}
FOLDERS = {
    "sd-v1.5": {
        **SD, "_diffusers_version": "0.6.0", "attention_head_dim": 8, "cross_attention_dim": 768,
        "sample_size": 64,
    },
    "sd-v2.1": {
        **SD, "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024,
        "dual_cross_attention": False, "num_class_embeds": None, "only_cross_attention": False,
        "sample_size": 96, "upcast_attention": True, "use_linear_projection": True,
    },
    "sdxl": {
        **COMMON, "addition_embed_type": "text_time", "addition_embed_type_num_heads": 64,
        "addition_time_embed_dim": 256, "attention_head_dim": [5, 10, 20],
        "block_out_channels": [320, 640, 1280], "class_embed_type": None,
        "cross_attention_dim": 2048, "mid_block_only_cross_attention": None,
        "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
        "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
        "mid_block_type": "UNetMidBlock2DCrossAttn", "num_attention_heads": None,
        "projection_class_embeddings_input_dim": 2816, "resnet_time_scale_shift": "default",
        "sample_size": 128, "transformer_layers_per_block": [1, 2, 10], "upcast_attention": None,
        "use_linear_projection": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_published_folders_are_the_named_configurations(name):
    assert model_specs.load_published(FOLDERS[name]).record["name"] == name
    written = model_specs.published_form(model_specs.load_backbone(name)).config
    again = model_specs.load_published({"_class_name": "UNet2DConditionModel", **written})
    assert again.record["name"] == name


def test_the_refiner_of_sdxl_has_five_time_ids():
    settings = {
        **FOLDERS["sdxl"], "attention_head_dim": [6, 12, 24, 24], "cross_attention_dim": 1280,
        "block_out_channels": [384, 768, 1536, 1536], "transformer_layers_per_block": 4,
        "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
        "projection_class_embeddings_input_dim": 2560,
    }  # fmt: skip
    backbone = model_specs.load_published(settings)
    assert check_backbone(backbone) == []
    assert backbone.batch_fields["pooled"].shape == (1280,)
    assert backbone.batch_fields["time_ids"].shape == (5,)
    options = backbone.record["options"]
    assert options["transformer_depth"] == [0, 4, 4, 0]
    assert options["mid_transformer_depth"] == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resnet_time_scale_shift": "scale_shift", "act_fn": "gelu"},
         ["2 faults", "act_fn: must be 'silu', is 'gelu'", "must be 'default', is 'scale_s"]),
        ({"only_cross_attention": [True, True, True, False]}, ["only_cross_attention: must be F"]),
        ({"num_attention_heads": 8}, ["num_attention_heads: must be None"]),
        ({"freq_shift": 1, "flip_sin_to_cos": False}, ["freq_shift: must be 0", "flip_sin_to_cos"]),
        ({"sample_size": [64, 32]}, ["sample_size: must be one number, is [64, 32]"]),
        ({"layers_per_block": [1, 2, 2, 2]}, ["layers_per_block: must be one number"]),
        ({"transformer_layers_per_block": [[1, 2], 1, 1, 1]}, ["transformer_layers_per_block: mu"]),
        ({"transformer_layers_per_block": [1, 0, 1, 1]}, ["must not be 0 in levels with"]),
        ({"attention_head_dim": [8, 8]}, ["attention_head_dim: must be a number for each level"]),
        ({"up_block_types": ["CrossAttnUpBlock2D"] * 4}, ["up_block_types: must be ['UpBlock2D'"]),
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, ["down_block_types: must be ['CrossAttn"]),
        ({"num_class_embeds": 0}, ["num_class_embeds: must be null or at least 1"]),
        ({"addition_embed_type": "image"}, ["must be null or 'text_time', is 'image'"]),
        ({"addition_embed_type": "text_time"}, ["needs addition_time_embed_dim"]),
        ({"addition_embed_type": "text_time", "addition_time_embed_dim": 256,
          "projection_class_embeddings_input_dim": 1536}, ["must exceed 6 time ids of 256"]),
        ({"gated": 3}, ["gated: not a known setting, is 3"]),
    ],
)  # fmt: skip
def test_settings_that_change_the_function_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        model_specs.load_published({**FOLDERS["sd-v1.5"], **settings})
    assert all(word in str(error.value) for word in words), error.value


def test_every_setting_of_diffusers_is_read_or_refused():
    """A setting that diffusers gains makes this fail."""
    from diffusers import UNet2DConditionModel

    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(UNet2DConditionModel.__init__).parameters.items()
        if key != "self"
    }
    config = config_from_published({**defaults, "sample_size": 64})
    assert config == config_from_published({"sample_size": 64})
    assert config.cross_attention_dim == 1280
