"""Profiles as values: costs at any microbatch size, checks, and their file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.costs import SkipCost
from megatron_pulse.planner.layout.placement import Partition, sequential
from megatron_pulse.planner.schedule.problem import stage_problem
from megatron_pulse.profile.files import from_record, load_profile, save_profile, to_record
from megatron_pulse.profile.layer_records import (
    LayerTimes,
    ProfiledConditioning,
    ProfiledLayer,
    ProfiledShape,
    ProfiledSkip,
    ShardSums,
)
from megatron_pulse.profile.mean_over_shapes import over_shapes
from megatron_pulse.profile.profile import Profile, ProfileError, Source
from megatron_pulse.profile.weight_offload import offload_weights
from tests.reference import unsealed_record


def times(scale: float) -> LayerTimes:
    return LayerTimes(
        forward_s=scale,
        input_grad_s=2 * scale,
        weight_grad_s=3 * scale,
        forward_spread_s=0.5,
        input_grad_spread_s=0.25,
        weight_grad_spread_s=0.125,
        saved_bytes=round(100 * scale),
        peak_bytes=round(200 * scale),
    )


def make(**changes: Any) -> Profile:
    """Three layers, times of layer i at size n being (i + 1) * (n + 1)."""
    profile = Profile(
        backbone={"name": "toy", "options": {"widths": [1, 2]}},
        source=Source.MEASURED,
        device="abacus",
        memory_bytes=1000,
        dtype="bfloat16",
        recompute=False,
        method="by hand",
        layers=tuple(ProfiledLayer(f"layer.{i}", 10 * i, 8 + i) for i in range(3)),
        times={n: tuple(times((i + 1) * (n + 1)) for i in range(3)) for n in (2, 4, 8)},
        skips=(ProfiledSkip("s", 0, 2, 9),),
        conditioning=(ProfiledConditioning("temb", 0, (1, 2), 5, embedder=True),),
        versions={"torch": "2.13"},
    )
    return dataclasses.replace(profile, **changes)


def test_costs_at_a_profiled_size() -> None:
    costs = make().at(4)
    assert costs.names == ("layer.0", "layer.1", "layer.2")
    assert costs.forward_s == (5.0, 10.0, 15.0)
    assert costs.backward_s == (25.0, 50.0, 75.0)
    assert costs.parameters == (0, 10, 20)
    assert costs.saved_bytes == (500, 1000, 1500)
    assert costs.boundary_bytes == (32, 36, 40)
    assert costs.skips == (SkipCost(0, 2, 36),)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 100])
def test_what_is_linear_is_linear_everywhere(size: int) -> None:
    costs = make().at(size)
    assert costs.forward_s == pytest.approx([(i + 1) * (size + 1) for i in range(3)])
    assert costs.saved_bytes == pytest.approx([100 * (i + 1) * (size + 1) for i in range(3)])


def test_between_sizes_only_the_neighbours_count_and_beyond_them_no_layer_is_free() -> None:
    bent = {2: (times(1.0),) * 3, 4: (times(3.0),) * 3, 8: (times(4.0),) * 3}
    profile = make(times=bent)
    assert profile.times_at(3)[0].forward_s == pytest.approx(2.0)
    assert profile.times_at(6)[0].forward_s == pytest.approx(3.5)
    assert profile.times_at(12)[0].forward_s == pytest.approx(5.0)
    assert profile.times_at(1)[0].forward_s == pytest.approx(0.5)
    disturbed = make(times={2: (times(3.0),) * 3, 4: (times(1.0),) * 3})
    assert disturbed.only(9).times[9][0].forward_s == pytest.approx(1.0)


def test_one_size_is_scaled_in_proportion() -> None:
    profile = make(times={2: tuple(times(i + 1.0) for i in range(3))})
    assert profile.at(1).forward_s == pytest.approx([0.5, 1.0, 1.5])
    assert profile.at(6).saved_bytes == (300, 600, 900)
    assert [profile.extrapolates(n) for n in (1, 2, 3)] == [True, False, True]


def test_says_what_lies_outside() -> None:
    assert [make().extrapolates(n) for n in (1, 2, 3, 8, 9)] == [True, False, False, False, True]
    with pytest.raises(ValueError, match="microbatch size is 0"):
        make().at(0)


ALL_RECOMPUTED = ActivationPolicies(range(3))


def test_recomputation_adds_a_forward_and_keeps_what_a_layer_is_called_with() -> None:
    for costs in (make(recompute=True).at(2), make().at(2, ALL_RECOMPUTED)):
        assert costs.backward_s == (3 * 6.0, 6 * 6.0, 9 * 6.0)
        assert costs.saved_bytes == (16, 2 * (9 + 5), 2 * (10 + 5))
    assert make(recompute=True).at(2, ActivationPolicies()) == make().at(2)


def test_round_trip(tmp_path: Path) -> None:
    save_profile(make(), tmp_path / "new" / "profile.json")
    assert load_profile(tmp_path / "new" / "profile.json") == make()


def test_profiles_of_before_sums_had_bytes_are_read_as_sums_of_boundaries(tmp_path: Path) -> None:
    sums = ShardSums((10, 10), (10, 10))
    layers = (*make().layers[:2], dataclasses.replace(make().layers[2], shard_sums=sums))
    save_profile(make(layers=layers), tmp_path / "p.json")
    record = unsealed_record(tmp_path / "p.json")
    for layer in record["layers"]:
        layer["shard_sums"] = len(layer["shard_sums"]["rows"])
    (tmp_path / "p.json").write_text(json.dumps(record))
    assert load_profile(tmp_path / "p.json") == make(layers=layers)


def test_profile_reads_former_keys() -> None:
    skip = dataclasses.replace(make().skips[0], needs_grad=False)
    layers = (make().layers[0], dataclasses.replace(make().layers[1], needs_grad=False))
    new = make(layers=(*layers, make().layers[2]), skips=(skip, *make().skips[1:]))
    waits = tuple(
        dataclasses.replace(one, recompute_bytes=1, wgrad_bytes=1) for one in new.times[2]
    )
    new = dataclasses.replace(new, times={2: waits})
    record = json.loads(json.dumps(to_record(new)))
    for one in (*record["layers"], *record["skips"], *record["conditioning"]):
        one["wants"] = one.pop("needs_grad")
    for one in record["times"]["2"]:
        one["recompute_bytes"] = one.pop("recompute_bytes")
        one["wgrad_bytes"] = one.pop("wgrad_bytes")
    assert from_record(record, "here") == new
    record["skips"][0]["needs_grad"] = True
    with pytest.raises(ProfileError, match=r"skips\.0\.wants is unknown"):
        from_record(record, "here")


def test_split_backwards_take_what_was_measured_of_them(tmp_path: Path) -> None:
    """In a step's problem, and where none was measured (as in profiles of before) as whole ones."""
    old, three = make(), sequential(3)
    split = {"split_forward_s": 1.5, "split_input_grad_s": 2.5, "split_weight_grad_s": 4.0}
    new = dataclasses.replace(
        old,
        times={2: tuple(dataclasses.replace(layer, **split) for layer in old.times[2])},
    )
    for profile, forward, inputs, weights in (
        (old, (3, 6, 9), (6, 12, 18), (9, 18, 27)),
        (new, (1.5,) * 3, (2.5,) * 3, (4,) * 3),
    ):
        costs = profile.at(2)
        whole = stage_problem(costs, Partition(three, (0, 1, 2, 3)), 1)
        assert (whole.forward, whole.backward) == ((3, 6, 9), (15, 30, 45))
        apart = stage_problem(costs, Partition(three, (0, 1, 2, 3)), 1, split=True)
        assert (apart.forward, apart.backward, apart.weight_grad) == (forward, inputs, weights)
    assert new.at(2, ALL_RECOMPUTED).split_backward_s == (2.5 + 4 + 1.5,) * 3
    record = to_record(new)
    assert from_record(json.loads(json.dumps(record)), "here") == new
    for layer in record["times"][2]:
        for name in split:
            del layer[name]
    assert from_record(json.loads(json.dumps(record)), "here").times[2] == old.times[2]
    some = (*new.times[2][:2], old.times[2][2])
    with pytest.raises(ProfileError, match="split_forward_s is 0 for some layers and not for"):
        dataclasses.replace(new, times={2: some})


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(make(), path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_profile(make(backbone={"name": object()}), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_every_fault_of_a_value_is_listed() -> None:
    bad = dataclasses.replace(times(1.0), forward_s=float("nan"), saved_bytes=-1)
    with pytest.raises(ProfileError) as caught:
        make(
            dtype="float8",
            layers=(
                ProfiledLayer("a", 1, 1, shard_sums=ShardSums((4, -1))),
                ProfiledLayer("a", -1, 1),
            ),
            times={2: (times(1.0),), 0: (times(1.0), bad)},
            skips=(ProfiledSkip("s", 1, 1, 9),),
        )
    faults = (
        "dtype is 'float8'",
        "layers[0].shard_sums: bytes must be from 0",
        "layers 0 and 1 are both named 'a'",
        "layers[1].parameters is -1",
        "times[2] has 1 layers, expected 2",
        "the microbatch size 0 must be",
        "times[0][1].forward_s is nan",
        "times[0][1].saved_bytes is -1",
        "skips[0]: from layer 1 to layer 1",
        "conditioning[0]: from layer 0 to layer 2",
    )
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(faults)
    for line, fault in zip(lines, faults, strict=True):
        assert fault in line


def test_every_fault_of_a_file_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(make(), path)
    record = unsealed_record(path)
    record["layers"][1]["parameters"] = "many"
    record["layers"][2] = 7
    record["source"] = "guessed"
    record["recompute"] = 1
    record["times"]["two"] = []
    del record["times"]["4"][0]["forward_s"]
    record["conditioning"][0]["consumers"] = [1, True]
    record["skips"] = {}
    record["colour"] = "red"
    path.write_text(json.dumps(record))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} is not a sound profile (9 faults):"
    assert sorted(lines[1:]) == sorted(
        f"  - {fault}"
        for fault in (
            f"colour is unknown; did you mean source? allowed are {', '.join(vars(make()))}",
            "layers.1.parameters is 'many'; allowed is a whole number",
            f"layers.2 is 7; allowed is an object: {', '.join(vars(make().layers[0]))}",
            "source is 'guessed'; allowed is one of measured, analytic, table",
            "recompute is 1; allowed is true or false",
            "times.two is a key; allowed is a whole number",
            "times.4.0.forward_s is missing; allowed is a number",
            "conditioning.0.consumers.1 is True; allowed is a whole number",
            f"skips is {{}}; allowed is a list, each an object: {', '.join(vars(make().skips[0]))}",
        )
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "expected an object, got a list"),
        ('{"format": "plan"}', "is not a profile"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        load_profile(path)


def test_values_that_contradict_each_other_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(make(), path)
    path.write_text(json.dumps(unsealed_record(path)).replace('"layer.1"', '"layer.0"'))
    with pytest.raises(ProfileError, match=r"profile\.json: the profile is not sound: "):
        load_profile(path)


def test_reading_a_profile_imports_no_torch() -> None:
    """Planning reads profiles on a laptop."""
    code = (
        "import sys, megatron_pulse.profile.files, megatron_pulse.profile.profile_from_table; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def several() -> Profile:
    """Two shapes, of which the second takes three times as long, beside their mean."""

    def scaled(factor: int) -> dict[int, tuple[LayerTimes, ...]]:
        return {n: tuple(times(factor * (i + 1) * (n + 1)) for i in range(3)) for n in (2, 4)}

    profile = make(times=scaled(2))
    shapes = tuple(
        ProfiledShape(name, 0.5, profile.layers, scaled(n), profile.skips, profile.conditioning)
        for name, n in (("4x8x8", 1), ("4x8x24", 3))
    )
    return dataclasses.replace(profile, shapes=shapes)


def test_profile_keeps_every_shape_in_its_file(tmp_path: Path) -> None:
    profile = several()
    save_profile(profile, tmp_path / "profile.json")
    known = load_profile(tmp_path / "profile.json")
    assert known == profile
    assert [known.at_shape(k).at(4).forward_s[0] for k in (0, 1)] == [5.0, 15.0]
    assert known.at_shape(1).shapes == known.only(4).shapes == ()
    save_profile(make(), tmp_path / "one.json")
    assert '"shapes"' not in (tmp_path / "one.json").read_text()


def test_profile_refuses_shapes_of_other_layers_sizes_and_costs() -> None:
    profile = several()
    first, second = profile.shapes
    for shape, said in (
        (dataclasses.replace(second, layers=second.layers[:2]), "layers are others than those"),
        (dataclasses.replace(second, times={2: second.times[2]}), "times are at other microbatch"),
        (dataclasses.replace(second, share=0.0), "share is 0.0; it must be above 0"),
        (dataclasses.replace(second, skips=(ProfiledSkip("s", 2, 1, 9),)), "edges go forward"),
    ):
        with pytest.raises(ProfileError, match=rf"shapes\[1\].*{said}"):
            dataclasses.replace(profile, shapes=(first, shape))


def test_profiles_of_shapes_are_merged_and_kept() -> None:
    """Times are weighted by shares; bytes are those of the largest shape."""
    spec = TensorSpec((4, 8), others=((4, 24),))
    layers = [Layer(f"layer.{i}", lambda context: None, (spec,), (spec,)) for i in range(3)]
    chain = Backbone("toy", tuple(layers), shares=(3.0, 1.0))
    boundaries = {(4, 8): 8, (4, 24): 24}

    def profile_of(one: Backbone) -> Profile:
        size = boundaries[one.input_spec.shape]
        layers = tuple(ProfiledLayer(f"layer.{i}", 10, size) for i in range(3))
        return make(layers=layers, times={2: (times(size),) * 3})

    merged = over_shapes(chain, profile_of)
    assert [(s.name, s.share) for s in merged.shapes] == [("4x8", 0.75), ("4x24", 0.25)]
    assert merged.times[2][0].forward_s == 0.75 * 8 + 0.25 * 24
    assert merged.layers[0].boundary_bytes == 24
    assert [merged.at_shape(k).times[2][0].forward_s for k in (0, 1)] == [8, 24]
    offloaded = offload_weights(_frozen(merged), ["layer.1"])
    assert [la.offloaded for la in offloaded.layers] == [False, True, False]
    assert [la.offloaded for la in offloaded.at_shape(1).layers] == [False, True, False]


def _frozen(profile: Profile) -> Profile:
    layers = tuple(dataclasses.replace(layer, frozen_parameters=10) for layer in profile.layers)
    return dataclasses.replace(profile, layers=layers)
