"""What a program of its own finds in ``megatron_pulse``."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import megatron_pulse as pulse
from megatron_pulse.profile.measuring.clock import Patience
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


def _one_device(make: Callable[[], torch.nn.Module]) -> pulse.Pipeline:
    chain = pulse.chain([make] * 2, pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 2), pulse.sequential(1))
    return pulse.Pipeline(plan, lambda y, batch: y.sum(), 3)


def test_faults_of_batches_are_listed() -> None:
    pipeline = _one_device(lambda: torch.nn.Linear(2, 2))
    pipeline.step([{"noisy": torch.ones(3, 2)}])
    with pytest.raises(RuntimeError) as caught:
        pipeline.step([{"noisy": torch.ones(4, 2)}, {"x": torch.ones(3, 2)}])
    assert "microbatch 0: noisy is (4, 2), not (3, 2)" in str(caught.value)
    assert "microbatch 1: noisy is missing" in str(caught.value)
    with pytest.raises(RuntimeError, match="at least one"):
        pipeline.evaluate([])


def test_a_layer_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers.0 returned a tensor of \(3, 5\)"):
        _one_device(lambda: torch.nn.Linear(2, 5)).step([{"noisy": torch.ones(3, 2)}])


def test_weights_go_from_one_layout_to_another() -> None:
    first, second = (_one_device(lambda: torch.nn.Linear(2, 2)) for _ in range(2))
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    second.load_state_dict(first.state_dict())
    assert first.state_dict().keys() == dict(first.named_parameters()).keys()
    batches = [{"noisy": torch.ones(3, 2)}]
    assert first.evaluate(batches) == second.evaluate(batches)


def _measured() -> list[float]:
    """Losses of a step whose layers were measured on process 0."""
    dist.init_process_group("gloo")
    _require_shared_refused()
    chain = pulse.chain([lambda: torch.nn.Linear(8, 8)] * 4, pulse.TensorSpec((8,)))
    found = [None]
    if dist.get_rank() == 0:
        patience = Patience(2, 2, 0.0)
        found = [pulse.measure(chain, [2], patience=patience).at(2)]
    dist.broadcast_object_list(found)
    plan = pulse.make_plan(chain, found[0], pulse.fold(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2)
    return [loss.item() for loss in pipeline.step([{"noisy": torch.ones(2, 8)}] * 3)]


def _require_shared_refused() -> None:
    """Each process is told of a parameter that both would have."""
    kept = torch.nn.Linear(2, 2)
    chain = pulse.chain([lambda: kept] * 2, pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 2), pulse.sequential(2))
    with pytest.raises(ValueError, match=r"layers.1: its parameter weight is also layers.0's"):
        pulse.Pipeline(plan, lambda y, batch: y.sum(), 1)


def test_a_chain_is_measured() -> None:
    first, second = run_ranks(2, _measured)
    assert len(first) == 3 and len(set(first)) == 1 and second == []


def _run(weights: list[list[float]]) -> None:
    """A step of a plan for two devices, which each process makes for weights of its own."""
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
