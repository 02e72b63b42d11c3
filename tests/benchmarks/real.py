"""Real layers: a step under our executor beside Megatron-Core's own 1F1B.

The same blocks, weights, ranks and microbatches, in the same processes, steps in turn; every way's
gradients are compared before anything is measured. With ``--skips``, the second half of the blocks
takes skips from the first, nested as in a U-ViT; Megatron relays those that cross a cut behind the
boundary, in tensors of each cut's own width. ``--rates`` limits the link of each rank (MB/s, in
network namespaces; root) and counts the kernel's bytes.

    .venv/bin/python -m tests.benchmarks.real                     # no skips: what an executor adds
    .venv/bin/python -m tests.benchmarks.real --width 768         # the same, bound by computing
    .venv/bin/python -m tests.benchmarks.real --skips --rates 1000 100 25
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from tests.benchmarks.network import Node, namespaces, sent_bytes
from tests.benchmarks.report import Flags, Report, positive
from tests.ranks import run_ranks

SEQUENCE, BATCH, LAYERS = 64, 4, 8
MEGATRON = "Megatron 1F1B"
SAME = 1e-5
"""Relative difference of gradients that sums in another order make in fp32."""


class Block(nn.Module):
    """A residual two-layer perceptron in the calling convention of chain layers."""

    def __init__(self, width: int, takes_skip: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mix = nn.Linear(width, width) if takes_skip else None

    def forward(self, inputs: tuple[Tensor, ...], skips: Any, conditioning: Any) -> Any:
        (x,) = inputs
        if self.mix is not None:
            x = x + self.mix(next(iter(skips.values())))
        return (x + self.down(torch.relu(self.up(x))),)


def make_backbone(width: int, skips: bool) -> Backbone:
    """A chain of blocks; with ``skips`` block i hands its output to block LAYERS - 1 - i."""
    spec = TensorSpec((SEQUENCE, width), batch_dim=1)

    def layer(i: int) -> Layer:
        pushes = {f"skip{i}": 0} if skips and i < LAYERS // 2 else {}
        pops = {f"skip{LAYERS - 1 - i}": spec} if skips and i >= LAYERS // 2 else {}
        return Layer(
            f"block{i}", lambda c: Block(width, bool(pops)), (spec,), (spec,), pushes, pops
        )

    return Backbone("blocks", tuple(map(layer, range(LAYERS))))


class RelayStage(nn.Module):
    """The same blocks as Megatron's schedules call them: one tensor in, one out, skips behind the
    boundary in the order in which they were made."""

    def __init__(self, stage: Any, entering: list[str], leaving: list[str], config: Any) -> None:
        super().__init__()
        self.specs, self.config, self.given = stage._specs, config, None
        self.blocks = nn.ModuleList(getattr(stage, spec.name) for spec in self.specs)
        self.entering, self.leaving = entering, leaving

    def set_input_tensor(self, tensor: Any) -> None:
        """The tensor received from the stage before."""
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: Tensor) -> Tensor:
        x, *behind = (x if self.given is None else self.given).chunk(1 + len(self.entering), -1)
        skips = dict(zip(self.entering, behind, strict=True))
        for spec, block in zip(self.specs, self.blocks, strict=True):
            (x,) = block((x,), {name: skips.pop(name) for name in spec.pops}, {})
            skips.update(dict.fromkeys(spec.pushes, x))
        return torch.cat([x, *(skips[name] for name in self.leaving)], -1) if skips else x


Step = Callable[[], object]


def steps(width: int, skips: bool, count: int) -> dict[str, tuple[Step, list[nn.Module]]]:
    """Each way's step on this rank, and the modules that it trains. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_pulse.backbone.costs import weighted_costs
    from megatron_pulse.planner.layout.placement import fold, sequential
    from megatron_pulse.planner.program.make_plan import make_plan
    from megatron_pulse.planner.program.plan import Plan
    from megatron_pulse.runtime.pipeline import Pipeline
    from megatron_pulse.runtime.stage import Stage

    world, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=world,
        hidden_size=width,
        num_attention_heads=1,
        pipeline_model_parallel_size=world,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        deallocate_pipeline_outputs=True,
    )
    backbone = make_backbone(width, skips)
    costs = weighted_costs(backbone, [8.0 + bool(layer.pops) for layer in backbone.layers])
    data = torch.randn(SEQUENCE, BATCH, width, generator=torch.Generator().manual_seed(2))

    def ours(plan: Plan) -> tuple[Step, list[nn.Module]]:
        pipeline = Pipeline(plan, lambda p, b: (p - b["target"]).square().mean(), BATCH, seed=1)
        batches = [{"noisy": data, "target": data}] * count
        return lambda: pipeline.step(batches), list(pipeline.stages.values())

    row = make_plan(backbone, costs, sequential(world), "1f1b")
    ways = {"ours, sequential, 1F1B": ours(row)}
    if skips:
        ways["ours, fold exact"] = ours(make_plan(backbone, costs, fold(world), "wave"))
    ways[MEGATRON] = theirs(row, Stage(backbone, row.routes, rank, seed=1), config, data, count)
    return ways


def theirs(
    plan: Any, stage: Any, config: Any, data: Tensor, count: int
) -> tuple[Step, list[nn.Module]]:
    """Megatron's own 1F1B on the stages of ``plan``."""
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving as megatron_schedule,
    )

    def crossing(cut: int) -> list[str]:
        return [name for name, source, end in _skips(plan.backbone) if source < cut <= end]

    rank, cuts, width = stage.stage, plan.partition.cuts, data.shape[-1]
    entering, leaving = crossing(cuts[rank]), crossing(cuts[rank + 1])
    model = RelayStage(stage, entering, leaving, config)
    shapes = tuple([(SEQUENCE, BATCH, width * (1 + len(n)))] for n in (entering, leaving))

    def forward_step(iterator: Any, model: nn.Module) -> Any:
        return model(data), lambda out: ((out - data).square().mean(), {})

    def step() -> None:
        megatron_schedule(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=count,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            adjust_tensor_shapes_fn=lambda *unused: shapes,
        )

    return step, [stage]


def _skips(backbone: Backbone) -> list[tuple[str, int, int]]:
    """(name, block that makes it, block that takes it)."""
    made = {name: i for i, layer in enumerate(backbone.layers) for name in layer.pushes}
    return [(n, made[n], i) for i, layer in enumerate(backbone.layers) for n in layer.pops]


def measure(
    nodes: list[Node], width: int, skips: bool, count: int, repeats: int
) -> dict[str, list[tuple[float, int]]]:
    """(Seconds of a step, bytes that this rank's interface sent) by way and repetition."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if nodes:
        nodes[int(os.environ["RANK"])].enter()
        os.environ["MASTER_ADDR"] = nodes[0].address
    dist.init_process_group("gloo")
    ways = steps(width, skips, count)
    norms = {}
    for name, (step, modules) in ways.items():
        step()
        total = torch.zeros(1, dtype=torch.float64)
        for parameter in (p for module in modules for p in module.parameters()):
            assert parameter.grad is not None
            total += parameter.grad.double().square().sum()
        dist.all_reduce(total)
        norms[name] = total.item() ** 0.5
    most, least = max(norms.values()), min(norms.values())
    if most > least * (1 + SAME):
        raise RuntimeError(f"gradients differ: {norms}")
    count_bytes = sent_bytes if nodes else lambda: 0
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for repetition in range(-2, repeats):
        for name, (step, _) in ways.items():
            dist.barrier()
            sent, start = count_bytes(), time.perf_counter()
            step()
            dist.barrier()
            if repetition >= 0:
                found[name].append((time.perf_counter() - start, count_bytes() - sent))
    return found


def compare(
    ranks: int, width: int, skips: bool, count: int, repeats: int, rate: float | None
) -> dict[str, dict[str, Any]]:
    """All ways over links of ``rate`` MB/s, or as fast as they are."""
    limited = namespaces(ranks, 8 * rate) if rate else nullcontext([])
    with limited as nodes:
        given = nodes, width, skips, count, repeats
        found = run_ranks(ranks, measure, *given, timeout_s=600)
    theirs = [seconds for seconds, _ in found[0][MEGATRON]]
    ways = {}
    for name, own in found[0].items():
        times = [seconds for seconds, _ in own]
        ratios = sorted(a / b for a, b in zip(times, theirs, strict=True))
        sent = sum(statistics.median(b for _, b in rank[name]) for rank in found)
        ways[name] = {
            "ms a step": 1e3 * statistics.median(times),
            "MB": sent / 1e6,
            "of Megatron's": statistics.median(ratios),
            "10th to 90th percentile": (ratios[repeats // 10], ratios[-1 - repeats // 10]),
        }
    return ways


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--ranks", 2)
    flags.add("--microbatches", 8)
    flags.add("--width", 64)
    flags.add("--repeats", 30)
    flags.add("--skips", False)
    flags.add("--rates", type=positive, nargs="+", metavar="MB/S", default=[None])
    args = flags.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}; {args.ranks} "
          f"ranks, {args.microbatches} microbatches")  # fmt: skip
    report = Report(args.json)
    given = args.ranks, args.width, args.skips, args.microbatches, args.repeats
    for rate in args.rates:
        for name, way in compare(*given, rate).items():
            report.add({"MB/s": rate or "loopback", "way": name, **way})


if __name__ == "__main__":
    main()
