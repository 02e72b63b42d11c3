"""Context parallelism of the families: predictions, gradients, memory and traffic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import model_specs
from megatron_pulse.backbone.check import check_backbone
from megatron_pulse.backbone.token_shares import with_token_shares
from megatron_pulse.cli.models.context_report import context_report
from megatron_pulse.errors import Faults
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from tests.model_specs.chains import build_chain, relative_error
from tests.model_specs.test_tensor_parallel import perturb_alike, whole
from tests.ranks import run_ranks
from tests.tracing.context_parallel.ranks import counted

type Cases = dict[str, tuple[str, dict[str, Any]]]

CASES: Cases = {
    "uvit": ("uvit-tiny", {"depth": 2}),
    "uvit-text": (
        "uvit-tiny",
        {"depth": 2, "num_classes": 0, "context_length": 77, "context_dim": 12},
    ),
    "hunyuan-dit": ("hunyuan-tiny", {"num_layers": 4, "buckets": "8x12,4x4"}),
    "dit": ("dit-tiny", {"buckets": "12x8,4x4"}),
    "pixart": ("pixart-tiny", {"buckets": "4x12"}),
    "sd3.5": (
        "sd3-tiny",
        {"num_layers": 2, "context_length": 77, "qk_norm": True, "dual_attention_layers": [0]},
    ),
    "flux": ("flux-tiny", {"num_layers": 1, "context_length": 226, "buckets": "4x12,8x8"}),
    "suv": (
        "suv-tiny",
        {
            **{"num_layers": "1,2,1", "sparse_n": "1,2,1", "num_attention_heads": 4},
            **{"context_length": 77, "buckets": "3x6x4,2x8x8"},
        },
    ),
    "flux-reference": ("flux-tiny", {"num_layers": 1, "reference": 1, "buckets": "4x12"}),
}
"""Shares are uneven over 4 ranks, but for some buckets: 18 and 94 tokens, texts of 77 and 226."""
SAMPLES = 2
"""Samples of a microbatch."""
EVEN: Cases = {
    "even uvit": (
        "uvit-tiny",
        {"depth": 2, "num_classes": 0, "context_length": 3, "context_dim": 12},
    ),
    **{case: CASES[case] for case in ("hunyuan-dit", "dit", "pixart")},
    "even sd3.5": ("sd3-tiny", {**CASES["sd3.5"][1], "context_length": 8}),
    "even flux": ("flux-tiny", {**CASES["flux"][1], "context_length": 8}),
    "even suv": (
        "suv-tiny",
        {**CASES["suv"][1], "context_length": 8, "buckets": "3x4x4,2x8x8"},
    ),
}
"""Cases whose tokens sequence-parallel ranks can divide further."""
RINGS: Cases = {
    "uvit of 5 heads": ("uvit-tiny", {"depth": 2, "num_heads": 5, "embed_dim": 40}),
    "flux of 5 heads": ("flux-tiny", {**CASES["flux"][1], "num_attention_heads": 5}),
}
"""Cases whose heads neither 2, 3 nor 4 ranks can divide."""
SIX_HEADS: Cases = {
    "flux of 6 heads": ("flux-tiny", {**EVEN["even flux"][1], "num_attention_heads": 6})
}
"""A case of whose 3 heads on a tensor-parallel rank there is no half."""
DTYPES = torch.float32, torch.float64


@dataclass(frozen=True)
class Way:
    """Parallel degrees and dtype of a run."""

    context: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Found:
    """Predictions of each shape, gradients of all together, and bytes sent by this rank.

    ``sent`` and ``predicted`` are of the forward passes, and of the backward passes.
    """

    predictions: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    sent: tuple[int, int]
    predicted: tuple[float, float]


def steps(ways: list[Way], cases: Cases) -> dict[tuple[str, Way], Found]:
    """Results of every case in each way; all have the same groups."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    first = ways[0]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(first.tensor, context_parallel_size=first.context)
    tp.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    found = {(case, way): step(way, *cases[case]) for case in cases for way in ways}
    torch.distributed.barrier()
    return found


def step(way: Way, name: str, options: dict[str, Any]) -> Found:
    """Step of microbatches of every shape; gradients are Megatron's averages, shards joined."""
    from megatron.core import parallel_state

    backbone = model_specs.load_backbone(name, options)
    group = parallel_state.get_context_parallel_group()
    own = divide_context(backbone, group.rank(), way.context)
    chain = build_chain(
        own.divide_sequences(way.tensor) if way.sequence_parallel else own,
        way.dtype,
        context_parallel_size=way.context,
        tensor_model_parallel_size=way.tensor,
        sequence_parallel=way.sequence_parallel,
    )
    parameters = chain.parameters()
    perturb_alike(parameters, way.tensor)
    predictions, forward, predicted = [], 0, [0.0, 0.0]
    with counted() as sent:
        for shape in range(backbone.num_shapes):
            image, fields = chain.batch(SAMPLES, shape=shape)
            before = sum(sent)
            predictions.append(chain(image, fields))
            forward += sum(sent) - before
            generator = torch.Generator().manual_seed(2)
            weights = torch.randn(predictions[-1].shape, generator=generator)
            (predictions[-1] * weights).sum().backward()
            traffic = traffic_of(
                backbone, way.context, shape, way.dtype.itemsize, tensor_parallel=way.tensor
            )
            for each, i in itertools.product(traffic, (0, 1)):
                of_rank = each.sent_per_rank(way.context, way.tensor, backward=bool(i))
                predicted[i] += SAMPLES * of_rank
    gradients = {}
    for key, parameter in parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.distributed.all_reduce(gradient, group=group)
        gradient /= way.context
        of_shards = way.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_heads = way.tensor > 1 and ("q_layernorm" in key or "k_layernorm" in key)
        if of_shards or of_heads:
            tensor = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(gradient, group=tensor)
        gradients[key] = whole(parameter, gradient) if way.tensor > 1 else gradient
    return Found(
        [p.detach() for p in predictions],
        gradients,
        (forward, sum(sent) - forward),
        (predicted[0], predicted[1]),
    )


def differences(found: Found, expected: Found, dtype: torch.dtype) -> Iterator[str]:
    """Predictions and gradients that differ by more than rounding.

    In fp64 a gradient counts by its own size, in fp32 by that of the largest.
    """
    tolerance, least = (1e-12, 1e-3) if dtype == torch.float64 else (1e-6, 1.0)
    for i, (got, wanted) in enumerate(zip(found.predictions, expected.predictions, strict=True)):
        if not (error := relative_error(got, wanted)) < tolerance:
            yield f"prediction {i}: {error:.1e}"
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, wanted in expected.gradients.items():
        scale = max(wanted.abs().max().item(), least * largest)
        allowed = 1e-6 if IN_FP32.match(name) else tolerance
        error = (found.gradients[name] - wanted).abs().max().item() / scale
        if not error < allowed:
            yield f"{name}: {error:.1e}"


IN_FP32 = re.compile(r"(time_extra_emb|text)\.")
"""Hunyuan-DiT's embedders, whose gradients go through SiLU in fp32 before ranks sum them."""


type Alone = dict[tuple[str, torch.dtype], Found]


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Results of one process, for every case in both dtypes."""
    (found,) = run_ranks(
        1, steps, [Way(dtype=dtype) for dtype in DTYPES], CASES | EVEN | RINGS | SIX_HEADS
    )
    return {(case, way.dtype): each for (case, way), each in found.items()}


def compare(ways: list[Way], cases: Cases, alone: Alone) -> None:
    """Require that every rank computes what one process does, and sends what the formula says."""
    every = run_ranks(ways[0].context * ways[0].tensor, steps, ways, cases)
    faults = []
    for case, way in itertools.product(cases, ways):
        found = [of_rank[case, way] for of_rank in every]
        for of_rank in found:
            told = differences(of_rank, alone[case, way.dtype], way.dtype)
            faults += [f"{case} {way}: {fault}" for fault in told]
        sent = tuple(sum(each.sent[i] for each in found) / len(found) for i in (0, 1))
        if not sent == (wanted := found[0].predicted) > (0, 0):
            faults.append(f"{case} {way}: sent {sent}, predicted {wanted}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_tokens_compute_what_one_process_does(size: int, alone: Alone) -> None:
    compare([Way(size, dtype=dtype) for dtype in DTYPES], CASES, alone)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_heads_that_do_not_divide_need_rings(size: int, alone: Alone) -> None:
    """Flux's rotations are in fp32, whose gradients three ranks round to others."""
    cases = {name: of for name, of in RINGS.items() if size != 3 or "flux" not in name}
    for name, options in cases.values():
        traffic = traffic_of(model_specs.load_backbone(name, options), size)
        assert sum(each.num_rings for each in traffic) == sum(e.num_attentions for e in traffic) > 0
    compare([Way(size, dtype=dtype) for dtype in DTYPES], cases, alone)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_beside_tensor_parallelism(sequence_parallel: bool, alone: Alone) -> None:
    """A tensor-parallel rank has 3 of 6 heads, which two ranks share by rings."""
    compare([Way(2, 2, sequence_parallel, torch.float64)], EVEN | SIX_HEADS, alone)


LONG: Cases = {
    "uvit": ("uvit-tiny", {"depth": 2, "image_size": 32}),
    "hunyuan-dit": ("hunyuan-tiny", {"num_layers": 4, "sample_size": 32}),
    "flux": ("flux-tiny", {"num_layers": 1, "sample_size": 32, "context_length": 64}),
}
"""Cases with so many tokens that little memory is of conditioning."""


def held_bytes(size: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes that a layer holds for its backward, and those of its results' storages."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    tp.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    rank, found = parallel_state.get_context_parallel_rank(), {}
    for case, of in LONG.items():
        backbone = divide_context(model_specs.load_backbone(*of), rank, size)
        chain = build_chain(backbone, context_parallel_size=size)
        chain.modules = [
            held(layer.name, module, case, found)
            for layer, module in zip(backbone.layers, chain.modules, strict=True)
        ]
        chain(*chain.batch(2))
    torch.distributed.barrier()
    return found


def held(
    name: str, module: torch.nn.Module, case: str, found: dict[tuple[str, str], tuple[int, int]]
) -> Any:
    """Call of ``module`` that notes what it holds."""

    def call(*given: Any) -> Any:
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                kept += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = module(*given)
        handed = sum(result.untyped_storage().nbytes() for result in results)
        found[case, name] = kept, handed
        return results

    return call


def test_activations_boundaries_and_skips_are_a_rank_s_share() -> None:
    """Attention holds its result, and values if keys have norms, by tokens and by heads."""
    (whole,), shares = run_ranks(1, held_bytes, 1), run_ranks(2, held_bytes, 2)
    between = [at for at in whole if re.search(r"block|\.attn|\.mlp", at[1])]
    assert {case for case, _ in between} == set(LONG)
    for share in shares:
        for at in between:
            (own, handed), (every, every_handed) = share[at], whole[at]
            assert 2 * handed == every_handed, at
            assert own < (0.62 if "attn" in at[1] else 0.53) * every, at


def test_shares_of_every_rank_are_those_of_the_whole() -> None:
    whole = model_specs.load_backbone("flux-tiny", {"context_length": 77, "buckets": "4x12,8x8"})
    shares = [with_token_shares(whole, rank, 4) for rank in range(4)]
    blocks = [[layer for layer in share.layers if layer.attends][0] for share in shares]
    assert [[spec.shape[0] for spec in block.inputs] for block in blocks] == [
        [3, 20],
        [3, 19],
        [3, 19],
        [3, 19],
    ]
    assert blocks[0].inputs[0].others == ((4, 32),)
    for share in shares:
        assert share.input_spec == whole.input_spec and share.output_spec == whole.output_spec
        assert share.whole is whole and share.conditioning == whole.conditioning
        assert with_token_shares(share, 3, 4).layers == shares[3].layers
        assert with_token_shares(share, 0, 1) == whole
        assert check_backbone(share) == []
    skips = model_specs.load_backbone("uvit-tiny").skips
    own = with_token_shares(model_specs.load_backbone("uvit-tiny"), 1, 4).skips
    assert [(a.spec.shape[0], b.spec.shape[0]) for a, b in zip(skips, own, strict=True)] == [
        (18, 5)
    ] * 2


REFUSED = {
    "convolutions": ("sd-tiny", {}, 2, "sd-tiny has no token sequence between its layers"),
    "ControlNet": ("controlnet-tiny", {}, 2, "no token sequence between its layers"),
    "skiparse": ("suv-tiny", {}, 4, "4 context-parallel ranks do not divide the 2 heads of suv"),
    "tokens": ("flux-tiny", {"num_attention_heads": 8}, 8, "6 tokens of context_embedder are"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_the_reason(what: str) -> None:
    name, options, size, said = REFUSED[what]
    with pytest.raises(Faults, match=said):
        divide_context(model_specs.load_backbone(name, options), 0, size)


def test_traffic_of_each_attention_is_four_times_its_tokens() -> None:
    """Bytes of queries, keys, values and results; SD3.5 attends twice, Flux's two streams once."""
    for case, width, tokens in (
        ("uvit-text", 64, [94]),
        ("sd3.5", 32, [16 + 77, 16]),
        ("flux", 32, [12 + 226]),
    ):
        name, options = CASES[case]
        backbone = model_specs.load_backbone(name, options)
        traffic = traffic_of(backbone, 4, compute_bytes=2)
        first = next(each for each in traffic if each.num_attentions)
        assert first.num_attentions == len(tokens)
        assert first.sent_per_rank(4) == 4 * sum(tokens) / 4 * width * 2 * 3 / 4
        assert [each.layer for each in traffic if each.gathered] == ["head"]


def test_report_of_a_family_says_what_is_divided_and_sent() -> None:
    lines, record = context_report(model_specs.load_backbone("uvit-tiny"), 4)
    assert "divided from embed on, 18 tokens" in lines[0]
    assert sum(row["num_attentions"] for row in record["links"]) == 5
    assert "head" in lines[-2] and "unpatchify" in lines[-2]


def test_layers_say_what_attends() -> None:
    backbone = model_specs.load_backbone("dit-tiny")
    silent = replace(
        backbone, layers=tuple(replace(layer, attends=()) for layer in backbone.layers)
    )
    with pytest.raises(Faults, match=r"names its self-attentions \(Layer.attends\)"):
        divide_context(silent, 0, 2)
    wrong = replace(backbone.layers[0], attends=((0,),))
    assert check_backbone(replace(backbone, layers=(wrong, *backbone.layers[1:]))) == [
        "layer 0 (embedding): attends to input 0, which is no sequence"
    ]
