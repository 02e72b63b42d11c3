"""U-ViT: sizes as published, numbers as an independent plain-torch implementation."""

import math

import pytest
import torch
from torch import nn

import model_specs
from megatron_pulse.backbone.check import check_backbone
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, perturb, relative_error

TINY = {"embed_dim": 48, "depth": 4, "num_heads": 4, "image_size": 8, "num_classes": 10}


@pytest.mark.parametrize(
    ("name", "millions", "skips"),
    [
        ("uvit-s", 44.77, 6),
        ("uvit-s-deep", 58.43, 8),
        ("uvit-m", 130.89, 8),
        ("uvit-l", 286.76, 10),
        ("uvit-h", 500.83, 14),
    ],
)
def test_published_sizes(name, millions, skips):
    """Table 1 of arXiv:2209.12152 prints 44, 58, 131, 287 and 501 M."""
    backbone = model_specs.load_backbone(name)
    assert check_backbone(backbone) == []
    assert sum(count_parameters(backbone)) / 1e6 == pytest.approx(millions, abs=0.005)
    assert len(backbone.skips) == skips
    layers = [layer.name for layer in backbone.layers]
    assert [(layers[s.source], layers[s.destination]) for s in backbone.skips] == [
        (f"in_blocks.{i}", f"out_blocks.{skips - 1 - i}") for i in range(skips)
    ]
    assert len(layers) == 2 * skips + 3


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


class Block(nn.Module):
    def __init__(self, dim, heads, skip):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.skip_linear = nn.Linear(2 * dim, dim) if skip else None

    def forward(self, x, skip=None):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class PlainUViT(nn.Module):
    """Batch-first U-ViT written from the paper, without Megatron."""

    def __init__(self, dim, depth, heads, channels, size, patch, classes):
        super().__init__()
        self.patch, self.size, self.channels, self.dim = patch, size, channels, dim
        self.patch_embed = nn.Conv2d(channels, dim, patch, stride=patch)
        self.label_embed = nn.Embedding(classes + 1, dim) if classes else None
        self.extras = 2 if classes else 1
        self.pos_embed = nn.Parameter(torch.randn(1, self.extras + (size // patch) ** 2, dim))
        self.ins = nn.ModuleList(Block(dim, heads, False) for _ in range(depth // 2))
        self.mid = Block(dim, heads, False)
        self.outs = nn.ModuleList(Block(dim, heads, True) for _ in range(depth // 2))
        self.norm = nn.LayerNorm(dim)
        self.decoder_pred = nn.Linear(dim, patch * patch * channels)
        self.final_layer = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, image, timesteps, labels=None):
        half = self.dim // 2
        angles = timesteps[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        time = torch.cat([angles.cos(), angles.sin()], dim=1).to(image.dtype)
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([time[:, None], x], dim=1)
        if labels is not None:
            x = torch.cat([self.label_embed(labels)[:, None], x], dim=1)
        x = x + self.pos_embed
        skips = []
        for block in self.ins:
            x = block(x)
            skips.append(x)
        x = self.mid(x)
        for block in self.outs:
            x = block(x, skips.pop())
        x = self.decoder_pred(self.norm(x))[:, self.extras :]
        side = self.size // self.patch
        rows = []
        for i in range(side):
            tiles = [
                x[:, i * side + j].view(-1, self.patch, self.patch, self.channels)
                for j in range(side)
            ]
            rows.append(torch.cat(tiles, dim=2))
        return self.final_layer(torch.cat(rows, dim=1).permute(0, 3, 1, 2))


def pairs(chain, plain, heads):
    """(Megatron parameter, plain parameter, Megatron layout -> plain layout)."""
    same = lambda t: t  # noqa: E731

    def qkv(weight):
        dim = weight.shape[1]
        return weight.view(heads, 3, dim // heads, dim).transpose(0, 1).reshape(3 * dim, dim)

    names = {
        "attn.linear_qkv": "attn.qkv",
        "attn.linear_proj": "attn.proj",
        "mlp.linear_fc1": "fc1",
        "mlp.linear_fc2": "fc2",
        "in_blocks": "ins",
        "out_blocks": "outs",
        "mid_block": "mid",
    }
    target = dict(plain.named_parameters())
    for name, parameter in chain.parameters().items():
        other = name.removeprefix("embed.").removeprefix("head.")
        for ours, theirs in names.items():
            other = other.replace(ours, theirs)
        yield parameter, target.pop(other), qkv if "qkv" in name else same
    assert not target


@pytest.mark.parametrize("num_classes", [0, 10])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_same_numbers_as_plain_torch(num_classes, dtype, tolerance, one_rank):
    """Output and every gradient, to rounding."""
    backbone = model_specs.load_backbone("uvit-s", {**TINY, "num_classes": num_classes})
    chain = build_chain(backbone, dtype)
    perturb(chain.parameters().values())
    plain = PlainUViT(48, 4, 4, 4, 8, 2, num_classes).to(dtype)
    matched = list(pairs(chain, plain, heads=4))
    for ours, theirs, layout in matched:
        theirs.data.copy_(layout(ours.data))
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
    for ours, theirs, layout in matched:
        assert relative_error(layout(ours.grad), theirs.grad) < tolerance


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_as_declared(micro_batch_size, dtype, one_rank):
    """Every boundary, skip and the prediction has its spec's shape and dtype."""
    chain = build_chain(model_specs.load_backbone("uvit-tiny"), dtype)
    prediction = chain(*chain.batch(micro_batch_size))
    assert prediction.isfinite().all()


def test_published_initialisation(one_rank):
    """Linears N(0, 0.02) cut, biases 0; no bias on q, k, v; the same draws in bf16."""
    backbone = model_specs.load_backbone("uvit-s", {"depth": 2})
    parameters = build_chain(backbone).parameters()
    linears = ["mid_block.attn.linear_qkv", "mid_block.attn.linear_proj", "head.decoder_pred"]
    linears += ["out_blocks.0.skip_linear", "mid_block.mlp.linear_fc1", "mid_block.mlp.linear_fc2"]
    for name in linears:
        assert parameters[f"{name}.weight"].std().item() == pytest.approx(0.02, rel=0.05)
        if not name.endswith("qkv"):
            assert parameters[f"{name}.bias"].abs().max() == 0
    assert "mid_block.attn.linear_qkv.bias" not in parameters
    for name, low in build_chain(backbone, torch.bfloat16).parameters().items():
        assert torch.equal(low, parameters[name].bfloat16()), name


def test_initialisation_ignores_the_sizes_of_the_run(one_rank):
    """Megatron scales output layers by 1/sqrt(2 num_layers); U-ViT does not."""
    backbone = model_specs.load_backbone("uvit-tiny")
    first = build_chain(backbone).parameters()
    second = build_chain(backbone, num_layers=50, hidden_size=96).parameters()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
