"""The UNet: Stable Diffusion's units and sizes, and diffusers' numbers."""

import pytest
import torch

import model_specs
from megatron_pulse.backbone.check import check_backbone
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, perturb, relative_error

UNITS = [
    "time_embedding", "conv_in",
    "down_blocks.0.layers.0", "down_blocks.0.layers.1", "down_blocks.0.downsamplers.0",
    "down_blocks.1.layers.0", "down_blocks.1.layers.1", "down_blocks.1.downsamplers.0",
    "down_blocks.2.layers.0", "down_blocks.2.layers.1", "down_blocks.2.downsamplers.0",
    "down_blocks.3.layers.0", "down_blocks.3.layers.1",
    "mid_block.layers.0", "mid_block.layers.1",
    "up_blocks.0.layers.0", "up_blocks.0.layers.1", "up_blocks.0.layers.2",
    "up_blocks.0.upsamplers.0",
    "up_blocks.1.layers.0", "up_blocks.1.layers.1", "up_blocks.1.layers.2",
    "up_blocks.1.upsamplers.0",
    "up_blocks.2.layers.0", "up_blocks.2.layers.1", "up_blocks.2.layers.2",
    "up_blocks.2.upsamplers.0",
    "up_blocks.3.layers.0", "up_blocks.3.layers.1", "up_blocks.3.layers.2",
    "conv_out",
]  # fmt: skip

# Pushing unit -> (popping unit, channels, side at 512 px): SD 1.5 / 2.1 at 64 x 64 latents.
SKIPS = {
    "conv_in": ("up_blocks.3.layers.2", 320, 64),
    "down_blocks.0.layers.0": ("up_blocks.3.layers.1", 320, 64),
    "down_blocks.0.layers.1": ("up_blocks.3.layers.0", 320, 64),
    "down_blocks.0.downsamplers.0": ("up_blocks.2.layers.2", 320, 32),
    "down_blocks.1.layers.0": ("up_blocks.2.layers.1", 640, 32),
    "down_blocks.1.layers.1": ("up_blocks.2.layers.0", 640, 32),
    "down_blocks.1.downsamplers.0": ("up_blocks.1.layers.2", 640, 16),
    "down_blocks.2.layers.0": ("up_blocks.1.layers.1", 1280, 16),
    "down_blocks.2.layers.1": ("up_blocks.1.layers.0", 1280, 16),
    "down_blocks.2.downsamplers.0": ("up_blocks.0.layers.2", 1280, 8),
    "down_blocks.3.layers.0": ("up_blocks.0.layers.1", 1280, 8),
    "down_blocks.3.layers.1": ("up_blocks.0.layers.0", 1280, 8),
}


@pytest.mark.parametrize(
    ("name", "parameters"), [("unet-sd", 859_520_964), ("unet-sd2", 865_910_724)]
)
def test_stable_diffusion_structure(name, parameters):
    """859.5 M and 865.9 M parameters; 30 units and 12 skips, last in first out."""
    backbone = model_specs.load_backbone(name)
    assert check_backbone(backbone) == []
    assert sum(count_parameters(backbone)) == parameters
    names = [layer.name for layer in backbone.layers]
    assert names == UNITS
    skips = {s.name: (names[s.destination], *s.spec.shape[:2]) for s in backbone.skips}
    assert skips == SKIPS
    assert [names[s.source] for s in backbone.skips] == list(SKIPS)
    (temb,) = backbone.conditioning
    assert (temb.name, temb.source, temb.spec.shape) == ("temb", 0, (1280,))
    assert len(temb.consumers) == 22


@pytest.mark.parametrize("name", ["unet-tiny", "unet-sd-tiny"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_as_declared(name, micro_batch_size, dtype, one_rank):
    """Every boundary, skip, temb and the prediction has its spec's shape and dtype."""
    chain = build_chain(model_specs.load_backbone(name), dtype)
    assert chain(*chain.batch(micro_batch_size)).isfinite().all()


def diffusers_unet(options):
    from diffusers import UNet2DConditionModel

    def kind(prefix, depth):
        return f"CrossAttn{prefix}Block2D" if depth else f"{prefix}Block2D"

    depth = options["transformer_depth"]
    heads = options["num_heads"] * (1 if len(options["num_heads"]) > 1 else len(depth))
    return UNet2DConditionModel(
        sample_size=options["sample_size"],
        in_channels=options["in_channels"],
        out_channels=options["out_channels"],
        down_block_types=tuple(kind("Down", d) for d in depth),
        up_block_types=tuple(kind("Up", d) for d in reversed(depth)),
        block_out_channels=tuple(options["block_out_channels"]),
        layers_per_block=options["layers_per_block"],
        cross_attention_dim=options["cross_attention_dim"],
        transformer_layers_per_block=tuple(
            d or (options["mid_transformer_depth"] if i == len(depth) - 1 else 1)
            for i, d in enumerate(depth)
        ),
        attention_head_dim=tuple(heads),
        norm_num_groups=options["norm_num_groups"],
        use_linear_projection=options["use_linear_projection"],
        num_class_embeds=options["num_classes"] + 1 if options["num_classes"] else None,
    )


NAMES = {
    ".resnet.": ".resnets.{}.",
    ".attention.": ".attentions.{}.",
    ".attn1.linear_proj.": ".attn1.to_out.0.",
    ".attn2.linear_proj.": ".attn2.to_out.0.",
    ".attn2.linear_q.": ".attn2.to_q.",
    ".ff.linear_fc1.": ".ff.net.0.proj.",
    ".ff.linear_fc2.": ".ff.net.2.",
    "conv_in.conv.": "conv_in.",
    "conv_out.norm.": "conv_norm_out.",
    "conv_out.conv.": "conv_out.",
    "time_embedding.class_embedding.": "class_embedding.",
}


def translated(name, tensor, heads):
    """A parameter (or its gradient) under diffusers' names and layouts."""
    unit, dot, rest = name.partition(".layers.")
    if dot:
        index, _, rest = rest.partition(".")
        name = f"{unit}.{rest}"
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    name = name.format(*([index] if dot else []))
    for linear, parts in (("linear_qkv", "qkv"), ("linear_kv", "kv")):
        if linear in name:
            split = tensor.view(heads, len(parts), -1, tensor.shape[1]).unbind(1)
            for part, piece in zip(parts, split, strict=True):
                yield name.replace(linear, f"to_{part}"), piece.reshape(-1, tensor.shape[1])
            return
    if ".ff.net.0." in name:
        gate, value = tensor.chunk(2)
        tensor = torch.cat([value, gate])
    yield name, tensor


SMALL = {"sample_size": 16, "block_out_channels": "16,16,32,32", "norm_num_groups": 4}
VARIANTS = {
    "sd": SMALL,
    "sd2": {**SMALL, "use_linear_projection": True, "context_length": 5},
    "deep": {
        **SMALL,
        "block_out_channels": "16,32",
        "layers_per_block": 1,
        "transformer_depth": "0,2",
        "mid_transformer_depth": 2,
        "num_classes": 10,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_same_numbers_as_diffusers(variant, dtype, tolerance, one_rank):
    """Output and every gradient, to rounding, with the same weights."""
    backbone = model_specs.load_backbone("unet-sd-tiny", VARIANTS[variant])
    options = backbone.record["options"]
    chain = build_chain(backbone, dtype)
    perturb(chain.parameters().values())
    unet = diffusers_unet(options).to(dtype)
    heads = options["num_heads"][0]
    weights = {}
    for name, parameter in chain.parameters().items():
        weights.update(translated(name, parameter.data, heads))
    unet.load_state_dict(weights)
    image, fields = chain.batch(2)
    image.requires_grad_()
    ours = chain(image, fields)
    theirs = unet(
        image,
        fields["timesteps"],
        encoder_hidden_states=fields["context"],
        class_labels=fields.get("labels"),
    ).sample
    assert relative_error(ours, theirs) < tolerance
    factors = torch.randn(ours.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    (image_grad,) = torch.autograd.grad((ours * factors).sum(), image, retain_graph=True)
    (ours * factors).sum().backward()
    image.grad = None
    (theirs * factors).sum().backward()
    assert relative_error(image_grad, image.grad) < tolerance
    expected = dict(unet.named_parameters())
    for name, parameter in chain.parameters().items():
        for other, gradient in translated(name, parameter.grad, heads):
            theirs_grad = expected.pop(other).grad
            assert relative_error(gradient, theirs_grad) < tolerance, other
    assert not expected


def test_same_numbers_as_diffusers_without_cross_attention(one_rank):
    """diffusers has no such UNet, but its transformer does without a context."""
    from diffusers import Transformer2DModel

    chain = build_chain(model_specs.load_backbone("unet-tiny"), torch.float64)
    names = [layer.name for layer in chain.backbone.layers]
    ours = chain.modules[names.index("down_blocks.1.layers.0")].attention
    perturb(ours.parameters())
    theirs = Transformer2DModel(
        4, 16, 64, norm_num_groups=8, activation_fn="geglu", cross_attention_dim=None
    ).double()
    weights = {}
    for name, parameter in ours.named_parameters():
        weights.update(translated(f"m.layers.0.attention.{name}", parameter.data, 4))
    theirs.load_state_dict({k.removeprefix("m.attentions.0."): v for k, v in weights.items()})
    image = torch.randn(2, 64, 7, 7, dtype=torch.float64)
    assert relative_error(ours(image, None), theirs(image).sample) < 1e-10
