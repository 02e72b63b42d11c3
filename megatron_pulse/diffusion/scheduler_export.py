"""Export of a process as a diffusers scheduler, and the scheduler's settings for sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import DynamicShift, Objective
from megatron_pulse.diffusion.process_from_flags import drawn_times
from megatron_pulse.diffusion.scheduler_import import (
    DYNAMIC,
    OF_EDM,
    OF_FLOW,
    OURS,
    SNR_SHIFT,
    TIMES_ARE_SHARES,
    defaults_of,
    is_edm,
    process_of_scheduler,
    settings_of,
)

_SAMPLING = (
    "steps_offset", "set_alpha_to_one", "clip_sample", "clip_sample_range",
    "thresholding", "dynamic_thresholding_ratio", "sample_max_value",
)  # fmt: skip
_FLOW_SAMPLING = (
    "shift_terminal", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
)  # fmt: skip
_EDM = {
    "prediction_type": "v_prediction", "timestep_type": "continuous", "use_karras_sigmas": True,
    "sigma_min": 0.002, "sigma_max": 700.0, "timestep_spacing": "leading", "steps_offset": 1,
    "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012,
}  # fmt: skip
"""SVD's settings. Its betas only bound sigmas, which the settings give."""
_STOCHASTIC = "stochastic_sampling"
_SPACING = "timestep_spacing"
_AS_PUBLISHED = (
    "DDIMScheduler", "DDIMParallelScheduler", "CogVideoXDDIMScheduler", OF_FLOW[0],
)  # fmt: skip
"""Schedulers that sampling here reproduces, beside EDM's."""


def scheduler_of_process(
    process: DiffusionProcess, clip: bool, inverted: bool = False
) -> dict[str, Any]:
    """Configuration of a diffusers scheduler for ``process``.

    The base is ``process.scheduler``, with the differing settings replaced. Without a suitable
    base, the result is DDIM (starting from pure noise, Lin et al. 2024), flow matching's Euler, or
    SVD's Euler for EDM.
    ``clip`` is for pixels in [-1, 1], ``inverted`` for a class that inverts times itself. The
    inverse is ``process_of_scheduler``.
    """
    base = _suitable(process)
    if process.objective == Objective.FLOW:
        base = base or {"_class_name": OF_FLOW[0]}
        wanted = _flow_settings(process, base)
    elif process.objective == Objective.EDM:
        base = base or {"_class_name": OF_EDM, **_EDM}
        wanted = {"num_train_timesteps": process.num_timesteps}
    else:
        if base is None:
            base = {"_class_name": "DDIMScheduler", "clip_sample": clip}
            base |= {**sampling_settings(process), _SPACING: ddim_spacing(process)}
        wanted = process.scheduler_arguments()
    if process.scheduler:  # write back only imported settings
        said = settings_of(base)
        takes = defaults_of(base["_class_name"])
        wanted = {k: value for k, value in wanted.items() if k in takes and said[k] != value}
        if said.get(SNR_SHIFT, 1) != 1:  # the betas have it already
            own = process_of_scheduler(base).trained_betas
            wanted[SNR_SHIFT] = 1.0
            if own == process.trained_betas:
                wanted = {k: v for k, v in wanted.items() if k not in (SNR_SHIFT, "trained_betas")}
        if wanted.get("rescale_betas_zero_snr"):
            wanted[_SPACING] = "trailing"  # "leading" skips the last timestep
    import diffusers

    config = {**base, **wanted, "_diffusers_version": diffusers.__version__}
    config.pop(OURS, None)
    if inverted and process.objective == Objective.FLOW:
        config["invert_sigmas"] = True
    drawn = {name: getattr(process, name) for name in ("density", "logit_mean", "logit_std")}
    usual = {"logit_mean": 0.0, "logit_std": 1.0, **drawn_times(process.objective)}
    if not process.objective.has_betas and drawn != usual:
        config[OURS] = drawn
    return config


def _suitable(process: DiffusionProcess) -> dict[str, Any] | None:
    """Published scheduler's configuration, if its class can express ``process``."""
    if not process.scheduler:
        return None
    config = dict(process.scheduler)
    takes = defaults_of(config["_class_name"])
    settings = settings_of(config)
    if process.objective == Objective.FLOW:
        if config["_class_name"] == OF_FLOW[0]:
            return config
        static = not isinstance(process.shift, DynamicShift)
        return config if static and ("shift" in takes or settings.get("use_flow_sigmas")) else None
    if process.objective == Objective.EDM or is_edm(settings):
        return config if process.objective == Objective.EDM and is_edm(settings) else None
    if "beta_start" not in takes or settings.get("use_flow_sigmas"):
        return None
    if process.objective == Objective.SAMPLE and settings["prediction_type"] != "sample":
        return None  # some classes cannot
    if "rescale_betas_zero_snr" not in takes and (
        process.zero_terminal_snr or settings.get("rescale_betas_zero_snr")
    ):
        return None
    return config


def _flow_settings(process: DiffusionProcess, base: Mapping[str, Any]) -> dict[str, Any]:
    wanted: dict[str, Any] = {"num_train_timesteps": process.num_timesteps}
    if settings_of(base)["num_train_timesteps"] == 1 and process.num_timesteps == TIMES_ARE_SHARES:
        wanted = {}
    if isinstance(process.shift, DynamicShift):
        dynamic = {theirs: getattr(process.shift, ours) for theirs, ours in DYNAMIC.items()}
        return {**wanted, "use_dynamic_shifting": True, **dynamic}
    takes = defaults_of(base["_class_name"])
    wanted["flow_shift" if "flow_shift" in takes else "shift"] = process.shift
    if "use_dynamic_shifting" in takes:
        wanted["use_dynamic_shifting"] = False
    return wanted


def sampling_settings(process: DiffusionProcess) -> dict[str, Any]:
    """Sampling-only settings of the published scheduler, as DDIM or an Euler scheduler take them.

    ``ddim_spacing`` and ``is_stochastic`` are separate.
    """
    if process.objective == Objective.EDM:
        config = _suitable(process)
        settings = _EDM if config is None else settings_of(config)
        return {key: settings[key] for key in defaults_of(OF_EDM) if key in settings}
    if not process.scheduler:
        return {}
    settings = settings_of(process.scheduler)
    keys = _FLOW_SAMPLING if process.objective == Objective.FLOW else _SAMPLING
    unclipped = {"clip_sample"} if SNR_SHIFT in settings else set()  # CogVideoX's never clip
    return {key: settings[key] for key in keys if key in settings.keys() - unclipped}


def ddim_spacing(process: DiffusionProcess) -> str:
    """Spacing of DDIM's timesteps: the published scheduler's, or "trailing".

    "leading" skips the last timestep, so a zero terminal SNR needs "trailing". DDIM steps by equal
    strides, even on the wider grid of "linspace". That matches diffusers' DDIM only. Classes whose
    steps end at the next timestep therefore get "trailing".
    """
    if not process.scheduler:
        return "trailing"
    said = settings_of(process.scheduler).get(_SPACING, "trailing")
    if said == "linspace" and not is_as_published(process):
        return "trailing"
    return "trailing" if said == "leading" and process.zero_terminal_snr else str(said)


def is_as_published(process: DiffusionProcess) -> bool:
    """True if samples are those of the published scheduler's own class in diffusers."""
    if process.objective == Objective.EDM:
        return _suitable(process) is not None
    return bool(process.scheduler) and process.scheduler["_class_name"] in _AS_PUBLISHED


def is_stochastic(process: DiffusionProcess) -> bool:
    """True if flow's Euler adds noise in every step, by the published scheduler's settings."""
    said = settings_of(process.scheduler) if process.scheduler else {}
    return process.objective == Objective.FLOW and bool(said.get(_STOCHASTIC))


def describe_sampler(process: DiffusionProcess) -> str:
    """Describe the sampler in a line: name, grid, and unused settings of the published
    scheduler."""
    if process.objective == Objective.FLOW:
        sampler = "flow Euler" + (", stochastic" if is_stochastic(process) else "")
        takes = {*_FLOW_SAMPLING, _STOCHASTIC, *DYNAMIC, "shift", "flow_shift", "use_flow_sigmas"}
        takes |= {"num_train_timesteps", "use_dynamic_shifting", "prediction_type"}
        own: dict[str, Any] = {}
    elif process.objective == Objective.EDM:
        settings = sampling_settings(process)
        spaced = "Karras" if settings.get("use_karras_sigmas") else settings[_SPACING]
        sampler = f"Euler, {spaced} sigmas"
        takes, own = {*defaults_of(OF_EDM)}, {}
    else:
        own = {_SPACING: ddim_spacing(process)}
        sampler = f"DDIM, {own[_SPACING]} timesteps"
        betas = ("beta_start", "beta_end", "beta_schedule", "trained_betas")
        takes = {*_SAMPLING, *betas, *process.scheduler_arguments()}
    if not process.scheduler:
        return sampler
    name, said = process.scheduler["_class_name"], settings_of(process.scheduler)
    defaults = defaults_of(name)
    unlike = [
        f"{key} {value}"
        for key, value in sorted(said.items())
        if (key in own and own[key] != value)
        or (key in defaults and key not in takes | own.keys() and defaults[key] != value)
    ]
    notes = [] if is_as_published(process) else [f"in place of {name}"]
    notes += [f"without its {', '.join(unlike)}"] if unlike else []
    return ", ".join([sampler, *notes])
