"""Backbones by name: typed options, one error for all faults, records that rebuild."""

import json
import subprocess
import sys

import pytest

import model_specs
from megatron_pulse.backbone.check import check_backbone
from model_specs import (
    available,
    compare_models,
    load_backbone,
    load_published,
    published_form,
)


@pytest.mark.parametrize("name", sorted(available()))
def test_every_named_configuration_is_sound_and_rebuilds_from_its_record(name):
    backbone = load_backbone(name)
    assert check_backbone(backbone) == []
    record = json.loads(json.dumps(backbone.record))
    again = load_backbone(record["name"], record["options"])
    assert again.record == backbone.record
    assert [(la.name, la.inputs, la.outputs, la.pops) for la in again.layers] == [
        (la.name, la.inputs, la.outputs, la.pops) for la in backbone.layers
    ]
    compared = compare_models(backbone.record, backbone.record)
    assert (compared.different, compared.changed) == ((), ())
    form = published_form(backbone)
    reads = hasattr(model_specs._families()[name], "config_from_published")
    if form is not None and reads and not form.part:  # half a model is read with its other half
        written = json.loads(json.dumps({"_class_name": form.class_name, **form.config}))
        read = published_form(load_published(written))
        assert json.loads(json.dumps({"_class_name": read.class_name, **read.config})) == written


def test_text_is_converted():
    flags = {"block_out_channels": "32, 64,64", "transformer_depth": "(0,1,0)", "num_heads": "4"}
    flags |= {"cross_attention_dim": "None", "use_linear_projection": "true", "sample_size": "8"}
    options = load_backbone("sd-v1.5", flags).record["options"]
    assert options["block_out_channels"] == [32, 64, 64]
    assert options["transformer_depth"] == [0, 1, 0]
    assert options["num_heads"] == [4]
    assert options["cross_attention_dim"] is None
    assert options["use_linear_projection"] is True
    assert options["sample_size"] == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depth": "7"}, ["depth: must be even"]),
        ({"depth": 4.5}, ["depth: expected int, got 4.5"]),
        ({"depth": True}, ["depth: expected int, got True"]),
        ({"depth": None}, ["depth: expected int, got None"]),
        ({"widht": 3, "depth": "x", "num_classes": -1}, ["widht: no", "depth:", "num_classes:"]),
        ({"num_heads": 3, "patch_size": 5}, ["embed_dim: must", "image_size: must"]),
        ({"dept": 6}, ["dept: no such option; did you mean depth"]),
    ],
)
def test_faults_are_listed_together(options, words):
    with pytest.raises(ValueError) as error:
        load_backbone("uvit-s", options)
    for word in words:
        assert word in str(error.value)
    # All options are listed for a name that is like none of them, and for no other fault.
    assert ("mlp_ratio (int; default 4)" in str(error.value)) == ("widht" in options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sample_size": 12}, ["sample_size: must be divisible by 8"]),
        ({"num_heads": "8,8"}, ["num_heads: needs one value, or one for each of the 4"]),
        ({"transformer_depth": "1"}, ["transformer_depth: needs one value for each of the 4"]),
        ({"block_out_channels": "320,x"}, ["block_out_channels: expected ints, as in 320,640"]),
        ({"norm_num_groups": 7, "num_heads": "9"}, ["320 of level 0", "level 3", "9 heads"]),
        ({"time_id_dim": 3}, ["time_id_dim: must be even, is 3"]),
        ({"pooled_dim": -1, "num_time_ids": 0}, ["pooled_dim: must be", "num_time_ids: must be"]),
        ({"use_linear_projection": "maybe"}, ["expected true or false, got 'maybe'"]),
    ],
)
def test_faults_of_a_unet(options, words):
    with pytest.raises(ValueError) as error:
        load_backbone("sd-v1.5", options)
    assert all(word in str(error.value) for word in words), error.value


def test_unknown_name_has_close_matches():
    with pytest.raises(ValueError, match="'uvit-x'; did you mean .*uvit-s.*there are: .*sd-v1.5"):
        load_backbone("uvit-x")


def test_planning_needs_neither_torch_nor_megatron():
    program = (
        "import sys; from model_specs import available, load_backbone;"
        "from megatron_pulse.backbone.check import require_valid;"
        "[require_valid(load_backbone(name)) for name in available()];"
        "import megatron_pulse.profile.parameters;"
        "print({'torch', 'megatron', 'numpy'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
