"""Megatron-Core's and torch's own schedules on stages that sleep.

Their users have one tensor between stages, so the skips that cross a cut travel in it, behind the
boundary. Stages sleep and allocate as ours do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.benchmarks.contestant import Contestant, Engine, Groups, Held, Runner, counted
from tests.runtime.emulated import sleep_until


class RelayStage(nn.Module):
    """One stage of a contestant that relays: takes one tensor, sleeps, returns one."""

    def __init__(
        self, forward_s: float, backward_s: float, shape: tuple[int, ...], saved: float, held: Held
    ) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.shape, self.saved, self.held = shape, saved, held
        self.weight = nn.Parameter(torch.zeros(1))
        self.keeps_until_weight_gradient = False
        self.given: Any = None
        self.config: Any = None
        self.model_type: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        """What Megatron's schedules call."""
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.given is None else self.given
        return _Relay.apply(self, self.weight, x)


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: RelayStage, weight: Tensor, x: Tensor) -> Tensor:
        deadline = time.perf_counter() + stage.forward_s
        ctx.stage, ctx.shape = stage, x.shape
        stage.held.add(stage.saved)
        result = torch.empty(stage.shape)
        sleep_until(deadline)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        deadline, stage = time.perf_counter() + ctx.stage.backward_s, ctx.stage
        found = torch.zeros(ctx.shape) if ctx.needs_input_grad[2] else None
        sleep_until(deadline)
        if not stage.keeps_until_weight_gradient:
            stage.held.add(-stage.saved)
        return None, torch.zeros_like(stage.weight), found


def _stages(contestant: Contestant, rank: int, held: Held, shape: Any) -> dict[int, RelayStage]:
    """The stages of ``rank``; ``shape(stage)`` is that of what a stage returns.

    What of the tensor that enters a stage only passes through is held with its activations.
    """
    problem = contestant.problem
    assert problem is not None
    weights = problem.weight_grad or (0.0,) * len(problem.forward)
    split = contestant.engine is Engine.TORCH_ZBV
    return {
        s: RelayStage(
            problem.forward[s],
            problem.backward[s] + (0.0 if split else weights[s]),
            shape(s),
            contestant.saved_bytes[s],
            held,
        )
        for s in problem.placement.stages_of_device(rank)
    }


def _sent_by(contestant: Contestant, rank: int, padded: int = 0) -> int:
    """Payload of a step of ``rank``: the outputs forward, the gradients of inputs back."""
    assert contestant.problem is not None
    home, packed = contestant.problem.placement.device_of_stage, contestant.packed
    num = 0
    for s in range(1, len(home)):
        if home[s - 1] != home[s]:
            num += (padded or packed[s]) * ((home[s - 1] == rank) + (home[s] == rank))
    return 4 * num * contestant.num_microbatches


def megatron(contestant: Contestant, groups: Groups) -> Runner:
    """Megatron-Core's own schedules.

    1F1B knows the shape of every boundary (its ``adjust_tensor_shapes_fn``). Interleaved has one
    shape for all, or exchanges shapes before each tensor; it overlaps its transfers.
    """
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.transformer_config import TransformerConfig

    rank, world, held = dist.get_rank(), dist.get_world_size(), Held()
    packed, num = contestant.packed, len(contestant.packed)
    interleaved = contestant.engine is Engine.MEGATRON_INTERLEAVED
    most = max(packed)
    padded = most if interleaved and not contestant.exchange else 0

    def shape(stage: int) -> tuple[int, ...]:
        return (1, 1, 1) if stage + 1 == num else (padded or packed[stage + 1], 1, 1)

    config = TransformerConfig(
        num_layers=num,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=world,
        virtual_pipeline_model_parallel_size=num // world if interleaved else None,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        variable_seq_lengths=contestant.exchange,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
    )
    stages = _stages(contestant, rank, held, shape)
    for stage in stages.values():
        stage.config, stage.model_type = config, ModelType.encoder_or_decoder
    data = torch.zeros(packed[0], 1, 1)

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(data), lambda out: (out.sum(), {})

    more: dict[str, Any] = {"seq_length": most}
    if not interleaved:
        shapes = [(packed[rank], 1, 1)], [shape(rank)]
        more["adjust_tensor_shapes_fn"] = lambda *unused: shapes
    function = (
        schedules.forward_backward_pipelining_with_interleaving
        if interleaved
        else schedules.forward_backward_pipelining_without_interleaving
    )
    communicator = P2PCommunicator(pp_group=groups.collection.pp, config=config)

    def step() -> None:
        function(
            forward_step_func=forward_step,
            data_iterator=[None] * len(stages) if interleaved else None,
            model=list(stages.values()) if interleaved else stages[rank],
            num_microbatches=contestant.num_microbatches,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=groups.collection,
            **more,
        )

    return counted(step, _sent_by(contestant, rank, padded), lambda: held.most)


def torch_pipelining(contestant: Contestant) -> Runner:
    """torch.distributed.pipelining with shapes given, so that none is exchanged."""
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, held, packed = dist.get_rank(), Held(), contestant.packed
    num, count = len(packed), contestant.num_microbatches

    def width(stage: int) -> int:
        return packed[stage] if stage < num else 1

    modules = _stages(contestant, rank, held, lambda s: (1, width(s + 1)))
    problem = contestant.problem
    assert problem is not None
    stages = []
    for s, module in modules.items():
        builder = None
        if contestant.engine is Engine.TORCH_ZBV:
            assert problem.weight_grad is not None
            builder = _weight_gradient(module, problem.weight_grad[s])
        stages.append(
            PipelineStage(
                module,
                s,
                num,
                torch.device("cpu"),
                input_args=torch.zeros(1, width(s), requires_grad=s > 0),
                output_args=torch.zeros(1, width(s + 1), requires_grad=True),
                group=dist.group.WORLD,
                dw_builder=builder,
            )
        )

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    schedule: Any
    if contestant.engine is Engine.TORCH_1F1B:
        schedule = schedules.Schedule1F1B(stages[0], count, loss_fn=loss)
    elif contestant.engine is Engine.TORCH_INTERLEAVED:
        schedule = schedules.ScheduleInterleaved1F1B(stages, count, loss_fn=loss)
    else:
        schedule = schedules.ScheduleZBVZeroBubble(stages, count, loss_fn=loss)
    home = problem.placement.device_of_stage
    x = torch.zeros(count, packed[0])
    given = (x,) if home[0] == rank else ()
    target = torch.zeros(count, 1) if home[-1] == rank else None

    def step() -> None:
        schedule.step(*given, target=target, losses=[] if target is not None else None)

    return counted(step, _sent_by(contestant, rank), lambda: held.most)


def _weight_gradient(stage: RelayStage, seconds: float) -> Callable[[], Callable[..., None]]:
    stage.keeps_until_weight_gradient = True

    def build() -> Callable[..., None]:
        def run() -> None:
            sleep_until(time.perf_counter() + seconds)
            stage.held.add(-stage.saved)

        return run

    return build
