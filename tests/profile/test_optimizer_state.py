"""Bytes of optimizer states beside the states that optimizers keep."""

from __future__ import annotations

import pytest
import torch

from megatron_pulse.planner.partition.memory import ParameterState, bytes_per_parameter
from megatron_pulse.profile.measurement.layer_context import meta_context
from megatron_pulse.profile.optimizer_state import matrix_share, optimizer_bytes
from model_specs import load_backbone


def parameters(name: str) -> list[torch.nn.Parameter]:
    context = meta_context()
    with torch.device("meta"):
        modules = [layer.build(context) for layer in load_backbone(name, {}).layers]
    return [p for module in modules for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", ["dit-tiny", "unet-tiny"])
def test_bytes_of_states_are_those_kept_by_the_optimizers(name: str):
    own, backbone = parameters(name), load_backbone(name, {})
    count = sum(p.numel() for p in own)
    for p in own:
        p.grad = torch.zeros_like(p)
    for kind, optimizer in {
        "adam": torch.optim.AdamW(own, foreach=False),
        "sgd": torch.optim.SGD(own, momentum=0.9, foreach=False),
    }.items():
        optimizer.step()
        kept = sum(
            value.numel() * value.itemsize
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value) and value.dim()
        )
        assert optimizer_bytes(kind, backbone) == pytest.approx(kept / count)
    assert optimizer_bytes("sgd", backbone, momentum=False) == 0
    matrices = sum(p.numel() for p in own if p.dim() == 2)
    for kind in ("muon", "lion"):  # one moment of matrices, two of the rest
        kept = 4 * matrices + 8 * (count - matrices)
        assert optimizer_bytes(kind, backbone) == pytest.approx(kept / count)
    assert 0 < matrix_share(backbone) < 1


def test_state_counts_in_the_bytes_of_a_parameter():
    lion = ParameterState(ema=True, optimizer_bytes=4)
    assert bytes_per_parameter("bfloat16", state=lion) == 2 + 4 + 4 + 4 + 4
    assert bytes_per_parameter("bfloat16", True, 4, lion) == 2 + 4 + (4 + 4 + 4) / 4
