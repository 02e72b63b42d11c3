"""All checks, in the order in which they are run: what others build on comes first."""

from __future__ import annotations

from tests.gpu_check.check import Check, Need

_HERE = "tests.gpu_check.checks"


def _check(
    name: str, module: str, why: str, need: Need = Need.NOTHING, limit_s: float = 300.0
) -> Check:
    return Check(name, f"{_HERE}.{module}:{name.replace('-', '_')}", why, need, limit_s)


CHECKS = (
    _check("versions", "basics", "what is installed", limit_s=60),
    _check("commands", "basics", "imports leave CUDA alone, commands say how they are called"),
    _check("gpu-tests", "basics", "the tests that are skipped elsewhere", Need.GPU, 600),
    _check("losses", "numbers", "one rank over NCCL computes a CPU's losses", Need.GPU),
    _check("synchronisations", "numbers", "where a step's host waits for the GPU", Need.GPU),
    _check("families", "numbers", "every tiny family trains in bf16", limit_s=900),
    _check("deterministic", "numbers", "the same run twice, bit for bit", limit_s=400),
    _check("split-backwards", "numbers", "whole and split backwards, bit for bit", limit_s=400),
    _check("checkpoints", "numbers", "saved here, continued on a CPU and back", limit_s=400),
    _check("samples", "numbers", "a checkpoint is sampled from and exported"),
)
