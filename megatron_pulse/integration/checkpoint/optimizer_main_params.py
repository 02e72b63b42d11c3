"""Main (fp32) parameters in Megatron's optimizers, which the stages save and load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from megatron_pulse.diffusion.ema import ExponentialMovingAverage
from megatron_pulse.integration.checkpoint.lr_schedule import SCHEDULER
from megatron_pulse.integration.megatron.compat import inner_optimizers
from megatron_pulse.integration.megatron.fsdp import fully_sharded_optimizer
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.integration.megatron.stage import MegatronStage
from megatron_pulse.runtime.parameters.main_params import MainParams, MainParamShard


def with_main_params(get_optimizer: Callable[..., Any], ema_decay: float) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer`` so that each stage knows its main parameters afterwards.

    Main parameters start from the weights as drawn, before rounding, and so does the EMA if
    ``ema_decay`` is not 0. ``MegatronStage.load_state_dict`` sets them from a checkpoint's weights
    as read. The optimizer must not take them from the rounded copies.
    """

    def make(config: Any, model: list[nn.Module], *args: Any, **kwargs: Any) -> Any:
        if any(unwrap(chunk).fully_sharded for chunk in model):
            optimizer = fully_sharded_optimizer(get_optimizer, config, model, *args, **kwargs)
            for chunk in model:
                if ema_decay:
                    begin_ema(unwrap(chunk), ema_decay)
            return optimizer
        optimizer = get_optimizer(config, model, *args, **kwargs)
        found = dict(_shares(optimizer))
        group = _group(optimizer)
        for chunk in model:
            stage = unwrap(chunk)
            stage.main_params = _main_params_of(stage, found, group)
            if ema_decay:
                begin_ema(stage, ema_decay)
        optimizer.reload_model_params = lambda state_dict=None: None
        return optimizer

    return make


def begin_ema(stage: MegatronStage, decay: float) -> None:
    """Start the EMA of a stage's weights at its main parameters.

    Frozen weights have no EMA, since it would equal them.
    """
    assert stage.main_params is not None
    values, names = stage.main_params.values(), stage.trained_names
    stage.ema = ExponentialMovingAverage(
        ((name, values[name]) for name in names if name in values), decay
    )


def with_fp32_weights(generate_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``generate_state_dict`` so that main parameters replace rounded weights.

    Megatron's optimizers find the layouts of their states by the rounded parameters in the state,
    so the replacement comes last. An optimizer without any step made (all were skipped) gets its
    initial state. The position in the learning-rate schedule is kept without the optimizer's state
    as well (--no-save-optim).
    """

    def generate(
        args: Any,
        model: list[nn.Module],
        optimizer: Any,
        opt_param_scheduler: Any,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        if optimizer is not None and not args.no_save_optim:
            _begin_states(optimizer)
        state = generate_state_dict(args, model, optimizer, opt_param_scheduler, *rest, **kwargs)
        if opt_param_scheduler is not None:
            state[SCHEDULER] = opt_param_scheduler.state_dict()
        for i, chunk in enumerate(model):
            unwrap(chunk).replace_rounded(state["model" if len(model) == 1 else f"model{i}"])
        return state

    return generate


def _main_params_of(
    stage: MegatronStage, found: dict[nn.Parameter, MainParamShard], group: Any
) -> MainParams:
    shapes, shares = {}, {}
    for name, parameter in stage.named_parameters():
        shapes[name] = parameter.shape
        if parameter in found:
            shares[name] = found[parameter]
        elif group is None or not parameter.requires_grad:
            shares[name] = MainParamShard(parameter.detach())
    drawn, stage.drawn = stage.drawn, {}
    for name in drawn.keys() - shapes.keys():  # constants, which no optimizer changes
        shapes[name], shares[name] = drawn[name].shape, MainParamShard(drawn[name])
    main_params = MainParams(shapes, shares, group)
    main_params.load(drawn)
    return main_params


def _shares(optimizer: Any) -> Iterator[tuple[nn.Parameter, MainParamShard]]:
    """Parameters with main parameters of their own, and this rank's shares of these."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            for parameter, (group, place) in inner.model_param_group_index_map.items():
                master: Tensor = inner.optimizer.param_groups[group]["params"][place]
                if isinstance(inner.optimizer, HybridDeviceOptimizer):
                    master = inner.optimizer.param_to_inner_param[master]
                span = inner._get_model_param_range_map(parameter)["param"]
                yield parameter, MainParamShard(master.detach(), span.start)
        elif isinstance(inner, Float16OptimizerWithFloat16Params):
            groups = zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True)
            for parameters, main_params in groups:
                for parameter, master in zip(parameters, main_params, strict=True):
                    yield parameter, MainParamShard(master.detach())


def _group(optimizer: Any) -> torch.distributed.ProcessGroup | None:
    """Process group over which a distributed optimizer shards main parameters; None without one."""
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, DistributedOptimizer):
            return inner.data_parallel_group
    return None


def _begin_states(optimizer: Any) -> None:
    """Create the initial state of optimizers without one, since a continued run reads it."""
    for inner in inner_optimizers(optimizer):
        if inner.optimizer.state:
            continue
        if isinstance(inner.optimizer, HybridDeviceOptimizer):
            inner.optimizer.dummy_step()
        elif inner.init_state_fn is not None:
            inner.init_state_fn(inner.optimizer, inner.config)
