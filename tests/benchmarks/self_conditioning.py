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

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_pulse.cli.import_megatron import prepare_megatron
from tests.benchmarks import encoded
from tests.integration.runs import Run, assert_equal_to_rounding, assert_same, pipeline, run
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
STOPPED = "sequence of 2, stopped"
ROUNDED = ("sequence of 2, two replicas", "sequence of 2, tensors on 2")


def ways(train: Callable[..., Run], folder: Path) -> Iterator[tuple[str, list[str], Run, float]]:
    """Runs of a family: what they are, what the one process has as well, and their tolerance."""
    for name, (ranks, flags, shared) in LAYOUTS.items():
        yield name, shared, train(ranks, *flags, *shared), 0.0
    row = [*pipeline(2, *SPLIT_ROW), "--save", str(folder / "kept"), "--save-interval", "2"]
    first, rest = train(2, *row, "--exit-interval", "2"), train(2, *row)
    joined = replace(
        rest, losses=first.losses + rest.losses, grad_norms=first.grad_norms + rest.grad_norms
    )
    yield STOPPED, [], joined, 0.0
    yield ROUNDED[0], [], train(4, *REPLICAS), 1e-5
    shared_out = pipeline(2, "--pulse-placement", "sequential", "--tensor-model-parallel-size", "2")
    yield ROUNDED[1], [], replace(train(4, *shared_out), weights={}), 1e-5


def compare(name: str, steps: int) -> Iterator[tuple[str, str]]:
    """Each way of a family and how it differs; empty where it does not."""
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as root:
        write_latents(Path(root) / "latents", family)
        flags = ["--pulse-backbone", family.backbone, "--pulse-data", f"latents:{root}/latents"]
        flags += [word for option in family.options for word in ("--pulse-option", option)]
        flags += ["--pulse-self-conditioning", SHARE, "--pulse-conditioning", "send"]
        flags += ["--global-batch-size", "8", "--train-iters", str(steps)]

        def train(ranks: int, *more: str) -> Run:
            return run(ranks, *flags, *more, backbone="none")

        expected: dict[tuple[str, ...], Run] = {}
        for way, shared, got, tolerance in ways(train, Path(root)):
            if tuple(shared) not in expected:
                expected[tuple(shared)] = train(1, *shared)
            yield way, _difference(got, expected[tuple(shared)], tolerance)


def compare_encoded(steps: int) -> Iterator[tuple[str, str]]:
    """The same with encoders in the loop."""
    options = dict(option.split("=") for option in OWN)
    sd = encoded.FAMILIES["sd"]
    with tempfile.TemporaryDirectory() as root:
        case = encoded.Case(replace(sd, options={**sd.options, **options}), Path(root), steps)
        case.common += ["--pulse-self-conditioning", SHARE]
        expected: dict[int, Run] = {}
        for way, size, make in case.ways():
            if size not in expected:
                expected[size] = case.run(1, *case.encodes, "--micro-batch-size", str(size))
            yield way, _difference(make(), expected[size], 0.0)


def _difference(got: Run, expected: Run, tolerance: float) -> str:
    try:
        if not got.weights:  # each rank has its part
            expected = replace(expected, weights={})
        if tolerance:
            assert_equal_to_rounding(got, expected, tolerance)
        else:
            assert_same(got, expected)
    except AssertionError as error:
        return f"DIFFERS: {str(error)[-600:]}"
    return ""


def main() -> None:
    """Compare, and exit with 1 where anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*FAMILIES, "encoded"]
    prepare_megatron()
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=5, help="of each run (default 5)")
    args = parser.parse_args()
    wrong = total = 0
    for name in args.only:
        found = compare_encoded(args.steps) if name == "encoded" else compare(name, args.steps)
        began = time.monotonic()
        for way, difference in found:
            total, wrong = total + 1, wrong + bool(difference)
            said = difference or ("equal to rounding" if way in ROUNDED else "the same bits")
            print(f"{name:10s} {way:36s} {time.monotonic() - began:5.1f} s  {said}", flush=True)
            began = time.monotonic()
    print(f"{total - wrong} of {total} equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
