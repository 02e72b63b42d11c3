"""What planning believes beside what is: layers' times, memory, what is too large, loading."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.gpu_check.alone import alone, join, models, options, timed
from tests.gpu_check.bench import Bench
from tests.gpu_check.check import Figures

LEEWAY = 1.15
"""By how much a peak may be above what was predicted: with more, plans run out of memory."""


def profiles(bench: Bench) -> Figures:
    """Measured profiles beside analytic ones of the same device."""
    from megatron_pulse.profile.files import load_profile

    rows = bench.rows("a sample")
    figures = analytic_flags(bench)
    for name, (size, given) in models(bench).items():
        chain = ["--backbone", name, *options(given), "--micro-batch-size", str(size)]
        found = {}
        for source, own in (
            ("measured", ["--once-per-kind", "--seconds-per-layer", "1"]),
            ("analytic", figures),
        ):
            if own:
                file = bench.folder / f"{name}-{source}.json"
                bench.pulse("profile", *chain, *own, "-o", file)
                found[source] = load_profile(file).times_at(size)
        for source, times in found.items():
            forward = sum(t.forward_s for t in times) / size
            backward = sum(t.input_grad_s + t.weight_grad_s for t in times) / size
            assert forward > 0 and backward > 0, f"{name}, {source}: {forward} s, {backward} s"
            rows.append(
                {
                    "model": name, "source": source, "forward ms": 1e3 * forward,
                    "backward ms": 1e3 * backward,
                    "saved MB": sum(t.saved_bytes for t in times) / size / 1e6,
                }
            )  # fmt: skip
    if not figures:
        bench.figures["analytic"] = f"left out: the peaks of {bench.machine.gpus[0]} are not known"
    return bench.figures


def analytic_flags(bench: Bench) -> list[str]:
    """For ``pulse profile``: this device's preset, or figures of a CPU; nothing if not known."""
    from megatron_pulse.profile.roofline import known_device

    if not bench.on_gpu:
        peaks = ["--peak-tflops", "0.05", "--bandwidth-gbs", "16", "--memory-gb", "12"]
        return [*peaks, "--dtype", "float32"]
    device = known_device(bench.machine.gpus[0])
    return ["--preset", device.name, "--dtype", "bfloat16"] if device else []


def cluster(bench: Bench, num_devices: int) -> Path:
    """A cluster file of so many of these devices."""
    file = bench.folder / "cluster.yaml"
    memory_gb = 12.0
    if bench.on_gpu:
        import torch

        memory_gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    figures = (100, 1000) if bench.on_gpu else (0.05, 16)  # times are those of the profile
    device = "{{tflops: {}, bandwidth_gbs: {}}}".format(*figures)
    link = "{kind: loopback, bandwidth_gbs: 3, latency_us: 100, shared: device}"
    file.write_text(
        f"name: here\nnodes: 1\ndevices_per_node: {num_devices}\nmemory_gb: {memory_gb:.1f}\n"
        f"device: {device}\nlinks:\n  intra_node: {link}\nall_reduce_efficiency: 0.3\n"
    )
    return file


def planned(bench: Bench, name: str, num_devices: int, *flags: str) -> tuple[Path, Path]:
    """A profile of a model on this device, and a plan for so many as one pipeline."""
    size, given = models(bench)[name]
    profile, plan = bench.folder / f"{name}.json", bench.folder / f"{name}-plan.json"
    if not profile.exists():
        bench.pulse(
            "profile", "--backbone", name, *options(given), "--micro-batch-size", str(size),
            "--once-per-kind", "--seconds-per-layer", "1", "-o", profile,
        )  # fmt: skip
    plan.unlink(missing_ok=True)
    bench.pulse(
        "tune", "--profile", profile, "--cluster", cluster(bench, num_devices),
        "--global-batch-size", str(4 * size), "--micro-batch-size", str(size), "--seconds", "3",
        "--pipeline", str(num_devices), "--tensor", "1", *flags, "-o", plan,
    )  # fmt: skip
    return profile, plan


def data_for(bench: Bench, name: str) -> str:
    """Random latents with all that the model reads."""
    from tests.integration.test_families import Family, write_latents

    folder = bench.folder / f"{name}-latents"
    if not folder.exists():
        given = models(bench)[name][1]
        write_latents(folder, Family(name, options=tuple(f"{k}={v}" for k, v in given.items())))
    return f"latents:{folder}"


def plans(bench: Bench) -> Figures:
    """A run's peak and steps beside what its plan predicts, with and without recomputation; on a
    CPU the peak is the process's, which is no prediction's."""
    rows = bench.rows("runs")
    for name in models(bench):
        for way in ("--no-recompute", "--recompute"):
            _, plan = planned(bench, name, 1, way)
            said = bench.pulse(
                "run", "--nproc-per-node", "1", "launch/pretrain_diffusion.py", "--pulse-plan",
                plan, "--pulse-data", data_for(bench, name), "--train-iters", "8", "--lr", "1e-4",
                "--log-interval", "4", "--pulse-no-progress",
            )  # fmt: skip
            peaks = re.findall(r"peak ([\d.e+-]+) GB \((\w+)\)", said)
            speeds = re.findall(r"\| ([\d.e+-]+) samples/s \|", said)
            assert peaks and speeds, "the log says no peak and no throughput"
            predicted = json.loads(plan.read_text())["predicted"]
            memory_gb = max(predicted["memory_bytes"]) / 1e9
            step_s = 4 * models(bench)[name][0] / float(speeds[-1])
            rows.append(
                {
                    "model": name, "": way, "predicted GB": memory_gb,
                    "peak GB": float(peaks[-1][0]), "of": peaks[-1][1],
                    "peak / predicted": float(peaks[-1][0]) / memory_gb,
                    "predicted ms": 1e3 * predicted["step_s"], "step ms": 1e3 * step_s,
                    "step / predicted": step_s / predicted["step_s"],
                }
            )  # fmt: skip
    if not bench.on_gpu:
        bench.figures["verdict"] = "that it runs: a process has more in memory than its model"
    over = [r for r in rows if r["of"] == "CUDA" and r["peak / predicted"] > LEEWAY]
    assert not over, f"peaks are more than {LEEWAY:g} times what was predicted: {over}"
    return bench.figures


def offload(bench: Bench) -> Figures:
    """Steps with all forwards first, activations kept and on the host: seconds, and the peak, which
    must be less by one of the two microbatches that are away."""
    import torch

    from megatron_pulse.planner.layout.placement import make_placement
    from megatron_pulse.planner.schedule.operations import Operation, Schedule
    from megatron_pulse.runtime.measure.host_copies import host_copies

    config = join()
    order = "F0 F1 F2 O1 F3 O2 B0 L1 B1 L2 B2 B3".split()
    moved = tuple(Operation.parse(f"{word[0]}0:{word[1]}") for word in order)
    rows = bench.rows("steps")
    for name in list(models(bench))[:2]:
        found = {}
        for way, ops in (("kept", [op for op in moved if not op.kind.copies]), ("away", moved)):
            placement = make_placement("sequential", 1, 1)
            schedule = Schedule("all first", placement, 4, (tuple(ops),))
            one = alone(bench, config, name, schedule=schedule, offload=int(way == "away"))
            one.step()
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            host, whole = one.seconds()
            row = {"model": name, "activations": way, "ms": 1e3 * whole, "host ms": 1e3 * host}
            executor = one.pipeline.executor(4)
            row["MB away"] = executor.offload_bytes / one.steps / 1e6
            if bench.on_gpu:
                row["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
            rows.append(row)
            found[way] = row
            one.pipeline, one.batches = None, []
            del executor
        assert found["away"]["MB away"] > 0 == found["kept"]["MB away"], "nothing was moved"
        if bench.on_gpu:
            saved = found["kept"]["peak MB"] - found["away"]["peak MB"]
            assert saved > 0.4 * found["away"]["MB away"], f"the peak is {saved:.0f} MB lower"
    if not bench.on_gpu:
        bench.figures["verdict"] = "that it runs: a CPU's peak is not measured"
    device = torch.device(bench.machine.device, 0)
    bench.figures["GB/s each way"], bench.figures["us of an empty copy"] = host_copies(device)
    return bench.figures


def auto(bench: Bench) -> Figures:
    """Measured, planned and trained by one command."""
    name = "sd-v2.1" if bench.on_gpu else "uvit-tiny"
    said = bench.pulse(
        "run", "--nproc-per-node", "1", "launch/pretrain_diffusion.py", "--pulse-backbone", name,
        *options(models(bench)[name][1], "--pulse-option"), "--pulse-auto",
        "--global-batch-size", "8", "--pulse-data", data_for(bench, name), "--train-iters", "4",
        "--lr", "1e-4", "--log-interval", "2", "--pulse-no-progress",
        "--save", bench.folder / "run", *["--bf16"] * bench.on_gpu,
    )  # fmt: skip
    speeds = re.findall(r"\| ([\d.e+-]+) samples/s \|", said)
    expected = re.findall(r"([\d.e+-]+) samples/s expected", said)
    assert speeds and expected, "the log says no throughput, or none that is expected"
    return {
        "model": name, "samples/s": float(speeds[-1]), "expected samples/s": float(expected[-1])
    }  # fmt: skip


def too_large(bench: Bench) -> Figures:
    """A profile of what does not fit ends with one message that names the layer, and status 2."""
    said = bench.pulse(
        "profile", "--backbone", "uvit-h", "--micro-batch-size", "1000000", "-o",
        bench.folder / "no.json", status=2,
    )  # fmt: skip
    last = said.strip().splitlines()[-1]
    assert "does not fit on cuda at microbatch size 1000000" in said, last
    assert "Traceback" not in said, "a traceback was shown"
    return {"said": last}


def loader(bench: Bench) -> Figures:
    """Images of a folder to microbatches, by the number of workers; copies to a GPU from pageable
    and from pinned memory."""
    import time

    import numpy as np
    from PIL import Image

    from megatron_pulse.data.build import open_dataset
    from megatron_pulse.data.microbatches import DiffusionLoader
    from megatron_pulse.data.sampler import MicrobatchSampler
    from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective

    side, number = (256, 64) if bench.on_gpu else (64, 40)
    folder = bench.folder / "images"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(number):
        low = rng.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(low).resize((side, side)).save(folder / f"{i}.jpg")
    dataset, _ = open_dataset(f"folder:{folder}", image_size=side)
    rows = bench.rows("samples/s")
    count = 40 if bench.on_gpu else 10
    for workers in (0, 4, 8):
        sampler = MicrobatchSampler(len(dataset), 0, 8, 0, 1, seed=1)
        process = DiffusionProcess(Objective.EPSILON)
        microbatches = iter(DiffusionLoader(dataset, sampler, process, 1, num_workers=workers))
        assert next(microbatches)["noisy"].shape == (8, 3, side, side)
        began = time.perf_counter()
        for _ in range(count):
            next(microbatches)
        rows.append({"workers": workers, "samples/s": 8 * count / (time.perf_counter() - began)})
        del microbatches
    if bench.on_gpu:
        bench.figures["copies of 64 MB"] = copies()
    return bench.figures


def copies() -> list[dict[str, Any]]:
    """How fast, and how long the host is held up."""
    import torch

    device, rows = torch.device("cuda", 0), []
    there = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    for kind in ("pageable", "pinned"):
        here = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=kind == "pinned")

        def copy(here: Any = here) -> None:
            there.copy_(here, non_blocking=True)

        copy()
        found = [timed(copy, device) for _ in range(5)]
        held, whole = (min(row[i] for row in found) for i in (0, 1))
        rows.append({"from": kind, "GB/s": 64 / 1024 / whole, "host held up, us": 1e6 * held})
    return rows
