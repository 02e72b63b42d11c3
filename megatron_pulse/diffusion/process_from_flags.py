"""Construction of a diffusion process from flags."""

from __future__ import annotations

from typing import Any

from megatron_pulse.diffusion.objectives import (
    EDM_MEAN,
    EDM_STD,
    MODE_SCALE,
    DiffusionProcess,
)
from megatron_pulse.diffusion.process_flags import (
    DynamicShift,
    Objective,
    ProcessChoice,
    TimestepDensity,
    parse_shift,
)
from megatron_pulse.errors import faults_in, format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import parse_json, read_text

_BETAS = ("schedule", "beta_start", "beta_end", "trained_betas")
_AS_SAID = {
    "beta_start", "beta_end", "zero_terminal_snr", "num_timesteps", "logit_mean", "logit_std",
    "mode_scale", "min_time", "max_time",
}  # fmt: skip


def chosen_process(choice: ProcessChoice, base: DiffusionProcess | None = None) -> DiffusionProcess:
    """``base`` with the given flags of ``choice`` applied; without a base, a new process.

    Dependent options that were not given take the values of a new process. Betas depend on their
    schedule; times and the published scheduler depend on the objective. A new process is flow with
    logit-normal times (see ``drawn_times``) and no shift. Raises ValueError for contradictory
    options.
    """
    fresh = base is None
    objective = Objective(choice.objective or (Objective.FLOW if base is None else base.objective))
    values = {} if base is None else dict(vars(base))
    if base is not None and family_of(objective) != family_of(base.objective):
        fresh = True
        values = {"num_timesteps": base.num_timesteps}  # no scheduler does both
    if fresh:
        values |= drawn_times(objective)
    values["objective"] = objective
    if choice.noise_schedule is not None or choice.trained_betas is not None:
        if choice.noise_schedule != values.get("schedule"):
            values |= dict.fromkeys(_BETAS)
        values["schedule"] = choice.noise_schedule
    if choice.trained_betas is not None:
        values["trained_betas"] = _read_betas(choice.trained_betas)
        values["num_timesteps"] = len(values["trained_betas"])
    if choice.flow_shift is not None:
        shift = parse_shift(choice.flow_shift)
        kept = choice.flow_shift == "dynamic" and isinstance(values.get("shift"), DynamicShift)
        values["shift"] = values["shift"] if kept else shift
    if choice.timestep_density is not None:
        values["density"] = TimestepDensity(choice.timestep_density)
        if values["density"] != TimestepDensity.LOGIT_NORMAL:
            values |= {"logit_mean": 0.0, "logit_std": 1.0}
        if values["density"] != TimestepDensity.MODE:
            values["mode_scale"] = MODE_SCALE
    for name in _AS_SAID & choice.said.keys():
        values[name] = choice.said[name]
    return DiffusionProcess(**values)


def family_of(objective: Objective) -> str:
    """Objectives of one family have the same schedulers: those of betas, flow, or EDM."""
    return "betas" if objective.has_betas else str(objective)


def drawn_times(objective: Objective) -> dict[str, Any]:
    """Density of the times of a new process; SVD's for EDM."""
    if objective.has_betas:
        return {}
    found: dict[str, Any] = {"density": TimestepDensity.LOGIT_NORMAL}
    if objective == Objective.EDM:
        found |= {"logit_mean": EDM_MEAN, "logit_std": EDM_STD}
    return found


def _read_betas(path: str) -> tuple[float, ...]:
    text = read_text(path, FileKind.BETAS)
    try:
        betas = parse_json(text)
    except ValueError as error:
        raise ValueError(
            format_faults(f"{path} cannot be read as {FileKind.BETAS}", faults_in(error))
        ) from error
    if not isinstance(betas, list) or not all(type(beta) in (int, float) for beta in betas):
        raise ValueError(f"{path} cannot be read as {FileKind.BETAS}: it is not a list of numbers")
    return tuple(float(beta) for beta in betas)
