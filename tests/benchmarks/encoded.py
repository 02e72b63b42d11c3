"""Encoders in the loop: runs of every family that reads text, in every way and layout, bit for bit.

    .venv/bin/python -m tests.benchmarks.encoded                      # all: 8 minutes on two cores
    .venv/bin/python -m tests.benchmarks.encoded --families sd flux --steps 3

Tiny random encoders, autoencoders and backbones on captioned digits, in Megatron's own loop. What
is compared with one process that encodes in front: losses, gradient norms, validation and weights,
as the parameters are and as the optimizer has them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.main import main as pulse
from megatron_pulse.planner.layout.layouts import FOLD_EXACT, FOLD_SOFT, ROW, WHOLE
from megatron_pulse.planner.partition.legal_cuts import largest_fold
from megatron_pulse.planner.tune.config import Config, Recompute
from model_specs import load_backbone
from tests.benchmarks import bits
from tests.benchmarks.report import Flags, Report
from tests.cli.test_data import make_vae
from tests.data.captioned import captioned_digits
from tests.encoders.pipelines import LENGTH, make_pipeline
from tests.integration.runs import Run, pipeline, run

UNET = {
    "sample_size": 4, "block_out_channels": "8,16", "norm_num_groups": 4, "layers_per_block": 1,
    "transformer_depth": "0,1", "context_length": LENGTH,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A backbone with its options, and the kinds of its text encoders (kind, width, projection)."""

    backbone: str
    options: Mapping[str, Any]
    encoders: tuple[Any, ...]
    size: int = 8

    @property
    def largest_fold(self) -> int:
        """The most devices with which skips stay at home."""
        backbone = load_backbone(self.backbone, self.options)
        return largest_fold(len(backbone.layers), backbone.skips)

    @property
    def flags(self) -> list[str]:
        """Of training."""
        named = (("--pulse-option", f"{name}={value}") for name, value in self.options.items())
        return ["--pulse-backbone", self.backbone, *(flag for pair in named for flag in pair)]


FAMILIES = {
    "sd": Family("sd-tiny", UNET | {"cross_attention_dim": 16}, (("clip", 16, 16),), 4),
    "sdxl": Family(
        "sdxl-tiny",
        UNET
        | {"cross_attention_dim": 20, "pooled_dim": 10}
        | {"block_out_channels": "8,16,16", "transformer_depth": "0,1,1"},
        ("clip", ("projected", 12, 10)),
        4,
    ),
    "sd3": Family(
        "sd3-tiny",
        {"context_length": LENGTH + 5},
        (("projected", 8, 8), ("projected", 12, 12), ("t5", 24)),
    ),
    "flux": Family("flux-tiny", {}, (("clip", 20, 20), ("t5", 24))),
    "pixart": Family("pixart-tiny", {}, (("t5", 24),)),
    "hunyuan": Family("hunyuan-tiny", {}, (("bert", 24), ("t5", 16))),
}
LAYOUTS = {
    "filled, one": Config(1, 1, 1, 2, WHOLE),
    "filled, fold of 2, split": Config(2, 1, 1, 2, FOLD_EXACT, split=True),
    "filled, soft fold of 2, recomputed": Config(2, 1, 1, 4, FOLD_SOFT, recompute=Recompute.ALWAYS),
    "filled, fold of 4, split": Config(4, 1, 1, 2, FOLD_EXACT, split=True),
    "filled, sequence of 2": Config(2, 1, 1, 1, ROW),
    "filled, sequence of 2, split, recomputed": Config(
        2, 1, 1, 2, ROW, split=True, recompute=Recompute.ALWAYS
    ),
    "filled, sequence of 4, split": Config(4, 1, 1, 2, ROW, split=True),
}


class Case:
    """One family's folders, and its runs."""

    def __init__(self, family: Family, root: Path, steps: int) -> None:
        self.family, self.root = family, root
        self.folder = make_pipeline(root / "pipeline", *family.encoders)
        make_vae(
            self.folder / "vae", in_channels=1, out_channels=1, latent_channels=4,
            block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=0.5, shift_factor=0.1,
        )  # fmt: skip
        data = captioned_digits(root)
        self.source = data
        self.steps = steps
        self.common = ["--train-iters", str(steps), "--pulse-class-dropout", "0.4"]
        self.common += ["--pulse-conditioning", "send"]  # copies of embedders add in another order
        self.encodes = ["--pulse-data", data, "--pulse-encoders", str(self.folder)]
        self.costs = root / "encoders.json"
        options = [f"--option={name}={value}" for name, value in family.options.items()]
        self.named = ["--backbone", family.backbone, *options]
        with redirect_stdout(StringIO()):
            argv = ["profile", *self.named, "--encoders", str(self.folder), "--device", "cpu"]
            assert pulse([*argv, "-o", str(self.costs)]) == 0

    def run(self, ranks: int, *flags: str) -> Run:
        """With flags that name backbone and batch."""
        batch = ["--global-batch-size", "8", *self.family.flags]
        return run(ranks, *batch, *self.common, *flags, backbone="none")

    def filled(self, config: Config) -> Run:
        """By a plan that fills; a run that is stopped in the middle, and goes on."""
        from tests.integration.test_plans import make_plan  # imports Megatron

        kind = config.pipeline, config.layout.name, config.micro_batch_size, config.split
        file = self.root / f"{'-'.join(map(str, kind)).replace(' ', '-')}.json"
        family = self.family
        plan = make_plan(file, config, family.backbone, family.options, self.costs)
        given = [*self.common, *self.encodes, "--pulse-plan", str(plan)]
        given += ["--micro-batch-size", str(config.micro_batch_size)]
        train = partial(run, config.pipeline, *given, backbone="none")
        return bits.stopped(train, plan.with_suffix(""))

    def stored(self) -> Run:
        """On latents and states that were written."""
        out = self.root / "latents"
        size = str(2 * self.family.size)
        argv = ["data", "write-latents", "--from", self.source, "--image-size", size, *self.named]
        argv += ["--channels", "1", "--encoders", str(self.folder), "--dtype", "fp32"]
        with redirect_stdout(StringIO()):
            assert pulse([*argv, "-o", str(out)]) == 0
        return self.run(2, "--pulse-data", f"latents:{out}", *pipeline(2))

    def alone(self, size: str) -> Run:
        """One process that encodes in front."""
        return self.run(1, *self.encodes, "--micro-batch-size", size)

    def ways(self) -> Iterator[bits.Way]:
        """Ways to train that are compared."""
        in_front = partial(self.run, 2, *self.encodes, *pipeline(2))
        yield bits.Way("in front, fold of 2", in_front, ("2",))
        yield bits.Way("stored, fold of 2", self.stored, ("2",))
        for name, config in LAYOUTS.items():
            if config.layout == FOLD_EXACT and config.pipeline > self.family.largest_fold:
                continue
            yield bits.Way(name, partial(self.filled, config), (str(config.micro_batch_size),))


def compare(report: Report, name: str, family: Family, steps: int, *more: str) -> list[bool]:
    """Of each way whether a family's runs are the same as one process in front."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(family, Path(folder), steps)
        case.common += more
        return list(bits.compare(report, name, case.ways(), case.alone))


def main() -> None:
    """Compare, and exit with 1 where anything differs."""
    flags = Flags(__doc__)
    flags.add("--families", list(FAMILIES), nargs="+", choices=list(FAMILIES))
    flags.add("--steps", 5, "of each run")
    args = flags.parse_args()
    prepare_megatron()
    torch.set_num_threads(1)  # as ranks have: the bits of states depend on it
    report = Report(args.json)
    same = [s for name in args.families for s in compare(report, name, FAMILIES[name], args.steps)]
    print(f"{sum(same)} of {len(same)} the same bit for bit")
    sys.exit(not all(same))


if __name__ == "__main__":
    main()
