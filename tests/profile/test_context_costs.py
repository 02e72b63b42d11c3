"""Costs of context parallelism, beside those counted of a rank itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.cli.main import main
from megatron_pulse.errors import Faults
from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.tune.context_rank import of_context_rank
from megatron_pulse.planner.tune.plans.verify_figures import load_checked
from megatron_pulse.profile.analytic import analyse, analyse_context
from megatron_pulse.profile.context_costs import RankShare
from megatron_pulse.profile.files import load_profile
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from megatron_pulse.profile.measurement.context_rank import with_context_costs
from megatron_pulse.profile.measurement.measure import measure
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.roofline import Roofline, custom_device
from megatron_pulse.tracing.context_parallel.divided_backbone import divide_context, traffic_of
from model_specs import allow, load_backbone
from tests.integration import tiny_tokens
from tests.reference import unsealed_record

MODULE = f"{tiny_tokens.__file__}:build"
LARGE = {"width": 512, "heads": 8}
CPU = Roofline(custom_device(0.1, 2000.0, 8.0), "float32", launch_s=0.0)
FREE = Cluster(
    "free", 1, 8, 8.0, DeviceFigures(0.1, 20.0),
    ClusterLink("loopback", 1e6, 0.0, BandwidthScope.DEVICE),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> tuple[Backbone, Profile]:
    allow(MODULE)
    backbone = load_backbone(MODULE, LARGE)
    return backbone, analyse_context(analyse(backbone, [1, 4], CPU), backbone, CPU)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ranks_costs_are_those_counted_of_it(size: int, tokens: tuple[Backbone, Profile]) -> None:
    """Twice as many ranks as those of which the shares are known, and four times as many."""
    backbone, profile = tokens
    divided = divide_context(backbone, 0, size)
    counted, predicted = (
        analyse(divided, [4], CPU, context=size),
        of_context_rank(profile, FREE, size),
    )
    for one, other in zip(counted.layers, predicted.layers, strict=True):
        assert one.boundary_bytes == other.boundary_bytes, one.name
        assert one.parameters == other.parameters
    assert [edge.num_bytes for edge in counted.conditioning] == [
        edge.num_bytes for edge in predicted.conditioning
    ]
    total_s = sum(row.whole_s for row in counted.times_at(4))
    most = max(row.peak_bytes for row in counted.times_at(4))
    for one, other in zip(counted.times_at(4), predicted.times_at(4), strict=True):
        assert other.whole_s == pytest.approx(one.whole_s, abs=0.005 * total_s)
        assert other.saved_bytes == pytest.approx(one.saved_bytes, rel=0.01)
        assert other.peak_bytes == pytest.approx(one.peak_bytes, abs=0.05 * most)


def test_a_ranks_costs_in_slices_are_those_counted_of_it() -> None:
    allow(MODULE)
    backbone = load_backbone(MODULE, LARGE)
    profile = analyse(backbone, [2], CPU, token_slices=[3])
    profile = analyse_context(profile, backbone, CPU).in_slices(3)
    counted = analyse(divide_context(backbone, 0, 4), [2], CPU, token_slices=[3], context=4)
    predicted, counted = of_context_rank(profile, FREE, 4).times_at(2), counted.in_slices(3)
    total_s = sum(row.whole_s for row in counted.times_at(2))
    for one, other in zip(counted.times_at(2), predicted, strict=True):
        assert other.whole_s == pytest.approx(one.whole_s, abs=0.005 * total_s)
        assert other.saved_bytes == pytest.approx(one.saved_bytes, rel=0.01)


@pytest.mark.parametrize(("heads", "size"), [(6, 4), (5, 2), (5, 4)])
def test_a_ranks_costs_in_a_ring_are_those_counted_of_it(heads: int, size: int) -> None:
    """6 heads are counted over 2 ranks, 5 over none that divide them."""
    allow(MODULE)
    backbone = load_backbone(MODULE, {"width": 64 * heads, "heads": heads})
    profile = analyse_context(analyse(backbone, [2], CPU), backbone, CPU)
    costs = profile.context
    assert costs is not None and costs.is_ring(size) and not costs.refusal(size)
    traffic = traffic_of(backbone, size)
    for layer, sent in zip(costs.layers, traffic, strict=True):
        for backward in (False, True):
            by_costs = sum(layer.sent_bytes(size, ring=True, backward=backward))
            assert by_costs == pytest.approx(size * sent.sent_per_rank(size, backward=backward))
    counted = analyse(divide_context(backbone, 0, size), [2], CPU, context=size).times_at(2)
    predicted = of_context_rank(profile, FREE, size).times_at(2)
    total_s = sum(row.whole_s for row in counted)
    for one, other in zip(counted, predicted, strict=True):
        assert other.whole_s == pytest.approx(one.whole_s, abs=0.01 * total_s)


def test_exchanged_bytes_and_heads_are_those_of_the_graph(
    tokens: tuple[Backbone, Profile],
) -> None:
    backbone, profile = tokens
    assert profile.context is not None
    assert profile.context.heads == (8,)
    for layer, sent in zip(profile.context.layers, traffic_of(backbone, 4), strict=True):
        assert sum(layer.sent_bytes(4)) == pytest.approx(4 * sent.sent_per_rank(4))
        assert layer.num_attentions == sent.num_attentions
        assert layer.num_gathers == len(sent.gathers)
    assert sum(layer.num_attentions for layer in profile.context.layers) == 6
    whole = [layer.boundary_bytes for layer in profile.layers]
    assert all(c.boundary_bytes <= n for c, n in zip(profile.context.layers, whole, strict=True))


def test_measured_profile_has_the_same_bytes(tokens: tuple[Backbone, Profile]) -> None:
    """And shares of time from layers that one of two ranks runs."""
    backbone, counted = tokens
    patience = RepetitionLimits(min_repetitions=1, enough_s=0.0, limit_s=0.1)

    def measured(layers: Backbone, context: int = 1) -> Profile:
        return measure(layers, [4], patience=patience, once_per_kind=True, context=context)

    found = with_context_costs(measured(backbone), backbone, measured).context
    expected = counted.context
    assert found is not None and expected is not None
    assert (found.heads, found.conditioning) == (expected.heads, expected.conditioning)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one.boundary_bytes, one.all_to_all_bytes) == (
            other.boundary_bytes,
            other.all_to_all_bytes,
        )
        assert one.saved.of(4) == pytest.approx(other.saved.of(4), rel=0.01)


def test_shares_of_ranks_by_hand() -> None:
    assert RankShare.fit(100.0, {2: 60.0}) == RankShare(0.2, 0.8)
    assert RankShare.fit(100.0, {2: 70.0, 4: 40.0}) == RankShare(0.1, 1.2)  # 10 + 120 / K
    assert RankShare.fit(100.0, {2: 40.0, 4: 15.0}) == RankShare(0.0, 0.8)  # less than halved
    assert RankShare.fit(100.0, {2: 50.0, 4: 60.0}) == RankShare(0.5, 0.0)
    assert RankShare.fit(0.0, {2: 0.0}).of(2) == 0.5


def test_backbones_without_tokens_are_refused() -> None:
    unet = load_backbone("unet-tiny", {"sample_size": 8})
    with pytest.raises(Faults):
        analyse_context(analyse(unet, [1], CPU), unet, CPU)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    given = ["--module", MODULE, "--option", "width=512", "--option", "heads=8"]
    figures = ["--peak-tflops", "1", "--bandwidth-gbs", "100", "--memory-gb", "8"]
    made = ["profile", *given, *figures, "--dtype", "float32", "-o", str(file)]
    assert main(made) == 0
    where = tmp_path / "ours.yaml"
    where.write_text(
        "name: ours\nnodes: 1\ndevices_per_node: 4\nmemory_gb: 8\n"
        "device: {tflops: 1, bandwidth_gbs: 100}\n"
        "links:\n  intra_node: {kind: pcie, bandwidth_gbs: 10, latency_us: 5, shared: device}\n"
    )
    tuned = ["tune", "--profile", str(file), "--cluster", str(where), "--global-batch-size", "4"]
    tuned += ["--seconds", "0.5", "-o", str(plan), "--context-parallel", "2,4", "--no-fsdp"]
    assert main(tuned) != 0
    assert "--context-parallel' and the same options" in capsys.readouterr().err
    assert main([*made, "--context-parallel"]) == 0
    assert "exchange" in capsys.readouterr().out
    assert load_profile(file).context is not None
    assert main(tuned) == 0
    assert " K=" in capsys.readouterr().out
    assert main(["check", str(plan)]) == 0
    assert "ranks share tokens; each sends" in capsys.readouterr().out
    record = unsealed_record(plan)
    record["profile"]["context"]["heads"] = [16]
    plan.write_text(json.dumps(record))
    assert main(["check", str(plan)]) != 0
    assert "profile.context.heads is [16]; attentions of" in "".join(capsys.readouterr())
    auto = [part if part != "2,4" else "auto" for part in tuned]
    assert main(auto) == 0
    assert load_checked(plan).context in (1, 2, 4)


@pytest.mark.parametrize("name", ["uvit-tiny", "flux-tiny", "hunyuan-tiny"])
def test_a_family_exchanges_its_queries_keys_values_and_results(name: str) -> None:
    """In half precision: four tensors of the boundary's size an attention."""
    backbone, half = load_backbone(name, {}), replace(CPU, dtype="bfloat16")
    profile = analyse_context(analyse(backbone, [2], half), backbone, half)
    assert profile.context is not None
    for layer, costs in zip(backbone.layers, profile.context.layers, strict=True):
        attending = sum(layer.inputs[i].shape[0] for each in layer.attends for i in each)
        width = layer.inputs[0].shape[-1]
        assert costs.all_to_all_bytes == 4 * attending * width * 2, layer.name
    shared = of_context_rank(profile, FREE, 2)
    skipped = [(a.num_bytes, b.num_bytes) for a, b in zip(profile.skips, shared.skips, strict=True)]
    assert all(whole == 2 * own for whole, own in skipped) and bool(skipped) != (
        name == "flux-tiny"
    )
