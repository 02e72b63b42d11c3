"""Costs of layers in slices of tokens: analytic, measured, in files, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.files import from_record, load_profile, save_profile, to_record
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from megatron_pulse.profile.measurement.measure import measure
from megatron_pulse.profile.profile import Profile, ProfileError
from megatron_pulse.profile.roofline import Roofline, custom_device
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from model_specs import load_backbone

BACKBONE = load_backbone("dit-tiny", {"num_layers": 2, "sample_size": 32})


@pytest.fixture(scope="module")
def found() -> Profile:
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    defer_wgrad()
    roofline = Roofline(custom_device(100.0, 1000.0, 16.0), "float32")
    return analyse(BACKBONE, [1, 2], roofline, running=RUNNING, token_slices=[2, 4])


def test_slices_keep_less_and_backward_takes_longer(found: Profile) -> None:
    whole, two, four = (found.in_slices(count).times_at(2) for count in (1, 2, 4))
    for i, layer in enumerate(found.layers):
        if not layer.name.endswith(".ff"):
            assert whole[i] == two[i] == four[i]
            continue
        assert whole[i].saved_bytes > 2 * two[i].saved_bytes == 2 * four[i].saved_bytes
        assert whole[i].peak_bytes > two[i].peak_bytes > four[i].peak_bytes
        assert two[i].wgrad_bytes < whole[i].wgrad_bytes
        assert whole[i].input_grad_s < two[i].input_grad_s
    recomputed = ActivationPolicies.all("recompute", len(found.layers))
    one, other = (found.in_slices(count).at(2, recomputed) for count in (1, 4))
    assert sum(one.recompute_bytes) > 1.5 * sum(other.recompute_bytes)
    assert one.saved_bytes == other.saved_bytes
    for i, layer in enumerate(found.layers):
        is_sliced = layer.name.endswith(".ff")
        assert (other.recompute_s[i] < 0.2 * other.forward_s[i]) == is_sliced
        assert one.recompute_s[i] == one.forward_s[i]


def test_a_plan_s_costs_keep_those_of_whole_layers_beside(found: Profile) -> None:
    own = found.in_slices(4).only(2)
    assert own.token_slices == 4 and set(own.sliced) == {1}
    assert own.in_slices(1).times == {2: found.times[2]}
    assert not found.only(2).sliced


def test_files_hold_them(found: Profile, tmp_path: Path) -> None:
    for profile in (found, found.in_slices(4)):
        save_profile(profile, tmp_path / "p.json")
        assert load_profile(tmp_path / "p.json") == profile
    plain = to_record(replace(found, sliced={}))
    assert not plain.keys() & {"sliced", "token_slices"}
    assert from_record(json.loads(json.dumps(plain)), "p").token_slices == 1


def test_what_is_not_known_or_not_sound_is_refused(found: Profile) -> None:
    with pytest.raises(ProfileError, match=r"no costs in 3 token slices: .* --token-slices 3"):
        found.in_slices(3)
    with pytest.raises(ProfileError, match=r"sliced: 1 slices"):
        replace(found, sliced={1: found.times})
    with pytest.raises(ProfileError, match=r"sliced.2 is at other microbatch sizes"):
        replace(found, sliced={2: {1: found.times[1]}})


def test_measured_layers_have_them_too() -> None:
    patience = RepetitionLimits(limit_s=0.01)
    profile = measure(
        BACKBONE, [1], dtype="float32", patience=patience, once_per_kind=True, running=RUNNING,
        token_slices=[4],
    )  # fmt: skip
    whole, parts = (profile.in_slices(count).times_at(1) for count in (1, 4))
    pairs = zip(profile.layers, whole, parts, strict=True)
    smaller = {layer.name for layer, one, other in pairs if other.peak_bytes < one.peak_bytes}
    assert smaller == {la.name for la in profile.layers if la.name.endswith(".ff")}
