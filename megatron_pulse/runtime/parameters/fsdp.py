"""A stage's parameters sharded over replicas by torch's ``fully_shard`` (FSDP2, HSDP).

Layers are gathered unit by unit before they run, and gradients are reduce-scattered. This rank's
rows of every parameter are plain tensors for the optimizer, the EMA and checkpoints. Replicas are
data-parallel ranks and the context-parallel ranks of each: gradients are the mean over both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron_pulse.planner.layout.fsdp_layout import (
    REDUCING,
    FsdpLayout,
    Gathering,
    prefetched_before_freed,
)
from megatron_pulse.runtime.module_checks import shared_parameter_fault
from megatron_pulse.runtime.parameters.main_params import MainParams, MainParamShard
from megatron_pulse.runtime.stage import Stage


class ShardedUnits:
    """Layers under ``fully_shard``, unit by unit.

    ``add`` takes the ``num_layers`` layers one after another and shards each unit once it is whole,
    so that no more than one unit is unsharded. Trained parameters become fp32. ``finish`` then adds
    their parent. ``mesh`` has the dimension "shard", after "replica" for HSDP. Parameters are
    gathered in ``dtype`` and reduced in fp32. Units without parameters are left out. ``faults`` are
    those of the layers so far; a layer with a fault is not sharded.
    """

    def __init__(
        self,
        layout: FsdpLayout,
        num_layers: int,
        mesh: DeviceMesh,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._layout, self.mesh = layout, mesh
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        self._ends = {own[-1] for own in layout.units(num_layers)}
        self._added = 0
        self._unit: list[nn.Module] = []
        self._owners: dict[int, tuple[Callable[[], Tensor | None], str, str]] = {}
        self.units: list[FSDPModule] = []
        self.faults: list[str] = []

    def add(self, name: str, layer: nn.Module) -> bool:
        """Add the next layer; True if its unit is whole, and its parameters are now DTensors."""
        layer.register_forward_hook(_without_views)
        for parameter in layer.parameters():
            if parameter.requires_grad and parameter.element_size() < 4:
                parameter.data = parameter.data.float()  # rows are main parameters
        self.faults += self._faults(name, layer)
        self._unit.append(layer)
        whole = self._added in self._ends
        self._added += 1
        if whole:
            unit, self._unit = self._unit, []
            if not self.faults and any(True for each in unit for _ in each.parameters()):
                self._shard(unit)
        return whole

    def _faults(self, layer: str, module: nn.Module) -> Iterator[str]:
        for name, parameter in module.named_parameters():
            held, before, as_name = self._owners.get(id(parameter), (lambda: None, "", ""))
            if held() is parameter:
                yield shared_parameter_fault(layer, name, before, as_name)
            elif isinstance(parameter, DTensor):
                yield f"{layer}: its parameter {name} is another layer's. Make a new one in each"
            elif not parameter.ndim or not parameter.numel():
                yield f"{layer}: {name} has no rows, by which FSDP shards it. Give it a dimension"
            self._owners[id(parameter)] = weakref.ref(parameter), layer, name

    def _shard(self, unit: list[nn.Module]) -> None:
        """Shard a unit; its parameters keep their attributes."""
        attributes = [{n: dict(vars(p)) for n, p in each.named_parameters()} for each in unit]
        fully_shard(
            unit if len(unit) > 1 else unit[0],
            mesh=self.mesh,
            mp_policy=self._policy,
            reshard_after_forward=False,
        )
        for each, of_layer in zip(unit, attributes, strict=True):
            for name, parameter in each.named_parameters():
                for key, value in of_layer[name].items():
                    setattr(parameter, key, value)
        assert isinstance(unit[0], FSDPModule)
        self.units.append(unit[0])

    def finish(self, root: nn.Module) -> None:
        """Set the order of gathering, with ``root`` as the parent of all layers."""
        ahead, passes = self._layout.prefetch, self._layout.gathering is Gathering.PASS
        for at, first in enumerate(self.units):
            kept = prefetched_before_freed(len(self.units) - 1 - at, ahead)
            first.set_reshard_after_forward(passes and not kept, recurse=False)
            first.set_modules_to_forward_prefetch(self.units[at + 1 : at + 1 + ahead])
            # Given nothing, the first unit would gather the last of the microbatch before.
            before = self.units[max(0, at - ahead) : at][::-1] or [first]
            first.set_modules_to_backward_prefetch(before)
        fully_shard(root, mesh=self.mesh, reshard_after_forward=False)
        assert isinstance(root, FSDPModule)
        self.root = root
        root.set_reduce_scatter_max_input_buffers(REDUCING)

    def set_last(self, last: bool) -> None:
        """Say whether the next backward is the last of the step."""
        self.root.set_requires_gradient_sync(last or not self._layout.reduce_once)
        self.root.set_requires_all_reduce(last)
        self.root.set_is_last_backward(last)
        keeps = self._layout.gathering is Gathering.STEP
        for at, unit in enumerate(self.units):
            near = prefetched_before_freed(at, self._layout.prefetch)
            unit.set_reshard_after_backward(last or not (keeps or near), recurse=False)

    def free_gathered(self) -> None:
        """Free all gathered copies, which would outlive a change of the parameters."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Root(nn.Module):
    """Parent of all layers, also of those that the stage does not register as submodules."""

    def __init__(self, stage: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._stage = (stage,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage[0](*args, **kwargs)


class FullyShardedStage:
    """A stage of sharded ``units``, and this rank's rows of its parameters.

    - ``root``: the module to call in place of the stage.
    - ``wholes``: parameters by name as DTensors.
    - ``own``: this rank's rows of them, which share their memory; first rows are ``first``.
    - ``group``, ``replica``: ranks that share the parameters, and the number of this group.
    """

    def __init__(self, stage: Stage, units: ShardedUnits) -> None:
        self.root = _Root(stage, [module for _, module in stage.named_layers()])
        self._units, mesh = units, units.mesh
        units.finish(self.root)
        self.group = mesh.get_group("shard")
        names = mesh.mesh_dim_names or ()
        self._replicated = "replica" in names
        self.replica = mesh.get_local_rank("replica") if self._replicated else 0
        self.wholes: dict[str, DTensor] = {}
        self.own: dict[str, nn.Parameter] = {}
        self.first: dict[str, int] = {}
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        for name, whole in stage.named_parameters():
            assert isinstance(whole, DTensor), name
            rows = -(-whole.shape[0] // size)
            self.wholes[name] = whole
            self.first[name] = min(rows * rank, whole.shape[0])
            self.own[name] = own = nn.Parameter(whole.to_local().detach(), whole.requires_grad)
            for key, value in vars(whole).items():
                setattr(own, key, value)

    @property
    def has_replicas(self) -> bool:
        """True for HSDP: other groups have copies of the parameters."""
        return self._replicated

    def main_params(self) -> MainParams:
        """This rank's rows as main parameters: they are fp32, and gathered copies are rounded."""
        shares = {
            name: MainParamShard(own.detach().view(-1), self.first[name] * own[0].numel())
            for name, own in self.own.items()
            if own.numel()
        }
        return MainParams({n: w.shape for n, w in self.wholes.items()}, shares, self.group)

    def take_gradients(self) -> None:
        """Let each parameter of ``own`` have this rank's rows of the reduced gradient."""
        for name, own in self.own.items():
            gradient = self.wholes[name].grad
            own.grad = None if gradient is None else gradient.to_local()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for name, own in self.own.items():
            own.grad = self.wholes[name].grad = None

    @torch.no_grad()
    def load(self, rows: Mapping[str, Tensor]) -> None:
        """Set parameters to this rank's ``rows`` of them by name; others stay unchanged."""
        for name, values in rows.items():
            self.own[name].copy_(values)

    def free_gathered(self) -> None:
        """Free all gathered copies, which would outlive a change of the rows."""
        self._units.free_gathered()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within, microbatches are not the last of a step."""
        self._units.set_last(False)
        try:
            yield
        finally:
            self._units.set_last(True)


def _without_views(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copy outputs that are views: of a parameter, whose memory is freed, or of any tensor, whose
    hooks an in-place operation would drop.
    """

    def copied(tensor: Tensor) -> Tensor:
        view = tensor._base is not None or isinstance(tensor, nn.Parameter)
        return tensor.clone() if view and tensor.requires_grad else tensor

    return copied(outputs) if isinstance(outputs, Tensor) else tuple(map(copied, outputs))
