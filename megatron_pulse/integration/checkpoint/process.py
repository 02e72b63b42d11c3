"""The diffusion process of a run: that of the checkpoint which it begins with, or a new one."""

from __future__ import annotations

import argparse

from megatron_pulse.diffusion.choice import ProcessChoice
from megatron_pulse.diffusion.chosen import chosen_process
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.faults import told
from megatron_pulse.flag_fields import read_flags


def saved_process(args: argparse.Namespace) -> DiffusionProcess:
    """The process of the run whose flags a checkpoint holds.

    Checkpoints from before it was kept have it in their flags, of which some did not count.
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
    """``saved`` with what flags say instead, as far as the weights of the checkpoint fit that.

    A flow's shift and how its times are drawn are a run's choice. What predictions mean is not:
    it can be another only with ``new`` (--pulse-new-process), and only in a run that takes
    weights, not in one that is ``continued`` with its optimizer. Raises ValueError otherwise.
    """
    process = chosen_process(choice, saved)
    different = process.differences(saved)
    if different and (continued or not new):
        door = (
            "begin a new run with its weights: --pretrained-checkpoint, another --save, and "
            "--pulse-new-process"
            if continued
            else "add --pulse-new-process to train its weights to this one"
        )
        raise ValueError(
            told(
                "it was trained as another diffusion process",
                different,
                f"Leave the flags out, or {door}",
            )
        )
    return process
