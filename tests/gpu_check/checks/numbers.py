"""Whether trainings give the right numbers: against the CPU, twice, split, continued."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from tests.gpu_check.alone import join
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures, Skipped

THREE = ("--global-batch-size", "8", "--train-iters", "3")
CPU = {"CUDA_VISIBLE_DEVICES": ""}
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Products in float32: those of TF32 differ from a CPU's in the third digit."""


def furthest(got: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    assert len(got) == len(expected) > 0, (got, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


def losses(bench: Bench) -> Figures:
    """uvit-tiny and unet-tiny alone over NCCL: the losses that a CPU computes, to rounding."""
    rows = bench.rows("losses")
    for backbone in ("uvit", "unet"):
        here = bench.train(1, *THREE, backbone=backbone, name=f"{backbone}-gpu", **EXACT)
        there = bench.train(1, *THREE, backbone=backbone, name=f"{backbone}-cpu", **CPU)
        rows.append(
            {
                "backbone": backbone, "GPU": here.losses, "CPU": there.losses,
                "relative difference": furthest(here.losses, there.losses),
            }
        )  # fmt: skip
    far = [row for row in rows if row["relative difference"] > 1e-4]
    assert not far, f"losses differ from a CPU's by more than 1e-4: {far}"
    return bench.figures


def synchronisations(bench: Bench) -> Figures:
    """Where the host waits for the GPU in a step; more microbatches must not add any wait."""
    counted: dict[int, Any] = {}
    watched = {"PULSE_CHECK_SYNCS": "1"}
    for count in (2, 6):
        size = ("--global-batch-size", str(2 * count), "--train-iters", "4")
        bench.train(1, *size, name=f"{count}", **watched)
        counted[count] = bench.last_seen[0]["syncs"]
    few, many = (sum(counted[count].values()) for count in (2, 6))
    bench.figures |= {
        "waits of a step": few,
        "waits that a microbatch adds": (many - few) / 4,
        "where": [
            {"line": line, "2 microbatches": counted[2][line], "6 microbatches": counted[6][line]}
            for line in sorted(counted[2] | counted[6])
        ],
    }
    more = [line for line, number in counted[6].items() if number > counted[2][line]]
    assert many <= few, f"the host waits for every microbatch, at {', '.join(more)}"
    return bench.figures


def families(bench: Bench) -> Figures:
    """Three steps of every tiny family in bf16: finite losses that change."""
    from tests.integration.test_families import FAMILIES, write_latents

    rows = bench.rows("families")
    runs: dict[str, tuple[str, list[str]]] = {"unet": ("unet", [])}
    for name, family in FAMILIES.items():
        latents = bench.folder / f"{name}-latents"
        if not latents.exists():
            write_latents(latents, family)
        own = ["--pulse-backbone", family.backbone, "--pulse-data", f"latents:{latents}"]
        for option in family.options:
            own += ["--pulse-option", option]
        runs[name] = "none", own
    wrong = []
    for name, (backbone, own) in runs.items():
        try:
            run = bench.train(1, *THREE, "--bf16", *own, backbone=backbone, name=name)
        except RuntimeError as error:
            rows.append({"family": name, "losses": "", "step ms": "", "peak MB": "", "": error})
            wrong.append(name)
            continue
        seen = bench.last_seen[0]
        rows.append(
            {
                "family": name,
                "losses": " ".join(f"{loss:.4f}" for loss in run.losses),
                "step ms": round(1e3 * min(seen["step_s"]), 1),
                "peak MB": round(seen["peak_bytes"] / 1e6),
            }
        )
        if not all(map(math.isfinite, run.losses)) or len(set(run.losses)) < 2:
            wrong.append(name)
    assert not wrong, f"these do not train in bf16: {', '.join(wrong)}"
    return bench.figures


def deterministic(bench: Bench) -> Figures:
    """The same training twice in deterministic mode: losses, norms and weights bit for bit."""
    from tests.integration.runs import assert_same

    flags = [*THREE, "--bf16"] if bench.on_gpu else [*THREE]
    for backbone in ("uvit", "unet"):
        first = bench.train(1, *flags, backbone=backbone, name=f"{backbone}-1")
        again = bench.train(1, *flags, backbone=backbone, name=f"{backbone}-2")
        assert_same(again, first)
        bench.figures[f"losses of {backbone}"] = first.losses
    return bench.figures


def split_backwards(bench: Bench) -> Figures:
    """Every family alone, whole and with its weight gradients left for later: bit for bit."""
    from megatron_pulse.integration.megatron import compat

    compat.install()
    from dataclasses import replace

    from tests.runtime.equality import Case, plan_of, split
    from tests.runtime.tiny import FAMILIES, backbone

    cases = []
    for family in FAMILIES:
        case = Case("sequential", 4, dtype="float32")
        whole = plan_of(backbone(family), case, 1).step(4).schedule
        cases += [(family, case), (family, replace(case, schedule=split(whole, 2)))]
    found = bench.cases(1, cases, "alone")
    return compared(bench, [(f, "split") for f in FAMILIES], found[1::2], found[::2])


def moved_activations(bench: Bench) -> Figures:
    """Every family alone with all forwards first, activations on the host from anywhere to anywhere
    and computed again anywhere, whole and split: the bits of a run that keeps them."""
    from megatron_pulse.integration.megatron import compat

    compat.install()
    import random
    from dataclasses import replace

    from megatron_pulse.planner.schedule.operations import OpType
    from tests.runtime.equality import Case, away_anywhere, computed_apart, plan_of, split
    from tests.runtime.tiny import FAMILIES, backbone

    cases, names = [], []
    for family in FAMILIES:
        kept = Case("sequential", 4, dtype="bfloat16" if bench.on_gpu else "float32")
        case = replace(kept, recompute=3, offload=2, selective=1)
        plan = plan_of(backbone(family), case, 1)
        schedule = plan.step(4).schedule
        orders = [sorted(o, key=lambda op: op.kind is not OpType.FORWARD) for o in schedule.order]
        whole = replace(schedule, order=tuple(map(tuple, orders)))
        cases.append((family, replace(kept, schedule=whole)))
        for late in (False, True):
            chosen = split(whole, 2) if late else whole
            chance = random.Random(family)
            chosen = computed_apart(chosen, plan.partition, case.recompute, chance)
            chosen = away_anywhere(chosen, plan.partition, case, chance)
            cases.append((family, replace(case, schedule=chosen)))
            names.append((family, "split" if late else "whole"))
    found = bench.cases(1, cases, "moved")
    assert all(one.offload_bytes > 0 for i, one in enumerate(found) if i % 3), "nothing moved"
    assert all(one.num_left_out > 0 for i, one in enumerate(found) if i % 3), "nothing left out"
    kept_found = [found[i] for i in range(0, len(found), 3) for _ in range(2)]
    return compared(bench, names, [one for i, one in enumerate(found) if i % 3], kept_found)


def engine(bench: Bench) -> Figures:
    """Transformer Engine's layers, whole and with weight gradients left for later: bit for bit."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise Skipped("Transformer Engine is not installed")
    join()
    from tests.model_specs.engine.waiting import layers, steps

    ways = layers("cuda")
    bench.figures["ways"] = [{"way": way, **of} for way, of in ways.items()]
    late = steps("cuda")
    bench.figures["steps"] = [{"step": name, "differs": of} for name, of in late.items()]
    wrong = [way for way, of in ways.items() if of["differs"] or of["waited"] != of["expected"]]
    wrong += [name for name, differs in late.items() if differs]
    assert not wrong, f"these differ: {', '.join(wrong)}"
    return bench.figures


def compared(
    bench: Bench, names: list[tuple[str, str]], got: list[Any], expected: list[Any]
) -> Figures:
    """Add to the table of cases; raise AssertionError with all whose numbers are not those
    expected, to the bit."""
    from tests.runtime.equality import differences

    rows = bench.rows("cases")
    for (family, what), mine, theirs in zip(names, got, expected, strict=True):
        found = {
            "losses": mine.losses != theirs.losses,
            "gradients": bool(differences(mine.gradients, theirs.gradients)),
            "weights": bool(differences(mine.parameters, theirs.parameters)),
        }
        different = ", ".join(kind for kind, is_so in found.items() if is_so)
        apart = mine.num_weight_gradients
        rows.append(
            {"family": family, "case": what, "differ": different or "nothing",
             "weight gradients apart": apart}
        )  # fmt: skip
        assert bool(apart) == ("split" in what), f"{family} {what}: {apart} weight gradients apart"
    wrong = [f"{row['family']} {row['case']}" for row in rows if row["differ"] != "nothing"]
    assert not wrong, f"{len(wrong)} of {len(rows)} cases differ: {', '.join(wrong)}"
    return bench.figures


def checkpoints(bench: Bench) -> Figures:
    """Saved here, continued on a CPU, continued here: the losses of a run that was not stopped."""
    steady = ["--global-batch-size", "8", "--lr-decay-style", "constant"]
    save = ["--save", str(bench.folder / "saved"), "--save-interval", "3"]
    got = []
    for steps, where in ((3, EXACT), (6, CPU), (9, EXACT)):
        flags = [*steady, *save, "--train-iters", str(steps)]
        got += bench.train(1, *flags, name=f"to-{steps}", **where).losses
    whole = bench.train(1, *steady, "--train-iters", "9", name="whole", **CPU).losses
    bench.figures |= {"losses": got, "of one run on a CPU": whole}
    bench.figures["relative difference"] = far = furthest(got, whole)
    limit = 1e-3 if bench.on_gpu else 0.0
    assert far <= limit, f"losses differ by {far:.1e}, more than {limit:g}"
    return bench.figures


def samples(bench: Bench) -> Figures:
    """A checkpoint is sampled from and exported."""
    run, picture = bench.folder / "saved", bench.folder / "digits.png"
    weights = bench.folder / "uvit.safetensors"
    bench.train(1, *THREE, "--save", str(run), "--save-interval", "3")
    bench.pulse(
        "sample", "--load", run, "-o", picture, "--classes", "0-3", "--per-class", "2",
        "--steps", "4",
    )  # fmt: skip
    weights.unlink(missing_ok=True)
    bench.pulse("export", "--load", run, "--to", weights)
    return {"picture, bytes": _size(picture), "weights, bytes": _size(weights)}


def _size(path: Path) -> int:
    assert path.stat().st_size > 0, f"{path} is empty"
    return path.stat().st_size
