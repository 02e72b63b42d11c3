"""SUV: sizes of the source's classes, numbers as an independent plain-torch implementation."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model_specs
from megatron_pulse.backbone.published_weights import PublishedError, require_fit, to_published
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.parameters import count_parameters
from model_specs.common.options import OptionError
from model_specs.suv.config import CONFIGS, SUVConfig
from tests.model_specs.chains import Chain, build_chain, perturb, relative_error
from tests.model_specs.parity import from_published, gradients_of
from tests.ranks import run_ranks
from tests.runtime.equality import Case, differences, merge, references
from tests.runtime.tiny import run_cases

PADDED = "3x8x4"
"""24 tokens: no multiple of 16, the square of the largest sparsity."""
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {"buckets": f"2x8x8,{PADDED}"},
    "shared": {"double_ff": False, "norm_skips": True},
    "dense": {"sparse_n": "1,1,1,1,1", "num_layers": "1,1,1,1,1"},
}


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention [b, heads, s, d]; ``seen`` [b, keys]."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1) @ v


def turn(heads: Tensor, places: Tensor) -> Tensor:
    """Rotate [b, heads, s, d] by the angles of three coordinates ``places`` [3, s]."""
    width, start, parts = heads.shape[-1], 0, []
    for place, share in zip(places, (4, 6, 6), strict=True):
        size = width * share // 16
        half = size // 2
        frequencies = 1 / 10000 ** (torch.arange(half).float() * 2 / size)
        angles = place.float()[:, None] * frequencies
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads[..., start : start + half], heads[..., start + half : start + size]
        parts += [first * cos - second * sin, second * cos + first * sin]
        start += size
    return torch.cat(parts, -1)


class Norms(nn.Module):
    def __init__(self, dim: int, temb: int, text: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(temb, 6 * dim)
        self.norm = nn.LayerNorm(dim, 1e-6)
        if text:
            self.norm_enc = nn.LayerNorm(dim, 1e-6)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, n: int, by_group: bool, last: bool) -> None:
        super().__init__()
        self.heads, self.n, self.by_group = heads, n, by_group
        names = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]
        for name in names if last else [*names, "to_add_out"]:
            self.add_module(name, nn.Linear(dim, dim))
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            self.add_module(name, nn.RMSNorm(dim // heads, 1e-6))

    def forward(self, x: Tensor, text: Tensor, places: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        def split(tokens: Tensor) -> Tensor:
            return tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))
        q, k = turn(self.norm_q(q), places), turn(self.norm_k(k), places)
        tq, tk = split(self.add_q_proj(text)), split(self.add_k_proj(text))
        tq, tk, tv = self.norm_added_q(tq), self.norm_added_k(tk), split(self.add_v_proj(text))
        every = torch.arange(x.shape[1])
        group_of = every // self.n % self.n if self.by_group else every % self.n
        out, text_outs = torch.zeros_like(q), []
        for group in range(self.n):
            own = every[group_of == group]
            keys, values = torch.cat([k[:, :, own], tk], 2), torch.cat([v[:, :, own], tv], 2)
            seen = torch.cat([mask.new_ones(len(mask), len(own)), mask], 1) != 0
            out = out.index_copy(2, own, attend(q[:, :, own], keys, values, seen))
            text_outs.append(attend(tq, keys, values, seen))
        text_out = torch.stack(text_outs).mean(0)
        x, text = (t.transpose(1, 2).flatten(2) for t in (out, text_out))
        return self.to_out[0](x), self.to_add_out(text) if hasattr(self, "to_add_out") else text


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        first = nn.ModuleDict({"proj": nn.Linear(dim, 4 * dim, bias=False)})
        self.net = nn.ModuleList([first, nn.Identity(), nn.Linear(4 * dim, dim, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](F.gelu(self.net[0]["proj"](x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c: SUVConfig, n: int, by_group: bool, last: bool) -> None:
        super().__init__()
        self.last = last
        self.norm1 = Norms(c.dim, c.timestep_embed_dim, True)
        self.attn1 = Attention(c.dim, c.num_attention_heads, n, by_group, last)
        self.norm2 = Norms(c.dim, c.timestep_embed_dim, not last)
        self.ff = FeedForward(c.dim)
        self.ff_enc = FeedForward(c.dim) if c.double_ff and not last else None

    def forward(
        self, x: Tensor, text: Tensor, temb: Tensor, places: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        shift, scale, gate, t_shift, t_scale, t_gate = (
            part[:, None] for part in self.norm1.linear(F.silu(temb)).chunk(6, 1)
        )
        out, text_out = self.attn1(
            self.norm1.norm(x) * (1 + scale) + shift,
            self.norm1.norm_enc(text) * (1 + t_scale) + t_shift,
            places,
            mask,
        )
        x, text = x + gate * out, text + t_gate * text_out
        shift, scale, gate, t_shift, t_scale, t_gate = (
            part[:, None] for part in self.norm2.linear(F.silu(temb)).chunk(6, 1)
        )
        x = x + gate * self.ff(self.norm2.norm(x) * (1 + scale) + shift)
        if not self.last:
            of_text = self.ff_enc or self.ff
            text = text + t_gate * of_text(self.norm2.norm_enc(text) * (1 + t_scale) + t_shift)
        return x, text


class Vector(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class PlainSUV(nn.Module):
    """Batch-first SUV from the description of the architecture, with the published names."""

    def __init__(self, c: SUVConfig) -> None:
        super().__init__()
        self.config, patch, dim = c, c.patch_size, c.dim
        temb = c.timestep_embed_dim
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(c.in_channels, dim, patch, patch)})
        self.time_text_embed = nn.ModuleDict(
            {
                "timestep_embedder": Vector(temb, temb),
                "text_embedder": Vector(c.pooled_projection_dim, temb),
            }
        )
        self.caption_projection = nn.Linear(c.caption_channels, dim)
        last = len(c.num_layers) - 1
        self.transformer_blocks = nn.ModuleList(
            nn.ModuleList(
                Block(c, n, n > 1 and i % 2 == 1, group == last and i == count - 1)
                for i in range(count)
            )
            for group, (count, n) in enumerate(zip(c.num_layers, c.sparse_n, strict=True))
        )

        def joins() -> nn.ModuleList:
            def norm() -> nn.Module:
                return nn.LayerNorm(2 * dim, 1e-6) if c.norm_skips else nn.Identity()

            return nn.ModuleList(
                nn.Sequential(norm(), nn.Linear(2 * dim, dim)) for _ in range(last // 2)
            )

        self.skip_norm_linear, self.skip_norm_linear_enc = joins(), joins()
        self.norm_final = nn.LayerNorm(dim, 1e-6)
        self.norm_out = nn.ModuleDict(
            {"linear": nn.Linear(temb, 2 * dim), "norm": nn.LayerNorm(dim, 1e-6)}
        )
        self.proj_out = nn.Linear(dim, patch**2 * c.in_channels)

    def forward(
        self,
        video: Tensor,
        timesteps: Tensor,
        context: Tensor,
        context_mask: Tensor,
        pooled: Tensor,
    ) -> Tensor:
        c, temb_dim = self.config, self.config.timestep_embed_dim
        half = temb_dim // 2
        angles = timesteps[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        time = torch.cat([angles.cos(), angles.sin()], 1).to(video.dtype)
        embed = self.time_text_embed
        temb = embed["timestep_embedder"](time) + embed["text_embedder"](pooled)
        frames = [self.patch_embed["proj"](frame) for frame in video.unbind(2)]
        rows, columns = frames[0].shape[-2:]
        x = torch.stack(frames, 2).flatten(2).transpose(1, 2)
        places = torch.cartesian_prod(*map(torch.arange, (len(frames), rows, columns))).T
        text, skips = self.caption_projection(context), []
        middle = len(c.num_layers) // 2
        for group, blocks in enumerate(self.transformer_blocks):
            if group > middle:
                skip, text_skip = skips.pop()
                join = group - middle - 1
                x = self.skip_norm_linear[join](torch.cat([x, skip], -1))
                text = self.skip_norm_linear_enc[join](torch.cat([text, text_skip], -1))
            for block in blocks:
                x, text = block(x, text, temb, places, context_mask)
            if group < middle:
                skips.append((x, text))
        shift, scale = self.norm_out["linear"](F.silu(temb))[:, None].chunk(2, -1)
        x = self.norm_out["norm"](self.norm_final(x)) * (1 + scale) + shift
        tiles = self.proj_out(x).unflatten(-1, (c.patch_size, c.patch_size, c.in_channels))
        tiles = tiles.unflatten(1, (len(frames), rows, columns))
        return tiles.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def plain_of(chain: Chain) -> PlainSUV:
    """The plain implementation with the weights of ``chain``, which come back bit for bit."""
    record = chain.backbone.record
    config = model_specs.resolve(record["name"], CONFIGS[record["name"]], record["options"])
    form = model_specs.published_form(chain.backbone)
    plain = PlainSUV(config).to(chain.dtype)
    plain.load_state_dict(to_published(form, chain.state()))
    back = from_published(form, chain.state(), plain.state_dict(), "the plain model")
    for name, weight in chain.state().items():
        assert torch.equal(back[name], weight), name
    return plain


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_suv_computes_what_plain_torch_does(
    variant: str, dtype: torch.dtype, tolerance: float, one_rank: None
) -> None:
    """Outputs of every shape and all gradients; in fp32 gradients count by the largest."""
    chain = build_chain(model_specs.load_backbone("suv-tiny", VARIANTS[variant]), dtype)
    perturb(chain.parameters().values())
    plain = plain_of(chain)
    form = model_specs.published_form(chain.backbone)
    for shape in range(chain.backbone.num_shapes):
        video, fields = chain.batch(2, shape=shape)
        video.requires_grad_()
        ours, theirs = chain(video, fields), plain(video, **fields)
        assert relative_error(ours, theirs) < tolerance
        factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        found = gradients_of((ours * factors).sum(), {"": video, **chain.parameters()})
        expected = gradients_of(
            (theirs * factors).sum(), {"": video, **dict(plain.named_parameters())}
        )
        assert relative_error(found.pop(""), expected.pop("")) < tolerance
        converted = to_published(form, found)
        assert converted.keys() == expected.keys()
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        least = largest if dtype == torch.float32 else 1e-3 * largest
        for name, gradient in expected.items():
            scale = max(gradient.abs().max().item(), least)
            assert (converted[name] - gradient).abs().max().item() < tolerance * scale, name


@pytest.mark.parametrize(
    ("name", "blocks", "billions"),
    [("suv-8.5b", 32, 8.505), ("suv-6b", 32, 6.16), ("suv-13b", 40, 13.98)],
)
def test_suv_has_the_size_of_the_source_s_classes(name: str, blocks: int, billions: float) -> None:
    """All parameters of a plain model on the meta device."""
    backbone = model_specs.load_backbone(name)
    with torch.device("meta"):
        plain = PlainSUV(CONFIGS[name])
    total = sum(p.numel() for p in plain.parameters())
    assert sum(count_parameters(backbone)) == total
    assert total / 1e9 == pytest.approx(billions, abs=0.005)
    layers = [layer.name for layer in backbone.layers]
    assert sum(layer.endswith(".attn1") for layer in layers) == blocks
    found = {(layers[s.source], layers[s.destination]) for s in backbone.skips}
    counts = CONFIGS[name].num_layers
    assert found == {
        (f"transformer_blocks.{g}.{counts[g] - 1}.ff", f"skip_norm_linear.{2 - g}")
        for g in range(3)
    }


# An analytic table of a released block at 121 frames of 576 x 1024 pixels (36,864 tokens, 512 of
# text), by sparsity: forward, and backward with flash attention. It has the maps and attention.
TABLE = {
    1: (25631291080704, 59845537431552),
    2: (17165910540288, 38682086080512),
    4: (12933220270080, 28100360404992),
    8: (10816875134976, 22809497567232),
}
BLOCK_PARAMETERS = 226492416


def test_operations_of_suv_are_those_of_the_table() -> None:
    """Beside the table: modulation, and the text's queries in every group, not in one of them."""
    backbone = model_specs.load_backbone("suv-8.5b")
    flops, parameters = count_flops(backbone), count_parameters(backbone)
    first = {layer.name: i for i, layer in enumerate(backbone.layers)}
    width, temb, text, tokens = 3072, 1024, 512, 36864
    modulation = 2 * 12 * width * temb
    for group, (n, (forward, backward)) in enumerate(TABLE.items()):
        of_block = [first[f"transformer_blocks.{group}.0.{part}"] for part in ("attn1", "ff")]
        repeated = 4 * width * text * (n - 1) * (tokens // n + text)
        found = [sum(getattr(flops[i], way) for i in of_block) for way in ("forward", "backward")]
        assert found == [
            forward + modulation + repeated,
            backward + 2 * modulation + repeated * 5 // 2,
        ]
        norms_and_biases = 12 * width * (temb + 1) + 8 * width + 4 * 128 + 8 * width
        assert sum(parameters[i] for i in of_block) == BLOCK_PARAMETERS + norms_and_biases
    joins = [flops[first[f"skip_norm_linear.{i}"]].forward for i in range(3)]
    assert joins == [1410896756736] * 3
    sent = [skip.spec.numel_per_sample for skip in backbone.skips]
    assert [sum(sent[i : i + 2]) for i in (0, 2, 4)] == [114819072] * 3


def test_published_suv_may_have_the_unused_maps_of_the_last_text(one_rank: None) -> None:
    chain = build_chain(model_specs.load_backbone("suv-tiny"))
    form = model_specs.published_form(chain.backbone)
    tensors = to_published(form, chain.state())
    more = ["attn1.to_add_out.bias", "ff_enc.net.2.weight", "norm2.norm_enc.weight"]
    tensors |= {f"transformer_blocks.4.1.{name}": torch.zeros(32) for name in more}
    require_fit(form, chain.state(), tensors, "the file")
    tensors["transformer_blocks.3.1.another.weight"] = torch.zeros(32)
    with pytest.raises(
        PublishedError, match=r"file: transformer_blocks\.3\.1\.another\.weight is unexpected$"
    ):
        require_fit(form, chain.state(), tensors, "the file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"num_layers": "2,3,2,2", "sparse_n": "1,2", "attention_head_dim": 24},
            ["odd number of groups, have 4 and 2", "an even number of blocks", "divisible by 16"],
        ),
        ({"buckets": "2x8x8,1x4x4,2x7x8"}, ["patch_size=2; a sample of height 7 and width 8"]),
        ({"buckets": "1x4x4"}, ["a sparsity of 4 needs 16 tokens", "1x4x4 has 4"]),
        ({"buckets": "8x8"}, ["'8x8' is not FRAMESxHEIGHTxWIDTH"]),
        ({"patchwise": "1/2:0.5"}, ["unsupported: rotary positions"]),
    ],
)
def test_faulty_options_of_suv_are_refused(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        model_specs.load_backbone("suv-tiny", options)
    assert all(text in str(caught.value) for text in said), str(caught.value)


def test_suv_begins_as_a_dense_model_without_skips(one_rank: None) -> None:
    """Gates and the prediction are 0; a join of released models hands its tokens on."""
    chain = build_chain(model_specs.load_backbone("suv-tiny"))
    assert chain(*chain.batch(2)).abs().max() == 0
    parameters = chain.parameters()
    weight = parameters["skip_norm_linear.0.image.linear.weight"]
    assert torch.equal(weight, torch.eye(32, 64))
    assert parameters["transformer_blocks.1.0.attn1.norm1.linear.weight"].abs().max() == 0


def test_four_devices_train_suv_bit_for_bit_as_one() -> None:
    """Three levels of sparsity, folded (no skip is sent) and sequential."""
    options = {"num_layers": "2,2,2,2,2", "sparse_n": "1,2,4,2,1"}
    run = functools.partial(run_cases, options=options)
    cases = [
        ("suv", Case(placement, 6, dtype="float32", recompute=2, steps=2))
        for placement in ("fold", "sequential")
    ]
    (expected,) = references(run, [("suv", cases[0][1].alone)])
    ranks = run_ranks(4, run, cases)
    for i, (_, case) in enumerate(cases):
        got = merge([outcomes[i] for outcomes in ranks])
        assert got.losses == expected.losses and len(got.losses) == 12
        assert not differences(got.parameters, expected.parameters)
        assert bool(got.skip_bytes) == (case.placement == "sequential")


def refusal() -> str:
    """Error of a layer whose heads two context-parallel ranks do not divide."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.distributed.barrier()
    backbone = model_specs.load_backbone("suv-tiny", {"num_attention_heads": 3})
    with pytest.raises(ValueError) as caught:
        build_chain(backbone, context_parallel_size=2)
    return str(caught.value)


def test_layers_whose_heads_context_parallel_ranks_do_not_divide_are_refused() -> None:
    for said in run_ranks(2, refusal):
        assert said.endswith("size 2 x tensor-parallel size 1 must divide the 3 heads")
