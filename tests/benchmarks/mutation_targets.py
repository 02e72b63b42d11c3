"""What is mutated: files, the commands that read them, and the check of what those accept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.mutation_checks import (
    check_captions,
    check_cluster,
    check_encoders,
    check_events,
    check_latents,
    check_model,
    check_nothing,
    check_order,
    check_plan,
    check_plan_of_backbone,
    check_profile,
    check_scheduler,
    check_table,
    check_times,
    check_trace,
)

Check = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Target:
    """A file of the folder ``make`` fills, the commands that read it, and the check of what they
    accept: how the file and what was read differ. ``heavy`` needs torch; of one that is ``hashed``
    no flipped bit may be accepted."""

    file: str
    commands: tuple[tuple[str, ...], ...]
    check: Check
    heavy: bool = False
    hashed: bool = False


_TUNE = ("--cluster", "cpu", "--global-batch-size", "16", "--seconds", "0.3", "--solver", "none",
         "--micro-batch-size", "2")  # fmt: skip
_GIVEN = ("schedule", "--times", "times.json", "-p", "2", "-m", "4")
_SEARCHED = ("--seconds", "0.3", "--solver", "none", "--no-cache")
_TIMES = (*_GIVEN, *_SEARCHED)
_VERIFY = ("data", "info", "latents:latents", "--verify")
_LINKS = ("-p", "2", "-m", "4", *_SEARCHED)

TARGETS: dict[str, Target] = {
    "plan": Target(
        "plan.json",
        (
            ("show", "plan.json", "--grid"),
            ("show", "plan.json", "-o", "p.svg"),
            ("show", "plan.json", "-o", "p.html"),
            ("show", "plan.json", "-o", "p.json"),
            ("compare", "plan.json", "trace.json", "--json"),
        ),
        check_plan,
        hashed=True,
    ),
    "plan and backbone": Target(
        "plan.json", (("check", "plan.json"),), check_plan_of_backbone, hashed=True
    ),
    "plan of a run": Target(
        "plan.json", (("obey", "plan.json"),), check_plan_of_backbone, True, hashed=True
    ),
    "profile": Target(
        "profile.json",
        (
            ("partition", "--profile", "profile.json", "-p", "2", "--draw", "p.svg"),
            ("schedule", "--profile", "profile.json", *_LINKS),
            ("tune", "--profile", "profile.json", *_TUNE, "-o", "made.json"),
            (
                "compare",
                "plan.json",
                "trace.json",
                "--profile",
                "profile.json",
                "--write-profile",
                "w.json",
            ),
        ),
        check_profile,
        hashed=True,
    ),
    "table": Target(
        "table.json",
        (("profile", "--from-table", "table.json", "--preset", "V100-32GB", "-o", "made.json"),),
        check_table,
    ),
    "times": Target(
        "times.json",
        (_TIMES, (*_TIMES, "--split"), (*_TIMES, "--draw", "t.svg")),
        check_times,
    ),
    "cluster": Target(
        "cluster.yaml",
        (
            ("clusters", "cluster.yaml"),
            ("tune", "--profile", "profile.json", *_TUNE[2:], "--cluster", "cluster.yaml"),
        ),
        check_cluster,
        hashed=True,
    ),
    "encoders": Target(
        "encoders.json",
        (("tune", "--profile", "profile.json", *_TUNE, "--encoders", "encoders.json"),),
        check_encoders,
        hashed=True,
    ),
    "trace": Target(
        "trace.json",
        (
            ("compare", "plan.json", "trace.json"),
            ("compare", "plan.json", "trace.json", "-o", "c.svg"),
            ("compare", "plan.json", "trace.json", "-o", "c.html"),
        ),
        check_trace,
        hashed=True,
    ),
    "order": Target("order.csv", ((*_GIVEN, "--schedule", "order.csv"),), check_order),
    "latents": Target(
        "latents/meta.json",
        (("data", "info", "latents:latents"), _VERIFY),
        check_latents,
        True,
        hashed=True,
    ),
    **{
        what: Target(f"latents/{file}", (_VERIFY,), check_latents, True, hashed=True)
        for what, file in {
            "rows of latents": "latent-00000.npy",
            "null conditioning": "null-context.npy",
            "hashes of rows": "hashes-00001.bin",
        }.items()
    },
    **{
        f"checkpoint's {file}": Target(
            f"saved/release/{file}",
            (
                ("checkpoint", "verify", "saved"),
                ("export", "--load", "saved", "--to", "exported/model.safetensors"),
            ),
            check_nothing,
            True,
            hashed=True,
        )
        for file in ("metadata.json", ".metadata", "__0_0.distcp")
    },
    "newest checkpoint's name": Target(
        "saved/latest_checkpointed_iteration.txt",
        (("checkpoint", "verify", "saved"),),
        check_nothing,
        True,
        hashed=True,
    ),
    "captions": Target(
        "captions/metadata.jsonl",
        (("data", "info", "captions:captions", "--image-size", "8"),),
        check_captions,
        True,
    ),
    "picture": Target(
        "captions/1.png",
        (("data", "info", "captions:captions", "--image-size", "8", "--verify"),),
        check_captions,
        True,
    ),
    "weights": Target(
        "pipeline/transformer/diffusion_pytorch_model-00002-of-00005.safetensors",
        (("import", "--from", "pipeline", "--to", "new"),),
        check_model,
        True,
    ),
    "model": Target(
        "pipeline/transformer/config.json",
        (("import", "--from", "pipeline", "--to", "new"),),
        check_model,
        True,
    ),
    "scheduler": Target(
        "pipeline/scheduler/scheduler_config.json",
        (("import", "--from", "pipeline", "--to", "new"),),
        check_scheduler,
        True,
    ),
    "index": Target(
        "pipeline/transformer/diffusion_pytorch_model.safetensors.index.json",
        (("import", "--from", "pipeline", "--to", "new"),),
        check_model,
        True,
    ),
    "events": Target(
        "events/a.tfevents.0",
        (("curve", "--tensorboard-dir", "events", "-o", "loss.png"),),
        check_events,
        True,
    ),
}
"""By name; every one is drawn as often."""


def obey_plan(path: str) -> int:
    """What a rank does with ``--pulse-plan`` before it builds anything."""
    import sys

    from megatron_pulse.integration.flags.startup_checks import FlagError
    from megatron_pulse.integration.planning.run_plan import num_microbatches, plan_run
    from megatron_pulse.integration.setup import read_command_line
    from model_specs import load_backbone

    os.environ |= {"WORLD_SIZE": "4", "RANK": "0"}
    flags = ("--pulse-data", "digits8", "--train-iters", "1", "--lr", "1e-3")
    sys.argv = ["pretrain_diffusion.py", "--pulse-plan", path, *flags]
    line, options, given = read_command_line()
    args = line.args
    if line.faults:
        raise FlagError([*line.faults])
    try:
        backbone = load_backbone(options.backbone, options.options)
        plan_run(args, options, backbone, given).step(num_microbatches(args))
    except ValueError as error:
        raise FlagError([str(error)]) from error  # as the run does
    return 0
