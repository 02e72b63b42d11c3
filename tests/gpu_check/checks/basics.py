"""What is installed, whether it starts, and the tests that want a GPU."""

from __future__ import annotations

import re
import sys

from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures


def versions(bench: Bench) -> Figures:
    """What the machine says of itself, and how GPUs are connected where nvidia-smi is there."""
    import shutil

    if bench.on_gpu and shutil.which("nvidia-smi"):
        bench.call("nvidia-smi")
        bench.call("nvidia-smi", "topo", "-m")
    return dict(bench.machine.versions)


_IMPORTS = """
import time, torch
began = time.perf_counter()
from megatron_pulse.integration.megatron import compat
compat.install()
import megatron_pulse.integration.pretrain
print(f"imported in {time.perf_counter() - began:.1f} s")
assert not torch.cuda.is_initialized(), "imports have started CUDA: ranks cannot choose their GPU"
"""


def commands(bench: Bench) -> Figures:
    """Imports leave CUDA alone; the commands and the training script say how they are called."""
    said = bench.call(sys.executable, "-W", "ignore", "-c", _IMPORTS)
    (seconds,) = re.findall(r"imported in ([\d.]+) s", said)
    listed = re.findall(r"^    ([a-z]+)(?= |$)", bench.pulse("--help"), re.MULTILINE)
    assert {"profile", "tune", "run"} <= set(listed), f"pulse --help lists {listed}"
    assert "usage" in bench.pulse("profile", "--help")
    assert "--pulse-backbone" in bench.call(
        sys.executable, "launch/pretrain_diffusion.py", "--help"
    )
    return {"import, s": float(seconds), "commands": len(listed)}


def gpu_tests(bench: Bench) -> Figures:
    """The tests that are skipped without a GPU."""
    said = bench.call(sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
    passed = re.findall(r"(\d+) passed", said)
    assert passed, "no test was run"
    return {"passed": int(passed[0])}
