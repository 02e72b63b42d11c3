"""Layers that are sharded unit by unit as a stage is built."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from tests.ranks import run_ranks


def _mesh() -> object:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def _most_unsharded(num_layers: int, size: int) -> tuple[int, int, list[str]]:
    """Elements of whole parameters alive at most and at the end, while layers are added."""
    from megatron_pulse.runtime.parameters.fsdp import ShardedUnits

    units = ShardedUnits(FsdpLayout.of_size(num_layers, size, group=2), num_layers, _mesh())
    held: list[weakref.ref[nn.Parameter]] = []

    def alive() -> int:
        gc.collect()
        found = [parameter for ref in held if (parameter := ref()) is not None]
        return sum(parameter.untyped_storage().nbytes() // 4 for parameter in found)

    most, layers = 0, []
    for number in range(num_layers):
        layer = nn.Linear(10, 10, bias=False)
        held.append(weakref.ref(layer.weight))
        most = max(most, alive())
        units.add(f"layer{number}", layer)
        layers.append(layer)
    units.finish(nn.Sequential(*layers))
    return most, alive(), units.faults


def test_no_more_than_one_unit_is_whole() -> None:
    for most, at_the_end, faults in run_ranks(2, _most_unsharded, 6, 2):
        assert (most, at_the_end, faults) == (200, 0, [])


class _Held(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, inputs: tuple[torch.Tensor, ...], skips: object, given: object) -> object:
        return (inputs[0] * self.weight,)


def _faults(size: int) -> list[str]:
    from megatron_pulse.runtime.parameters.fsdp import ShardedUnits

    shared, part = nn.Parameter(torch.ones(4)), _Held(nn.Parameter(torch.ones(4)))
    layers = {
        "a": _Held(shared), "b": nn.Linear(4, 4), "c": _Held(shared),
        "d": nn.Sequential(part), "e": nn.Sequential(part),
        "f": _Held(nn.Parameter(torch.tensor(1.0))),
    }  # fmt: skip
    units = ShardedUnits(FsdpLayout.of_size(len(layers), size, group=2), len(layers), _mesh())
    for name, layer in layers.items():
        units.add(name, layer)
    return units.faults


@pytest.mark.parametrize("size", [1, 6])
def test_faults_of_layers_are_listed_at_once(size: int) -> None:
    """Shared parameters, in one unit or in several, and a parameter without rows."""
    found = run_ranks(2, _faults, size)[0]
    assert [one.split(":")[0] for one in found] == ["c", "e", "f"]
    assert "its parameter weight is also a's weight" in found[0]
    assert "no rows" in found[2]
