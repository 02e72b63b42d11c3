"""Layer costs, measured on this CPU and analytic: exact memory, plausible times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pulse.backbone.activations import ActivationPolicies, ActivationPolicy
from megatron_pulse.profile.analytic import LayerWork, analyse, count_work
from megatron_pulse.profile.flops import count_flops
from megatron_pulse.profile.measurement.clock import RepetitionLimits, mean_and_spread
from megatron_pulse.profile.measurement.layer_call import make_call
from megatron_pulse.profile.measurement.layer_context import meta_context, some_process_group
from megatron_pulse.profile.measurement.measure import measure
from megatron_pulse.profile.profile import Profile, Source
from megatron_pulse.profile.roofline import PRESETS, Roofline, custom_device
from megatron_pulse.runtime.activations import selective_recompute
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from model_specs import load_backbone
from tests.profile.layers import WIDTH, small_backbone
from tests.runtime import tiny
from tests.toys import nested, toy_backbone

TABLES = Path(__file__).parents[1] / "model_specs" / "unet_tables.json"
BRIEF = RepetitionLimits(min_repetitions=3, max_repetitions=5, enough_s=0.0)


def work_of(backbone: Any, size: int, dtype: str = "float32") -> list[LayerWork]:
    context = meta_context(dtype)
    with some_process_group(), torch.device("meta"):
        return [
            count_work(backbone, i, layer.build(context), size, dtype)
            for i, layer in enumerate(backbone.layers)
        ]


def measured(backbone: Any, running: Any = None) -> Profile:
    return measure(backbone, (1, 3), patience=BRIEF, running=running)


def analytic(backbone: Any, running: Any = None) -> Profile:
    roofline = Roofline(PRESETS["A100-80GB"], "float32")
    return analyse(backbone, (1, 3), roofline, running=running)


@pytest.mark.parametrize("make", [measured, analytic])
@pytest.mark.parametrize("size", [1, 3])
def test_memory_of_known_layers_is_exact(make: Any, size: int) -> None:
    """In rows of WIDTH fp32 values; see ``profile`` for what counts where."""
    profile = make(small_backbone(), RUNNING)
    row = 4 * WIDTH * size
    rows = {
        "embed": 0,  # keeps the batch's vector, which is shared
        "first": 1,  # keeps the sample for its weight
        "tanh": 0,  # keeps what it returns, which counts for the next
        "mlp": 1 + 1,  # its input is kept twice, and counts once; gelu's result
        "scale": 1 + 1,  # its input, which is a skip too; conditioning, cast for this user
        "add": 0,
    }
    times = profile.times_at(size)
    names = [layer.name for layer in profile.layers]
    saved = {name: layer.saved_bytes // row for name, layer in zip(names, times, strict=True)}
    assert saved == rows
    assert all(layer.saved_bytes % row == 0 for layer in times)
    # What is returned, its gradient, and gradients of inputs. Of the mlp also gelu's result and the
    # matrix's gradient, while it is being made.
    peaks = {name: layer.peak_bytes / row for name, layer in zip(names, times, strict=True)}
    assert peaks["tanh"] == 3
    assert peaks["scale"] == 4
    assert peaks["mlp"] == pytest.approx(4 + WIDTH / size)
    again = profile.at(size, profile.all_layers(ActivationPolicy.RECOMPUTE))
    # The sample passes by the embedder, so that the first layer takes what that has taken too.
    assert again.saved_bytes == tuple(row * n for n in (1, 0, 1, 1, 2, 1))
    assert again.shared_bytes == (0, row, 0, 0, 0, 0)
    assert again.recompute_bytes == tuple(row * n for n in (0, 0, 1, 1, 0, 0))
    assert set(again.wgrad_bytes) == {0}
    # A matrix whose input wants no gradient does not wait: the mlp's does, for what it multiplies.
    assert profile.at(size).wgrad_bytes == tuple(row * n for n in (0, 0, 0, 2, 0, 0))


@pytest.mark.parametrize("make", [measured, analytic])
def test_what_is_kept_without_what_is_cheap(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_recompute, "LEAST_BYTES", 1)
    plain, profile = make(small_backbone()), make(small_backbone(), RUNNING)
    for size in (1, 3):
        row, times = 4 * WIDTH * size, profile.times_at(size)
        # The gelu's result is made again of the mlp's input; what tanh returns would need its own.
        assert [layer.selective_bytes / row for layer in times] == [0, 1, 0, 1, 2, 0]
        mlp, rest = times[3], (*times[:3], *times[4:])
        assert profile.source is Source.MEASURED or (
            mlp.selective_s > 0 and not any(layer.selective_s for layer in rest)
        )
        chosen = ActivationPolicies(selective={3})
        costs, part = profile.at(size), profile.at(size, chosen)
        assert part.saved_bytes == (*costs.saved_bytes[:3], row, *costs.saved_bytes[4:])
        more = [b - a for a, b in zip(costs.backward_s, part.backward_s, strict=True)]
        assert more == pytest.approx([0, 0, 0, mlp.selective_s, 0, 0])
        assert part.wgrad_bytes == costs.wgrad_bytes and not any(part.recompute_s)
        assert plain.at(size, chosen).saved_bytes == plain.at(size).saved_bytes


def test_gradients_that_are_dropped_in_turn_leave_nothing() -> None:
    backbone = small_backbone()
    module = backbone.layers[3].build(meta_context())
    call = make_call(backbone, 3, module, 2, "float32", "cpu")
    seen: list[torch.Tensor] = []
    call.trained[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    for backward in (call.backward, call.backward_in_turn):
        results = call.forward()
        backward(results, call.seeds(results))
        assert all(tensor.grad is None for tensor in (*call.inputs, *call.trained))
    assert torch.equal(*seen) and seen[0].abs().sum() > 0


def test_edges_and_parameters() -> None:
    profile = measure(small_backbone(), (2,), dtype="bfloat16", patience=BRIEF)
    assert [layer.parameters for layer in profile.layers] == [64, 64, 0, 64, 0, 0]
    assert {layer.boundary_bytes for layer in profile.layers} == {2 * WIDTH}
    (skip,), (edge,) = profile.skips, profile.conditioning
    assert (skip.name, skip.source, skip.destination, skip.num_bytes) == ("s", 3, 5, 16)
    assert (edge.name, edge.source, edge.consumers, edge.num_bytes) == ("c", 0, (4,), 16)
    assert edge.embedder
    assert profile.backbone == {"name": "small", "options": {}}
    assert profile.versions["torch"] == torch.__version__


@pytest.mark.parametrize("make", [measured, analytic])
def test_gradients_are_split_by_what_a_layer_has(make: Any) -> None:
    for layers in make(small_backbone()).times.values():
        embed, first, tanh, mlp, scale, add = layers
        assert all(layer.forward_s > 0 for layer in layers)
        assert embed.input_grad_s == first.input_grad_s == 0.0
        assert embed.weight_grad_s > 0 and first.weight_grad_s > 0
        assert tanh.weight_grad_s == scale.weight_grad_s == add.weight_grad_s == 0.0
        assert tanh.input_grad_s > 0 and mlp.input_grad_s > 0 and scale.input_grad_s > 0


def test_waiting_weight_gradients_are_measured_as_the_runtime_leaves_them() -> None:
    left: list[torch.nn.Module] = []

    def leaving(module: Any) -> Any:
        left.append(module)
        return RUNNING.leaving(module)

    backbone = small_backbone()
    profile = measure(backbone, (1, 3), patience=BRIEF, running=replace(RUNNING, leaving=leaving))
    assert len(left) >= 2 * len(backbone.layers) and "split backwards" in profile.method
    for layers in profile.times.values():
        _, _, tanh, mlp, _, _ = layers
        assert all(layer.split_forward_s > 0 for layer in layers)
        assert tanh.split_input_grad_s > 0 and mlp.split_input_grad_s > 0
    least = [min(each) for each in zip(
        *([layer.split_weight_grad_s for layer in layers] for layers in profile.times.values()),
        strict=True,
    )]  # fmt: skip
    assert least[3] > least[2], "an mlp has weights, tanh has none; one time may be disturbed"
    assert all(p.grad is None for module in left for p in module.parameters())
    for layers in measured(backbone).times.values():
        assert all(layer.parts_s(True) == layer.parts_s(False) for layer in layers)


def test_split_backward_is_the_whole_of_what_torch_counts() -> None:
    """Half of a linear layer's backward is its input gradient; together they are the backward."""
    backbone = load_backbone("uvit-tiny")
    for layer, work, flops in zip(
        backbone.layers[1:], work_of(backbone, 2)[1:], count_flops(backbone, 2)[1:], strict=True
    ):
        assert sum(kernel.flops for kernel in work.forward) == flops.forward
        assert sum(kernel.flops for kernel in work.backward) == flops.backward
        if layer.name.endswith("mlp"):
            assert sum(kernel.flops for kernel in work.input_grad) == flops.forward


def test_operations_of_stable_diffusion() -> None:
    """Forward exactly what diffusers' UNet has at 512 x 512. Backward within 1%: Megatron also
    computes a gradient for text states, and ours none for the sample. Half is input gradient."""
    table = json.loads(TABLES.read_text())["sd21_512"]
    work = work_of(load_backbone("sd-v2.1", {"sample_size": 64}), 1, "bfloat16")
    forward, backward, inputs = (
        sum(kernel.flops for layer in work for kernel in getattr(layer, name))
        for name in ("forward", "backward", "input_grad")
    )
    assert forward == table["forward"]
    assert backward == pytest.approx(sum(unit[4] for unit in table["units"]), rel=0.01)
    assert 0.45 < inputs / backward < 0.6


def test_kernels_of_a_linear_layer() -> None:
    """One product: the matrix, the rows in and the rows out; a view costs nothing."""
    work = work_of(small_backbone(), 3)[1]
    (kernel,) = work.forward
    assert kernel.flops == 2 * 3 * WIDTH * WIDTH
    assert kernel.num_bytes == 4 * (WIDTH * WIDTH + 2 * 3 * WIDTH)
    assert work.input_grad == ()
    assert sum(kernel.flops for kernel in work.backward) == kernel.flops


def test_roofline() -> None:
    device = custom_device(peak_tflops=1, bandwidth_gbs=100, memory_gb=2)
    roofline = Roofline(device, "float16", 0.5, 1.0, 1e-3)
    (work,) = work_of(small_backbone(), 1)[1].forward
    assert device.memory_bytes == 2 * 10**9
    assert roofline.seconds([work, work]) == pytest.approx(2e-3 + 2 * work.num_bytes / 1e11)
    slow = Roofline(custom_device(1e-9, 100, 2), "float32", 0.5, 1.0, 0.0)
    assert slow.seconds([work]) == pytest.approx(work.flops / 500)
    with pytest.raises(ValueError, match="V100-32GB at bfloat16 is not known"):
        Roofline(PRESETS["V100-32GB"], "bfloat16")


def test_a_toy_with_everything_can_be_measured() -> None:
    """Two streams, skips, conditioning from an embedder or from a layer of the chain."""
    for embedder in (True, False):
        backbone = toy_backbone(4, nested(4, 2), conditioned=(1, 3), embedder=embedder)
        for profile in (measured(backbone), analytic(backbone)):
            costs = profile.at(2)
            assert costs.names == tuple(layer.name for layer in backbone.layers)
            assert all(b > 0 for b in costs.backward_s)
            assert [(s.source, s.destination) for s in costs.skips] == [
                (skip.source, skip.destination) for skip in backbone.skips
            ]


def test_more_work_takes_longer() -> None:
    """Products of 64 times as many weights on eight times as many samples."""
    few = {"depth": 2}
    wide = {**few, "embed_dim": 512, "num_heads": 8}
    small = measure(load_backbone("uvit-tiny", few), (1,), patience=BRIEF).at(1)
    large = measure(load_backbone("uvit-tiny", wide), (8,), patience=BRIEF).at(8)
    for costs in (small, large):
        assert all(0 < seconds < 60 for seconds in (*costs.forward_s, *costs.backward_s))
    # Of any one layer something else may have been measured.
    assert median(large.forward_s) > 2 * median(small.forward_s), (small, large)
    assert sum(large.saved_bytes) > 10 * sum(small.saved_bytes)


def test_equal_layers_are_measured_once() -> None:
    backbone = load_backbone("uvit-tiny")
    profile = measure(backbone, (1,), patience=BRIEF, once_per_kind=True)
    forward = dict(zip(profile.at(1).names, profile.at(1).forward_s, strict=True))
    assert forward["in_blocks.0.attn"] == forward["in_blocks.1.attn"]
    assert forward["in_blocks.0.mlp"] == forward["out_blocks.1.mlp"] == forward["mid_block.mlp"]
    assert forward["out_blocks.0.attn"] != forward["in_blocks.0.attn"]  # it pops a skip


def test_means_leave_out_the_extreme_repetitions() -> None:
    assert mean_and_spread([90.0, 1.0, 2.0, 3.0, 7.0]) == (4.0, 5.0)
    assert mean_and_spread([-1.0, -3.0]) == (0.0, 1.0)
    assert mean_and_spread([*range(1, 18), 900.0, 900.0, -900.0])[0] == (sum(range(1, 18)) - 1) / 16
    with pytest.raises(ValueError, match="min_repetitions"):
        RepetitionLimits(min_repetitions=0)


def test_what_tensor_parallel_ranks_do_not_share_they_all_do() -> None:
    """Matrix multiplications are shared, but for that which joins a skip; on slow memory norms and
    residuals take time too."""
    backbone = load_backbone("uvit-tiny")
    shares = {}
    for name, gb_per_s in (("fast memory", 1e9), ("slow memory", 10)):
        roofline = Roofline(custom_device(1, gb_per_s, 1000), "float32", launch_s=0)
        layers = analyse(backbone, [2], roofline).layers
        shares[name] = [
            x.sharded_time
            for x, layer in zip(layers, backbone.layers, strict=True)
            if x.sharded_parameters and not layer.pops
        ]
        joining = [x for x, layer in zip(layers, backbone.layers, strict=True) if layer.pops]
        assert joining and all(0.1 < x.sharded_time < 0.8 for x in joining)
        assert all(x.sharded_time == 1.0 for x in layers if not x.sharded_parameters)
    assert shares["fast memory"] == pytest.approx([1.0] * len(shares["fast memory"]), abs=0.1)
    assert all(0.2 < share < 0.9 for share in shares["slow memory"])


def test_a_measured_backward_adds_up_gradients_over_microbatches(monkeypatch) -> None:
    added = []

    class Added(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.add_.Tensor:
                added.append((tuple(args[0].shape), args[0].dtype))
            return func(*args, **(kwargs or {}))

    with Added():
        measure(small_backbone(), (1,), dtype="bfloat16", patience=BRIEF)
    sums = {(shape, kind) for shape, kind in added}
    assert ((WIDTH, WIDTH), torch.float32) in sums


DERIVED = {
    "num_attention_heads": 2, "attention_head_dim": 12, "axes_dims_rope": [4, 4, 4],
    "num_layers": 3, "num_single_layers": 3, "height": 4, "width": 4, "text_length": 6,
    "joint_attention_dim": 16, "pooled_projection_dim": 12, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("family", ["uvit", "unet-text", "hunyuan", "flux", "derived"])
def test_layers_of_a_kind_are_counted_once_and_alike(family, monkeypatch):
    from megatron_pulse.profile import analytic, flops

    roofline = Roofline(PRESETS["H100"], "bfloat16")
    if family == "derived":
        backbone = load_backbone("diffusers:FluxTransformer2DModel", DERIVED)
    else:
        backbone = tiny.backbone(family)
    built = []
    count = analytic.count_work
    monkeypatch.setattr(analytic, "count_work", lambda *args: built.append(args[1]) or count(*args))
    once = analytic.analyse(backbone, [2], roofline)
    assert len(set(built)) < len(backbone.layers)
    built.clear()
    operations = count_flops(backbone)
    for module in (analytic, flops):
        monkeypatch.setattr(module, "layer_kind", lambda backbone, index: str(index))
    assert analytic.analyse(backbone, [2], roofline) == once
    assert set(built) == set(range(len(backbone.layers)))
    assert count_flops(backbone) == operations
