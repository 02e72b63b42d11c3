"""What a program of its own finds in ``megatron_pulse``."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_pulse as pulse
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.profile.measurement.clock import RepetitionLimits
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
    layers = [Linear, Linear(), None, 3, Linear]
    skips: list[Any] = [(3, 0), (2, 9), (0, 1, 2), "ab", (0.0, 1), (0, 1), (0, 1)]
    with pytest.raises(BackboneError) as caught:
        pulse.chain(layers, (2,), skips)  # type: ignore[arg-type]
    found = "\n".join(caught.value.faults)
    for part in (
        "use TensorSpec((2,))",
        "layer 1 is a module (Linear). Give its class",
        "layer 2 must be a class or function that makes a module, is None",
        "layer 3 must be a class or function that makes a module, is 3",
        "skip 3 to 0: the destination must be after the source",
        "skip 2 to 9: layers are 0 to 4, no 9",
        "skip 2 must be two layer numbers, is (0, 1, 2)",
        "skip 3 must be two layer numbers, is 'ab'",
        "skip 4 must be two layer numbers, is (0.0, 1)",
        "skip 0 to 1 is given twice",
    ):
        assert part in found, found
    assert len(caught.value.faults) == 10
    with pytest.raises(BackboneError, match=r"spec: the shape \(-2,\) has a dimension") as caught:
        pulse.chain([Linear] * 3, pulse.TensorSpec((-2,)))
    assert len(caught.value.faults) == 1


class Linear(torch.nn.Linear):
    """Of width 2, made without arguments."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def test_faults_of_what_plans_are_made_of_are_said() -> None:
    chain = pulse.chain([Linear] * 3, pulse.TensorSpec((2,)))
    costs = pulse.weighted_costs(chain, [1.0] * 3)
    with pytest.raises(ValueError) as caught:
        pulse.make_plan(costs, chain, 2, cap="2", goal="bytes")  # type: ignore[arg-type]
    said = str(caught.value)
    assert "make_plan (5 faults)" in said and "placement must be of type Placement" in said
    assert "cap must be a whole number from 1 on, is '2'" in said
    with pytest.raises(ValueError, match=r"(?s)3 faults.*layers.0: '1'.*layers.1: nan.*: -1"):
        pulse.weighted_costs(chain, ["1", math.nan, -1])  # type: ignore[list-item]
    for number in (0, "2", True):
        with pytest.raises(ValueError, match="number of devices must be a whole one from 1"):
            pulse.fold(number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"order must be a tuple of load, .*\('loads',\)"):
        pulse.Goal(order=("loads",))
    for sizes in (4, [0, -3], []):
        with pytest.raises(ValueError, match=r"micro_batch_sizes must be a list of whole"):
            pulse.measure(chain, sizes)  # type: ignore[arg-type]
    plan = pulse.make_plan(chain, costs, pulse.sequential(1))
    for count in (1.5, 2.0, True, "2", 0, None):
        for ask in (plan.step, plan.problem_of, plan.idle_share):
            with pytest.raises(ValueError, match="num_microbatches must be a whole number from 1"):
                ask(count)  # type: ignore[arg-type]
    problem = plan.problem_of(2)
    for solve in (pulse.solve, pulse.lower_bound):
        with pytest.raises(
            ValueError, match="problem must be of type ScheduleProblem, as plan.pro"
        ):
            solve(plan)  # type: ignore[arg-type]
    for seconds in (-1, math.nan, "1", None):
        with pytest.raises(ValueError, match="seconds must be a number from 0 on, is"):
            pulse.solve(problem, seconds)  # type: ignore[arg-type]


def test_pipeline_says_all_arguments_of_other_kinds() -> None:
    chain = pulse.chain([Linear] * 3, pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 3), pulse.sequential(1))
    given: dict[str, Any] = {"dtype": "bf16", "seed": None, "group": 3, "context": 4}
    with pytest.raises(RuntimeError) as caught:
        pulse.Pipeline({}, None, 0, **given)  # type: ignore[arg-type]
    for part in (
        "Pipeline (7 faults)", "plan must be of type Plan, as returned by make_plan, is {}",
        "loss must be a function of prediction and batch, is None", "dtype must be of type dtype",
        "micro_batch_size must be a whole number from 1 on, is 0", "seed must be of type int, is N",
        "group must be of type ProcessGroup, is 3", "context must be of type LayerContext, is 4",
    ):  # fmt: skip
        assert part in str(caught.value), caught.value
    both = pulse.cascade({"a": chain, "b": chain})
    costs = pulse.weighted_costs(both, [1.0] * 6)
    cascade = pulse.make_plan(both, costs, pulse.opposite(1))
    for of, loss, told in (
        (plan, {"a": max}, "Pipeline: loss is given for chains a; there is but one: give a func"),
        (cascade, {"a": max, "c": 2}, r"(?s)chain 'c' must be a function .*a, c; there are a, b"),
        (cascade, 3, "is 3 .or one for each chain by name"),
    ):
        with pytest.raises(RuntimeError, match=told):
            pulse.Pipeline(of, loss, 1)  # type: ignore[arg-type]


def test_what_a_program_plans_with_is_at_the_door() -> None:
    """A split schedule of weights by hand, proved by what the door gives alone."""
    chain = pulse.chain([Linear] * 4, pulse.TensorSpec((2,)), [(0, 3)])
    costs = pulse.weighted_costs(chain, [1.0] * 4, 0.25)
    assert costs.backward_s == (2.0,) * 4 and costs.weight_grad_s == (0.5,) * 4
    assert costs.skips == (pulse.SkipCost(0, 3, 4),)
    assert pulse.weighted_costs(chain, [1] * 4, [0, 1, 2, 0]).weight_grad_s == (0.0, 1.0, 2.0, 0.0)
    plan = pulse.make_plan(chain, costs, pulse.fold(2), "wave-split")
    problem = plan.problem_of(2)
    assert isinstance(problem, pulse.ScheduleProblem) and problem.weight_grad == (0.5,) * 4
    found = pulse.solve(problem, 1.0, "none")
    assert isinstance(found.schedule, pulse.Schedule)
    assert isinstance(found.certificate, pulse.Certificate)
    assert pulse.lower_bound(problem) <= found.certificate.makespan
    rule = pulse.MemoryRule(1e9, 16.0, (1.0,) * 4)
    assert rule.weighed(costs) == (0.0,) * 4
    with pytest.raises(ValueError, match=r"(?s)must not exceed .*layers.0: 3 of 2.*layers.3: 9"):
        pulse.weighted_costs(chain, [1] * 4, [3, 1, 1, 9])
    for share in (1.5, -1, math.nan):
        with pytest.raises(ValueError, match="weight"):
            pulse.weighted_costs(chain, [1] * 4, share)
    with pytest.raises(ValueError, match="need 4 weight_grads, one per layer; got 1"):
        pulse.weighted_costs(chain, [1] * 4, [1])


def _one_device(
    make: Callable[[], torch.nn.Module],
    loss: Callable[..., Any] = lambda y, batch: y.sum(),
    size: Any = 3,
    skips: Sequence[tuple[int, int]] = (),
) -> pulse.Pipeline:
    chain = pulse.chain([make] * 2, pulse.TensorSpec((2,)), skips)
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 2), pulse.sequential(1))
    return pulse.Pipeline(plan, loss, size)


def test_faults_of_batches_are_listed() -> None:
    pipeline = _one_device(lambda: torch.nn.Linear(2, 2))
    pipeline.step([{"noisy": torch.ones(3, 2)}])
    with pytest.raises(RuntimeError) as caught:
        pipeline.step([{"noisy": torch.ones(4, 2)}, {"x": torch.ones(3, 2)}])
    assert "microbatch 0: noisy is (4, 2), not (3, 2)" in str(caught.value)
    assert "microbatch 1: noisy is missing" in str(caught.value)
    with pytest.raises(RuntimeError, match="at least one"):
        pipeline.evaluate([])
    with pytest.raises(RuntimeError, match=r"(?s)0: must map names.*1: noisy must be a tensor"):
        pipeline.step([torch.ones(3, 2), {"noisy": 3}])  # type: ignore[list-item,dict-item]
    with pytest.raises(RuntimeError, match="noisy is of torch.float64, .* takes torch.float32"):
        pipeline.step([{"noisy": torch.ones(3, 2).double()}])
    with pytest.raises(RuntimeError, match="must be a list of mappings, is dict"):
        pipeline.step({"noisy": torch.ones(3, 2)})  # type: ignore[arg-type]
    for size in (0, "4"):
        with pytest.raises(RuntimeError, match="micro_batch_size must be a whole number from 1"):
            _one_device(Linear, size=size)


def test_faults_of_losses_and_layers_are_said_where_they_are() -> None:
    batches = [{"noisy": torch.ones(3, 2)}]
    for loss, fault in ((3.0, "of one number, is float"), (torch.ones(3), r"has the shape \(3,\)")):
        with pytest.raises(ValueError, match=fault):
            _one_device(Linear, lambda y, batch, loss=loss: loss).step(batches)
    with pytest.raises(TypeError, match=r"layers.1: Linear.forward is called .* and 1 skip"):
        _one_device(Linear, skips=[(0, 1)])
    with pytest.raises(
        TypeError, match="layers.0: its class or function returned object instead of a torch module"
    ):
        _one_device(object)

    class Failing(Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            raise OSError("mine")

    with pytest.raises(OSError, match="mine") as caught:
        _one_device(Failing).step(batches)
    assert caught.value.__notes__[0] == "layer layers.0"
    assert "trying stage 0" in caught.value.__notes__[1]


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
    wrong = {"layers.0.weight": torch.ones(5), "layers.1.x": torch.ones(1), "y": torch.ones(1)}
    with pytest.raises(RuntimeError) as caught:
        second.load_state_dict(wrong)
    for part in (
        "6 faults", "layers.0.bias is missing", "layers.1.x is no parameter or buffer of its layer",
        "y belongs to no layer", "layers.0.weight is (5,), not (2, 2)",
    ):  # fmt: skip
        assert part in str(caught.value), caught.value
    good, before = first.state_dict(), second.state_dict()
    for given, told in (
        (None, "must map names to tensors, as returned by full_state_dict; this is NoneType"),
        ([1], "; this is list"),
        (torch.nn.Linear(2, 2), "; this is Linear"),
        ("a.pt", r"not name the file 'a.pt': load_state_dict\(torch.load\('a.pt'\)\)"),
        (Path("b/a.pt"), r"torch.load\('b/a.pt'\)"),
        ({**good, "layers.1.bias": 3}, "full_state_dict: layers.1.bias must be a tensor, is int$"),
        (
            {"model": good, 4: 5},
            r"(?s)\(2 faults\).*model must be a tensor, is dict.*key 4 must be a name, is int",
        ),
    ):
        with pytest.raises(RuntimeError, match=told):
            second.load_state_dict(given)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in second.state_dict().items())


def _measured() -> list[float]:
    """Losses of a step whose layers were measured on process 0."""
    dist.init_process_group("gloo")
    _require_shared_refused()
    _require_others_told()
    chain = pulse.chain([lambda: torch.nn.Linear(8, 8)] * 4, pulse.TensorSpec((8,)))
    found = [None]
    if dist.get_rank() == 0:
        patience = RepetitionLimits(2, 2, 0.0)
        found = [pulse.measure(chain, [2], patience=patience).at(2)]
    dist.broadcast_object_list(found)
    plan = pulse.make_plan(chain, found[0], pulse.fold(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.square().mean(), 2)
    batch, rank = {"noisy": torch.ones(2, 8)}, dist.get_rank()
    with pytest.raises(
        RuntimeError, match="process 1 called step 5 microb.*process 0 called step 4 mi"
    ):
        pipeline.step([batch] * (4 + rank))
    with pytest.raises(
        RuntimeError, match="process 1 called evaluate 4 mic.*process 0 called step 4 m"
    ):
        (pipeline.evaluate if rank else pipeline.step)([batch] * 4)
    return [loss.item() for loss in pipeline.step([batch] * 3)]


def _require_shared_refused() -> None:
    """Each process is told of a parameter that both would have."""
    kept = torch.nn.Linear(2, 2)
    chain = pulse.chain([lambda: kept] * 2, pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 2), pulse.sequential(2))
    with pytest.raises(ValueError, match=r"layers.1: its parameter weight is also layers.0's"):
        pulse.Pipeline(plan, lambda y, batch: y.sum(), 1)


def _require_others_told() -> None:
    """Where layers of one process cannot be built, the other says which and why."""

    def make() -> torch.nn.Module:
        if dist.get_rank() == 0:
            raise OSError("no weights here")
        return Linear()

    chain = pulse.chain([make] * 2, pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 2), pulse.sequential(2))
    told = "no weights" if dist.get_rank() == 0 else "(?s)building layers.*process 0: OSError: no w"
    with pytest.raises((OSError, RuntimeError), match=told):
        pulse.Pipeline(plan, lambda y, batch: y.sum(), 1)
    _require_tried_before_the_search()


def _require_tried_before_the_search() -> None:
    """A layer that fails says so on all processes before a schedule is looked for."""

    class Failing(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OSError(f"mine, {len(x)} samples")

    chain = pulse.chain([Failing, *[Linear] * 3], pulse.TensorSpec((2,)))
    plan = pulse.make_plan(chain, pulse.weighted_costs(chain, [1.0] * 4), pulse.fold(2))
    pipeline = pulse.Pipeline(plan, lambda y, batch: y.sum(), 5)
    told = "^mine" if dist.get_rank() == 0 else "(?s)trying layers.*process 0: OSError: mine, 5"
    with pytest.raises((OSError, RuntimeError), match=told):
        pipeline.step([{"noisy": torch.ones(5, 2)}] * 10_000)


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
