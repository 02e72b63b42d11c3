"""Shapes and dtypes of every value of a chain's graphs, without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from megatron_pulse.tracing.executable import executable
from megatron_pulse.tracing.units import Unit, UnitChain

OF_DATA = object()
"""Value whose size depends on data, or which is computed from one."""
_DEVICE = torch.device("cpu")


class FakeValues:
    """Runs the units of a chain on fake tensors."""

    def __init__(self, chain: UnitChain) -> None:
        self._chain, self._mode = chain, FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode, torch.no_grad():
            given = [_empty_like(chain.state[name]) for name in chain.constant_state]
            constants = executable(chain.constants, chain, _DEVICE)(*given)
        self._constants = dict(zip(chain.constant_names, constants, strict=True))

    def of_unit(self, unit: Unit) -> list[Any]:
        """Value of every node of a unit's graph, in order: a fake tensor, a list of them, or
        ``OF_DATA``.
        """
        chain = self._chain
        recorder = _Recorder(executable(unit.graph, chain, _DEVICE))
        with self._mode, torch.no_grad():
            given = [_empty_like(chain.values[name]) for name in unit.takes]
            given += [
                self._constants[name] if name in self._constants else _empty_like(chain.state[name])
                for name in unit.state
            ]
            recorder.run(*given)
        return recorder.values


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=_DEVICE)


class _Recorder(fx.Interpreter):
    """Interpreter that keeps every node's value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: list[Any] = []
        self._of_data: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node. See fx.Interpreter."""
        of_data = any(each in self._of_data for each in n.all_input_nodes)
        try:
            value = OF_DATA if of_data else super().run_node(n)
        except (DataDependentOutputException, DynamicOutputShapeException):
            value = OF_DATA
        if value is OF_DATA:
            self._of_data.add(n)
        self.values.append(value)
        return value
