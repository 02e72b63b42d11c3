"""Profiles of published layer tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_pulse.profile.profile import ProfileError, Source
from megatron_pulse.profile.profile_from_table import read_table
from megatron_pulse.profile.roofline import Roofline, custom_device


def unit(name: str, params: int, shapes: list[list[int]]) -> dict[str, Any]:
    return {
        "name": name,
        "params": params,
        "flops_fwd": 4000,
        "flops_bwd": 8000,
        "saved_act_bytes": 100,
        "out_shapes": shapes,
        "out_numel": sum(a * b for a, b in shapes),
    }


def table() -> dict[str, Any]:
    """Inside, two streams cross the cut between ``b`` and ``c``."""
    return {
        "name": "small",
        "units": [
            unit("a", 10, [[1, 6]]),
            unit("b", 20, [[1, 6], [1, 4]]),
            unit("c", 0, [[1, 6]]),
            unit("d", 5, [[1, 2]]),
        ],
        "skips": [{"id": 0, "src": 0, "dst": 3, "numel": 6}],
    }


def write(folder: Path, content: Any) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return path


SLOW = custom_device(peak_tflops=1e-9, bandwidth_gbs=1e-6, memory_gb=1)  # 1 kFLOP/s, 1 kB/s


def test_times_and_bytes(tmp_path: Path) -> None:
    roofline = Roofline(SLOW, "bfloat16", 0.5, 1.0, 0.25)
    profile = read_table(write(tmp_path, table()), roofline, (1, 2))
    assert profile.source is Source.TABLE and profile.backbone == {"table": "small"}
    assert [layer.boundary_bytes for layer in profile.layers] == [0, 12, 20, 12]
    assert profile.at(2).boundary_bytes == (0, 24, 40, 24)
    assert profile.at(2).skips[0].num_bytes == 24
    assert profile.at(2).saved_bytes == (200,) * 4
    assert profile.at(1).forward_s == pytest.approx([4000 / 500 + 0.25] * 4)
    assert profile.at(2).backward_s == pytest.approx([16000 / 500 + 0.25] * 4)
    split = [layer.input_grad_s / layer.weight_grad_s for layer in profile.times[1][:2]]
    assert split == pytest.approx([0, 1])
    assert profile.times[1][2].weight_grad_s == 0


def test_bytes_limit_where_they_are_slower(tmp_path: Path) -> None:
    fast = custom_device(peak_tflops=1, bandwidth_gbs=1e-6, memory_gb=1)
    profile = read_table(write(tmp_path, table()), Roofline(fast, "float32", 1.0, 0.5, 0.0))
    moved = 4 * 20 + 4 * (6 + 10) + 200  # parameters, input and output, what is saved, in fp32
    assert profile.at(1).forward_s[1] == pytest.approx(moved / 500)
    assert profile.at(1).backward_s[1] == pytest.approx(2 * moved / 500)
    assert profile.at(1).saved_bytes[1] == 200


def test_a_table_without_activations_says_so(tmp_path: Path) -> None:
    content = table()
    for row in content["units"]:
        row["saved_act_bytes"] = 0
    profile = read_table(write(tmp_path, content), Roofline(SLOW, "bfloat16"))
    assert profile.method.endswith("the table has no saved activations")


def test_every_fault_is_listed(tmp_path: Path) -> None:
    content = table()
    content["units"][0]["params"] = "ten"
    content["units"][1]["out_numel"] = 7
    content["units"][2].pop("name")
    content["units"][3] = []
    content["skips"] += [{"src": -1, "dst": 2, "numel": 1.5}]
    with pytest.raises(ProfileError) as caught:
        read_table(write(tmp_path, content), Roofline(SLOW, "bfloat16"))
    text = str(caught.value)
    assert "6 faults" in text
    for fault in (
        "units.0.params is 'ten'; allowed is a whole number from 0 to 1,000,000",
        "units.1: out_shapes hold 10 elements, but out_numel is 7",
        "units.2.name is missing; allowed is text",
        "units.3 is []; allowed is an object: name, params",
        "skips.1.src is -1; allowed is a whole number",
        "skips.1.numel is 1.5; allowed is a whole number",
    ):
        assert fault in text


@pytest.mark.parametrize("content", [{}, {"units": [], "skips": []}, {"units": 3}])
def test_what_is_no_table_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ProfileError, match="not a sound table"):
        read_table(write(tmp_path, content), Roofline(SLOW, "bfloat16"))
    with pytest.raises(ProfileError, match="cannot be read"):
        read_table(tmp_path / "missing.json", Roofline(SLOW, "bfloat16"))


def test_skips_must_fit_the_units(tmp_path: Path) -> None:
    content = table()
    content["skips"][0]["dst"] = 9
    with pytest.raises(ProfileError, match="from layer 0 to layer 9"):
        read_table(write(tmp_path, content), Roofline(SLOW, "bfloat16"))
