"""Compilation lock between processes, with a time limit; merge sort in compiled code."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_pulse.planner.schedule import jit
from megatron_pulse.planner.schedule.jit import RUN, compiling, stable_argsort


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    with compiling():
        began = time.monotonic()
        with compiling(longest_s=0.3):  # as another process would
            assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    with compiling(longest_s=250):
        assert time.monotonic() - began < 200


def test_without_a_folder_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    with compiling():
        assert not list(tmp_path.iterdir())


@jit.compiled
def _order(keys: Any) -> Any:
    return stable_argsort(keys, len(keys))


def test_equal_keys_stay_in_their_order() -> None:
    """Lengths around the sorted runs and their doubles."""
    random = np.random.default_rng(0)
    for count in (0, 1, 2, RUN - 1, RUN, RUN + 1, 2 * RUN + 1, 5 * RUN + 3, 1000):
        for keys in (random.integers(0, 1 + count // 3, count), random.random(count)):
            assert _order(keys).tolist() == np.argsort(keys, kind="stable").tolist()


KEPT = """
from typing import NamedTuple
from megatron_pulse.planner.schedule.jit import compiled

class {name}(NamedTuple):
    value: int

@compiled
def double(given):
    return {by} * given.value

made = double({name}(21))
"""


def test_what_is_kept_counts_for_the_sources_that_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class has another name: numba cannot read what it kept, though the file is another."""

    def made(name: str, by: int, sources: str) -> Any:
        monkeypatch.setattr(jit, "_sources", lambda: sources)
        file, text = tmp_path / "kept.py", KEPT.format(name=name, by=by)
        if not file.exists() or file.read_text() != text:  # numba looks at when it was written
            file.write_text(text)
        spec = importlib.util.spec_from_file_location("kept", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "kept", module)
        spec.loader.exec_module(module)
        return module

    assert made("Pair", 2, "first").made == 42
    again = made("Pair", 2, "first")
    assert again.made == 42 and again.double.stats.cache_hits
    later = made("Couple", 3, "second")
    assert later.made == 63 and not later.double.stats.cache_hits


ALL_READY = """
import gc, random
from numba.core.dispatcher import Dispatcher
from megatron_pulse.planner.schedule.search import synthesize
from megatron_pulse.planner.program import simulate
from megatron_pulse.planner.tune.config import Choices
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.tune import tune
from tests.planner.tune.problems import cluster, profile

def known():
    made = (one for one in gc.get_objects() if isinstance(one, Dispatcher))
    return {one.py_func.__qualname__: len(one.signatures) for one in made if one.signatures}

synthesize.compile_search()
simulate.compile_simulator()
before = known()
evaluator = Evaluator(profile(random.Random(0), 14, 6), cluster(2, 4, inter_gbs=2.0), 64)
tune(evaluator, Choices(), 6.0, 2.0, "none")
assert known() == before, {name: n for name, n in known().items() if n != before.get(name)}
assert before
"""


def test_nothing_is_compiled_while_a_search_counts_its_seconds() -> None:
    """Compilation must not count as work of the first simulation."""
    subprocess.run([sys.executable, "-c", ALL_READY], check=True, timeout=240)
