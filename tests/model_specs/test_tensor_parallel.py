"""Tensor parallelism 2 against 1: the same initial weights, outputs and gradients."""

import pytest
import torch

import model_specs
from megatron_pulse.profile.parameters import count_parameters
from tests.model_specs.chains import build_chain, make_context, relative_error
from tests.ranks import run_ranks

UNET = {"sample_size": 8, "block_out_channels": "16,32", "transformer_depth": "0,1"}
CASES = {
    "uvit": ("uvit-tiny", {"depth": 2}),
    "unet": ("unet-sd-tiny", {**UNET, "norm_num_groups": 4, "layers_per_block": 1}),
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


def step(tensor_parallel, sequence_parallel, name, options):
    """Initial weights, prediction and gradients of a chain, shards put together."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    tp.model_parallel_cuda_manual_seed(1)
    chain = build_chain(
        model_specs.load_backbone(name, options),
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
    )
    image, fields = chain.batch(2)
    prediction = chain(image.requires_grad_(), fields)
    generator = torch.Generator().manual_seed(2)
    (prediction * torch.randn(prediction.shape, generator=generator)).sum().backward()
    weights, gradients, keys = {}, {"image": image.grad}, set()
    for key, parameter in chain.parameters().items():
        gradient = parameter.grad
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient)
        weights[key] = whole(parameter, parameter.data) if tensor_parallel > 1 else parameter.data
        gradients[key] = whole(parameter, gradient) if tensor_parallel > 1 else gradient
    for layer, module in zip(chain.backbone.layers, chain.modules, strict=True):
        keys |= {
            (key, getattr(value, "global_shape", None))
            for key, value in module.sharded_state_dict(prefix=f"{layer.name}.").items()
            if not key.endswith("_extra_state")
        }
    return prediction.detach(), weights, gradients, {key for key, _ in keys}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_compute_what_one_does(case, sequence_parallel):
    """The initial weights are equal bit for bit, the rest to rounding."""
    ((prediction, weights, gradients, keys),) = run_ranks(1, step, 1, False, *CASES[case])
    assert keys == set(weights)
    for result in run_ranks(2, step, 2, sequence_parallel, *CASES[case]):
        assert result[1].keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(result[1][name], weight), name
        assert relative_error(result[0], prediction) < 1e-5
        for name, gradient in gradients.items():
            assert relative_error(result[2][name], gradient) < 2e-5, name
        assert result[3] == keys


def count_here(tensor_parallel, name):
    """The counts inside a run, beside what this rank's shard of the mid block really holds."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    backbone = model_specs.load_backbone(name)
    index = [layer.name for layer in backbone.layers].index("mid_block")
    module = backbone.layers[index].build(make_context(tensor_model_parallel_size=tensor_parallel))
    return count_parameters(backbone), sum(p.numel() for p in module.parameters()), index


def test_counts_inside_a_tensor_parallel_run_are_of_the_whole_model():
    counts = count_parameters(model_specs.load_backbone("uvit-tiny"))
    for inside, shard, index in run_ranks(2, count_here, 2, "uvit-tiny"):
        assert inside == counts
        assert shard < 0.6 * counts[index]


def refused(sequence_parallel, name, options):
    """The message with which the first block refuses a layout."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    backbone = model_specs.load_backbone(name, options)
    context = make_context(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    try:
        backbone.layers[1].build(context)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("sequence_parallel", "options", "words"),
    [
        (False, {"num_heads": 1}, "attention heads 1 is not divisible by the tensor-parallel size"),
        (True, {"num_classes": 0}, "17 tokens do not divide by the tensor-parallel size 2"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(sequence_parallel, options, words):
    for message in run_ranks(2, refused, sequence_parallel, "uvit-tiny", options):
        assert words in message
