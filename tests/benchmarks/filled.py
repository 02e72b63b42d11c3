"""Encoders beside the alternatives: who fills idle time with them, and what that gives.

    .venv/bin/python -m tests.benchmarks.filled --json filled.json          # as root
    .venv/bin/python -m tests.benchmarks.filled --quick

Real processes and transfers over links of a limited rate, computing sleeps (as ``claim``): analytic
A100 times in bfloat16 of SD 2.1 and SDXL with their encoders (``fill_encoders``), which our runtime
runs on one sample at a time. All contestants of a cell run in turn in the same processes.

====================  =============================================================================
ours, filled          what ``pulse tune --encoders`` picks among pipelines: schedule and filling
ours, in front        the fastest without encoders, and encoders before it, shared by all devices
ours, stored          that without encoders: a floor
1F1B, greedy          Megatron's 1F1B, relayed skips, filled by DiffusionPipe's greedy, on our
                      executor
1F1B, in front        Megatron's own, encoders before it, shared by all devices
Megatron DDP          each replica encodes its own samples before the step
15 %                  ours, filled, where encoders take 1.15 and 0.85 times as long as planned, over
                      what ours makes of those times when it knows them (the first rate only)
bound                 of filling 1F1B: (1F1B + encoders / P) over max(1F1B, all work / P)
====================  =============================================================================
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from statistics import median
from typing import Any

from megatron_pulse.cli.plan.tuning.tune_command import best_encoded
from megatron_pulse.planner.bubble_fill.components import Component, FrozenLayer
from megatron_pulse.planner.bubble_fill.diffusionpipe import greedy
from megatron_pulse.planner.bubble_fill.encoder_table import component_records, components_of
from megatron_pulse.planner.bubble_fill.filled_schedule import before_step_s, filled_schedule
from megatron_pulse.planner.bubble_fill.problem import FillProblem
from megatron_pulse.planner.bubble_fill.simulate import FilledSimulation
from megatron_pulse.planner.cluster.cluster import Link
from megatron_pulse.planner.layout.placement import sequential
from megatron_pulse.planner.plan_file.plan_file import PlanFile
from megatron_pulse.planner.program.simulate import edges_of, simulate_step
from megatron_pulse.planner.schedule.registry import make_schedule
from megatron_pulse.planner.tune.config import Choices, Recompute
from megatron_pulse.planner.tune.evaluate import Evaluator
from megatron_pulse.planner.tune.plans.bubble_fill import slowest_link
from megatron_pulse.planner.tune.plans.encoder_policies import EncodedPlan, encode_plan
from megatron_pulse.planner.tune.plans.to_plan import plan_of
from megatron_pulse.planner.tune.search.search import search
from tests.benchmarks import fill
from tests.benchmarks.cell import require_network, run_cell
from tests.benchmarks.contestant import Contestant, Encoders, Engine
from tests.benchmarks.contestants import Planner
from tests.benchmarks.emulation import MODEL_S, Emulation, relaying, slowed
from tests.benchmarks.report import Flags, Report, count, positive, table, write_json
from tests.benchmarks.setups import A100, analytic, cluster_of

RATES = (10.0, 2.5, 1.25)
"""GB/s of a device's link."""
MODELS = {model.name: model for model in fill.MODELS if model.name in ("sd-v2.1", "sdxl")}
MEMORY_GB = 80.0
KEPT = 3
"""Plans that encoders are tried in, as ``pulse tune`` does."""
FILLED, FRONT, STORED = "ours, filled", "ours, in front", "ours, stored"
GREEDY, FRONT_1F1B, REPLICAS = "1F1B, greedy", "1F1B, in front", "Megatron DDP"


@dataclass(frozen=True)
class Case:
    """A model on ``ranks`` devices, ``microbatches`` a step, links of ``rate`` GB/s."""

    model: fill.Model
    rate: float
    microbatches: int
    ranks: int = 4

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.microbatches * self.model.micro_batch_size

    def __str__(self) -> str:
        return f"{self.model.name}, {self.rate:g} GB/s, M = {self.microbatches}"


@cache
def emulated(name: str, model_s: float) -> Emulation:
    """A model of ``fill`` on the slow scale."""
    from model_specs import load_backbone

    model = MODELS[name]
    size, backbone = model.micro_batch_size, load_backbone(name, dict(model.options))
    return slowed(name, backbone, analytic(name, model.options, [size], A100), size, model_s)


def records_of(model: fill.Model, factor: float = 1.0) -> list[dict[str, Any]]:
    """The model's encoders as ``pulse profile --encoders`` has them: seconds of one sample."""

    def alone(layer: FrozenLayer) -> FrozenLayer:
        return replace(layer, seconds={1: factor * layer.time_s(1)})

    made = [replace(c, layers=tuple(map(alone, c.layers))) for c in model.components()]
    records = component_records(made)
    for record in records:
        record["consumers"] = "ends" if record["name"] == "vae" else "all"
    return records


def slow_encoders(emulation: Emulation, components: Sequence[Component], samples: int) -> Encoders:
    """Emulated seconds and bytes; parameters do not travel."""
    scale, divisor = emulation.time_scale, emulation.byte_divisor

    def slow(layer: FrozenLayer) -> FrozenLayer:
        seconds = {n: scale * s for n, s in layer.seconds.items()}
        return FrozenLayer(layer.name, seconds, output_bytes=layer.output_bytes / divisor)

    return Encoders(
        tuple(
            replace(c, layers=tuple(map(slow, c.layers)), result_bytes=c.result_bytes / divisor)
            for c in components
        ),
        samples,
    )


def plans_of(case: Case, emulation: Emulation, pipeline: int) -> list[PlanFile]:
    """The tuner's best plans without encoders, of this pipeline degree."""
    cluster = cluster_of(case.ranks, case.rate, MEMORY_GB, "A100-80GB")
    evaluator = Evaluator(emulation.profile, cluster, case.num_samples)
    sizes = (case.model.micro_batch_size,)
    choices = Choices(
        pipeline=(pipeline,), tensor=(1,), micro_batch_size=sizes, recompute=(Recompute.NEVER,)
    )
    found = search(evaluator, evaluator.candidates(choices), keep=KEPT)
    return [plan_of(outcome, evaluator) for outcome in found.outcomes if not outcome.extrapolated]


def enter(
    case: Case, emulation: Emulation, seconds: float, factors: Sequence[float]
) -> tuple[list[Contestant], dict[str, Any]]:
    """The contestants of ``case``, what the tuner picks among all ways, and what limits 1F1B.

    Each filling is searched for ``seconds``.
    """
    link = emulation.link(case.rate * 1e9)
    planner = Planner(emulation, link, case.ranks, case.microbatches, 0.0)
    records = records_of(case.model)
    plans = plans_of(case, emulation, case.ranks)
    chosen = best_encoded(plans, records, KEPT * seconds)
    entered = [_ours(planner, case, FILLED, chosen.plan, records, chosen.encoders_before_step_s)]
    for factor in factors:
        other = records_of(case.model, factor)
        slower = f"encoders {factor:g}"
        entered.append(_late(entered[0], f"{slower}, planned 1", factor))
        known = _knowing(chosen, other, seconds)
        name = f"{slower}, planned {factor:g}"
        entered.append(_ours(planner, case, name, known.plan, other, known.encoders_before_step_s))
    every = components_of(records, plans[0].placement)
    front = before_step_s(every, case.num_samples, case.ranks, slowest_link(plans[0]))
    entered.append(_ours(planner, case, FRONT, plans[0], records, front))
    entered.append(replace(_ours(planner, case, STORED, plans[0], records, 0.0), encoders=None))
    row = planner.cut(planner.relayed, sequential(case.ranks))
    assert row is not None
    encoders = slow_encoders(emulation, components_of(records, row.placement), case.num_samples)
    problem = planner.problem(planner.relayed, row, False)
    order = make_schedule("1f1b", row.placement, case.microbatches)
    filling = FillProblem(problem, order, encoders.components, case.num_samples, None, link)
    ideal = replace(filling, link=Link())
    schedule = filled_schedule(filling, greedy(filling))
    edges = edges_of(planner.relayed, row, lambda a, b: link)
    entered.append(
        replace(
            planner.make(GREEDY, Engine.OURS, planner.relayed, row, problem),
            schedule=schedule,
            predicted_s=simulate_step(problem, schedule, edges).timeline.makespan,
            encoders=encoders,
            backbone=relaying(emulation.backbone, planner.relayed),
        )
    )
    slow_front = before_step_s(encoders.components, case.num_samples, case.ranks, link)
    classic = planner.relay(Engine.MEGATRON_1F1B, row)
    entered.append(_in_front(classic, FRONT_1F1B, encoders, slow_front))
    own = before_step_s(encoders.components, case.num_samples // case.ranks, 1, link)
    for replicas in planner.data_parallel():
        entered.append(_in_front(replicas, REPLICAS, encoders, own))
    busy, work, alone = sum(filling.timeline.busy), encoders.compute_s, classic.predicted_s
    return entered, {
        "pick": _pick(case, emulation, records, chosen, seconds),
        "policies": {choice.name: choice.policy for choice in chosen.choices},
        "bound": (alone + work / case.ranks) / max(alone, (busy + work) / case.ranks),
        "idle_1f1b": 1 - busy / case.ranks / alone,
        # The greedy's step if nothing of it had to travel; emulated seconds.
        "ideal_greedy_s": FilledSimulation(ideal, greedy(ideal)).run().makespan,
    }


def _ours(
    planner: Planner,
    case: Case,
    name: str,
    plan: PlanFile,
    records: Sequence[Mapping[str, Any]],
    encoders_before_step_s: float,
) -> Contestant:
    """A plan's own order on the emulated times; encoders that it does not fill are in front."""
    partition, emulation = plan.partition, planner.emulation
    problem = planner.problem(planner.costs, partition, plan.problem.weight_grad is not None)
    takes = plan.simulate_step().timeline.makespan + encoders_before_step_s
    return replace(
        planner.make(name, Engine.OURS, planner.costs, partition, problem),
        schedule=plan.schedule,
        predicted_s=emulation.time_scale * takes,
        encoders=slow_encoders(emulation, components_of(records, plan.placement), case.num_samples),
    )


def _late(planned: Contestant, name: str, factor: float) -> Contestant:
    """Encoders take ``factor`` times as long as ``planned``."""
    assert planned.encoders is not None
    return replace(planned, name=name, encoders=replace(planned.encoders, factor=factor))


def _in_front(contestant: Contestant, name: str, encoders: Encoders, seconds: float) -> Contestant:
    takes = contestant.predicted_s + seconds
    return replace(contestant, name=name, encoders=encoders, predicted_s=takes)


def _knowing(
    chosen: EncodedPlan, records: Sequence[Mapping[str, Any]], seconds: float
) -> EncodedPlan:
    """The same order of the step, filled with encoders of these times, of the same policies."""
    from megatron_pulse.planner.bubble_fill.filled_schedule import without_bubble_tasks

    plan = replace(chosen.plan, schedule=without_bubble_tasks(chosen.plan.schedule))
    fixed = {choice.name: choice.policy for choice in chosen.choices}
    return encode_plan(plan, records, seconds, fixed)


def _pick(
    case: Case,
    emulation: Emulation,
    records: Sequence[Mapping[str, Any]],
    chosen: EncodedPlan,
    seconds: float,
) -> str:
    """Which of all ways the tuner takes: the pipeline, or data parallelism."""
    if not (plans := plans_of(case, emulation, 1)):
        return FILLED
    replicas = best_encoded(plans[:1], records, seconds)
    return FILLED if chosen.samples_per_s >= replicas.samples_per_s else REPLICAS


def measure(case: Case, args: argparse.Namespace, factors: Sequence[float]) -> dict[str, Any]:
    """One case: every contestant, in turn."""
    emulation = emulated(case.model.name, args.model_seconds)
    entered, facts = enter(case, emulation, args.seconds, factors)
    mbit = emulation.rate_mbit(case.rate * 1e9)
    results = run_cell(emulation.backbone, entered, case.ranks, mbit, args.repetitions)
    takes = {result.contestant: result.median_s for result in results}
    return {
        "model": case.model.name,
        "rate_gbs": case.rate,
        "microbatches": case.microbatches,
        "num_samples": case.num_samples,
        "time_scale": emulation.time_scale,
        **facts,
        "results": [asdict(result) for result in results],
        "over_front": takes[FRONT] / takes[FILLED],
        "over_ddp": takes[REPLICAS] / takes[FILLED],
        "over_greedy": takes[GREEDY] / takes[FILLED],
        "over_1f1b_front": takes[FRONT_1F1B] / takes[FILLED],
        "greedy_over_front": takes[FRONT_1F1B] / takes[GREEDY],
        "over_stored": takes[FILLED] / takes[STORED],
    }


def show(cell: Mapping[str, Any]) -> None:
    """Results of a cell: a row for each contestant."""
    policies = ", ".join(f"{name} {policy}" for name, policy in cell["policies"].items())
    report, takes = Report(), {r["contestant"]: median(r["seconds"]) for r in cell["results"]}
    print(
        f"\n{cell['model']}, {cell['rate_gbs']:g} GB/s, M = {cell['microbatches']}: the tuner "
        f"picks {cell['pick']} ({policies}); 1F1B idles {cell['idle_1f1b']:.1%}, bound "
        f"{cell['bound']:.3f}; if nothing of the greedy's had to travel its step would be "
        f"{cell['ideal_greedy_s']:.3f} s"
    )
    for result in cell["results"]:
        name, middle = result["contestant"], takes[result["contestant"]]
        known = takes.get(name.replace("planned 1", f"planned {name.split()[1].rstrip(',')}"))
        row = {
            "contestant": name,
            "samples/s": cell["num_samples"] * cell["time_scale"] / middle,
            "idle, %": 100 * result["bubble"],
            "s": middle,
            "range": (min(result["seconds"]), max(result["seconds"])),
            "predicted": result["predicted_s"],
            "waited, %": 100 * max(result["delays"]),
            "not known costs, %": 100 * (middle / known - 1) if known else 0.0,
        }
        report.add(row)


def summary(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Row of a cell, as the README has it."""
    row = {"model": cell["model"], "M": cell["microbatches"], "GB/s": cell["rate_gbs"]}
    by_name = {result["contestant"]: result for result in cell["results"]}
    for name in (FILLED, FRONT, STORED, GREEDY, FRONT_1F1B, REPLICAS):
        found = by_name[name]
        rate = cell["num_samples"] * cell["time_scale"] / median(found["seconds"])
        row[name] = f"{rate:.1f} ({found['bubble']:.0%})"
    row["gain"] = f"{cell['over_front']:.2f}"
    row["of 1F1B (bound)"] = f"{cell['greedy_over_front']:.2f} ({cell['bound']:.2f})"
    return row | {"x DDP": f"{cell['over_ddp']:.2f}"}


def main() -> None:
    """Run the command."""
    flags = Flags(__doc__)
    flags.add("--models", list(MODELS), nargs="+", choices=list(MODELS))
    flags.add("--rates", RATES, "GB/s of a real A100's link", nargs="+", type=positive)
    flags.add("--microbatches", (8, 4), "multiples of 4", nargs="+", type=count)
    flags.add("--repetitions", 5)
    flags.add("--factors", (1.15, 0.85), "of encoders' times", nargs="*", type=positive)
    flags.add("--model-seconds", MODEL_S, "the model on a microbatch, emulated")
    flags.add("--seconds", 4.0, "of each search")
    flags.add("--quick", False, "SD 2.1, one rate, M = 8, 2 repetitions")
    args = flags.parse_args()
    if args.quick:
        args.models, args.rates, args.microbatches = ["sd-v2.1"], [10.0], [8]
        args.repetitions, args.factors = 2, []
    if any(m % 4 for m in args.microbatches):
        flags.error("--microbatches must be multiples of 4")
    require_network()
    cells: list[dict[str, Any]] = []
    for name, num, rate in product(args.models, args.microbatches, args.rates):
        factors = args.factors if rate == args.rates[0] else ()
        cells.append(measure(Case(MODELS[name], rate, num), args, factors))
        show(cells[-1])
        if args.json:
            write_json(args.json, cells)
    print()
    print("\n".join(table(map(summary, cells))))


if __name__ == "__main__":
    main()
