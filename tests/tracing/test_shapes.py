"""Derived chains at several shapes: on the same weights, or refused with what differs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.shape_buckets import at_shape
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.roofline import PRESETS, Roofline
from megatron_pulse.tracing.from_module import source_of
from megatron_pulse.tracing.torch_export import DerivationError
from tests.tracing.own import Dense

PICTURE = {"image": torch.randn(2, 3, 4, 4), "when": torch.rand(2)}
WIDE = {"image": torch.randn(2, 3, 2, 6), "when": torch.rand(2)}


def test_a_chain_of_several_shapes_is_planned_as_their_mean() -> None:
    """Times are the mean by shares, bytes those of the largest; each shape alone is a chain."""
    larger = {**PICTURE, "image": torch.randn(2, 3, 8, 8)}
    module = Dense()
    chain = pulse.from_module(module, PICTURE, sample="image", other_inputs=[larger], shares=(3, 1))
    assert chain.shares == (3, 1) and pulse.check_backbone(chain) == []
    assert chain.input_spec == pulse.TensorSpec((3, 4, 4), others=((3, 8, 8),))
    source = source_of(chain)
    assert source is not None and source.chains[1, 2].state["enter.weight"] is module.enter.weight
    alone = [at_shape(chain, shape_index) for shape_index in (0, 1)]
    sizes = [part.input_spec.numel_per_sample for part in (*alone, chain)]
    assert sizes == [48, 192, 192]
    layer = alone[1].layers[0].build(None)
    assert layer((larger["image"],), {}, {"when": larger["when"]})[0].shape[2:] == (8, 8)

    roofline = Roofline(PRESETS["A100-80GB"], "float32")
    small, large, both = (analyse(part, [1, 2], roofline).at(2) for part in (*alone, chain))
    for name in ("forward_s", "backward_s", "weight_grad_s"):
        means = [
            0.75 * a + 0.25 * b
            for a, b in zip(getattr(small, name), getattr(large, name), strict=True)
        ]
        assert getattr(both, name) == pytest.approx(means)
    for name in ("saved_bytes", "boundary_bytes", "parameters", "skips"):
        assert getattr(both, name) == getattr(large, name)


class Fussy(nn.Module):
    """Takes another way where pictures are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if x.shape[-1] < 6 else list(self.blocks)[:2]:
            x = block(x) + F.silu(x)
        return x


def test_what_differs_between_shapes_is_told() -> None:
    given = {"x": torch.randn(2, 3, 4, 4)}
    with pytest.raises(DerivationError, match=r"microbatches of 2 of shape 1 .*blocks\.2"):
        pulse.from_module(Fussy(), given, sample="x", other_inputs=[{"x": torch.randn(2, 3, 4, 6)}])
    for other, said in (
        ({"image": WIDE["image"]}, r"other_inputs\[0\]: when not given, but among inputs"),
        ({**WIDE, "more": torch.ones(2)}, "more given, but not among inputs"),
        ({**WIDE, "when": torch.ones(2, dtype=torch.int64)}, "when is torch.int64, in inputs torc"),
        ({**WIDE, "when": torch.ones(1)}, "when: the same for every batch there or in inputs"),
    ):
        with pytest.raises(DerivationError, match=said):
            pulse.from_module(Dense(), PICTURE, sample="image", other_inputs=[other])
    with pytest.raises(DerivationError, match="other_inputs must be a list"):
        pulse.from_module(Dense(), PICTURE, sample="image", other_inputs=WIDE)
    with pytest.raises(
        ValueError, match="shapes 0 and 1: samples and batch fields have equal sizes"
    ):
        pulse.from_module(Dense(), PICTURE, sample="image", other_inputs=[PICTURE])
