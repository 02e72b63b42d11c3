"""Memory of LoRA over a frozen base of Flux.1's width beside the plan's, on four pipeline devices.

    .venv/bin/python -m tests.benchmarks.adapter_peaks --json adapter_peaks.json   # ten minutes

The base has Flux.1's layers at their published width, two of 19 double and four of 38 single ones.
It is read from a folder in bf16 that takes no disk, and kept in bf16 or quantised as it is read.
``pulse profile`` and ``pulse tune`` make the plan; memory is measured as by ``peaks``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_pulse.cli.main import main as pulse
from megatron_pulse.planner.plan_file.plan_file import read_plan
from tests.benchmarks.peaks import Peak, measured
from tests.benchmarks.report import Flags, Report
from tests.benchmarks.starts import write_sparse
from tests.integration.runs import BASE
from tests.integration.test_families import Family, write_latents
from tests.ranks import run_ranks

CONFIG = {"guidance_embeds": True, "num_layers": 2, "num_single_layers": 4}
SIZES = ("height=32", "width=32", "text_length=64")
BASES = ("bf16", "nf4", "int8")
CLUSTER = """\
name: four
nodes: 1
devices_per_node: 4
memory_gb: 4
usable_memory: 0.95
device: {tflops: 1, bandwidth_gbs: 20}
links: {intra_node: {kind: loopback, bandwidth_gbs: 1, latency_us: 50, shared: device}}
"""


def write_plan(folder: Path, module: str, kept: list[str]) -> Path:
    """Plan of an adapter's training on four devices, as a user makes it."""
    options = [word for option in SIZES for word in ("--option", option)]
    profile, cluster, plan = folder / "profile.json", folder / "four.yaml", folder / "plan.json"
    cluster.write_text(CLUSTER)
    figures = ["--peak-tflops", "1", "--bandwidth-gbs", "20", "--memory-gb", "4"]
    of = ["--module", module, *options, "--adapter", "lora", *kept, "--dtype", "bfloat16"]
    for command in (
        ["profile", *of, *figures, "-o", str(profile)],
        ["tune", "--profile", str(profile), "--cluster", str(cluster), "--global-batch-size", "4",
         "--pipeline", "4", "--no-fsdp", "-o", str(plan)],
    ):  # fmt: skip
        if pulse(command):
            raise RuntimeError(f"pulse {' '.join(command)} failed")
    return plan


def run(base: str) -> Iterator[tuple[int, float, Peak]]:
    """Each device's planned bytes and measured peak, of a run of two steps."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_sparse(folder, "FluxTransformer2DModel", CONFIG)
        module = f"diffusers:{folder}"
        kept = [] if base == "bf16" else ["--quantization", base]
        plan = write_plan(folder, module, kept)
        write_latents(folder / "latents", Family(module, options=SIZES))
        argv = list(BASE)
        del argv[(at := argv.index("--micro-batch-size")) : at + 2]
        argv[argv.index("--pulse-timeout-s") + 1] = "600"
        argv += ["--pulse-module", module, "--bf16", "--pulse-adapter", "lora"]
        argv += [word for option in SIZES for word in ("--pulse-option", option)]
        argv += ["--pulse-plan", str(plan), "--pulse-data", f"latents:{folder}/latents"]
        argv += ["--train-iters", "2", "--eval-iters", "0"]
        argv += ["--pulse-objective", "flow", "--pulse-flow-shift", "3"]
        argv += [word.replace("--", "--pulse-") for word in kept]
        found = run_ranks(4, measured, argv, timeout_s=1500)
        _, made, faults = read_plan(plan)
        if made is None:
            raise RuntimeError(f"{plan}: {faults}")
        planned = made.predicted["memory_bytes"]
        yield from zip(range(4), planned, found, strict=True)


def main() -> None:
    """Run and print a table."""
    flags = Flags(__doc__)
    flags.add("--only", "", "bases whose name has this (bf16, nf4, int8)")
    args = flags.parse_args()
    report = Report(args.json)
    for base in (base for base in BASES if args.only in base):
        for device, planned, peak in run(base):
            off = peak.peak_bytes / planned - 1
            row: dict[str, Any] = {"base": base, "device": device, "planned_bytes": planned}
            row |= {"state_bytes": peak.state_bytes, "peak_bytes": peak.peak_bytes}
            shown = {name: f"{1e-6 * row[name]:.0f}" for name in row if name.endswith("_bytes")}
            names = {name: name.replace("_bytes", ", MB") for name in shown}
            cells = {names[name]: value for name, value in shown.items()}
            report.add(row, {"base": base, "device": device, **cells, "off": f"{off:+.1%}"})


if __name__ == "__main__":
    main()
