"""config.json: every setting of diffusers' classes comes out as it went in, or is refused."""

import inspect

import diffusers
import pytest
import torch

import model_specs
from megatron_pulse.backbone.published_weights import PublishedError, to_published
from megatron_pulse.diffusion.published import write_folder

TINY = ["sd-tiny", "sdxl-tiny", "hunyuan-tiny", "dit-tiny", "pixart-tiny", "sd3-tiny", "flux-tiny"]


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def settings_of(name):
    """(class name, its whole configuration for our tiny one)."""
    form = model_specs.published_form(model_specs.load_backbone(name))
    parameters = inspect.signature(getattr(diffusers, form.class_name).__init__).parameters
    defaults = {
        key: plain(parameter.default)
        for key, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return form.class_name, defaults | {key: plain(value) for key, value in form.config.items()}


def others(value):
    """Values of the same kind that it could have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, value + 1]
    if isinstance(value, float):
        return [value * 2 + 1e-3]
    if isinstance(value, list):
        return [value[:-1], [*value, *value]] if value else [[0]]
    return ["another"] if isinstance(value, str) else [1, "something", True]


@pytest.mark.parametrize("name", TINY)
def test_settings_survive_or_are_refused(name):
    class_name, settings = settings_of(name)
    survived = []
    for key in settings:
        for value in [settings[key], *others(settings[key])]:
            config = {**settings, key: value, "_class_name": class_name}
            try:
                backbone = model_specs.load_published(config)
            except ValueError:
                assert value != settings[key], f"{key}: its own value is refused"
                continue
            record = backbone.saved_record  # as a checkpoint has it
            again = model_specs.continue_model(record, record["name"], record["options"])
            found = model_specs.published_form(again).config
            wanted = {k: v for k, v in config.items() if not k.startswith("_")}
            assert {k: plain(found.get(k)) for k in wanted} == wanted, key
            survived.append(key)
    assert len(survived) > len(settings)


@pytest.mark.parametrize("name", ["sd-tiny", "sdxl-tiny"])
def test_upcast_attention_survives(name):
    class_name, settings = settings_of(name)
    config = {**settings, "upcast_attention": True, "_class_name": class_name}
    backbone = model_specs.load_published(config)
    assert model_specs.published_form(backbone).config["upcast_attention"] is True
    other = model_specs.continue_model(
        backbone.saved_record, name, {**backbone.record["options"], "sample_size": "32"}
    )
    found = model_specs.published_form(other).config
    assert found["upcast_attention"] is True and found["sample_size"] == 32


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("hunyuan-tiny", {"ffn_dim": n, "num_attention_heads": 5, "attention_head_dim": 12})
          for n in (1, 3, 79, 101, 998, 999, 1001, 1234)),
        ("hunyuan-tiny", {"ffn_dim": 81, "style_and_size": True}),
        ("hunyuan-tiny", {"learn_sigma": False, "num_layers": 2}),
        ("sdxl-tiny", {"num_classes": 3}),
        ("sdxl-tiny", {"num_time_ids": 2, "num_classes": 3, "null_class": False}),
        ("sd-tiny", {"transformer_depth": "0,1,0,2", "mid_transformer_depth": 2}),
        ("dit-tiny", {"num_classes": 1}),
        ("pixart-tiny", {"use_additional_conditions": True}),
        ("sd3-tiny", {"qk_norm": True, "dual_attention_layers": "0,1"}),
        ("flux-tiny", {"guidance_embeds": True, "num_single_layers": 1}),
    ],
)  # fmt: skip
def test_diffusers_reads_what_is_exported(name, options, tmp_path):
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    backbone = model_specs.load_backbone(name, options)
    form = model_specs.published_form(backbone)
    tensors = to_published(form, weights_of(whole_stage(backbone, initialise=True)))
    write_folder(tmp_path / "exported", form, tensors)
    kind = getattr(diffusers, form.class_name)
    loaded, info = kind.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values()), info
    for key, value in loaded.state_dict().items():
        assert key not in tensors or torch.equal(value, tensors[key]), key
    again = model_specs.load_published({"_class_name": form.class_name, **form.config})
    assert {k: again.record["options"][k] for k in options} == {
        k: backbone.record["options"][k] for k in options
    }


def test_what_diffusers_cannot_read_is_not_written(tmp_path):
    from megatron_pulse.integration.checkpoint.published_weights import weights_of, whole_stage

    backbone = model_specs.load_backbone("hunyuan-tiny")
    form = model_specs.published_form(backbone)
    tensors = to_published(form, weights_of(whole_stage(backbone)))
    tensors["blocks.0.ff.net.2.weight"] = torch.zeros(3, 4)
    tensors["more"] = tensors.pop("blocks.1.ff.net.2.bias")
    with pytest.raises(PublishedError) as caught:
        write_folder(tmp_path / "exported", form, tensors)
    assert len(caught.value.faults) == 3 and not (tmp_path / "exported").exists()
