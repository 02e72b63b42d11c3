"""``hf:ID[@revision]``: folders of a cache laid out as huggingface_hub's, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from megatron_pulse.cli.main import main
from megatron_pulse.diffusion.hub import with_local_folders
from model_specs.derived.user_code import find

SHA = "0123456789abcdef0123456789abcdef01234567"


def cached(home: Path, name: str) -> Path:
    """An empty snapshot of ``name``, of the branch main and the tag v1."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for ref in ("main", "v1"):
        (repository / "refs" / ref).write_text(SHA)
    snapshot = repository / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_words_become_folders_of_the_cache(
    ranks: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    folder = cached(home, "me/pipe")
    words = [
        "run", "--pulse-encoders", "hf:me/pipe", "--vae=hf:me/pipe@v1", "--encoders",
        f"hf:me/pipe@{SHA}", "--pulse-module=diffusers:hf:me/pipe", "diffusers:hf:me/pipe@v1",
        "--pulse-encoders", "base=hf:me/pipe,upper=there", "data", "encoders", "hf:me/pipe",
        "--prompt", "hf:me/pipe", "--prompt=a, hf:none",
    ]  # fmt: skip
    expected = [
        "run", "--pulse-encoders", str(folder), f"--vae={folder}", "--encoders", str(folder),
        f"--pulse-module=diffusers:{folder}", f"diffusers:{folder}", "--pulse-encoders",
        f"base={folder},upper=there", "data", "encoders", str(folder), *words[-3:],
    ]  # fmt: skip
    assert with_local_folders(words) == (expected, [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_there_is_refused_in_a_line_each(
    ranks: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    cached(home, "me/pipe")
    words = ["--vae", "hf:me/other", "--encoders", "hf:me/pipe@v2", "--from", "hf:a/b/c"]
    same, faults = with_local_folders(words)
    assert same == words
    why = ["the hub is unreachable", "ranks do not download; 'pulse run' downloads"][ranks - 1]
    first, second, third = faults
    assert first.startswith(f"--vae hf:me/other: it is not in the cache, and {why}")
    assert first.endswith("run 'hf download me/other --local-dir DIR', and give DIR.")
    assert second.startswith("--encoders hf:me/pipe@v2: ")
    assert "me/pipe --revision v2 --local" in second
    assert third.startswith("--from hf:a/b/c: write hf:OWNER/NAME[@REVISION]: ")
    assert not any("\n" in fault for fault in faults)


def test_weights_are_imported_from_the_cache(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import diffusers

    module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"), norm_num_groups=4, layers_per_block=1,
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    module.save_pretrained(cached(home, "me/digits") / "unet")
    to = ["--to", str(tmp_path / "start"), "--objective", "v", "--noise-schedule", "linear"]
    assert main(["import", "--from", "hf:me/digits@v1", *to]) == 0
    capsys.readouterr()
    assert main(["import", "--from", "hf:me/none", *to]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pulse import: error: --from hf:me/none: it is not in the cache")
    assert said.count("\n") == 1


def test_the_environment_says_where_the_cache_is(tmp_path: Path) -> None:
    folder = cached(tmp_path, "me/pipe")
    code = "import json, sys\nfrom megatron_pulse.diffusion.hub import with_local_folders\n"
    code += "print(json.dumps(with_local_folders(sys.argv[1:])))"
    away = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    away.pop("HF_HUB_CACHE", None)
    words = ["--vae", "hf:me/pipe", "--from", "hf:me/none"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=away, capture_output=True, text=True, check=True
    )
    found, faults = json.loads(done.stdout)
    assert found == ["--vae", str(folder), *words[2:]] and len(faults) == 1


def test_a_module_is_no_id_of_the_hub() -> None:
    with pytest.raises(ValueError, match="hf:a/b is a folder on a hub.*Write diffusers:hf:a/b"):
        find("hf:a/b")
