"""Hunyuan-DiT: sizes as published, numbers as diffusers' model."""

import pytest
import torch
from diffusers import HunyuanDiT2DModel
from diffusers.models.normalization import FP32LayerNorm

import model_specs
from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.parameters import count_parameters
from model_specs.hunyuan_dit import config_from_published
from tests.model_specs.chains import build_chain
from tests.model_specs.parity import assert_same_numbers


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("hunyuan-dit-v1.2", 1_499_952_032), ("hunyuan-dit-v1.1", 1_516_534_048)],
)
def test_published_sizes(name, parameters):
    """The same parameters as diffusers' model of the published configuration."""
    backbone = model_specs.load_backbone(name)
    assert sum(count_parameters(backbone)) == parameters
    form = model_specs.published_form(backbone)
    with torch.device("meta"):
        context = meta_context()
        ours = {
            f"{layer.name}.{key}": tensor
            for layer in backbone.layers
            for key, tensor in layer.build(context).state_dict().items()
            if not key.endswith("_extra_state")
        }
        theirs = HunyuanDiT2DModel(**form.config).state_dict()
    shapes = {key: tensor.shape for key, tensor in to_published(form, ours).items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.items()}


def test_layers_and_skips():
    backbone = model_specs.load_backbone("hunyuan-dit-v1.2")
    names = [layer.name for layer in backbone.layers]
    blocks = [f"blocks.{i}.{unit}" for i in range(40) for unit in ("attn1", "attn2", "ff")]
    assert names == ["time_extra_emb", "text", "pos_embed", *blocks, "head"]
    assert [(names[skip.source], names[skip.destination]) for skip in backbone.skips] == [
        (f"blocks.{i}.ff", f"blocks.{39 - i}.attn1") for i in range(19)
    ]
    assert backbone.output_spec.shape == (8, 128, 128)


@pytest.mark.parametrize(
    ("name", "billions"), [("0.8b", 0.8), ("2.2b", 2.2), ("3b", 3.0), ("6.0b", 6.0)]
)
def test_scaled_sizes(name, billions):
    backbone = model_specs.load_backbone(f"hunyuan-dit-{name}")
    assert sum(count_parameters(backbone)) / 1e9 == pytest.approx(billions, rel=0.03)


def measure(**options):
    """Operations of each layer of v1.2 cut down to six blocks, two with a skip, by name."""
    backbone = model_specs.load_backbone("hunyuan-dit-v1.2", {"num_layers": 6, **options})
    counted = [(layer.forward, layer.backward) for layer in count_flops(backbone)]
    flops = {layer.name: count for layer, count in zip(backbone.layers, counted, strict=True)}
    return flops, {2 * skip.spec.numel_per_sample for skip in backbone.skips}


def add(*counts):
    return tuple(map(sum, zip(*counts, strict=True)))


def test_operations_and_bytes_as_measured():
    """Measured on diffusers' modules: meta device, flash attention, one sample of 1024 pixels."""
    flops, skip_bytes = measure()
    attn1, behind_skip = (159454625792, 366153891840), (191935315968, 431115272192)
    attn2, ff = (42083024896, 88006983680), (141733920768, 283467841536)
    assert flops["pos_embed"] == (184549376, 369098752)
    assert flops["head"] == (377028608, 754057216)
    for i in range(6):
        assert flops[f"blocks.{i}.attn1"] == (attn1 if i < 4 else behind_skip)
        assert (flops[f"blocks.{i}.attn2"], flops[f"blocks.{i}.ff"]) == (attn2, ff)
    assert skip_bytes == {11534336}
    embedders, total = add(flops["time_extra_emb"], flops["text"]), (14365800964096, 30766435291136)
    units = [attn1] * 21 + [behind_skip] * 19 + [attn2, ff] * 40
    assert add(embedders, flops["pos_embed"], flops["head"], *units) == total


def test_operations_at_256_pixels_as_measured():
    flops, skip_bytes = measure(sample_size=32)
    for i in range(6):
        block = add(*(flops[f"blocks.{i}.{unit}"] for unit in ("attn1", "attn2", "ff")))
        behind_skip = (19752189952, 39928987648)
        assert block == ((17722146816, 35868901376) if i < 4 else behind_skip)
    assert flops["pos_embed"] == (11534336, 23068672)
    assert flops["head"] == (30998528, 61997056)
    assert skip_bytes == {720896}


VARIANTS = {
    "v1.2": {},
    "v1.1": {"style_and_size": True},
    "without a variance": {"learn_sigma": False, "num_layers": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_numbers_as_diffusers(variant, one_rank, monkeypatch):
    """Output and every gradient.

    diffusers rounds what its norms see to fp32, in fp64 too: here its norms are made exact.
    """
    monkeypatch.setattr(FP32LayerNorm, "forward", torch.nn.LayerNorm.forward)
    options = {**VARIANTS[variant], "buckets": "8x8,8x6,4x14"}
    backbone = model_specs.load_backbone("hunyuan-tiny", options)
    assert_same_numbers(build_chain(backbone, torch.float64), 1e-10)


def test_masks_replace_states(one_rank):
    """A state that a mask leaves out is replaced by the learned one of its place."""
    chain = build_chain(model_specs.load_backbone("hunyuan-tiny"))
    layer = next(i for i, layer in enumerate(chain.backbone.layers) if layer.name == "text")
    fields = chain.batch(2)[1]
    fields["context_mask"][:] = torch.tensor([1, 1, 1, 0, 0])
    (text,) = chain.modules[layer]((), {}, fields)
    padding = chain.modules[layer].text_embedding_padding
    assert torch.equal(text[:3], fields["context"].transpose(0, 1)[:3])
    assert torch.equal(text[3:5], padding[3:5, None].expand(-1, 2, -1))


def test_initialisation_of_the_authors(one_rank):
    """Shifts and the last linear start at 0, so the first prediction is 0."""
    backbone = model_specs.load_backbone("hunyuan-tiny", {"num_attention_heads": 8})
    chain = build_chain(backbone)
    parameters = chain.parameters()
    for name in ("blocks.0.attn1.norm1.linear", "head.norm_out.linear", "head.proj_out"):
        assert parameters[f"{name}.weight"].abs().max() == 0
    assert chain(*chain.batch(2)).abs().max() == 0
    linear = parameters["blocks.5.attn1.skip_linear.weight"]
    assert linear.std().item() == pytest.approx((2 / sum(linear.shape)) ** 0.5, rel=0.05)
    extra = parameters["time_extra_emb.extra_embedder.linear_2.weight"]
    assert extra.std().item() == pytest.approx(0.02, rel=0.05)


# What decides in the config.json of Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers.
V12 = {
    "_class_name": "HunyuanDiT2DModel", "activation_fn": "gelu-approximate",
    "attention_head_dim": 88, "cross_attention_dim": 1024, "cross_attention_dim_t5": 2048,
    "hidden_size": 1408, "in_channels": 4, "learn_sigma": True, "mlp_ratio": 4.3637,
    "norm_type": "layer_norm", "num_attention_heads": 16, "num_layers": 40, "patch_size": 2,
    "pooled_projection_dim": 1024, "sample_size": 128, "text_len": 77, "text_len_t5": 256,
    "use_style_cond_and_image_meta_size": False,
}  # fmt: skip


def test_the_published_configuration():
    backbone = model_specs.load_published(V12)
    assert backbone.name == "hunyuan-dit-v1.2"
    form = model_specs.published_form(backbone)
    assert {"_class_name": form.class_name, **form.config} == V12
    left_out = {**V12, "use_style_cond_and_image_meta_size": True}
    del left_out["text_len"], left_out["use_style_cond_and_image_meta_size"]
    assert model_specs.load_published(left_out).name == "hunyuan-dit-v1.1"


def test_settings_that_are_not_implemented_are_listed():
    settings = {"_class_name": "HunyuanDiT2DModel", "in_channels": 4, "patch_size": 2}
    with pytest.raises(ValueError, match="activation_fn is 'geglu'.*\n.*hidden_size is 1000"):
        config_from_published({**settings, "activation_fn": "geglu", "hidden_size": 1000})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 5}, "num_layers: must be divisible by 2, is 5"),
        ({"attention_head_dim": 6}, "attention_head_dim: must be divisible by 4"),
        ({"sample_size": 9, "cross_attention_dim_t5": 12}, "sample_size: .*\n.*t5: must"),
        ({"text_len": 0}, "text_len: must be at least 1"),
    ],
)
def test_faults(options, words):
    with pytest.raises(ValueError, match=words):
        model_specs.load_backbone("hunyuan-tiny", options)
