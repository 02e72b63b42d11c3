"""The memory format of convolutions: what was measured decides, in a profile and for runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.integration.planning.memory_format import measured_format
from megatron_pulse.profile.channels_last import format_caution, in_format_of, in_given_format
from megatron_pulse.profile.files import load_profile
from megatron_pulse.profile.measurement.clock import RepetitionLimits
from megatron_pulse.profile.measurement.compare_formats import FormatTimes, compare_formats
from model_specs import load_backbone
from tests.runtime.tiny import FAMILIES, backbone

BRIEF = RepetitionLimits(min_repetitions=1, max_repetitions=1, enough_s=0.0)


def of_unet(**options: Any) -> Any:
    name, sizes = FAMILIES["unet"]
    return load_backbone(name, {**sizes, **options})


@pytest.mark.parametrize(
    ("contiguous", "channels_last", "taken"),
    [
        ((10.0, 11.0, 12.0), (9.0, 10.0, 11.0), True),
        ((9.0, 10.0, 11.0), (10.0, 11.0, 12.0), False),
        ((10.0, 11.0, 12.0), (9.0, 11.5, 11.0), False),  # not always
        ((10.0, 11.0, 12.0), (9.9, 10.9, 11.9), False),  # hardly
    ],
)
def test_channels_last_has_to_be_faster(
    contiguous: tuple[float, ...], channels_last: tuple[float, ...], taken: bool
) -> None:
    times = FormatTimes(contiguous, channels_last, 4)
    assert times.channels_last == taken
    assert str(times).startswith(f"convolutions {'channels_last' if taken else 'contiguous'}: ")


def test_only_layers_with_convolutions_are_measured() -> None:
    both = [of_unet(channels_last=value) for value in (False, True)]
    times = compare_formats(both[0], both[1], 2, "cpu", "float32", BRIEF)
    assert times is not None and min(*times.contiguous_s, *times.channels_last_s) > 0
    times = compare_formats(backbone("flux"), backbone("flux"), 1, "cpu", "float32", BRIEF)
    assert times is None


def test_options_that_say_which_are_not_measured() -> None:
    for given, chain in (
        ({"channels_last": "true"}, of_unet(channels_last=True)),
        ({}, backbone("dit")),
    ):
        found = measured_format(chain, given, 1, "cpu", "float32", None, "local")
        assert found == (chain, None)


def test_a_profile_is_of_the_format_that_it_found_faster(tmp_path: Path) -> None:
    name, sizes = FAMILIES["unet"]
    path = tmp_path / "p.json"
    argv = ["profile", "--backbone", name, "--device", "cpu", "--micro-batch-size", "1"]
    argv += ["--once-per-kind", "-o", str(path)]
    for key, value in {**sizes, "layers_per_block": 1}.items():
        argv += ["--option", f"{key}={value}"]
    assert main(argv) == 0
    profile = load_profile(path)
    chosen = profile.backbone["options"]["channels_last"]
    assert f"; convolutions {'channels_last' if chosen else 'contiguous'}: " in profile.method
    assert main([*argv, "--option", f"channels_last={not chosen}"]) == 0
    profile = load_profile(path)
    assert profile.backbone["options"]["channels_last"] is not chosen
    assert "convolutions" not in profile.method


def test_a_run_has_what_is_recorded_unless_it_says_otherwise() -> None:
    record = of_unet(channels_last=True).record
    assert in_format_of(record, "unet-tiny", {"depth": 3}) == {"channels_last": True, "depth": 3}
    said = {"channels_last": "false"}
    assert in_format_of(record, "unet-tiny", said) == said
    assert in_format_of(record, "sd-tiny", {}) == in_format_of(
        backbone("dit").record, "dit-tiny", {}
    )
    assert in_given_format(record, {}) == record
    assert in_given_format(record, said)["options"]["channels_last"] == "false"
    other = of_unet(channels_last=False).record
    assert format_caution(record, record, "p.json") == ""
    assert format_caution(backbone("dit").record, record, "p.json") == ""
    assert format_caution(record, other, "p.json").startswith(
        "p.json has channels_last convolutions, the run contiguous"
    )
