"""Tensor parallelism 2 against 1: the same initial weights, outputs and gradients."""

import zlib

import pytest
import torch

import model_specs
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, make_context, relative_error
from tests.ranks import run_ranks

UNET = {"sample_size": 8, "block_out_channels": "16,32", "transformer_depth": "0,1"}
CASES = {
    "uvit": ("uvit-tiny", {"depth": 2}),
    "uvit-text": (
        "uvit-tiny",
        {"depth": 2, "num_classes": 0, "context_length": 5, "context_dim": 12, "image_size": 4},
    ),
    "hunyuan-dit": ("hunyuan-tiny", {"num_layers": 4, "style_and_size": True, "buckets": "4x12"}),
    "unet": ("sd-tiny", {**UNET, "norm_num_groups": 4, "layers_per_block": 1}),
    "dit": ("dit-tiny", {"buckets": "8x4"}),
    "pixart": ("pixart-tiny", {"buckets": "4x8", "use_additional_conditions": True}),
    "sd3": ("sd3-tiny", {"num_layers": 2}),
    "sd3.5": (
        "sd3-tiny",
        {"num_layers": 2, "buckets": "8x4", "qk_norm": True, "dual_attention_layers": [0]},
    ),
    "flux": ("flux-tiny", {"num_layers": 1, "buckets": "4x8"}),
    "suv": ("suv-tiny", {"num_layers": "1,2,1", "sparse_n": "1,2,1", "buckets": "3x4x4"}),
    "suv of one MLP": (
        "suv-tiny",
        {"num_layers": "1,2,1", "sparse_n": "1,2,1", "double_ff": False, "norm_skips": True},
    ),
}


def whole(parameter, value):
    """``value`` (a parameter's data or gradient) put together from its tensor-parallel shards."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return value
    pieces = [torch.empty_like(value) for _ in range(2)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(pieces, value.contiguous(), group=group)
    strided = [piece.chunk(parameter.partition_stride, parameter.partition_dim) for piece in pieces]
    ordered = [part for parts in zip(*strided, strict=True) for part in parts]
    return torch.cat(ordered, dim=parameter.partition_dim)


def perturb_alike(parameters, tensor_parallel):
    """Adds the same noise in every layout, so that zeros at the start hide nothing."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for key, parameter in parameters.items():
        sharded = tensor_parallel > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        if sharded:
            shape[parameter.partition_dim] *= tensor_parallel
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        noise = 0.05 * torch.randn(shape, generator=generator)
        if sharded:
            count = tensor_parallel * parameter.partition_stride
            pieces = noise.chunk(count, parameter.partition_dim)
            noise = torch.cat(pieces[rank::tensor_parallel], parameter.partition_dim)
        parameter.data.add_(noise)


def steps(tensor_parallel, ways):
    """Results of ``step`` for every case in each of these ways, in order."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    found = {
        (case, sequence_parallel): step(tensor_parallel, sequence_parallel, *CASES[case])
        for case in CASES
        for sequence_parallel in ways
    }
    torch.distributed.barrier()
    return found


def step(tensor_parallel, sequence_parallel, name, options):
    """Initial weights, prediction and gradients of a chain, shards put together."""
    from megatron.core import tensor_parallel as tp

    tp.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    backbone = model_specs.load_backbone(name, options)
    chain = build_chain(
        backbone.divide_sequences(tensor_parallel) if sequence_parallel else backbone,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    weights = {
        key: whole(parameter, parameter.data.clone())
        if tensor_parallel > 1
        else parameter.data.clone()
        for key, parameter in chain.parameters().items()
    }
    weights = chain.state() | weights
    perturb_alike(chain.parameters(), tensor_parallel)
    image, fields = chain.batch(2)
    prediction = chain(image.requires_grad_(), fields)
    generator = torch.Generator().manual_seed(2)
    (prediction * torch.randn(prediction.shape, generator=generator)).sum().backward()
    gradients, keys = {"image": image.grad}, set()
    for key, parameter in chain.parameters().items():
        gradient = parameter.grad
        of_shards = sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_heads = tensor_parallel > 1 and ("q_layernorm" in key or "k_layernorm" in key)
        if of_shards or of_heads:
            torch.distributed.all_reduce(gradient)
        gradients[key] = whole(parameter, gradient) if tensor_parallel > 1 else gradient
    for layer, module in zip(chain.backbone.layers, chain.modules, strict=True):
        keys |= {
            (key, getattr(value, "global_shape", None))
            for key, value in module.sharded_state_dict(prefix=f"{layer.name}.").items()
            if not key.endswith("_extra_state")
        }
    return prediction.detach(), weights, gradients, {key for key, _ in keys}


@pytest.fixture(scope="module")
def one_rank():
    """Results of one rank for every case."""
    (found,) = run_ranks(1, steps, 1, [False])
    return found


@pytest.fixture(scope="module")
def two_ranks():
    """Results of each of two ranks, without and with sequence parallelism."""
    return run_ranks(2, steps, 2, [False, True])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_compute_what_one_does(case, sequence_parallel, one_rank, two_ranks):
    """The initial weights are equal bit for bit, the rest to rounding."""
    prediction, weights, gradients, keys = one_rank[case, False]
    assert keys == set(weights)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for rank in two_ranks:
        result = rank[case, sequence_parallel]
        assert result[1].keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(result[1][name], weight), name
        assert relative_error(result[0], prediction) < 1e-5
        for name, gradient in gradients.items():
            # Softmax does not see a bias of keys: its gradient is 0 but for rounding, of which
            # CPUs of other kinds make more or less.
            negligible = 1e-2 if name.endswith("k_layernorm.bias") else 1e-3
            scale = max(gradient.abs().max().item(), negligible * largest)
            assert (result[2][name] - gradient).abs().max().item() < 2e-5 * scale, name
        assert result[3] == keys


def count_here(tensor_parallel, name):
    """The counts inside a run, beside what this rank's shard of the mid block really holds."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    backbone = model_specs.load_backbone(name)
    index = [layer.name for layer in backbone.layers].index("mid_block.attn")
    module = backbone.layers[index].build(make_context(tensor_model_parallel_size=tensor_parallel))
    torch.distributed.barrier()  # a rank that ends early breaks what the other still connects
    return count_parameters(backbone), sum(p.numel() for p in module.parameters()), index


def test_counts_inside_a_tensor_parallel_run_are_of_the_whole_model():
    counts = count_parameters(model_specs.load_backbone("uvit-tiny"))
    for inside, shard, index in run_ranks(2, count_here, 2, "uvit-tiny"):
        assert inside == counts
        assert shard < 0.6 * counts[index]


def refused(name, options):
    """The message with which the first block refuses a layout."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.distributed.barrier()
    backbone = model_specs.load_backbone(name, options)
    try:
        backbone.layers[1].build(make_context(tensor_model_parallel_size=2))
    except ValueError as error:
        return str(error)
    return None


def test_heads_that_do_not_divide_are_refused():
    for message in run_ranks(2, refused, "uvit-tiny", {"num_heads": 1}):
        assert "attention heads 1 is not divisible by the tensor-parallel size" in message
