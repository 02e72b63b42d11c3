"""Trains a backbone on the ranks of a test and returns what can be compared."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.costs import weighted_costs
from megatron_pulse.backbone.shape_buckets import at_shape
from megatron_pulse.planner.layout.embedder_choice import EmbedderChoice
from megatron_pulse.planner.layout.placement import Partition, make_placement
from megatron_pulse.planner.program.make_plan import make_plan
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.planner.schedule.operations import Operation, OpType, Schedule
from megatron_pulse.profile.trainable import choose_trained
from megatron_pulse.runtime.activations import offload, selective_recompute
from megatron_pulse.runtime.measure.recorder import StepRecorder
from megatron_pulse.runtime.pipeline import Pipeline
from megatron_pulse.runtime.protocols import SliceFunction
from megatron_pulse.runtime.stage import layer_seed
from tests.planner.schedules import offloaded_anywhere, recomputed_anywhere
from tests.ranks import run_ranks

SEED = 7


@dataclass
class Case:
    """Configuration of a run of a backbone.

    ``dtype`` and ``device`` are torch's names, ``train`` and ``freeze`` patterns of parameter
    names. Every ``recompute``-th layer is recomputed (0: none). Of the others, every ``offload``-th
    is offloaded, and of the rest every ``selective``-th is recomputed selectively, for tensors of
    any size. Frozen weights of every ``offload_weights``-th layer are in host memory. Token-wise
    parts of layers run in ``token_slices``. ``schedule``
    by name, ``cuts`` and ``replicated`` are for several devices.
    """

    placement: str
    num_microbatches: int
    schedule: str | Schedule = "auto"
    num_chunks: int = 2
    dtype: str = "float64"
    recompute: int = 0
    steps: int = 3
    cuts: tuple[int, ...] | None = None
    micro_batch_size: int = 2
    replicated: frozenset[str] = frozenset()
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    device: str = "cpu"
    offload: int = 0
    selective: int = 0
    offload_weights: int = 0
    token_slices: int = 1

    @property
    def alone(self) -> Case:
        """The same training on one device, whatever is special about the layout."""
        return replace(
            self,
            schedule="auto",
            num_chunks=2,
            recompute=0,
            offload=0,
            selective=0,
            offload_weights=0,
            cuts=None,
            replicated=frozenset(),
            placement="sequential",
        )


@dataclass
class Outcome:
    """Losses of every microbatch and step, final parameters, gradients of the last step, what this
    rank has sent, and how many weight gradients it has computed apart; ``num_left_out`` are saved
    tensors that it has made again, as they are cheap."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    num_weight_gradients: int = 0
    offload_bytes: int = 0
    num_left_out: int = 0
    forward_bytes: int = 0
    gradient_bytes: int = 0
    skip_bytes: int = 0
    replica_bytes: int = 0


def join_pipeline(backend: str = "gloo") -> tuple[Any, dist.ProcessGroup | None]:
    """Megatron's groups with all ranks as one pipeline: (a configuration, the group or None)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend)
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
    )
    return config, dist.group.WORLD if world > 1 else None


def make_batch(backbone: Backbone, case: Case, step: int, microbatch: int) -> dict[str, Tensor]:
    """Microbatch: latents, their target and every field that the backbone reads."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    num = case.micro_batch_size
    ends = {"noisy": backbone.input_spec, "target": backbone.output_spec}
    batch = {
        name: torch.randn(spec.full_shape(num), generator=generator, dtype=torch.float64)
        for name, spec in ends.items()
    }
    batch["noisy"] = batch["noisy"].to(getattr(torch, case.dtype))
    for name, spec in sorted(backbone.batch_fields.items()):
        shape = spec.full_shape(num)
        if name == "timesteps":
            batch[name] = torch.rand(shape, generator=generator) * 1000
        elif spec.dtype == "int64":
            batch[name] = torch.randint(0, 2, shape, generator=generator)
        else:
            batch[name] = torch.randn(shape, generator=generator)
    first = (step * case.num_microbatches + microbatch) * num
    return {**batch, "positions": torch.arange(first, first + num)}


def mean_squared_error(prediction: Tensor, batch: Any) -> Tensor:
    """The loss of the equality tests."""
    return (prediction - batch["target"].to(prediction)).square().mean()


def plan_of(backbone: Backbone, case: Case, num_devices: int) -> Plan:
    """Plan of ``case`` for that many devices."""
    placement = make_placement(case.placement, num_devices, case.num_chunks)
    costs = weighted_costs(backbone, [1.0] * len(backbone.layers))
    given = (case.schedule,) if isinstance(case.schedule, Schedule) else ()
    schedule = "auto" if given or num_devices == 1 else str(case.schedule)
    if case.cuts is not None and num_devices > 1:
        plan = Plan(backbone, Partition(placement, case.cuts), schedule)
    else:
        plan = make_plan(backbone, costs, placement, schedule)
    names = case.replicated if num_devices > 1 else ()
    choices = tuple(EmbedderChoice(name, 0, 0, True) for name in names)
    every = range(len(backbone.layers))
    again, moved, part = (
        frozenset(every[::number] if number else ())
        for number in (case.recompute, case.offload, case.selective)
    )
    policies = ActivationPolicies(again, moved - again, part - moved - again)
    weights = frozenset(every[:: case.offload_weights] if case.offload_weights else ())
    return replace(
        plan,
        embedders=choices,
        schedules=given or plan.schedules,
        activations=policies,
        offloaded_weights=weights,
        token_slices=case.token_slices,
    )


def make_pipeline(
    backbone: Backbone,
    case: Case,
    config: Any,
    group: dist.ProcessGroup | None,
    timeout_s: float = 60.0,
    bubble_tasks: Sequence[SliceFunction] = (),
) -> Pipeline:
    """This rank's part of a case; ``group`` is the pipeline (None: alone)."""
    pipeline = Pipeline(
        plan_of(backbone, case, group.size() if group is not None else 1),
        mean_squared_error,
        case.micro_batch_size,
        seed=SEED,
        dtype=getattr(torch, case.dtype),
        device=case.device,
        group=group,
        context=None if config is None else LayerContext(config),
        timeout_s=timeout_s,
        bubble_tasks=bubble_tasks,
    )
    leave_zero(pipeline, pipeline.plan.backbone.parts)
    return pipeline


def make_batches(backbone: Backbone, case: Case, step: int) -> list[dict[str, Tensor]]:
    """The microbatches of a step, of all shapes in turn.

    Those of a cascade hold those of its chains alone.
    """
    if backbone.parts:
        of_chains = {name: make_batches(part, case, step) for name, part in backbone.parts.items()}
        return [
            {
                f"{name}.{field}": value
                for name, batches in of_chains.items()
                for field, value in batches[m].items()
            }
            for m in range(case.num_microbatches)
        ]
    chains = [at_shape(backbone, shape_index) for shape_index in range(backbone.num_shapes)]
    return [
        make_batch(chains[(step + m) % len(chains)], case, step, m)
        for m in range(case.num_microbatches)
    ]


def train(
    backbone: Backbone,
    case: Case,
    config: Any,
    group: dist.ProcessGroup | None,
    bubble_tasks: Sequence[SliceFunction] = (),
    batches_of: Callable[[int], list[dict[str, Tensor]]] | None = None,
) -> Outcome:
    """A few steps of AdamW on this rank's stages; ``batches_of`` gives a step's microbatches."""
    if case.train or case.freeze:
        backbone = choose_trained(backbone, case.train, case.freeze)
    if case.offload:
        offload.LEAST_BYTES = 1
    selective_recompute.LEAST_BYTES = 1 if case.selective else selective_recompute.LEAST_BYTES
    pipeline = make_pipeline(backbone, case, config, group, bubble_tasks=bubble_tasks)
    parameters = dict(pipeline.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, foreach=False)
    outcome = Outcome()
    for step in range(case.steps):
        optimizer.zero_grad()
        batches = batches_of(step) if batches_of else make_batches(backbone, case, step)
        recorder = StepRecorder(pipeline.rank, torch.device(case.device))
        with counting_made() as made:
            losses = pipeline.step(batches, recorder=recorder)
        outcome.num_left_out += len(made)
        outcome.losses += [loss.item() for loss in losses]
        outcome.num_weight_gradients += sum(
            timed.operation.kind is OpType.WEIGHT_GRAD for timed in recorder.finish().operations
        )
        executor = pipeline.executor(len(batches))
        assert executor.held_bytes == 0
        outcome.offload_bytes = executor.offload_bytes
        optimizer.step()
    outcome.gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    outcome.parameters = {n: p.detach().clone() for n, p in parameters.items()}
    if (links := pipeline.links) is not None:
        outcome.forward_bytes = links.traffic.forward_bytes
        outcome.gradient_bytes = links.traffic.gradient_bytes
        outcome.skip_bytes = links.traffic.skip_bytes
        outcome.replica_bytes = links.traffic.replica_bytes
    return outcome


def train_split(
    make_chain: Callable[[], Backbone], cases: Sequence[tuple[Case, int | None]], num_devices: int
) -> list[Outcome]:
    """Outcomes of all cases on this rank.

    Each case has the number of backwards after which a weight gradient follows; None: whole ones.
    """
    torch.set_num_threads(1)
    config, group = join_pipeline()
    backbone, outcomes = make_chain(), []
    for case, delay in cases:
        if delay is not None:
            schedule = plan_of(backbone, case, num_devices).step(case.num_microbatches).schedule
            case = replace(case, schedule=split(schedule, delay))
        outcomes.append(train(backbone, case, config, group))
    dist.barrier()
    return outcomes


@contextmanager
def counting_made() -> Iterator[list[object]]:
    """Count selectively recomputed tensors that backward reads within the context."""
    taken, take = list[object](), selective_recompute._View.take

    def told(view: selective_recompute._View) -> Tensor:
        taken.append(view)
        return take(view)

    selective_recompute._View.take = told  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        selective_recompute._View.take = take  # type: ignore[method-assign]


def leave_zero(model: Pipeline | nn.Module, chains: Collection[str] = ()) -> None:
    """Gates and heads that begin at zero would hide what is behind them for the first steps.

    A parameter of one of a cascade's ``chains`` is changed as it is in its chain alone.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (parts := name.split(".", 1))[0] in chains:
                name = parts[1]
            generator = torch.Generator().manual_seed(layer_seed(SEED, name))
            if parameter.is_floating_point():  # not quantised
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.02 * noise.to(parameter.device)


def split(schedule: Schedule, delay: int) -> Schedule:
    """``schedule`` with every backward split, each weight gradient ``delay`` backwards later."""
    orders = []
    for order in schedule.order:
        waiting: list[Operation] = []
        new = []
        for op in order:
            if op.kind is not OpType.BACKWARD:
                new.append(op)
                continue
            new.append(op._replace(kind=OpType.INPUT_GRAD))
            waiting.append(op._replace(kind=OpType.WEIGHT_GRAD))
            if len(waiting) > delay:
                new.append(waiting.pop(0))
        orders.append((*new, *waiting))
    return replace(schedule, name=f"{schedule.name}, split", order=tuple(orders))


def computed_apart(
    schedule: Schedule, partition: Partition, recompute: int, rng: random.Random
) -> Schedule:
    """``schedule`` with about half of what stages of every ``recompute``-th layer compute again as
    operations of their own, anywhere between forward and backward."""
    again = _stages_of(schedule, partition, lambda i: recompute > 0 and i % recompute == 0)
    return recomputed_anywhere(schedule, again, 0.5, rng)


def away_anywhere(
    schedule: Schedule, partition: Partition, case: Case, rng: random.Random
) -> Schedule:
    """``schedule`` where about half of what the case's layers keep is on the host, from anywhere to
    anywhere between forward and backward."""

    def moves(i: int) -> bool:
        again = case.recompute > 0 and i % case.recompute == 0
        return case.offload > 0 and i % case.offload == 0 and not again

    stages = _stages_of(schedule, partition, moves)
    return offloaded_anywhere(schedule, stages, 0.5, rng)


def _stages_of(schedule: Schedule, partition: Partition, has: Callable[[int], bool]) -> set[int]:
    every = range(schedule.placement.num_stages)
    return {s for s in every if any(map(has, partition.layers_of_stage(s)))}


def merge(outcomes: list[Outcome]) -> Outcome:
    """Merge the outcomes of all ranks."""
    merged = Outcome()
    for outcome in outcomes:
        merged.losses = merged.losses or outcome.losses
        merged.parameters.update(outcome.parameters)
        merged.gradients.update(outcome.gradients)
        merged.num_weight_gradients += outcome.num_weight_gradients
        merged.offload_bytes += outcome.offload_bytes
        merged.num_left_out += outcome.num_left_out
        merged.forward_bytes += outcome.forward_bytes
        merged.gradient_bytes += outcome.gradient_bytes
        merged.skip_bytes += outcome.skip_bytes
        merged.replica_bytes += outcome.replica_bytes
    return merged


def references[C](
    run_cases: Callable[[list[C]], list[Outcome]], alone: list[C], timeout_s: float | None = None
) -> list[Outcome]:
    """The outcome of every case of one process; cases that are alike run once."""
    distinct = [case for i, case in enumerate(alone) if case not in alone[:i]]
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    (outcomes,) = run_ranks(1, run_cases, distinct, **limit)
    return [outcomes[distinct.index(case)] for case in alone]


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative difference of every tensor that is not bit for bit the same."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    found = {}
    for name in a:
        if not torch.equal(a[name], b[name]):
            scale = b[name].abs().max().item() or math.inf
            found[name] = (a[name] - b[name]).abs().max().item() / scale
    return found
