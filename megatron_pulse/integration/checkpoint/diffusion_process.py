"""Diffusion process of a run: the checkpoint's, or a new one."""

from __future__ import annotations

import argparse

from megatron_pulse.dataclass_flags import read_flags
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import ProcessChoice
from megatron_pulse.diffusion.process_from_flags import chosen_process
from megatron_pulse.errors import format_faults


def saved_process(args: argparse.Namespace) -> DiffusionProcess:
    """Diffusion process of the run whose flags a checkpoint holds.

    Older checkpoints have it only in their flags, some of which had no effect.
    """
    kept = getattr(args, "pulse_process", None)
    if kept is not None:
        return DiffusionProcess(**kept)
    said = read_flags(ProcessChoice, args, "pulse-")
    if said.objective == "flow":
        return chosen_process(
            ProcessChoice(objective="flow", timestep_density=said.timestep_density)
        )
    return chosen_process(
        ProcessChoice(objective=said.objective, noise_schedule=said.noise_schedule)
    )


def continued_process(
    saved: DiffusionProcess, choice: ProcessChoice, *, continued: bool, new: bool
) -> DiffusionProcess:
    """``saved`` with the changes by flags that the checkpoint's weights permit.

    A flow's shift and its time distribution are choices of a run. The meaning of predictions is
    not. It can change only with ``new`` (--pulse-new-process), in a run that takes weights only,
    and not in one ``continued`` with its optimizer. Raises ValueError otherwise.
    """
    process = chosen_process(choice, saved)
    different = process.differences(saved)
    if different and (continued or not new):
        door = (
            "start a new run with its weights: --pretrained-checkpoint, another --save, and "
            "--pulse-new-process"
            if continued
            else "add --pulse-new-process to train its weights for this process"
        )
        raise ValueError(
            format_faults(
                "it was trained with another diffusion process",
                different,
                f"Leave the flags out, or {door}",
            )
        )
    return process
