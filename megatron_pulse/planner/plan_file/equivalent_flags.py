"""Flags of a run that has the decisions of a plan, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.layer_selection import name_of
from megatron_pulse.dataclass_flags import flag_name
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.planner.layout.fsdp_layout import FsdpLayout
from megatron_pulse.planner.plan_file.plan_file import PlanFile

NO_AVERAGES = "--pulse-ema-decay 0"
"""Flag of a run whose plan has no memory for an EMA of the weights."""
PREFERENCE = "--pulse-loss dpo"
"""Flag of a run whose plan counts the pass of a reference in every step."""


def decided_flags(plan: PlanFile) -> dict[str, Any]:
    """Megatron's flags that a plan decides, with their values."""
    return {
        "pipeline_model_parallel_size": plan.pipeline,
        "tensor_model_parallel_size": plan.tensor,
        "context_parallel_size": plan.context,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "bf16": plan.dtype == "bfloat16",
        "fp16": plan.dtype == "float16",
        "sequence_parallel": plan.sequence_parallel,
        "recompute_granularity": _granularity(plan),
        "use_distributed_optimizer": plan.distributed_optimizer,
        "optimizer_cpu_offload": plan.optimizer_cpu_offload,
        "grad_reduce_in_bf16": plan.grad_reduce_in_bf16,
        "overlap_grad_reduce": plan.overlap_grad_reduce,
        "use_tp_pp_dp_mapping": plan.rank_order == "tp-pp-dp",
    }


def _granularity(plan: PlanFile) -> str | None:
    count = len(plan.profile.layers)
    if len(plan.activations.recompute) == count:
        return "full"
    return "selective" if len(plan.activations.selective) == count else None


def equivalent_flags(plan: PlanFile) -> str:
    """Flags equivalent to the plan, except its cuts (or units) and schedule."""
    return " ".join(_equivalent(plan))


def _equivalent(plan: PlanFile) -> Iterator[str]:
    for name, value in decided_flags(plan).items():
        if name == "context_parallel_size" and value == 1:
            continue
        if value is not None and value is not False:
            yield flag_name(name) if value is True else f"{flag_name(name)} {value}"
    if plan.fsdp is not None:
        yield "--use-torch-fsdp2"
        yield from _fsdp_flags(plan.fsdp)
    if _granularity(plan) is None:
        policies = plan.activations.by_name(plan.layer_names).items()
        for wanted, flag in (
            ("recompute", "--pulse-recompute"),
            ("offload", "--pulse-offload"),
            ("selective", "--pulse-recompute-selective"),
        ):
            yield from (f"{flag} {shlex.quote(name)}" for name, p in policies if p == wanted)
    for layer in plan.profile.layers:
        if layer.offloaded:
            yield f"--pulse-offload-weights {shlex.quote(layer.name)}"
    if plan.token_slices > 1:
        yield f"--pulse-token-slices {plan.token_slices}"
    if plan.dpo:
        yield PREFERENCE
    if not plan.ema:
        yield NO_AVERAGES


def _fsdp_flags(layout: FsdpLayout) -> Iterator[str]:
    """Flags of a sharded layout, apart from its units."""
    yield f"--pulse-fsdp-group {layout.group}"
    yield f"--pulse-fsdp-gather {layout.gathering.name.lower()}"
    yield f"--pulse-fsdp-reduce {'step' if layout.reduce_once else 'microbatch'}"
    yield f"--pulse-fsdp-prefetch {layout.prefetch}"


def run_command(plan: PlanFile, path: Path) -> str:
    """Command that runs the plan in ``path``; a plan of a table of layers has none."""
    if "table" in plan.backbone:
        return f"not run: {name_of(plan.backbone)} is a table of layers"
    cluster = plan.provenance["cluster"]
    per_node = min(plan.world_size, int(cluster.get("devices_per_node", plan.world_size)))
    nodes = -(-plan.world_size // per_node)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT " * (nodes > 1)
    return (
        f"pulse run {several}--nproc-per-node {per_node} launch/pretrain_diffusion.py --pulse-plan "
        f"{shlex.quote(str(path))} {_data(plan)} --train-iters 1000 --lr 1e-4 "
        + f"{PREFERENCE} " * plan.dpo
        + f"{NO_AVERAGES} " * (not plan.ema)
        + f"--save {shlex.quote(f'runs/{name_of(plan.backbone)}')}"
    )


def _data(plan: PlanFile) -> str:
    """Data flags of a plan's run: images if it encodes them itself."""
    encoders = [*(plan.encoders or ()), *(plan.before_step or ())]
    if not encoders:
        return "--pulse-data latents:PATH"
    images = any(one["name"] == VAE for one in encoders)
    kind = ("pairs" if plan.dpo else "folder") if images else "latents"
    return f"--pulse-data {kind}:PATH --pulse-encoders DIR"
