"""Backbones that are given their own predictions: families x layouts, bit for bit.

    .venv/bin/python -m tests.benchmarks.self_conditioning                  # 8 minutes on two cores
    .venv/bin/python -m tests.benchmarks.self_conditioning --only sd3 unet

Tiny random backbones whose input takes a prediction, on random latents, in Megatron's own loop, of
five steps some of which condition themselves. What is compared with one process: losses, gradient
norms, validation and weights, as the parameters are and as the optimizer has them; of two replicas
to rounding, of tensor-parallel ranks all but the weights. ``stopped`` goes on in the middle.
``encoded`` has its latents and texts made in the loop, in front and in idle time. The exit status
is 1 if any differs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_pulse.cli.import_megatron import prepare_megatron
from tests.benchmarks import encoded
from tests.benchmarks.bits import Way, compare, stopped
from tests.benchmarks.report import Flags, Report
from tests.integration.runs import Run, pipeline, run
from tests.integration.test_families import Family, write_latents

SHARE = "0.5"
OWN = ("in_channels=8", "out_channels=4")
_UNET = ("sample_size=8", "block_out_channels=16,32", "layers_per_block=1", *OWN)
FAMILIES: Mapping[str, Family] = {
    "unet": Family("unet-tiny", options=(*_UNET, "num_classes=3")),
    "sd": Family("sd-tiny", options=(*_UNET, "transformer_depth=1,0")),
    "controlnet": Family(
        "controlnet-tiny", options=(*_UNET, "transformer_depth=0,1", "conditioning_widths=4,8")
    ),
    "sd3": Family("sd3-tiny", options=("num_layers=6", *OWN)),
    "pixart": Family("pixart-tiny", options=OWN),
}
SPLIT_ROW = ["--pulse-placement", "sequential", "--pulse-schedule", "zb-h1"]
LAYOUTS: Mapping[str, tuple[int, list[str], list[str]]] = {
    "fold of 2": (2, pipeline(2), []),
    "fold of 4, split": (4, pipeline(4, "--pulse-schedule", "wave-split"), []),
    "soft fold of 2, recomputed": (
        2,
        pipeline(2, "--pulse-partition", "soft", "--recompute-granularity", "full"),
        [],
    ),
    "sequence of 2": (2, pipeline(2, "--pulse-placement", "sequential"), []),
    "sequence of 4, split": (4, pipeline(4, *SPLIT_ROW), []),
    "interleaved on 2": (2, pipeline(2, "--pulse-placement", "interleaved"), []),
    "sequence of 2, bf16": (2, pipeline(2, "--pulse-placement", "sequential"), ["--bf16"]),
    "fold of 2, bf16": (2, pipeline(2), ["--bf16"]),
}
"""Ranks, flags of the layout, and flags that the one process has as well."""
REPLICAS = pipeline(
    2, "--pulse-placement", "sequential", "--use-distributed-optimizer", "--overlap-grad-reduce",
    "--overlap-param-gather",
)  # fmt: skip
SHARED_OUT = pipeline(
    2, "--pulse-placement", "sequential", "--tensor-model-parallel-size", "2"
)  # fmt: skip


def ways(train: Callable[..., Run], folder: Path) -> Iterator[Way]:
    """Runs of a family."""
    for name, (ranks, flags, shared) in LAYOUTS.items():
        yield Way(name, partial(train, ranks, *flags, *shared), tuple(shared))
    row = partial(train, 2, *pipeline(2, *SPLIT_ROW))
    yield Way("sequence of 2, stopped", partial(stopped, row, folder / "kept"))
    replicas, tensors = partial(train, 4, *REPLICAS), partial(train, 4, *SHARED_OUT)
    yield Way("sequence of 2, two replicas", replicas, tolerance=1e-5)
    yield Way("sequence of 2, tensors on 2", lambda: replace(tensors(), weights={}), tolerance=1e-5)


def compare_family(report: Report, name: str, steps: int) -> list[bool]:
    """Of each way whether it is as it should."""
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as root:
        write_latents(Path(root) / "latents", family)
        flags = ["--pulse-backbone", family.backbone, "--pulse-data", f"latents:{root}/latents"]
        flags += [word for option in family.options for word in ("--pulse-option", option)]
        flags += ["--pulse-self-conditioning", SHARE, "--pulse-conditioning", "send"]
        flags += ["--global-batch-size", "8", "--train-iters", str(steps)]

        def train(ranks: int, *more: str) -> Run:
            return run(ranks, *flags, *more, backbone="none")

        return list(compare(report, name, ways(train, Path(root)), partial(train, 1)))


def main() -> None:
    """Compare, and exit with 1 where anything differs."""
    flags, names = Flags(__doc__), [*FAMILIES, "encoded"]
    flags.add("--only", names, nargs="+", choices=names)
    flags.add("--steps", 5, "of each run")
    args = flags.parse_args()
    prepare_megatron()
    report, same = Report(args.json), []
    for name in args.only:
        if name == "encoded":
            sd, own = encoded.FAMILIES["sd"], dict(option.split("=") for option in OWN)
            family = replace(sd, options={**sd.options, **own})
            more = "--pulse-self-conditioning", SHARE
            same += encoded.compare(report, name, family, args.steps, *more)
        else:
            same += compare_family(report, name, args.steps)
    print(f"{sum(same)} of {len(same)} equal")
    sys.exit(not all(same))


if __name__ == "__main__":
    main()
