"""Hand-written layers in slices of tokens: whole layers' outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import model_specs
from megatron_pulse.backbone.token_slices import set_token_slices
from tests.model_specs.chains import Chain, build_chain, relative_error
from tests.model_specs.test_adapters import EVERYTHING, adapted, perturb
from tests.model_specs.test_tensor_parallel import CASES
from tests.ranks import run_ranks

NAMES = [name for name in CASES if name != "unet"]
DORA = replace(EVERYTHING, type="dora")


def step(chain: Chain, slices: int) -> dict[str, Tensor]:
    """Prediction and gradients."""
    parts = [part for module in chain.modules for part in module.modules()]
    assert set_token_slices(parts, slices)
    image, fields = chain.batch(2)
    prediction = chain(image.requires_grad_(), fields)
    prediction.square().mean().backward()
    found = {n: p.grad for n, p in chain.parameters().items() if p.grad is not None}
    for parameter in chain.parameters().values():
        parameter.grad = None
    return {"prediction": prediction.detach(), "image": image.grad, **found}


def errors(chain: Chain) -> dict[str, float]:
    perturb(chain)
    whole, sliced = step(chain, 1), step(chain, 3)
    assert whole.keys() == sliced.keys()
    return {name: relative_error(sliced[name], whole[name]) for name in whole}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", [None, EVERYTHING, DORA], ids=["none", "lora", "dora"])
def test_sliced_layers_equal_whole_ones(name: str, adapter: Any, one_rank: None) -> None:
    backbone_name, options = CASES[name]
    if adapter is None:
        backbone = model_specs.load_backbone(backbone_name, options)
    else:
        backbone = adapted(backbone_name, options, adapter)
    found = errors(build_chain(backbone, torch.float64))
    assert max(found.values()) < 1e-12, found


def on_shards() -> Mapping[str, dict[str, float]]:
    """Errors of this rank's layers under tensor and sequence parallelism, by case."""
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as tp

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tp.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    found = {}
    for name in NAMES:
        backbone = model_specs.load_backbone(*CASES[name]).divide_sequences(2)
        ranks = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        found[name] = errors(build_chain(backbone, torch.float64, **ranks))
    return found


def test_tensor_and_sequence_parallel_ranks_slice_their_own_tokens() -> None:
    for found in run_ranks(2, on_shards):
        for name, worst in found.items():
            assert max(worst.values()) < 1e-12, (name, worst)
