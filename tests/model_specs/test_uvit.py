"""U-ViT: sizes as published, numbers as an independent plain-torch implementation."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

import model_specs
from megatron_pulse.backbone.published_weights import to_published
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from model_specs.uvit.config import UViTConfig
from tests.model_specs.chains import build_chain, perturb, relative_error
from tests.model_specs.parity import from_published

TINY = {"embed_dim": 48, "depth": 4, "num_heads": 4, "image_size": 8, "num_classes": 10}


@pytest.mark.parametrize(
    ("name", "millions", "skips"),
    [
        ("uvit-s", 44.77, 6),
        ("uvit-s-deep", 58.43, 8),
        ("uvit-m", 130.89, 8),
        ("uvit-l", 286.76, 10),
        ("uvit-h", 500.83, 14),
        ("uvit-s-coco", 44.69, 6),
    ],
)
def test_published_sizes(name, millions, skips):
    """Table 1 of arXiv:2209.12152 prints 44, 58, 131, 287 and 501 M."""
    backbone = model_specs.load_backbone(name)
    assert sum(count_parameters(backbone)) / 1e6 == pytest.approx(millions, abs=0.005)
    assert len(backbone.skips) == skips
    layers = [layer.name for layer in backbone.layers]
    assert [(layers[s.source], layers[s.destination]) for s in backbone.skips] == [
        (f"in_blocks.{i}.mlp", f"out_blocks.{skips - 1 - i}.attn") for i in range(skips)
    ]
    assert len(layers) == 2 * (2 * skips + 1) + 2


@pytest.mark.parametrize("billions", [0.5, 1.4, 2.7, 6.0])
def test_scaled_sizes(billions):
    backbone = model_specs.load_backbone(f"uvit-{billions}b")
    assert sum(count_parameters(backbone)) / 1e9 == pytest.approx(billions, rel=0.03)


# Measured on the authors' modules (meta device, flash attention, one sample): all parameters; all
# operations forward and backward; those of attention, MLP and attention behind a skip, forward;
# bytes of a skip in bf16. Images of 256 pixels, and of 512 with patches of 2.
MEASURED = {
    "uvit-s-coco": ({}, (44692644, 32459431936, 66343342080),
        (928915456, 1400897536, 1279139840), 342016),
    "uvit-l": ({}, (286763172, 152912445440, 308687675392),
        (2436907008, 4328521728, 3519037440), 528384),
    "uvit-l of 1024 patches": ({"image_size": 64}, (287549604, 675871735808, 1397016961024),
        (12918472704, 17213423616, 17221828608), 2101248),
    "uvit-h": ({}, (500832016, 266393438208, 537234416640),
        (3045869568, 5478285312, 4415440896), 594432),
}  # fmt: skip


@pytest.mark.parametrize("case", MEASURED)
def test_operations_and_bytes_as_measured(case):
    options, totals, units, skip_bytes = MEASURED[case]
    backbone = model_specs.load_backbone(case.split()[0], options)
    flops = count_flops(backbone)
    parameters = sum(count_parameters(backbone))
    assert totals == (
        parameters,
        sum(layer.forward for layer in flops),
        sum(layer.backward for layer in flops),
    )
    depth = len(backbone.skips)
    forward = Counter(layer.forward for layer in flops[1:-1])
    attention, mlp, behind_skip = units
    assert forward == {attention: depth + 1, mlp: 2 * depth + 1, behind_skip: depth}
    assert {2 * skip.spec.numel_per_sample for skip in backbone.skips} == {skip_bytes}


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, s, dim = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(dim // self.heads)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, s, dim))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, skip):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads), Mlp(dim)
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x, skip=None):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainUViT(nn.Module):
    """Batch-first U-ViT written from the paper, without Megatron, with the published names."""

    def __init__(self, c):
        super().__init__()
        dim, patches = c.embed_dim, (c.image_size // c.patch_size) ** 2
        self.config = c
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(c.in_channels, dim, c.patch_size, stride=c.patch_size)}
        )
        self.label_emb = nn.Embedding(c.num_classes + 1, dim) if c.num_classes else None
        self.context_embed = nn.Linear(c.context_dim, dim) if c.context_dim else None
        self.extras = (2 if c.num_classes else 1) + c.context_length
        self.pos_embed = nn.Parameter(torch.randn(1, self.extras + patches, dim))
        half = c.depth // 2
        self.in_blocks = nn.ModuleList(Block(dim, c.num_heads, False) for _ in range(half))
        self.mid_block = Block(dim, c.num_heads, False)
        self.out_blocks = nn.ModuleList(Block(dim, c.num_heads, True) for _ in range(half))
        self.norm = nn.LayerNorm(dim)
        self.decoder_pred = nn.Linear(dim, c.patch_size**2 * c.in_channels)
        self.final_layer = (
            nn.Conv2d(c.in_channels, c.in_channels, 3, padding=1) if c.final_conv else None
        )

    def forward(self, image, timesteps, labels=None, context=None):
        c = self.config
        half = c.embed_dim // 2
        angles = timesteps[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        time = torch.cat([angles.cos(), angles.sin()], dim=1).to(image.dtype)
        x = self.patch_embed["proj"](image).flatten(2).transpose(1, 2)
        if context is not None:
            x = torch.cat([self.context_embed(context), x], dim=1)
        x = torch.cat([time[:, None], x], dim=1)
        if labels is not None:
            x = torch.cat([self.label_emb(labels)[:, None], x], dim=1)
        x = x + self.pos_embed
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        x = self.decoder_pred(self.norm(x))[:, self.extras :]
        side = c.image_size // c.patch_size
        rows = []
        for i in range(side):
            tiles = [
                x[:, i * side + j].view(-1, c.patch_size, c.patch_size, c.in_channels)
                for j in range(side)
            ]
            rows.append(torch.cat(tiles, dim=2))
        x = torch.cat(rows, dim=1).permute(0, 3, 1, 2)
        return x if self.final_layer is None else self.final_layer(x)


VARIANTS = {
    "labels": {},
    "unconditional": {"num_classes": 0, "final_conv": False},
    "text": {"num_classes": 0, "context_length": 5, "context_dim": 12},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_same_numbers_as_plain_torch(variant, dtype, tolerance, one_rank):
    """Output and every gradient, to rounding, with weights that go by their published names."""
    options = {**TINY, **VARIANTS[variant]}
    chain = build_chain(model_specs.load_backbone("uvit-s", options), dtype)
    form = model_specs.published_form(chain.backbone)
    perturb(chain.parameters().values())
    plain = PlainUViT(UViTConfig(**options)).to(dtype)
    plain.load_state_dict(to_published(form, chain.state()))
    back = from_published(form, chain.state(), plain.state_dict(), "the plain model")
    for name, weight in chain.state().items():
        assert torch.equal(back[name], weight), name
    image, fields = chain.batch(3)
    image.requires_grad_()
    ours, theirs = chain(image, fields), plain(image, **fields)
    assert relative_error(ours, theirs) < tolerance
    weights = torch.randn(ours.shape, dtype=dtype, generator=torch.Generator().manual_seed(2))
    (image_grad,) = torch.autograd.grad((ours * weights).sum(), image, retain_graph=True)
    (ours * weights).sum().backward()
    image.grad = None
    (theirs * weights).sum().backward()
    assert relative_error(image_grad, image.grad) < tolerance
    gradients = {name: parameter.grad for name, parameter in chain.parameters().items()}
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    converted = to_published(form, gradients)
    assert converted.keys() == expected.keys()
    for name, gradient in converted.items():
        assert relative_error(gradient, expected[name]) < tolerance, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_length": 5}, "both must be positive or both 0, are 5 and 0"),
        ({"context_length": 5, "context_dim": 8}, "num_classes: must be 0 beside text tokens"),
    ],
)
def test_faults_of_text_tokens(options, words):
    with pytest.raises(ValueError, match=words):
        model_specs.load_backbone("uvit-s", options)


def test_sequences_that_do_not_divide_are_refused():
    backbone = model_specs.load_backbone("uvit-tiny", {"num_classes": 0})
    with pytest.raises(ValueError, match="over 2 ranks: 17 tokens of embed do not divide"):
        backbone.divide_sequences(2)


def test_published_initialisation(one_rank):
    """Linears N(0, 0.02) cut, biases 0; no bias on q, k, v."""
    backbone = model_specs.load_backbone("uvit-s", {"depth": 2})
    parameters = build_chain(backbone).parameters()
    linears = ["mid_block.attn.attention.linear_qkv", "head.decoder_pred"]
    linears += ["mid_block.attn.attention.linear_proj", "out_blocks.0.attn.skip_linear"]
    linears += ["mid_block.mlp.mlp.linear_fc1", "mid_block.mlp.mlp.linear_fc2"]
    for name in linears:
        assert parameters[f"{name}.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        if not name.endswith("qkv"):
            assert parameters[f"{name}.bias"].abs().max() == 0
    assert "mid_block.attn.attention.linear_qkv.bias" not in parameters


def test_initialisation_ignores_the_sizes_of_the_run(one_rank):
    """Megatron scales output layers by 1/sqrt(2 num_layers); U-ViT does not."""
    backbone = model_specs.load_backbone("uvit-tiny")
    first = build_chain(backbone).parameters()
    second = build_chain(backbone, num_layers=50, hidden_size=96).parameters()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
