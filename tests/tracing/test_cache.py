"""Cache of derived chains: a hit gives the chain's bits; other content misses."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_pulse.tracing.cache import chain_cache
from megatron_pulse.tracing.cache.chain_cache import cached_chain
from megatron_pulse.tracing.cache.serialize import to_record
from megatron_pulse.tracing.executable import run
from megatron_pulse.tracing.input_leaves import leaves_of
from megatron_pulse.tracing.input_roles import read_inputs
from megatron_pulse.tracing.torch_export import export
from megatron_pulse.tracing.units import UnitChain, derive, work_of
from tests.tracing.zoo import make

SOURCE = """
import os
from torch import nn
SCALE = 2.0
def scaled(x):
    return x * SCALE
class Own(nn.Module):
    def __init__(self, width=8, factor=1.0):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(3))
        self.factor = factor
    def forward(self, sample, timestep):
        for part in self.parts:
            sample = scaled(part(sample + timestep[:, None])) * self.factor
        return sample if os.environ.get("OWN_SIGN") is None else -sample
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PULSE_CACHE_DIR", str(tmp_path / "cache"))
    # Bytecode of a file that is written again in the same second, in the same size, would be used.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "cache" / "graphs"


def chain_of(
    module: nn.Module, given: Callable[[int], Mapping[str, Any]], size: int = 2
) -> tuple[UnitChain, bool]:
    """Chain of ``module``, and true if it was stored before."""
    read = read_inputs("module", given, None, None, ())
    example, derived = read.make(size), []

    def called() -> tuple[UnitChain, bool]:
        derived.append(module)
        exported = export(module, example, read.constants, None)
        return derive(exported, "module", read.sample, True), False

    settings = read.sample, sorted(read.constants)
    return cached_chain(module, example, settings, called)[0], not derived


def results_of(chain: UnitChain, module: nn.Module, given: Mapping[str, Any]) -> list[Tensor]:
    """Output and all gradients."""
    tensors = {n: leaf for n, leaf in leaves_of(given).items() if isinstance(leaf, Tensor)}
    found = run(chain, tensors)
    torch.manual_seed(1)
    weights = [p for n, p in module.named_parameters() if n in chain.trained]
    return [found, *torch.autograd.grad(found, weights, torch.randn_like(found))]


@pytest.mark.parametrize("name", ["flux", "small_unet", "wan", "mochi"])
def test_a_hit_gives_the_chain_bit_for_bit(name: str) -> None:
    """A hit is for a module that was built again; Mochi has a region of autocast."""
    module, given = make(name)
    first, hit = chain_of(module, given)
    assert not hit
    wanted = results_of(first, module, given(2))
    again, given = make(name)
    second, hit = chain_of(again, given)
    assert hit and second is not first
    for a, b in zip(wanted, results_of(second, again, given(2)), strict=True):
        assert torch.equal(a, b)
    tensors = [
        {**chain.state, **dict(m.named_buffers()), **dict(m.named_parameters())}
        for chain, m in ((first, module), (second, again))
    ]
    one, other = map(to_record, (first, second), tensors)
    assert one == other


def own(
    tmp_path: Path, source: str = SOURCE, dtype: torch.dtype = torch.float32, **arguments: Any
) -> tuple[nn.Module, Callable[[int], Mapping[str, Any]]]:
    """Module of user code; each call loads the file as a new process would."""
    file = tmp_path / "own_code.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("own_code", file)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    module = code.Own(**arguments).to(dtype)
    width = module.parts[0][0].in_features
    return module, lambda size: {
        "sample": torch.zeros(size, width, dtype=dtype),
        "timestep": torch.zeros(size, dtype=dtype),
    }


def test_a_hit_has_the_weights_that_no_operation_reads(tmp_path: Path) -> None:
    idle = "self.factor = factor\n        self.parts[1][0].idle = nn.Parameter(torch.ones(3))\n"
    source = "import torch" + SOURCE.replace("self.factor = factor\n", idle)
    (first, _), (second, hit) = (chain_of(*own(tmp_path, source)) for _ in range(2))
    assert hit and "parts.1.0.idle" in second.units[1].weights
    works = [[work_of(unit, chain) for unit in chain.units] for chain in (first, second)]
    assert works[0] == works[1]


def test_same_content_hits_and_other_content_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not chain_of(*own(tmp_path))[1]
    assert chain_of(*own(tmp_path))[1]
    assert chain_of(*own(tmp_path, SOURCE + "# a comment\n"))[1]
    assert not chain_of(*own(tmp_path, SOURCE.replace("* self.factor", "+ self.factor")))[1]
    assert not chain_of(*own(tmp_path, SOURCE.replace("SCALE = 2.0", "SCALE = 3.0")))[1]
    assert not chain_of(*own(tmp_path, SOURCE.replace("return x *", "return x /")))[1]
    assert not chain_of(*own(tmp_path, factor=2.0))[1]
    assert not chain_of(*own(tmp_path, width=16))[1]
    assert not chain_of(*own(tmp_path, dtype=torch.float64))[1]
    assert not chain_of(*own(tmp_path), size=3)[1]
    module, given = own(tmp_path)
    module.get_parameter("parts.0.0.bias").requires_grad_(False)
    assert not chain_of(module, given)[1]
    with torch.backends.mkldnn.flags(enabled=False):
        assert not chain_of(*own(tmp_path))[1]
    with monkeypatch.context() as patch:
        patch.setattr(chain_cache, "_versions", lambda: ["torch 99"])
        assert not chain_of(*own(tmp_path))[1]
    with monkeypatch.context() as patch:
        patch.setenv("OWN_SIGN", "-")
        assert not chain_of(*own(tmp_path))[1]


def test_changed_methods_and_closures_miss(tmp_path: Path) -> None:
    def around(forward: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
        return lambda sample, timestep: forward(sample, timestep) * factor

    def wrapped(factor: float) -> bool:
        module, given = own(tmp_path)
        module.forward = around(module.forward, factor)
        return chain_of(module, given)[1]

    assert not chain_of(*own(tmp_path))[1]
    assert [wrapped(2.0), wrapped(2.0), wrapped(3.0)] == [False, True, False]


def test_module_of_unknown_content_is_derived_each_time(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, chain_cache.__name__)
    for _ in range(2):
        module, given = own(tmp_path)
        module.lock = threading.Lock()
        assert not chain_of(module, given)[1]
    assert not folder.exists()
    assert "Own is derived at each start: lock is of type lock" in caplog.text


def test_damaged_file_is_derived_again(tmp_path: Path, folder: Path) -> None:
    chain_of(*own(tmp_path))
    (file,) = folder.iterdir()
    good = file.read_text()
    record = json.loads(good)
    del record["xxh3_128"]
    unknown = json.dumps(record).replace("aten.linear.default", "aten.no_such.default")
    for damaged in (good[:-40], "", good.replace("aten.add", "aten.mul"), unknown):
        file.write_text(damaged)
        assert not chain_of(*own(tmp_path))[1]
        assert file.read_text() == good
        assert chain_of(*own(tmp_path))[1]


def test_folder_that_cannot_be_written_is_left_alone(tmp_path: Path, folder: Path) -> None:
    folder.parent.write_text("no folder")
    assert not chain_of(*own(tmp_path))[1]
    assert not chain_of(*own(tmp_path))[1]


def test_program_itself_does_not_count_under_its_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning and training are programs of their own, and share the cache."""
    import sys

    (tmp_path / "program.py").write_text("")
    program = types.ModuleType("__main__")
    program.__file__ = str(tmp_path / "program.py")
    before = chain_cache._own_files()
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, program)
    assert "__mp_main__" not in chain_cache._own_files()
    assert chain_cache._own_files().keys() <= before.keys()
