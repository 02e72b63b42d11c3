"""Memory of real training steps beside the plan's: what each device holds at its peak.

    .venv/bin/python -m tests.benchmarks.peaks --json peaks.json      # 37 configs, some minutes
    .venv/bin/python -m tests.benchmarks.peaks --only uvit-split      # those whose name has this

Each config is planned as the tuner does, written as a plan file, and trained by it in Megatron's
own loop on CPU ranks. The second step is measured. Its state is all memory that torch has allocated
since the process was ready, when the first forward begins: weights, gradients, optimizer, averages.
Its peak adds the most that is alive at once until the last backward ends, of all tensors that
operators make (``LiveBytes``). Batches are the host's, and copied for the device as it asks for
them; so are activations that wait there, and optimizers that are there. Not seen are a kernel's
workspace, gloo, and the optimizer's step, which has other copies on a GPU. The exit status is 1 if
a device is further from its plan than 5 %.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_pulse.planner.cluster.cluster import (
    BandwidthScope,
    Cluster,
    ClusterLink,
    DeviceFigures,
)
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, LOOP, ROW, WHOLE
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile, save_plan
from megatron_pulse.planner.schedule.search.synthesize import synthesize
from megatron_pulse.planner.tune.config import Config, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.analytic import analyse
from megatron_pulse.profile.roofline import Roofline
from megatron_pulse.runtime.measure.execution_modes import RUNNING
from model_specs import load_backbone
from tests.benchmarks.report import Flags, Report
from tests.integration.runs import BASE
from tests.integration.test_families import Family, write_latents
from tests.ranks import run_ranks

BAR = 0.05
"""How far a device may be from its plan, as a share."""

EFFORT = 4
"""Of the search for a schedule."""

UVIT = {"depth": 6, "embed_dim": 128, "num_heads": 4, "image_size": 16, "in_channels": 4}
UNET = {
    "sample_size": 16, "block_out_channels": "64,128", "norm_num_groups": 8,
    "transformer_depth": "0,1", "layers_per_block": 1,
}  # fmt: skip
TEXT = {**UNET, "cross_attention_dim": 32, "context_length": 16}
IMAGE = {"num_layers": 4, "sample_size": 16, "attention_head_dim": 32}
WAN = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 256,
    "text_dim": 32, "in_channels": 4, "out_channels": 4,
    "frames": 5, "height": 16, "width": 16, "text_length": 8,
}  # fmt: skip
BACKBONES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "uvit": ("uvit-tiny", UVIT),
    "unet": ("unet-tiny", {**UNET, "in_channels": 4, "out_channels": 4}),
    "sd": ("sd-tiny", TEXT),
    "sdxl": ("sdxl-tiny", {**TEXT, "num_heads": "2,4"}),
    "hunyuan": ("hunyuan-tiny", {**IMAGE, "num_layers": 6, "ffn_dim": 320}),
    "dit": ("dit-tiny", IMAGE),
    "pixart": ("pixart-tiny", IMAGE),
    "sd3": ("sd3-tiny", {**IMAGE, "pos_embed_max_size": 8}),
    "flux": (
        "flux-tiny",
        {**IMAGE, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": "8,8,16"},
    ),
    "wan": ("diffusers:WanTransformer3DModel", WAN),
}
LINK = ClusterLink("loopback", 1.0, 50.0, BandwidthScope.DEVICE)
TO_HOST = ClusterLink("pcie", 50.0, 10.0, BandwidthScope.DEVICE)


@dataclass(frozen=True)
class Case:
    """A config of a backbone, with so many microbatches; ``room`` is a device's memory as a share
    of what the config takes where nothing is computed again (0: as much as it wants)."""

    backbone: str
    config: Config
    microbatches: int
    dtype: str = "float32"
    room: float = 0.0
    state: ParameterState = field(default_factory=lambda: ParameterState(ema=True))
    token_slices: int = 1

    @property
    def name(self) -> str:
        """What it is, in a word."""
        config, state, layout = self.config, self.state, self.config.layout.name.replace(" ", "-")
        dtype = "" if self.dtype == "float32" else f"-{self.dtype}"
        ways = {Recompute.ALWAYS: "-all", Recompute.NEEDED: "-some", Recompute.HOST: "-host"}
        again = ways.get(config.recompute, "")
        of_state = "-half" * state.grad_reduce_in_bf16 + "-plain" * (not state.ema)
        of_state += "-adam-away" * state.optimizer_cpu_offload
        of_state += f"-{self.token_slices}-slices" * (self.token_slices > 1)
        return (
            f"{self.backbone}-{layout}-{config.pipeline}{f'x{config.data}' * (config.data > 1)}"
            f"{'-split' * config.split}{again}{dtype}{of_state}"
        )


ALL, SOME, HOST = Recompute.ALWAYS, Recompute.NEEDED, Recompute.HOST
CASES = (
    Case("uvit", Config(1, 1, 1, 4, WHOLE), 4),
    Case("uvit", Config(1, 1, 1, 4, WHOLE, recompute=ALL), 4),
    Case("uvit", Config(2, 1, 1, 4, FOLD_EXACT), 6),
    Case("uvit", Config(2, 1, 1, 4, FOLD_EXACT, split=True), 6, "bfloat16"),
    Case("uvit", Config(4, 1, 1, 4, FOLD_EXACT, split=True), 8),
    Case("uvit", Config(4, 1, 1, 4, ROW, recompute=ALL), 8),
    Case("uvit", Config(2, 1, 1, 4, FOLD_EXACT, split=True, recompute=SOME), 6, room=0.8),
    Case("uvit", Config(2, 2, 1, 4, ROW, distributed_optimizer=True), 4, "bfloat16"),
    Case("unet", Config(2, 1, 1, 4, FOLD_EXACT), 6),
    Case("unet", Config(4, 1, 1, 4, FOLD_SOFT, split=True), 8),
    Case("sd", Config(1, 1, 1, 4, WHOLE), 4, "float16"),
    Case("sd", Config(2, 1, 1, 4, FOLD_EXACT, recompute=SOME), 6, room=0.75),
    Case("sd", Config(4, 1, 1, 4, ROW, recompute=ALL), 8),
    Case("sdxl", Config(2, 1, 1, 4, FOLD_EXACT, split=True), 6),
    Case("hunyuan", Config(2, 1, 1, 4, FOLD_EXACT, split=True), 6),
    Case("hunyuan", Config(4, 1, 1, 4, FOLD_SOFT, recompute=SOME), 8, room=0.6),
    Case("dit", Config(2, 1, 1, 4, LOOP), 6),
    Case(
        "dit", Config(2, 1, 1, 4, ROW, split=True), 6, "bfloat16",
        state=ParameterState(grad_reduce_in_bf16=True),
    ),
    Case("pixart", Config(2, 1, 1, 4, ROW, recompute=ALL), 6),
    Case("sd3", Config(2, 1, 1, 4, ROW, split=True, recompute=SOME), 6, room=0.8),
    Case("flux", Config(4, 1, 1, 4, ROW), 8),
    Case("sdxl", Config(2, 1, 1, 4, FOLD_EXACT, recompute=SOME), 6, room=0.85),
    Case("dit", Config(2, 1, 1, 4, LOOP, split=True, recompute=SOME), 6, "bfloat16", room=0.9),
    Case("flux", Config(4, 1, 1, 4, ROW, recompute=SOME), 8, room=0.85),
    Case("uvit", Config(4, 1, 1, 4, ROW, recompute=HOST), 12, room=0.7),
    Case("uvit", Config(4, 1, 1, 4, FOLD_EXACT, recompute=HOST), 12, room=0.75),
    Case("sd", Config(4, 1, 1, 4, ROW, recompute=HOST), 12, room=0.6),
    Case("dit", Config(4, 1, 1, 4, ROW, split=True, recompute=HOST), 12, "bfloat16", room=0.8),
    Case("hunyuan", Config(4, 1, 1, 4, FOLD_SOFT, recompute=HOST), 12, room=0.7),
    Case(
        "uvit", Config(2, 1, 1, 4, FOLD_EXACT, split=True, distributed_optimizer=True), 6,
        "bfloat16", state=ParameterState(ema=True, optimizer_cpu_offload=True),
    ),
    Case(
        "sd", Config(2, 2, 1, 4, ROW, distributed_optimizer=True), 4, "float16",
        state=ParameterState(ema=True, optimizer_cpu_offload=True),
    ),
    Case("wan", Config(1, 1, 1, 4, WHOLE), 2),
    Case("wan", Config(1, 1, 1, 4, WHOLE), 2, token_slices=4),
    Case("wan", Config(1, 1, 1, 4, WHOLE, recompute=ALL), 2, token_slices=4),
    Case("wan", Config(2, 1, 1, 4, ROW, split=True), 4, token_slices=4),
    Case("flux", Config(1, 1, 1, 4, WHOLE), 2, token_slices=4),
    Case("flux", Config(2, 1, 1, 4, ROW, recompute=ALL), 4, token_slices=4),
)  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """What a device holds, bytes: between steps, and at most in one."""

    state_bytes: float
    peak_bytes: float


@dataclass(frozen=True)
class Row:
    """A device of a case: as planned, and as measured; shares by which it is above."""

    config: str
    device: int
    planned: Peak
    measured: Peak
    off: float
    state_off: float

    def cells(self) -> dict[str, Any]:
        """Row of the table."""
        kb = {"planned, kB": self.planned, "measured, kB": self.measured}
        shown = {name: f"{peak.peak_bytes / 1e3:,.0f}" for name, peak in kb.items()}
        off = {"off": f"{self.off:+.1%}", "state off": f"{self.state_off:+.1%}"}
        return {"config": self.config, "device": self.device, **shown, **off}


def plan(case: Case) -> tuple[PlanFile, list[Peak]]:
    """The plan of a case, and each device's memory by it."""
    from megatron_pulse.integration.megatron.linear_wgrad import defer_wgrad

    defer_wgrad()  # as linears of a run do
    name, options = BACKBONES[case.backbone]
    config, ranks = case.config, case.config.pipeline * case.config.data
    cluster = Cluster("peaks", 1, ranks, 8.0, DeviceFigures(0.1, 20.0), LINK, host=TO_HOST)
    peaks = cluster.peaks
    assert peaks is not None
    roofline = Roofline(peaks, case.dtype)
    backbone, size = load_backbone(name, dict(options)), config.micro_batch_size
    slices = [] if case.token_slices == 1 else [case.token_slices]
    profile = analyse(backbone, [size], roofline, running=RUNNING, token_slices=slices)
    profile = profile.in_slices(case.token_slices)
    samples = case.microbatches * config.micro_batch_size * config.data
    evaluator = Evaluator(profile, cluster, samples, state=case.state)

    def outcome(evaluator: Evaluator, config: Config) -> Any:
        problem = evaluator.problem(config, case.microbatches)
        return evaluator.evaluate(config, synthesize(problem, effort=EFFORT))

    if case.room:
        free = outcome(evaluator, Config(**{**vars(config), "recompute": Recompute.NEVER}))
        gb = case.room * max(free.memory_bytes) / 1e9
        evaluator = evaluator.on(Cluster(**{**vars(cluster), "memory_gb": gb}))
    found = outcome(evaluator, config)
    if case.room and not (
        found.stages.activations.recomputes or found.synthesis.schedule.offloaded
    ):
        raise RuntimeError(f"{case.name}: nothing is computed again, or on the host")
    planned = map(Peak, found.stages.state_bytes, found.memory_bytes)
    again, part = len(found.stages.activations.recompute), len(found.stages.activations.selective)
    if again + part:
        print(
            f"{case.name}: {again} of {len(profile.layers)} layers again, of {part} what is cheap"
        )
    return plan_of(found, evaluator), list(planned)


def run(case: Case) -> list[Row]:
    """Plan a case, train by it, and compare; of replicas the first."""
    made, planned = plan(case)
    name, options = BACKBONES[case.backbone]
    with tempfile.TemporaryDirectory() as folder:
        family = Family(name, options=tuple(f"{k}={v}" for k, v in options.items()))
        write_latents(Path(folder, "latents"), family)
        save_plan(made, file := Path(folder, "plan.json"))
        flags = ["--pulse-plan", str(file), "--pulse-data", f"latents:{folder}/latents"]
        if case.dtype == "float16":
            flags += ["--initial-loss-scale", "128"]  # no step is passed over
        if not case.state.ema:
            flags += ["--pulse-ema-decay", "0"]
        base = list(BASE)
        base[base.index("--micro-batch-size") + 1] = str(case.config.micro_batch_size)
        found = run_ranks(made.world_size, measured, [*base, *flags, "--train-iters", "2"])
    rows = []
    for device, (said, seen) in enumerate(zip(planned, found[:: case.config.data], strict=True)):
        off = seen.peak_bytes / said.peak_bytes - 1
        state_off = seen.state_bytes / said.state_bytes - 1
        rows.append(Row(case.name, device, said, seen, off, state_off))
    return rows


def measured(argv: list[str]) -> Peak:
    """One rank's part of a run of two steps, of which the second is measured."""
    import megatron.training.training as training
    from torch.utils._python_dispatch import _disable_current_modes

    from megatron_pulse.integration import pretrain
    from megatron_pulse.profile.measurement.memory import LiveBytes
    from megatron_pulse.runtime.activations.offload import ActivationOffload
    from megatron_pulse.runtime.executor import Executor

    before, count, live = _allocated(), 0, LiveBytes()
    hosted: dict[int, Any] = {}
    held: list[int] = []
    step, execute = training.train_step, Executor.run
    start_offload = ActivationOffload.start_offload

    def train_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return step(*args, **kwargs)

    def copied(batches: Any) -> Any:
        while True:
            with _disable_current_modes():
                batch = next(batches)
                hosted.update((t.untyped_storage()._cdata, t) for t in batch.values())
            yield {name: tensor.clone() for name, tensor in batch.items()}

    def run(self: Executor, batches: Any, *args: Any, **kwargs: Any) -> Any:
        if count != 2 or held:
            return execute(self, copied(batches), *args, **kwargs)
        now = _allocated()
        hosted.update((t.untyped_storage()._cdata, t) for t in _of_optimizers_on_the_host())
        own = now.keys() - before.keys() - hosted.keys()
        held.append(sum(now[key].nbytes() for key in own))
        with live:
            return execute(self, copied(batches), *args, **kwargs)

    def start_unwatched(self: ActivationOffload) -> None:
        with _disable_current_modes():
            start_offload(self)

    training.train_step, Executor.run = train_step, run  # type: ignore[method-assign]
    ActivationOffload.start_offload = start_unwatched  # type: ignore[method-assign]
    sys.argv = ["pretrain_diffusion.py", *argv]
    pretrain.main()
    return Peak(held[0], held[0] + live.peak)


def _of_optimizers_on_the_host() -> Iterator[Any]:
    """Adam's tensors there, and averages, which are where the fp32 weights are."""
    from megatron_pulse.diffusion.ema import ExponentialMovingAverage
    from megatron_pulse.integration.megatron.optimizer_offload import HostOptimizer

    objects = gc.get_objects()
    optimizers = [one for one in objects if type(one) is HostOptimizer]
    for optimizer in (one for found in optimizers for one in found.sub_optimizers):
        for parameter, state in optimizer.state.items():
            yield from (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
    for averages in objects if optimizers else ():
        if type(averages) is ExponentialMovingAverage:
            yield from averages.state.values()


def _allocated() -> dict[int, Any]:
    """The storages that torch has allocated and Python knows; not files that are mapped."""
    import torch

    gc.collect()
    found = {}
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor) or one.device.type != "cpu":
            continue
        for tensor in (one, one.grad if one.is_leaf else None):
            if tensor is None or not (storage := tensor.untyped_storage()).resizable():
                continue
            if storage.device.type == "cpu":  # a traced graph's example tensors have none
                found[storage._cdata] = storage
    return found


def main() -> int:
    """Run, print a table; the exit status."""
    flags = Flags(__doc__)
    flags.add("--only", "", "configs whose name has this")
    args = flags.parse_args()
    report = Report(args.json)
    for case in (case for case in CASES if args.only in case.name):
        for row in run(case):
            report.add(row, row.cells())
    off = sorted(abs(row.off) for row in report.rows)
    cases, within = len({row.config for row in report.rows}), sum(share <= BAR for share in off)
    print(
        f"\n{within} of {len(off)} devices of {cases} configs within {BAR:.0%}; off by "
        f"{statistics.median(off):.1%} in the median, {off[-1]:.1%} at most"
    )
    return int(within < len(off))


if __name__ == "__main__":
    sys.exit(main())
