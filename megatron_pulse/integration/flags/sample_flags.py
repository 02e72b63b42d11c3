"""Flags of the pictures that a run draws while it trains. Imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields

from megatron_pulse.dataclass_flags import (
    FROM_ONE,
    FROM_ZERO,
    FROM_ZERO_TO_ONE,
    TO_MILLION,
    Range,
    flag,
)
from megatron_pulse.diffusion.process_flags import FlowGrid
from megatron_pulse.errors import UserError

DEFAULT_STEPS = 50
DEFAULT_GUIDANCE = 2.0
DEFAULT_BATCH = 16
"""Samples of one forward pass, of which conditional and unconditional ones are two."""
DEFAULT_ROWS = 10
"""Classes drawn if none are named."""
SEED = Range(lambda value: 0 <= value < 2**64, "0 or more, and below 2^64")
_MOST_CLASS = 1_000_000


def _classes(choice: SampleChoice) -> str | None:
    if choice.sample_classes is None:
        return None
    try:
        parse_classes(choice.sample_classes, "")
    except UserError as error:
        return str(error).removeprefix(" ")
    return None


def _only_with_prompt(name: str) -> Callable[[SampleChoice], str | None]:
    def check(choice: SampleChoice) -> str | None:
        if getattr(choice, name) is None or choice.sample_prompt:
            return None
        return "is for --pulse-sample-prompt"

    return check


def _every(choice: SampleChoice) -> str | None:
    rows = ("sample_prompt", "sample_classes", "sample_from_data")
    if sum(bool(getattr(choice, name)) for name in rows) > 1:
        others = "--pulse-sample-prompt, --pulse-sample-classes and --pulse-sample-from-data"
        return f"draws one kind of rows: {others} exclude each other"
    if choice.sample_every is None and (given := choice.given):
        return f"is missing: {', '.join(given)} {'are' if len(given) > 1 else 'is'} for pictures"
    return None


@dataclass(frozen=True)
class SampleChoice:
    """Flags of the pictures of a run; none are drawn without ``sample_every``."""

    sample_every: int | None = flag(
        "draw pictures with the weights of every so many steps, of the first one of each start, "
        "and of the last, through the run's own pipeline, into step_N of --pulse-sample-folder, "
        "TensorBoard and W&B. Training's numbers do not change (default: never)",
        metavar="STEPS",
        within=FROM_ONE,
        check=_every,
    )
    sample_prompt: tuple[str, ...] = flag("text to draw (repeatable)", (), metavar="TEXT")
    sample_negative_prompt: str | None = flag(
        "text to be guided away from (default: the empty one)",
        metavar="TEXT",
        check=_only_with_prompt("sample_negative_prompt"),
    )
    sample_classes: str | None = flag(
        "classes to draw: 0-9 or 3,5 (default: the first ten)",
        metavar="CLASSES",
        check=_classes,
    )
    sample_from_data: int | None = flag(
        "draw with the conditioning of the first N validation samples",
        metavar="N",
        within=TO_MILLION,
    )
    sample_count: int = flag(
        "pictures of each prompt, class or sample (default 1)", 1, metavar="N", within=TO_MILLION
    )
    sample_steps: int = flag(
        f"sampler steps (default {DEFAULT_STEPS})", DEFAULT_STEPS, metavar="N", within=TO_MILLION
    )
    sample_guidance: float | None = flag(
        f"classifier-free guidance; 1 is none (default {DEFAULT_GUIDANCE:g}; 1 if nothing is "
        "dropped in training)",
        metavar="W",
        within=FROM_ZERO,
    )
    sample_eta: float = flag(
        "DDIM's share of fresh noise in each step, 0 to 1; not for flow (default 0)",
        0.0,
        metavar="E",
        within=FROM_ZERO_TO_ONE,
    )
    sample_flow_grid: str | None = flag(
        "times of flow before the shift: even (as Flux) or scheduler (as SD3; default: as the "
        "pipeline of imported weights, else even)",
        choices=[str(kind) for kind in FlowGrid],
    )
    sample_seed: int = flag(
        "seed of the starting noise (default 0)", 0, metavar="SEED", within=SEED
    )
    sample_batch_size: int = flag(
        f"samples of one forward pass (default {DEFAULT_BATCH}; 'pulse sample --batch-size')",
        DEFAULT_BATCH,
        metavar="N",
        within=FROM_ONE,
    )
    sample_encoders: str | None = flag(
        "pipeline folder that encodes the prompts and decodes latents (default: --pulse-encoders)",
        metavar="DIR|hf:ID",
    )
    sample_vae: str | None = flag(
        "AutoencoderKL folder that decodes latents (default: vae/ of the encoders)",
        metavar="DIR|hf:ID",
    )
    sample_vae_tiling: bool = flag("decode in tiles", False)
    sample_raw: bool = flag("draw with the trained weights instead of their EMA", False)
    sample_folder: str | None = flag(
        "folder of the pictures (default: samples/ in --save)", metavar="DIR"
    )

    @property
    def given(self) -> list[str]:
        """Flags that differ from their defaults, beside ``sample_every``."""
        return [
            f"--pulse-{each.name.replace('_', '-')}"
            for each in fields(self)
            if each.name != "sample_every" and getattr(self, each.name) != each.default
        ]


def parse_guidance(text: str) -> float | tuple[float, float]:
    """``"5"``, or ``"1,3"`` for the first and the last frame; raises ArgumentTypeError.

    Their range is left to ``guidance_faults``.
    """
    try:
        scales = tuple(map(float, text.split(",")))
    except ValueError:
        scales = ()
    if len(scales) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, or two with a comma between")
    return scales[0] if len(scales) == 1 else (scales[0], scales[1])


def guidance_faults(scales: float | tuple[float, float] | None) -> list[str]:
    """Faults of ``--guidance``."""
    every = scales if isinstance(scales, tuple) else (scales,)
    return [fault for scale in every for fault in FROM_ZERO.faults("--guidance", scale)]


def guidance_text(scales: float | tuple[float, float]) -> str:
    """Text of guidance scales, which ``parse_guidance`` reads."""
    return ",".join(f"{s:g}" for s in (scales if isinstance(scales, tuple) else (scales,)))


def parse_classes(text: str, flag: str = "--classes") -> list[int]:
    """``"0-9"``, ``"3,5"`` or ``"0-2,7"`` as a list, each class once; ``flag`` is for errors."""
    classes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"{flag} {text!r}: write classes as 0-9 or 3,5")
        if int(last if dash else first) > _MOST_CLASS:
            raise UserError(f"{flag} {text[:60]!r}: no model has a class above {_MOST_CLASS:,}")
        if dash and int(last) < int(first):
            raise UserError(f"{flag} {text!r}: {part.strip()} runs backwards")
        classes += range(int(first), int(last if dash else first) + 1)
    return list(dict.fromkeys(classes))
