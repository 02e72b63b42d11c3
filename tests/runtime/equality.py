"""Trains a backbone on the ranks of a test and returns what can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.planner.costs import weighted_costs
from megatron_pulse.planner.embedders import EmbedderChoice
from megatron_pulse.planner.placement import make_placement
from megatron_pulse.planner.plan import Plan, make_plan
from megatron_pulse.planner.stages import Partition
from megatron_pulse.runtime.exchange import message_spec
from megatron_pulse.runtime.executor import Executor
from megatron_pulse.runtime.failures import default_board
from megatron_pulse.runtime.links import Links
from megatron_pulse.runtime.replicas import Replicas
from megatron_pulse.runtime.settings import RunSettings


@dataclass
class Case:
    """One way to run a backbone; ``dtype`` is torch's name."""

    placement: str
    num_microbatches: int
    schedule: str = "auto"
    num_chunks: int = 2
    dtype: str = "float64"
    recompute: bool = False
    steps: int = 3
    cuts: tuple[int, ...] | None = None
    micro_batch_size: int = 2
    replicated: frozenset[str] = frozenset()


@dataclass
class Outcome:
    """Losses of every microbatch and step, final parameters and what this rank has sent."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    forward_bytes: int = 0
    gradient_bytes: int = 0
    skip_bytes: int = 0
    replica_bytes: int = 0


def join_pipeline() -> tuple[Any, dist.ProcessGroup | None]:
    """Megatron's groups with all ranks as one pipeline: (a configuration, the group or None)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
    )
    return config, dist.group.WORLD if world > 1 else None


def make_batch(backbone: Backbone, case: Case, step: int, microbatch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    spec = backbone.input_spec
    shape = spec.full_shape(case.micro_batch_size)
    batch = {
        "noisy": torch.randn(shape, generator=generator, dtype=torch.float64),
        "target": torch.randn(shape, generator=generator, dtype=torch.float64),
        "timesteps": torch.rand(case.micro_batch_size, generator=generator) * 1000,
        "labels": torch.randint(0, 3, (case.micro_batch_size,), generator=generator),
    }
    if "context" in backbone.batch_fields:
        context = backbone.batch_fields["context"].full_shape(case.micro_batch_size)
        batch["context"] = torch.randn(context, generator=generator)
    return batch


def mean_squared_error(prediction: Tensor, batch: Any) -> Tensor:
    """The loss of the equality tests."""
    return (prediction - batch["target"].to(prediction.dtype)).square().mean()


def train(backbone: Backbone, case: Case, config: Any, group: dist.ProcessGroup | None) -> Outcome:
    """A few steps of AdamW on this rank's stages; ``group`` is the pipeline (None: alone)."""
    from megatron_pulse.runtime.stage import Stage

    num_devices = group.size() if group is not None else 1
    device = group.rank() if group is not None else 0
    placement = make_placement(case.placement, num_devices, case.num_chunks)
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    schedule = case.schedule if placement.num_stages > 1 else "auto"
    if case.cuts is not None and num_devices > 1:
        plan = Plan(backbone, Partition(placement, case.cuts), schedule)
    else:
        plan = make_plan(backbone, costs, placement, schedule)
    if num_devices > 1:
        choices = tuple(EmbedderChoice(name, 0, 0, True) for name in case.replicated)
        plan = replace(plan, embedders=choices)
    step_plan = plan.step(case.num_microbatches)
    dtype = getattr(torch, case.dtype)
    stages = {
        s: Stage(config, backbone, plan.routes, s, seed=7, recompute=case.recompute).to(dtype)
        for s in placement.stages_of_device(device)
    }
    settings = RunSettings(case.micro_batch_size, dtype, torch.device("cpu"), mean_squared_error)
    links = board = None
    if group is not None:
        board = default_board()
        links = Links(
            group, lambda m: settings.make_empty(message_spec(plan.routes, m)), board, 60.0
        )
    replicas = None
    if plan.routes.replicated:
        replicas = Replicas(
            backbone,
            plan.routes,
            device,
            LayerContext(config),
            {
                plan.backbone.layers[i].name: stage.get_submodule(plan.backbone.layers[i].name)
                for s, stage in stages.items()
                for i in plan.partition.layers_of_stage(s)
                if plan.backbone.layers[i].name in plan.routes.replicated
            },
            links,
            dtype,
            settings.device,
        )
        for stage in stages.values():
            stage.replicas = replicas
    executor = Executor(
        backbone,
        plan.routes,
        step_plan.schedule,
        step_plan.programs[device],
        device,
        stages,
        links,
        board,
        replicas=replicas,
    )
    parameters = {n: p for stage in stages.values() for n, p in stage.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, foreach=False)
    outcome = Outcome()
    for step in range(case.steps):
        optimizer.zero_grad()
        batches = (make_batch(backbone, case, step, m) for m in range(case.num_microbatches))
        outcome.losses += [loss.item() for loss in executor.run(batches, settings)]
        assert executor.held_bytes == 0
        if step == 0:
            outcome.gradients = {
                n: p.grad.clone() for n, p in parameters.items() if p.grad is not None
            }
        optimizer.step()
    outcome.parameters = {n: p.detach().clone() for n, p in parameters.items()}
    if links is not None:
        outcome.forward_bytes = links.traffic.forward_bytes
        outcome.gradient_bytes = links.traffic.gradient_bytes
        outcome.skip_bytes = links.traffic.skip_bytes
        outcome.replica_bytes = links.traffic.replica_bytes
    return outcome


def merge(outcomes: list[Outcome]) -> Outcome:
    """One outcome of all ranks."""
    merged = Outcome()
    for outcome in outcomes:
        merged.losses = merged.losses or outcome.losses
        merged.parameters.update(outcome.parameters)
        merged.gradients.update(outcome.gradients)
        merged.forward_bytes += outcome.forward_bytes
        merged.gradient_bytes += outcome.gradient_bytes
        merged.skip_bytes += outcome.skip_bytes
        merged.replica_bytes += outcome.replica_bytes
    return merged


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative difference of every tensor that is not bit for bit the same."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    found = {}
    for name in a:
        if not torch.equal(a[name], b[name]):
            scale = b[name].abs().max().item() or math.inf
            found[name] = (a[name] - b[name]).abs().max().item() / scale
    return found
