"""Derived layers whose token-wise regions run in slices of tokens."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.token_slices import set_token_slices
from tests.runtime.equality import Case
from tests.tracing.context_parallel.ranks import build_layers, run_layers
from tests.tracing.subject import Subject

CASE = Case("sequential", 1)
FP32, FP64 = "float32", "float64"
QUICK = (("wan", FP32), ("flux", FP64), ("mixed", FP64))
OTHERS = (
    *(("wan/shapes", FP32), ("wan_i2v", FP32), ("hunyuan", FP32), ("ltx", FP64), ("t5", FP64)),
    *(("hunyuan_video", FP64), ("cogvideox_5b", FP64), ("sd3", FP64), ("pixart_alpha", FP64)),
)


def gradients(modules: nn.ModuleList) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in modules.named_parameters() if p.grad is not None}
    modules.zero_grad()
    return found


def compare(chain: Backbone, batches: list[dict[str, Tensor]], dtype: str, count: int) -> None:
    """Compare the layers of ``chain`` with those in ``count`` slices, on batches of all shapes."""
    modules = build_layers(chain, None)
    tolerance = 1e-12 if dtype == FP64 else 2e-6
    for index, batch in enumerate(batches):
        outcomes = []
        for slices in (1, count):
            assert set_token_slices(modules, slices)
            result = run_layers(chain, modules, batch, index)
            (result - batch["target"]).square().mean().backward()
            outcomes.append((result.detach(), gradients(modules)))
        (whole, of_whole), (parts, of_parts) = outcomes
        top = max(gradient.abs().max() for gradient in of_whole.values())
        assert float((whole - parts).abs().max() / whole.abs().max()) < tolerance
        assert of_whole.keys() == of_parts.keys()
        for name, expected in of_whole.items():
            least = expected.abs().max().clamp(min=1e-3 * top)
            assert float((of_parts[name] - expected).abs().max() / least) < tolerance, name


@pytest.mark.parametrize("name, dtype", QUICK)
def test_sliced_layers_equal_whole_ones(name: str, dtype: str) -> None:
    subject = Subject(name, dtype)
    compare(subject.chain, subject.batches(CASE, 0), dtype, 3)


@pytest.mark.parametrize("name, dtype", OTHERS)
def test_further_classes_equal_whole_ones(name: str, dtype: str) -> None:
    subject = Subject(name, dtype)
    shapes = Case("sequential", subject.chain.num_shapes)
    compare(subject.chain, subject.batches(shapes, 0), dtype, 5)
