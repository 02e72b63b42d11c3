"""Derived layers whose token-wise regions run in slices of tokens."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from megatron_pulse.adapters.adapter import Adapter
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.token_slices import set_token_slices
from megatron_pulse.errors import Faults
from megatron_pulse.profile.analytic import count_work
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.profile.token_slices import require_token_slices
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.from_module import source_of, with_quantization
from megatron_pulse.tracing.graph_analysis import operation
from megatron_pulse.tracing.sliced_graph import sliced, with_tokens
from model_specs.common.attach_adapter import with_adapter
from tests.runtime.equality import Case, leave_zero
from tests.runtime.test_adapters import DORA, DROPPING, OF_TRANSFORMER
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
    leave_zero(modules)
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


ADAPTERS = {
    "lora": OF_TRANSFORMER,
    "dropout": DROPPING,
    "dora": DORA,
    "lokr": Adapter(3, 6.0, type="lokr", factor=2),
}


@pytest.mark.parametrize("kind", [*ADAPTERS, "nf4"])
def test_adapted_and_quantised_layers_equal_whole_ones(kind: str) -> None:
    dtype = FP32 if kind == "nf4" else FP64
    subject = Subject("sd3", dtype)
    chain = subject.chain
    if kind == "nf4":
        chain = with_quantization(chain, "nf4")
    adapter = ADAPTERS.get(kind, OF_TRANSFORMER)
    chain = with_adapter(chain, replace(adapter, targets=("to_q", "to_out.0", "net.2")))
    compare(chain, subject.batches(CASE, 0), dtype, 3)


def test_regions_are_what_lies_between_attentions() -> None:
    """A block of Wan: norm to projections, output to residual, MLP; each with all of its work, and
    the in-place rotation of queries and keys."""
    source = source_of(Subject("wan", FP32).chain)
    assert source is not None
    chain = source.chains.first
    graphs = source.divided(chain, 0, 1).graphs
    units = zip(chain.units, graphs, strict=True)
    found = {u.name: sliced(with_tokens(u, graph.nodes), 3) for u, graph in units}
    assert {name for name, (_, regions) in found.items() if regions} == {
        *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".part2", ".part3")),
        "proj_out",
    }
    unit, regions = found["blocks.1"]
    first, last = ([operation(n) for n in region.nodes] for region in regions.values())
    assert first[0].startswith("layer_norm") and first.count("linear.default") == 3
    assert first.count("copy_.default") == 4 and last.count("linear.default") == 1
    outside = {operation(node) for node in unit.graph.nodes}
    assert not outside & {"linear.default", "layer_norm.default", "copy_.default"}
    assert [len(region.results) for region in regions.values()] == [3, 1]


def test_a_sliced_layer_keeps_the_inputs_of_its_regions() -> None:
    subject = Subject("wan", FP32)
    index = [layer.name for layer in subject.chain.layers].index("blocks.1.part3")
    kept = []
    with some_process_group(), torch.device("meta"):
        module = subject.chain.layers[index].build(meta_context())
        for count in (1, 4):
            module.token_slices = count
            work = count_work(subject.chain, index, module, 2, FP32, RUNNING)
            kept.append(work.memory.kept.own_bytes)
    whole, parts = kept
    assert parts < whole / 4


def test_a_region_that_cannot_be_sliced_stays_whole_and_is_told_once() -> None:
    """Marked as token-wise, a sum over all tokens so far is not."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    mapped = graph.call_function(torch.ops.aten.linear.default, (x, weight))
    graph.output((graph.call_function(torch.ops.aten.cumsum.default, (mapped, 1)),))
    value, tokens = torch.empty(2, 6, 4, device="meta"), Division(1, (6,))
    known = (value, tokens)
    marks = [known, (torch.empty(4, 4, device="meta"), None), known, known, (None, None)]
    source = source_of(Subject("wan", FP32).chain)
    assert source is not None
    unit = with_tokens(replace(source.chains.first.units[0], graph=graph), marks)
    with pytest.warns(UserWarning, match=r"cumsum.default at .*: it is along the tokens"):
        made, regions = sliced(unit, 3)
    assert not regions and len(made.graph.nodes) == len(graph.nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sliced(unit, 3)


def test_what_has_no_tokens_is_refused() -> None:
    with pytest.raises(Faults, match="UNets are not divided"):
        require_token_slices(Subject("small_unet", FP32).chain)
    require_token_slices(Subject("flux", FP32).chain)
    with pytest.raises(Faults, match="has 16 tokens: give a smaller number of slices"):
        require_token_slices(Subject("flux", FP32).chain, 100)
