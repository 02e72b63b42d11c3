"""Optimizer offload (``--optimizer-cpu-offload``): Megatron's, with equal bits in every layout.

The device keeps the compute copy of a parameter, and its gradient. An fp32 copy, the gradient and
both moments are in the node's memory, where Adam runs on the CPU::

  device    gradients                              parameters
                |  to the host                          ^
  host          v                                       |  to the device
            gradient, fp32 copy, moments  --- Adam ---> fp32 copy, rounded
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_pulse.runtime.parameters.adam import begin

_HOW = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)


class HostOptimizer(HybridDeviceOptimizer):
    """Megatron's offloaded optimizer, for all parameters of a rank.

    The fp32 copies stay the same tensors, since ``masters`` refer to them, and are pinned. Loading
    makes no step with random gradients.
    """

    def __init__(self, params: Any, **how: Any) -> None:
        for pinned in ("pin_cpu_grads", "pin_cpu_params"):
            how[pinned] = how.get(pinned, True) and torch.cuda.is_available()
        super().__init__(params, **how)
        # A checkpoint keeps the groups, with Adam's settings only and without those of this class.
        for group, name in product(self.param_groups, (*_HOW, "fused")):
            group.pop(name, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like torch's method, also for shards of fp32 parameters, which are views."""
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        self.param_groups.append(param_group)

    def _init_sub_optimizers(self) -> None:
        # Loading calls this method again; its values are copied into the existing tensors.
        if not hasattr(self, "param_to_inner_param"):
            super()._init_sub_optimizers()

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[Any, ...]:
        groups, copies = [], {}
        for group in self.param_groups:
            for parameter in group["params"]:
                copy = torch.empty(
                    parameter.shape, dtype=torch.float32, pin_memory=self.pin_cpu_params
                )
                copies[parameter] = copy.copy_(parameter.detach())
            groups.append({**group, "params": [copies[p] for p in group["params"]]})
        back = {copy: parameter for parameter, copy in copies.items()}
        return [group for group in groups if group["params"]], [], copies, back, dict(copies)

    def _register_param_copy_back_gpu_hook(self) -> None:
        """Round parameters into pinned memory, from which they are copied to the device.

        Torch would round them into other memory, and wait for these copies.
        """
        rounded = {
            copy: torch.empty(
                parameter.shape, dtype=parameter.dtype, pin_memory=self.pin_cpu_params
            )
            for copy, parameter in self.cpu_copys_map_gpu_param.items()
            if parameter.dtype != copy.dtype
        }

        def copy_back(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._h2d_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._h2d_stream):
                for copy in (p for group in optimizer.param_groups for p in group["params"]):
                    there = rounded[copy].copy_(copy) if copy in rounded else copy
                    self.cpu_copys_map_gpu_param[copy].data.copy_(there, non_blocking=True)
            self._h2d_stream.record_event().wait(torch.cuda.current_stream())

        for optimizer in self.sub_optimizers:
            optimizer.register_step_post_hook(copy_back)

    def dummy_step(self) -> None:
        """Create Adam's state, into which a checkpoint is loaded, without changing parameters."""
        for optimizer in self.sub_optimizers:
            optimizer.state = defaultdict(dict)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    begin(optimizer.state[parameter], parameter)
        self._sync_sub_optimizers_state_to_hdo()
