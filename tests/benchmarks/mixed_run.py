"""Steps on unlike devices: the planner's mixed plan beside plans that take devices for alike.

    .venv/bin/python -m tests.benchmarks.mixed_run --json FILE         # two minutes on two cores
    .venv/bin/python -m tests.benchmarks.mixed_run --model dit-xl-2 --memory-gb 16

Four ranks are one pipeline of four devices, of which one is slowed by half and one has half the
memory. Operations of the product's executor sleep the times of an analytic V100 profile, on the
kind of device where they run, and messages are real (``tests.benchmarks.emulation``). Plans of one
pipeline are compared, at one microbatch size.

==============  ===================================================================================
uniform         the tuner's best for four devices like the fast ones, of the least memory
by parameters   stages of about equal parameters in a row, 1F1B
mixed           the tuner's best for these devices
step_ms         shortest measured step of all ranks, of the time that V100s would take
predicted_ms    by the simulator, at the speeds of the devices
devices         kinds in the order of the pipeline
memory_gb       most that each device holds; ``fits`` if within what plans may use of it
==============  ===================================================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.planner.cluster.cluster import BandwidthScope, Cluster, ClusterLink
from megatron_pulse.planner.cluster.device_kinds import DeviceKind
from megatron_pulse.planner.layout.placement import Partition, sequential
from megatron_pulse.planner.partition.memory import ParameterState
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.simulate import simulate_step
from megatron_pulse.planner.schedule.check.validate import peak_activations
from megatron_pulse.planner.schedule.operations import Schedule
from megatron_pulse.planner.schedule.problem import ScheduleProblem, stage_problem
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.profile.layer_records import LayerTimes
from megatron_pulse.profile.profile import Profile
from megatron_pulse.profile.unlike_devices import combine
from tests.benchmarks.emulation import BACKBONES, Emulation, emulate
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.setups import USABLE, decide
from tests.ranks import run_ranks

FAST, SLOW, SMALL = "fast", "slow", "small"
DEVICES = (FAST, SLOW, FAST, SMALL)
SLOWDOWN = 2.0
MICROBATCHES = 8
LEAST_GAIN = 1.3
STATE = ParameterState(ema=False)
LINK = ClusterLink("other", 10.0, 10.0, BandwidthScope.DEVICE)


@dataclass(frozen=True)
class Candidate:
    """A step: cuts, order and real seconds of each stage; ``kinds`` are those of its devices."""

    name: str
    partition: Partition
    schedule: Schedule
    problem: ScheduleProblem
    kinds: tuple[str, ...]
    memory_bytes: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        """Simulated seconds of a step, with free messages."""
        return simulate_step(self.problem, self.schedule, ()).timeline.makespan

    def fits(self, memory_gb: float) -> bool:
        """True if each device holds what its kind may, of devices of ``memory_gb``."""
        known = kinds_of(memory_gb)
        usable = [known[kind].usable_bytes for kind in self.kinds]
        return all(held <= most for held, most in zip(self.memory_bytes, usable, strict=True))


@dataclass(frozen=True)
class Row:
    """One candidate (see above)."""

    plan: str
    layout: str
    devices: str
    layers: str
    step_ms: float
    predicted_ms: float
    memory_gb: str
    fits: bool


def kinds_of(memory_gb: float) -> Mapping[str, DeviceKind]:
    """The three kinds; their figures differ by name of the device."""
    return {
        FAST: DeviceKind(FAST, memory_gb, USABLE, "fast.json"),
        SLOW: DeviceKind(SLOW, memory_gb, USABLE, "slow.json"),
        SMALL: DeviceKind(SMALL, memory_gb / 2, USABLE, "small.json"),
    }


def clusters(memory_gb: float) -> tuple[Cluster, Cluster]:
    """The node as it is, and as one of its smallest devices."""
    kinds = kinds_of(memory_gb)
    alike = Cluster("node", 1, len(DEVICES), memory_gb / 2, "fast.json", LINK, usable_memory=USABLE)
    return alike.of_kinds([kinds[name] for name in DEVICES]), alike


def slowed(profile: Profile) -> Profile:
    """``profile`` on a device that takes ``SLOWDOWN`` times as long."""

    def longer(row: LayerTimes) -> LayerTimes:
        seconds = {
            name: SLOWDOWN * value for name, value in vars(row).items() if name.endswith("_s")
        }
        return replace(row, **seconds)

    return replace(
        profile,
        times={size: tuple(map(longer, rows)) for size, rows in profile.times.items()},
        layers=tuple(
            replace(layer, optimizer_s=SLOWDOWN * layer.optimizer_s) for layer in profile.layers
        ),
    )


def tuned(profile: Profile, cluster: Cluster, size: int, seconds: float) -> PlanFile:
    """The tuner's plan of one pipeline over the whole cluster."""
    evaluator = Evaluator(profile, cluster, size * MICROBATCHES, state=STATE)
    choices = Choices(
        pipeline=(cluster.num_devices,),
        tensor=(1,),
        micro_batch_size=(size,),
        recompute=(Recompute.NEVER, Recompute.NEEDED),
    )
    found = decide(evaluator, choices, seconds)
    if found is None:
        raise SystemExit(f"no plan fits {cluster.name}: give more --memory-gb")
    return plan_of(found.outcomes[0], evaluator, found)


def at_real_speed(problem: ScheduleProblem, kinds: Sequence[str]) -> ScheduleProblem:
    """``problem`` of fast devices with the seconds of the devices that stages run on."""
    home = problem.placement.device_of_stage
    factors = [SLOWDOWN if kinds[device] == SLOW else 1.0 for device in home]
    columns = ("forward", "backward", "weight_grad", "recompute_s")
    return replace(
        problem,
        **{
            name: tuple(f * t for f, t in zip(factors, values, strict=True))
            for name in columns
            if (values := getattr(problem, name)) is not None
        },
    )


def candidates(emulation: Emulation, memory_gb: float, seconds: float) -> Iterator[Candidate]:
    """The three plans."""
    profile, size = emulation.profile, emulation.micro_batch_size
    mixed, alike = clusters(memory_gb)
    plan = tuned(profile, alike, size, seconds)
    yield Candidate(
        "uniform",
        plan.partition,
        plan.schedule,
        at_real_speed(plan.problem, DEVICES),
        DEVICES,
        tuple(plan.predicted["memory_bytes"]),
    )
    yield by_parameters(emulation)
    plan = tuned(
        combine({FAST: profile, SLOW: slowed(profile), SMALL: profile}), mixed, size, seconds
    )
    order = plan.device_order or range(len(DEVICES))
    yield Candidate(
        "mixed",
        plan.partition,
        plan.schedule,
        plan.problem,
        tuple(DEVICES[device] for device in order),
        tuple(plan.predicted["memory_bytes"]),
    )


def by_parameters(emulation: Emulation) -> Candidate:
    """Stages in a row, each ended as its share of all parameters is reached, under 1F1B."""
    costs, count = emulation.costs, len(DEVICES)
    sums = list(accumulate(costs.parameters))
    ends = [bisect_left(sums, sums[-1] * (i + 1) / count) + 1 for i in range(count)]
    placement = sequential(count)
    partition = Partition(placement, (0, *ends))
    problem = stage_problem(costs, partition, MICROBATCHES, 0.0)
    schedule = make_schedule("1f1b", placement, MICROBATCHES)
    state = partition.per_stage(emulation.layer_state())
    kept = peak_activations(schedule, partition.per_stage(costs.saved_bytes))
    held = tuple(a + b for a, b in zip(state, kept, strict=True))
    real = at_real_speed(problem, DEVICES)
    return Candidate("by parameters", partition, schedule, real, DEVICES, held)


def measured_s(backbone: Backbone, candidate: Candidate, scale: float, steps: int) -> float:
    """Shortest step of the four ranks in seconds, at ``scale`` times the real ones."""
    case = backbone, candidate.partition, candidate.schedule, _scaled(candidate.problem, scale)
    return float(run_ranks(len(DEVICES), _run, *case, steps)[0])


def _scaled(problem: ScheduleProblem, scale: float) -> ScheduleProblem:
    columns = ("forward", "backward", "weight_grad", "recompute_s")
    return replace(
        problem,
        **{
            name: tuple(scale * t for t in values)
            for name in columns
            if (values := getattr(problem, name)) is not None
        },
    )


def _run(
    backbone: Backbone,
    partition: Partition,
    schedule: Schedule,
    problem: ScheduleProblem,
    steps: int,
) -> float:
    import torch.distributed as dist

    from megatron_pulse.planner.layout.routes import trace_routes
    from tests.runtime.emulated import run_emulated

    dist.init_process_group("gloo")
    routes = trace_routes(backbone, partition)
    trace = run_emulated(backbone, routes, schedule, problem, dist.group.WORLD, num_steps=steps)
    return min(step.makespan_s for step in trace.steps)


def gain(others: Sequence[float], mixed: float) -> float:
    """Times that the mixed step is as fast as the fastest of the others."""
    return min(others) / mixed


def rows(name: str, memory_gb: float, seconds: float, steps: int) -> Iterator[Row]:
    """A row for each candidate."""
    emulation = emulate(name)
    scale = emulation.time_scale
    for each in candidates(emulation, memory_gb, seconds):
        cuts = each.partition.cuts
        yield Row(
            each.name,
            str(each.partition.placement.kind),
            " ".join(each.kinds),
            " ".join(str(b - a) for a, b in zip(cuts, cuts[1:], strict=False)),
            1e3 * measured_s(emulation.backbone, each, scale, steps) / scale,
            1e3 * each.predicted_s,
            " ".join(f"{held / 1e9:.1f}" for held in each.memory_bytes),
            each.fits(memory_gb),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 if the mixed plan is not ``LEAST_GAIN`` times as fast as both others."""
    flags = Flags(__doc__)
    flags.add("--model", "uvit-2.7b", choices=BACKBONES)
    flags.add("--memory-gb", 40.0, "of a device, half of it on the small one")
    flags.add("--seconds", 10.0, "of each plan's search")
    flags.add("--steps", 3, "measured of each plan")
    args: Any = flags.parse_args(argv)
    report = Report(args.json)
    for row in rows(args.model, args.memory_gb, args.seconds, args.steps):
        report.add(row)
    *others, mixed = report.rows
    times = gain([other.step_ms for other in others], mixed.step_ms)
    print(f"the mixed plan is {times:.2f} times as fast as the faster other one")
    return 0 if times >= LEAST_GAIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
