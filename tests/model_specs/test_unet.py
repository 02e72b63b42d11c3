"""The UNet: sizes and operations as measured on diffusers' model, numbers as it computes them."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch

import model_specs
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import assert_same_numbers

TABLES = json.loads(Path(__file__).with_name("unet_tables.json").read_text())

# Pushing layer -> (popping layer, channels, side at 512 px): SD 1.5 / 2.1 at 64 x 64 latents.
SKIPS = {
    "conv_in": ("up_blocks.3.resnets.2", 320, 64),
    "down_blocks.0.attentions.0.proj_out": ("up_blocks.3.resnets.1", 320, 64),
    "down_blocks.0.attentions.1.proj_out": ("up_blocks.3.resnets.0", 320, 64),
    "down_blocks.0.downsamplers.0": ("up_blocks.2.resnets.2", 320, 32),
    "down_blocks.1.attentions.0.proj_out": ("up_blocks.2.resnets.1", 640, 32),
    "down_blocks.1.attentions.1.proj_out": ("up_blocks.2.resnets.0", 640, 32),
    "down_blocks.1.downsamplers.0": ("up_blocks.1.resnets.2", 640, 16),
    "down_blocks.2.attentions.0.proj_out": ("up_blocks.1.resnets.1", 1280, 16),
    "down_blocks.2.attentions.1.proj_out": ("up_blocks.1.resnets.0", 1280, 16),
    "down_blocks.2.downsamplers.0": ("up_blocks.0.resnets.2", 1280, 8),
    "down_blocks.3.resnets.0": ("up_blocks.0.resnets.1", 1280, 8),
    "down_blocks.3.resnets.1": ("up_blocks.0.resnets.0", 1280, 8),
}


@pytest.mark.parametrize(
    ("name", "parameters"), [("sd-v1.5", 859_520_964), ("sd-v2.1", 865_910_724)]
)
def test_stable_diffusion_structure(name, parameters):
    """859.5 M and 865.9 M parameters; 12 skips, last in first out; 22 resnets take temb."""
    backbone = model_specs.load_backbone(name, {"sample_size": 64})
    assert sum(count_parameters(backbone)) == parameters
    names = [layer.name for layer in backbone.layers]
    assert names[:8] == [
        "time_embedding",
        "conv_in",
        "down_blocks.0.resnets.0",
        "down_blocks.0.attentions.0.proj_in",
        "down_blocks.0.attentions.0.transformer_blocks.0",
        "down_blocks.0.attentions.0.proj_out",
        "down_blocks.0.resnets.1",
        "down_blocks.0.attentions.1.proj_in",
    ]
    middle = names.index("mid_block.resnets.0")
    assert names[middle - 3 : middle + 6] == [
        "down_blocks.2.downsamplers.0",
        "down_blocks.3.resnets.0",
        "down_blocks.3.resnets.1",
        "mid_block.resnets.0",
        "mid_block.attentions.0.proj_in",
        "mid_block.attentions.0.transformer_blocks.0",
        "mid_block.attentions.0.proj_out",
        "mid_block.resnets.1",
        "up_blocks.0.resnets.0",
    ]
    skips = {s.name: (names[s.destination], *s.spec.shape[:2]) for s in backbone.skips}
    assert skips == SKIPS
    assert [names[s.source] for s in backbone.skips] == list(SKIPS)
    (temb,) = backbone.conditioning
    assert (temb.name, temb.source, temb.spec.shape) == ("temb", 0, (1280,))
    assert len(temb.consumers) == 22
    assert backbone.layers[0].embedder
    context = [layer.name for layer in backbone.layers if "context" in layer.uses]
    assert context == [name for name in names if "transformer_blocks" in name]


@functools.cache
def counted(name, sample_size):
    backbone = model_specs.load_backbone(name, {"sample_size": sample_size})
    return backbone, count_parameters(backbone), count_flops(backbone)


@pytest.mark.parametrize("table", TABLES)
def test_units_are_those_measured_on_diffusers(table):
    """Each measured unit is some of our layers in a row: parameters, operations, tensors, skips.

    Backward operations are diffusers' and those of the gradient of the frozen text states in the
    projection to keys and values: Megatron's column-parallel linear always computes it.
    """
    table = TABLES[table]
    backbone, parameters, flops = counted(table["backbone"], table["sample_size"])
    names = [layer.name for layer in backbone.layers]
    at, unit_of = 1, {}
    for unit, count, expected, forward, backward, shapes in table["units"]:
        own = range(at, at + count)
        at += count
        unit_of |= {names[i]: unit for i in own}
        assert sum(parameters[i] for i in own) == expected, unit
        assert sum(flops[i].forward for i in own) == forward, unit
        text = 0
        for layer in (backbone.layers[i] for i in own if "context" in backbone.layers[i].uses):
            text += 2 * backbone.batch_fields["context"].numel_per_sample * 2 * width(layer)
        assert sum(flops[i].backward for i in own) == backward + text, unit
        ours = backbone.layers[own[-1]].outputs
        assert [spec.numel_per_sample for spec in ours] == list(map(math.prod, shapes)), unit
    assert at == len(names)
    assert sum(parameters) == table["parameters"]
    assert sum(layer.forward for layer in flops) == table["forward"]
    assert [
        [unit_of[names[s.source]], unit_of[names[s.destination]], 2 * s.spec.numel_per_sample]
        for s in backbone.skips
    ] == table["skips"]


def width(layer):
    """Channels of a transformer block."""
    return layer.inputs[0].shape[-1]


def test_scaled_variants_are_as_large_as_their_names_say():
    """Within 3 %; the same layers as SD v2.1, heads of 64 features."""
    names = [layer.name for layer in model_specs.load_backbone("sd-v2.1").layers]
    for billions in ("0.8", "2.5", "4.6", "7.2"):
        backbone = model_specs.load_backbone(f"sd-v2-{billions}b")
        assert [layer.name for layer in backbone.layers] == names
        config = model_specs.available()[f"sd-v2-{billions}b"]
        assert tuple(64 * heads for heads in config.num_heads) == config.block_out_channels
        total = sum(count_parameters(backbone)) / 1e9
        assert abs(total / float(billions) - 1) < 0.03


SMALL = {
    "sample_size": 8, "block_out_channels": "16,16,32", "transformer_depth": "1,1,0",
    "norm_num_groups": 4,
}  # fmt: skip
VARIANTS = {
    "sd-v1.5": ("sd-tiny", SMALL),
    "sd-v2.1": ("sd-tiny", {**SMALL, "use_linear_projection": True, "num_heads": "1,2,4"}),
    "sdxl": ("sdxl-tiny", {**SMALL, "layers_per_block": 1, "transformer_depth": "0,1,2"}),
    "classes, unlike depths": (
        "sd-tiny",
        {
            **SMALL,
            "block_out_channels": "16,32",
            "layers_per_block": 1,
            "transformer_depth": "1,0",
            "mid_transformer_depth": 2,
            "num_classes": 10,
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_numbers_as_diffusers(variant, one_rank):
    """Output and every gradient, to rounding, with the same weights."""
    name, options = VARIANTS[variant]
    backbone = model_specs.load_backbone(name, {**options, "buckets": "16x16,8x16,24x8"})
    chain = build_chain(backbone, torch.float64)
    assert_same_numbers(chain, 1e-10)


@pytest.mark.parametrize("linear", [False, True])
def test_same_numbers_as_diffusers_without_cross_attention(linear, one_rank):
    """diffusers has no such UNet, but its transformer does without a context."""
    from diffusers import Transformer2DModel

    from megatron_pulse.backbone.published_weights import Published, to_published
    from model_specs.unet.published_weights import parameter_rules

    backbone = model_specs.load_backbone("unet-tiny", {"use_linear_projection": linear})
    assert model_specs.published_form(backbone) is None
    chain = build_chain(backbone, torch.float64)
    perturb(chain.parameters().values())
    prefix = "down_blocks.1.attentions.0."
    rules = parameter_rules(model_specs.available()["unet-tiny"])
    weights = to_published(Published("diffusers", "Transformer2DModel", {}, rules), chain.state())
    theirs = Transformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=64, norm_num_groups=8,
        activation_fn="geglu", cross_attention_dim=None, use_linear_projection=linear,
    ).double()  # fmt: skip
    theirs.load_state_dict(
        {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    )
    image = torch.randn(2, 64, 7, 7, dtype=torch.float64)
    tensors = (image,)
    for layer, module in zip(backbone.layers, chain.modules, strict=True):
        if layer.name.startswith(prefix):
            tensors = module(tensors, {}, {})
    assert relative_error(tensors[0], theirs(image).sample) < 1e-10


SMALLEST = {
    **SMALL, "block_out_channels": "8,16", "layers_per_block": 1, "transformer_depth": "1,0",
}  # fmt: skip


@pytest.mark.parametrize("linear", [False, True])
def test_memory_format_changes_only_rounding(linear, one_rank):
    """Also in gradients; weights and what is between layers look the same."""
    results = []
    for channels_last in (False, True):
        options = {**SMALLEST, "use_linear_projection": linear, "channels_last": channels_last}
        chain = build_chain(model_specs.load_backbone("sd-tiny", options))
        image, fields = chain.batch(2)
        prediction = chain(image.requires_grad_(), fields)
        prediction.square().sum().backward()
        results.append((chain, prediction, image.grad))
    (plain, prediction, gradient), (other, *found) = results
    assert relative_error(found[0], prediction) < 1e-5
    assert relative_error(found[1], gradient) < 1e-5
    assert list(plain.state()) == list(other.state())
    for key, parameter in other.parameters().items():
        assert parameter.is_contiguous(), key
        assert torch.equal(parameter, plain.parameters()[key]), key
        assert relative_error(parameter.grad, plain.parameters()[key].grad) < 1e-4, key


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_what_leaves_a_layer_is_contiguous(linear, micro_batch_size, channels_last, one_rank):
    """As what comes from another device is; forward and backward."""
    options = {**SMALLEST, "use_linear_projection": linear, "channels_last": channels_last}
    chain = build_chain(model_specs.load_backbone("sd-tiny", options))
    provided = {edge.name: edge.spec for edge in chain.backbone.conditioning}
    fields = chain.batch(micro_batch_size)[1]
    fields |= {
        key: torch.randn(spec.full_shape(micro_batch_size)) for key, spec in provided.items()
    }
    for layer, module in zip(chain.backbone.layers[1:], chain.modules[1:], strict=True):
        tensors = [
            torch.randn(spec.full_shape(micro_batch_size), requires_grad=True)
            for spec in (*layer.inputs, *layer.pops.values())
        ]
        skips = dict(zip(layer.pops, tensors[len(layer.inputs) :], strict=True))
        used = {key: fields[key] for key in layer.uses}
        outputs = module(tuple(tensors[: len(layer.inputs)]), skips, used)
        assert all(output.is_contiguous() for output in outputs), layer.name
        gradients = torch.autograd.grad(outputs, tensors, list(map(torch.randn_like, outputs)))
        assert all(gradient.is_contiguous() for gradient in gradients), layer.name


def test_convolutions_hide_their_memory_format():
    """Outside, the output and the input's gradient are contiguous; inside, the input is not."""
    from model_specs.unet.convolution import Convolution

    plain, other = (Convolution(3, 4, stride=2, channels_last=flag) for flag in (False, True))
    other.load_state_dict(plain.state_dict())
    image = torch.randn(2, 3, 6, 6)
    found = []
    for convolution in (plain, other):
        leaf = image.clone().requires_grad_()
        (inner,) = torch.autograd.grad(convolution(leaf).square().sum(), leaf)
        found.append(inner)
        assert inner.is_contiguous()
        assert convolution(image).is_contiguous()
    assert relative_error(found[1], found[0]) < 1e-5
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        other(image)
    formats = {t.is_contiguous(memory_format=torch.channels_last) for t in saved if t.dim() == 4}
    assert True in formats
