"""Conversion of a published scheduler's configuration (scheduler_config.json) to a process.

Missing settings get the defaults of the file's own diffusers class; defaults differ between
classes. Settings that would change the process in an unknown way are rejected.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.diffusion.objectives import (
    DIFFUSERS_PREDICTION,
    DIFFUSERS_SCHEDULE,
    DiffusionProcess,
)
from megatron_pulse.diffusion.process_flags import (
    DynamicShift,
    Objective,
    ProcessChoice,
)
from megatron_pulse.diffusion.process_from_flags import chosen_process, drawn_times, family_of
from megatron_pulse.errors import format_faults
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import read_json

OF_BETAS = (
    "DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler",
    "DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LMSDiscreteScheduler",
    "PNDMScheduler", "SASolverScheduler", "UniPCMultistepScheduler", "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler",
)  # fmt: skip
OF_FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
OF_EDM = "EulerDiscreteScheduler"
"""With continuous timesteps; with discrete ones it is a scheduler of betas."""
_REFUSED = {
    "EDM": (
        "a sigma_data of its own (EDM) is unsupported; edm is that of SVD's EulerDiscreteScheduler "
        "with continuous timesteps"
    ),
    "LCM": "the model is distilled to few steps; no objective continues that",
    "TCD": "the model is distilled to few steps; no objective continues that",
    "Wuerstchen": "Stable Cascade's process is unsupported",
    "CMStochastic": "consistency models' process is unsupported",
    "SCM": "the model is distilled to few steps; no objective continues that",
}
type _Reader = Callable[[Mapping[str, Any], ProcessChoice, list[str]], dict[str, Any]]
INVERTED = ("MochiTransformer3DModel", "OmniGenTransformer2DModel")
_OLD_KEYS = {"tensor_format", "clip_sample", "skip_prk_steps", "set_alpha_to_one", "sigma_data"}
# Leftovers of another class, harmless only with these values.
_NEUTRAL = {
    "rescale_betas_zero_snr": False,
    "timestep_type": "discrete",
    "use_flow_sigmas": False,
    "flow_shift": 1.0,
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "sigma_data": 1.0,
    "snr_shift_scale": 1.0,
}
DYNAMIC = {
    "base_shift": "base_shift",
    "max_shift": "max_shift",
    "base_image_seq_len": "base_tokens",
    "max_image_seq_len": "max_tokens",
    "time_shift_type": "kind",
}
_NUMBERS = {
    "num_train_timesteps", "beta_start", "beta_end", "shift", "flow_shift", "base_shift",
    "max_shift", "base_image_seq_len", "max_image_seq_len", "snr_shift_scale",
}  # fmt: skip
TIMES_ARE_SHARES = 1000
"""Timesteps of a process whose published scheduler has one, so that its times are shares."""
SPACINGS = ("leading", "trailing", "linspace")
SCHEDULER_FILE = "scheduler_config.json"
PIPELINE_INDEX = "model_index.json"
_LATENTS_UNCLIPPED = {"steps_offset": 1, "clip_sample": False}
SET_BY_PIPELINE: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline",
            "StableDiffusionPAGPipeline", "StableDiffusionPAGImg2ImgPipeline",
            "StableDiffusionPAGInpaintPipeline", "LEditsPPPipelineStableDiffusion",
            "AltDiffusionPipeline", "AltDiffusionImg2ImgPipeline", "StableDiffusionPipelineSafe",
            "StableDiffusionInpaintPipelineLegacy",
        ),
        _LATENTS_UNCLIPPED,
    ),
    **dict.fromkeys(
        (
            "StableDiffusionInpaintPipeline", "StableDiffusionDiffEditPipeline",
            "CycleDiffusionPipeline",
        ),
        {"steps_offset": 1},
    ),
}  # fmt: skip
"""Scheduler settings that diffusers' pipelines override when they are loaded."""
SNR_SHIFT = "snr_shift_scale"
"""Setting of CogVideoX's schedulers."""
OURS = "_megatron_pulse"
"""Key of ours for the timestep density; diffusers ignores keys with an underscore."""


def find_scheduler(place: Path) -> Path | None:
    """Scheduler file of a component (in it or beside it) or of a file of weights."""
    candidates = [file_beside(place)]
    if place.is_dir():
        candidates = [folder / "scheduler" / SCHEDULER_FILE for folder in (place, place.parent)]
    return next((path for path in candidates if path.is_file()), None)


def file_beside(weights: Path) -> Path:
    """Path of the scheduler's configuration for a single file of weights."""
    return weights.with_name(f"{weights.stem}.{SCHEDULER_FILE}")


def read_process(
    place: Path, choice: ProcessChoice, flags: str = "--"
) -> tuple[DiffusionProcess, str]:
    """Process of published weights: the published scheduler, overridden by ``choice``.

    Without a readable scheduler, ``choice`` must give the settings. The returned text then explains
    the missing scheduler. If ``choice`` or the pipeline overrides a scheduler that was read, the
    text says so.

    Raises PublishedError for missing or contradictory settings. ``flags`` is the prefix of the
    flags named in the error.
    """
    path = find_scheduler(place)
    faults: list[str] = []
    if path is None:
        faults = ["no scheduler config beside it gives its diffusion process"]
    else:
        try:
            said = read_json(path, FileKind.SCHEDULER, infinities=True)
            config, remark = _as_pipeline_loads(path, said)
            inverted = _is_inverted(place)
            process = process_of_scheduler(config, choice, inverted)
            remarks = (_overruled(path, config, process, inverted), remark)
            return process, "\n".join(filter(None, remarks))
        except ValueError as error:
            faults = getattr(error, "faults", [str(error)])
    needed = _unsaid(choice, flags)
    if needed:
        raise PublishedError(
            str(path or place), [*faults, f"give the process: {' and '.join(needed)}"]
        )
    try:
        process = chosen_process(choice)
    except ValueError as error:
        raise PublishedError(str(place), [str(error)]) from error
    return process, format_faults(f"{path} was not read", faults) if path else ""


def _is_inverted(place: Path) -> bool:
    """True of weights whose class takes times from the sample to the noise."""
    if not (place / "config.json").is_file():
        return False
    return read_json(place / "config.json", FileKind.MODEL).get("_class_name") in INVERTED


def _as_pipeline_loads(path: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A scheduler's configuration with what the pipeline that its folder is in sets of it, and
    which settings are others."""
    index = path.parent.parent / PIPELINE_INDEX
    known = config.get("_class_name") in (*OF_BETAS, *OF_FLOW)
    if path.parent.name != "scheduler" or not index.is_file() or not known:
        return config, ""
    pipeline = str(read_json(index, FileKind.PIPELINE).get("_class_name"))
    before = settings_of(config)
    changed = {
        key: value
        for key, value in SET_BY_PIPELINE.get(pipeline, {}).items()
        if key in before and before[key] != value
    }
    if not changed:
        return config, ""
    unsaid = config.get("_use_default_values")
    left = [key for key in unsaid if key not in changed] if isinstance(unsaid, list) else []
    format_faults = ", ".join(
        f"{key} {value} (not {before[key]})" for key, value in changed.items()
    )
    return {
        **config,
        **changed,
        "_use_default_values": left,
    }, f"as {pipeline} sets it: {format_faults}"


def _overruled(
    path: Path, config: Mapping[str, Any], process: DiffusionProcess, inverted: bool
) -> str:
    """Description of the scheduler's own process, if ``process`` differs from it."""
    try:
        own = process_of_scheduler(config, inverted=inverted)
    except PublishedError as error:
        return f"{path} alone is refused: {'; '.join(error.faults)}"
    return "" if own == process else f"by flags; {path} says {own.describe()}"


def _unsaid(choice: ProcessChoice, flags: str) -> list[str]:
    """Flags that are required without a scheduler and were not given."""
    if choice.objective is None:
        return [f"{flags}objective", f"{flags}noise-schedule (or {flags}flow-shift for flow)"]
    if choice.objective == Objective.FLOW:
        return [f"{flags}flow-shift"] if choice.flow_shift is None else []
    said = choice.noise_schedule is not None or choice.trained_betas is not None
    return [] if said else [f"{flags}noise-schedule"]


def process_of_scheduler(
    config: Mapping[str, Any], choice: ProcessChoice | None = None, inverted: bool = False
) -> DiffusionProcess:
    """Process of a scheduler's configuration, overridden by ``choice``.

    ``inverted``: the backbone inverts times itself, as the scheduler's ``invert_sigmas`` does.
    Raises PublishedError with every setting that is unknown or changes the process.
    """
    choice = choice or ProcessChoice()
    name = str(config.get("_class_name"))
    if name not in (*OF_BETAS, *OF_FLOW):
        reason = next((why for part, why in _REFUSED.items() if part in name), None)
        known = ", ".join((*OF_BETAS, *OF_FLOW))
        reason = reason or f"supported classes: {known}"
        raise PublishedError("scheduler", [f"its class is {name}: {reason}"])
    settings = settings_of(config)
    faults = _foreign_keys(config, choice)
    wrong = _faults_of_types(settings)
    if wrong:
        raise PublishedError(name, faults + wrong)
    flow = name in OF_FLOW or settings["prediction_type"] == "flow_prediction"
    own = Objective.FLOW if flow else Objective.EDM if is_edm(settings) else Objective.V
    if choice.objective is not None and family_of(own) != family_of(Objective(choice.objective)):
        values: dict[str, Any] = {"objective": choice.objective}
        values["num_timesteps"] = int(settings["num_train_timesteps"])
        values |= drawn_times(Objective(choice.objective))
        kept = {}
    else:
        of_flow: _Reader = partial(_flow_values, inverted=inverted)
        read: dict[Objective, _Reader]
        read = {Objective.FLOW: of_flow, Objective.EDM: _edm_values, Objective.V: _beta_values}
        values = read[own](settings, choice, faults)
        if not own.has_betas:
            drawn = config.get(OURS)
            values |= drawn if isinstance(drawn, dict) else drawn_times(own)
        kept = {key: value for key, value in config.items() if key != "_use_default_values"}
    if faults:
        raise PublishedError(name, faults)
    try:
        return chosen_process(choice, DiffusionProcess(**values, scheduler=kept))
    except (ValueError, TypeError) as error:
        raise PublishedError(name, [str(error)]) from error


@cache
def defaults_of(name: str) -> Mapping[str, Any]:
    """Settings of a scheduler class, with their defaults."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {
        key: parameter.default
        for key, parameter in parameters.items()
        if key != "self" and parameter.kind != inspect.Parameter.VAR_KEYWORD
    }


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a scheduler's configuration, with the defaults of its class filled in."""
    unsaid = config.get("_use_default_values")
    unsaid = unsaid if isinstance(unsaid, list) else []
    stated = {
        key: value for key, value in config.items() if not key.startswith("_") and key not in unsaid
    }
    return {**defaults_of(str(config["_class_name"])), **stated}


def _foreign_keys(config: Mapping[str, Any], choice: ProcessChoice) -> list[str]:
    """Faults of settings that the scheduler's own class lacks, if they could matter."""
    name = str(config["_class_name"])
    known = {key for each in (*OF_BETAS, *OF_FLOW) for key in defaults_of(each)} | _OLD_KEYS
    faults = []
    for key, value in config.items():
        if key.startswith("_") or value is None or key in defaults_of(name):
            continue
        if key not in known:
            faults.append(f"{key} is {value!r}: unsupported setting")
        elif _NEUTRAL.get(key, value) != value:
            if key == "rescale_betas_zero_snr" and choice.zero_terminal_snr is not None:
                continue
            hint = "; say --[no-]zero-terminal-snr" if key == "rescale_betas_zero_snr" else ""
            faults.append(f"{key} is {value!r}, but {name} has no such setting{hint}")
    return faults


def _faults_of_types(settings: Mapping[str, Any]) -> list[str]:
    """Faults of settings that are not numbers, and of unknown timestep spacings."""
    faults = []
    for key in _NUMBERS & settings.keys():
        value = settings[key]
        if value is None and key in DYNAMIC:
            continue  # unused without a dynamic shift
        if isinstance(value, bool) or not isinstance(value, int | float):
            faults.append(f"{key} is {value!r}; it must be a number")
    count = settings["num_train_timesteps"]
    if isinstance(count, float) and not count.is_integer():
        faults.append(f"num_train_timesteps is {count}; it must be a whole number")
    elif isinstance(count, int | float) and count < 1:
        faults.append(f"num_train_timesteps is {count}; it must be at least 1")
    scale = settings.get(SNR_SHIFT, 1)
    if isinstance(scale, int | float) and not 0 < scale < math.inf:
        faults.append(f"{SNR_SHIFT} is {scale}; it must be above 0")
    spacing = settings.get("timestep_spacing", SPACINGS[0])
    if spacing not in SPACINGS:
        faults.append(f"timestep_spacing is {spacing!r}; known: {', '.join(SPACINGS)}")
    betas = settings.get("trained_betas")
    if betas is not None and not (
        isinstance(betas, list) and all(type(beta) in (int, float) for beta in betas)
    ):
        faults.append("trained_betas must be a list of numbers")
    return sorted(faults)


def _beta_values(
    settings: Mapping[str, Any], choice: ProcessChoice, faults: list[str]
) -> dict[str, Any]:
    predictions = {theirs: ours for ours, theirs in DIFFUSERS_PREDICTION.items()}
    schedules = {theirs: ours for ours, theirs in DIFFUSERS_SCHEDULE.items()}
    prediction, kind = str(settings["prediction_type"]), str(settings["beta_schedule"])
    trained = settings["trained_betas"]
    objective = predictions.get(prediction, choice.objective)
    if objective is None:
        faults.append(f"prediction_type is {prediction!r}; known: {', '.join(predictions)}")
    if settings.get("timestep_type", "discrete") != "discrete":
        faults.append(f"timestep_type is 'continuous', which no pipeline has with {prediction!r}")
    if settings.get("use_flow_sigmas"):
        faults.append(f"use_flow_sigmas with prediction_type {prediction!r}")
    values: dict[str, Any] = {
        "objective": choice.objective or objective or Objective.EPSILON,
        "num_timesteps": int(settings["num_train_timesteps"]),
    }
    if settings.get(SNR_SHIFT, 1) != 1 and (trained is not None or kind in schedules):
        values["trained_betas"] = _shifted_betas(settings)
    elif trained is not None:
        values["trained_betas"] = tuple(trained)
    elif kind in schedules:
        values["schedule"] = schedules[kind]
        if kind != "squaredcos_cap_v2":
            values |= {key: settings[key] for key in ("beta_start", "beta_end")}
    elif choice.noise_schedule is None and choice.trained_betas is None:
        faults.append(
            f"beta_schedule is {kind!r}; known: {', '.join(schedules)} (give any other with "
            "--trained-betas)"
        )
    if choice.zero_terminal_snr is None:
        values["zero_terminal_snr"] = bool(settings.get("rescale_betas_zero_snr"))
    return values


def _shifted_betas(settings: Mapping[str, Any]) -> tuple[float, ...]:
    """Betas of CogVideoX, whose ratio of signal to noise is divided by a scale."""
    import diffusers

    betas = ("beta_start", "beta_end", "beta_schedule", "trained_betas")
    kept = ("num_train_timesteps", *betas, SNR_SHIFT)
    scheduler = diffusers.CogVideoXDDIMScheduler(**{name: settings[name] for name in kept})
    signal = scheduler.alphas_cumprod.double()
    before = signal.roll(1)
    before[0] = 1
    return tuple((1 - signal / before).tolist())


def is_edm(settings: Mapping[str, Any]) -> bool:
    """True if timesteps are ln(sigma) / 4, as diffusers takes them with v alone."""
    continuous = settings.get("timestep_type") == "continuous"
    return continuous and settings["prediction_type"] == "v_prediction"


def _edm_values(
    settings: Mapping[str, Any], choice: ProcessChoice, faults: list[str]
) -> dict[str, Any]:
    return {"objective": Objective.EDM, "num_timesteps": int(settings["num_train_timesteps"])}


def _flow_values(
    settings: Mapping[str, Any], choice: ProcessChoice, faults: list[str], inverted: bool
) -> dict[str, Any]:
    count = int(settings["num_train_timesteps"])
    values: dict[str, Any] = {
        "objective": Objective.FLOW,
        "num_timesteps": TIMES_ARE_SHARES if count == 1 else count,
    }
    if settings.get("invert_sigmas") and not inverted:
        faults.append("invert_sigmas: times run from the sample to the noise")
    if "flow_shift" in settings and settings.get("prediction_type") == "flow_prediction":
        values["shift"] = settings["flow_shift"]
        if not settings["use_flow_sigmas"]:
            faults.append("prediction_type is 'flow_prediction', but use_flow_sigmas is not set")
        if settings.get("use_dynamic_shifting") and choice.flow_shift is None:
            faults.append("use_dynamic_shifting: its numbers are missing; give --flow-shift")
    elif settings.get("use_dynamic_shifting"):
        values["shift"] = DynamicShift(
            **{ours: settings[theirs] for theirs, ours in DYNAMIC.items()}
        )
    else:
        values["shift"] = settings["shift"]
    return values
