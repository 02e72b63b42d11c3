"""Two ranks and more: the same numbers in every layout, what collectives and channels take, a rank
that dies, a run beside its plan."""

from __future__ import annotations

import json

from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures
from tests.gpu_check.checks.costs import data_for, planned
from tests.gpu_check.checks.numbers import EXACT, THREE, compared, furthest


def all_reduce(bench: Bench) -> Figures:
    """Sums over two ranks, by size."""
    return _measured(bench, "all_reduce")


def channels(bench: Bench) -> Figures:
    """A fold whose messages have channels of their own, beside one group for all."""
    return _measured(bench, "channels")


MOST_HELD = 10
"""Tensors that may be held when ``rank.AHEAD`` were sent, each waited for by the stream."""


def run_ahead(bench: Bench) -> Figures:
    """Messages while the GPU is busy: how much memory they hold until they are done, at both ends,
    as a step passes them on and as torch alone does."""
    from tests.gpu_check.rank import AHEAD, MEGABYTES

    _measured(bench, "ahead")
    if not bench.on_gpu:
        bench.figures["verdict"] = "that it runs: a CPU's memory is not measured"
    for own in bench.figures["ahead"] if bench.on_gpu else ():
        if own["way"] == "as in a step":
            assert own["host s"] < own["until all were done, s"] / 2, f"the host waited: {own}"
            held = own["MB held"]
            assert held <= MOST_HELD * MEGABYTES, f"{held:.0f} of {AHEAD * MEGABYTES} MB are held"
    return bench.figures


def probe(bench: Bench) -> Figures:
    """``pulse probe`` of two ranks, and the cluster that it wrote."""
    import yaml

    file = bench.folder / "cluster.yaml"
    bench.ranks(2, "probe", file)
    return {"cluster": json.dumps(yaml.safe_load(file.read_text()))}


def _measured(bench: Bench, what: str) -> Figures:
    file = bench.folder / "found.json"
    bench.ranks(2, what, file)
    bench.figures[what.replace("_", "-")] = json.loads(file.read_text())
    return bench.figures


def folds(bench: Bench) -> Figures:
    """Trainings folded over 2 and 4 ranks: bit for bit those of one."""
    from tests.integration.runs import assert_same, pipeline

    flags = [*THREE, "--bf16"] if bench.on_gpu else [*THREE]
    one = bench.train(1, *flags, name="P1")
    bench.figures["losses"] = one.losses
    for count in (2, 4):
        if count > bench.machine.most_ranks():
            bench.figures[f"P = {count}"] = f"there can be {bench.machine.most_ranks()} ranks"
            continue
        run = bench.train(count, *flags, *pipeline(count), name=f"P{count}")
        assert run.executed.placement == "fold", run.executed
        assert_same(run, one)
        bench.figures[f"P = {count}"] = "the same bits"
    return bench.figures


def schedules(bench: Bench) -> Figures:
    """Every schedule on every placement that it fits, whole and split: bit for bit one rank's."""
    from megatron_pulse.integration.megatron import compat

    compat.install()
    from dataclasses import replace

    from megatron_pulse.planner.layout.placement import PLACEMENTS
    from megatron_pulse.planner.schedule.operations import OpType
    from megatron_pulse.planner.schedule.registry import SCHEDULES
    from tests.runtime.equality import Case, plan_of, split
    from tests.runtime.tiny import backbone

    counts = [count for count in (2, 4) if count <= bench.machine.most_ranks()]
    left: dict[str, str] = {}
    for count in counts:
        cases: list[tuple[str, Case]] = []
        own = []
        for family in ("uvit", "unet", "dit"):
            chain = backbone(family)
            for placement in PLACEMENTS:
                for schedule in SCHEDULES:
                    case = Case(placement, 2 * count, schedule, dtype="float32", steps=2)
                    try:
                        found = plan_of(chain, case, count).step(2 * count).schedule
                    except ValueError as why:
                        left[f"{schedule} on {placement}"] = str(why)
                        continue
                    cases.append((family, case))
                    splits = ", split" if OpType.WEIGHT_GRAD in found.kinds else ""
                    own.append((family, f"P={count} {placement} {schedule}{splits}"))
                    if OpType.BACKWARD in found.kinds:
                        cases.append((family, replace(case, schedule=split(found, 2))))
                        own.append((family, f"P={count} {placement} {schedule}, then split"))
        assert len(cases) > 20, f"only {len(cases)} layouts on {count} ranks"
        got = bench.cases(count, cases, f"P{count}")
        references = {family: (family, case.alone) for family, case in cases}
        found_alone = bench.cases(1, list(references.values()), f"P{count}-alone")
        expected = dict(zip(references, found_alone, strict=True))
        compared(bench, own, got, [expected[family] for family, _ in cases])
    bench.figures["left out"] = [{"layout": what, "because": why} for what, why in left.items()]
    return bench.figures


def _beside_one(bench: Bench, limit: float, held: str, *flags: str) -> Figures:
    """Two ranks that add up in another order: losses to rounding, and of ``held`` each rank has
    a part, or nothing was shared."""
    one = bench.train(1, *THREE, name="one", **EXACT)
    (whole,) = _elements(bench, held)
    two = bench.train(2, *THREE, *flags, name="two", **EXACT)
    parts = _elements(bench, held)
    bench.figures |= {
        "losses of one rank": one.losses, "of two": two.losses,
        f"elements of {held} on one rank": whole, "on each of two": parts,
    }  # fmt: skip
    bench.figures["relative difference of losses"] = far = furthest(two.losses, one.losses)
    bench.figures["of gradient norms"] = norms = furthest(two.grad_norms, one.grad_norms)
    assert max(parts) < 0.75 * whole, f"nothing is shared: {parts} of {whole} elements"
    assert far <= limit, f"losses differ by {far:.1e}, more than {limit:g}"
    assert norms <= 10 * limit, f"gradient norms differ by {norms:.1e}, more than {10 * limit:g}"
    return bench.figures


def _elements(bench: Bench, held: str) -> list[int]:
    """How many each rank of the last training had."""
    return [sum(values.numel() for *_, values in seen[held]) for seen in bench.last_seen]


def data_parallel(bench: Bench) -> Figures:
    """Two replicas with the distributed optimizer."""
    flags = ("--use-distributed-optimizer", "--overlap-grad-reduce")
    return _beside_one(bench, 1e-5, "main_params", *flags)


def tensor_parallel(bench: Bench) -> Figures:
    """Layers shared by two ranks."""
    return _beside_one(bench, 1e-4, "weights", "--tensor-model-parallel-size", "2")


def killed_rank(bench: Bench) -> Figures:
    """Rank 1 is killed in a step: who is left says so within the limit, and nothing hangs."""
    from tests.integration.runs import BASE, TINY, pipeline

    flags = [*TINY["uvit"], *BASE, *pipeline(2), "--global-batch-size", "8"]
    flags += ["--train-iters", "1000", "--pulse-timeout-s", "20"]
    said = bench.ranks(2, "train", bench.folder, *flags, status=1, PULSE_CHECK_KILL="1")
    assert "pulse run: rank 1 exited on SIGKILL" in said, "the launcher does not name rank 1"
    first = [line for line in said.splitlines() if "first failure in this job: " in line]
    assert first and "rank 1" in first[0], f"rank 0 does not name rank 1: {first}"
    return {"said": first[0].strip()}


def trace(bench: Bench) -> Figures:
    """A plan for two ranks, run and traced, beside what it predicts."""
    name = "uvit-h" if bench.on_gpu else "uvit-tiny"
    _, plan = planned(bench, name, 2)
    folder, found = bench.folder / "run", bench.folder / "compared.json"
    folder.mkdir(exist_ok=True)
    words = [
        "--pulse-plan", str(plan), "--pulse-data", data_for(bench, name), "--train-iters", "6",
        "--lr", "1e-4", "--pulse-trace", str(folder), "--pulse-trace-steps", "4-6",
        "--pulse-no-progress",
    ]  # fmt: skip
    bench.ranks(2, "train", folder, *words)
    bench.pulse("compare", plan, folder, "--json", found)
    record = json.loads(found.read_text())
    both = record["makespan_s"]
    bench.figures |= {
        "model": name,
        "step, ms": {what: round(1e3 * seconds, 2) for what, seconds in both.items()},
        "measured / predicted": both["measured"] / both["predicted"],
        "in words": " ".join(record["in_words"]),
    }
    assert both["measured"] > 0
    return bench.figures
