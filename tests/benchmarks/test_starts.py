"""A sample of ``starts``."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.starts import MODELS, start, write_sparse


def test_a_rank_starts_with_its_own_weights(tmp_path: Path) -> None:
    class_name, config, sizes = MODELS["tiny"]
    total = write_sparse(tmp_path, class_name, config)
    found = start(f"diffusers:{tmp_path}", {**sizes, "dtype": "bfloat16"}, 2, 1)
    whole, own = found["parameters"]
    assert total == 2 * whole and found["rank"] == 1
    assert 2 * own == found["weights_gb"] * 1e9 < 0.9 * total
