"""What a program of its own finds in ``megatron_pulse``."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import megatron_pulse as pulse
from tests.ranks import RanksFailed, run_ranks


def test_every_name_is_there_and_said_to_type_checkers() -> None:
    for name in pulse.__all__:
        assert getattr(pulse, name).__doc__, name
    assert set(pulse.__all__) <= set(dir(pulse))
    source = inspect.getsource(pulse)
    for module, names in pulse._NAMES.items():
        for name in names:
            assert f"from {module} import {name} as {name}\n" in source
    with pytest.raises(AttributeError, match="'nothing'"):
        pulse.nothing  # noqa: B018


def test_planning_imports_no_torch_and_running_no_megatron() -> None:
    code = """
import sys
import megatron_pulse as pulse
assert not {"numpy", "torch"} & set(sys.modules)
chain = pulse.chain([object] * 4, pulse.TensorSpec((2,)), [(0, 3)])
plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1] * 4), pulse.fold(2))
assert "torch" not in sys.modules
pulse.Pipeline
assert not {"megatron", "diffusers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_faults_of_a_chain_are_listed() -> None:
    with pytest.raises(ValueError) as caught:
        pulse.chain([object] * 4, pulse.TensorSpec((2,)), [(3, 0), (2, 9)])
    assert "3 to 0" in str(caught.value) and "2 to 9" in str(caught.value)


def _run(weights: list[list[float]]) -> None:
    """A step of a plan for two devices, which each process makes for weights of its own."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    chain = pulse.chain([lambda: torch.nn.Linear(2, 2)] * 4, pulse.TensorSpec((2,)))
    costs = pulse.weighted_costs(chain, weights[dist.get_rank()])
    plan = pulse.make_plan(chain, costs, pulse.sequential(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.sum(), 1)
    pipeline.step([{"noisy": torch.ones(1, 2)}])


def test_other_plans_and_other_numbers_of_processes_are_refused() -> None:
    with pytest.raises(RanksFailed, match="processes 1 have another plan than process 0"):
        run_ranks(2, _run, [[1.0, 1, 1, 1], [9.0, 1, 1, 1]])
    with pytest.raises(RanksFailed, match="for 2 devices, the group has 1 processes"):
        run_ranks(1, _run, [[1.0, 1, 1, 1]])
