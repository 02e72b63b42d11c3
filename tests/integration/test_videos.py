"""Runs on clips: several shapes, exact resume, the same numbers in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from megatron_pulse.cli.main import main
from tests.data.films import write_film
from tests.integration.runs import BASE, STEPS, alone, assert_equal_to_rounding, pipeline, run
from tests.integration.test_bad_input import refuse

pytest.importorskip("av")
SIZES = {
    "in_channels": 1, "out_channels": 1, "num_attention_heads": 2, "attention_head_dim": 12,
    "text_dim": 8, "freq_dim": 16, "ffn_dim": 24, "num_layers": 2, "rope_max_seq_len": 16,
    "text_length": 6, "buckets": "5x8x8,1x8x8",
}  # fmt: skip
WAN = ["--pulse-backbone", "diffusers:WanTransformer3DModel", "--pulse-objective", "flow"]
WAN += [word for name, value in SIZES.items() for word in ("--pulse-option", f"{name}={value}")]


TOO_LONG = [w for n in ("frames=15", "height=8", "width=8") for w in ("--pulse-option", n)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("clips")
    for i in range(24):
        write_film(root / f"{i}.mkv", 12 + i % 3, size=(16, 16))
        (root / f"{i}.txt").write_text("a line that falls")
    for i in range(16):
        Image.new("L", (16, 16), 10 * i).save(root / f"still{i}.png")
        (root / f"still{i}.txt").write_text("a grey square")
    return ["--pulse-data", f"videos:{root}"]


def test_clips_and_pictures_train_as_one_process_and_go_on(data: list[str], tmp_path: Path) -> None:
    """A replicated embedder's gradients are added in another order."""
    save = ["--save", str(tmp_path / "kept"), "--save-interval", "1"]
    given = [*WAN, *STEPS, *data, "--pulse-ema-decay", "0.9", "--pulse-fps", "12.5"]
    expected = alone(*given, backbone="none")
    first = run(2, *given, *pipeline(2), *save, "--exit-interval", "1", backbone="none")
    again = run(2, *given, *pipeline(2), *save, backbone="none")
    joined = replace(
        again, losses=first.losses + again.losses, grad_norms=first.grad_norms + again.grad_norms
    )
    assert_equal_to_rounding(joined, expected)
    draw = ["sample", "--load", str(tmp_path / "kept"), "--steps", "2", "--per-class", "1"]
    prompt = ["--prompt", "a line that falls"]
    assert main([*draw, *prompt, "-o", str(tmp_path / "clip.png")]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--pulse-resolution", "8"], "are for pictures. Give clips the shapes of the model"),
        (TOO_LONG, "too few"),
    ],
)
def test_what_cannot_be(
    flags: list[str], said: str, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "buckets"}
    good = [*WAN[:4], *(w for n, v in sizes.items() for w in ("--pulse-option", f"{n}={v}"))]
    faults = refuse(monkeypatch, 1, [*data, *flags], [*good, *BASE, *STEPS])
    assert any(said in fault for fault in faults), faults


def test_motion_is_for_what_reads_it(data: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*data, "--pulse-motion-bucket", "9"]
    (fault,) = refuse(monkeypatch, 1, flags, [*WAN, *BASE, *STEPS])
    assert "the backbone reads no motion" in fault
